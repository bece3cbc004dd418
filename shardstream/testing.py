"""Helpers for tests: small shards, and contract suites for stages, stores and catalogs.

`assert_resumes_exactly` checks a stage, `check_store` and `check_reader` check a store, `check_catalog` checks a catalog, and
`check_samples` all samples by number. They
raise an AssertionError that says what differs, and need no test framework.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from shardstream.catalog import Catalog
from shardstream.errors import ChangedError, NotFoundError, StorageError
from shardstream.format import KEY_COLUMN, Rows
from shardstream.packing import ShardWriter
from shardstream.pipeline import Run, State
from shardstream.samples import FetchOptions, Numbers, Samples
from shardstream.storage import Storage, publish, publish_bytes, remove


def make_shards(
    folder: str | os.PathLike[str],
    *,
    samples: int | Iterable[Mapping[str, object]],
    per_shard: int = 10,
    **options: Any,
) -> str:
    """Write a dataset of small shards, with index and manifest.

    Args:
        folder: The folder to write to; any URL that fsspec knows.
        samples: Samples to write, or their number: sample i then has key ``f"{i:06d}"`` and ``cls`` i.
        per_shard: Samples of a shard.
        options: Of `ShardWriter`: ``storage_options``, ``filesystem``, …

    Returns:
        The folder, as `ShardDataset` takes it.
    """
    if isinstance(samples, int):
        samples = [{"__key__": f"{number:06d}", "cls": number} for number in range(samples)]
    with ShardWriter(folder, max_samples=per_shard, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return os.fspath(folder)


class ListRun:
    """A run over a list, as the source of a stage under test. The number of an item is its position.

    >>> run = ListRun(["a", "b"])
    >>> next(run), run.number, run.state_dict()
    ('a', 0, {'taken': 1})
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.number = -1
        self.closed = False
        self._items: Sequence[Any] = list(items)
        self._taken = 0

    def __iter__(self) -> ListRun:
        return self

    def __next__(self) -> Any:
        if self._taken == len(self._items):
            raise StopIteration
        self.number = self._taken
        self._taken += 1
        return self._items[self.number]

    def state_dict(self) -> State:
        """Return the number of items taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Continue after the first ``taken`` items."""
        self._taken = state["taken"]

    def close(self) -> None:
        """Record that it was closed."""
        self.closed = True


def assert_resumes_exactly(open_run: Callable[[], Run]) -> None:
    """Check that a run can be stopped at every position and continues with the same items and numbers.

    At every position, including the end: two calls of ``state_dict`` return the same, the state survives JSON, and a fresh run that
    loads it returns it before it reads anything. The remaining items are the same in a fresh run, in a run that was used before,
    and after a second stop one item later.

    Args:
        open_run: Opens the run under test, from its start.

    Raises:
        AssertionError: With the position and the difference.
    """
    states, items = _walk(open_run)
    for place, state in enumerate(states):
        _check_position(open_run, place, state, items[place:])


def _walk(open_run: Callable[[], Run]) -> tuple[list[State], list[Any]]:
    """Return the state at every position, after a JSON round trip, and every item."""
    run = open_run()
    states = [_checked_state(run, 0)]
    items: list[Any] = []
    for item in run:
        items.append(_comparable((run.number, item)))
        states.append(_checked_state(run, len(items)))
    states.append(_checked_state(run, len(items)))  # after the end: equal to the one before it
    run.close()
    return states, items


def _check_position(open_run: Callable[[], Run], place: int, state: State, rest: list[Any]) -> None:
    new_run, used_run = open_run(), open_run()
    next(used_run, None)
    for name, run in (("a fresh run", new_run), ("a used run", used_run)):
        run.load_state_dict(state)
        loaded = _checked_state(run, place)
        assert loaded == state, f"at {place}, {name} loaded {state}, but says {loaded}"
        _check_rest(run, rest, f"at {place}, {name}")
    resumed, resumed_twice = open_run(), open_run()
    resumed.load_state_dict(state)
    next(resumed, None)
    resumed_twice.load_state_dict(_checked_state(resumed, place + 1))
    _check_rest(resumed_twice, rest[1:], f"at {place}, stopped again one item later,")
    for run in (new_run, used_run, resumed, resumed_twice):
        run.close()


