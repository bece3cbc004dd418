"""A transformer trained on packed rows by two ranks, killed, and resumed by one: the losses are those of a training that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardstream as ss

JOB = Path(__file__).with_name("packed_training_job.py")


def run(ranks: int, url: Path, out: Path, *options: str) -> int:
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])}
    return subprocess.run(
        [*command, str(ranks), str(JOB), str(url), str(out), *options],
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
    ).returncode


def losses(out: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in (out / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_losses_continue_exactly_on_another_number_of_ranks(tmp_path: Path) -> None:
    rng, url = np.random.default_rng(0), tmp_path / "tokens"
    documents = (
        {"npy": (np.arange(rng.integers(5, 60)) * rng.integers(1, 4) % 32).astype(np.uint16)}
        for _ in range(400)
    )
    ss.pack(documents, url, max_samples=100, columns={"n": "npy.len"})
    assert run(1, url, tmp_path / "whole") == 0
    assert run(2, url, tmp_path / "killed", "--kill-after", "13") != 0
    assert len(losses(tmp_path / "killed")) == 13
    assert run(1, url, tmp_path / "killed") == 0
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "killed")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert np.allclose([loss for _, loss in found], [loss for _, loss in expected], rtol=1e-9)
    assert found[-1][1] < found[0][1] / 2
