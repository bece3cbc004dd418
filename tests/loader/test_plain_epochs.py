"""Loops and torch's loaders read the next epoch in each iteration, as a `ShardLoader` does."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardstream as ss
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, numbered

pytestmark = [
    pytest.mark.filterwarnings(FEW_CORES),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # a warning of torchdata
]
SAMPLES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), SAMPLES, 15)


def make(folder: str, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(folder, **grouped(shuffle=True, microbatch=4, **options)).decode("rgb8")


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["cls"] for sample in samples]


def torch_loader(dataset: Any, num_workers: int = 0, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=4, collate_fn=numbers, num_workers=num_workers, **options)


def stateful(dataset: Any, num_workers: int = 0, **options: Any) -> Any:
    return StatefulDataLoader(
        dataset, batch_size=4, collate_fn=numbers, num_workers=num_workers, **options
    )


class Direct:
    """A loop over the dataset itself, by batches."""

    def __init__(self, dataset: ss.ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset) // 4

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.dataset)
        while batch := numbers(list(islice(samples, 4))):
            yield batch


LOADERS: dict[str, Callable[[ss.ShardDataset], Any]] = {
    "direct": Direct,
    "torch": torch_loader,
    "fork": lambda dataset: torch_loader(dataset, 2),
    "persistent": lambda dataset: torch_loader(dataset, 2, persistent_workers=True),
    "stateful": stateful,
    "stateful-fork": lambda dataset: stateful(dataset, 2),
}
SPAWNED: dict[str, Callable[[ss.ShardDataset], Any]] = {
    "spawn": lambda dataset: torch_loader(dataset, 2, multiprocessing_context="spawn"),
    "forkserver": lambda dataset: torch_loader(
        dataset, 2, multiprocessing_context="forkserver", persistent_workers=True
    ),
}
EITHER = [*LOADERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SPAWNED)]


def loader_of(name: str, dataset: ss.ShardDataset) -> Any:
    return (LOADERS | SPAWNED)[name](dataset)


def epochs_of(folder: str, name: str, epochs: Iterable[int]) -> list[list[list[int]]]:
    """Return the batches of epochs that were chosen."""
    fresh = "fork" if name == "persistent" else name
    return [epoch_of(folder, fresh, epoch) for epoch in epochs]


@cache
def epoch_of(folder: str, name: str, epoch: int) -> list[list[int]]:
    dataset = make(folder)
    dataset.set_epoch(epoch)
    return list(loader_of(name, dataset))


@pytest.mark.parametrize("name", EITHER)
def test_each_iteration_is_the_next_epoch(name: str, folder: str) -> None:
    dataset = make(folder)
    loader = loader_of(name, dataset)
    found = [list(loader) for _ in range(3)]
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch) == list(range(SAMPLES))
    assert all(one != other for one, other in pairwise(found))
    if name in LOADERS:
        assert found == epochs_of(folder, name, range(3))
    assert dataset.epoch == 2


def next_by_next(loader: Any) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(len(loader))]


def first_two(loader: Any) -> list[Any]:
    return list(islice(loader, 2))


@pytest.mark.parametrize(
    ("name", "loop"),
    with_slow_rest(
        [
            ("direct", first_two),
            ("torch", next_by_next),
            ("fork", first_two),
            ("persistent", next_by_next),
            ("stateful-fork", next_by_next),
        ],
        ["direct", "torch", "fork", "persistent", "stateful-fork"],
        [next_by_next, first_two],
    ),
)
def test_a_loop_that_stops_early_has_read_its_epoch(name: str, loop: Any, folder: str) -> None:
    loader = loader_of(name, make(folder))
    found = [loop(loader) for _ in range(3)]
    whole = epochs_of(folder, name, range(3))
    assert found == [epoch[: len(got)] for epoch, got in zip(whole, found, strict=True)]


@pytest.mark.parametrize(
    "name", ["direct", pytest.param("fork", marks=pytest.mark.slow), "persistent"]
)
def test_epochs_go_on_from_the_one_that_was_set(name: str, folder: str) -> None:
    dataset = make(folder)
    loader = loader_of(name, dataset)
    list(loader)
    for chosen in (7, 7, 0):
        dataset.set_epoch(chosen)
        assert dataset.epoch == chosen
        assert [list(loader), list(loader)] == epochs_of(folder, name, [chosen, chosen + 1])
        assert dataset.epoch == chosen + 1


@pytest.mark.parametrize(
    ("workers", "taken"), with_slow_rest([(0, 3), (0, 10), (2, 10)], [0, 2], [3, 10])
)
def test_epochs_go_on_after_a_resume(workers: int, taken: int, folder: str) -> None:
    left = stateful(make(folder), workers)
    list(left)
    first = list(islice(left, taken))
    state = left.state_dict()
    whole = epochs_of(folder, "stateful-fork" if workers else "stateful", range(1, 4))
    resumed = stateful(make(folder), workers)
    resumed.load_state_dict(state)
    assert [first + list(resumed), list(resumed), list(resumed)] == whole
    left.load_state_dict(state)  # also where later epochs have been read
    assert list(left) == whole[0][taken:]


def test_loaders_that_read_one_dataset_together_each_read_whole_epochs(folder: str) -> None:
    dataset = make(folder)
    loaders = [torch_loader(dataset, 2), torch_loader(dataset, 2, persistent_workers=True)]
    seen = set()
    for _ in range(2):
        epochs = list(zip(*zip(*loaders, strict=True), strict=True))
        for epoch in epochs:
            assert sorted(number for batch in epoch for number in batch) == list(range(SAMPLES))
        seen.add(repr(epochs))
    assert len(seen) == 2


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_that_read_one_dataset_in_turn_read_the_next_epochs(
    persistent: bool, folder: str
) -> None:
    dataset = make(folder)
    one, other = (torch_loader(dataset, 2, persistent_workers=persistent) for _ in range(2))
    assert [list(one), list(other), list(one), list(other)] == epochs_of(folder, "fork", range(4))


def test_persistent_workers_follow_set_epoch_after_many_other_loaders(folder: str) -> None:
    dataset = make(folder)
    loader = torch_loader(dataset, 2, persistent_workers=True)
    list(loader)
    for _ in range(17):
        next(iter(torch_loader(dataset, 1)))
    dataset.set_epoch(1)
    assert list(loader) == epochs_of(folder, "persistent", [1])[0]


def test_iterations_of_one_seed_are_epochs_of_their_own(folder: str) -> None:
    loader = torch_loader(make(folder), 2)
    found = []
    for _ in range(3):
        torch.manual_seed(0)  # so the workers of all iterations have the same seeds
        found.append(list(loader))
    assert found == epochs_of(folder, "fork", range(3))


class Repeats(IterableDataset[Any]):
    """A wrapper that reads a dataset several times in an iteration, as users write it."""

    def __init__(self, dataset: ss.ShardDataset, times: int) -> None:
        self.dataset, self.times = dataset, times

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.times):
            yield from self.dataset


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_repeat_a_dataset_read_the_same_epochs(persistent: bool, folder: str) -> None:
    dataset = make(folder, subset=slice(6))
    loader = torch_loader(Repeats(dataset, 30), 2, persistent_workers=persistent)
    orders = set()
    for _ in range(2):
        found = [number for batch in loader for number in batch]
        assert sorted(found) == sorted(list(range(6)) * 30)
        orders.add(tuple(found))
    assert len(orders) == 2


def read_epochs(dataset: ss.ShardDataset, found: Any) -> None:
    torch.manual_seed(0)
    found.put([list(torch_loader(dataset, 2)) for _ in range(3)])


def test_processes_that_share_a_dataset_count_their_own_epochs(folder: str) -> None:
    dataset = make(folder)
    next(iter(dataset))  # does not count for them
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    processes = [context.Process(target=read_epochs, args=(dataset, found)) for _ in range(2)]
    for process in processes:
        process.start()
    whole = epochs_of(folder, "fork", range(3))
    assert [found.get() for _ in processes] == [whole] * 2
    for process in processes:
        process.join()


@pytest.mark.parametrize(
    "travel",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],  # noqa: S301
)
def test_a_copy_counts_for_itself(travel: Any, folder: str) -> None:
    dataset = make(folder)
    first, second = (numbers(list(dataset)) for _ in range(2))
    other = travel(dataset)
    assert [numbers(list(other)), numbers(list(other))] == [first, second]
    assert numbers(list(dataset)) not in (first, second)


@pytest.mark.slow
def test_many_processes_that_share_a_dataset_count_their_own_epochs(folder: str) -> None:
    dataset = make(folder)
    start, said = os.pipe(), os.pipe()

    def begins(times: int) -> None:
        for _ in range(times):
            next(iter(dataset))

    pids = []
    for process in range(70):
        pids.append(os.fork())
        if not pids[-1]:
            begins(1)
            os.write(said[1], b".")
            if process == 0:  # goes on after the others
                os.read(start[0], 1)
                begins(1)
            os._exit(dataset.epoch)
        os.read(said[0], 1)
    os.write(start[1], b".")
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [1] + [0] * 69
    for handle in (*start, *said):
        os.close(handle)


NO_FILES_IN_MEMORY = """
import os, sys
del os.memfd_create
from tests.loader.test_plain_epochs import epochs_of, make, torch_loader
folder = sys.argv[1]
loader = torch_loader(make(folder), 2)
assert [list(loader), list(loader)] == epochs_of(folder, "fork", range(2))
"""


@pytest.mark.slow
def test_epochs_are_counted_where_the_system_has_no_files_in_memory(folder: str) -> None:
    command = [sys.executable, "-c", NO_FILES_IN_MEMORY, folder]
    subprocess.run(command, check=True, timeout=300)


def test_looking_at_a_dataset_does_not_change_the_epochs_of_a_shard_loader(folder: str) -> None:
    dataset = make(folder)
    loader = ss.ShardLoader(dataset, 4)
    expected = [batch["cls"].tolist() for batch in ss.ShardLoader(make(folder), 4)]
    for _ in range(3):
        next(iter(dataset))
    assert [batch["cls"].tolist() for batch in loader] == expected
    assert ss.ShardLoader(dataset, 4).epoch == ss.ShardLoader(dataset.map(len), 4).epoch == 0


# -- several ranks -------------------------------------------------------------------------------------------------------------


def to_stdout(message: Any, *_: Any) -> None:
    sys.stdout.write(f"{message}\n")


@pytest.mark.parametrize("name", ["direct", "torch", "persistent"])
def test_several_ranks_repeat_an_epoch_until_set_epoch_and_one_warning_says_so(
    name: str,
    folder: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = make(folder, placement=ss.Placement(1, 2))
    loader = loader_of(name, dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", to_stdout)  # of workers, too
        first = list(loader)
        assert "set_epoch" not in capfd.readouterr().out
        assert [list(loader), list(loader)] == [first, first]
    printed = capfd.readouterr()
    said = printed.out + printed.err
    assert said.count("is read again without set_epoch, so epoch 0 repeats") == 1
    assert "ShardDataset(" in said
    dataset.set_epoch(1)
    assert list(loader) != first


def test_several_ranks_that_set_epochs_or_do_not_shuffle_are_not_warned(folder: str) -> None:
    ordered = ss.ShardDataset(folder, placement=ss.Placement(1, 2)).decode("rgb8")
    shuffled = make(folder, placement=ss.Placement(1, 2))
    for epoch in range(3):
        shuffled.set_epoch(epoch)
        assert len(list(shuffled)) == len(list(ordered)) == SAMPLES // 2
