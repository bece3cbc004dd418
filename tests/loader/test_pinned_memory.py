"""Batches are unpacked from the workers' rings straight into pinned memory, without torch's thread."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import shardstream as ss
from shardstream.loader import MAX_TENSOR_BYTES, PinnedMemory, RingBuffer, open_pinned_memory
from shardstream.testing import make_shards
from tests.limits import module_of
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


class CountedMemory(PinnedMemory):
    """Ordinary memory in the place of pinned memory, which needs a GPU; keeps its tensors, so that they can be recognised."""

    def __init__(self) -> None:
        self.unpacked: list[torch.Tensor] = []
        self.copied: list[Any] = []

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.unpacked.append(torch.empty(shape, dtype=dtype))
        return self.unpacked[-1]

    def pin(self, value: Any) -> Any:
        if self.holds(value):
            return value
        self.copied.append(value.clone() if isinstance(value, torch.Tensor) else value.pinned())
        return self.copied[-1]

    def holds(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return any(value is one for one in self.copied)
        tensors = [one for one in self.unpacked + self.copied if isinstance(one, torch.Tensor)]
        return value.untyped_storage().data_ptr() in {
            one.untyped_storage().data_ptr() for one in tensors
        }


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    """Memory that loaders with ``pin_memory=True`` pin in, as on a machine with a GPU."""
    counted = CountedMemory()
    monkeypatch.setattr(module_of(ss.ShardLoader), "open_pinned_memory", lambda: counted)
    return counted


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Record:
    label: str
    image: Any


Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024  (as in user code)


class Custom:
    """A value with a ``pin_memory`` of its own."""

    is_pinned = False

    def pin_memory(self) -> Custom:
        raise AssertionError("the memory decides")

    def pinned(self) -> Custom:
        pinned = Custom()
        pinned.is_pinned = True
        return pinned


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_all_batches_are_pinned_and_equal(
    num_workers: int, persistent: bool, memory: CountedMemory, tmp_path: Path
) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path), shuffle=True).decode()
    plain = [batch["npy"].tolist() for batch in ss.ShardLoader(dataset, 8, num_workers=num_workers)]
    loader = ss.ShardLoader(
        dataset,
        8,
        num_workers=num_workers,
        pin_memory=True,
        persistent_workers=persistent and num_workers > 0,
    )
    for epoch in range(2):
        batches = list(loader)  # a warning of torch that nothing is pinned would be an error here
        assert loader.pin_memory  # trainers read it
        assert all(memory.holds(batch["npy"]) and memory.holds(batch["cls"]) for batch in batches)
        assert epoch or [batch["npy"].tolist() for batch in batches] == plain
    assert bool(memory.copied) == (num_workers == 0)  # unpacked from the rings without another copy


def test_tensors_outside_the_ring_are_pinned_too(memory: CountedMemory, tmp_path: Path) -> None:
    folder = make_shards(tmp_path, samples=[{"__key__": f"{i}", "cls": i} for i in range(3)])
    dataset = ss.ShardDataset(folder).decode().map(_with_large)
    batches = list(ss.ShardLoader(dataset, 1, num_workers=1, pin_memory=True))
    assert [batch["large"][0, 0].item() for batch in batches] == [0, 1, 2]
    assert all(memory.holds(batch["large"]) for batch in batches)
    assert len(memory.copied) == 3


def _with_large(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"large": np.full(MAX_TENSOR_BYTES + 1, sample["cls"], np.uint8)}


def test_values_that_pin_themselves_are_pinned(memory: CountedMemory, tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 4)).decode()
    loader = ss.ShardLoader(
        dataset, 2, num_workers=1, pin_memory=True, collate_fn=lambda _: {"x": [Custom()]}
    )
    assert [batch["x"][0].is_pinned for batch in loader] == [True, True]


def test_strided_tensors_keep_their_layout() -> None:
    memory, ring = CountedMemory(), RingBuffer()
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    sent = {"image": image, "flag": torch.tensor(True), "empty": torch.empty(0, 3)}
    came = ring.unpack(ring.pack(sent), memory.new_tensor)
    assert len(memory.unpacked) == 3
    assert came["image"].stride() == image.stride()
    assert all(torch.equal(came[name], sent[name]) for name in sent)


NESTED: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": torch.ones(2), "b": ["x", None, 1]},
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    "default": lambda: defaultdict(list, a=[torch.ones(1)]),
    "user": lambda: UserDict(a=torch.ones(1)),
    "pair": lambda: Pair(torch.ones(1), [b"x"]),
    "namedtuple": lambda: Point(torch.ones(1), 2),
    "tuple": lambda: (torch.ones(1), "text", {"c": (torch.zeros(2),)}),
    "plain": lambda: [[1, 2.0, "x", b"y", None], range(3)],
    "array": lambda: [np.ones(2).tolist(), torch.ones(1)],
}


@pytest.mark.parametrize("kind", NESTED)
def test_containers_become_those_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function is asked where it may call ``pin_memory`` of tensors without a GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())
    batch = NESTED[kind]()
    ours, theirs = CountedMemory().pin_batch(batch), pin_memory(batch)  # type: ignore[no-untyped-call]
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs) or kind == "plain"  # torch turns a range into a list
    assert repr(batch) == repr(NESTED[kind]())
    assert getattr(ours, "default_factory", None) == getattr(theirs, "default_factory", None)


def test_dataclasses_are_searched() -> None:
    memory, record = CountedMemory(), Record("x", torch.ones(1))
    pinned = memory.pin_batch([record, Record("y", "no tensor")])
    assert memory.holds(pinned[0].image)
    assert not memory.holds(record.image)
    assert pinned[0].label == "x"
    assert pinned[1].image == "no tensor"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_accelerator_torch_warns_and_nothing_is_pinned(
    num_workers: int, tmp_path: Path
) -> None:
    assert open_pinned_memory() is None
    dataset = ss.ShardDataset(numbered(tmp_path, 8)).decode()
    loader = ss.ShardLoader(dataset, 4, num_workers=num_workers, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = list(loader)
    assert not batches[0]["cls"].is_pinned()
