"""torchdata's nodes over loose files: a random sampler, a pool that reads ahead, batches.

A thread pool is fastest for raw files (no transfer between processes); for decoding, processes are. With no workers it
reads in this thread.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, SamplerWrapper

from benchmarks.case import Case, Epochs
from benchmarks.peers.files import Files

FORMAT = "files"


def _stack(examples: Any) -> Any:
    from torch.utils.data import default_collate  # noqa: PLC0415

    return tuple(default_collate(examples))


def make_loader(case: Case) -> Any:
    """Return the loader of a case."""
    files = Files(case)
    numbers: Any = SamplerWrapper(RandomSampler(files))
    node: Any = (
        ParallelMapper(
            numbers,
            files.__getitem__,
            num_workers=case.workers,
            method="process" if case.task == "train" else "thread",
            in_order=False,
        )
        if case.workers
        else Mapper(numbers, files.__getitem__)
    )
    node = Batcher(node, case.batch_size, drop_last=False)
    if case.task == "train":
        node = Mapper(node, _stack)
    return Loader(node)


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    loader = make_loader(case)
    return lambda _: loader
