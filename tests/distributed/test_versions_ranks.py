"""A version that is published while the ranks open a dataset is an error: each would read other samples."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardstream.testing import make_shards

JOB = Path(__file__).with_name("versions_job.py")


@pytest.mark.slow
def test_ranks_that_opened_different_versions_do_not_read(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=20, per_shard=5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = subprocess.run(
        [sys.executable, JOB, url, port, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    texts = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert "rank 0 has [1], rank 1 has [2]; open the same one on all" in texts[0]
    assert "rank 1 has [2], rank 0 has [1]; open the same one on all" in texts[1]
