"""Regression tests for bugs between modules."""

from __future__ import annotations

import gc
import logging
import random
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import OptionError, StateError, StorageError
from shardstream.format import ShardInfo, fingerprint
from shardstream.pipeline import SequentialRun, seal_state
from shardstream.storage import RangeResponse, Storage
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES, flat, grouped, labels, loader, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return numbered(tmp_path / "set", 100, 15)


def is_number(sample: dict[str, Any]) -> bool:
    return "cls" in sample


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"window": 8}, "window: the state says 64, here it is 8"),
        ({"block": 9}, "block: the state says 3, here it is 9"),
        ({"microbatch": 2}, "microbatch: the state says 4, here it is 2"),
        ({"remainder": "drop"}, "remainder: the state says 'pad', here it is 'drop'"),
    ],
)
def test_stream_state_is_refused_for_another_order(
    folder: str, changed: dict[str, Any], match: str
) -> None:
    def open_loader(**options: Any) -> ss.ShardLoader:
        order = {"window": 64, "block": 3, "microbatch": 4, **options}
        dataset = ss.ShardDataset(folder, **grouped(shuffle=True, **order)).decode().shuffle(1)
        return ss.ShardLoader(dataset, batch_size=4)

    left = open_loader()
    take(left, 3)
    with pytest.raises(StateError, match=match):
        open_loader(**changed).load_state_dict(left.state_dict())


def test_set_epoch_in_the_middle_counts_for_the_next_iteration(folder: str) -> None:
    one = loader(folder, shuffle=True)
    batches = iter(one)
    next(batches)
    one.set_epoch(5)
    with pytest.warns(UserWarning, match="its position set, while this iteration goes on"):
        next(batches)
    assert (one.epoch, one.state_dict()["consumed"]) == (5, 0)
    list(batches)
    assert one.epoch == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_iterator_starts_at_the_position_of_its_creation(folder: str, workers: int) -> None:
    one = loader(folder, num_workers=workers)
    one.load_state_dict(seal_state({**one.state_dict(), "consumed": 48}))
    first, second = iter(one), iter(one)
    with pytest.warns(UserWarning, match="iterated again"):
        assert next(first)["cls"][0] == 48
    assert next(second)["cls"][0] == 48  # no batch had been taken when it began


