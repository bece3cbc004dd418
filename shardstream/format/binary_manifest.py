"""Encode and decode the manifest of many shards: a short ``index.json``, and a NumPy file with a record of each shard.

``index.json`` holds the totals, and of each chunk of 1,024 records the samples up to its end and its SHA-256, so that a reader needs no
more to open a dataset, and one range of the other file to find a shard. The name of that file, ``shards-*.npy``, has a part of its SHA-256,
so an ``index.json`` never refers to the records of another dataset.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import IndexMismatchError, ManifestError
from shardstream.format.dataset_version import (
    FIRST_VERSION,
    VERSION_KEY,
    DatasetVersion,
    decode_version,
    encode_version,
)
from shardstream.format.names import find_repeated, is_name
from shardstream.format.shard_info import COUNT_LIMIT, ShardInfo, checksum, fingerprint
from shardstream.format.tar_reader import BLOCK_BYTES

BINARY_KIND = "shardstream-binary-index-v1"
CHUNK_SHARDS = 1024
MAX_LISTED_SHARDS = 4096
"""The shards of a larger manifest are written as records."""
_COLUMNS = [("nsamples", "<i8"), ("filesize", "<i8"), ("sha256", "V32")]  # before the name
_NAME_STEP = 16  # of name_bytes, so that it seldom changes when shards are added
# Below these: a chunk has 17 MB at most.
_LIMITS = {
    "nsamples": COUNT_LIMIT,
    "total_bytes": COUNT_LIMIT,
    "num_shards": COUNT_LIMIT,
    "header_bytes": 1 << 16,
    "name_bytes": 1 << 12,
    "chunk_shards": 1 << 12,
}
# "index-pages-*" had the records of an earlier version: an index that is written again deletes it, too.
_FILE_NAME = re.compile(r"shards-[0-9a-f]{16}\.npy|index-pages-[0-9a-f]{16}\.jsonl")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[0-9a-f]{16}")
_REMEDY = "run 'shardstream index' to write the manifest again"

Numbers = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]


def is_records_name(name: str) -> bool:
    """Return whether a file holds the records of shards, by its name.

    >>> is_records_name("shards-0123456789abcdef.npy"), is_records_name("shards.npy")
    (True, False)
    """
    return _FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryManifest:
    """An ``index.json`` that refers to a file of records, with its keys: n shards in m chunks.

    Args:
        name: Name of the dataset, for display only.
        nsamples: Samples in all shards.
        total_bytes: Bytes of all tars.
        fields: Field -> number of samples that have it.
        fingerprint: As `fingerprint` of all shards.
        checksum: As `checksum` of all shards.
        records: Name of the file of records, in the same folder.
        num_shards: n.
        is_sorted: Whether the names of the shards are sorted.
        header_bytes: Offset of the first record.
        name_bytes: Bytes of a name in a record.
        chunk_shards: Shards of each chunk; the last may have fewer.
        chunk_ends: Samples up to the end of each chunk, m numbers.
        chunk_names: Name of the first shard of each chunk, m names.
        chunk_sha256: SHA-256 of each chunk, m hex digests.
        dataset_version: The version of the dataset.

    Raises:
        ValueError: If they are not consistent.
    """

    name: str
    nsamples: int
    total_bytes: int
    fields: Mapping[str, int]
    fingerprint: str
    checksum: str | None
    records: str
    num_shards: int
    is_sorted: bool
    header_bytes: int
    name_bytes: int
    chunk_shards: int
    chunk_ends: Sequence[int]
    chunk_names: Sequence[str]
    chunk_sha256: Sequence[str]
    dataset_version: DatasetVersion = FIRST_VERSION

    def __post_init__(self) -> None:
        for keyword, limit in _LIMITS.items():
            value = getattr(self, keyword)
            _require(type(value) is int and 0 <= value < limit, keyword)
        _require(self.chunk_shards > 0 and self.name_bytes > 0, "a size is 0")
        num_chunks = -(-self.num_shards // self.chunk_shards)
        for keyword, kind in (("chunk_ends", int), ("chunk_names", str), ("chunk_sha256", str)):
            values = getattr(self, keyword)
            is_valid = isinstance(values, list) and set(map(type, values)) == {kind}
            _require(is_valid and len(values) == num_chunks, keyword)
        firsts = [0, *self.chunk_ends]
        in_order = all(one <= other for one, other in pairwise(firsts))
        _require(in_order and firsts[-1] == self.nsamples, "chunk_ends")
        _require(is_records_name(self.records), "records")
        _require(_PART.fullmatch(self.fingerprint) is not None, "fingerprint")
        _require(self.checksum is None or _PART.fullmatch(self.checksum) is not None, "checksum")

    @property
    def record_type(self) -> np.dtype[np.void]:
        """Type of a record; a SHA-256 of zeros is unknown."""
        return _record_type(self.name_bytes)

    def chunk_range(self, number: int) -> tuple[int, int]:
        """Return the offsets of a chunk and of its end in the file."""
        size, first = self.record_type.itemsize, number * self.chunk_shards
        last = min(first + self.chunk_shards, self.num_shards)
        return self.header_bytes + first * size, self.header_bytes + last * size

    def decode_chunk(self, data: bytes, number: int, *, url: str) -> Records:
        """Read a chunk.

        Args:
            data: Its bytes.
            number: Its number.
            url: URL of the file, for messages.

        Returns:
            Shape (n,), of `record_type`.

        Raises:
            IndexMismatchError: If they are not those of the manifest.
            ManifestError: If they are those of an invalid one.
        """
        start, end = self.chunk_range(number)
        if len(data) != end - start or sha256(data).hexdigest() != self.chunk_sha256[number]:
            raise IndexMismatchError(
                f"chunk {number} of the shards does not match its sha256 in index.json",
                remedy=f"fetch the dataset again, or {_REMEDY}",
                shard=url,
                offset=start,
            )
        try:
            records = np.frombuffer(data, self.record_type)
            self._check(records, number)
        except ValueError as error:
            raise ManifestError(
                f"chunk {number} of the shards is invalid: {error}",
                remedy=_REMEDY,
                shard=url,
                offset=start,
            ) from error
        return records

    def _check(self, records: Records, number: int) -> None:
        nsamples = self.chunk_ends[number] - (self.chunk_ends[number - 1] if number else 0)
        names, counts, sizes = names_of(records), records["nsamples"], records["filesize"]
        _require(_are_plain(names), "a name that is no file name")
        _require((twice := find_repeated(names)) is None, f"{twice} is listed twice")
        _require(names[0] == self.chunk_names[number], f"the first shard is {names[0]}")
        ordered = [*names, *self.chunk_names[number + 1 : number + 2]]  # none is in two chunks
        in_order = not self.is_sorted or all(one < other for one, other in pairwise(ordered))
        _require(in_order, "the names are not sorted")
        _require(sum(sizes.tolist()) <= self.total_bytes, "filesizes over total_bytes")
        fit = (counts >= 0) & (counts <= sizes // BLOCK_BYTES)  # each sample has a header
        _require(bool(fit.all()), "more samples than fit in the filesize")
        _require(int(counts.sum()) == nsamples, f"{counts.sum()} samples instead of {nsamples}")


def can_be_binary(shards: Sequence[ShardInfo]) -> bool:
    """Return whether there are so many shards that records help, all in one folder, and with known counts and sizes."""
    if len(shards) <= MAX_LISTED_SHARDS:
        return False
    are_known = all(
        None not in (one.nsamples, one.filesize)
        and one.index is None
        and (one.sha256 is None or _SHA256.fullmatch(one.sha256))
        for one in shards
    )
    return are_known and _are_plain([one.url for one in shards])


def encode_binary(
    shards: Sequence[ShardInfo],
    *,
    name: str,
    fields: Mapping[str, int],
    version: DatasetVersion = FIRST_VERSION,
) -> tuple[dict[str, Any], str, bytes]:
    """Return the document for ``index.json``, and the name and the bytes of the file of records.

    Args:
        shards: At least one; see `can_be_binary`.
        name: Name of the dataset.
        fields: Field -> number of samples that have it.
        version: The version of the dataset.
    """
    names = [shard.url.encode("utf-8", "surrogateescape") for shard in shards]
    name_bytes = -(-max(map(len, names)) // _NAME_STEP) * _NAME_STEP
    records = np.empty(len(shards), _record_type(name_bytes))
    records["nsamples"] = [shard.nsamples for shard in shards]
    records["filesize"] = [shard.filesize for shard in shards]
    records["sha256"] = [bytes.fromhex(shard.sha256 or "") for shard in shards]
    records["name"] = names
    file = io.BytesIO()
    np.save(file, records)
    data = file.getvalue()
    totals = np.cumsum(records["nsamples"]).tolist()
    chunks = [slice(start, start + CHUNK_SHARDS) for start in range(0, len(shards), CHUNK_SHARDS)]
    manifest = BinaryManifest(
        name=name,
        nsamples=totals[-1],
        total_bytes=int(records["filesize"].sum()),
        fields=dict(sorted(fields.items())),
        fingerprint=fingerprint(shards),
        checksum=checksum(shards),
        records=f"shards-{sha256(data).hexdigest()[:16]}.npy",
        num_shards=len(shards),
        is_sorted=all(one.url < other.url for one, other in pairwise(shards)),
        header_bytes=len(data) - records.nbytes,
        name_bytes=name_bytes,
        chunk_shards=CHUNK_SHARDS,
        chunk_ends=[totals[chunk][-1] for chunk in chunks],
        chunk_names=[shards[chunk.start].url for chunk in chunks],
        chunk_sha256=[sha256(records[chunk].tobytes()).hexdigest() for chunk in chunks],
        dataset_version=version,
    )
    return binary_document(manifest), manifest.records, data


def binary_document(manifest: BinaryManifest) -> dict[str, Any]:
    """Return the document for ``index.json``."""
    document = {"__kind__": BINARY_KIND, "version": 1} | asdict(manifest)
    del document[VERSION_KEY]
    is_first = manifest.dataset_version is FIRST_VERSION
    return document if is_first else document | encode_version(manifest.dataset_version)


def decode_binary(document: Mapping[str, Any]) -> BinaryManifest:
    """Read the document of an ``index.json`` that refers to records.

    Raises:
        KeyError, TypeError, ValueError: If it is not consistent.
    """
    names = [one.name for one in fields(BinaryManifest) if one.name != VERSION_KEY]
    values = {name: document[name] for name in names}
    version = decode_version(document) if VERSION_KEY in document else FIRST_VERSION
    return BinaryManifest(**values, dataset_version=version)


def decode_all_shards(data: bytes, manifest: BinaryManifest, *, url: str) -> list[ShardInfo]:
    """Return all shards, with relative URLs.

    Args:
        data: The bytes of the file of records.
        manifest: The decoded ``index.json``.
        url: URL of the file, for messages.

    Raises:
        IndexMismatchError: If they are not those of the manifest.
        ManifestError: If they are those of an invalid one.
    """
    shards: list[ShardInfo] = []
    for number in range(len(manifest.chunk_sha256)):
        start, end = manifest.chunk_range(number)
        shards += shards_of(manifest.decode_chunk(data[start:end], number, url=url), "")
    return shards


def shards_of(records: Records, folder: str) -> list[ShardInfo]:
    """Return the shards of some records, in ``folder``, which ends with a slash or is empty."""
    return [
        ShardInfo(
            url=folder + name.decode("utf-8", "surrogateescape"),
            nsamples=nsamples,
            filesize=filesize,
            sha256=digest.hex() if any(digest) else None,
        )
        for nsamples, filesize, digest, name in records.tolist()
    ]


def names_of(records: Records) -> list[str]:
    """Return the names of the shards of some records."""
    return [name.decode("utf-8", "surrogateescape") for name in records["name"].tolist()]


def _record_type(name_bytes: int) -> np.dtype[np.void]:
    return np.dtype([*_COLUMNS, ("name", f"S{name_bytes}")])


def _require(is_valid: bool, what: str) -> None:
    if not is_valid:
        raise ValueError(what)


def _are_plain(names: Sequence[str]) -> bool:
    """Return whether names are those of files alone: in the folder of their manifest, also where a client decodes "%2f"."""
    joined = "\n".join(names)  # one test for all: a chunk is checked for each of its uses
    return (
        is_name(joined)
        and not any(sign in joined for sign in ("/", "\\", "::", "%"))
        and not {"", ".", ".."}.intersection(names)
    )
