"""Consecutive members of one key -> a sample, by WebDataset's rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shardstream.errors import IndexMismatchError, SampleError, ShardError
from shardstream.format.names import RESERVED_FIELDS, is_meta_name, split_member_name
from shardstream.format.tar import Member, ReadAt, iter_members

Sample = dict[str, Any]
"""A plain dict: ``__key__``, ``__url__`` and one entry a field, as bytes until a decoder has seen it."""


class Group(NamedTuple):
    """Where the bytes of one sample are in its tar."""

    key: str
    start: int
    """Offset of its first header."""
    end: int
    """Offset behind the padding of its last member."""
    fields: dict[str, tuple[int, int]]
    """Field -> offset and size of its bytes."""


def iter_groups(members: Iterable[Member], *, shard: str = "") -> Iterator[Group]:
    """Group members to samples; members without a field (README, say) and ``__meta__`` names are passed over.

    Raises:
        SampleError: If a sample has a field twice, or a key comes back after another key: written that way, the sample
            would be read as two halves.
    """
    seen: set[str] = set()
    key, start, end = None, 0, 0
    fields: dict[str, tuple[int, int]] = {}
    for name, header, body, size in members:
        parts = split_member_name(name)
        if parts is None or is_meta_name(name):
            continue
        if parts[0] != key:
            if key is not None:
                yield Group(key, start, end, fields)
            key, start, fields = parts[0], header, {}
            if key in seen:
                raise SampleError(
                    "the key comes back after another key: its sample is in two halves; "
                    "write the members of a sample one after another",
                    shard=shard,
                    offset=header,
                    key=key,
                )
            seen.add(key)
        if parts[1] in fields or parts[1] in RESERVED_FIELDS:
            raise SampleError(
                "a sample has a field twice", shard=shard, offset=header, key=key, field=parts[1]
            )
        fields[parts[1]] = body, size
        end = body + (size + 511 & -512)
    if key is not None:
        yield Group(key, start, end, fields)


def iter_samples(
    read: ReadAt, *, end: int | None = None, start: int = 0, shard: str
) -> Iterator[tuple[Group, Sample]]:
    """Yield the samples of a tar in order, each with the place it has there.

    Args:
        read: The tar's bytes by absolute offset; called for growing offsets only.
        end: Offset behind the tar's last byte, if known.
        start: Offset of a sample's first header.
        shard: URL, for ``__url__`` and messages.

    Raises:
        ShardError: If the tar is damaged or cut.
        SampleError: As in `iter_groups`.
    """
    kept: dict[int, bytes] = {}

    def keeping(members: Iterable[Member]) -> Iterator[Member]:
        # Bodies are read as their headers pass, so a stream need not go back.
        for member in members:
            name, header, body, size = member
            data = read(body, size)
            if len(data) < size:
                raise ShardError(
                    f"the tar is cut: {len(data)} of {size} bytes of {name}; fetch or write the shard again",
                    shard=shard,
                    offset=header,
                )
            kept[body] = data
            yield member

    for group in iter_groups(
        keeping(iter_members(read, start=start, end=end, shard=shard)), shard=shard
    ):
        sample: Sample = {"__key__": group.key, "__url__": shard}
        for field, (body, _) in group.fields.items():
            sample[field] = kept[body]
        # What is left belongs to the next sample, whose first member has been read already.
        kept = {body: data for body, data in kept.items() if body >= group.end}
        yield group, sample


def read_sample(read: ReadAt, start: int, end: int, shard: str) -> Sample:
    """Read the one sample that the index says is at ``start`` to ``end``.

    Raises:
        IndexMismatchError: If there is not exactly one sample.
        ShardError: If its bytes are damaged.
    """
    sample: Sample = {"__key__": None, "__url__": shard}
    key = None
    for name, header, body, size in iter_members(read, start=start, end=end, shard=shard):
        base = name.rfind("/") + 1
        dot = name.find(".", base)
        if dot <= base or (name.startswith("__") and is_meta_name(name)):
            continue
        field = name[dot + 1 :].lower()
        if name[:dot] != key:
            if key is not None:
                raise _misfit(f"two samples, {key!r} and {name[:dot]!r}", shard, header)
            sample["__key__"] = key = name[:dot]
        if field in sample:
            raise SampleError(
                "a sample has a field twice", shard=shard, offset=header, key=key, field=field
            )
        data = read(body, size)
        if len(data) < size:
            raise _misfit(f"{len(data)} of {size} bytes of {name}", shard, header)
        sample[field] = data
    if key is None:
        raise _misfit("no sample", shard, start)
    return sample


def _misfit(found: str, shard: str, offset: int) -> IndexMismatchError:
    return IndexMismatchError(
        f"the index does not fit its tar: {found} where it says that one sample is; run 'shardstream index' again",
        shard=shard,
        offset=offset,
    )
