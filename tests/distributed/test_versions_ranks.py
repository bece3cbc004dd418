"""Ranks that open different versions of a dataset, or parts of it that each has chosen, are an error: each would read other samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardstream.testing import make_shards
from tests.distributed.two_ranks import run_two_ranks

JOB = Path(__file__).with_name("versions_job.py")


@pytest.mark.slow
def test_ranks_that_opened_different_versions_or_samples_do_not_read(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=20, per_shard=5)
    for rank in range(2):
        make_shards(f"{url}-{rank}", samples=20 + rank, per_shard=5)  # equal copies are one dataset
    run_two_ranks(JOB, url, tmp_path)
    texts = [(tmp_path / f"versions-{rank}.txt").read_text() for rank in range(2)]
    assert "rank 0 has [1], rank 1 has [2]; open the same one on all" in texts[0]
    assert "rank 1 has [2], rank 0 has [1]; open the same one on all" in texts[1]
    for rank in range(2):
        text = (tmp_path / f"samples-{rank}.txt").read_text()
        assert f"ranks {rank} and {1 - rank} read different samples of 'data'" in text
        text = (tmp_path / f"own-{rank}.txt").read_text()
        assert f"read different datasets, 'data-{rank}' and 'data-{1 - rank}'" in text
