"""Encode and decode the manifest of many shards: a short ``index.json``, and a NumPy file with a record of each shard.

``index.json`` holds the totals, and of each chunk of 1,024 records the samples up to its end and its SHA-256, so that a reader needs no
more to open a dataset, and one range of the other file to find a shard. The name of that file, ``shards-*.npy``, has a part of its SHA-256,
so an ``index.json`` never refers to the records of another dataset. Shards that are appended go to a further file, with the last chunk if that had
fewer records; small files are merged with the next one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import IndexMismatchError, ManifestError
from shardstream.format.dataset_version import (
    COUNT_LIMIT,
    FIRST_VERSION,
    VERSION_KEY,
    DatasetVersion,
    decode_version,
    encode_version,
)
from shardstream.format.names import find_repeated, is_name
from shardstream.format.shard import ShardInfo, checksum, fingerprint
from shardstream.format.tar_reader import BLOCK_BYTES

BINARY_KIND = "shardstream-binary-index-v1"
CHUNK_SHARDS = 1024
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
_FOLDER = re.compile(r"(append|compact|fields)-[0-9a-f]+/")  # in that of the manifest
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
class RecordsFile:
    """A file with the records of some chunks.

    Args:
        records: Its name, in the folder of ``index.json``.
        first_chunk: Number of its first chunk; its last one is before that of the next file.
        header_bytes: Offset of the first record.
        name_bytes: Bytes of a name in a record.
    """

    records: str
    first_chunk: int
    header_bytes: int
    name_bytes: int

    def __post_init__(self) -> None:
        _require(is_records_name(self.records), "records")
        for keyword in ("first_chunk", "header_bytes", "name_bytes"):
            value = getattr(self, keyword)
            limit = _LIMITS.get(keyword, COUNT_LIMIT)
            _require(type(value) is int and 0 <= value < limit, keyword)
        _require(self.name_bytes > 0, "a size is 0")

    @property
    def record_type(self) -> np.dtype[np.void]:
        """Type of a record; a SHA-256 of zeros is unknown."""
        return _record_type(self.name_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryManifest:
    """An ``index.json`` that refers to a file of records, with its keys: n shards in m chunks.

    Args:
        name: Name of the dataset, for display only.
        nsamples: Samples in all shards.
        total_bytes: Bytes of all tars.
        fields: Field -> number of samples that have it.
        fingerprint: As `fingerprint` of all shards; with further files a hash of that of before and of the new ones'.
        checksum: As `checksum` of all shards; with further files as the fingerprint.
        records: Name of the first file of records, in the same folder.
        num_shards: n.
        is_sorted: Whether the names of the shards are sorted.
        header_bytes: Offset of the first record in this file.
        name_bytes: Bytes of a name in its records.
        chunk_shards: Shards of each chunk; the last may have fewer.
        chunk_ends: Samples up to the end of each chunk, m numbers.
        chunk_names: Name of the first shard of each chunk, m names.
        chunk_sha256: SHA-256 of each chunk, m hex digests.
        further: Files after the first.
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
    further: tuple[RecordsFile, ...] = ()
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
        starts = [one.first_chunk for one in self.files]
        in_order = all(one < other for one, other in pairwise([*starts, num_chunks]))
        _require(in_order or not (self.further or num_chunks), "further")
        _require(_PART.fullmatch(self.fingerprint) is not None, "fingerprint")
        _require(self.checksum is None or _PART.fullmatch(self.checksum) is not None, "checksum")

    @property
    def files(self) -> tuple[RecordsFile, ...]:
        """The files of records, in order."""
        first = RecordsFile(
            records=self.records,
            first_chunk=0,
            header_bytes=self.header_bytes,
            name_bytes=self.name_bytes,
        )
        return (first, *self.further)

    def file_of(self, number: int) -> RecordsFile:
        """Return the file of a chunk."""
        return next(one for one in reversed(self.files) if one.first_chunk <= number)

    def chunk_range(self, number: int) -> tuple[int, int]:
        """Return the offsets of a chunk and of its end in its file."""
        file = self.file_of(number)
        size, before = file.record_type.itemsize, file.first_chunk * self.chunk_shards
        first = number * self.chunk_shards - before
        last = min(first + self.chunk_shards, self.num_shards - before)
        return file.header_bytes + first * size, file.header_bytes + last * size

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
            records = np.frombuffer(data, self.file_of(number).record_type)
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
    """Return whether records can hold the shards: all are in one folder, with known counts and sizes."""
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
    records = _records_of(shards)
    name_bytes = records.dtype["name"].itemsize
    file, data = _encode_records(records, first_chunk=0)
    manifest = BinaryManifest(
        name=name,
        nsamples=int(records["nsamples"].sum()),
        total_bytes=int(records["filesize"].sum()),
        fields=dict(sorted(fields.items())),
        fingerprint=fingerprint(shards),
        checksum=checksum(shards),
        records=file.records,
        num_shards=len(shards),
        is_sorted=all(one.url < other.url for one, other in pairwise(shards)),
        header_bytes=file.header_bytes,
        name_bytes=name_bytes,
        chunk_shards=CHUNK_SHARDS,
        dataset_version=version,
        **_describe_chunks(records, CHUNK_SHARDS, 0),
    )
    return binary_document(manifest), manifest.records, data


