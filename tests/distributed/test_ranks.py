"""DDP trainings on real ranks: no hang, equal steps, each sample once, and exact resume after a killed rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstream as ss
from shardstream.testing import make_shards

JOB = Path(__file__).with_name("job.py")


TORCHRUN = ["-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d"]


def train(
    ranks: int, out: Path, url: str, *options: str, by_torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(JOB), "--ranks", str(ranks)]
    if by_torchrun:
        command = [sys.executable, *TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0"]
        command += ["--nproc-per-node", str(ranks), str(JOB)]
    command += ["--url", url, "--out", str(out), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def steps_of(out: Path, ranks: int) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(line) for line in (out / f"ids-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "samples", "options"),
    [
        (2, 203, ["--batch-size", "8", "--workers", "2", "--epochs", "2"]),
        (3, 101, ["--batch-size", "7"]),
        (4, 97, ["--batch-size", "5", "--microbatch", "5", "--lanes", "8", "--workers", "1"]),
    ],
)
def test_ranks_train_in_step_and_see_each_sample_once(
    tmp_path: Path, ranks: int, samples: int, options: list[str]
) -> None:
    url = make_shards(tmp_path / "data", samples=samples, per_shard=30)
    done = train(ranks, tmp_path / "out", url, *options, by_torchrun=ranks == 2)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = steps_of(tmp_path / "out", ranks)
    for at_once in zip_longest(*steps):
        assert None not in at_once, "a rank has fewer steps"
        assert len({len(step["ids"]) for step in at_once}) == 1, "ranks differ in batch size"
    for epoch in {step["epoch"] for step in steps[0]}:
        counts = Counter(
            number
            for rank in steps
            for step in rank
            if step["epoch"] == epoch
            for number in step["ids"]
        )
        assert set(counts) == set(range(samples))
        assert counts.total() - samples < ranks


@pytest.mark.slow
def test_ranks_with_different_numbers_of_workers_refuse(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=60, per_shard=30)
    done = train(2, tmp_path / "out", url, "--batch-size", "4", "--workers-of-rank-1", "2")
    assert done.returncode != 0
    for rank, workers in ((0, "lanes=2"), (1, "lanes=4")):
        assert f"rank {rank} has lanes=" in done.stderr, done.stderr[-3000:]
        assert workers in done.stderr
    assert "so samples would be repeated or missed" in done.stderr
    assert all((tmp_path / "out" / f"ids-{rank}.jsonl").read_text() == "" for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "workers"), [(4, 1), (1, 0)])
def test_ranks_stay_in_step_when_one_rank_skips_samples(
    batch_size: int, workers: int, tmp_path: Path
) -> None:
    samples: list[dict[str, Any]] = [{"__key__": f"{n:03d}", "cls": n} for n in range(48)]
    url = make_shards(tmp_path / "sound", samples=samples, per_shard=12)
    dataset = ss.ShardDataset(url, shuffle=True, seed=1, placement=ss.Placement(1, 2)).decode()
    first = ss.ShardLoader(dataset, batch_size, num_workers=workers)
    # only samples of rank 1 are bad, among them all of its third step
    bad = {int(number) for batch in list(first)[1:4] for number in batch["cls"]}
    bad -= {min(bad)} if batch_size > 1 else set()
    for number in bad:
        samples[number]["cls"] = b"none"
    url = make_shards(tmp_path / "bad", samples=samples, per_shard=12)
    options = ["--batch-size", f"{batch_size}", "--workers", f"{workers}", "--on-error", "skip"]
    done = train(2, tmp_path / "out", url, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = steps_of(tmp_path / "out", 2)
    assert len(steps[0]) == len(steps[1]) == 24 // batch_size
    assert {len(step["ids"]) for step in steps[0]} == {batch_size}
    assert min(len(step["ids"]) for step in steps[1]) >= 1
    seen = {number for rank in steps for step in rank for number in step["ids"]}
    assert seen == set(range(48)) - bad


@pytest.mark.slow
def test_resume_after_a_killed_rank_on_another_number_of_ranks(tmp_path: Path) -> None:
    samples = 240
    url = make_shards(tmp_path / "data", samples=samples, per_shard=50)
    order = ["--microbatch", "4", "--lanes", "12"]
    out = tmp_path / "out"
    killed = train(3, out, url, "--batch-size", "8", "--kill-rank", "1", "--kill-step", "5", *order)
    assert killed.returncode != 0
    first = steps_of(out, 3)
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    assert checkpoint["loader"]["consumed"] == 3 * 3 * 8, "the last checkpoint is of step 3"
    seen = [number for rank in first for step in rank[:3] for number in step["ids"]]

    resumed = train(2, out, url, "--batch-size", "12", "--workers", "1", *order)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    second = [number for rank in steps_of(out, 2) for step in rank for number in step["ids"]]
    assert sorted(seen + second) == list(range(samples))
