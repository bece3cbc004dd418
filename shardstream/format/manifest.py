"""Encode and decode the manifest ``index.json``, shards with their counts, sizes and checksums; and ``classes.json``, the names of classes.

The format is ``wids-shard-index-v1`` of WebDataset's "wids" with additional keys (`version`, `fields`,
`total_bytes`, `dataset_version` where it was changed since it was packed, and for a shard its `sha256`, and `index` where that is not next
to it), so each library reads the files of the other.
wids does not read the manifest of many shards (see `binary_manifest`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardstream.errors import ManifestError
from shardstream.format.binary_manifest import (
    BINARY_KIND,
    BinaryManifest,
    binary_document,
    can_be_binary,
    decode_binary,
    encode_binary,
)
from shardstream.format.dataset_version import (
    COUNT_LIMIT,
    FIRST_VERSION,
    VERSION_KEY,
    DatasetVersion,
    decode_version,
    encode_version,
)
from shardstream.format.names import find_repeated, is_name
from shardstream.format.shard import ShardInfo

MANIFEST_NAME = "index.json"
MAX_LISTED_SHARDS = 4096
"""The shards of a larger manifest are written as records."""
KIND = "wids-shard-index-v1"
VERSION = 1
_REMEDY = "run 'shardstream index' to write it again"
_KEYS = ("url", "nsamples", "filesize", "sha256", "index")  # of a shard
CLASSES_NAME = "classes.json"


class ShardTotals:
    """Base of values with shards."""

    __slots__ = ()
    shards: Sequence[ShardInfo]

    @property
    def nsamples(self) -> int:
        """Samples in all shards."""
        return sum(shard.nsamples or 0 for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(shard.filesize or 0 for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ShardTotals):
    """The shards and fields of a dataset.

    Args:
        name: Name of the dataset, for display only.
        shards: Shards in the order of the dataset.
        fields: Field -> number of samples that have it.
        dataset_version: The version of the dataset.
    """

    shards: Sequence[ShardInfo]
    name: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)
    dataset_version: DatasetVersion = FIRST_VERSION

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)


def encode_manifest_files(manifest: Manifest | BinaryManifest) -> dict[str, bytes]:
    """Return the files of a manifest by name, in the order in which to write them: ``index.json`` last.

    A manifest of over `MAX_LISTED_SHARDS` shards has a file of records, if they are all in its folder and their counts are known; that of
    a `BinaryManifest` is there.
    """
    if isinstance(manifest, BinaryManifest):
        return {MANIFEST_NAME: _encode(binary_document(manifest))}
    if len(manifest.shards) <= MAX_LISTED_SHARDS or not can_be_binary(manifest.shards):
        return {MANIFEST_NAME: encode_manifest(manifest)}
    document, name, records = encode_binary(
        manifest.shards,
        name=manifest.name,
        fields=manifest.fields,
        version=manifest.dataset_version,
    )
    return {name: records, MANIFEST_NAME: _encode(document)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of an ``index.json`` that lists all shards; equal manifests give equal bytes."""
    shardlist = [
        {key: value for key in _KEYS if (value := getattr(shard, key)) is not None}
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
    if manifest.dataset_version is not FIRST_VERSION:
        document |= encode_version(manifest.dataset_version)
    return _encode(document)


def decode_manifest(data: bytes, *, url: str) -> Manifest | BinaryManifest:
    """Read the bytes of an ``index.json``.

    Raises:
        ManifestError: If they are not a manifest, or one of a later version.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"not JSON: {error}", url) from error
    if not isinstance(document, dict) or document.get("__kind__") not in (KIND, BINARY_KIND):
        found = document.get("__kind__") if isinstance(document, dict) else type(document).__name__
        is_mds = isinstance(document, dict) and "shards" in document and "shardlist" not in document
        raise _invalid(
            f"not a manifest of shards: __kind__ is {reprlib.repr(found)}, not {KIND!r}",
            url,
            "if it is one of MDS, name its shards: FOLDER/*.mds"
            if is_mds
            else "name the tars themselves, or run 'shardstream index'",
        )
    for keyword, known in (("wids_version", 1), ("version", VERSION)):
        if document.get(keyword, known) != known:
            raise _invalid(
                f"{keyword} is {reprlib.repr(document[keyword])}, this shardstream reads {known}",
                url,
                "upgrade shardstream, or run 'shardstream index' to write it again",
            )
    fields, name = document.setdefault("fields", {}), document.get("name", "")
    if not isinstance(fields, dict) or not set(map(type, fields.values())) <= {int}:
        raise _invalid("'fields' must be a mapping to counts", url)
    document["name"] = name = name if isinstance(name, str) else ""
    if document["__kind__"] == BINARY_KIND:
        try:
            return decode_binary(document)
        except (KeyError, TypeError, ValueError) as error:
            raise _invalid(f"wrong or incomplete: {error}", url) from error
    version = FIRST_VERSION
    try:
        if VERSION_KEY in document:
            version = decode_version(document)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(
            f"the entry of its version is wrong, or of a later shardstream: {error}",
            url,
            "upgrade shardstream, or restore index.json as it was",
        ) from error
    shards = _decode_shards(document, url)
    return Manifest(shards=shards, name=name, fields=fields, dataset_version=version)


def _decode_shards(document: Mapping[str, Any], url: str) -> tuple[ShardInfo, ...]:
    shardlist = document.get("shardlist")
    if not isinstance(shardlist, list):
        raise _invalid("'shardlist' must be a list", url)
    shards: dict[str, ShardInfo] = {}
    sums = {"nsamples": 0, "filesize": 0}
    for entry in shardlist:
        shard = _decode_shard(entry, url)
        name = shard.url.removeprefix("./")
        if name in shards:
            raise _invalid(
                f"the shard {name} is listed twice, so its samples would be read twice", url
            )
        shards[name] = shard
        for what in sums:
            sums[what] += getattr(shard, what) or 0
    for what, total in sums.items():
        if total >= COUNT_LIMIT:
            raise _invalid(f"the sum of {what} is over the limit of {COUNT_LIMIT}", url)
    return tuple(shards.values())


def _decode_shard(entry: Any, url: str) -> ShardInfo:
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise _invalid(f"a shard without a 'url': {reprlib.repr(entry)}", url)
    values: dict[str, Any] = dict(zip(_KEYS, map(entry.get, _KEYS), strict=True))
    for key, value in values.items():
        if key in ("nsamples", "filesize"):
            is_valid = type(value) is int and 0 <= value < COUNT_LIMIT
        else:
            is_valid = isinstance(value, str) and is_name(value)
        if value is not None and not is_valid:
            raise _invalid(f"{key} of {entry['url'][:200]} is {reprlib.repr(value)}", url)
    return ShardInfo(**values)


def _invalid(message: str, url: str, remedy: str = _REMEDY) -> ManifestError:
    return ManifestError(message, remedy=remedy, shard=url)


def _encode(document: Any) -> bytes:
    try:
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # names that are not valid UTF-8
        return (json.dumps(document, indent=1) + "\n").encode()


def encode_classes(names: Sequence[str]) -> str:
    r"""Return the text of ``classes.json``, a JSON list in which item n is the name of class n; equal names give equal text.

    >>> encode_classes(["ant", "bee"])
    '[\n "ant",\n "bee"\n]\n'
    """
    return _encode(list(names)).decode()


def decode_classes(data: bytes, *, url: str) -> tuple[str, ...]:
    """Read the bytes of a ``classes.json``.

    Raises:
        ManifestError: If they are not a list of unique names.
    """
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"not JSON: {error}", remedy="write a list of class names", shard=url
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ManifestError(
            f"not a list of class names: {reprlib.repr(names)}",
            remedy='write ["cat", "dog"]',
            shard=url,
        )
    if (twice := find_repeated(names)) is not None:
        raise ManifestError(
            f"the class {twice!r} is listed twice", remedy="list each once", shard=url
        )
    return tuple(names)
