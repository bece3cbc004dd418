"""Epochs that several processes count together, from the events that each of them appends."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardstream.loader import Epochs
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


class Begins(IterableDataset[Any]):
    """Begins iterations in workers, and yields what it finds: worker, epoch, whether to warn, current epoch."""

    def __init__(self, epochs: Epochs, times: int = 1, **options: Any) -> None:
        self.epochs, self.times = epochs, times
        self.counts = options.get("counts", True)
        self.state: int | None = options.get("state")
        self.waiting: Any = options.get("waiting")

    def __iter__(self) -> Iterator[tuple[int, int, bool, int]]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        if self.waiting is not None and number == 1:
            self.waiting.wait()
        for _ in range(self.times):
            epoch, warns = self.epochs.begin(counts=self.counts)
            if self.state is not None:
                self.epochs.resume(self.state)
                self.state += 1
            yield number, epoch, warns, self.epochs.current
        if self.waiting is not None and number == 0:
            self.waiting.set()


def loader(begins: Begins, seed: int | None = None, **options: Any) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(begins, batch_size=None, num_workers=2, generator=generator, **options)


def by_worker(found: Any) -> list[list[int]]:
    """Return the epochs of each worker."""
    rows = list(found)
    return [[epoch for worker, epoch, *_ in rows if worker == one] for one in range(2)]


def test_iterations_of_a_process_are_the_next_epochs() -> None:
    epochs = Epochs()
    assert (epochs.current, epochs.chosen) == (0, (0, 0))
    assert [epochs.begin(counts=True) for _ in range(3)] == [(0, False), (1, False), (2, False)]
    assert epochs.current == 2
    for calls, chosen in enumerate((7, 7, 3), start=1):
        epochs.set_epoch(chosen)
        assert (epochs.current, epochs.chosen) == (chosen, (chosen, calls))
        assert [epochs.begin(counts=True)[0] for _ in range(2)] == [chosen, chosen + 1]
        assert epochs.chosen == (chosen, calls)


def test_an_epoch_repeats_with_one_warning_where_iterations_do_not_count() -> None:
    epochs = Epochs(4)
    assert [epochs.begin(counts=False) for _ in range(3)] == [(4, False), (4, True), (4, False)]
    epochs.set_epoch(1)
    assert [epochs.begin(counts=False) for _ in range(2)] == [(1, False), (1, False)]
    assert epochs.begin(counts=True) == (2, False)


def test_chained_epochs_follow_set_epoch_and_count_apart() -> None:
    first = Epochs(2)
    first.set_epoch(3)
    child = first.chained()
    grandchild = child.chained()
    assert child.chosen == grandchild.chosen == (3, 1)
    first.begin(counts=True)
    first.begin(counts=True)
    assert child.begin(counts=True) == (3, False)
    child.set_epoch(8)
    assert (first.current, child.current, grandchild.current) == (4, 8, 8)
    first.set_epoch(9)
    assert [one.chosen for one in (first, child, grandchild)] == [(9, 2), (9, 3), (9, 3)]
    assert grandchild.begin(counts=True) == (9, False)
    assert [one.current for one in (first, child, grandchild)] == [9, 9, 9]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_workers_of_one_iterator_find_the_same_epochs(persistent: bool, times: int) -> None:
    epochs = Epochs()
    both = loader(Begins(epochs, times), persistent_workers=persistent)
    for first in (0, times, 2 * times):
        rows = list(both)
        assert by_worker(rows) == [list(range(first, first + times))] * 2
        assert all(epoch == current for _, epoch, _, current in rows)
        assert epochs.current == first + times - 1
    epochs.set_epoch(20)
    assert by_worker(both) == [list(range(20, 20 + times))] * 2
    assert epochs.begin(counts=True) == (20 + times, False)


def test_a_worker_that_is_behind_finds_the_epochs_of_the_others() -> None:
    epochs = Epochs()
    waiting = multiprocessing.get_context("fork").Event()
    behind = loader(Begins(epochs, 5, waiting=waiting), prefetch_factor=16)
    assert by_worker(behind) == [[0, 1, 2, 3, 4]] * 2
    assert epochs.current == 4


def test_iterators_of_one_seed_have_epochs_of_their_own() -> None:
    epochs = Epochs()
    found = [by_worker(loader(Begins(epochs), seed=0)) for _ in range(3)]
    assert found == [[[epoch]] * 2 for epoch in range(3)]


@pytest.mark.parametrize("seed", [None, 0])
def test_persistent_workers_of_two_loaders_read_in_turn(seed: int | None) -> None:
    epochs = Epochs()
    loaders = [loader(Begins(epochs), seed, persistent_workers=True) for _ in range(2)]
    found = [by_worker(one) for _ in range(2) for one in loaders]
    assert found == [[[epoch]] * 2 for epoch in range(4)]


def test_one_worker_warns_that_an_epoch_repeats() -> None:
    epochs = Epochs()
    both = loader(Begins(epochs, counts=False), persistent_workers=True)
    warnings = [sum(warns for *_, warns, _ in both) for _ in range(3)]
    assert warnings == [0, 1, 0]
    assert epochs.current == 0


def test_the_epoch_of_a_state_is_continued_and_the_next_one_follows() -> None:
    epochs = Epochs()
    epochs.begin(counts=True)
    epochs.resume(5)
    assert epochs.current == 5
    assert epochs.begin(counts=True) == (6, False)
    both = loader(Begins(epochs, state=11))
    assert [current for *_, current in both] == [11, 11]
    assert epochs.current == 11
    assert epochs.begin(counts=True) == (12, False)


def test_a_worker_that_resumes_later_does_not_turn_back_the_others() -> None:
    epochs = Epochs()
    waiting = multiprocessing.get_context("fork").Event()
    behind = loader(Begins(epochs, 3, state=11, waiting=waiting), prefetch_factor=16)
    rows = list(behind)
    assert by_worker(rows) == [[0, 12, 13], [11, 12, 13]]
    assert {current for *_, current in rows} == {11, 12, 13}
    assert epochs.current == 13


def test_processes_count_for_themselves() -> None:
    epochs = Epochs(1)
    epochs.begin(counts=True)
    epochs.begin(counts=True)
    child = os.fork()
    if not child:
        os._exit(10 * epochs.begin(counts=True)[0] + epochs.begin(counts=True)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    assert epochs.current == 2
    child = os.fork()
    if not child:
        epochs.set_epoch(7)  # for all of them
        os._exit(0)
    os.waitpid(child, 0)
    assert epochs.begin(counts=True) == (7, False)


@pytest.mark.parametrize(
    "travel",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],  # noqa: S301
)
def test_a_copy_begins_at_the_chosen_epoch(travel: Any) -> None:
    epochs = Epochs()
    epochs.set_epoch(3)
    epochs.begin(counts=True)
    epochs.begin(counts=True)
    other = travel(epochs)
    epochs.set_epoch(9)
    assert (other.current, other.begin(counts=True)) == (3, (3, False))
    assert epochs.current == 9


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_spawned_workers_count_with_the_process_that_started_them(context: str) -> None:
    epochs = Epochs(1)
    epochs.begin(counts=True)
    for first in (2, 4):
        both = loader(Begins(epochs, 2), multiprocessing_context=context)
        assert by_worker(both) == [[first, first + 1]] * 2
        assert epochs.current == first + 1
