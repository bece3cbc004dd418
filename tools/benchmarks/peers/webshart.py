"""webshart: tars with its JSON index, tars in random order and a buffer of 1,000.

It returns members, joined here by key, and neither decodes nor has workers: it reads in threads of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import webshart

from benchmarks.case import Case, Epochs
from benchmarks.loaders import batched, collate, joined, shuffled

FORMAT = "webshart"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    shards = webshart.discover_dataset(case.location)
    loader = webshart.TarDataLoader(shards, batch_size=case.batch_size)

    def members(numbers: list[int]) -> Iterator[tuple[str, bytes]]:
        for number in numbers:
            loader.shard(shard_idx=number)
            for entry in islice(loader, shards.get_shard_file_count(number)):
                yield entry.path, entry.data

    def epoch(number: int) -> Iterator[Any]:
        rng = random.Random(number)
        numbers = rng.sample(range(shards.num_shards), shards.num_shards)
        raw = batched(shuffled(joined(members(numbers)), rng), case.batch_size)
        return map(collate(case), raw)

    return epoch
