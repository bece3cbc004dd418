"""A dataset that is read by number, in the order of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardstream.catalog.concat_catalog import AnyCatalog
from shardstream.catalog.object_catalog import ObjectCatalog
from shardstream.catalog.shard_catalog import ShardCatalog
from shardstream.distributed import WorkerInfo
from shardstream.order.epoch_plan import EpochOrder, EpochPlan, default_block, default_window
from shardstream.order.partition import PartitionConfig, RankPartition, Remainder
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.indexed_run import IndexedRun
from shardstream.pipeline.stage import Context, State, check_at_least, whole_number

_DEFAULT_MICROBATCH = 64
_LOOSE_WINDOW = 64


class Chain(Protocol):
    """Steps on samples, before those of the pipeline."""

    def __call__(self, items: list[Any], numbers: list[int], /) -> tuple[Sequence[Any], list[int]]:
        """Return the items that came through and their numbers, in order."""

    def close(self) -> None:
        """Join its threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a user may say about the order of samples; None stands for a default computed from the data.

    Args:
        shuffle: As in `EpochOrder`, like the next five.
        remainder: As in `PartitionConfig`.
        prefetch_bytes: Held, or asked for, by each worker before it is used.
        hedge: Ask a second time where an answer is late.
    """

    shuffle: bool = False
    seed: int = 0
    lanes: int | None = None
    microbatch: int | None = None
    window: int | None = None
    block: int | None = None
    remainder: Remainder = "pad"
    prefetch_bytes: int = 64 << 20
    hedge: bool = False

    def __post_init__(self) -> None:
        for name in ("seed", "lanes", "microbatch", "window", "block"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(
                    self, name, whole_number(name, value)
                )  # states hold them as JSON
        check_at_least(
            1, lanes=self.lanes, microbatch=self.microbatch, window=self.window, block=self.block
        )


class IndexedSource(Protocol):
    """What a loader needs of a source whose positions are arithmetic."""

    @property
    def options(self) -> ReadOptions:
        """What the user said about the order."""

    @property
    def catalog(self) -> AnyCatalog:
        """All samples by number."""

    def order(self, *, batch: int, lanes: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch for a microbatch, with that many lanes unless the user said otherwise."""

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""

    def with_options(self, **changes: Any) -> IndexedSource:
        """Return the same source with other options."""

    def describe(self, *, steps: bool) -> State:
        """Return what a state must agree with beside the data and the order; nothing unless it is a mix.

        Args:
            steps: With the stages of its parts.
        """

    def chain(self, epoch: int, skips: SkipTracker) -> Chain | None:
        """Return what is done to raw samples before the pipeline's own stages, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSource:
    """One dataset.

    Args:
        catalog: Its samples.
        options: What the user said about their order.
    """

    catalog: ShardCatalog | ObjectCatalog
    options: ReadOptions

    def order(self, *, batch: int, lanes: int, epoch: int) -> EpochOrder:  # noqa: ARG002  (the same every epoch)
        """Return the order for a microbatch, with that many lanes unless the user said otherwise."""
        options, nsamples, total_bytes = self.options, len(self.catalog), self.catalog.total_bytes
        if self.catalog.can_coalesce:
            window = options.window or default_window(nsamples, total_bytes, batch)
            block = options.block or default_block(nsamples, total_bytes)
        else:  # nothing is gained by reading neighbours: the shuffle is as good as any, windows only group the requests
            window = options.window or max(1, _LOOSE_WINDOW // batch) * batch
            block = options.block or 1
        return EpochOrder(
            nsamples=nsamples,
            batch=batch,
            shuffle=options.shuffle,
            seed=options.seed,
            lanes=options.lanes or lanes,
            # Read in order, a window is shared by all readers: it only says how much is worth fetching together.
            window=window if options.shuffle else window * lanes,
            block=block,
        )

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""
        return EpochPlan(order, epoch)

    def describe(self, *, steps: bool) -> State:  # noqa: ARG002
        """Return nothing: data and order say it all."""
        return {}

    def with_options(self, **changes: Any) -> CatalogSource:
        """Return the same source with other options."""
        return replace(self, options=replace(self.options, **changes))

    def chain(self, epoch: int, skips: SkipTracker) -> Chain | None:  # noqa: ARG002
        """Return nothing: samples come as they are."""
        return None


def open_default_run(
    source: IndexedSource, worker_info: WorkerInfo, context: Context
) -> IndexedRun:
    """Start reading what one loader worker takes of a dataset that is iterated by itself."""
    partition = default_partition(source, worker_info, context.epoch)
    return open_run(source, partition, worker_info, context.skips)


def default_microbatch(nsamples: int, readers: int) -> int:
    """Return the microbatch of a dataset that is iterated without a `ShardLoader`: 64, or less where readers would get none.

    >>> default_microbatch(100_000, 8), default_microbatch(25, 2)
    (64, 1)
    """
    return max(1, min(_DEFAULT_MICROBATCH, nsamples // (8 * readers)))


def default_partition(source: IndexedSource, worker_info: WorkerInfo, epoch: int) -> RankPartition:
    """Return the steps of a rank of a dataset that is iterated by itself."""
    batch = source.options.microbatch or default_microbatch(len(source.catalog), worker_info.total)
    if source.options.microbatch is None and source.options.window is not None:
        batch = math.gcd(batch, source.options.window)
    order = source.order(batch=batch, lanes=worker_info.total, epoch=epoch)
    config = PartitionConfig(
        world_size=worker_info.placement.world_size, remainder=source.options.remainder
    )
    return RankPartition(source.plan(order, epoch), config, rank=worker_info.placement.rank)


def open_run(
    source: IndexedSource, partition: RankPartition, worker_info: WorkerInfo, skips: SkipTracker
) -> IndexedRun:
    """Start reading what one loader worker takes of a rank's partition."""
    return IndexedRun(
        source.catalog,
        partition,
        worker=worker_info.worker,
        num_workers=worker_info.num_workers,
        skips=skips,
        prefetch_bytes=source.options.prefetch_bytes,
        hedge=source.options.hedge,
    )