def _check_rest(run: Run, rest: list[Any], label: str) -> None:
    found = [_comparable((run.number, item)) for item in run]
    assert found == rest, f"{label} goes on with (number, item) {found[:3]}…, not {rest[:3]}…"


def _checked_state(run: Run, place: int) -> State:
    state: State = json.loads(json.dumps(run.state_dict()))
    second = json.loads(json.dumps(run.state_dict()))
    assert state == second, f"at {place}, the state is {state}, and a second call returns {second}"
    return state


def _comparable(item: Any) -> Any:
    """Replace arrays, tensors and images by values that ``==`` can compare."""
    if isinstance(item, Mapping):
        return {name: _comparable(value) for name, value in item.items()}
    if isinstance(item, list):
        return list(map(_comparable, item))
    if isinstance(item, tuple):
        return type(item), tuple(map(_comparable, item))
    if hasattr(item, "__array__") or hasattr(item, "__array_interface__"):
        array = np.asarray(item)
        return type(item), array.dtype.str, array.shape, array.tobytes()
    return item


def check_reader(storage: Storage, url: str, data: bytes) -> None:
    """Check that a file is read as shardstream expects; for a store that cannot be written.

    Checked: reads of ranges, of the whole file, by threads, by an open file and by a pickled copy of the storage; ranges past the
    end; the length; a missing file.

    Args:
        storage: The store under test.
        url: A file that exists; nothing must exist at ``url + ".missing"``.
        data: Its bytes, 1,000 or more.

    Raises:
        AssertionError: With the difference.
    """
    _check_ranges(storage, url, data)
    found = storage.info(url)
    assert found.size == len(data), f"info() says {found.size} bytes, not {len(data)}"
    with storage.open(url) as stream:
        stream.seek(10)
        assert stream.read(5) == data[10:15], "an open file has other bytes after a seek"
    _check_missing(storage, url)
    copy: Storage = pickle.loads(pickle.dumps(storage))  # noqa: S301  (made in the same line)
    assert copy.read(url, 3, 9) == data[3:9], "a pickled copy of the storage reads other bytes"


def check_store(storage: Storage, folder: str) -> None:
    """Check that a store keeps what shardstream expects; for a new fsspec file system or reader.

    Checked: what `check_reader` checks; empty files; listing, look-up and deletion; that a file is published whole or not at all,
    and replaced whole; that the ranges that one storage reads of a file are of one version.

    Args:
        storage: The store under test.
        folder: URL of an empty folder, to which the check writes.

    Raises:
        AssertionError: With the difference.
    """
    folder, data = folder.rstrip("/"), bytes(range(256)) * 40
    url = f"{folder}/inner/a b.tar"
    _check_publish(storage, url, data)
    check_reader(storage, url, data)
    _check_listing(storage, folder, data)
    empty = f"{folder}/inner/empty"
    publish_bytes(storage, empty, b"")
    assert storage.read(empty) == b"", "an empty file has bytes"
    remove(storage, empty)
    _check_versions(storage, url, data)
    remove(storage, url)
    assert not storage.exists(url), f"{url} exists after it was deleted"


def _check_publish(storage: Storage, url: str, data: bytes) -> None:
    with contextlib.suppress(_StopError), publish(storage, url) as stream:
        stream.write(data)
        raise _StopError
    assert not storage.exists(url), "a file whose writer failed is visible"
    with publish(storage, url) as stream:
        stream.write(b"old")
    publish_bytes(storage, url, data)
    assert storage.read(url) == data, "a file that was replaced does not have the new bytes"


