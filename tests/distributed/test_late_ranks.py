"""Loaders that are made before torch.distributed is initialised split by its ranks, as if they were made after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shardstream.testing import make_shards

JOB = Path(__file__).with_name("late_ranks_job.py")


@pytest.mark.slow
def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=102, per_shard=15)
    done = subprocess.run(
        [sys.executable, JOB, url, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert rank["no workers"] == rank["persistent worker"] == rank["made later"]
    for name, epochs in ranks[0].items():
        for epoch in range(len(epochs)):
            found = Counter(n for rank in ranks for batch in rank[name][epoch] for n in batch)
            assert found == dict.fromkeys(range(102), 1), (name, epoch)
