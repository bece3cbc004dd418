"""Test that a worker frees a batch before it reads the next one, because photos are many MB."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.pipeline import LoaderPosition
from shardstream.testing import make_shards


class Thing:
    """An item that supports weak references."""

    def __init__(self, _: Any) -> None:
        pass


@pytest.mark.parametrize("many", [False, True])
def test_yielded_batch_has_no_other_references(many: bool, tmp_path: Path) -> None:
    url = make_shards(tmp_path, samples=200, per_shard=200 if many else 9)
    dataset = ss.ShardDataset(url, shuffle=True).map(Thing)
    loader = ss.ShardLoader(dataset, 20, num_workers=0, collate_fn=list)
    worker_batches = loader._batches.read(LoaderPosition())
    for _ in range(5):
        worker_batch = next(worker_batches)
        held = [weakref.ref(thing) for thing in worker_batch.batch]
        del worker_batch
        assert [one() for one in held] == [None] * 20