def extend_binary(
    manifest: BinaryManifest, shards: Sequence[ShardInfo], read_chunk: Callable[[int], Records]
) -> tuple[BinaryManifest, bytes]:
    """Return a manifest with further shards, and the bytes of its last file of records.

    Args:
        manifest: The manifest of before.
        shards: Shards with names in the folder of the manifest, or in one in it.
        read_chunk: Returns the records of a chunk, by its number.
    """
    size, count = manifest.chunk_shards, manifest.num_shards + len(shards)
    begin, end = manifest.num_shards // size, -(-count // size)
    files = [one for one in manifest.files if one.first_chunk < begin]
    # Each record is written again about log n times, and there are log n files.
    while len(files) > 1 and begin - files[-1].first_chunk <= end - begin:
        begin = files.pop().first_chunk
    kept = [read_chunk(number) for number in range(begin, len(manifest.chunk_ends))]
    new = _records_of(shards)
    longest = max(one.dtype["name"].itemsize for one in (*kept, new))
    kind = _record_type(longest)
    records = np.concatenate([one.astype(kind) for one in (*kept, new)])
    file, data = _encode_records(records, first_chunk=begin)
    last = names_of(kept[-1][-1:] if kept else read_chunk(begin - 1)[-1:])[0]
    urls = [last, *(one.url for one in shards)]
    chunks = _describe_chunks(records, size, manifest.chunk_ends[begin - 1] if begin else 0)
    extended: dict[str, Any] = {
        key: [*getattr(manifest, key)[:begin], *chunks[key]] for key in chunks
    }
    if files:
        extended["further"] = (*files[1:], file)
    else:
        extended |= {"further": (), **asdict(file)}
        del extended["first_chunk"]
    is_sorted = manifest.is_sorted and all(one < other for one, other in pairwise(urls))
    after = replace(
        manifest,
        nsamples=manifest.nsamples + int(new["nsamples"].sum()),
        total_bytes=manifest.total_bytes + int(new["filesize"].sum()),
        fingerprint=_chained(manifest.fingerprint, fingerprint(shards)) or "",
        checksum=_chained(manifest.checksum, checksum(shards)),
        num_shards=count,
        is_sorted=is_sorted,
        **extended,
    )
    return after, data


def _chained(before: str | None, new: str | None) -> str | None:
    """Return 16 hex digits of a hash of two; None if one is unknown."""
    if before is None or new is None:
        return None
    return sha256(f"{before}\n{new}\n".encode()).hexdigest()[:16]


