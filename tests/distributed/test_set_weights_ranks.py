"""Two ranks change the weights of a mix: together, after different batches, and to different weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardstream.testing import make_shards

JOB = Path(__file__).with_name("set_weights_job.py")


@pytest.mark.slow
def test_ranks_change_weights_together_or_fail(tmp_path: Path) -> None:
    urls = [make_shards(tmp_path / name, samples=120, per_shard=20) for name in "ab"]
    done = subprocess.run(
        [sys.executable, JOB, *urls, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for part in (slice(3), slice(3, None)):  # before, of dataset a, and after, of b
        ids = [one for rank in ranks for batch in rank["same"][part] for one in batch]
        assert len(ids) == len(set(ids)) == (30 if part.start is None else 50)
    for rank in ranks:
        for name in ("other batch", "other weights"):
            assert "ranks differ in set_weights" in rank[name], name
