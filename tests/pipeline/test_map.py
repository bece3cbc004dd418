from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from shardstream.errors import OptionError, SampleError, SkipBudgetError
from shardstream.pipeline import (
    Context,
    ItemStage,
    Map,
    MapDict,
    MapTuple,
    Rename,
    Select,
    SkipBudget,
    SkipTracker,
    Stage,
    ToTuple,
    find_field,
)
from shardstream.testing import ListRun

SAMPLE = {"__key__": "0042", "__url__": "s3://b/train-7.tar", "png": b"p", "cls": 3, "json": [1]}


def through(stage: Stage, *items: Any, context: Context | None = None) -> list[Any]:
    return list(stage.open(ListRun(items), context or Context()))


def half(value: int) -> float:
    return value / 2


def inverse(value: int) -> float:
    return 1 / value


@pytest.mark.parametrize(
    ("stage", "item", "expected"),
    [
        (Map(function=half), 3, 1.5),
        (Map(function=half, threads=2), 3, 1.5),
        (Map(function=lambda item: None), 3, None),  # noqa: ARG005
        (MapDict(functions={"cls": half, "json": len}), SAMPLE, {**SAMPLE, "cls": 1.5, "json": 1}),
        (MapTuple(functions=(half, None)), (1, 2, 3), (0.5, 2, 3)),
        (MapTuple(functions=()), (1,), (1,)),
        (Rename(names={"label": "cls"}), {"cls": 1, "a": 2}, {"a": 2, "label": 1}),
        (Rename(names={"image": "jpg;png"}, keep=False), SAMPLE,
         {"__key__": "0042", "__url__": "s3://b/train-7.tar", "image": b"p"}),
        (Rename(names={"a": "b", "b": "a"}), {"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (Rename(names={"a": "x", "b": "x"}), {"x": 1}, {"a": 1, "b": 1}),
        (ToTuple(names=("jpg;png", "cls", "__key__")), SAMPLE, (b"p", 3, "0042")),
    ],
)  # fmt: skip
def test_step_returns_one_item_per_item(stage: Stage, item: Any, expected: Any) -> None:
    assert through(stage, item) == [expected]


@pytest.mark.parametrize(
    "stage",
    [
        MapDict(functions={"cls": half}),
        Rename(names={"label": "cls"}, keep=False),
        Map(function=dict),
    ],
)
def test_step_does_not_change_its_input(stage: Stage) -> None:
    given = dict(SAMPLE)
    through(stage, given)
    assert given == SAMPLE


@pytest.mark.parametrize(
    ("stage", "item", "note"),
    [
        (Map(function=inverse), 0, "in map(inverse)"),
        (Map(function=inverse, threads=1), 0, "in map(inverse)"),
        (MapDict(functions={"cls": inverse}), {**SAMPLE, "cls": 0},
         "in map_dict(cls=inverse) on sample '0042' of s3://b/train-7.tar"),
        (MapTuple(functions=(None, inverse)), (1, 0), "in map_tuple(inverse), element 1"),
        (Select(predicate=inverse), 0, "in select(inverse)"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_user_error_keeps_its_type_and_gets_a_note(stage: Stage, item: Any, note: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        through(stage, item)
    assert caught.value.__notes__ == [note]


@pytest.mark.parametrize(
    ("stage", "item", "error", "message"),
    [
        (MapDict(functions={"txt": len}), SAMPLE, SampleError,
         r"map_dict: no field 'txt'; the sample has: png, cls, json \[in s3://b/train-7.tar, sample '0042'\]"),
        (MapDict(functions={"txt": len}), (1, 2), SampleError, "map_dict works on samples, not on tuple"),
        (ToTuple(names=("jpg;jpeg",)), SAMPLE, SampleError, "to_tuple: no field 'jpg;jpeg'"),
        (ToTuple(names=("jpg",)), [1], SampleError, "works on samples, not on list: put it before"),
        (Rename(names={"a": "b"}), SAMPLE, SampleError, "rename: no field 'b'"),
        (MapTuple(functions=(half,)), SAMPLE, OptionError, "got dict; put to_tuple before it"),
        (MapTuple(functions=(half, half)), (1,), OptionError, "map_tuple with 2 functions got tuple"),
    ],
)  # fmt: skip
def test_missing_field_raises_with_the_present_fields(
    stage: Stage, item: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        through(stage, item)


@pytest.mark.parametrize(
    "stage",
    [Map(function=inverse), Map(function=inverse, threads=2), Select(predicate=inverse)],  # type: ignore[arg-type]
)
def test_bad_items_are_skipped_within_the_budget(stage: Stage) -> None:
    context = Context(skips=SkipTracker(SkipBudget(samples=2)))
    assert len(through(stage, 1, 0, 2, 0, 4, context=context)) == 3
    assert context.skips.counts == {"ZeroDivisionError": 2}
    with pytest.raises(SkipBudgetError, match="3 bad samples, limit 2 "):
        through(stage, 0, context=context)


def test_threads_keep_the_order() -> None:
    def slow_at_first(item: int) -> int:
        return sum(range(20_000 * (20 - item))) * 0 + item

    assert through(Map(function=slow_at_first, threads=4), *range(20)) == list(range(20))


def test_select_keeps_items_with_a_true_predicate() -> None:
    assert through(Select(predicate=bool), 0, 1, "", "a", None, [0]) == [1, "a", [0]]


class Keeps:
    def __call__(self, item: Any) -> bool:
        return bool(item)


def yields(_item: Any) -> Any:
    yield False


async def waits(_item: Any) -> bool:
    return False


@pytest.mark.parametrize("predicate", [Keeps, yields, partial(yields), waits])
def test_select_refuses_what_is_always_true(predicate: Any) -> None:
    assert through(Select(predicate=Keeps()), 0, 1) == [1]
    with pytest.raises(OptionError, match=r"always counts as true.*pass a plain function"):
        Select(predicate=predicate)


def draw(item: int, generator: np.random.Generator) -> tuple[int, float]:
    return item, generator.random()


def test_generator_depends_only_on_seed_epoch_and_sample() -> None:
    stage = Map(function=draw, rng=True)
    one = through(stage, 5, 6, context=Context(seed=1, epoch=2, global_worker=0))
    assert through(stage, 5, 6, context=Context(seed=1, epoch=2, global_worker=7)) == one
    for other in (Context(seed=2, epoch=2), Context(seed=1, epoch=3)):
        assert through(stage, 5, 6, context=other) != one
    assert one[0][1] != one[1][1]


def test_generators_are_pinned() -> None:
    drawn = through(Map(function=draw, rng=True), 0, 0, context=Context(seed=0, epoch=0))
    assert [round(number, 6) for _, number in drawn] == [0.283584, 0.104768]


def test_find_field_returns_the_first_present_field() -> None:
    assert find_field("jpg;png;cls", SAMPLE, "x") == "png"


def test_item_stage_requires_bind() -> None:
    with pytest.raises(NotImplementedError):
        ItemStage().bind(Context())
