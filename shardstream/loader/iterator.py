"""Stateful iterator over a dataset, as torchdata's ``StatefulDataLoader`` expects of each worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardstream.distributed import WorkerInfo, accelerate_loader, is_one_of_several
from shardstream.errors import StateError
from shardstream.pipeline import (
    BadSample,
    Pipeline,
    Run,
    State,
    check_state,
    seal_state,
    state_digest,
)

EMPTY_EPOCH = (
    "select or on_error= left out all samples of this epoch{}, so {}; before decode() fields "
    "are bytes, which a predicate may not expect"
)


class WorkerIterator:
    """Items of one worker in one epoch.

    Args:
        pipeline: Source and stages of the items.
        worker_info: Which loader worker this is.
        epoch: From 0.
        resume_epoch: Called with the epoch of a state that is loaded.
        versions: As `StreamDataset.versions`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        worker_info: WorkerInfo,
        epoch: int,
        resume_epoch: Callable[[int], None] | None = None,
        versions: Sequence[int | None] = (),
    ) -> None:
        self._pipeline, self._worker_info = pipeline, worker_info
        self._resume_epoch, self._versions = resume_epoch, versions
        self._bad: list[BadSample] = []
        self._has_items = False
        self._run = self._open(epoch)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._run)
        except StopIteration:
            skips = self._context.skips
            if not self._has_items and (skips.refused or skips.counts):
                reader = self._worker_info
                where = f" in worker {reader.worker}, rank {reader.placement.rank}"
                is_part = reader.num_global_workers > 1
                warnings.warn(
                    EMPTY_EPOCH.format(where if is_part else "", "no sample came"), stacklevel=2
                )
            raise
        self._has_items = True
        return item

    @property
    def bad_samples(self) -> list[BadSample]:
        """The bad samples skipped so far."""
        self._bad += (
            replace(
                one,
                epoch=self._epoch,
                rank=self._worker_info.placement.rank,
                worker=self._worker_info.worker,
            )
            for one in self._pipeline.source.with_locations(self._context.skips.drain_bad_samples())
        )
        return list(self._bad)

    @property
    def skipped(self) -> dict[str, int]:
        """Number of bad samples skipped, by kind of error."""
        return dict(self._context.skips.counts)

    def close(self) -> None:
        """Close files and end threads; garbage collection of the iterator does the same."""
        self._run.close()

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None:
            run.close()

    def state_dict(self) -> State:
        """Return the position of this worker, in JSON values.

        Raises:
            StateError: If rank 0 reads for all ranks: Accelerate might save the state of another rank.
        """
        if accelerate_loader() == "DataLoaderDispatcher" and is_one_of_several():
            raise StateError(
                "with dispatch_batches rank 0 reads for all ranks, but Accelerate's save_state may save the state of another rank, so "
                "a resume would restart the epoch; set dispatch_batches=False with use_stateful_dataloader=True, or prepare a "
                "ShardLoader"
            )
        identity = self._identity()
        position = {"epoch": self._epoch, "run": self._run.state_dict()}
        return seal_state({**identity, "digest": state_digest(identity), **position})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same worker, in its epoch.

        Raises:
            StateError: If its data, steps, order or worker differ.
        """
        check_state(state, expected=self._identity())
        self._run.close()
        self._run = self._open(state["epoch"])
        self._run.load_state_dict(state["run"])
        self._has_items = True  # before the state, perhaps
        if self._resume_epoch is not None:
            self._resume_epoch(state["epoch"])

    def _open(self, epoch: int) -> Run:
        self._epoch = epoch
        self._context = self._pipeline.context(self._worker_info, epoch)
        return self._pipeline.open(self._worker_info, self._context)

    def _identity(self) -> State:
        """Return the fields that a state must match."""
        identity = self._pipeline.identity(self._worker_info, self._epoch)
        identity |= {"worker": self._worker_info.worker, "versions": [*self._versions]}
        return {"kind": "reader", **identity}
