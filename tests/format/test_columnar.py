"""Test that samples and errors of a bulk read equal those of single reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.format import (
    Columns,
    Rows,
    ShardSlice,
    as_rows,
    find_samples,
    from_rows,
    iter_groups,
    iter_members,
    member_name,
    read_one,
    read_sample,
    read_samples,
    restore_order,
)
from tests.limits import module_of, set_limits
from tests.small_tars import samples as two_fields
from tests.small_tars import tar_bytes
from tests.strategies import archives, raw_samples

URL = "s3://bucket/a.tar"


def extents(tar: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    groups = list(iter_groups(iter_members(lambda at, size: tar[at : at + size])))
    starts = np.array([group.start for group in groups], dtype=np.int64)
    return starts, np.array([group.end for group in groups], dtype=np.int64)


def one_by_one(shard_slices: list[ShardSlice]) -> list[Any]:
    found: list[Any] = []
    for _, url, buffer, base, starts, ends in shard_slices:
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            try:
                found.append(read_sample(buffer, base, start, end, url))
            except Exception as error:  # noqa: BLE001  (compared below)
                found.append(repr(error))
    return found


def together(shard_slices: list[ShardSlice]) -> list[Any]:
    found = read_samples(shard_slices)
    return [repr(sample) if isinstance(sample, Exception) else sample for sample in found]


def members(samples: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    return [
        (member_name(sample["__key__"], field), data)
        for sample in samples
        for field, data in sample.items()
        if field != "__key__"
    ]


def crowd(count: int) -> bytes:
    return tar_bytes(two_fields(0, count))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, read_one, MIN_SAMPLES=1)
    set_limits(monkeypatch, read_one, MIN_SAMPLES_PER_SLICE=0)


def test_plain_samples_are_never_parsed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tar = crowd(200)
    expected = one_by_one([ShardSlice(0, URL, tar, 0, *extents(tar))])
    calls: list[int] = []

    def counted(buffer: Any, base: int, start: int, *arguments: Any) -> Any:
        calls.append(start)
        return read_one(buffer, base, start, *arguments)

    monkeypatch.setattr(module_of(read_samples), "read_one", counted)
    assert together([ShardSlice(0, URL, tar, 0, *extents(tar))]) == expected
    assert len(calls) == 1  # the first sample, whose form is compared


@pytest.mark.slow
@given(data=st.data())
def test_any_slices_of_any_shards_are_read(data: st.DataObject) -> None:
    shard_slices = []
    for shard in range(data.draw(st.integers(1, 3))):
        tar = tar_bytes(members(data.draw(raw_samples(max_samples=30))))
        starts, ends = extents(tar)
        if not len(starts):
            continue
        base = int(starts.min()) if data.draw(st.booleans()) else 0
        order = np.array(data.draw(st.permutations(range(len(starts)))), dtype=np.int64)
        shard_slices.append(
            ShardSlice(shard, f"{URL}{shard}", tar[base:], base, starts[order], ends[order])
        )
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, read_one, MIN_SAMPLES=1)
        set_limits(patch, read_one, MIN_SAMPLES_PER_SLICE=0)
        assert together(shard_slices) == one_by_one(shard_slices)
        found = find_samples(shard_slices) if shard_slices else None
        assert found is None or [*found.copy(slice(None))] == one_by_one(shard_slices)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4096, 4097])
def test_bodies_of_equal_size_are_copied(size: int) -> None:
    rng = np.random.default_rng(size)
    bodies = [rng.integers(0, 4, size, dtype=np.uint8).tobytes() for _ in range(60)]
    bodies[:2] = [bytes(size), b"\1" + bytes(size - 1)]  # zeros at the end count
    tars = [
        tar_bytes([(f"{number:03d}.bin", bodies[number]) for number in range(first, first + 30)])
        for first in (0, 30)
    ]
    shard_slices = []
    for shard, tar in enumerate(tars):
        starts, ends = extents(tar)
        order, base = rng.permutation(30), int(starts[0])
        buffer = memoryview(tar)[base : int(ends.max())]  # the buffer ends with its last sample
        shard_slices.append(ShardSlice(shard, URL, buffer, base, starts[order], ends[order]))
    found = read_samples(shard_slices)
    assert isinstance(found, Columns)
    assert [*found] == one_by_one(shard_slices)
    assert {sample["bin"] for sample in found} == set(bodies)


def test_bodies_of_equal_size_past_the_buffer_are_errors() -> None:
    tar = crowd(60)
    starts, ends = extents(tar)
    short = ShardSlice(0, URL, tar[: int(ends[-1]) - 512], 0, starts, ends)
    assert together([short]) == one_by_one([short])


def test_memoryviews_give_the_same_samples_as_bytes(few: None) -> None:
    tar = crowd(30)
    starts, ends = extents(tar)
    damaged = bytearray(tar)
    damaged[int(starts[4]) + 600] ^= 1  # in a body: still valid
    damaged[int(starts[5]) + 3] ^= 1
    whole = ShardSlice(
        0, URL, bytes(damaged[int(starts[2]) :]), int(starts[2]), starts[2:], ends[2:]
    )
    view = whole._replace(buffer=memoryview(whole.buffer))
    found = together([view])
    assert found == one_by_one([whole])
    assert all(type(value) is bytes for value in [found[0]["bin"], found[2]["bin"]])


@given(archive=archives())
def test_tars_of_any_form(archive: Any) -> None:
    try:
        starts, ends = extents(archive.data)
    except Exception:  # noqa: BLE001  (no such samples: nothing to compare)
        return
    shard_slices = [ShardSlice(0, URL, archive.data, 0, starts, ends)] if len(starts) else []
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, read_one, MIN_SAMPLES=1)
        set_limits(patch, read_one, MIN_SAMPLES_PER_SLICE=0)
        assert together(shard_slices) == one_by_one(shard_slices)


@given(
    flips=st.lists(
        st.tuples(st.integers(0, 60 * 2048), st.integers(0, 255)), min_size=1, max_size=30
    ),
    cut=st.integers(0, 60 * 2560) | st.none(),
)
def test_damage_gives_the_same_errors_as_single_reads(
    flips: list[tuple[int, int]], cut: int | None
) -> None:
    tar = bytearray(crowd(60))
    starts, ends = extents(bytes(tar))
    for place, value in flips:
        tar[place % len(tar)] = value
    shard_slices = [ShardSlice(0, URL, bytes(tar[:cut]), 0, starts, ends)]
    assert together(shard_slices) == one_by_one(shard_slices)


def test_every_byte_of_a_header_counts() -> None:
    tar = bytearray(crowd(45))
    starts, ends = extents(bytes(tar))
    for column in range(512):
        tar[int(starts[7]) + column] ^= 1
        shard_slices = [ShardSlice(0, URL, bytes(tar), 0, starts, ends)]
        assert together(shard_slices) == one_by_one(shard_slices), column
        tar[int(starts[7]) + column] ^= 1


@pytest.mark.parametrize("shift", [-1024, -512, -1, 1, 512, 10**12, -(10**12)])
def test_wrong_index_gives_errors(shift: int, few: None) -> None:
    tar = crowd(10)
    starts, ends = extents(tar)
    starts[3] += shift
    shard_slices = [ShardSlice(0, URL, tar, 0, starts, ends)]
    assert together(shard_slices) == one_by_one(shard_slices)


def test_no_slices_give_no_samples() -> None:
    assert read_samples([]) == []
    none = np.empty(0, dtype=np.int64)
    assert read_samples([ShardSlice(0, URL, b"", 0, none, none)]) == []


def test_non_utf8_field_names_are_read(few: None) -> None:
    tar = tar_bytes([(f"{number:03}.caf\udce9", b"x") for number in range(50)])
    shard_slices = [ShardSlice(0, URL, tar, 0, *extents(tar))]
    assert together(shard_slices) == one_by_one(shard_slices)
    assert together(shard_slices)[7]["caf\udce9"] == b"x"


@given(st.data())
def test_rows_of_several_reads_give_the_same_samples(data: st.DataObject) -> None:
    """Return columns of samples of one form, of another form, and single samples."""
    pools = []
    for fields in (("a", "b"), ("a",), ("b", "a")):
        count = data.draw(st.integers(0, 5))
        columns = {name: [f"{fields}{name}{n}" for n in range(count)] for name in fields}
        frame = {"__key__": [f"{n}" for n in range(count)], "__url__": [URL] * count}
        pools.append(Columns(frame | columns))
    each: list[dict[str, Any] | Exception] = [{"__key__": "x", "c": b""}, ValueError("y")]
    every: list[Rows] = [*pools, each]
    rows = [row for samples in every for row in as_rows(samples)]
    meant = [sample for samples in every for sample in samples]
    places = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    found = from_rows([rows[place] for place in places])
    assert list(found) == [meant[place] for place in places]


def test_rows_with_equal_fields_become_columns() -> None:
    samples = read_samples([ShardSlice(0, URL, crowd(60), 0, *extents(crowd(60)))])
    again = from_rows(as_rows(samples)[::-1])
    assert isinstance(again, Columns)
    assert [*again] == [*samples][::-1]
    assert from_rows([]) == []


def test_lazy_columns_copy_samples_at_access() -> None:
    tar = bytearray(crowd(60))
    shard_slice = ShardSlice(0, URL, memoryview(tar), 0, *extents(bytes(tar)))
    read = read_samples([shard_slice])
    found = find_samples([shard_slice])
    assert found is not None
    order = np.random.default_rng(0).permutation(60)
    assert [*found.restore_order(order).copy(slice(10, 20))] == [*restore_order(read, order)[10:20]]
    assert all(
        type(value) is bytes for sample in found.copy(slice(5)) for value in [*sample.values()][2:]
    )
    tar[0] ^= 1  # a checksum
    assert find_samples([shard_slice]) is None
