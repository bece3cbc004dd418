"""Adapter for loaders that Hugging Face Accelerate has prepared.

Accelerate expects three things of such a loader: it moves batches to the device, flags the last batch of an epoch before it
yields it (accumulated gradients are applied then), and counts the samples of that batch for ``gather_for_metrics``. This
module is imported for prepared loaders only: Accelerate is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import send_to_device

from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.loader.worker import WorkerBatch
from shardstream.order import RankPartition


class PreparedEpoch:
    """One epoch of a prepared loader; batches that are on the device already stay as they are.

    Args:
        non_blocking: Whether batches are pinned, so that copies to the device can be asynchronous.
    """

    def __init__(self, *, non_blocking: bool) -> None:
        self.end_of_dataloader = False  # both names are Accelerate's
        self.remainder = 0
        """Samples of the last step over all ranks if that step is short, without padding; else 0."""
        self._non_blocking = non_blocking

    @staticmethod
    def device() -> torch.device:
        """Return the device that Accelerate moves batches to."""
        return torch.device(PartialState().device)

    def mark_last_batch(
        self, worker_batches: Iterator[WorkerBatch], partition: RankPartition | None
    ) -> Iterator[WorkerBatch]:
        """Yield worker batches; read one batch ahead and set ``end_of_dataloader`` before the last batch.

        Args:
            worker_batches: The last ones of an iteration.
            partition: Their steps, if they are known.
        """
        self.remainder = 0 if partition is None else partition.short_step_samples
        held: list[WorkerBatch] = []
        for worker_batch in worker_batches:
            if held and not worker_batch.empty:
                yield from held
                held = []
            held.append(worker_batch)
        self.end_of_dataloader = True
        yield from held

    def move_to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches on the device; register this epoch with Accelerate's gradient state meanwhile."""
        gradient_state, device = GradientState(), self.device()
        gradient_state._add_dataloader(self)
        try:
            for batch in batches:
                yield send_to_device(batch, device, non_blocking=self._non_blocking)
        finally:
            gradient_state._remove_dataloader(self)


def check_data_parallel(placement: Placement) -> None:
    """Check that samples are split over data-parallel ranks only.

    Args:
        placement: Rank and world size that the loader splits by.

    Raises:
        OptionError: If Accelerate runs tensor, context or sequence parallelism and the placement counts those ranks.
    """
    config = AcceleratorState._shared_state.get("parallelism_config")
    if config is None or config.non_data_parallel_size == 1:
        return
    if placement.world_size != config.data_parallel_size:
        raise OptionError(
            f"the dataset is split over {placement.world_size} ranks, but the data-parallel size is {config.data_parallel_size} "
            "(ranks that share a model need the same samples); "
            "pass placement=ss.Placement(data_parallel_rank, data_parallel_size) to the dataset"
        )
