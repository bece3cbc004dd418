"""Default keys of images are unique and identify the file."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.packing import file_key, key_levels

_names = st.sampled_from(["a", "b", "a.b", "a_b", "cat", "1"])
_paths = st.lists(
    st.builds("{}/{}.{}".format, _names | st.builds("{}/{}".format, _names, _names), _names, st.sampled_from(["jpg", "png"])),
    unique=True,
)  # fmt: skip


def keys(paths: list[str]) -> list[str]:
    return [
        file_key(path, number, level)
        for number, (path, level) in enumerate(
            zip(paths, key_levels(lambda: paths, len(paths)).tolist(), strict=True)
        )
    ]


@given(_paths)
def test_keys_are_unique_and_keep_stems(paths: list[str]) -> None:
    paths.sort()
    found = keys(paths)
    assert len(set(found)) == len(found)
    stems = [path.rpartition("/")[2].rpartition(".")[0].replace(".", "_") for path in paths]
    for stem, key in zip(stems, found, strict=True):
        assert key == stem or (stems.count(stem) > 1 and stem in key)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["ant/1.jpg", "bee/2.jpg"], ["1", "2"]),
        (["ant/1.jpg", "bee/1.jpg", "bee/2.jpg"], ["ant/1", "bee/1", "2"]),
        (["ant/1.jpg", "ant/1.png"], ["ant/1_00000000", "ant/1_00000001"]),
        (["ant/x.1.jpg", "ant/x_1.jpg"], ["ant/x_1_00000000", "ant/x_1_00000001"]),
        (["ant/\udcff.jpg"], ["\udcff"]),
        (
            ["a/x.jpg", "a/x.png", "a/x_00000001.jpg", "b/x_00000001.jpg"],
            ["a/x_00000000", "a/x_00000001", "a/x_00000001_00000002", "b/x_00000001"],
        ),
        ([], []),
    ],
)
def test_keys_of_files(paths: list[str], expected: list[str]) -> None:
    assert keys(paths) == expected


def test_keys_use_a_few_bytes_per_file() -> None:
    paths = [f"c{number % 7}/{number // 2}.jpg" for number in range(20_000)]
    tracemalloc.start()
    levels = key_levels(lambda: paths, len(paths))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(levels.tolist()) == {1}
    assert peak < 100 * len(paths)
