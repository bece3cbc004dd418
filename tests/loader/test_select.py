"""``select`` leaves holes: positions stay exact on any number of ranks and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.errors import SampleError
from tests.small_datasets import FEW_CORES, flat, grouped, labels, numbered, take

pytestmark = [
    pytest.mark.filterwarnings("ignore:lanes="),
    pytest.mark.filterwarnings("ignore:an epoch of this mix has only"),
    pytest.mark.filterwarnings(FEW_CORES),
]
SAMPLES = 96


def odd(sample: Any) -> bool:
    return bool(sample["cls"] % 2)


def tenth(sample: Any) -> bool:
    return bool(sample["cls"] % 10 == 3)


def none(sample: Any) -> bool:
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("select") / "set", SAMPLES, 13)


def dataset_of(folder: str, kind: str, **options: Any) -> ss.loader.StreamDataset:
    order = {"lanes": 8, "microbatch": 2, "block": 3, "seed": 5}
    options = {"shuffle": True, **order, **options}
    if kind == "mix":
        del options["block"], options["seed"], options["lanes"], options["microbatch"]
        parts = [
            ss.ShardDataset(folder, **grouped(subset=numbers, **options)).decode()
            for numbers in (range(60), range(60, SAMPLES))
        ]
        order_of_mix = ss.OrderOptions(lanes=8, microbatch=2)
        return ss.mix(parts, [2.0, 1.0], order=order_of_mix, seed=2)
    if kind == "weights":
        options["weights"] = [1.0 + number % 4 for number in range(SAMPLES)]
    return ss.ShardDataset(folder, **grouped(**options)).decode()


def make(  # noqa: PLR0913, PLR0917
    folder: str, kind: str, predicate: Any, batch: int, rank: int = 0, ranks: int = 1, workers: int = 0, **options: Any
) -> ss.ShardLoader:  # fmt: skip
    dataset = dataset_of(folder, kind, placement=ss.Placement(rank, ranks), **options)
    dataset = dataset if predicate is None else dataset.select(predicate)
    return ss.ShardLoader(dataset, batch, num_workers=workers)


def accepted(batches: list[list[int]], predicate: Any) -> list[list[int]]:
    return [[label for label in batch if predicate({"cls": label})] for batch in batches]


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_two_resumes_on_other_ranks_give_the_accepted_samples_of_each_planned_step(
    folder: str, data: st.DataObject
) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(["plain", "mix", "weights"]))
    predicate = draw(st.sampled_from([odd, tenth]))
    state: Any = None
    for _ in range(3):
        ranks, batch = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4, 8]))
        steps, states = draw(st.integers(0, 6)), []
        for rank in range(ranks):
            loader, plain = (
                make(folder, kind, one, batch, rank, ranks) for one in (predicate, None)
            )
            for one in (loader, plain):
                if state is not None:
                    one.load_state_dict(state)
            assert len(loader) == len(plain)
            expected = accepted(labels(plain), predicate)
            if ranks == 1:  # a step of which nothing is left has no batch
                expected = [one for one in expected if one]
                steps = min(steps, max(0, len(expected) - 1))
            found = labels(take(loader, steps))
            assert len(found) == min(steps, len(expected))
            for mine, planned in zip(found, expected, strict=False):
                if planned:
                    assert mine == planned
                else:
                    assert len(mine) == 1
                    assert predicate({"cls": mine[0]})
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states), "ranks differ in their state"
        state = states[0]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("refill", [False, True])
def test_workers_change_nothing(folder: str, workers: int, refill: bool) -> None:
    policy = ss.SkipBudget(refill=refill)
    one = make(folder, "plain", tenth, 8, on_error=policy)
    other = make(folder, "plain", tenth, 8, workers=workers, on_error=policy)
    expected = labels(one)
    assert labels(take(other, 3)) == expected[:3]
    again = make(folder, "plain", tenth, 8, on_error=policy)
    again.load_state_dict(other.state_dict())
    assert labels(again) == expected[3:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_refill_fills_every_batch_with_accepted_samples(folder: str, ranks: int) -> None:
    for rank in range(ranks):
        options: Any = {"on_error": ss.SkipBudget(samples=0, refill=True)}
        loader = make(folder, "plain", tenth, 8, rank, ranks, **options)
        batches = labels(loader)
        assert [len(batch) for batch in batches] == [8] * len(loader)
        assert {label % 10 for batch in batches for label in batch} == {3}
        assert loader.refilled == 8 * len(batches) - sum(
            len(batch) for batch in accepted(labels(make(folder, "plain", None, 8, rank, ranks)), tenth)
        )  # fmt: skip
        assert not loader.skipped


def test_refused_samples_are_counted_and_are_not_bad(folder: str) -> None:
    loader = make(folder, "plain", odd, 8, workers=2)
    assert sorted(flat(labels(loader))) == list(range(1, SAMPLES, 2))
    stats = loader.stats()
    assert (stats.timings.samples, stats.timings.refused) == (48, 48)
    assert stats.as_dict()["refused"] == 48
    assert "48 samples refused by select" in str(stats)
    assert (loader.skipped, loader.bad_samples) == ({}, [])


def test_an_epoch_without_accepted_samples_warns_or_is_an_error_that_names_select(
    folder: str,
) -> None:
    with pytest.warns(UserWarning, match=r"left out all samples of this epoch.*decode"):
        assert labels(make(folder, "plain", none, 8)) == []
    loader = make(folder, "plain", none, 8, 0, 2)
    with pytest.raises(SampleError, match=r"all samples of a batch .*; fix the data, or choose .* where= or subset="):  # fmt: skip
        take(loader, 1)


@pytest.mark.filterwarnings("ignore:samples may be left out")
def test_a_loop_without_a_loader_warns_of_an_epoch_without_samples(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    for refused in (dataset.select(none), dataset.select(none).batched(4).repeat()):
        with pytest.warns(UserWarning, match=r"of this epoch, so no sample came; before decode"):
            assert list(refused) == []
    part = ss.ShardDataset(folder, placement=ss.Placement(1, 2)).decode().select(none)
    with pytest.warns(UserWarning, match="epoch in worker 0, rank 1, so no sample"):
        assert list(part) == []
    assert len(list(dataset.select(tenth))) == 10
    state = iter(dataset.select(none)).state_dict()
    continued = iter(dataset.select(none))
    continued.load_state_dict(state)
    assert list(continued) == []


def test_lengths_are_those_of_the_planned_samples(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().select(odd)
    assert len(dataset) == SAMPLES
    assert len(list(dataset)) == SAMPLES // 2
    loader = ss.ShardLoader(dataset, 8)
    assert len(loader) == len(labels(loader)) == SAMPLES // 8


def test_a_part_of_a_mix_may_refuse_samples(folder: str) -> None:
    parts = {
        "a": ss.ShardDataset(folder, subset=range(60)).decode().select(odd),
        "b": ss.ShardDataset(folder, subset=range(60, SAMPLES)).decode(),
    }
    mixed = ss.mix(parts)
    expected = [*range(1, 60, 2), *range(60, SAMPLES)]
    assert sorted(sample["cls"] for sample in mixed) == expected
    loader = ss.ShardLoader(mixed, 8)
    assert sorted(flat(labels(loader))) == expected
    assert loader.samples_per_dataset == {"a": 60, "b": 36}  # planned
    assert loader.stats().timings.refused == 30


def test_by_number_a_refused_sample_is_an_error_that_says_so(folder: str) -> None:
    stream = ss.ShardDataset(folder).decode()
    for dataset in (stream.select(odd).by_number(), stream.by_number().select(odd)):
        assert len(dataset) == SAMPLES
        assert dataset[7]["cls"] == 7
        match = r"select\(odd\) refuses this sample, .* where= or subset=.*sample '000008'"
        with pytest.raises(SampleError, match=match):
            dataset[8]
        with pytest.raises(SampleError, match="refuses"):
            dataset.__getitems__([7, 8, 9])


def test_after_batches_the_items_have_positions_of_workers(folder: str, tmp_path: Path) -> None:
    batches = ss.ShardDataset(folder).decode().batched(3)
    dataset = batches.select(lambda batch: bool(batch["cls"][0] % 2))
    loader = ss.ShardLoader(dataset, None)
    assert labels(loader) == [[n, n + 1, n + 2] for n in range(3, SAMPLES, 6)]
    assert loader.stats().timings.refused == SAMPLES // 6
    state = loader.state_dict()
    with pytest.raises(ss.errors.StateError, match="number of workers"):
        ss.ShardLoader(dataset, None, num_workers=2).load_state_dict(state)


def test_rows_lack_refused_samples_in_a_loader_and_in_a_loop(folder: str) -> None:
    def fine(sample: Any) -> bool:
        return odd(sample) and not 32 <= sample["cls"] < 48

    dataset = ss.ShardDataset(folder).decode().select(fine)
    rows = dataset.batch_by_cost([1.0] * SAMPLES, 8, multiple=1)
    loader = ss.ShardLoader(rows, batch_size=None)
    expected = sorted(number for number in range(SAMPLES) if fine({"cls": number}))
    assert sorted(flat(labels(loader))) == sorted(flat(labels(rows))) == expected
    assert len(loader) == 12  # of two batches nothing is left
    assert len(labels(loader)) == 10


def test_ranks_without_a_loader_are_warned_that_they_may_differ_in_batches(folder: str) -> None:
    def lengths(dataset: ss.loader.StreamDataset) -> int:
        return len(list(DataLoader(dataset, 8)))

    parts = [
        ss.ShardDataset(folder, placement=ss.Placement(rank, 2)).decode().select(tenth)
        for rank in range(2)
    ]
    with pytest.warns(UserWarning, match=r"ranks may differ in batches .* use a ShardLoader"):
        found = [lengths(part) for part in parts]
    assert found != [len(ss.ShardLoader(part, 8)) for part in parts]
    assert len({len(labels(ss.ShardLoader(part, 8))) for part in parts}) == 1
    with pytest.warns(UserWarning, match="use a ShardLoader with a batch_size and steps"):
        list(ss.ShardLoader(parts[0], batch_size=None))
    assert lengths(ss.ShardDataset(folder).decode().select(tenth)) == 2
