"""Test that a listing in a file has the files of a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardstream.storage import FileList, ListedFile

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
    assert found[first:last] == expected[first:last]
    assert list(found.iter_from(first)) == expected[first:]
