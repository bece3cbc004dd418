"""Test that rows are sorted and kept in order in bounded memory, for threads and forked children, too."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import StorageError
from shardstream.storage import RowFile, TemporaryFile, sort_rows

TEXTS = st.text(st.characters(), max_size=6)  # also lone surrogates, NUL and line ends
ROWS = st.lists(st.tuples(TEXTS, st.integers(-(1 << 70), 1 << 70), st.booleans()), max_size=40)


def plain(rows: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in rows]


@given(rows=ROWS, run_rows=st.integers(1, 50))
def test_rows_are_sorted_as_in_memory(rows: list[tuple[Any, ...]], run_rows: int) -> None:
    assert plain(sort_rows(rows, run_rows=run_rows)) == sorted(rows)


def test_many_runs_are_merged_in_levels() -> None:
    numbers = [number * 7919 % 4_001 for number in range(4_001)]
    assert list(sort_rows(numbers, run_rows=2)) == list(range(4_001))  # 2,001 runs


@given(rows=ROWS, kept_bytes=st.sampled_from([0, 100, 1 << 20]), data=st.data())
def test_rows_are_read_from_any_number(
    rows: list[tuple[Any, ...]], kept_bytes: int, data: st.DataObject
) -> None:
    file = RowFile(rows, kept_bytes=kept_bytes)
    assert len(file) == len(rows)
    assert plain(file) == rows
    assert [tuple(file[number]) for number in range(len(rows))] == rows
    first = data.draw(st.integers(0, len(rows)))
    assert plain(file.iter_from(first)) == rows[first:]
    assert plain(file[first:]) == rows[first:]
    with pytest.raises(IndexError):
        file[len(rows)]


@pytest.fixture(scope="module")
def large() -> RowFile[int]:
    return RowFile(range(100_000), kept_bytes=0)


def test_threads_and_forked_children_read_one_file(large: RowFile[int]) -> None:
    fork = multiprocessing.get_context("fork")
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(sum, [large] * 8)) == {sum(range(100_000))}
    child = fork.Process(target=_check_rows, args=(large,))
    child.start()
    assert list(large) == list(range(100_000))
    child.join()
    assert child.exitcode == 0


def _check_rows(rows: RowFile[int]) -> None:
    assert list(rows) == list(range(100_000))


@pytest.mark.slow
def test_many_rows_take_two_bytes_each() -> None:
    count = 80_000
    rows = ((f"class{number % 100:03d}/{number:09d}.jpg", number) for number in range(count))
    tracemalloc.start()
    file = RowFile(sort_rows(rows), kept_bytes=0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file) == count
    assert held < 2 * count
    assert peak < 16 << 20  # a run, and what is read of each for the merge


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_temporary_folder_is_one_error_that_names_it() -> None:
    with (
        limited_files(1 << 20),
        pytest.raises(StorageError, match=r"do not fit in the temporary folder: File too large.*TMPDIR") as raised,
    ):  # fmt: skip
        RowFile(sort_rows(f"{number:030d}" for number in range(100_000)), kept_bytes=0)
    assert tempfile.gettempdir() in str(raised.value)


def test_missing_temporary_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(StorageError, match=r"do not fit .*No such file or directory.*/no/such"):
        TemporaryFile("rows")


def test_temporary_file_gives_its_space_back() -> None:
    file = TemporaryFile("rows")
    file.append(b"abcdef")
    assert (file.size, file.read(2, 4), file.read(3, 3)) == (6, b"cd", b"")
    with pytest.raises(StorageError, match="was cut"):
        file.read(4, 9)
    file.close()
    file.close()
