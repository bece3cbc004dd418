"""Two ranks follow a dataset, break after the last batch, end one after the other, and one begins alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.testing import make_shards
from tests.distributed.two_ranks import run_two_ranks

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
    run_two_ranks(JOB, url, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == [[[0, 1, 2, 3], [8, 9]], [[11, 12, 13]], [], [[16]], "", ""]
    assert ranks[1][:-2] == [[[4, 5, 6, 7], [10, 8]], [[14, 15, 11]], [], [[16]]]
    assert "rank 0 has said of no new samples for 5 s, and no writer is open" in ranks[1][-2]
    assert "rank 0 follows another dataset, whose first 15 samples are others" in ranks[1][-1]
