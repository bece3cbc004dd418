"""Workers that are threads: what is theirs alone, what they share with the main thread, and how they end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shardstream as ss
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("threads") / "data", 400, 50)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("ShardLoader worker")]


def loader(folder: str, function: Any = None, **given: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder, shuffle=True, seed=3).decode()
    if function is not None:
        dataset = dataset.map(function)
    options: dict[str, Any] = {"num_workers": 2, "worker_method": "thread", **given}
    return ss.ShardLoader(dataset, 8, **options)


def shown(sample: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    assert info is not None
    assert info.worker_method == "thread"
    dataset: Any = info.dataset
    return sample | {
        "seen": [info.id, info.num_workers, info.seed, len(dataset), torch.get_num_threads()]
    }


@pytest.mark.parametrize("persistent", [False, True])
def test_each_thread_has_a_worker_info_and_the_main_thread_none(
    folder: str, persistent: bool
) -> None:
    begun: list[int] = []

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.id == worker
        begun.append(worker)

    one = loader(folder, shown, persistent_workers=persistent, worker_init_fn=init)
    for _ in range(2):
        seeds = set()
        for number, batch in enumerate(one):
            assert get_worker_info() is None
            for worker, workers, seed, length, num_threads in batch["seen"]:
                assert (worker, workers, length, num_threads) == (number % 2, 2, 400, 1)
                seeds.add(seed - worker)
        assert len(seeds) == 1
    assert sorted(begun) == ([0, 1] if persistent else [0, 0, 1, 1])


def test_global_generators_and_threads_of_torch_stay_as_they_are(folder: str) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = torch.get_num_threads()
    expected = random.Random(1).random(), np.random.RandomState(2).rand()
    drawn = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    list(loader(folder))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == (*expected, drawn)
    assert torch.get_num_threads() == before


class Counting:
    """A step with a state of its own."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def __call__(self, value: Any) -> Any:
        here = threading.get_ident()
        assert self.thread in (None, here)
        self.thread = here
        return value


def test_each_thread_has_a_copy_of_steps_and_collate_function(folder: str) -> None:
    step, collate = Counting(), Counting()
    assert len(list(loader(folder, step, collate_fn=collate))) == 50
    assert step.thread is None
    assert collate.thread is None


def test_step_that_cannot_be_copied_is_an_error_that_names_the_cause(folder: str) -> None:
    class Locked:
        lock = None

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, sample: Any) -> Any:
            return sample

    with pytest.raises(ss.errors.OptionError, match=r"cannot be copied.*lock.*__deepcopy__"):
        list(loader(folder, Locked()))
    assert not threads()


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample | {"drawn": rng.random()}


def test_random_numbers_of_samples_are_those_of_processes(folder: str) -> None:
    dataset = (
        ss.ShardDataset(folder, shuffle=True, seed=3, order=ss.OrderOptions(lanes=2))
        .decode()
        .map(drawn, rng=True)
    )

    def found(**options: Any) -> list[list[float]]:
        return [batch["drawn"].tolist() for batch in ss.ShardLoader(dataset, 8, **options)]

    assert found(num_workers=2, worker_method="thread") == found(num_workers=2) == found()


def test_functions_that_draw_from_global_generators_are_refused(folder: str) -> None:
    dataset = ss.ShardDataset(folder, on_error="skip").decode().map(Counting(), rng="torch")
    with pytest.raises(ss.errors.OptionError, match="rng='torch' seeds generators that all"):
        list(ss.ShardLoader(dataset, 8, num_workers=2, worker_method="thread"))


@pytest.mark.parametrize("ends", ["break", "error", "close", "all"])
@pytest.mark.parametrize("persistent", [False, True])
def test_threads_end_with_the_iteration_or_the_loader(
    folder: str, persistent: bool, ends: str
) -> None:
    one = loader(folder, persistent_workers=persistent)
    batches = iter(one)
    next(batches)
    assert len(threads()) == 2
    if ends == "error":
        with pytest.raises(KeyError):
            batches.throw(KeyError("of the training"))  # type: ignore[attr-defined]
    elif ends == "close":
        batches.close()  # type: ignore[attr-defined]
    elif ends == "all":
        list(batches)
    del batches
    assert len(threads()) == (2 if persistent and ends != "error" else 0)
    del one
    assert not threads()


