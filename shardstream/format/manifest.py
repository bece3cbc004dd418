"""Encode and decode the manifest ``index.json``: shards with their counts, sizes and checksums.

The format is ``wids-shard-index-v1`` of WebDataset's "wids" with additional keys (`version`, `fields`,
`total_bytes`, and for a shard its `sha256`, and `index` where that is not next to it), so each library reads the files of the other. A manifest of many shards is written in
pages (see `manifest_pages`), which wids does not read.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardstream.errors import ManifestError
from shardstream.format.manifest_pages import (
    PAGED_KIND,
    PagedManifest,
    can_be_paged,
    decode_paged,
    encode_pages,
)
from shardstream.format.names import find_repeated, is_name
from shardstream.format.shard_info import COUNT_LIMIT, ShardInfo

MANIFEST_NAME = "index.json"
KIND = "wids-shard-index-v1"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The shards and fields of a dataset.

    Args:
        name: Name of the dataset, for display only.
        shards: Shards in the order of the dataset.
        fields: Field -> number of samples that have it.
    """

    shards: Sequence[ShardInfo]
    name: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)

    @property
    def nsamples(self) -> int:
        """Samples in all shards."""
        return sum(shard.nsamples or 0 for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(shard.filesize or 0 for shard in self.shards)


def encode_manifest_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the files of a manifest by name, in the order in which to write them: ``index.json`` last.

    A manifest of over `MAX_LISTED_SHARDS` shards is written in pages, if they are all in its folder and their counts are known.
    """
    if not can_be_paged(manifest.shards):
        return {MANIFEST_NAME: encode_manifest(manifest)}
    document, name, pages = encode_pages(
        manifest.shards, name=manifest.name, fields=manifest.fields
    )
    return {name: pages, MANIFEST_NAME: _encode(document)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of an ``index.json`` that lists all shards; equal manifests give equal bytes."""
    shardlist = [
        {
            key: value
            for key, value in (
                ("url", shard.url),
                ("nsamples", shard.nsamples),
                ("filesize", shard.filesize),
                ("sha256", shard.sha256),
                ("index", shard.index),
            )
            if value is not None
        }
        for shard in manifest.shards
    ]
    document = {
        "__kind__": KIND,
        "wids_version": 1,
        "version": VERSION,
        "name": manifest.name,
        "nsamples": manifest.nsamples,
        "total_bytes": manifest.total_bytes,
        "fields": dict(sorted(manifest.fields.items())),
        "shardlist": shardlist,
    }
    return _encode(document)


def decode_manifest(data: bytes, *, url: str) -> Manifest | PagedManifest:
    """Read the bytes of an ``index.json``.

    Raises:
        ManifestError: If they are not a manifest, or one of a later version.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"not JSON: {error}", remedy="run 'shardstream index' to write it again", shard=url
        ) from error
    if not isinstance(document, dict) or document.get("__kind__") not in (KIND, PAGED_KIND):
        found = document.get("__kind__") if isinstance(document, dict) else type(document).__name__
        raise ManifestError(
            f"not a manifest of shards: __kind__ is {reprlib.repr(found)}, not {KIND!r}",
            remedy="name the tars themselves, or run 'shardstream index'",
            shard=url,
        )
    for keyword, known in (("wids_version", 1), ("version", VERSION)):
        if document.get(keyword, known) != known:
            raise ManifestError(
                f"{keyword} is {reprlib.repr(document[keyword])}, this shardstream reads {known}",
                remedy="upgrade shardstream, or run 'shardstream index' to write it again",
                shard=url,
            )
    if document["__kind__"] == PAGED_KIND:
        return decode_paged(document, url=url)
    shardlist, fields = document.get("shardlist"), document.get("fields", {})
    if (
        not isinstance(shardlist, list)
        or not isinstance(fields, dict)
        or not all(type(count) is int for count in fields.values())
    ):
        raise ManifestError(
            "'shardlist' must be a list and 'fields' a mapping to counts",
            remedy="run 'shardstream index'",
            shard=url,
        )
    shards = tuple(_decode_shard(entry, url=url) for entry in shardlist)
    repeated = find_repeated(shard.url.removeprefix("./") for shard in shards)
    if repeated is not None:
        raise ManifestError(
            f"the shard {repeated} is listed twice, so its samples would be read twice",
            remedy="run 'shardstream index' to write the manifest again",
            shard=url,
        )
    for what in ("nsamples", "filesize"):
        if sum(getattr(shard, what) or 0 for shard in shards) >= COUNT_LIMIT:
            raise ManifestError(
                f"the sum of {what} is over the limit of {COUNT_LIMIT}",
                remedy="run 'shardstream index'",
                shard=url,
            )
    name = document.get("name", "")
    return Manifest(shards=shards, name=name if isinstance(name, str) else "", fields=fields)


def _decode_shard(entry: Any, *, url: str) -> ShardInfo:
    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("url"), str)
        or not is_name(entry["url"])
    ):
        raise ManifestError(
            f"a shard without a 'url': {reprlib.repr(entry)}",
            remedy="run 'shardstream index'",
            shard=url,
        )
    counts = {key: entry.get(key) for key in ("nsamples", "filesize")}
    for key, value in counts.items():
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < COUNT_LIMIT
        ):
            raise ManifestError(
                f"{key} of {entry['url'][:200]} is {reprlib.repr(value)}",
                remedy="run 'shardstream index'",
                shard=url,
            )
    texts = {key: entry.get(key) for key in ("sha256", "index")}
    for key, value in texts.items():
        if value is not None and not (isinstance(value, str) and is_name(value)):
            raise ManifestError(
                f"{key} of {entry['url'][:200]} is {reprlib.repr(value)}",
                remedy="run 'shardstream index'",
                shard=url,
            )
    return ShardInfo(url=entry["url"], **texts, **counts)


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # names that are not valid UTF-8
        return (json.dumps(document, indent=1) + "\n").encode()
