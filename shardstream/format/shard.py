"""Describe a shard, and encode, decode and compute its indexes: offsets of its samples, ``NAME.tar.idx``, and of their members, ``NAME.idx``.

``NAME.tar.idx``: little-endian uint64: the offset of each sample's first header, then the end of the last sample: n + 1 numbers for n
samples. Megatron Energon writes and reads the same.

``NAME.idx``: DALI's text index v1.2, as its tool ``wds2idx`` writes it: a line ``v1.2 N``, then one line for each of the N samples with
``extension offset size name`` for each of its members, separated by single spaces. Offsets are those of the bytes, not of the header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from shardstream.errors import IndexMismatchError, SampleError, plural, redact
from shardstream.format.names import is_meta_name, split_member_name
from shardstream.format.samples import iter_groups
from shardstream.format.tar_reader import (
    BLOCK_BYTES,
    RECORD_BYTES,
    Member,
    ReadAt,
    TarDiagnostics,
    iter_members,
    iter_whole,
)

Offsets = npt.NDArray[np.int64]
"""Shape (n + 1,): sample i of n is the bytes ``offsets[i]`` to ``offsets[i + 1]``."""

OFFSET_BYTES = 8
INDEX_SUFFIX = ".idx"
TAR_SUFFIX = ".tar"
COLUMNS_SUFFIX = ".cols.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Entry of one shard in the manifest.

    Args:
        url: URL, relative to the manifest or absolute.
        nsamples: Number of samples; None if unknown.
        filesize: Bytes of the tar; None if unknown.
        sha256: Hex digest of the tar; None if unknown.
        index: URL of its index, relative to the manifest or absolute; None if that is next to the tar.
    """

    url: str
    nsamples: int | None = None
    filesize: int | None = None
    sha256: str | None = None
    index: str | None = None

    @property
    def index_url(self) -> str:
        """URL of the index; relative if the shard's is."""
        return self.url + INDEX_SUFFIX if self.index is None else self.index

    @property
    def members_url(self) -> str:
        """URL of its index of members, next to the index; relative if the shard's is."""
        return self.index_url.removesuffix(TAR_SUFFIX + INDEX_SUFFIX) + INDEX_SUFFIX

    @property
    def columns_url(self) -> str:
        """URL of its file of columns, next to the index; relative if the shard's is."""
        return self.index_url.removesuffix(INDEX_SUFFIX) + COLUMNS_SUFFIX