def test_thread_in_a_long_step_is_not_waited_for(folder: str) -> None:
    goes_on = threading.Event()

    def waits(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] >= 100:
            goes_on.wait()
        return sample

    dataset = ss.ShardDataset(folder).decode().map(waits)
    batches = iter(ss.ShardLoader(dataset, 8, num_workers=2, worker_method="thread"))
    next(batches)
    del batches
    left = threads()
    goes_on.set()
    for thread in left:
        thread.join()


def test_batch_that_takes_longer_than_the_timeout_is_an_error(folder: str) -> None:
    goes_on = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            list(loader(folder, lambda _: goes_on.wait(), timeout=1))
    finally:
        goes_on.set()


def test_error_of_a_step_has_its_type_and_traceback(folder: str) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise LookupError(f"no entry for {sample['cls']}")

    with pytest.raises(LookupError, match=r"(?s)worker process \d.*in fails.*no entry for"):
        list(loader(folder, fails))
    assert not threads()


def test_step_that_calls_exit_is_an_error(folder: str) -> None:
    def ends(sample: dict[str, Any]) -> dict[str, Any]:
        sys.exit(3)

    with pytest.raises(ss.errors.WorkerError, match=r"loader worker 0 of 2 .*called exit\(\)"):
        list(loader(folder, ends))
    assert not threads()


class Workers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield info.id


def read_by_processes(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"found": [int(one) for one in DataLoader(Workers(), num_workers=2)]}


def test_processes_that_a_step_forks_are_not_the_worker_of_its_thread(folder: str) -> None:
    dataset = ss.ShardDataset(folder, subset=slice(0, 2)).map(read_by_processes)
    loader = ss.ShardLoader(dataset, 1, num_workers=1, worker_method="thread", collate_fn=as_list)
    assert [item["found"] for batch in loader for item in batch] == [[0, 1]] * 2


class Rows(IterableDataset[Any]):
    """Reads a loader of threads, and yields its samples with the number of its own worker."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(self.folder):
            info = get_worker_info()
            assert info is not None
            yield from ((info.id, one) for one in batch["cls"].tolist())


def test_threads_run_in_the_worker_process_of_another_loader(folder: str) -> None:
    """torch's workers may not start processes."""
    rows = list(DataLoader(Rows(folder), batch_size=None, num_workers=2))
    assert sorted(rows) == [[worker, one] for worker in range(2) for one in range(400)]


def as_list(items: list[Any]) -> list[Any]:
    return items


def test_unknown_methods_and_a_context_of_processes_are_refused(folder: str) -> None:
    with pytest.raises(
        ss.errors.OptionError, match="must be 'multiprocessing', or 'thread' .* not 'process'"
    ):
        loader(folder, worker_method="process")
    with pytest.raises(ss.errors.OptionError, match="'thread' without multiprocessing_context"):
        loader(folder, multiprocessing_context="spawn")


READER = """
import sys, time
import shardstream as ss

def slow(sample):
    time.sleep(0.01)
    return sample

dataset = ss.ShardDataset(sys.argv[1]).map(slow)
for number, _ in enumerate(ss.ShardLoader(dataset, 4, num_workers=2, worker_method="thread")):
    if number == 3:
        print("reads", flush=True)
"""


def test_interrupt_ends_the_process_with_one_traceback(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(READER)
    main = subprocess.Popen(
        [sys.executable, script, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert main.stdout is not None
    assert main.stdout.readline() == "reads\n"
    main.send_signal(signal.SIGINT)
    _, printed = main.communicate()
    assert main.returncode == -signal.SIGINT
    assert printed.count("Traceback") == 1


@pytest.fixture
def _switching() -> Iterator[None]:
    """Let Python switch threads every microsecond, so between any two bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching", "s3_env")
@pytest.mark.parametrize("kind", with_slow_rest(["verified"], ["plain", "cached", "verified"]))
def test_threads_read_from_a_store_what_processes_read(
    bucket: str, tmp_path: Path, kind: str
) -> None:
    url = numbered(f"{bucket}/set", 300, 20)
    read = ss.ReadOptions(
        cache_dir=tmp_path / "cache" if kind == "cached" else None,
        verify="sha256" if kind == "verified" else None,
    )
    dataset = ss.ShardDataset(url, shuffle=True, seed=5, read=read).decode()

    def found(method: str) -> list[list[int]]:
        one = ss.ShardLoader(dataset, 8, num_workers=3, worker_method=method)
        return [batch["cls"].tolist() for batch in one]

    assert found("thread") == found("multiprocessing")
