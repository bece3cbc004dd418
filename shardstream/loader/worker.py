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

from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError, SkipBudgetError
from shardstream.loader.collation import collate, shared_numbers
from shardstream.loader.dataset import StreamDataset, current_worker_info
from shardstream.loader.message_batching import MessageSizes, receive_items, send_messages
from shardstream.loader.replacement_samples import replace_bad_samples
from shardstream.loader.serialize import PickledValue
from shardstream.loader.shared_memory import RingBuffer, RingMessage, open_rings
from shardstream.loader.stats import WorkerTimings
from shardstream.loader.worker_errors import track_progress
from shardstream.order import EpochOrder, PartitionConfig, RankPartition
from shardstream.pipeline import (
    BadSample,
    IndexedRun,
    Position,
    Run,
    SkipTracker,
    State,
    with_locations,
    worker_steps,
)
from shardstream.process_memory import tune_worker_process

_NOT_FOR_OTHERS = (
    "only its ShardLoader reads this dataset, but another loader was built around it (accelerate's skip_first_batches does so): "
    "iterate the ShardLoader itself; after load_state_dict, or Accelerate's load_state, it goes on where the state was taken. "
    "For a Hugging Face Trainer return shardstream.integrations.hf.TrainerLoader(loader) from get_train_dataloader"
)


class WorkerBatch(NamedTuple):
    """A batch that a worker sends to the main process, with its counts."""

    batch: Any
    empty: bool
    """All samples of the step were bad: it counts, but is not handed out."""
    part: int
    state: State | None
    """Position of the part behind this batch; None where positions are arithmetic."""
    skipped: dict[str, int]
    """Bad samples of this worker so far, by kind of error."""
    samples_per_dataset: dict[str, int]
    """Samples of this worker so far, by part of a mix."""
    refilled: int
    """Samples of this worker so far that stood in for bad ones."""
    bad: tuple[BadSample, ...]
    """Bad samples of this worker since its last worker batch."""
    timings: WorkerTimings
    """What reading has cost this worker so far."""
    error: SkipBudgetError | None = None
    """There were too many of them: there is no batch, and will be none."""