def fingerprint(shards: Iterable[ShardInfo]) -> str:
    """Return 16 hex digits that change with the shards' names (without their folder), counts, order and sizes.

    The folder is not included, so that a copy of a dataset can resume the states of its original.
    """
    digest = sha256()
    for shard in shards:
        # Without the signature, which may be renewed; a path has none.
        url = redact(shard.url) if "://" in shard.url else shard.url
        name = url.rsplit("/", 1)[-1]
        digest.update(
            f"{name}\0{shard.nsamples}\0{shard.filesize}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()[:16]


def checksum(shards: Iterable[ShardInfo]) -> str | None:
    """Return 16 hex digits that change with the bytes of the shards; None if the sha256 of one is unknown."""
    digest = sha256()
    for shard in shards:
        if shard.sha256 is None:
            return None
        digest.update(shard.sha256.encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """Result of one pass over a tar.

    Args:
        offsets: The index.
        fields: Field -> number of samples that have it.
        keys: Key of each sample, in order.
    """

    offsets: Offsets
    fields: dict[str, int]
    keys: list[str]


def encode_index(offsets: Offsets) -> bytes:
    """Return the bytes of an ``.idx`` file.

    >>> encode_index(np.array([0, 1536])).hex()
    '00000000000000000006000000000000'
    """
    return offsets.astype("<u8").tobytes()


def decode_index(data: bytes, *, url: str) -> Offsets:
    """Read the bytes of an ``.idx`` file.

    Raises:
        IndexMismatchError: If they are not growing multiples of 512.
    """
    if len(data) < OFFSET_BYTES or len(data) % OFFSET_BYTES:
        raise _mismatch(f"an index of {len(data)} bytes is cut", url)
    offsets = np.frombuffer(data, dtype="<u8").astype(np.int64)
    if (offsets < 0).any() or (np.diff(offsets) <= 0).any() or (offsets % 512).any():
        raise _mismatch("an index must hold growing multiples of 512", url)
    return offsets


def num_samples(index_bytes: int) -> int:
    """Return the number of samples in an ``.idx`` file of that size."""
    return max(0, index_bytes // OFFSET_BYTES - 1)


def check_extent(offsets: Offsets, *, filesize: int, nsamples: int | None, url: str) -> None:
    """Check an index against the size and sample count of its tar.

    Raises:
        IndexMismatchError: If it exceeds the tar's size, or its count differs from the manifest.
    """
    found = len(offsets) - 1
    if nsamples is not None and found != nsamples:
        raise _mismatch(
            f"the index has {plural(found, 'sample')}, the manifest says {nsamples}", url
        )
    if offsets[-1] > filesize:
        raise _mismatch(
            f"the index ends at byte {offsets[-1]}, but the tar ends at {filesize}: the tar was cut or written again",
            url,
            "fetch it again, or run 'shardstream index' again",
        )


def has_usual_end(end: int, size: int) -> bool:
    """Return whether a tar of a size can end with its last sample: two empty blocks follow, which many programs pad to a record.

    >>> has_usual_end(3072, 4096), has_usual_end(3072, 10240), has_usual_end(3072, 8192)
    (True, True, False)
    """
    smallest = end + 2 * BLOCK_BYTES
    return size <= smallest or size == -smallest // RECORD_BYTES * -RECORD_BYTES


def check_end(read: ReadAt, end: int, size: int, url: str) -> None:
    """Check that a tar has no members of samples after the end of its index.

    Args:
        read: Reads bytes of the tar.
        end: The end of its index.
        size: Its size.
        url: Its URL, for messages.

    Raises:
        IndexMismatchError: If it has.
        ShardError: If it is damaged there.
    """
    if any(read(end, BLOCK_BYTES)):  # seldom: such as a README
        members = iter_members(read, start=end, end=size, shard=url)
        if next(iter_groups(members, shard=url), None) is not None:
            raise _mismatch("the tar has more samples than its index, or was written again", url)


def check_index_size(found: int, size: int, url: str) -> None:
    """Check the length of an index.

    Raises:
        IndexMismatchError: If it is another one.
    """
    if found != size:
        raise _mismatch(
            f"the index has {found} bytes, {size} are needed for the number of samples in the manifest",
            url,
        )


def _mismatch(
    what: str, url: str, remedy: str = "run 'shardstream index' again"
) -> IndexMismatchError:
    return IndexMismatchError(what, remedy=remedy, shard=url)


def scan_shard(
    read: ReadAt, *, end: int | None, shard: str, diagnostics: TarDiagnostics | None = None
) -> ShardScan:
    """Find the samples of a tar by its headers, without reading bodies.

    Raises:
        ShardError: If the tar is damaged, truncated or empty, or has data after its end.
        SampleError: If a key returns after another key, or a sample has a field twice.
    """
    diagnostics = TarDiagnostics() if diagnostics is None else diagnostics
    return scan_members(
        iter_whole(read, end=end, shard=shard, diagnostics=diagnostics), shard=shard
    )


def scan_members(members: Iterable[Member], *, shard: str) -> ShardScan:
    """Find the samples among the members of a tar.

    Raises:
        SampleError: If a key returns after another key, or a sample has a field twice.
    """
    starts: list[int] = []
    keys: list[str] = []
    fields: dict[str, int] = {}
    last = 0
    for group in iter_groups(members, shard=shard):
        starts.append(group.start)
        keys.append(group.key)
        last = group.end
        for field in group.fields:
            fields[field] = fields.get(field, 0) + 1
    offsets = np.array([*starts, last], dtype=np.int64)
    return ShardScan(offsets=offsets, fields=fields, keys=keys)


def encode_member_index(members: Sequence[Member], *, shard: str = "") -> bytes:
    """Return the bytes of a DALI index for the members of a tar, which `iter_groups` has checked.

    >>> members = [("a.jpg", 0, 512, 9), ("a.cls", 1024, 1536, 1), ("b.jpg", 2048, 2560, 7)]
    >>> print(encode_member_index(members).decode(), end="")
    v1.2 2
    jpg 512 9 a.jpg cls 1536 1 a.cls
    jpg 2560 7 b.jpg

    Raises:
        SampleError: If a name has a space, which this format cannot hold.
    """
    lines: list[list[str]] = []
    last: str | None = None
    for name, header, body, size in members:
        parts = split_member_name(name)
        if parts is None or is_meta_name(name):
            continue
        key = parts[0]
        if len(name.split()) != 1 or not name.isprintable():
            raise SampleError(
                "DALI's index cannot hold a name with spaces",
                remedy="rename the member, or leave out members (--members)",
                shard=shard,
                offset=header,
                key=key,
            )
        if key != last:
            lines.append([])
            last = key
        # The extension keeps its case: DALI's reader has an option for case sensitivity.
        lines[-1].append(f"{name[len(key) + 1 :]} {body} {size} {name}")
    text = "".join(f"{' '.join(line)}\n" for line in lines)
    return f"v1.2 {len(lines)}\n{text}".encode()


def decode_member_index(data: bytes, *, url: str = "") -> list[list[tuple[str, int, int, str]]]:
    r"""Return the members of each sample as field, offset and size of its bytes, and name, in order.

    >>> decode_member_index(b"v1.2 1\njpg 512 9 a.jpg cls 1536 1 a.cls\n")
    [[('jpg', 512, 9, 'a.jpg'), ('cls', 1536, 1, 'a.cls')]]

    Raises:
        IndexMismatchError: If it is not such an index.
    """
    try:
        return _parse_members(data.decode())
    except ValueError as error:
        raise _mismatch(
            f"not an index of members: {error}", url, "run 'shardstream index --members' again"
        ) from error


def _parse_members(text: str) -> list[list[tuple[str, int, int, str]]]:
    title, *lines = text.removesuffix("\n").split("\n")
    samples = []
    end = 0
    for line in lines:
        words = line.split(" ")
        fields, offsets, sizes, names = (words[first::4] for first in range(4))
        if len(names) != len(fields):
            raise ValueError(f"{len(words)} words in a line, not 4 for each member")
        samples.append([*zip(fields, map(int, offsets), map(int, sizes), names, strict=True)])
        for _, offset, size, _ in samples[-1]:
            if offset < end or size < 0:
                raise ValueError("members that overlap")
            end = offset + size
    if title != f"v1.2 {len(samples)}":
        raise ValueError(f"{len(samples)} samples under the title {title!r}")
    return samples
