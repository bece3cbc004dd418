"""Ranks with different orders raise an error, also if a rank is late or missing."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.loader import compare_in_store
from shardstream.testing import make_shards

LONG_S = 120.0


def outcome(store: Any, rank: int, ranks: int, lanes: int, wait_s: float = LONG_S) -> str:
    """Compare ranks; return the text of the error, or nothing."""
    try:
        compare_in_store(store, "key", {"lanes": lanes, "epoch": 1}, Placement(rank, ranks), wait_s)
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_equal_ranks_continue(ranks: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        assert set(pool.map(lambda rank: outcome(store, rank, ranks, 4), range(ranks))) == {""}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("odd", [0, 1])
def test_all_ranks_raise_if_one_differs(ranks: int, odd: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        found = list(
            pool.map(lambda rank: outcome(store, rank, ranks, 2 + (rank == odd)), range(ranks))
        )
    assert all(found)
    assert f"rank {odd} has lanes=3" in found[odd]
    assert all("lanes=2" in text and "epoch" not in text for text in found)
    assert "same num_workers, batch_size and state, or set lanes=" in found[0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_rank_causes_a_warning_after_the_timeout(missing: int) -> None:
    store = HashStore()
    for rank in {0, 1, 2} - {missing}:
        with pytest.warns(
            UserWarning, match=r"within 0.05 s: the order of samples was not compared"
        ):
            assert outcome(store, rank, 3, 4, wait_s=0.05) == ""


@pytest.mark.parametrize("late", [0, 1, 2])
def test_late_rank_is_compared(late: int) -> None:
    store = HashStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in {0, 1, 2} - {late}:
            outcome(store, rank, 3, 4, wait_s=0.05)
    assert "has lanes=5" in outcome(store, late, 3, 5)


def test_late_equal_rank_does_not_wait_for_finished_ranks() -> None:
    store = HashStore()
    with pytest.warns(UserWarning, match="rank 1 did not start to read this dataset"):
        outcome(store, 0, 2, 4, wait_s=0.05)
    started = time.monotonic()
    assert outcome(store, 1, 2, 4) == ""
    assert time.monotonic() - started < LONG_S / 2


class BrokenStore:
    """A store whose server has stopped."""

    def set(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None:
        raise RuntimeError("Broken pipe")


def test_closed_store_does_not_hang_the_rank() -> None:
    ended = threading.Event()

    def run() -> None:
        with pytest.warns(UserWarning, match="was not compared"):
            outcome(BrokenStore(), 0, 2, 4, wait_s=0.2)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(LONG_S)


def called(store: Any, rank: int, ranks: int, value: int, wait_s: float = LONG_S) -> str:
    """Compare the arguments of a call; return the text of the error, or nothing."""
    numbers, placement = {"position": [0, value]}, Placement(rank, ranks)
    try:
        compare_in_store(store, "key", numbers, placement, wait_s, call="set_weights")
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("odd", [-1, 0, 1])
def test_calls_that_differ_are_an_error_on_all_ranks(ranks: int, odd: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda rank: called(store, rank, ranks, rank == odd), range(ranks)))
    if odd < 0:
        assert set(found) == {""}
    else:
        assert all(
            "ranks differ in set_weights" in text and "after the same batch" in text
            for text in found
        )


@pytest.mark.parametrize("missing", range(4))
def test_a_rank_that_does_not_call_is_an_error_also_for_a_late_one(missing: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        late = {*range(4)} - {missing}
        found = list(pool.map(lambda rank: called(store, rank, 4, 0, wait_s=0.5), late))
    assert all("did not call set_weights within 0.5 s" in text for text in found)
    assert "did not call set_weights" in called(store, missing, 4, 0)


def test_processes_of_a_launcher_that_have_no_ranks_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("PMI_SIZE", "4")  # of srun --mpi=pmi2
    url = make_shards(str(tmp_path), samples=8)
    dataset = ss.ShardDataset(url)
    loader = ss.ShardLoader(dataset, batch_size=4)
    for found in (loader, DataLoader(dataset, batch_size=4, collate_fn=list)):
        with pytest.warns(UserWarning, match=r"PMI_SIZE=4, .* reads all samples") as warned:
            assert len(list(found)) == 2
        assert len(warned) == 1
    one = ss.ShardDataset(url, placement=ss.Placement(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(ss.ShardLoader(dataset, batch_size=4)) == 2  # torch may be initialised later
        assert len(list(ss.ShardLoader(one, batch_size=4))) == 1
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert len(list(ss.ShardLoader(ss.ShardDataset(url), batch_size=4))) == 2
