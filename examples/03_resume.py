"""Stop in the middle of an epoch and resume with another number of workers.

You learn: ``loader.state_dict()`` is a few numbers that count the samples the training has received, not those that workers have
prefetched. Save it in your checkpoint; ``load_state_dict`` continues with the next sample. No sample is repeated or missed.
Choose ``order=ss.OrderOptions(lanes=)`` in advance: a multiple of every number of workers (times ranks) that you may use.
"""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path

import torch

import shardstream as ss


def open_loader(url: str, *, num_workers: int) -> ss.ShardLoader:
    """Return a loader over the same dataset with any number of workers."""
    dataset = (
        ss.ShardDataset(url, shuffle=True, seed=7, order=ss.OrderOptions(lanes=12))
        .decode()
        .to_tuple("cls")
    )
    return ss.ShardLoader(dataset, batch_size=16, num_workers=num_workers)


def main() -> None:
    """Train for some steps, save, load, and train the rest."""
    with tempfile.TemporaryDirectory() as scratch:
        with ss.ShardWriter(f"{scratch}/data", max_samples=100) as writer:
            for number in range(1000):
                writer.write({"__key__": f"{number:04d}", "cls": number})

        checkpoint = Path(scratch, "checkpoint.pt")
        loader = open_loader(f"{scratch}/data", num_workers=2)
        whole = [ids.tolist() for (ids,) in loader]  # an uninterrupted epoch
        loader.set_epoch(0)

        # The first run: 20 steps of the epoch, then it stops.
        before: list[list[int]] = []
        for (ids,) in loader:
            before.append(ids.tolist())
            if len(before) == 20:
                torch.save({"loader": loader.state_dict(), "model": "..."}, checkpoint)
                break
        print("state:", json.dumps(loader.state_dict()))

        # The second run: for example another process on another machine, with 1 worker.
        resumed = open_loader(f"{scratch}/data", num_workers=1)
        resumed.load_state_dict(torch.load(checkpoint)["loader"])
        print(f"{len(resumed)} steps of epoch {resumed.epoch} are left")
        after = [ids.tolist() for (ids,) in resumed]

        assert before + after == whole  # the same batches as without the break
        assert sorted(chain.from_iterable(before + after)) == list(range(1000))  # each sample once
        print("no sample is lost, none is seen twice")

        # A state of other data is refused.
        with ss.ShardWriter(f"{scratch}/other") as writer:
            writer.write({"cls": 1})
        try:
            open_loader(f"{scratch}/other", num_workers=0).load_state_dict(resumed.state_dict())
        except ss.errors.StateError as error:
            print("on other data:", error)
        else:
            raise AssertionError("the state was taken")


if __name__ == "__main__":
    main()