class _StopError(Exception):
    """Ends a write under test."""


def _check_ranges(storage: Storage, url: str, data: bytes) -> None:
    size = len(data)
    ranges = [(0, None), (5, None), (0, 1), (0, size), (100, 900), (size - 1, size), (7, 7)]
    for start, end in ranges:
        found = storage.read(url, start, end)
        assert found == data[start:end], f"the range {start} to {end} has other bytes"
    assert storage.read(url, max_bytes=size) == data, "a read with max_bytes has other bytes"
    for start, end in ((size - 1, size + 1), (size, size + 2), (size + 10, size + 20)):
        name = f"a read of the range {start} to {end}, past the end at {size},"
        _check_raises(ChangedError, name, url, partial(storage.read, url, start, end))
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda at: storage.read(url, at, at + 250), range(0, 1000, 250)))
    assert b"".join(parts) == data[:1000], "threads that share a storage read other bytes"


def _check_listing(storage: Storage, folder: str, data: bytes) -> None:
    files, folders = storage.list_folder(folder)
    assert (files, folders) == ([], ["inner"]), f"list_folder() gives {files} and {folders}"
    for name, listed in (
        ("list_folder", storage.list_folder(f"{folder}/inner")[0]),
        ("find", storage.find(folder)),
        ("glob", storage.glob(f"{folder}/inner/*.tar")),
    ):
        shown = [(file.url.rpartition("/")[2], file.size) for file in listed]
        assert shown == [("a b.tar", len(data))], f"{name}() gives {shown}"
        assert storage.read(listed[0].url, 0, 2) == data[:2], f"{name}() gives a URL of other bytes"


def _check_missing(storage: Storage, url: str) -> None:
    missing = f"{url}.missing"
    assert not storage.exists(missing), f"{missing} does not exist, but exists() says so"
    _check_raises(NotFoundError, "read()", missing, lambda: storage.read(missing, 0, 10))
    _check_raises(NotFoundError, "info()", missing, lambda: storage.info(missing))


def _check_raises(
    expected: type[StorageError], name: str, url: str, ask: Callable[[], object]
) -> None:
    try:
        ask()
    except expected as error:
        named = error.shard
    else:
        raise AssertionError(f"{name} raises no {expected.__name__}")
    assert named == url, f"the error of {name} names {named}, not {url}"


def _check_versions(storage: Storage, url: str, data: bytes) -> None:
    """Replace a file between two range reads; a store without versions may return the new bytes."""
    reader: Storage = pickle.loads(pickle.dumps(storage))  # noqa: S301  (made in the same line)
    first, replaced = reader.read(url, 0, 100), data[::-1]
    publish_bytes(storage, url, replaced)
    try:
        second = reader.read(url, 100, 200)
    except ChangedError:
        second = replaced[100:200]
    assert first == data[:100], "a range has other bytes"
    assert second == replaced[100:200], "a range of a replaced file has bytes of neither version"


