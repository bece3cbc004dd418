from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardstream.errors import SampleError
from shardstream.loader import collate
from shardstream.pipeline import Batched, Context, Stage, Unbatched, split_batch
from shardstream.testing import ListRun


def through(stage: Stage, items: Any) -> list[Any]:
    return list(stage.open(ListRun(items), Context()))


@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [
        (2, False, [[0, 1], [2, 3], [4]]),
        (2, True, [[0, 1], [2, 3]]),
        (5, True, [[0, 1, 2, 3, 4]]),
        (9, False, [[0, 1, 2, 3, 4]]),
        (9, True, []),
    ],
)
def test_items_are_collated_to_batches(size: int, drop_last: bool, expected: Any) -> None:
    assert through(Batched(size=size, collate=list, drop_last=drop_last), range(5)) == expected


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        ({"a": [1, 2], "b": ("x", "y")}, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
        (([1, 2], [3, 4]), [(1, 3), (2, 4)]),
        ([1, 2, 3], [1, 2, 3]),
        ([], []),
        ({"a": np.arange(2)}, [{"a": 0}, {"a": 1}]),
    ],
)
def test_batches_are_split_into_items(batch: Any, items: list[Any]) -> None:
    assert list(split_batch(batch)) == items


@pytest.mark.parametrize("batch", [{"a": [1], "b": [1, 2]}, ([1], [1, 2])])
def test_columns_of_different_lengths_are_refused(batch: Any) -> None:
    with pytest.raises(SampleError, match=r"columns differ in length: \{'.*': 1, '.*': 2\}"):
        list(split_batch(batch))


def test_unbatched_undoes_batched() -> None:
    samples = [{"__key__": str(i), "x": np.full(3, i), "n": i} for i in range(7)]
    run = Unbatched().open(
        Batched(size=3, collate=collate).open(ListRun(samples), Context()), Context()
    )
    found = list(run)
    assert [sample["__key__"] for sample in found] == [str(i) for i in range(7)]
    assert all(torch.equal(sample["x"], torch.full((3,), i)) for i, sample in enumerate(found))


def test_items_of_one_batch_have_different_numbers() -> None:
    run = Unbatched().open(ListRun([[1, 1], [1, 1, 1]]), Context())
    assert len({run.number for _ in run}) == 5


def test_empty_batches_are_skipped() -> None:
    assert through(Unbatched(), [[], [1], [], [], [2, 3], []]) == [1, 2, 3]
