"""Group consecutive tar members of one key to samples, by WebDataset's rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from zlib import adler32

from shardstream.errors import IndexMismatchError, SampleError, ShardError
from shardstream.format.names import RESERVED_FIELDS, is_meta_name, split_member_name
from shardstream.format.tar_reader import (
    BLOCK_BYTES,
    Member,
    ReadAt,
    SlicedBuffer,
    TarDiagnostics,
    is_plain_header,
    iter_members,
    iter_whole,
    known_sums,
)

FIELDS_LIMIT = 1 << 16
"""Maximum of fields of one sample."""

STREAMED_SAMPLE_LIMIT_BYTES = 2 << 30
"""Maximum size of one sample in a stream of unknown length, which may be a decompression bomb."""

# With fewer samples in total or per slice, NumPy's calls cost more than they save.
MIN_SAMPLES, MIN_SAMPLES_PER_SLICE = 40, 6

KEYS_KEPT = 1 << 20  # in each of two sets, 200 MB in total

Sample = dict[str, Any]
"""A plain dict: ``__key__``, ``__url__`` and one entry per field, as bytes until it is decoded."""


class Group(NamedTuple):
    """Offsets of one sample in its tar."""

    key: str
    start: int
    """Offset of its first header."""
    end: int
    """Offset after the padding of its last member."""
    fields: dict[str, tuple[int, int]]
    """Field -> offset and size of its bytes."""


def iter_groups(members: Iterable[Member], *, shard: str = "") -> Iterator[Group]:
    """Group members to samples; members without a field (such as README) and ``__meta__`` names are skipped.

    Raises:
        SampleError: If a sample has a field twice or over 65,536 fields, or a key returns after another key, so that
            the sample would be read as two. Detected among at least the last million keys of a shard.
    """
    hashes: set[int] = set()
    older_hashes: set[int] = set()
    key, start, end = None, 0, 0
    fields: dict[str, tuple[int, int]] = {}
    for name, header, body, size in members:
        parts = split_member_name(name)
        if parts is None or (name[0] == "_" and is_meta_name(name)):
            continue
        if parts[0] != key:
            if key is not None:
                yield Group(key, start, end, fields)
            key, start, fields = parts[0], header, {}
            # Hashes, because keys may be long. Python salts them per process, so collisions cannot be crafted.
            key_hash = hash(key)
            if key_hash in hashes or key_hash in older_hashes:
                raise SampleError(
                    "the key returns after another key: its sample is in two parts",
                    remedy="write the members of a sample one after another",
                    shard=shard,
                    offset=header,
                    key=key,
                )
            hashes.add(key_hash)
            if len(hashes) >= KEYS_KEPT:
                older_hashes, hashes = hashes, set()
        if len(fields) >= FIELDS_LIMIT:
            raise SampleError(
                f"a sample of over {FIELDS_LIMIT} fields",
                remedy="split it",
                shard=shard,
                offset=header,
                key=key[:80],
            )
        if parts[1] in fields or parts[1] in RESERVED_FIELDS:
            raise _duplicate_error(parts[1], key, shard, header)
        fields[parts[1]] = body, size
        end = body + (size + 511 & -512)
    if key is not None:
        yield Group(key, start, end, fields)


def iter_samples(
    read: ReadAt,
    *,
    end: int | None = None,
    start: int = 0,
    shard: str,
    diagnostics: TarDiagnostics | None = None,
) -> Iterator[tuple[Group, Sample]]:
    """Yield the samples of a tar in order, with their offsets; check the end of the tar before the last one.

    Args:
        read: The tar's bytes by absolute offset; called for growing offsets only.
        end: Offset after the tar's last byte; None if unknown, as in a compressed tar, which must then have the
            end-of-archive blocks.
        start: Offset of a sample's first header.
        shard: URL, for ``__url__`` and messages.
        diagnostics: Filled during the pass: entries that are not read, and the end of the tar.

    Raises:
        ShardError: If the tar is damaged, truncated or empty, or has data after its end.
        SampleError: As in `iter_groups`.
    """
    diagnostics = TarDiagnostics() if diagnostics is None else diagnostics
    kept: dict[int, bytes] = {}
    sample_start = start

    def read_bodies(members: Iterable[Member]) -> Iterator[Member]:
        # Each body is read right after its header, because a stream cannot seek back.
        for member in members:
            name, header, body, size = member
            if end is None and body + size - sample_start > STREAMED_SAMPLE_LIMIT_BYTES:
                raise ShardError(
                    f"a sample of over {STREAMED_SAMPLE_LIMIT_BYTES} bytes in a stream of unknown length",
                    remedy="unpack it to a plain tar",
                    shard=shard,
                    offset=header,
                )
            data = read(body, size)
            if len(data) < size:
                raise _cut_error(name, len(data), size, shard, header)
            kept[body] = data
            yield member

    members = iter_whole(read, start=start, end=end, shard=shard, diagnostics=diagnostics)
    for group in iter_groups(read_bodies(members), shard=shard):
        sample: Sample = {"__key__": group.key, "__url__": shard}
        for field, (body, _) in group.fields.items():
            sample[field] = kept[body]
        # The rest belongs to the next sample, whose first member was read already.
        kept = {body: data for body, data in kept.items() if body >= group.end}
        sample_start = group.end
        yield group, sample


def is_worth_vectorizing(samples: int, shard_slices: int) -> bool:
    """Return True if reading the samples together is faster."""
    return samples >= max(MIN_SAMPLES, MIN_SAMPLES_PER_SLICE * shard_slices)


def read_sample(buffer: SlicedBuffer, base: int, start: int, end: int, shard: str) -> Sample:
    """Read the one sample that the index places at ``start`` to ``end``.

    Args:
        buffer: A slice of the tar, such as a memory map or a fetched range.
        base: Offset in the tar of the buffer's first byte.
        start: Offset in the tar of the sample's first header.
        end: Offset after its last member.
        shard: URL, for ``__url__`` and messages.

    Raises:
        IndexMismatchError: If there is not exactly one sample.
        ShardError: If its bytes are damaged.
    """
    found = read_one(buffer, base, start, end, shard)
    if isinstance(found, Exception):
        raise found
    return found


def read_one(
    buffer: SlicedBuffer, base: int, start: int, end: int, shard: str
) -> Sample | Exception:
    """Return the sample that `read_sample` reads, or the error that it raises."""
    try:
        return _read_plain(buffer, start - base, end - base, shard) or _read_any(
            buffer, base, start, end, shard
        )
    except Exception as error:  # noqa: BLE001  (returned: the caller applies the skip policy)
        return error


def _read_plain(buffer: SlicedBuffer, position: int, end: int, shard: str) -> Sample | None:
    """Read a sample of plain members with short names; None if anything is unusual or wrong.

    Training spends most of its reading time in this loop, so calls are inlined: 1.7 us per member instead of 2.1.
    """
    sample: Sample = {"__key__": "", "__url__": shard}
    prefix, first, sums = b"", True, known_sums
    try:
        while position < end:
            block = bytes(buffer[position : position + BLOCK_BYTES])
            # `is_plain_header` for known checksums, inlined
            if (
                block[156] != 48
                or block[345]
                or block[135] > 32
                or sums.get(block[148:156]) != adler32(block) & 0xFFFF
            ) and not is_plain_header(block):
                return None
            name = block[: block.index(0, 0, 101)]
            if first:
                dot = name.find(b".", name.rfind(b"/") + 1)
                prefix, first = name[: dot + 1], False
                sample["__key__"] = key = prefix[:-1].decode()
                if not key or key[-1] == "/" or key.startswith("__"):
                    return None
            elif not name.startswith(prefix):
                return None
            suffix = name[len(prefix) :]
            field = _fields.get(suffix) or _field_of(suffix)
            if field in sample:
                return None
            body = position + BLOCK_BYTES
            size = int(block[124:135], 8)
            sample[field] = data = bytes(buffer[body : body + size])
            position = body + (size + 511 & -512)
            if len(data) != size:
                return None
    except (IndexError, ValueError):
        # Truncated or malformed: `_read_any` finds the error.
        return None
    return sample if position == end and not first else None


_fields: dict[bytes, str] = {}


def _field_of(suffix: bytes) -> str:
    """Return and cache the field of a name's last part.

    Raises:
        ValueError: If it is not valid in a plain name.
    """
    field = suffix.decode().lower()
    if not field or "/" in field:
        raise ValueError
    if len(_fields) < 1000:
        _fields[suffix] = field
    return field


def _read_any(buffer: SlicedBuffer, base: int, start: int, end: int, shard: str) -> Sample:
    """Read a sample of any kind of members, and raise for errors."""

    def read(at: int, size: int) -> bytes:
        return bytes(buffer[at - base : at - base + size]) if at < end else b""

    sample: Sample = {"__key__": None, "__url__": shard}
    diagnostics = TarDiagnostics()
    for name, header, body, size in iter_members(
        read, start=start, shard=shard, diagnostics=diagnostics
    ):
        data = read(body, size)
        if end <= base + len(buffer) and body + (size + 511 & -512) > end:
            raise _mismatch_error(f"{name} continues after its end", shard, header)
        if len(data) < size:
            raise _cut_error(name, len(data), size, shard, header)
        parts = split_member_name(name)
        if parts is None or is_meta_name(name):
            continue
        key, field = parts
        if sample["__key__"] not in (None, key):
            raise _mismatch_error(f"two samples, {sample['__key__']!r} and {key!r}", shard, header)
        if field in sample:
            raise _duplicate_error(field, key, shard, header)
        sample["__key__"], sample[field] = key, data
    if sample["__key__"] is None:
        if end > base + len(buffer):
            raise _cut_error("a sample", 0, end - start, shard, start)
        raise _mismatch_error("no sample", shard, start)
    diagnostics.warn_of_links(shard)
    return sample


def _cut_error(name: str, found: int, size: int, shard: str, offset: int) -> ShardError:
    return ShardError(
        f"the tar is cut: {found} of {size} bytes of {name}",
        remedy="fetch or write the shard again",
        shard=shard,
        offset=offset,
    )


def _duplicate_error(field: str, key: str | None, shard: str, offset: int) -> SampleError:
    return SampleError(
        "a sample has a field twice", shard=shard, offset=offset, key=key, field=field
    )


def _mismatch_error(found: str, shard: str, offset: int) -> IndexMismatchError:
    return IndexMismatchError(
        f"the index does not match its tar: {found} at the offsets of one sample",
        remedy="run 'shardstream index' again",
        shard=shard,
        offset=offset,
    )
