"""Test that a compact listing has the files of a sorted list, in a fraction of the memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.packing import SourceOptions, open_source
from shardstream.storage import FileList, ListedFile, Storage

PATHS = st.text(st.characters(), min_size=1, max_size=12)  # surrogates of undecodable names, too
FILES = st.builds(
    lambda path, url, size, version: ListedFile(path, url or f"s3://b/set/{path}", size, version),
    PATHS,
    st.none() | st.text(max_size=9),
    st.integers(0, 1 << 40),
    st.none() | st.text(max_size=9),
)


@given(files=st.lists(FILES, unique_by=lambda file: file.path, max_size=20), data=st.data())
def test_file_list_has_the_files_of_a_sorted_list(
    files: list[ListedFile], data: st.DataObject
) -> None:
    expected, found = sorted(files), FileList(files)
    assert list(found) == expected
    assert [found[number] for number in range(len(found))] == expected
    assert list(found.paths()) == [file.path for file in expected]
    first, last = sorted(data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
    assert list(found[first:last]) == expected[first:last]
    taken = [number for number in range(first, last) if number < len(files)]
    some = found[first:].take(np.array([one - first for one in taken], dtype=np.int64))
    assert list(some) == [expected[number] for number in taken]


@pytest.mark.parametrize("kind", ["images", "files"])
def test_source_of_many_files_takes_little_memory(tmp_path: Path, kind: str) -> None:
    count = 4000
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        for number in range(count // 2):
            (tmp_path / folder / f"{folder}_{number:012d}.jpg").touch()
    tracemalloc.start()
    source = open_source(str(tmp_path), Storage(), SourceOptions(kind=kind))
    assert source.length == count
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200 * count  # before: 600 to 1,000 bytes
    assert sum(1 for _ in source) == count
