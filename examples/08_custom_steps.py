"""Add custom steps: a decoder, a filter, a flat-map, a generator.

You learn: where to add your code. ``decode(fields=...)`` for a custom format; ``select`` to drop samples; ``map`` to a list and
``unbatched`` to make several items of one; ``compose`` for a generator function. The last three change the number of items: the
state then holds a position for each worker, and resumes on the same number of workers and ranks only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import shardstream as ss


def parse_pairs(data: bytes) -> list[tuple[str, int]]:
    """Decode a custom format: lines like ``word=3``."""
    lines = (line.split("=") for line in data.decode().splitlines())
    return [(word, int(count)) for word, count in lines]


def is_wanted(sample: dict[str, Any]) -> bool:
    """Return whether to keep a sample."""
    return bool(sample["cls"] % 5)


def to_words(sample: dict[str, Any]) -> list[str]:
    """Return the items made from one sample."""
    return [word for word, count in sample["counts"] for _ in range(count)]


def neighbours(words: Iterator[str]) -> Iterable[tuple[str, str]]:
    """Pair each word with the next."""
    last = None
    for word in words:
        if last is not None:
            yield last, word
        last = word


def open_loader(url: str) -> ss.ShardLoader:
    """Return a loader of the dataset and its steps, with two workers."""
    dataset = (
        ss.ShardDataset(url, shuffle=True, seed=3)
        .decode(fields={"counts": parse_pairs})
        .select(is_wanted)
        .map(to_words)
        .unbatched()
        .compose(neighbours)
    )
    return ss.ShardLoader(dataset, batch_size=8, num_workers=2)


def main() -> None:
    """Run the steps, and resume in the middle."""
    with tempfile.TemporaryDirectory() as scratch:
        with ss.ShardWriter(f"{scratch}/data", max_samples=20) as writer:
            for number in range(100):
                text = f"a{number}=2\nb{number}=1\n"
                writer.write({"cls": number, "counts": text.encode()})

        loader = open_loader(f"{scratch}/data")
        batches = list(loader)
        pairs = [pair for batch in batches for pair in zip(*batch, strict=True)]
        print("first pairs:", *pairs[:3])
        # 80 samples are kept, 3 words each; each of the two workers has a first word without a predecessor.
        assert len(pairs) == 80 * 3 - 2
        assert all(a[1:] == b[1:] for a, b in pairs if b[0] == "b")

        loader.set_epoch(0)
        before = list(islice(loader, 10))
        resumed = open_loader(f"{scratch}/data")
        resumed.load_state_dict(loader.state_dict())
        assert before + list(resumed) == batches
        print("resumed in the middle: the same batches")


if __name__ == "__main__":
    main()