def check_samples(
    open_samples: Callable[[], Samples], expected: Sequence[Mapping[str, object]]
) -> None:
    """Check that `Samples` keep the promises that orders, pipelines and loaders rely on.

    Checked: the length; all samples and copies of them, with and without a plan, in any order, by threads and in steps; that samples
    that were opened again and a pickled copy have the same fingerprint and samples, and those restricted to some numbers the same
    samples; shards, places and sizes; fields, keys and columns, as far as they are known.

    Args:
        open_samples: Opens the samples under test.
        expected: The fields of all samples, and ``__key__``, in order.

    Raises:
        AssertionError: With the difference.
    """
    samples, count = open_samples(), len(expected)
    assert len(samples) == count, f"the length is {len(samples)}, not {count}"
    for name, other in (
        ("", samples),
        ("opened again, ", open_samples()),
        ("pickled, ", pickle.loads(pickle.dumps(samples))),  # noqa: S301  (made in the same line)
    ):
        assert other.fingerprint == samples.fingerprint, f"{name}they have another fingerprint"
        _check_reading(other, expected, np.arange(count), name)
    numbers = np.arange(count)[count // 3 : count // 2 + 1]
    part: Samples = pickle.loads(pickle.dumps(samples.restrict_to(numbers)))  # noqa: S301  (made in the same line)
    assert len(part) == count, "restrict_to() gives another length"
    assert part.total_bytes == samples.total_bytes, "restrict_to() gives another total_bytes"
    _check_reading(part, expected, numbers, "restricted, ")
    _check_places(samples, count)
    _check_values(samples, expected)
    samples.check_manifests()


def _check_reading(
    samples: Samples, expected: Sequence[Mapping[str, object]], numbers: Numbers, name: str
) -> None:
    """Check what fetchers return for some numbers, and for copies of them."""
    count = len(samples)
    orders = [numbers, numbers[::-1] + 2 * count, np.random.default_rng(0).permutation(numbers)]
    orders.append(np.concatenate((numbers[:2] + count, numbers[:2])))
    options = FetchOptions(prefetch_bytes=1 << 20)
    for upcoming in (None, [], orders, [order[: len(order) // 2] for order in orders]):
        with contextlib.closing(samples.open_fetcher(upcoming, options)) as fetcher:
            for order in orders:
                _compare(fetcher.samples(order), expected, order % count, f"{name}samples()")
            mapped = fetcher.find(numbers)
            if mapped is not None:
                _compare(mapped[0 : len(numbers)], expected, numbers, f"{name}find()")
            assert len(fetcher.samples(numbers[:0])) == 0, f"{name}no number gives a sample"
    with contextlib.closing(samples.open_fetcher(orders, options)) as fetcher:
        steps = [order[at : at + 3] for order in orders for at in range(0, len(order), 3)]
        for step, found in zip(steps, fetcher.read(steps, 7), strict=True):
            _compare(found, expected, step % count, f"{name}read()")
    with contextlib.closing(samples.open_fetcher()) as fetcher, ThreadPoolExecutor(4) as pool:
        for order, found in zip(orders, pool.map(fetcher.samples, orders), strict=True):
            _compare(found, expected, order % count, f"{name}samples() in threads")


def _compare(
    found: Rows, expected: Sequence[Mapping[str, object]], numbers: Numbers, name: str
) -> None:
    rows: list[Any] = [found[place] for place in range(len(found))]
    assert len(rows) == len(numbers), f"{name} gives {len(rows)} of {len(numbers)} samples"
    assert len({*map(id, rows)}) == len(rows), f"{name} gives one dict for several samples"
    for number, row in zip(numbers.tolist(), rows, strict=True):
        assert not isinstance(row, Exception), f"{name} gives an error for sample {number}: {row}"
        fields = {field: value for field, value in row.items() if field != "__url__"}
        assert fields == expected[number], f"{name} gives {fields} for sample {number}"


def _check_places(samples: Samples, count: int) -> None:
    """Check shards, places and sizes of all samples, and of copies."""
    numbers = np.arange(count)
    shards = samples.find_shards(numbers)
    assert all((shards >= 0) & (shards < samples.num_shards)), "find_shards() gives no such shard"
    assert np.array_equal(samples.find_shards(numbers + 3 * count), shards), "a copy is elsewhere"
    for number, shard in enumerate(shards.tolist()):
        assert samples.place_of(number + count)[0], f"sample {number} has no place"
        assert samples.url_of(shard), f"the shard {shard} has no URL"
    sizes = samples.sizes(numbers)
    assert all(sizes > 0), "a sample has no bytes"
    assert np.array_equal(samples.sizes(numbers[::-1] + count), sizes[::-1]), "sizes() differ"


def _check_values(samples: Samples, expected: Sequence[Mapping[str, object]]) -> None:
    """Check fields, keys and columns, as far as they are known."""
    if samples.fields is not None:
        for row in expected:
            others = {name for name in row if not name.startswith("__")} - set(samples.fields)
            assert not others, f"fields lack {sorted(others)}"
    names = samples.column_names()
    if names:
        table = samples.read_columns(names)
        assert table.column_names == names, "column_names() and read_columns() differ"
        if KEY_COLUMN in names:
            assert table[KEY_COLUMN].to_pylist() == [row["__key__"] for row in expected]


def check_catalog(open_catalog: Callable[[], Catalog], *, samples: int) -> None:
    """Check that a `Catalog` keeps the promises that readers rely on.

    Checked: its length; the shards, byte ranges and bytes of all samples, in any order; that a number out of range raises
    `IndexError` or counts modulo the length; that a catalog opened again has the same bytes; and what `check_samples` checks.

    Args:
        open_catalog: Opens the catalog under test.
        samples: How many samples it has.

    Raises:
        AssertionError: With the difference.
    """
    catalog = open_catalog()
    assert len(catalog) == samples, f"its length is {len(catalog)}, not {samples}"
    found = _check_extents(catalog, samples)
    assert _check_extents(open_catalog(), samples) == found, "opened again, it gives other bytes"
    with contextlib.closing(catalog.open_fetcher()) as fetcher:
        rows: list[Any] = list(fetcher.samples(np.arange(samples)))
    expected = [{name: row[name] for name in row if name != "__url__"} for row in rows]
    check_samples(open_catalog, expected)


def _check_extents(catalog: Catalog, samples: int) -> list[bytes]:
    """Return the bytes of all samples, after checks of how they are found."""
    forward = catalog.extents(np.arange(samples))
    assert len(forward.shards) == samples, "extents() gives another number of rows than asked for"
    assert all(np.diff(forward.shards) >= 0), "the shards of ascending numbers do not ascend"
    assert all((forward.shards >= 0) & (forward.shards < catalog.num_shards)), "no such shard"
    assert all((forward.starts >= 0) & (forward.starts < forward.ends)), "a sample has no bytes"
    order = np.random.default_rng(0).permutation(samples)
    for name, column, shuffled in zip(
        forward._fields, forward, catalog.extents(order), strict=True
    ):
        assert np.array_equal(shuffled, np.asarray(column)[order]), (
            f"{name} depend on the order asked"
        )
    assert len(catalog.extents(np.arange(0)).shards) == 0, "extents() of no number gives rows"
    for number in (-1, samples):
        with contextlib.suppress(IndexError):
            extents_out_of_range = [
                int(column[0]) for column in catalog.extents(np.array([number]))
            ]
            extents_in_range = [int(column[number % samples]) for column in forward]
            assert extents_out_of_range == extents_in_range, (
                f"the sample {number} of {samples} raises no IndexError"
            )
    shards = set(map(int, forward.shards))
    assert shards >= set(catalog.shards_of(np.arange(samples))), "shards_of() gives other shards"
    for chunk in catalog.index_chunks(np.arange(samples)):
        assert chunk.shard in shards, f"index_chunks() gives a part of no such shard: {chunk}"
        catalog.load_index(chunk)
    for shard in shards:
        assert catalog.url_of(shard), f"the shard {shard} has no URL"
    rows = list(zip(*(column.tolist() for column in forward), strict=True))
    found = [bytes(catalog.fetch(shard, start, end)) for shard, start, end in rows]
    sizes = [len(data) for data in found]
    assert sizes == (forward.ends - forward.starts).tolist(), "fetch() gives other lengths"
    if catalog.is_local:
        for (shard, start, end), data in zip(rows, found, strict=True):
            mapped = bytes(memoryview(catalog.map_shard(shard))[start:end])
            assert mapped == data, f"map_shard({shard}) and fetch() give different bytes"
    return found
