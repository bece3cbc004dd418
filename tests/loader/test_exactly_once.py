"""Each sample is read once, with equal steps and exact resume, for any shape of dataset and job."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.testing import make_shards
from tests.small_datasets import flat, grouped, labels, take

pytestmark = pytest.mark.filterwarnings("ignore:lanes=")  # costlier reading is accepted here


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sets")


@settings(max_examples=60)
@given(data=st.data())
def test_each_sample_is_returned_once_also_after_resume_on_another_topology(
    root: Path, data: st.DataObject
) -> None:
    draw = data.draw
    nsamples, per_shard = draw(st.integers(1, 60)), draw(st.integers(1, 25))
    microbatch, lanes = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    folder = str(root / f"{nsamples}-{per_shard}")
    if not Path(folder).exists():
        make_shards(folder, samples=nsamples, per_shard=per_shard)
    order = {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(-3, 3)),
        "microbatch": microbatch,
        "lanes": lanes,
        "window": microbatch * draw(st.integers(1, 6)),
        "block": draw(st.integers(1, 9)),
    }

    def ranks(world_size: int, microbatches: int) -> list[ss.ShardLoader]:
        return [
            ss.ShardLoader(
                ss.ShardDataset(
                    folder, **grouped(placement=ss.Placement(rank, world_size), **order)
                ).decode(),
                batch_size=microbatch * microbatches,
            )
            for rank in range(world_size)
        ]

    world_size = draw(st.integers(1, 4))
    first = ranks(world_size, draw(st.integers(1, 3)))
    steps = draw(st.integers(0, len(first[0])))
    seen = [labels(take(loader, steps)) for loader in first]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states), "ranks differ in their state"
    assert len({tuple(map(len, batches)) for batches in seen}) == 1, "ranks are out of step"

    over = steps == len(first[0])
    other = draw(st.integers(1, 4))
    second = [] if over else ranks(other, draw(st.integers(1, 3)))
    for loader in second:
        loader.load_state_dict(states[0])
    rest = [labels(loader) for loader in second]
    assert len({tuple(map(len, batches)) for batches in rest}) <= 1, "ranks are out of step"
    counts = Counter(chain(*(flat(batches) for batches in [*seen, *rest])))
    assert set(counts) == set(range(nsamples))
    assert counts.total() - nsamples < (world_size if over else other)
