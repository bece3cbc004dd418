"""The batches of one rank: what a loader's workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from shardstream.errors import SampleError
from shardstream.placement import Reader
from shardstream.read.dataset import ShardDataset, current_reader
from shardstream.read.pipeline import ItemChain, PlannedSamples
from shardstream.read.plan import Order, Plan
from shardstream.read.share import Share, Split
from shardstream.read.stage import Position, State
from shardstream.read.tensors import shared_numbers


class Packet(NamedTuple):
    """What a worker sends to the main process."""

    batch: Any
    empty: bool
    """All samples of the step were bad: it counts, but is not handed out."""
    part: int
    state: State | None
    """Position of the part behind this batch; None where positions are arithmetic."""
    skipped: dict[str, int]


class Batches(IterableDataset[Packet]):
    """Batches of one rank, split over the loader's workers.

    Args:
        dataset: Where samples come from.
        batch_size: Items of a batch; None hands out single items.
        collate_fn: Makes a batch of a list of items.
        split: How an epoch is dealt out.
        order: Of the samples, where positions are arithmetic; None where each worker has a position of its own.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        *,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any],
        split: Split,
        order: Order | None,
    ) -> None:
        self.source_dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.split = split
        self.order = order
        self.placement = dataset.placement
        self._resumed = Position()
        # Epoch, samples consumed, whether to go on from `_resumed`: shared memory, so that persistent workers see it.
        self._control = shared_numbers(0, 0, 0)

    def begin(self, position: Position) -> None:
        """Let the next iteration start here; called in the main process, before the workers are."""
        self._resumed = position
        self._control[0], self._control[1] = position.epoch, position.consumed
        self._control[2] = bool(position.parts)

    def share(self, position: Position) -> Share | None:
        """Return the steps of this rank from a position on; None where they cannot be known."""
        if self.order is None:
            return None
        plan = Plan(self.order, position.epoch)
        return Share(plan, self.split, rank=self.placement.rank, consumed=position.consumed)

    def __iter__(self) -> Iterator[Packet]:
        epoch, consumed, resumed = self._control.tolist()
        reader = current_reader(self.placement)
        share = self.share(Position(epoch=epoch, consumed=consumed))
        if share is not None:
            return self._read_steps(share, reader)
        return self._read_stream(reader, self._resumed if resumed else Position(epoch=epoch))

    def _read_steps(self, share: Share, reader: Reader) -> Iterator[Packet]:
        pipeline = self.source_dataset.pipeline
        assert isinstance(pipeline.source, PlannedSamples)  # noqa: S101  (Pipeline.is_exact)
        context = pipeline.context(reader, share.plan.epoch)
        run = pipeline.source.open_share(share, reader, context.skips)
        chain = ItemChain(pipeline.stages, context)
        try:
            for numbers, samples in run.steps():
                items = chain(samples, numbers.tolist())
                if not items and self.split.world_size > 1:
                    raise SampleError(
                        "all samples of a batch are bad: this rank would fall out of step with the others; mend the data"
                    )
                batch = self.collate_fn(items) if items else None
                yield Packet(batch, not items, reader.worker, None, dict(context.skips.counts))
        finally:
            chain.close()
            run.close()

    def _read_stream(self, reader: Reader, position: Position) -> Iterator[Packet]:
        # torch asks worker 0 first: after a resume it takes the part whose turn it is.
        part = (reader.worker + position.next_part) % reader.num_workers
        pipeline = self.source_dataset.pipeline
        reader = Reader(reader.placement, part, reader.num_workers)
        context = pipeline.context(reader, position.epoch)
        run = pipeline.open(reader, context)
        if part in position.parts:
            run.load_state_dict(position.parts[part])
        size = self.batch_size
        try:
            while items := list(islice(run, size or 1)):
                if size is not None and self.split.drop_last and len(items) < size:
                    return
                batch = items[0] if size is None else self.collate_fn(items)
                yield Packet(batch, False, part, run.state_dict(), dict(context.skips.counts))
        finally:
            run.close()
