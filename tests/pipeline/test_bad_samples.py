from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import (
    DecodeError,
    IndexMismatchError,
    OptionError,
    SkipBudgetError,
    StorageError,
)
from shardstream.pipeline import SkipBudget, SkipTracker
from shardstream.testing import make_shards


def test_default_policy_raises_the_first_error() -> None:
    error = ValueError("bad")
    with pytest.raises(ValueError, match="bad") as caught:
        SkipTracker().skip_or_raise(error)
    assert caught.value is error


@pytest.mark.parametrize(
    ("on_error", "allowed"),
    [("skip", 100), ("warn", 100), (SkipBudget(), 100), (SkipBudget(samples=2), 2)],
)
def test_budget_allows_its_limit_and_not_one_more(on_error: Any, allowed: int) -> None:
    skips = SkipTracker(on_error)
    for number in range(allowed):
        skips.skip_or_raise((ValueError if number % 2 else DecodeError)(f"{number}"))
    assert skips.counts.total() == allowed
    error = ValueError("x")
    error.add_note("n")
    with pytest.raises(SkipBudgetError, match=rf"{allowed + 1} bad samples?, limit {allowed} "):
        skips.skip_or_raise(ValueError("the last"))


def test_budget_of_zero_raises_at_the_first_bad_sample() -> None:
    error = ValueError("x")
    error.add_note("n")
    with pytest.raises(
        SkipBudgetError, match=r"1 bad sample, limit 0 .*last error: ValueError: x \(n\)"
    ):
        SkipTracker(SkipBudget(samples=0)).skip_or_raise(error)


@pytest.mark.parametrize(
    "error",
    [StorageError("away"), IndexMismatchError("misfit"), SkipBudgetError("x"), MemoryError()],
)
def test_errors_not_caused_by_a_sample_are_never_skipped(error: Exception) -> None:
    skips = SkipTracker("skip")
    with pytest.raises(type(error)):
        skips.skip_or_raise(error)
    assert not skips.counts


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_stop_iteration_never_ends_a_stream(on_error: Any) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        SkipTracker(on_error).skip_or_raise(StopIteration())


@pytest.mark.parametrize(
    ("on_error", "level"),
    [("skip", logging.INFO), ("warn", logging.WARNING), (SkipBudget(warn=True), logging.WARNING)],
)
def test_each_bad_sample_is_logged(
    on_error: Any, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardstream.pipeline.bad_samples"):
        SkipTracker(on_error).skip_or_raise(DecodeError("bad", key="0042"))
    assert [record.levelno for record in caplog.records] == [level]
    assert caplog.messages == ["skipped a sample: DecodeError: bad [sample '0042']"]


@pytest.mark.parametrize("on_error", ["ignore", None, 3, "RAISE"])
def test_unknown_policies_are_refused(on_error: Any) -> None:
    with pytest.raises(OptionError, match="on_error is 'raise', 'warn', 'skip' or ss.SkipBudget"):
        SkipTracker(on_error)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(OptionError, match="samples must be at least 0, not -1"):
        SkipBudget(samples=-1)


def test_misplaced_step_is_not_a_bad_sample(tmp_path: Path) -> None:
    folder = make_shards(tmp_path, samples=10)
    dataset = ss.ShardDataset(folder, on_error="skip").to_tuple("cls").decode()
    with pytest.raises(OptionError, match="put it before to_tuple"):
        list(dataset)