class BatchDataset(IterableDataset[Any]):
    """Batches of one rank, split over the loader's workers.

    Args:
        dataset: Where samples come from.
        batch_size: Items of a batch; None hands out single items.
        collate_fn: Makes a batch of a list of items.
        partition_config: How an epoch is dealt out.
        lanes: Readers of the job: the default number of lanes.
        num_workers: Loader processes.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any],
        partition_config: PartitionConfig,
        lanes: int,
        num_workers: int,
    ) -> None:
        self.source_dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.partition_config = partition_config
        self.lanes = lanes
        self.placement = dataset.placement
        self._serves_loader = False
        self._position = Position()
        self._is_used = False
        # Epoch and samples consumed, in shared memory, for persistent workers. A position of parts never reaches those:
        # loading a state ends them.
        self._control = shared_numbers(0, 0)
        self.begun = shared_numbers(*[0] * max(1, num_workers))
        """Which batch each worker is at (see `track_progress`)."""
        self.rings: list[RingBuffer] = []
        """Of each worker, if there are workers and the system can."""
        self.message_sizes: MessageSizes
        self.indexed_source = None if batch_size is None else dataset.pipeline.indexed_source
        """The source, where positions are arithmetic; None where each worker has a position of its own."""

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
    def serve_loader(self) -> Iterator[None]:
        """Let the iterators made inside, and the workers started inside, hand out worker batches: to the `ShardLoader` alone."""
        self._serves_loader = True
        try:
            yield
        finally:
            self._serves_loader = False

    def open_channels(self, num_workers: int, *, pins: bool) -> None:
        """Make what batches of new workers come by; called before those are started.

        Args:
            num_workers: How many.
            pins: Whether torch pins their tensors: it finds them in what torch itself has sent, not in rings.
        """
        self.rings = [] if pins else open_rings(num_workers)
        self.message_sizes = MessageSizes()

    def receive_batches(
        self, sent: Iterator[Any], num_workers: int, ahead: int
    ) -> Iterator[WorkerBatch]:
        """In the main process: hand out what the workers of now send, each of which is asked for so many messages ahead."""
        rings = self.rings  # another iteration has its own workers, or these

        def unpack(packed: Any) -> WorkerBatch:
            if type(packed) is RingMessage:
                return WorkerBatch(*rings[packed.worker].unpack(packed))
            worker_batch: WorkerBatch = packed
            return worker_batch

        return receive_items(sent, num_workers, self.message_sizes, unpack, ahead=ahead)

    def set_order_options(self, order: Mapping[str, Any]) -> None:
        """Take numbers of the order from a state; they hold for the epochs after it too."""
        assert self.indexed_source is not None  # noqa: S101  (asked by the callers)
        self.indexed_source = self.indexed_source.with_options(**order)
        dataset = copy.copy(self.source_dataset)
        dataset.pipeline = replace(dataset.pipeline, source=self.indexed_source)
        self.source_dataset = dataset

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of samples of an epoch."""
        assert self.indexed_source is not None and self.batch_size is not None  # noqa: S101, PT018  (asked by the callers)
        batch = self.indexed_source.options.microbatch or self.batch_size
        return self.indexed_source.order(batch=batch, lanes=self.lanes, epoch=epoch)

    def partition(self, position: Position) -> RankPartition | None:
        """Return the steps of this rank from a position on; None where they cannot be known."""
        if self.indexed_source is None:
            return None
        plan = self.indexed_source.plan(self.order(position.epoch), position.epoch)
        return RankPartition(
            plan, self.partition_config, rank=self.placement.rank, consumed=position.consumed
        )

    def __iter__(self) -> Iterator[Any]:
        if not self._serves_loader:
            raise OptionError(_NOT_FOR_OTHERS)
        position = self._start_position()
        worker_info = current_worker_info(self.placement)
        partition = self.partition(position)
        worker_batches = (
            self._read_stream(worker_info, position)
            if partition is None
            else self._read_steps(partition, worker_info)
        )
        if get_worker_info() is None:
            return worker_batches
        tune_worker_process()
        tracked = track_progress(worker_batches, self.begun, worker_info.worker)
        return send_messages(
            tracked,
            worker_info.worker,
            self.message_sizes,
            self._message_packer(worker_info.worker),
        )

    def _message_packer(self, worker: int) -> Callable[[WorkerBatch], tuple[Any, float]]:
        """Return what makes of a worker batch what is sent, and says how large that is (see `WorkerMessage`)."""
        if not self.rings:
            return lambda worker_batch: (PickledValue(worker_batch), math.inf)
        ring = self.rings[worker]
        ring.reset(
            give_back=self.indexed_source is not None and not self.indexed_source.catalog.is_local
        )

        def pack(worker_batch: WorkerBatch) -> tuple[Any, float]:
            message = ring.pack(tuple(worker_batch), worker)
            if message.pieces or message.rest:
                return PickledValue(message), math.inf
            return message, message.nbytes

        return pack

    def _start_position(self) -> Position:
        """Return where to begin: what this worker was started with, or, if it is used again, what is in shared memory."""
        if get_worker_info() is None or not self._is_used:
            self._is_used = get_worker_info() is not None
            return self._position
        epoch, consumed = self._control.tolist()
        return Position(epoch=epoch, consumed=consumed)

    def _read_steps(
        self, partition: RankPartition, worker_info: WorkerInfo
    ) -> Generator[WorkerBatch]:
        assert self.indexed_source is not None  # noqa: S101  (it has a partition)
        pipeline, catalog = self.source_dataset.pipeline, self.indexed_source.catalog
        skips, timings = SkipTracker(pipeline.on_error), WorkerTimings()

        def worker_batch(
            batch: Any, *, empty: bool, error: SkipBudgetError | None = None
        ) -> WorkerBatch:
            bad = with_locations(skips.drain_bad_samples(), catalog) if skips.bad else ()
            counts, samples_per_dataset = dict(skips.counts), dict(skips.samples_per_dataset)
            return WorkerBatch(
                batch,
                empty,
                worker_info.worker,
                None,
                counts,
                samples_per_dataset,
                skips.refilled,
                bad,
                timings.with_read_costs(run.costs()),
                error,
            )

        run = IndexedRun(self.indexed_source, partition, worker_info, skips)
        chain = pipeline.chain(partition.plan.epoch, skips)
        try:
            begun = perf_counter()
            steps = iter(worker_steps(partition, worker_info.worker, worker_info.num_workers))
            for planned, samples in run.steps():
                read, step = perf_counter(), next(steps)
                items, numbers = chain(samples, planned)
                if len(items) < partition.step_size(step):
                    done = items, numbers
                    items = replace_bad_samples(catalog, chain, partition, step, done, skips)
                ready = perf_counter()
                batch = self._collate(items)
                timings.add_batch(len(items), read - begun, ready - read, perf_counter() - ready)
                made = [worker_batch(batch, empty=not items)]
                # While the next are read, only who has taken the worker batch holds these: photos are many MB.
                del samples, items, batch
                yield made.pop()
                begun = perf_counter()
        except SkipBudgetError as error:
            yield worker_batch(None, empty=True, error=error)
        finally:
            chain.close()
            run.close()

    def _collate(self, items: Sequence[Any]) -> Any:
        if not items:
            return None
        return self.collate_fn(items if self.collate_fn is collate else list(items))

    def _read_stream(self, worker_info: WorkerInfo, position: Position) -> Generator[WorkerBatch]:
        # torch asks worker 0 first: after a resume it takes the part whose turn it is.
        part = (worker_info.worker + position.next_part) % worker_info.num_workers
        pipeline = self.source_dataset.pipeline
        worker_info = WorkerInfo(worker_info.placement, part, worker_info.num_workers)
        context = pipeline.context(worker_info, position.epoch)
        run = pipeline.open(worker_info, context)
        if part in position.parts:
            run.load_state_dict(position.parts[part])

        def worker_batch(
            batch: Any, *, empty: bool, error: SkipBudgetError | None = None
        ) -> WorkerBatch:
            counts, samples_per_dataset = (
                dict(context.skips.counts),
                dict(context.skips.samples_per_dataset),
            )
            bad = tuple(context.skips.drain_bad_samples())
            return WorkerBatch(
                batch,
                empty,
                part,
                run.state_dict(),
                counts,
                samples_per_dataset,
                context.skips.refilled,
                bad,
                timings.with_read_costs({}),
                error,
            )

        last, timings = None, WorkerTimings()
        try:
            for batch in self._collated(run, timings):
                last = worker_batch(batch, empty=False)
                yield last
            if context.skips.counts != (
                last.skipped if last else {}
            ):  # bad ones behind the last batch
                yield worker_batch(None, empty=True)
        except SkipBudgetError as error:
            yield worker_batch(None, empty=True, error=error)
        finally:
            run.close()

    def _collated(self, run: Run, timings: WorkerTimings) -> Iterator[Any]:
        """Yield the batches of a stream of items, or the items where batches are made by its steps."""
        size, begun = self.batch_size, perf_counter()
        while items := list(islice(run, size or 1)):
            if size is not None and self.partition_config.drop_last and len(items) < size:
                return
            done = perf_counter()
            batch = items[0] if size is None else self._collate(items)
            timings.add_batch(len(items), done - begun, 0.0, perf_counter() - done)
            yield batch
            begun = perf_counter()
