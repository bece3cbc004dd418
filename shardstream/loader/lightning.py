"""Find the batches that Lightning has taken from a loader, but has not trained on.

Where the length of a loader is not known, Lightning takes a batch ahead, to know which one is the last; and it stops after
``limit_train_batches``. Its checkpoints ask for the state of the loader in the middle of that. Only the call stack shows it.
"""

from __future__ import annotations

import sys
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
    if sys.modules.keys().isdisjoint(_MODULES):
        return Fetched()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_MODULES):
            fetcher: Any = getattr(frame.f_locals.get("self"), "_data_fetcher", None)
            combined = getattr(fetcher, "_combined_loader", None)
            if combined is not None and any(one is loader for one in combined.flattened):
                return Fetched(len(getattr(fetcher, "batches", ())), bool(fetcher.done))
        frame = frame.f_back
    return Fetched()
