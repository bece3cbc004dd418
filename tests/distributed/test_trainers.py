"""Accelerate and the Hugging Face Trainer on one rank and on two: each sample once an epoch, an exact resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.read.sets import numbered

JOB = Path(__file__).with_name("trainers_job.py")
SAMPLES = 102

Results = dict[str, dict[str, list[Any]]]


def results_of(checks: str, folder: Path) -> Results:
    """Run all checks of a module, each on one rank and on two, in one job."""
    data, out = numbered(folder / "data", SAMPLES, 15), folder / "out"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])}
    done = subprocess.run(
        [sys.executable, JOB, checks, data, out],
        env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results: Results = json.loads((out / "results.json").read_text())
    failed = [f"{name} on {n}: {rank}" for name, of in results.items() for n, ranks in of.items() for rank in ranks if isinstance(rank, str)]  # fmt: skip
    assert not failed, "\n".join(failed)
    return results


def samples(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("accelerate_checks", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prepared_loader_gives_each_sample_once_an_epoch(accelerate: Results, ranks: int) -> None:
    found = accelerate["prepared_loader"][str(ranks)]
    length = -(-SAMPLES // (8 * ranks))
    assert {one["length"] for one in found} == {length}
    assert {len(one["mine"]) for one in found} == {2 * length}
    epochs = [samples(found[0]["gathered"][part]) for part in (slice(length), slice(length, None))]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2  # no repeats
    assert epochs[0] != epochs[1]
    assert all(one["gathered"] == found[0]["gathered"] for one in found)
    # gradients are applied after each fourth batch and after the last of an epoch
    epoch = [step % 4 == 0 or step == length for step in range(1, length + 1)]
    assert found[0]["applied"][:length] == epoch
    assert found[0]["applied"][length:] == epoch


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("check", ["resumed_loader", "registered_loader"])
def test_accelerate_resumes_a_loader_in_the_middle_of_an_epoch(
    accelerate: Results, check: str, ranks: int
) -> None:
    found = accelerate[check][str(ranks)]
    assert [one["seen"] for one in found] == [one["whole"] for one in found]
    seen = [number for one in found for number in samples(one["seen"])]
    assert len(seen) == SAMPLES
    assert set(seen) == set(range(SAMPLES))


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_accelerate_splits_the_dataset_does_not(accelerate: Results, ranks: int) -> None:
    found = accelerate["prepared_datasets"][str(ranks)]
    for way in found[0]:
        seen = [number for one in found for number in samples(one[way])]
        assert set(seen) == set(range(SAMPLES)), way
        # Accelerate fills a last batch of all ranks with samples of the first
        assert len(seen) == SAMPLES or "dispatch=False" in way, way
        assert len(seen) - SAMPLES < 8 * ranks, way
        assert len({len(one[way]) for one in found}) == 1, way


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_that_accelerate_does_not_know_is_split_by_the_dataset(
    accelerate: Results, ranks: int
) -> None:
    found = accelerate["unprepared_dataset"][str(ranks)]
    seen = [number for one in found for number in samples(one)]
    assert sorted(seen) == list(range(SAMPLES))


def test_what_would_give_other_samples_is_refused(accelerate: Results) -> None:
    alone, (together, _) = accelerate["refusals"]["1"], accelerate["refusals"]["2"]
    assert len(alone[0]) == 1  # one position: Accelerate can keep it
    assert "iterate the ShardLoader itself" in alone[0][0]
    assert "each rank has its own" in together[1]


@pytest.fixture(scope="module")
def hf_trainer(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("hf_trainer_checks", tmp_path_factory.mktemp("trainer"))


def assert_each_twice(found: list[Any], kind: str, *, padded: int = 0) -> None:
    """Of two epochs."""
    counts = Counter(number for one in found for number in samples(one[kind]))
    assert set(counts) == set(range(SAMPLES))
    assert min(counts.values()) == 2
    assert counts.total() - 2 * SAMPLES == padded


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_splits_a_dataset_once_and_resumes_it(hf_trainer: Results, ranks: int) -> None:
    found = hf_trainer["trained_on_datasets"][str(ranks)]
    for kind in found[0]:
        runs = [one[kind] for one in found]
        assert [one["seen"] for one in runs] == [one["whole"] for one in runs]
        # Accelerate fills the last batch of all ranks: 6 of 16 samples
        filled = 2 * 10 if (kind, ranks) == ("each rank reads", 2) else 0
        assert_each_twice(runs, "seen", padded=filled)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_resumes_a_loader_exactly(hf_trainer: Results, ranks: int) -> None:
    found = hf_trainer["trained_on_loaders"][str(ranks)]
    for kind in ("whole", "same", "no skip", "larger"):
        assert_each_twice(found, kind)
    for one in found:
        assert one["same"] == one["no skip"] == one["whole"]
        assert {len(batch) for batch in one["larger"][-3:-1]} == {16}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_resumes_where_each_rank_has_a_position(
    hf_trainer: Results, ranks: int
) -> None:
    found = hf_trainer["trained_where_counts_change"][str(ranks)]
    assert [one["seen"] for one in found] == [one["whole"] for one in found]
    counts = Counter(number for one in found for number in samples(one["seen"]))
    assert counts == dict.fromkeys(range(1, SAMPLES, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_of_each_sample_once(hf_trainer: Results, ranks: int) -> None:
    for predictions in chain.from_iterable(hf_trainer["evaluated"][str(ranks)]):
        assert sorted(predictions) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_says_what_it_needs_to_resume(hf_trainer: Results, ranks: int) -> None:
    for said in hf_trainer["refusals"][str(ranks)]:
        assert "callbacks=[LoaderStateCallback()]" in said["no callback"]
        assert "TrainerLoader(loader)" in said["bare loader"]
        assert "needs a TrainerLoader" in said["callback on a bare loader"]
        assert "the saved state of the loader after batch 2" in said["other batches"]
