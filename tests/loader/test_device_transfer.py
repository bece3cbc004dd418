"""Batches are copied to the loader's device ahead of their use; the CPU tests use torch's device "meta"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import shardstream as ss
from shardstream.loader import DeviceCopies, check_same_device, prefetch
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
META = torch.device("meta")


# -- the schedule --------------------------------------------------------------------------------------------------------------


class Source:
    """Numbers up to an end or an error, some of which are ready."""

    def __init__(self, ready: int, end: int, error: Exception | None = None) -> None:
        self.ready, self.end, self.error = ready, end, error
        self.taken: list[int] = []
        self.started: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(self.end):
            self.taken.append(number)
            yield number
        if self.error is not None:
            raise self.error

    def start(self, number: int) -> int:
        self.started.append(number)
        return number * 10

    def prefetched(self, depth: int) -> Iterator[int]:
        return prefetch(
            iter(self), self.start, depth=depth, is_ready=lambda: len(self.taken) < self.ready
        )


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
@pytest.mark.parametrize("ready", [0, 3, 7, 100])
def test_all_items_are_yielded_in_order(depth: int, ready: int) -> None:
    source = Source(ready, 7)
    assert list(source.prefetched(depth)) == [0, 10, 20, 30, 40, 50, 60]
    assert source.started == list(range(7))


@pytest.mark.parametrize(
    ("depth", "ready", "started"), [(1, 9, 1), (2, 9, 2), (4, 9, 4), (4, 3, 3), (4, 0, 1)]
)
def test_only_ready_items_are_taken_ahead(depth: int, ready: int, started: int) -> None:
    source = Source(ready, 9)
    batches = source.prefetched(depth)
    assert source.started == []  # nothing before the first `next`
    assert next(batches) == 0
    assert len(source.started) == started


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_error_is_raised_after_the_items_before_it(depth: int) -> None:
    batches = Source(100, 4, ValueError("damaged")).prefetched(depth)
    assert list(islice(batches, 4)) == [0, 10, 20, 30]
    with pytest.raises(ValueError, match="damaged"):
        next(batches)
    assert list(batches) == []


def test_interrupt_is_not_held_back() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(prefetch(items(), lambda one: one, depth=2, is_ready=lambda: True))


# -- the copies ----------------------------------------------------------------------------------------------------------------


class FakeStream:
    """A stream that writes down what happens."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.handed: list[list[torch.Tensor]] = []
        self.events = 0

    @contextmanager
    def activate(self) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def record_event(self) -> int:
        self.events += 1
        self.log.append(f"event {self.events}")
        return self.events

    def hand_over(self, event: int, tensors: list[torch.Tensor]) -> None:
        self.log.append(f"wait {event}")
        self.handed.append(tensors)


@dataclass(frozen=True)
class Record:
    key: str
    image: torch.Tensor


class Graph:
    """A value that is not searched, but can be moved."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(str(device))


def test_every_tensor_is_moved_and_handed_over_after_its_event() -> None:
    stream = FakeStream()
    copies = DeviceCopies(META, stream)
    batch = {"a": torch.ones(2), "b": [torch.ones(1), "x", (None, torch.ones(3))],
             "c": Record("k", torch.zeros(4)), "d": b"bytes"}  # fmt: skip
    first, second = copies.start(batch), copies.start({"e": torch.ones(5)})
    assert stream.log == ["enter", "event 1", "leave", "enter", "event 2", "leave"]
    moved = first.finish()
    assert stream.log[-1] == "wait 1"
    tensors = [moved["a"], moved["b"][0], moved["b"][2][1], moved["c"].image]
    assert [one.device.type for one in tensors] == ["meta"] * 4
    assert {id(one) for one in stream.handed[0]} == {id(one) for one in tensors}
    assert (moved["b"][1], moved["c"].key, moved["d"]) == ("x", "k", b"bytes")
    assert batch["a"].device.type == "cpu"  # type: ignore[attr-defined]
    assert second.finish()["e"].shape == (5,)
    assert stream.log[-1] == "wait 2"


def test_values_with_unknown_tensors_are_moved_when_they_are_handed_out() -> None:
    """Their memory cannot be marked as used by the current stream, so they must be allocated there."""
    stream = FakeStream()
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    started = DeviceCopies(META, stream).start([Graph(), packed, torch.ones(1).to_sparse()])
    graph, moved, sparse = started.finish()
    assert graph.device == "meta"
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert sparse.device.type == "meta"
    assert stream.handed == [[]]


# -- the loader ----------------------------------------------------------------------------------------------------------------


def meta_loader(folder: str | Path, num_workers: int, **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(str(folder), shuffle=True).decode()
    return ss.ShardLoader(dataset, 8, num_workers=num_workers, **{"device": "meta"} | options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_does_not_count_prefetched_batches(num_workers: int, tmp_path: Path) -> None:
    folder = numbered(tmp_path)
    keys = [batch["__key__"] for batch in meta_loader(folder, num_workers, device=None)]
    for depth in (1, 5):
        loader = meta_loader(folder, num_workers, prefetch_to_device=depth)
        for done, batch in enumerate(islice(loader, 6), start=1):
            assert batch["npy"].device.type == "meta"
            assert batch["__key__"] == keys[done - 1]
            assert loader.batches_left == len(keys) - done
            assert loader.stats().batches == done
        resumed = meta_loader(folder, num_workers)
        resumed.load_state_dict(loader.state_dict())
        assert [batch["__key__"] for batch in resumed] == keys[6:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_and_breaks_work_as_without_a_device(num_workers: int, tmp_path: Path) -> None:
    folder = numbered(tmp_path)
    options: dict[str, Any] = {"persistent_workers": num_workers > 0}

    def seen(**device: Any) -> list[Any]:
        loader = meta_loader(folder, num_workers, **options | device)
        found = [[batch["__key__"] for batch in islice(loader, 3)]]
        found += [[batch["__key__"] for batch in loader]]
        loader.set_epoch(7)
        return [*found, [batch["__key__"] for batch in loader], loader.epoch]

    assert seen() == seen(device=None)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_of_a_batch_comes_after_the_batches_before_it(
    num_workers: int, tmp_path: Path
) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path)).decode().map(_fail_at_30)
    loader = ss.ShardLoader(
        dataset, 8, num_workers=num_workers, device="meta", prefetch_to_device=8
    )
    seen, left = [], []
    batches = iter(loader)
    for batch in islice(batches, 3):
        seen += batch["__key__"]
        left.append(loader.batches_left)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert seen == [f"{number:06d}" for number in range(24)]
    assert left == [12, 11, 10]
    assert loader.batches_left == 10


class Fragile:
    """A batch that cannot be moved if it holds sample 20."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.numbers = [int(sample["cls"]) for sample in samples]

    def to(self, device: torch.device) -> Fragile:  # noqa: ARG002  (as tensors have it)
        if 20 in self.numbers:
            raise MemoryError("no room")
        return self


