"""Test custom stages that `then` appends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.pipeline import Context, ItemFunction, ItemStage, Run, SourceRun
from shardstream.testing import make_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(ItemStage):
    factor: int

    def bind(self, context: Context) -> ItemFunction:
        assert context.seed == 0
        return lambda sample, number: sample | {"cls": sample["cls"] * self.factor, "n": number}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Drop items whose class is divisible by a number."""

    divisor: int

    def open(self, source: Run, context: Context) -> Run:  # noqa: ARG002
        return DropRun(source, self.divisor)


class DropRun(SourceRun):
    def __init__(self, source: Run, divisor: int) -> None:
        super().__init__(source)
        self._divisor = divisor

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while (item := next(self.source))["cls"] % self._divisor == 0:
            pass
        return item


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return make_shards(tmp_path / "set", samples=24)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_item_stage_keeps_lengths_and_states_exact(num_workers: int, folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode().then(Scale(factor=10))

    def loader() -> ss.ShardLoader:
        return ss.ShardLoader(dataset, 4, num_workers=num_workers)

    whole = [batch["cls"].tolist() for batch in loader()]
    assert len(whole) == len(loader()) == 6
    assert sorted(n for batch in whole for n in batch) == [10 * n for n in range(24)]
    one, other = loader(), loader()
    batches = iter(one)
    next(batches)
    other.load_state_dict(one.state_dict())
    assert [batch["cls"].tolist() for batch in other] == whole[1:]


def test_stage_that_changes_counts_is_named_in_states(folder: str) -> None:
    def loader(divisor: int) -> ss.ShardLoader:
        return ss.ShardLoader(ss.ShardDataset(folder).decode().then(Drop(divisor=divisor)), 4)

    batches = iter(one := loader(3))
    assert next(batches)["cls"].tolist() == [1, 2, 4, 5]
    again = loader(3)
    again.load_state_dict(one.state_dict())
    assert next(iter(again))["cls"].tolist() == [7, 8, 10, 11]
    with pytest.raises(StateError, match=r"step 2 of the pipeline: .*Drop\(divisor=3\)"):
        loader(2).load_state_dict(one.state_dict())


def test_map_dataset_accepts_only_item_stages(folder: str) -> None:
    dataset = ss.ShardDataset(folder).by_number().decode().then(Scale(factor=2))
    item = dataset[5]
    assert (item["cls"], item["n"]) == (10, 5)
    with pytest.raises(OptionError, match="samples by number cannot use Drop"):
        dataset.then(Drop(divisor=2))


class NoStage:
    pass


@dataclass
class NoOpen:
    size: int = 3


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            len,
            r"a stage is an instance of a frozen dataclass, not <built-in function len>; .*map\(\)",
        ),
        (Scale, "a stage is an instance of a frozen dataclass"),
        (NoStage(), "a stage is an instance of a frozen dataclass"),
        (NoOpen(), r"NoOpen has no open\(source, context\)"),
    ],
)
def test_invalid_stage_is_refused(stage: Any, message: str, folder: str) -> None:
    dataset = ss.ShardDataset(folder)
    for one in (dataset, dataset.by_number()):
        with pytest.raises(OptionError, match=message):
            one.then(stage)
