"""Accelerate, the Hugging Face Trainer, torch.distributed.checkpoint, on one rank and on two: each sample once, an exact resume."""

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

from tests.small_datasets import numbered

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


@pytest.mark.slow
def test_accelerate_gets_each_sample_once_per_epoch_and_resumes(tmp_path: Path) -> None:
    results = results_of("accelerate_checks", tmp_path)
    for ranks, found in results["prepared_loader"].items():
        assert_prepared(found, int(ranks))
    for check in ("resumed_loader", "registered_loader"):
        for found in results[check].values():
            assert [one["seen"] for one in found] == [one["whole"] for one in found]
            seen = [number for one in found for number in samples(one["seen"])]
            assert sorted(seen) == list(range(SAMPLES))
    assert_split_once(results["prepared_datasets"]["2"])
    assert_three_epochs(results["epochs_of_dataset"])
    seen = [number for one in results["unprepared_dataset"]["2"] for number in samples(one)]
    assert sorted(seen) == list(range(SAMPLES))
    assert results["readme"]["2"] == [[2, 2]] * 2
    assert_refused(results["refusals"])


def assert_prepared(found: list[Any], ranks: int) -> None:
    """Check that batches, gathered samples and gradient steps equal those of Accelerate's own loader."""
    length = -(-SAMPLES // (8 * ranks))
    assert {one["length"] for one in found} == {length}
    assert {len(one["mine"]) for one in found} == {2 * length}
    epochs = [samples(found[0]["gathered"][part]) for part in (slice(length), slice(length, None))]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2  # no repeats
    assert epochs[0] != epochs[1]
    assert all(one["gathered"] == found[0]["gathered"] for one in found)
    # gradients are applied after each fourth batch and after the last of an epoch
    epoch = [step % 4 == 0 or step == length for step in range(1, length + 1)]
    assert found[0]["applied"] == epoch * 2


def assert_split_once(found: list[Any]) -> None:
    """Check that the dataset does not split if Accelerate does."""
    for way in found[0]:
        seen = [number for one in found for number in samples(one[way])]
        assert set(seen) == set(range(SAMPLES)), way
        # Accelerate fills a last batch of all ranks with samples of the first
        assert len(seen) == SAMPLES or "dispatch=False" in way, way
        assert len(seen) - SAMPLES < 16, way
        assert len({len(one[way]) for one in found}) == 1, way


def assert_three_epochs(found: dict[str, list[Any]]) -> None:
    """Check that three epochs of each way have three orders, with all samples over the ranks."""
    for ranks in found.values():
        for way in zip(*ranks, strict=True):
            epochs = [[samples(one[epoch]) for one in way] for epoch in range(3)]
            for epoch in epochs:
                assert set(chain.from_iterable(epoch)) == set(range(SAMPLES))
                assert sum(map(len, epoch)) - SAMPLES < 16  # repeats that fill a batch of all ranks
            assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.slow
def test_a_rank_that_looked_at_a_batch_alone_doubles_no_samples_in_silence(tmp_path: Path) -> None:
    results = results_of("peeking_checks", tmp_path)
    for way in ("detected", "given"):
        said = [one[way] for one in results["shard_loader"]["2"]]
        assert any("if one rank alone looks at a batch" in one for one in said), way
    for way in results["plain_loader"]["2"][0]:
        epochs = [
            [
                number
                for rank in results["plain_loader"]["2"]
                for number in samples(rank[way][epoch])
            ]
            for epoch in range(3)
        ]
        assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3, way
        assert (epochs[0] == epochs[1]) == way.startswith("repeated"), way


def assert_refused(found: dict[str, list[Any]]) -> None:
    alone, together = found["1"][0], found["2"][1]
    assert len(alone) == 2  # one position, which Accelerate can save
    assert "iterate the ShardLoader itself" in alone[0]
    assert "but Accelerate would copy them again to 'cpu" in alone[1]
    assert "each rank has its own" in together[2]
    assert "would split that part again" in together[3]
    assert "may save the state of another rank" in together[4]


@pytest.mark.slow
def test_trainer_gets_each_sample_once_per_epoch_and_resumes(tmp_path: Path) -> None:
    results = results_of("hf_trainer_checks", tmp_path)
    assert_three_epochs(results["epochs_of_dataset"])
    for ranks, found in results["trained_on_datasets"].items():
        for kind in found[0]:
            runs = [one[kind] for one in found]
            assert [one["seen"] for one in runs] == [one["whole"] for one in runs]
            # Accelerate fills the last batch of all ranks: 6 of 16 samples
            filled = 2 * 10 if (kind, ranks) == ("each rank reads", "2") else 0
            assert_each_twice(runs, "seen", padded=filled)
    for found in results["trained_on_loaders"].values():
        for kind in ("whole", "same", "no skip", "larger"):
            assert_each_twice(found, kind)
        for one in found:
            assert one["same"] == one["no skip"] == one["whole"]
            assert max(len(batch) for batch in one["larger"]) == 16
    found = results["trained_where_counts_change"]["2"]
    assert [one["seen"] for one in found] == [one["whole"] for one in found]
    counts = Counter(number for one in found for number in samples(one["seen"]))
    assert counts == dict.fromkeys(range(1, SAMPLES, 2), 2)
    evaluated = list(chain.from_iterable(results["evaluated"]["2"]))
    assert [sorted(each) for each in evaluated] == [list(range(SAMPLES))] * 4
    rest = [number for one in results["readme"]["2"] for number in samples(one["seen"])]
    assert (
        len(set(rest)) == len(rest) == SAMPLES - 2 * 2 * 8
    )  # two ranks took a step of two batches
    assert_documents_stay_apart(results["packed_rows"])
    said = results["refusals"]["1"][0]
    assert "callbacks=[LoaderStateCallback()]" in said["no callback"]
    assert "TrainerLoader(loader)" in said["bare loader"]
    assert "needs a TrainerLoader" in said["callback on a bare loader"]
    assert "the saved state of the loader after batch 2" in said["other batches"]
    assert "but the Trainer would copy them again to 'cpu" in said["other device"]


def assert_documents_stay_apart(found: dict[str, list[Any]]) -> None:
    """Check that the loss of packed rows is that of their documents, and what docs/trainers.md says joins them."""
    for ranks in found.values():
        for one in ranks:
            assert one["logged"] == pytest.approx(one["alone"], rel=1e-4)
            for joined in one["joined"]:
                assert joined != pytest.approx(one["apart"], rel=1e-3)


@pytest.mark.slow
def test_distributed_checkpoints_are_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    results = results_of("checkpoint_checks", tmp_path)
    for ranks, others in (("1", "2"), ("2", "1")):
        saved, loaded = results["saved"][ranks], results["loaded"][others]
        for name in saved[0]:
            seen = [number for one in (*saved, *loaded) for number in samples(one[name])]
            assert sorted(seen) == list(range(SAMPLES)), (name, ranks)
            assert all(len(one[name]) == 4 for one in saved)
        saved, loaded = results["titan_saved"][ranks], results["titan_loaded"][others]
        epoch = 128 // (8 * int(ranks))
        first = [number for one in saved for number in samples(one[:epoch])]
        second = [number for one in saved for number in samples(one[epoch:])]
        second += [number for one in loaded for number in samples(one)]
        assert sorted(first) == sorted(second) == list(range(128))
        assert first != second


def assert_each_twice(found: list[Any], kind: str, *, padded: int = 0) -> None:
    """Check that two epochs contain each sample twice."""
    counts = Counter(number for one in found for number in samples(one[kind]))
    assert set(counts) == set(range(SAMPLES))
    assert min(counts.values()) == 2
    assert counts.total() - 2 * SAMPLES == padded
