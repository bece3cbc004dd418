"""Mix two datasets three to one.

You learn: ``ss.mix`` takes datasets with their own steps and returns a dataset. With weights, an epoch ends before a sample of
any dataset would repeat, or after all samples have been read (``stop="all_exhausted"``). The mix is a function of the position:
the same on any number of workers, and it resumes like a single dataset. Without weights an epoch has every sample once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import islice
from typing import Any

import shardstream as ss


def source_of(sample: dict[str, Any]) -> str:
    """Return the dataset of a sample, which is in its key here."""
    return str(sample["__key__"]).split("-")[0]


def main() -> None:
    """Mix a large and a small dataset."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, count in (("photos", 900), ("drawings", 200)):
            with ss.ShardWriter(f"{scratch}/{name}", max_samples=100) as writer:
                for number in range(count):
                    writer.write({"__key__": f"{name}-{number:04d}", "cls": number})
        parts = {
            name: ss.ShardDataset(f"{scratch}/{name}", shuffle=True).decode()
            for name in ("photos", "drawings")
        }

        mixed = ss.mix(
            parts, weights={"photos": 3, "drawings": 1}, order=ss.OrderOptions(lanes=4)
        ).map(source_of)
        loader = ss.ShardLoader(mixed, batch_size=32, num_workers=2)
        batches = list(loader)
        counts = Counter(name for batch in batches for name in batch)
        print(f"3 to 1: {dict(counts)}")
        assert (
            180 <= counts["drawings"] <= 200
        )  # almost all samples: an epoch consists of full batches
        assert 2.9 < counts["photos"] / counts["drawings"] < 3.1
        assert all(
            batch.count("photos") == 24 for batch in batches
        )  # close to 3 to 1 in each batch of 32

        again = ss.mix(
            parts,
            weights={"photos": 3, "drawings": 1},
            stop="all_exhausted",
            order=ss.OrderOptions(lanes=4),
        ).map(source_of)
        counts = Counter(name for batch in ss.ShardLoader(again, batch_size=32) for name in batch)
        print(f"until all have come: {dict(counts)}")
        assert counts["photos"] >= 900

        everything = ss.mix(parts).map(source_of)
        counts = Counter(
            name for batch in ss.ShardLoader(everything, batch_size=32) for name in batch
        )
        print(f"without weights: {dict(counts)}")
        assert counts == {"photos": 900, "drawings": 200}

        # A mix has a state as well; here it resumes without workers.
        loader.set_epoch(0)
        before = list(islice(loader, 10))
        resumed = ss.ShardLoader(mixed, batch_size=32)
        resumed.load_state_dict(loader.state_dict())
        assert before + list(resumed) == batches
        print("resumed in the middle: the same batches")


if __name__ == "__main__":
    main()
