"""Use torch's own DataLoader, samplers and splits, without a ShardLoader.

You learn: two ways to keep existing code. ``ShardDataset`` is an ``IterableDataset``: a plain ``DataLoader`` reads each sample
once over its workers; set ``microbatch=`` of the order to the batch size, so that batches are full. ``by_number()`` reads the same data
by number, for ``DistributedSampler``, ``random_split``, ``Subset`` and ``WeightedRandomSampler``. Only a ShardLoader has a
state, and batches that are the same on any number of workers.
"""

from __future__ import annotations

import tempfile
from itertools import chain

import torch
from torch.utils.data import DataLoader, DistributedSampler, random_split

import shardstream as ss


def main() -> None:
    """Read the same shards in three ways."""
    with tempfile.TemporaryDirectory() as scratch:
        url = f"{scratch}/data"
        with ss.ShardWriter(url, max_samples=100) as writer:
            for number in range(640):
                writer.write({"__key__": f"{number:04d}", "cls": number, "txt": f"text {number}"})

        # A stream, two workers.
        stream = (
            ss.ShardDataset(url, shuffle=True, order=ss.OrderOptions(microbatch=32))
            .decode()
            .to_tuple("txt", "cls")
        )
        plain = DataLoader(stream, batch_size=32, num_workers=2)
        # On several ranks, call stream.set_epoch(epoch) before each.
        epochs = [[labels.tolist() for _, labels in plain] for _ in range(2)]
        assert all(len(batch) == 32 for batch in epochs[0])
        assert all(sorted(chain.from_iterable(epoch)) == list(range(640)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        print(
            f"stream: {len(epochs[0])} full batches, each sample once, another order in each epoch"
        )

        # By number: any sampler.
        table = ss.ShardDataset(url).by_number().decode().to_tuple("txt", "cls")
        assert table[5] == ("text 5", 5)
        assert table[-1] == ("text 639", 639)
        seen: list[int] = []
        for rank in range(2):  # two ranks, here in sequence
            sampler: DistributedSampler[object] = DistributedSampler(
                table, num_replicas=2, rank=rank, seed=1
            )
            for _, labels in DataLoader(table, batch_size=32, sampler=sampler, num_workers=1):
                seen += labels.tolist()
        assert sorted(seen) == list(range(640))
        print("by number: two ranks of a DistributedSampler share the samples")

        train, val = random_split(table, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
        batches = [labels.tolist() for _, labels in DataLoader(train, batch_size=32, shuffle=True)]
        held_out = [val[number][1] for number in range(len(val))]
        assert sorted(chain(held_out, *batches)) == list(range(640))
        print(f"random_split: {len(train)} and {len(val)}")


if __name__ == "__main__":
    main()
