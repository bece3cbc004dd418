"""Encode and decode the manifest of many shards: a short ``index.json`` and a file of pages next to it.

``index.json`` holds the totals, and the place, first shard, samples and SHA-256 of each page. The other file, ``index-pages-*.jsonl``, has
one line for each page of 1,024 shards: JSON lists of their names, counts, sizes and checksums. Its name has a part of its SHA-256, so an
``index.json`` never refers to the pages of another dataset.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import ManifestError
from shardstream.format.names import find_repeated, is_name
from shardstream.format.shard_info import COUNT_LIMIT, ShardInfo, checksum, fingerprint
from shardstream.format.tar_reader import BLOCK_BYTES

PAGED_KIND = "shardstream-paged-index-v1"
PAGE_SHARDS = 1024
MAX_LISTED_SHARDS = 4096
"""A manifest of more shards is written in pages."""
PAGE_LIMIT_BYTES = 16 << 20
"""More than 1,024 shards with the longest names take."""
_PAGES_NAME = re.compile(r"index-pages-[0-9a-f]{16}\.jsonl")
_HEX = re.compile(r"[0-9a-f]+")
_REMEDY = "run 'shardstream index' to write it again"

Numbers = npt.NDArray[np.int64]


def is_pages_name(name: str) -> bool:
    """Return whether a file holds the pages of a manifest, by its name.

    >>> is_pages_name("index-pages-0123456789abcdef.jsonl"), is_pages_name("index-pages.jsonl")
    (True, False)
    """
    return _PAGES_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedManifest:
    """An ``index.json`` that refers to pages. There are m pages of n shards.

    Args:
        pages_name: Name of the file of pages, in the same folder.
        num_shards: n.
        page_shards: Shards of each page; the last may have fewer.
        ends: Shape (m + 1,): the offset of each page in its file, in bytes, then the size of the file.
        firsts: Shape (m + 1,): the number of the first sample of each page, then the number of samples.
        first_names: Name of the first shard of each page.
        digests: SHA-256 of each page, in hex digits.
        is_sorted: Whether the names of the shards are sorted.
        total_bytes: Bytes of all tars.
        fingerprint: As `fingerprint` of all shards.
        checksum: As `checksum` of all shards.
        name: Name of the dataset, for display only.
        fields: Field -> number of samples that have it.
    """

    pages_name: str
    num_shards: int
    page_shards: int
    ends: Numbers
    firsts: Numbers
    first_names: tuple[str, ...]
    digests: tuple[str, ...]
    is_sorted: bool
    total_bytes: int
    fingerprint: str
    checksum: str | None
    name: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)

    def bounds(self, number: int) -> Sequence[str]:
        """Return the first name of a page, and that of the next; nothing if names are not sorted."""
        return self.first_names[number : number + 2] if self.is_sorted else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPage:
    """Some successive shards of a dataset; n shards.

    Args:
        names: Name of each shard.
        nsamples: Samples of each, shape (n,).
        filesizes: Bytes of each tar, shape (n,).
        sha256: Hex digest of each tar, or None.
    """

    names: Sequence[str]
    nsamples: Numbers
    filesizes: Numbers
    sha256: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.names)

    def shard(self, number: int, folder: str) -> ShardInfo:
        """Return the shard at a place in this page, in ``folder``, which ends with a slash or is empty."""
        return ShardInfo(
            url=folder + self.names[number],
            nsamples=int(self.nsamples[number]),
            filesize=int(self.filesizes[number]),
            sha256=self.sha256[number],
        )

    def first(self, count: int) -> ManifestPage:
        """Return the first shards of this page."""
        return ManifestPage(
            names=self.names[:count],
            nsamples=self.nsamples[:count],
            filesizes=self.filesizes[:count],
            sha256=self.sha256[:count],
        )


def can_be_paged(shards: Sequence[ShardInfo]) -> bool:
    """Return whether there are so many shards that pages help, all in one folder, and with known counts and sizes."""
    if len(shards) <= MAX_LISTED_SHARDS:
        return False
    are_known = all(
        one.nsamples is not None and one.filesize is not None and one.index is None
        for one in shards
    )
    return are_known and _are_plain([one.url for one in shards])


def encode_pages(
    shards: Sequence[ShardInfo], *, name: str, fields: Mapping[str, int]
) -> tuple[dict[str, Any], str, bytes]:
    """Return the document for ``index.json``, and the name and the bytes of the file of pages.

    Args:
        shards: At least one; see `can_be_paged`.
        name: Name of the dataset.
        fields: Field -> number of samples that have it.
    """
    lines, ends, firsts, digests = list[bytes](), [0], [0], list[str]()
    for first in range(0, len(shards), PAGE_SHARDS):
        some = shards[first : first + PAGE_SHARDS]
        lines.append(encode_page(_page_of(some)))
        ends.append(ends[-1] + len(lines[-1]))
        firsts.append(firsts[-1] + sum(shard.nsamples or 0 for shard in some))
        digests.append(hashlib.sha256(lines[-1]).hexdigest())
    pages_name = f"index-pages-{hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}.jsonl"
    document = {
        "__kind__": PAGED_KIND,
        "version": 1,
        "name": name,
        "shards": len(shards),
        "nsamples": firsts[-1],
        "total_bytes": sum(shard.filesize or 0 for shard in shards),
        "fields": dict(sorted(fields.items())),
        "fingerprint": fingerprint(shards),
        "checksum": checksum(shards),
        "sorted": all(one.url < other.url for one, other in pairwise(shards)),
        "page_shards": PAGE_SHARDS,
        "pages": {
            "url": pages_name,
            "ends": ends[1:],
            "nsamples": firsts[1:],
            "first": [shard.url for shard in shards[::PAGE_SHARDS]],
            "sha256": digests,
        },
    }
    return document, pages_name, b"".join(lines)


def encode_page(page: ManifestPage) -> bytes:
    """Return the line of a page; equal pages give equal bytes."""
    document = {
        "url": list(page.names),
        "nsamples": page.nsamples.tolist(),
        "filesize": page.filesizes.tolist(),
        "sha256": list(page.sha256),
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode_paged(document: Mapping[str, Any], *, url: str) -> PagedManifest:
    """Read the document of an ``index.json`` that refers to pages.

    Raises:
        ManifestError: If it is not consistent.
    """
    try:
        return _decode_paged(document)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ManifestError(
            f"a manifest in pages that is wrong or incomplete: {error}", remedy=_REMEDY, shard=url
        ) from error


def decode_page(
    data: bytes, *, nshards: int, nsamples: int, url: str, bounds: Sequence[str] = ()
) -> ManifestPage:
    """Read a page.

    Args:
        data: Its line.
        nshards: Shards that it must have.
        nsamples: Samples that they must have.
        url: URL of the file, for messages.
        bounds: See `PagedManifest.bounds`: with them, no name is in two pages.

    Raises:
        ManifestError: If it is invalid.
    """
    try:
        document = json.loads(data)
        sizes = document["filesize"]
        page = ManifestPage(
            names=document["url"],
            nsamples=_counts(document["nsamples"], "nsamples"),
            filesizes=_counts(sizes, "filesize"),
            sha256=document["sha256"],
        )
        _require(_are_plain(page.names), "url")
        _require((twice := find_repeated(page.names)) is None, f"{twice} is listed twice")
        ordered = [*bounds[:1], *page.names[1:], *bounds[1:]]
        _require(not bounds or page.names[0] == bounds[0], "first")
        _require(not bounds or all(one < other for one, other in pairwise(ordered)), "sorted")
        _require(isinstance(page.sha256, list), "sha256")
        _require({type(one) for one in page.sha256} <= {str, type(None)}, "sha256")
        lengths = {len(page.names), len(page.nsamples), len(page.filesizes), len(page.sha256)}
        _require(lengths == {nshards}, f"number of shards, {sorted(lengths)} instead of {nshards}")
        _require(sum(document["nsamples"]) == nsamples, "sum of nsamples")
        _require(sum(sizes) < COUNT_LIMIT, "sum of filesize")
        fit = page.nsamples <= page.filesizes // BLOCK_BYTES  # each sample has a header
        _require(bool(fit.all()), "more samples than fit in the filesize")
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(
            f"a page of the manifest is wrong or incomplete: {error}", remedy=_REMEDY, shard=url
        ) from error
    return page


def decode_pages(
    read: Callable[[int, int], bytes], manifest: PagedManifest, *, url: str
) -> tuple[ShardInfo, ...]:
    """Read all pages, one after the other; the shards have relative URLs.

    Args:
        read: Returns the bytes from one offset of the file of pages to another.
        manifest: The decoded ``index.json``.
        url: Its URL, for messages.

    Raises:
        ManifestError: If they do not match the manifest.
    """
    shards: list[ShardInfo] = []
    counts = np.diff(manifest.firsts).tolist()
    for number, (start, end) in enumerate(pairwise(manifest.ends.tolist())):
        data = read(start, end)
        if hashlib.sha256(data).hexdigest() != manifest.digests[number]:
            raise ManifestError("its pages do not match index.json", remedy=_REMEDY, shard=url)
        left = manifest.num_shards - len(shards)
        nshards = min(manifest.page_shards, left)
        page = decode_page(
            data,
            nshards=nshards,
            nsamples=counts[number],
            url=url,
            bounds=manifest.bounds(number),
        )
        shards += [page.shard(place, "") for place in range(len(page))]
    if (twice := find_repeated(shard.url for shard in shards)) is not None:
        raise ManifestError(f"the shard {twice} is listed twice", remedy=_REMEDY, shard=url)
    return tuple(shards)


def _page_of(shards: Sequence[ShardInfo]) -> ManifestPage:
    return ManifestPage(
        names=[shard.url for shard in shards],
        nsamples=np.array([shard.nsamples for shard in shards], dtype=np.int64),
        filesizes=np.array([shard.filesize for shard in shards], dtype=np.int64),
        sha256=[shard.sha256 for shard in shards],
    )


def _decode_paged(document: Mapping[str, Any]) -> PagedManifest:
    pages, page_shards, num_shards = document["pages"], document["page_shards"], document["shards"]
    for keyword, value in (("page_shards", page_shards), ("shards", num_shards)):
        _require(type(value) is int and 0 < value < COUNT_LIMIT, keyword)
    fields, name, digest = document["fields"], document["name"], document["checksum"]
    manifest = PagedManifest(
        pages_name=str(pages["url"]),
        num_shards=num_shards,
        page_shards=page_shards,
        ends=_ascending(pages["ends"], "ends"),
        firsts=_ascending(pages["nsamples"], "nsamples"),
        first_names=tuple(pages["first"]),
        digests=tuple(pages["sha256"]),
        is_sorted=document["sorted"] is True,
        total_bytes=document["total_bytes"],
        fingerprint=str(document["fingerprint"]),
        checksum=digest,
        name=name if isinstance(name, str) else "",
        fields=fields,
    )
    count = -(-num_shards // page_shards)
    lengths = {len(manifest.ends) - 1, len(manifest.firsts) - 1}
    _require(lengths | {len(manifest.first_names), len(manifest.digests)} == {count}, "pages")
    longest = int(np.diff(manifest.ends).max())
    _require(
        longest <= PAGE_LIMIT_BYTES,
        f"a page of {longest:,} bytes, the limit is {PAGE_LIMIT_BYTES:,}",
    )
    _require(is_pages_name(manifest.pages_name), "url")
    _require(_are_plain(manifest.first_names), "first")
    _require(all(map(_is_hex, manifest.digests)), "sha256")
    _require(_is_hex(manifest.fingerprint) and (digest is None or _is_hex(digest)), "fingerprint")
    _require(document["nsamples"] == int(manifest.firsts[-1]), "nsamples")
    total = manifest.total_bytes
    _require(type(total) is int and 0 <= total < COUNT_LIMIT, "total_bytes")
    are_counts = isinstance(fields, dict) and all(type(one) is int for one in fields.values())
    _require(are_counts, "fields")
    in_order = all(one < other for one, other in pairwise(manifest.first_names))
    _require(in_order or not manifest.is_sorted, "sorted")
    return manifest


def _ascending(values: Any, keyword: str) -> Numbers:
    """Return 0 and ascending whole numbers as an array.

    Raises:
        ValueError: If they are something else.
    """
    found = np.concatenate(([0], _counts(values, keyword)))
    _require(bool((np.diff(found) >= 0).all()), keyword)
    return found


def _counts(values: Any, keyword: str) -> Numbers:
    """Return whole numbers from 0 as an array.

    Raises:
        ValueError: If they are something else, or too large.
    """
    _require(isinstance(values, list) and {type(value) for value in values} <= {int}, keyword)
    _require(all(0 <= value < COUNT_LIMIT for value in values), keyword)
    return np.array(values, dtype=np.int64)


def _require(is_valid: bool, what: str) -> None:
    if not is_valid:
        raise ValueError(what)


def _are_plain(names: Any) -> bool:
    """Return whether names are those of files alone: in the folder of their manifest, also where a client decodes "%2f"."""
    if not isinstance(names, list | tuple) or {type(name) for name in names} != {str}:
        return False
    joined = "\n".join(names)  # one test for all: a page is checked for each of its uses
    return (
        is_name(joined)
        and not any(sign in joined for sign in ("/", "\\", "::", "%"))
        and not {"", ".", ".."}.intersection(names)
    )


def _is_hex(text: Any) -> bool:
    return isinstance(text, str) and _HEX.fullmatch(text) is not None
