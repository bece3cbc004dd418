"""Test the contract of all stages: exact resume at every position, alone and as the last stage of a loader's pipeline."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream import pipeline
from shardstream.errors import SampleError, StateError
from shardstream.format import Columns
from shardstream.loader import collate
from shardstream.order import derive_key
from shardstream.pipeline import (
    BASIC,
    Batched,
    Compose,
    Context,
    Decode,
    GroupBatched,
    ItemStage,
    KeepFields,
    Map,
    MapDict,
    MapTuple,
    OpenFields,
    PackSequences,
    Rename,
    Repeat,
    Run,
    Select,
    Shuffle,
    SkipBudget,
    SkipTracker,
    Slice,
    Stage,
    ToTuple,
    Unbatched,
    describe,
)
from shardstream.storage import FieldPlaces, Storage
from shardstream.testing import ListRun, assert_resumes_exactly
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, labels, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

NUMBERS = range(23)
SAMPLES = [{"__key__": str(i), "cls": b"%d" % i, "txt": b"x"} for i in range(11)]
TUPLES = [(i, i * i) for i in range(11)]
TOKENS = [{"__key__": str(n), "npy": np.arange(n)} for n in (3, 7, 1, 2, 12, 0, 5, 4, 4, 1)]
BATCHES = [list(range(n)) for n in (3, 0, 1, 5, 0, 0, 2)]


def double(item: int) -> int:
    return 2 * item


def jitter(item: int, generator: np.random.Generator) -> float:
    return item + generator.random()


def is_third(item: int) -> bool:
    return item % 3 == 0


def never(item: int) -> bool:
    return False


def by_remainder(item: int) -> int:
    return item % 4


def rare(item: int) -> bool:
    return item == 1


def sums_and_echoes(items: Iterator[int]) -> Iterable[int]:
    total = 0
    for item in items:
        total += item
        yield total
        if item % 3 == 0:
            yield -item


CASES: dict[str, tuple[Stage, Iterable[Any]]] = {
    "map": (Map(function=double), NUMBERS),
    "map, rng": (Map(function=jitter, rng=True), NUMBERS),
    "map, threads": (Map(function=double, threads=2), NUMBERS),
    "map, rng and threads": (Map(function=jitter, rng=True, threads=2), NUMBERS),
    "map_dict": (MapDict(functions={"cls": len}), SAMPLES),
    "map_tuple": (MapTuple(functions=(None, double)), TUPLES),
    "rename": (Rename(names={"label": "cls;id"}, keep=False), SAMPLES),
    "fields=": (KeepFields(names=("txt;text", "cls")), SAMPLES),
    "lazy=": (OpenFields(names=("pdf",), places=FieldPlaces(["pdf"]), storage=Storage()), SAMPLES),
    "to_tuple": (ToTuple(names=("cls", "__key__")), SAMPLES),
    "decode": (Decode(table=BASIC), SAMPLES),
    "decode, threads": (Decode(table=BASIC, threads=3), SAMPLES),
    "select": (Select(predicate=is_third), NUMBERS),
    "select none": (Select(predicate=never), NUMBERS),
    "shuffle": (Shuffle(window=5), NUMBERS),
    "shuffle all": (Shuffle(window=100), NUMBERS),
    "shuffle ones": (Shuffle(window=1), NUMBERS),
    "slice": (Slice(start=2, stop=17, step=3), NUMBERS),
    "slice, open": (Slice(start=5, stop=None, step=1), NUMBERS),
    "slice nothing": (Slice(start=0, stop=0, step=1), NUMBERS),
    "repeat": (Repeat(times=3), range(7)),
    "repeat nothing": (Repeat(times=None), ()),
    "with_epoch, longer": (Repeat(items=17), range(5)),
    "with_epoch, shorter": (Repeat(items=3), range(5)),
    "compose": (Compose(function=sums_and_echoes), NUMBERS),
    "batched": (Batched(size=4, collate=list), NUMBERS),
    "batched, full ones": (Batched(size=4, collate=list, drop_last=True), NUMBERS),
    "unbatched": (Unbatched(), BATCHES),
    "group_batched": (
        GroupBatched(group=by_remainder, size=3, buffer=6, collate=list),
        NUMBERS,
    ),
    "group_batched, tight": (
        GroupBatched(group=by_remainder, size=3, buffer=3, collate=list, drop_last=True),
        NUMBERS,
    ),
    "pack_sequences": (PackSequences(field="npy", length=5), TOKENS),
    "pack_sequences, full rows": (PackSequences(field="npy", length=5, drop_last=True), TOKENS),
    "pack_sequences, first fit": (
        PackSequences(field="npy", length=12, packing="first_fit", open_rows=3),
        TOKENS,
    ),
    "group_batched, one waits": (GroupBatched(group=rare, size=2, buffer=9, collate=list), NUMBERS),
}


@pytest.mark.parametrize(("stage", "items"), CASES.values(), ids=CASES.keys())
def test_stage_resumes_exactly_at_every_position(stage: Stage, items: Iterable[Any]) -> None:
    context = Context(seed=3, epoch=2, global_worker=1)
    assert_resumes_exactly(lambda: stage.open(ListRun(items), context))


def draw(item: object, generator: np.random.Generator) -> float:
    return float(generator.random())


@pytest.mark.parametrize(("stage", "items"), CASES.values(), ids=CASES.keys())
def test_each_item_has_its_own_random_numbers_after_a_stage(
    stage: Stage, items: Iterable[Any]
) -> None:
    context = Context(seed=3, epoch=2, global_worker=1)

    def opened() -> Run:
        run = stage.open(ListRun(items), context)
        return Map(function=draw, rng=True).open(run, context)

    drawn = list(opened())
    assert len(set(drawn)) == len(drawn)
    assert_resumes_exactly(opened)


@pytest.mark.parametrize(("stage", "items"), CASES.values(), ids=CASES.keys())
def test_close_closes_the_run_before_and_is_idempotent(stage: Stage, items: Iterable[Any]) -> None:
    source = ListRun(items)
    run = stage.open(source, Context())
    next(run, None)
    run.close()
    run.close()
    assert source.closed


@pytest.mark.parametrize(
    "stage",
    [one for one, items in CASES.values() if isinstance(one, ItemStage) and items is SAMPLES],
    ids=lambda stage: type(stage).__name__,
)
def test_columns_are_those_of_single_samples(stage: ItemStage) -> None:
    names = ("__key__", "__url__", "cls", "txt")
    samples = [{"__key__": one["__key__"], "__url__": "a.tar"} | one for one in SAMPLES]
    columns = stage.apply_to_columns(
        Columns({name: [one[name] for one in samples] for name in names})
    )
    function = stage.bind(Context())
    if columns is not None:
        assert [*columns] == [function(sample, 0) for sample in samples]


def chained(*stages: Stage) -> Callable[[], Run]:
    def open_run() -> Run:
        run: Run = ListRun(range(31))
        context = Context(seed=1, epoch=1, skips=SkipTracker(SkipBudget(samples=1000)))
        for stage in stages:
            run = stage.open(run, context)
        return run

    return open_run


def fails_at_times(item: int) -> int:
    if item % 5 == 2:
        raise ValueError(item)
    return item


def to_list(item: int) -> list[int]:
    return [item] * (item % 3)


@pytest.mark.parametrize(
    "stages",
    [
        (Select(predicate=is_third), Shuffle(window=4), Map(function=jitter, rng=True)),
        (Shuffle(window=6), Shuffle(window=4, purpose=1), Batched(size=3, collate=list)),
        (Map(function=to_list), Unbatched(), Shuffle(window=5), Slice(start=1, stop=20, step=2)),
        (Batched(size=4, collate=list), Unbatched(), Repeat(times=2)),
        (Repeat(times=2), Compose(function=sums_and_echoes), Shuffle(window=7)),
        (Compose(function=sums_and_echoes), Compose(function=sums_and_echoes), Repeat(items=50)),
        (
            Map(function=double, threads=2),
            GroupBatched(group=by_remainder, size=3, buffer=5, collate=list),
            Unbatched(),
            Shuffle(window=3),
        ),
        (Map(function=fails_at_times), Map(function=fails_at_times, threads=2), Shuffle(window=4)),
        (Unbatched(), Map(function=jitter, rng=True), Shuffle(window=3)),
    ],
    ids=lambda stages: "-".join(type(stage).__name__ for stage in stages),
)
def test_stacked_stages_resume_exactly_at_every_position(stages: tuple[Stage, ...]) -> None:
    if isinstance(stages[0], Unbatched):
        context = Context(seed=1)
        assert_resumes_exactly(
            lambda: stages[2].open(
                stages[1].open(stages[0].open(ListRun(BATCHES), context), context), context
            )
        )
        return
    assert_resumes_exactly(chained(*stages))


NOTHINGS: list[Any] = [None, {}, 0, False, (), "", [], None, None, {}]  # valid items


def always(item: Any) -> bool:
    return True


def echo(items: Iterator[Any]) -> Iterable[Any]:
    yield from items


@pytest.mark.parametrize(
    "stages",
    [
        (Map(function=repr), Map(function=repr, threads=2)),
        (Select(predicate=always), Slice(start=0, stop=None, step=1), Repeat(times=1)),
        (Shuffle(window=3), Compose(function=echo)),
        (Batched(size=3, collate=list), Unbatched()),
        (GroupBatched(group=repr, size=2, buffer=4, collate=list), Unbatched()),
    ],
    ids=lambda stages: "-".join(type(stage).__name__ for stage in stages),
)
def test_none_and_empty_items_do_not_end_the_epoch(stages: tuple[Stage, ...]) -> None:
    run: Run = ListRun(NOTHINGS)
    for stage in stages:
        run = stage.open(run, Context())
    assert len(list(run)) == len(NOTHINGS)


def stops(*args: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    "stage",
    [
        Map(function=stops), Map(function=stops, threads=2), Select(predicate=stops), Compose(function=stops),
        Batched(size=3, collate=stops), GroupBatched(group=stops, size=2, buffer=4, collate=list),
        GroupBatched(group=by_remainder, size=2, buffer=4, collate=stops),
    ],
    ids=describe,
)  # fmt: skip
def test_function_that_raises_stop_iteration_is_an_error(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(stage.open(ListRun(range(5)), Context()))


def test_batch_of_unknown_length_is_an_error() -> None:
    run = Unbatched().open(
        Batched(size=2, collate=collate).open(ListRun([{}, {}]), Context()), Context()
    )
    with pytest.raises(SampleError, match="without columns"):
        list(run)


def test_function_that_yields_less_after_a_resume_is_an_error() -> None:
    run = Compose(function=echo).open(ListRun(range(9)), Context())
    take(run, 5)
    less = Compose(function=every_other).open(ListRun(range(9)), Context())
    less.load_state_dict(run.state_dict())
    with pytest.raises(
        StateError, match=r"compose\(every_other\) returned 4 items, the state has 5"
    ):
        list(less)


def fails_at_ten(item: int) -> int:
    if item == 10:
        raise ValueError("item 10")
    return item


@pytest.mark.parametrize(
    "stages",
    [
        (Map(function=fails_at_ten), Map(function=double, threads=4)),
        (Map(function=fails_at_ten, threads=4),),
        (Map(function=fails_at_ten, threads=2), Map(function=double, threads=4)),
    ],
)
def test_threads_yield_all_items_before_an_error(stages: tuple[Stage, ...]) -> None:
    run: Run = ListRun(range(20))
    for stage in stages:
        run = stage.open(run, Context())
    assert len(take(run, 10)) == 10
    with pytest.raises(ValueError, match="item 10"):
        next(run)
    assert len(list(run)) == 9  # as without threads: the next call continues
    run.close()


def public_stages() -> set[type]:
    """Every dataclass of ``shardstream.pipeline`` with ``open(source, context)``."""
    modules = [
        import_module(f"{pipeline.__name__}.{m.name}")
        for m in pkgutil.iter_modules(pipeline.__path__)
    ]
    return {
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type)
        and is_dataclass(found)
        and found.__module__ == module.__name__
        and not found.__name__.startswith("_")
        and getattr(getattr(found, "open", None), "__code__", None) is not None
        and found.open.__code__.co_varnames[1:3] == ("source", "context")  # type: ignore[attr-defined]
    }


def test_contract_suite_covers_all_public_stages() -> None:
    assert public_stages() == {type(stage) for stage, _ in CASES.values()}


def test_state_stays_small() -> None:
    run = chained(Shuffle(window=20), Batched(size=3, collate=list), Unbatched())()
    sizes = [len(json.dumps(run.state_dict())) for _ in run]
    assert max(sizes) < 200


# -- through a loader --------------------------------------------------------------------------------------------------------


def label(sample: dict[str, Any]) -> int:
    found: int = sample["cls"]
    return found


def label_group(sample: dict[str, Any]) -> int:
    return label(sample) % 3


def is_even(sample: dict[str, Any]) -> bool:
    return label(sample) % 2 == 0


def twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, sample]


def every_other(samples: Iterator[Any]) -> Iterator[Any]:
    for place, sample in enumerate(samples):
        if place % 2:
            yield sample


PIPELINES: dict[str, tuple[Callable[[ss.ShardDataset], ss.ShardDataset], int | None]] = {
    "select": (lambda ds: ds.shuffle(5).select(is_even), 4),
    "shuffle": (lambda ds: ds.shuffle(9), 4),
    "slice": (lambda ds: ds.slice(1, 17, 2), 4),
    "repeat": (lambda ds: ds.repeat(2), 8),
    "with_epoch": (lambda ds: ds.with_epoch(25), 4),
    "compose": (lambda ds: ds.compose(every_other), 4),
    "flat map": (lambda ds: ds.map(twice).unbatched(), 6),
    "batched": (lambda ds: ds.shuffle(7).batched(4), None),
    "group_batched": (lambda ds: ds.group_batched(label_group, 4, buffer=8), None),
}
TOPOLOGIES = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 61, 9)


def open_loader(
    folder: str, name: str, num_workers: int, *, index: Any = "auto", **options: Any
) -> ss.ShardLoader:
    build, batch_size = PIPELINES[name]
    options |= {} if index == "ignore" else {"microbatch": 2}
    dataset = ss.ShardDataset(folder, **grouped(shuffle=True, seed=5, index=index, **options))
    return ss.ShardLoader(build(dataset.decode()), batch_size, num_workers=num_workers)


def check_resume(make: Callable[[], ss.ShardLoader], cuts: Iterable[int]) -> None:
    full = labels(make())
    for cut in cuts:
        loader = make()
        seen = labels(take(loader, cut % (len(full) + 1)))
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert seen + labels(resumed) == full


@pytest.mark.parametrize(
    ("name", "num_workers"),
    with_slow_rest(
        [(name, 2 * (place % 2)) for place, name in enumerate(PIPELINES)], PIPELINES, TOPOLOGIES
    ),
)
def test_loader_resumes_a_pipeline_on_the_same_topology(
    folder: str, name: str, num_workers: int
) -> None:
    cuts = (0, 1, 2, 3, 5, 8, 13, 21, -1) if num_workers == 0 else (5,)
    check_resume(lambda: open_loader(folder, name, num_workers), cuts)


@pytest.mark.parametrize(
    ("name", "num_workers"),
    with_slow_rest(
        [("select", 0), ("shuffle", 2), ("group_batched", 0)],
        ["select", "shuffle", "group_batched"],
        TOPOLOGIES,
    ),
)
def test_loader_resumes_a_pipeline_without_an_index(
    folder: str, name: str, num_workers: int
) -> None:
    cuts = (0, 1, 2, 3, 5, 8, 13, -1) if num_workers == 0 else (5,)
    check_resume(lambda: open_loader(folder, name, num_workers, index="ignore"), cuts)


@pytest.mark.parametrize("name", PIPELINES)
def test_another_number_of_workers_is_refused_with_both(folder: str, name: str) -> None:
    loader = open_loader(folder, name, 0)
    take(loader, 2)
    with pytest.raises(
        StateError, match="number of workers: the state says 1, here it is 3; .* same topology"
    ):
        open_loader(folder, name, 3).load_state_dict(loader.state_dict())


def test_another_rank_or_world_is_refused_with_both(folder: str) -> None:
    state = open_loader(folder, "select", 0, placement=ss.Placement(0, 2)).state_dict()
    for placement, message in (
        (ss.Placement(1, 2), "rank: the state says 0, here it is 1"),
        (ss.Placement(0, 3), "number of ranks: the state says 2, here it is 3"),
    ):
        with pytest.raises(StateError, match=message):
            open_loader(folder, "select", 0, placement=placement).load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [
        lambda ds: ds.shuffle(10),
        lambda ds: ds.shuffle(9).select(is_even),
        lambda ds: ds.select(is_even).shuffle(9),
        lambda ds: ds.slice(9),
    ],
)
def test_another_pipeline_is_refused(
    folder: str, other: Callable[[ss.ShardDataset], ss.ShardDataset]
) -> None:
    state = open_loader(folder, "shuffle", 0).state_dict()
    dataset = ss.ShardDataset(
        folder, shuffle=True, seed=5, order=ss.OrderOptions(microbatch=2)
    ).decode()
    with pytest.raises(
        StateError,
        match=r"step [23] of the pipeline: the state says (Shuffle\(window=9\)|nothing), here",
    ):
        ss.ShardLoader(other(dataset), 4).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_maps_after_count_changing_steps_resume_exactly(
    folder: str, num_workers: int
) -> None:
    def make() -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, shuffle=True).decode().map(twice).unbatched()
        return ss.ShardLoader(dataset.map(noisy, rng=True), 4, num_workers=num_workers)

    full = [batch["noise"].tolist() for batch in make()]
    loader = make()
    take(loader, 3)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert [batch["noise"].tolist() for batch in resumed] == full[3:]
    assert len({noise for batch in full for noise in batch}) == 2 * 61


def noisy(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"cls": sample["cls"], "noise": generator.random()}


def test_stages_of_equal_type_draw_different_random_numbers() -> None:
    context = Context(seed=1)
    one, two = (
        Map(function=jitter, rng=True, purpose=purpose).open(ListRun([0, 0]), context)
        for purpose in (0, 1)
    )
    assert list(one) != list(two)
    assert (
        context.generator(4, derive_key(0)).random() != context.generator(5, derive_key(0)).random()
    )
