from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed", "ray.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def fake_torch(monkeypatch: pytest.MonkeyPatch, *, available: bool, initialised: bool) -> None:
    fake_module(
        monkeypatch,
        "torch.distributed",
        is_available=lambda: available,
        is_initialized=lambda: initialised,
        get_rank=lambda: 3,
        get_world_size=lambda: 8,
    )


def fake_ray(monkeypatch: pytest.MonkeyPatch, get_context: Callable[[], object]) -> None:
    fake_module(monkeypatch, "ray.train", get_context=get_context)


def outside_a_worker() -> object:
    raise RuntimeError("get_context() was called outside a training worker")


def in_a_trial_of_tune() -> object:
    raise DeprecationWarning("`ray.train.get_context` is deprecated when running in Ray Tune")


def context(rank: int | None, world_size: int | None) -> SimpleNamespace:
    return SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world_size)


def test_default_is_rank_0_of_1() -> None:
    assert Placement.detect() == Placement() == Placement(0, 1)


def test_torchrun_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Placement.detect() == Placement(2, 4)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        ("1", None, "RANK='1' and WORLD_SIZE=None must both be whole numbers"),
        (None, "2", "RANK=None and WORLD_SIZE='2' must both"),
        ("", "2", "RANK=''"),
        ("one", "2", "RANK='one'"),
        ("1", "2.0", "WORLD_SIZE='2.0'"),
        ("2", "2", "both be whole|rank 2 of world size 2"),
    ],
)
def test_incomplete_or_invalid_variables_are_refused(
    rank: str | None, world_size: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(OptionError, match=message):
        Placement.detect()


@pytest.mark.parametrize(
    ("available", "initialised", "expected"),
    [
        (True, True, Placement(3, 8)),
        (True, False, Placement(1, 2)),
        (False, False, Placement(1, 2)),
    ],
)
def test_process_group_overrides_variables(
    *, available: bool, initialised: bool, expected: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fake_torch(monkeypatch, available=available, initialised=initialised)
    assert Placement.detect() == expected


@pytest.mark.parametrize(
    ("get_context", "expected"),
    [
        (lambda: context(5, 6), Placement(5, 6)),
        (lambda: context(None, None), Placement()),
        (lambda: None, Placement()),
        (outside_a_worker, Placement()),
        (in_a_trial_of_tune, Placement()),
    ],
)
def test_ray_train_context_is_read(
    get_context: Callable[[], object], expected: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray(monkeypatch, get_context)
    assert Placement.detect() == expected


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (8, 8)])
def test_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(OptionError, match=f"rank {rank} of world size {world_size}"):
        Placement(rank, world_size)


@pytest.mark.parametrize(("worker", "num_workers"), [(-1, 1), (1, 1), (0, 0)])
def test_worker_outside_its_rank_is_refused(worker: int, num_workers: int) -> None:
    with pytest.raises(OptionError, match=f"worker {worker} of {num_workers}"):
        WorkerInfo(Placement(), worker, num_workers)
