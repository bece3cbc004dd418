"""Marks of all tests that use Ray, and helpers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import shardstream as ss
from shardstream.loader import StreamDataset

MARKS = [
    # Ray warns of its own deprecations, and leaves files and sockets to the end of the process.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tables(dataset: StreamDataset, **options: Any) -> list[pa.Table]:
    """Run the read tasks of a dataset in this process, in order."""
    return [
        table for task, _ in ss.ray.plan_read(dataset, **options).tasks() for table in task.read()
    ]


def rows(dataset: StreamDataset, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of the read tasks, in order."""
    return [row for table in tables(dataset, **options) for row in table.to_pylist()]


def samples(dataset: StreamDataset, fields: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the samples of a dataset as rows."""
    return [
        {
            name: value
            for name, value in sample.items()
            if name != "__url__" and (fields is None or name in fields)
        }
        for sample in dataset
    ]


def keys(folder: str | Path, **options: Any) -> list[str]:
    """Return the keys of a dataset in its own order."""
    return [sample["__key__"] for sample in ss.ShardDataset(str(folder), **options)]