def _records_of(shards: Sequence[ShardInfo]) -> Records:
    names = [shard.url.encode("utf-8", "surrogateescape") for shard in shards]
    name_bytes = -(-max(map(len, names)) // _NAME_STEP) * _NAME_STEP
    records = np.empty(len(shards), _record_type(name_bytes))
    records["nsamples"] = [shard.nsamples for shard in shards]
    records["filesize"] = [shard.filesize for shard in shards]
    records["sha256"] = [bytes.fromhex(shard.sha256 or "") for shard in shards]
    records["name"] = names
    return records


def _encode_records(records: Records, *, first_chunk: int) -> tuple[RecordsFile, bytes]:
    stream = io.BytesIO()
    np.save(stream, records)
    data = stream.getvalue()
    file = RecordsFile(
        records=f"shards-{sha256(data).hexdigest()[:16]}.npy",
        first_chunk=first_chunk,
        header_bytes=len(data) - records.nbytes,
        name_bytes=records.dtype["name"].itemsize,
    )
    return file, data


def _describe_chunks(records: Records, size: int, before: int) -> dict[str, Any]:
    """Return the ends, names and hashes of the chunks of records, after a number of samples."""
    totals = (before + np.cumsum(records["nsamples"])).tolist()
    chunks = [slice(start, start + size) for start in range(0, len(records), size)]
    return {
        "chunk_ends": [totals[chunk][-1] for chunk in chunks],
        "chunk_names": [names_of(records[chunk][:1])[0] for chunk in chunks],
        "chunk_sha256": [sha256(records[chunk].tobytes()).hexdigest() for chunk in chunks],
    }


def binary_document(manifest: BinaryManifest) -> dict[str, Any]:
    """Return the document for ``index.json``."""
    document = {"__kind__": BINARY_KIND, "version": 1} | asdict(manifest)
    del document[VERSION_KEY]
    if not manifest.further:
        del document["further"]
    is_first = manifest.dataset_version is FIRST_VERSION
    return document if is_first else document | encode_version(manifest.dataset_version)


def decode_binary(document: Mapping[str, Any]) -> BinaryManifest:
    """Read the document of an ``index.json`` that refers to records.

    Raises:
        KeyError, TypeError, ValueError: If it is not consistent.
    """
    optional = {VERSION_KEY, "further"}
    names = [one.name for one in fields(BinaryManifest) if one.name not in optional]
    values = {name: document[name] for name in names}
    version = decode_version(document) if VERSION_KEY in document else FIRST_VERSION
    further = tuple(RecordsFile(**one) for one in document.get("further", ()))
    return BinaryManifest(**values, further=further, dataset_version=version)


def decode_all_shards(
    read: Callable[[str], bytes], manifest: BinaryManifest, *, url: str
) -> list[ShardInfo]:
    """Return all shards, with relative URLs.

    Args:
        read: Returns the bytes of a file of records, by its name.
        manifest: The decoded ``index.json``.
        url: URL of the ``index.json``, for messages.

    Raises:
        IndexMismatchError: If they are not those of the manifest.
        ManifestError: If they are those of an invalid one.
    """
    shards: list[ShardInfo] = []
    data = {file.records: read(file.records) for file in manifest.files}
    for number in range(len(manifest.chunk_sha256)):
        start, end = manifest.chunk_range(number)
        chunk = data[manifest.file_of(number).records][start:end]
        shards += shards_of(manifest.decode_chunk(chunk, number, url=url), "")
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
    """Return whether names are those of files in the folder of their manifest, or in that of a change, also where a client decodes "%2f"."""
    joined = "\n".join(names)  # one test for all: a chunk is checked for each of its uses
    if "/" in joined:
        names = [_FOLDER.sub("", name, count=1) if _FOLDER.match(name) else name for name in names]
        joined = "\n".join(names)
    return (
        is_name(joined)
        and not any(sign in joined for sign in ("/", "\\", "::", "%"))
        and not {"", ".", ".."}.intersection(names)
    )
