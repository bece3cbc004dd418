"""Two ranks follow a dataset, break after the last batch, end one after the other, and one begins alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.testing import make_shards

JOB = Path(__file__).with_name("follow_job.py")


@pytest.mark.slow
def test_ranks_go_on_after_a_break_and_all_see_the_end(tmp_path: Path) -> None:
    samples = [{"__key__": f"{number:06d}", "cls": number} for number in range(11)]
    url = make_shards(tmp_path / "data", samples=samples, per_shard=5)
    for rank in range(2):
        fork = make_shards(tmp_path / f"{rank}/fork", samples=samples, per_shard=5)
        with ss.ShardWriter(fork, append=True) as writer:
            for number in range(4 + rank):
                writer.write({"__key__": f"{rank}{number}", "cls": rank})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = subprocess.run(
        [sys.executable, JOB, url, port, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == [[[0, 1, 2, 3], [8, 9]], [[11, 12, 13]], [], [[16]], "", ""]
    assert ranks[1][:-2] == [[[4, 5, 6, 7], [10, 8]], [[14, 15, 11]], [], [[16]]]
    assert "rank 0 has said of no new samples for 5 s, and no writer is open" in ranks[1][-2]
    assert "rank 0 follows another dataset, whose first 15 samples are others" in ranks[1][-1]
