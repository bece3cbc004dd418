"""Ray reads a version of a dataset: without its deleted samples."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardstream as ss
from tests.ray.cluster import MARKS
from tests.small_datasets import numbered

pytestmark = [*MARKS, pytest.mark.usefixtures("in_order")]


@pytest.mark.parametrize("tasks", [1, 7])
def test_deleted_samples_are_no_rows(tmp_path: Path, tasks: int) -> None:
    url = numbered(tmp_path / "data", 300, 10)  # more shards than a task gets whole
    gone = [0, 20, 21, *range(50, 60), 299]
    ss.delete(url, numbers=gone)
    expected = [n for n in range(300) if n not in gone]
    for _ in range(2):
        rows = ss.ray.read(url, override_num_blocks=tasks)
        assert rows.count() == len(expected)
        assert [int(row["cls"]) for row in rows.take_all()] == expected
        ss.compact(url)
    old = ss.ray.read(ss.ShardDataset(url, version=1), override_num_blocks=tasks)
    assert old.count() == 300
