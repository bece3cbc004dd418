"""The batches of one rank: what a loader's workers run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing.context import get_spawning_popen
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from shardstream.distributed import Reader
from shardstream.errors import OptionError, SkipBudgetError
from shardstream.loader.collation import collate, shared_numbers
from shardstream.loader.dataset import StreamDataset, current_reader
from shardstream.loader.message_batching import Rounds, bundled, unbundled
from shardstream.loader.replacement_samples import refilled
from shardstream.loader.serialize import Sealed
from shardstream.loader.shared_memory import Parcel, Ring, open_rings
from shardstream.loader.stats import Spent
from shardstream.loader.worker_errors import marked
from shardstream.order.epoch_plan import Order
from shardstream.order.partition import Share, Split
from shardstream.pipeline.bad_sample_report import BadSample, located
from shardstream.pipeline.bad_samples import Skips
from shardstream.pipeline.indexed_run import own_steps
from shardstream.pipeline.indexed_source import PlannedSource, open_share
from shardstream.pipeline.stage import Position, Run, State
from shardstream.process_memory import tune_worker_process

_NOT_FOR_OTHERS = (
    "only its ShardLoader reads this dataset, but another loader was built around it (accelerate's skip_first_batches does so): "
    "iterate the ShardLoader itself; after load_state_dict, or Accelerate's load_state, it goes on where the state was taken. "
    "For a Hugging Face Trainer return shardstream.integrations.hf.TrainerLoader(loader) from get_train_dataloader"
)


class Packet(NamedTuple):
    """What a worker sends to the main process."""

    batch: Any
    empty: bool
    """All samples of the step were bad: it counts, but is not handed out."""
    part: int
    state: State | None
    """Position of the part behind this batch; None where positions are arithmetic."""
    skipped: dict[str, int]
    """Bad samples of this worker so far, by kind of error."""
    taken: dict[str, int]
    """Samples of this worker so far, by part of a mix."""
    refilled: int
    """Samples of this worker so far that stood in for bad ones."""
    bad: tuple[BadSample, ...]
    """Bad samples of this worker since its last packet."""
    spent: Spent
    """What reading has cost this worker so far."""
    error: SkipBudgetError | None = None
    """There were too many of them: there is no batch, and will be none."""


class Batches(IterableDataset[Any]):
    """Batches of one rank, split over the loader's workers.

    Args:
        dataset: Where samples come from.
        batch_size: Items of a batch; None hands out single items.
        collate_fn: Makes a batch of a list of items.
        split: How an epoch is dealt out.
        lanes: Readers of the job: the default number of lanes.
        num_workers: Loader processes.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any],
        split: Split,
        lanes: int,
        num_workers: int,
    ) -> None:
        self.source_dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.split = split
        self.lanes = lanes
        self.placement = dataset.placement
        self._serves_loader = False
        self._position = Position()
        self._is_used = False
        # Epoch and samples consumed, in shared memory, for persistent workers. A position of parts never reaches those:
        # loading a state ends them.
        self._control = shared_numbers(0, 0)
        self.begun = shared_numbers(*[0] * max(1, num_workers))
        """Which batch each worker is at (see `marked`)."""
        self.rings: list[Ring] = []
        """Of each worker, if there are workers and the system can."""
        self.rounds = Rounds()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has workers of its own.
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # else it is on its way to a worker
            state["rings"] = []
        return state

    def begin(self, position: Position) -> None:
        """Let the next iteration start here; called in the main process, before the workers are."""
        self._position = position
        self._control[0], self._control[1] = position.epoch, position.consumed
        self.begun.zero_()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the iterators made inside, and the workers started inside, hand out packets: to the `ShardLoader` alone."""
        self._serves_loader = True
        try:
            yield
        finally:
            self._serves_loader = False

    def open_ways(self, num_workers: int, *, pins: bool) -> None:
        """Make what batches of new workers come by; called before those are started.

        Args:
            num_workers: How many; none needs nothing.
            pins: Whether torch pins their tensors: it finds them in what torch itself has sent, not in rings.
        """
        if num_workers:
            self.rings, self.rounds = [] if pins else open_rings(num_workers), Rounds()

    def receive(self, sent: Iterator[Any], num_workers: int, ahead: int) -> Iterator[Packet]:
        """In the main process: hand out what the workers of now send, each of which is asked for so many messages ahead."""
        rings = self.rings  # another iteration has its own workers, or these

        def unpack(packed: Any) -> Packet:
            if type(packed) is Parcel:
                return Packet(*rings[packed.worker].unpack(packed))
            packet: Packet = packed
            return packet

        return unbundled(sent, num_workers, self.rounds, unpack, ahead=ahead)

    @property
    def planned(self) -> PlannedSource | None:
        """The source, where positions are arithmetic; None where each worker has a position of its own."""
        return None if self.batch_size is None else self.source_dataset.pipeline.planned

    def adopt(self, order: Mapping[str, Any]) -> None:
        """Take numbers of the order from a state; they hold for the epochs after it too."""
        assert self.planned is not None  # noqa: S101  (asked by the callers)
        dataset = copy.copy(self.source_dataset)
        dataset.pipeline = replace(dataset.pipeline, source=self.planned.with_options(**order))
        self.source_dataset = dataset

    def order(self, epoch: int) -> Order:
        """Return the order of samples of an epoch."""
        assert self.planned is not None and self.batch_size is not None  # noqa: S101, PT018  (asked by the callers)
        batch = self.planned.options.microbatch or self.batch_size
        return self.planned.order(batch=batch, lanes=self.lanes, epoch=epoch)

    def share(self, position: Position) -> Share | None:
        """Return the steps of this rank from a position on; None where they cannot be known."""
        if self.planned is None:
            return None
        plan = self.planned.plan(self.order(position.epoch), position.epoch)
        return Share(plan, self.split, rank=self.placement.rank, consumed=position.consumed)

    def __iter__(self) -> Iterator[Any]:
        if not self._serves_loader:
            raise OptionError(_NOT_FOR_OTHERS)
        position = self._begin_here()
        reader = current_reader(self.placement)
        share = self.share(position)
        packets = (
            self._read_stream(reader, position)
            if share is None
            else self._read_steps(share, reader)
        )
        if get_worker_info() is None:
            return packets
        tune_worker_process()
        marks = marked(packets, self.begun, reader.worker)
        return bundled(marks, reader.worker, self.rounds, self._pack_in(reader.worker))

    def _pack_in(self, worker: int) -> Callable[[Packet], tuple[Any, float]]:
        """Return what makes of a packet what is sent, and says how large that is (see `Bundle`)."""
        if not self.rings:
            return lambda packet: (Sealed(packet), math.inf)
        ring = self.rings[worker]
        ring.forget(give_back=self.planned is not None and not self.planned.catalog.is_local)

        def pack(packet: Packet) -> tuple[Any, float]:
            parcel = ring.pack(tuple(packet), worker)
            if parcel.pieces or parcel.rest:
                return Sealed(parcel), math.inf
            return parcel, parcel.nbytes

        return pack

    def _begin_here(self) -> Position:
        """Return where to begin: what this worker was started with, or, if it is used again, what is in shared memory."""
        if get_worker_info() is None or not self._is_used:
            self._is_used = get_worker_info() is not None
            return self._position
        epoch, consumed = self._control.tolist()
        return Position(epoch=epoch, consumed=consumed)

    def _read_steps(self, share: Share, reader: Reader) -> Generator[Packet]:
        assert self.planned is not None  # noqa: S101  (it has a share)
        pipeline, catalog = self.source_dataset.pipeline, self.planned.catalog
        skips, spent = Skips(pipeline.on_error), Spent()

        def packet(batch: Any, *, empty: bool, error: SkipBudgetError | None = None) -> Packet:
            bad = located(skips.drain(), catalog)
            counts, taken = dict(skips.counts), dict(skips.taken)
            return Packet(
                batch,
                empty,
                reader.worker,
                None,
                counts,
                taken,
                skips.refilled,
                bad,
                spent.with_costs(run.costs()),
                error,
            )

        run = open_share(self.planned, share, reader, skips)
        chain = pipeline.chain(share.plan.epoch, skips)
        try:
            begun = perf_counter()
            steps = iter(own_steps(share, reader.worker, reader.num_workers))
            for numbers, samples in run.steps():
                read, step = perf_counter(), next(steps)
                done = chain(samples, numbers)
                items = refilled(catalog, chain, share, step, done, skips)
                ready = perf_counter()
                batch = self._collate(items)
                spent.took(len(items), read - begun, ready - read, perf_counter() - ready)
                made = [packet(batch, empty=not items)]
                # While the next are read, only who has taken the packet holds these: photos are many MB.
                del samples, done, items, batch
                yield made.pop()
                begun = perf_counter()
        except SkipBudgetError as error:
            yield packet(None, empty=True, error=error)
        finally:
            chain.close()
            run.close()

    def _collate(self, items: Sequence[Any]) -> Any:
        if not items:
            return None
        return self.collate_fn(items if self.collate_fn is collate else list(items))

    def _read_stream(self, reader: Reader, position: Position) -> Generator[Packet]:
        # torch asks worker 0 first: after a resume it takes the part whose turn it is.
        part = (reader.worker + position.next_part) % reader.num_workers
        pipeline = self.source_dataset.pipeline
        reader = Reader(reader.placement, part, reader.num_workers)
        context = pipeline.context(reader, position.epoch)
        run = pipeline.open(reader, context)
        if part in position.parts:
            run.load_state_dict(position.parts[part])

        def packet(batch: Any, *, empty: bool, error: SkipBudgetError | None = None) -> Packet:
            counts, taken = dict(context.skips.counts), dict(context.skips.taken)
            bad = tuple(context.skips.drain())
            return Packet(
                batch,
                empty,
                part,
                run.state_dict(),
                counts,
                taken,
                context.skips.refilled,
                bad,
                spent.with_costs({}),
                error,
            )

        last, spent = None, Spent()
        try:
            for batch in self._collated(run, spent):
                last = packet(batch, empty=False)
                yield last
            if context.skips.counts != (
                last.skipped if last else {}
            ):  # bad ones behind the last batch
                yield packet(None, empty=True)
        except SkipBudgetError as error:
            yield packet(None, empty=True, error=error)
        finally:
            run.close()

    def _collated(self, run: Run, spent: Spent) -> Iterator[Any]:
        """Yield the batches of a stream of items, or the items where batches are made by its steps."""
        size, begun = self.batch_size, perf_counter()
        while items := list(islice(run, size or 1)):
            if size is not None and self.split.drop_last and len(items) < size:
                return
            done = perf_counter()
            batch = items[0] if size is None else self._collate(items)
            spent.took(len(items), done - begun, 0.0, perf_counter() - done)
            yield batch
            begun = perf_counter()