def test_loader_starts_with_the_epoch_of_its_dataset(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    dataset.set_epoch(3)
    assert ss.ShardLoader(dataset, batch_size=8).epoch == 3


def test_two_states_can_be_loaded_in_sequence(folder: str) -> None:
    states = [loader(folder, shuffle=True, lanes=lanes).state_dict() for lanes in (2, 3)]
    one = loader(folder, shuffle=True)
    for state in states:
        one.load_state_dict(state)
        assert one.state_dict() == state


@pytest.mark.parametrize(
    "build",
    [
        lambda data: data.shuffle(-1),
        lambda data: data.batched(0),
        lambda data: data.repeat(-1),
        lambda data: data.with_epoch(-1),
        lambda data: data.decode(threads=-1),
        lambda data: data.map(len, threads=-1),
        lambda data: ss.ShardLoader(data, batch_size=None, drop_last=True),
        lambda data: ss.ShardLoader(data).set_epoch(-1),
        lambda data: ss.ShardLoader(data, lanes=4, seed=1),
    ],
)
def test_invalid_sizes_are_refused_at_once(folder: str, build: Any) -> None:
    with pytest.raises(OptionError):
        build(ss.ShardDataset(folder))


def test_repr_shows_source_and_steps(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().select(is_number)
    assert repr(dataset) == "ShardDataset(7 shards, 100 samples) > Decode > Select"
    assert (
        repr(ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore")))
        == "ShardDataset(streams)"
    )


def test_shuffle_of_an_empty_stream_is_empty(folder: str) -> None:
    assert len(list(ss.ShardDataset(folder).shuffle(0))) == 100


def test_repeated_epoch_draws_other_augmentations(folder: str) -> None:
    def draw(_: Any, rng: np.random.Generator) -> float:
        return float(rng.random())

    drawn = list(ss.ShardDataset(folder).repeat(2).map(draw, rng=True))
    assert len(set(drawn)) == 200


def test_state_with_too_many_consumed_samples_is_refused(folder: str) -> None:
    one = loader(folder)
    with pytest.raises(StateError, match="4000 of 100 samples"):
        one.load_state_dict(seal_state({**one.state_dict(), "consumed": 4000}))


def test_unreachable_store_is_not_a_bad_sample(
    bucket: str, s3_env: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(f"{bucket}/set", 60, 20)
    real = Storage.read_once

    def broken(
        self: Storage, url: str, start: int = 0, end: int | None = None, **_: Any
    ) -> RangeResponse:
        if start > 0:
            raise ConnectionResetError("connection reset")
        return real(self, url, start, end)

    dataset = ss.ShardDataset(f"{bucket}/set", read=ss.ReadOptions(index="ignore"), on_error="skip")
    monkeypatch.setattr("time.sleep", lambda _: None)
    set_limits(monkeypatch, SequentialRun, STREAM_READ_BYTES=2048)
    monkeypatch.setattr(Storage, "read_once", broken)
    with pytest.raises(StorageError, match="connection reset"):
        list(dataset)


def unreachable(*_: Any, **__: Any) -> RangeResponse:
    raise OSError("transient")


def test_retries_do_not_use_global_random_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(Storage, "read_once", unreachable)
    fsspec.filesystem("memory").pipe_file("/random/a.tar", b"a")
    before = random.getstate()
    with pytest.raises(StorageError, match="transient"):
        Storage().read("memory://random/a.tar", 0, 1)
    assert random.getstate() == before


def test_failed_ranges_are_requested_again(
    bucket: str, s3_env: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(f"{bucket}/set", 20, 20)
    dataset = (
        ss.ShardDataset(f"{bucket}/set", storage_options={"retry_timeout_s": 1})
        .by_number()
        .decode()
    )
    dataset[19]  # reads the index
    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", lambda _: None)
        patch.setattr(Storage, "read_once", unreachable)
        with pytest.raises(StorageError, match="transient"):
            dataset.__getitems__([0, 1, 2])
    assert [sample["cls"] for sample in dataset.__getitems__([1, 2])] == [1, 2]


def test_dropped_iterator_leaves_no_threads(bucket: str, s3_env: None) -> None:
    dataset = ss.ShardDataset(numbered(f"{bucket}/set", 60, 20), shuffle=True)
    next(iter(dataset))
    gc.disable()
    try:
        before = threading.active_count()
        for _ in range(5):
            for _ in dataset:
                break
        assert threading.active_count() <= before + 8  # threads of one pool may still be ending
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:select or on_error= left out all")
def test_signatures_are_removed_from_notes_logs_and_fingerprints(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(sample: dict[str, Any]) -> None:
        raise ValueError("bad")

    def sign(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"__url__": "https://me:pw@host/a.tar?X-Amz-Signature=SECRET"}

    with caplog.at_level(logging.INFO):
        list(ss.ShardDataset(folder, on_error="skip").slice(3).map(sign).map(fail))
    assert "https://host/a.tar" in caplog.text
    assert "SECRET" not in caplog.text
    assert "pw@" not in caplog.text
    one, other = (
        fingerprint([ShardInfo(url=f"https://h/a.tar?X-Amz-Date={day}")]) for day in (1, 2)
    )
    assert one == other


def test_bad_samples_after_the_last_batch_are_counted(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 20, 20)

    def fail_late(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] > 15:
            raise ValueError("late")
        return sample

    dataset = ss.ShardDataset(folder, on_error="skip").decode().slice(99).map(fail_late)
    one = ss.ShardLoader(dataset, batch_size=8)
    assert flat(labels(one)) == list(range(16))
    assert one.skipped == {"ValueError": 4}