def test_batch_that_cannot_be_moved_does_not_count(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path)).decode()
    loader = ss.ShardLoader(dataset, 8, device="meta", collate_fn=Fragile)
    batches = iter(loader)
    assert [next(batches).numbers[0] for _ in range(2)] == [0, 8]
    with pytest.raises(MemoryError, match="no room"):
        next(batches)
    assert loader.batches_left == 11
    resumed = ss.ShardLoader(dataset, 8, collate_fn=Fragile)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).numbers[0] == 16


def _fail_at_30(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"bad": 1 / (sample["cls"] - 30)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_count_with_the_batch_that_was_handed_out(
    num_workers: int, tmp_path: Path
) -> None:
    folder = numbered(tmp_path)

    def counts(device: str | None) -> list[dict[str, int]]:
        dataset = ss.ShardDataset(folder, on_error="skip").decode()
        loader = ss.ShardLoader(
            dataset.map(_fail_at_30),
            8,
            num_workers=num_workers,
            device=device,
            prefetch_to_device=4,
        )
        return [loader.skipped for _ in loader]

    assert counts("meta") == counts(None)
    assert counts("meta")[2] == {}
    assert sum(counts("meta")[-1].values()) == 1


def test_stream_pipelines_keep_their_positions(tmp_path: Path) -> None:
    folder = numbered(tmp_path)

    def make(device: str | None) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, shuffle=True).decode().select(_is_even).shuffle(1)
        return ss.ShardLoader(dataset, 4, num_workers=2, device=device, prefetch_to_device=5)

    keys = [batch["__key__"] for batch in make(None)]
    loader = make("meta")
    assert [batch["__key__"] for batch in islice(loader, 5)] == keys[:5]
    resumed = make("meta")
    resumed.load_state_dict(loader.state_dict())
    assert [batch["__key__"] for batch in resumed] == keys[5:]


def _is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def test_cpu_is_no_copy(tmp_path: Path) -> None:
    loader = meta_loader(numbered(tmp_path, 8), 0, device="cpu")
    assert next(iter(loader))["npy"].device.type == "cpu"


NOT_THERE = "cuda:99"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": NOT_THERE}, "device='cuda:99' is not available: .* CUDA devices"),
        ({"device": "gpu"}, "device='gpu' is not a device; pass 'cuda'"),
        ({"device": 1.5}, "is not a device"),
        ({"prefetch_to_device": 0}, "prefetch_to_device must be at least 1, not 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        meta_loader(numbered(tmp_path, 8), 0, **options)


def test_another_device_than_the_trainer_s_is_refused() -> None:
    cpu = torch.device("cpu")
    check_same_device(None, META, "Accelerate")
    check_same_device(cpu, META, "Accelerate")
    check_same_device(META, META, "Accelerate")
    with pytest.raises(
        ss.errors.OptionError, match="but Accelerate would copy them again to 'cpu'"
    ):
        check_same_device(META, cpu, "Accelerate")
