"""Keys that come twice are found whatever their number and order, and no other keys."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from random import Random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from shardstream.format import ShardInfo
from shardstream.packing import KeyHashes, find_repeated_keys, hash_keys, place_of


@given(
    st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 7, 1000]),
)
@example([[*range(8)]] * 5, Random(0), 7)
@example([[*range(8)]] * 5, Random(0), 1000)
def test_repeated_keys_are_listed_in_the_order_of_the_samples(
    shards: list[list[int]], random: Random, kept: int
) -> None:
    names = [[f"key {number}" for number in shard] for shard in shards]

    def read_keys(shard: int, samples: Sequence[int]) -> list[str]:
        return [names[shard][sample] for sample in samples]

    infos = [ShardInfo(url=f"{number}.tar") for number in range(len(shards))]
    with closing(KeyHashes(kept=kept)) as keys:
        for shard in random.sample(range(len(shards)), len(shards)):
            keys.add(hash_keys(names[shard]), place_of(shard, len(names[shard])))
        assert keys.count == sum(map(len, shards))
        found = find_repeated_keys(keys, infos, read_keys)
    expected: list[tuple[str, str, str]] = []
    last: dict[str, str] = {}
    for info, listed in zip(infos, names, strict=True):
        for key in listed:
            if key in last:
                expected.append((key, last[key], info.url))
            last[key] = info.url
    if not expected:
        assert found is None
        return
    assert found is not None
    assert (found.listed, found.others) == (expected[:20], max(0, len(expected) - 20))
    rest = len(expected) - 1
    assert str(
        found
    ) == f"the key {expected[0][0]!r} comes twice, in {expected[0][1]} and in {expected[0][2]}" + (
        f", and so do {rest} other key{'s' * (rest > 1)}" if rest else ""
    )


def test_hashes_are_the_same_on_every_machine() -> None:
    assert [hex(one) for one in hash_keys(["a", "\udcff", ""]).tolist()] == [
        "0x2f42665b399ef840", "0x91bf0c83d9ee2ea7", "0xb4b2797457a0a6e4",
    ]  # fmt: skip


def test_hash_collisions_are_not_repeated_keys() -> None:
    with closing(KeyHashes()) as keys:
        for shard in (0, 1):
            keys.add(hash_keys(["a"]), place_of(shard, 1))

        shards = [ShardInfo(url="a.tar"), ShardInfo(url="b.tar")]
        assert find_repeated_keys(keys, shards, lambda shard, _: [f"key of {shard}"]) is None


def test_memory_does_not_grow_with_the_number_of_keys() -> None:
    def peak_bytes(shards: int) -> int:
        random = np.random.default_rng(0)
        tracemalloc.start()
        with closing(KeyHashes()) as keys:
            for shard in range(shards):
                hashes = random.integers(0, 1 << 64, 100_000, dtype=np.uint64)
                hashes[7] = 1 << 40  # the only equal ones
                keys.add(hashes, place_of(shard, len(hashes)))

            names = [ShardInfo(url=f"{shard}.tar") for shard in range(shards)]
            found = find_repeated_keys(keys, names, lambda _, samples: ["same" for _ in samples])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found is not None
        assert len(found.listed) == min(shards - 1, 20)
        assert len(found.listed) + found.others == shards - 1
        assert str(found.listed[0]) == "the key 'same' comes twice, in 0.tar and in 1.tar"
        return peak

    small, large = peak_bytes(15), peak_bytes(60)  # 1.5 and 6 million keys
    assert large < 1.2 * small < 80e6


def test_equal_hashes_are_in_one_block_in_the_order_of_their_places() -> None:
    random = np.random.default_rng(0)
    hashes = random.integers(0, 1 << 64, 5000, dtype=np.uint64)
    hashes[3000:4000] = hashes[:1000]
    with closing(KeyHashes(kept=700)) as keys:
        for first in random.permutation(50).tolist():
            some = slice(first * 100, first * 100 + 100)
            keys.add(hashes[some], np.arange(first * 100, first * 100 + 100))
        blocks = list(keys.sorted_blocks())
    order = np.lexsort((np.arange(5000), hashes))
    assert np.array_equal(np.concatenate([one for one, _ in blocks]), hashes[order])
    assert np.array_equal(np.concatenate([one for _, one in blocks]), order)
    ends = [(one[0], one[-1]) for one, _ in blocks if len(one)]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))
