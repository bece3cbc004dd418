"""Find out what Lightning does with a loader: the batches that it has taken, but not trained on, and whether it overfits.

Where the length of a loader is not known, Lightning takes a batch ahead, to know which one is the last; and it stops after
``limit_train_batches``. Its checkpoints ask for the state of the loader in the middle of that. Only the call stack shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from shardstream.errors import StateError
from shardstream.pipeline import LoaderPosition

LOOP_MODULES = ("lightning.pytorch.loops", "pytorch_lightning.loops")


def received_position(
    loader: object, position: LoaderPosition, before: LoaderPosition, following: LoaderPosition
) -> LoaderPosition:
    """Return the position of a state: after the last batch that the training has received.

    Args:
        loader: A calling training loop of Lightning may have taken batches from it that it has not used yet.
        position: Position after the last batch that it has handed out.
        before: Position before that batch.
        following: Position where its next iteration begins.

    Raises:
        StateError: If there are several.
    """
    for loop in _calling_loops():
        fetcher: Any = getattr(loop, "_data_fetcher", None)
        combined = getattr(fetcher, "_combined_loader", None)
        if combined is None or not any(one is loader for one in combined.flattened):
            continue
        ahead = len(getattr(fetcher, "batches", ()))
        if ahead > 1:
            raise StateError(
                f"Lightning holds {ahead} batches for later steps, which a state would lose; let it fetch one ahead, or set the "
                "length with .with_length(n), so that it fetches none"
            )
        if ahead:
            return before
        return following if fetcher.done else position
    return position


def is_called_by_lightning() -> bool:
    """Return whether a loop of Lightning is on the call stack, which has counted the batches of an epoch."""
    return next(_calling_loops(), None) is not None


def is_overfit_by_lightning() -> bool:
    """Return whether a calling Trainer has ``overfit_batches``: it takes the same batches in each epoch."""
    for loop in _calling_loops():
        trainer = getattr(loop, "trainer", None)
        if getattr(trainer, "overfit_batches", 0) > 0:
            return True
    return False


def _calling_loops() -> Iterator[Any]:
    """Yield the loops of Lightning on the call stack, which a forked worker inherits from its parent."""
    if sys.modules.keys().isdisjoint(LOOP_MODULES):
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(LOOP_MODULES):
            yield frame.f_locals.get("self")
        frame = frame.f_back
