"""Test ``shardstream bench``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardstream as ss
from tests.small_datasets import numbered, picture

COMMAND = [sys.executable, "-m", "shardstream", "bench"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_dataset_is_measured_with_each_number_of_workers(tmp_path: Path) -> None:
    folder, picture = numbered(tmp_path / "data", 300, 100), tmp_path / "rates.png"
    shown = run(folder, "--workers", "2", "--seconds", "0.3", "--plot", str(picture))
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["workers", "samples/s", "MB/s", "first", "batch"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert "recommended" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = run(folder, "--workers", "0", "--seconds", "0.3", "--json", "--in-order")
    report = json.loads(printed.stdout)
    assert [trial["workers"] for trial in report["trials"]] == [0]
    assert report["trials"][0]["samples_per_s"] > 0
    assert report["recommended_workers"] == 0


@pytest.mark.slow
def test_pictures_of_different_sizes_are_measured_and_bad_ones_counted(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path, max_samples=10) as writer:
        for number in range(20):
            sample = {"__key__": f"{number:02d}", "png": picture(size=(8 + number, 8))}
            writer.write(sample | ({"png": b"none"} if number == 3 else {}))
    shown = run(
        *(str(tmp_path), "--decode", "rgb8", "--workers", "1", "--batch-size", "4"),
        *("--seconds", "0.1", "--json"),
    )
    assert shown.returncode == 0, shown.stderr
    trials = json.loads(shown.stdout)["trials"]
    assert [trial["samples_per_s"] > 0 for trial in trials] == [True, True]
    assert {trial["bad_samples"] for trial in trials} == {1}


@pytest.mark.slow
def test_a_dataset_of_one_batch_is_measured_over_several_epochs(tmp_path: Path) -> None:
    shown = run(numbered(tmp_path, 8, 8), "--workers", "0", "--batch-size", "8", "--seconds", "0.1")
    assert shown.returncode == 0, shown.stderr
    assert "recommended" in shown.stdout


@pytest.mark.slow
def test_wrong_use_is_explained(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 10, 5)
    few = run(folder, "--workers", "0", "--batch-size", "50")
    assert (few.returncode, few.stderr) == (
        1,
        "error: the dataset has fewer samples than a batch of 50\n",
    )
