"""Find out what Lightning does with a loader: the batches that it has taken, but not trained on, and whether it overfits.

Where the length of a loader is not known, Lightning takes a batch ahead, to know which one is the last; and it stops after
``limit_train_batches``. Its checkpoints ask for the state of the loader in the middle of that. Only the call stack shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

_MODULES = ("lightning.pytorch.loops", "pytorch_lightning.loops")


class Fetched(NamedTuple):
    """Batches that Lightning has fetched.

    Args:
        ahead: Batches that it holds for later steps.
        is_last: Whether the batch of this step is the last of Lightning's epoch.
    """

    ahead: int = 0
    is_last: bool = False


def fetched_by_lightning(loader: Any) -> Fetched:
    """Return the batches that a calling training loop of Lightning has fetched from a loader."""
    for loop in _calling_loops():
        fetcher: Any = getattr(loop, "_data_fetcher", None)
        combined = getattr(fetcher, "_combined_loader", None)
        if combined is not None and any(one is loader for one in combined.flattened):
            return Fetched(len(getattr(fetcher, "batches", ())), bool(fetcher.done))
    return Fetched()


def is_overfit_by_lightning() -> bool:
    """Return whether a calling Trainer has ``overfit_batches``: it takes the same batches in each epoch."""
    for loop in _calling_loops():
        trainer = getattr(loop, "trainer", None)
        if getattr(trainer, "overfit_batches", 0) > 0:
            return True
    return False


def _calling_loops() -> Iterator[Any]:
    """Yield the loops of Lightning on the call stack, which a forked worker inherits from its parent."""
    if sys.modules.keys().isdisjoint(_MODULES):
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_MODULES):
            yield frame.f_locals.get("self")
        frame = frame.f_back
