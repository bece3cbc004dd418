"""Each iteration reads the next epoch, however many batches were taken from the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardstream as ss
from shardstream.errors import OptionError
from shardstream.loader import EpochAgreement
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, labels, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 60, 15)


def keeps(sample: Any) -> bool:
    return bool(sample["cls"] >= 0)


def make(folder: str, steps: str = "plan", **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(lanes=2)).decode()
    dataset = dataset.select(keeps).shuffle(1).with_length(60) if steps == "parts" else dataset
    return ss.ShardLoader(dataset, 8, **options)


@cache
def epoch_of(folder: str, epoch: int, steps: str = "plan", **options: Any) -> list[list[int]]:
    loader = make(folder, steps, **options)
    loader.set_epoch(epoch)
    return labels(loader)


def next_by_next(loader: Any) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(len(loader))]


def until_third(loader: Any) -> list[Any]:
    taken = []
    for step, batch in enumerate(loader):
        taken.append(batch)
        if step == 2:
            break
    return taken


LOOPS: list[Callable[[Any], Iterable[Any]]] = [
    list,
    next_by_next,
    lambda loader: (batch for _, batch in zip(range(len(loader)), loader, strict=False)),
    lambda loader: islice(loader, 3),
    until_third,
]


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("plan", {}),
    ("parts", {}),
    ("plan", {"num_workers": 2, "persistent_workers": True}),
    ("parts", {"num_workers": 2}),
]


@pytest.mark.parametrize(
    ("kind", "loop"),
    with_slow_rest(
        [(kind, loop) for kind in KINDS[:2] for loop in LOOPS]
        + [(KINDS[2], LOOPS[0]), (KINDS[2], LOOPS[4]), (KINDS[3], LOOPS[1]), (KINDS[3], LOOPS[3])],
        KINDS,
        LOOPS,
    ),
)
def test_each_iteration_is_the_next_epoch(
    kind: tuple[str, dict[str, Any]], loop: Callable[[Any], Iterable[Any]], folder: str
) -> None:
    steps, options = kind
    workers = {"num_workers": options["num_workers"]} if options else {}
    expected = [epoch_of(folder, epoch, steps, **workers) for epoch in range(3)]
    loader = make(folder, steps, **options)
    found = [labels(loop(loader)) for _ in range(3)]
    assert found == [one[: len(got)] for one, got in zip(expected, found, strict=True)]
    assert found[0] != found[1] != found[2]


def test_iterations_without_a_batch_do_not_count(folder: str) -> None:
    loader = make(folder)
    iter(loader)
    unused = iter(loader)
    assert labels(loader) == epoch_of(folder, 0)
    loader.load_state_dict(state_in(folder, epoch=2, batches=3))
    iter(loader)
    assert labels(loader) == epoch_of(folder, 2)[3:]
    assert labels(loader) == epoch_of(folder, 3)
    del unused


def state_in(folder: str, *, epoch: int, batches: int) -> dict[str, Any]:
    loader = make(folder)
    loader.set_epoch(epoch)
    list(islice(loader, batches))
    return loader.state_dict()


def test_a_state_continues_the_epoch_that_was_left(folder: str) -> None:
    loader = make(folder)
    list(islice(loader, 3))
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 24)
    assert labels(islice(loader, 1)) == epoch_of(folder, 1)[:1]
    for one in (loader, make(folder)):  # the same loader, and one of another process
        one.load_state_dict(state)
        one.set_epoch(one.epoch)  # as in every training loop
        assert labels(one) == epoch_of(folder, 0)[3:]
        assert labels(one) == epoch_of(folder, 1)


def test_set_epoch_restarts_the_epoch_that_was_left(folder: str) -> None:
    loader = make(folder)
    for _ in range(2):
        assert labels(islice(loader, 3)) == epoch_of(folder, 0)[:3]
        loader.set_epoch(0)
    list(islice(loader, 3))
    loader.set_epoch(5)
    assert labels(loader) == epoch_of(folder, 5)


def test_a_state_after_exactly_all_batches_begins_the_next_epoch(folder: str) -> None:
    loader = make(folder)
    next_by_next(loader)
    assert loader.batches_left == 0
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (1, 0)
    loader.skip(2)  # of the next epoch
    assert labels(loader) == epoch_of(folder, 1)[2:]


def test_two_loaders_read_together_keep_their_own_epochs(folder: str) -> None:
    one, other = make(folder), make(folder)
    for epoch in range(2):
        pairs = list(zip(one, islice(other, 5), strict=False))
        assert labels(a for a, _ in pairs) == epoch_of(folder, epoch)[:5]
        assert labels(b for _, b in pairs) == epoch_of(folder, epoch)[:5]


def test_a_loader_can_be_built_again_of_its_attributes(folder: str) -> None:
    loader = make(folder)
    again = ss.ShardLoader(loader.dataset, 8)  # type: ignore[arg-type]  # as Lightning's overfit_batches does
    assert labels(again) == labels(loader)
    assert list(ss.ShardLoader(loader.dataset, 8, collate_fn=len))[:2] == [8, 8]  # type: ignore[arg-type]


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def take(agreement: EpochAgreement, epoch: int, batches: int, last: int | None = None) -> None:
    """Take batches of an iteration as a loader does."""
    for number in range(1, batches + 1):
        if number > 1:
            agreement.check()
        agreement.add_batch(epoch, is_first=number == 1, is_last=number == last)


def test_ranks_that_take_the_same_batches_agree() -> None:
    store = HashStore()
    ranks = [EpochAgreement(store, "key", rank) for rank in range(3)]
    for epoch, batches in enumerate([7, 3, 1, 7]):
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda one: take(one, epoch, batches, 7), ranks))  # noqa: B023


def test_a_rank_whose_epoch_is_shorter_goes_on_first() -> None:
    store = HashStore()
    short, long = (EpochAgreement(store, "key", rank) for rank in range(2))
    take(short, 0, 5)
    short.end()
    take(short, 1, 1)
    take(long, 0, 9)
    take(long, 1, 1)


def test_a_rank_that_looked_at_a_batch_alone_is_found_before_the_second_batch() -> None:
    store = HashStore()
    ahead, other = (EpochAgreement(store, "key", rank) for rank in range(2))
    take(ahead, 0, 1)
    take(ahead, 1, 1)
    take(other, 0, 1)
    with pytest.raises(OptionError, match=r"rank 0 took 1 and began the next one, rank 1 takes 2"):
        other.check()
    with pytest.raises(OptionError, match=r"rank 0 took 1 .* rank 2 takes 2"):
        take(EpochAgreement(store, "key", 2), 0, 4, 4)


def test_ranks_that_left_an_iteration_differently_are_found_at_the_next() -> None:
    store = HashStore()
    one, other = (EpochAgreement(store, "key", rank) for rank in range(2))
    for rank, batches in ((other, 3), (one, 4)):
        take(rank, 0, batches)
    take(one, 1, 1)
    with pytest.raises(OptionError, match=r"rank 0 took 4 .* rank 1 takes 3"):
        take(other, 1, 1)


def test_ranks_that_begin_different_epochs_are_refused() -> None:
    store = HashStore()
    take(EpochAgreement(store, "key", 0), 3, 1)
    with pytest.raises(OptionError, match="rank 0 begins epoch 3, rank 1 epoch 4; call set_epoch"):
        take(EpochAgreement(store, "key", 1), 4, 1)


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"drawn": torch.rand(()).item()}


def test_ranks_draw_other_numbers_from_the_global_generators(folder: str) -> None:
    drawn = []
    for rank in range(2):
        dataset = ss.ShardDataset(folder, placement=ss.Placement(rank, 2)).decode().map(draw)
        loader = ss.ShardLoader(dataset, 8, num_workers=1)
        drawn += [number for batch in loader for number in batch["drawn"].tolist()]
    assert len(set(drawn)) == len(drawn)
