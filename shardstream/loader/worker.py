"""Make the batches of one rank in a loader's workers."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing.context import get_spawning_popen
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from shardstream.distributed import WorkerInfo, is_one_of_several
from shardstream.errors import OptionError, SkipBudgetError, StateError, without_addresses
from shardstream.fetch import SharedBlocks
from shardstream.loader.collation import SharedNumbers, collate
from shardstream.loader.dataset import SplitDataset, StreamDataset, current_worker_info
from shardstream.loader.message_batching import MessageSizes, receive_items, send_messages
from shardstream.loader.replacement_samples import replace_bad_samples
from shardstream.loader.serialize import NewTensor, PickledValue, new_tensor
from shardstream.loader.shared_memory import RingBuffer, RingMessage, open_rings
from shardstream.loader.worker_errors import track_progress
from shardstream.loader.worker_timings import WorkerTimings
from shardstream.order import EpochOrder, PartitionConfig, RankPartition, WorkerSteps
from shardstream.pipeline import (
    BadSample,
    IndexedRun,
    LoaderPosition,
    Run,
    SkipTracker,
    State,
)
from shardstream.process_memory import forked_workers_keep_objects, tune_worker_process

_NOT_FOR_OTHERS = (
    "only its ShardLoader can read this dataset, but another loader was built around it (accelerate's skip_first_batches does so); "
    "iterate the ShardLoader itself: after load_state_dict, or Accelerate's load_state, it continues from the saved state. "
    "For a Hugging Face Trainer return shardstream.integrations.hf.TrainerLoader(loader) from get_train_dataloader"
)


class WorkerBatch(NamedTuple):
    """A batch that a worker sends to the main process, with its counts."""

    batch: Any
    empty: bool
    """All samples of the step were bad: the batch counts, but is not yielded."""
    part: int
    state: State | None
    """Position of the part after this batch; None if positions are arithmetic."""
    skipped: dict[str, int]
    """Bad samples of this worker so far, by kind of error."""
    samples_per_dataset: dict[str, int]
    """Samples of this worker so far, by part of a mix."""
    refilled: int
    """Samples of this worker so far that replaced bad ones."""
    bad: tuple[BadSample, ...]
    """Bad samples of this worker since its last worker batch."""
    timings: WorkerTimings
    """Timings of this worker so far."""
    error: SkipBudgetError | None = None
    """Set if the skip budget is exceeded: there is no batch, and the worker ends."""


def _insert_gaps(
    worker_batches: Generator[WorkerBatch], steps: WorkerSteps | None
) -> Generator[WorkerBatch | None]:
    """Yield None, too, at each turn of the worker that has no step, so that all workers send equally many.

    Args:
        worker_batches: The worker's batches.
        steps: Its steps, if they are known in advance.
    """
    place = 0
    with closing(worker_batches):
        for worker_batch in worker_batches:
            yield worker_batch
            del worker_batch  # many MB, not to be kept while the next is made
            if steps is not None and steps.has_gap_after(place):
                yield None
            place += 1


def change_batch(change: Callable[[Any], Any], worker_batch: WorkerBatch) -> WorkerBatch:
    """Return a worker batch whose batch is changed by a function."""
    return worker_batch._replace(batch=change(worker_batch.batch))


def as_is(worker_batch: Any) -> Any:
    """Return a worker batch unchanged: the collate function that torch gets, because workers make whole batches."""
    return worker_batch


class _Receiver:
    """One iteration of the main process over the messages of the workers."""

    def __init__(self, sent: Iterator[Any]) -> None:
        self.sent = weakref.ref(sent)  # without it the workers would outlive their iteration
        self.is_current = True


class BatchDataset(SplitDataset):
    """Batches of one rank, split over the loader's workers.

    Args:
        dataset: Source of the samples.
        batch_size: Items of a batch; None yields single items.
        collate_fn: Makes a batch of a list of items.
        partition_config: Partition of an epoch over ranks.
        num_workers: Worker processes.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any],
        partition_config: PartitionConfig,
        num_workers: int,
    ) -> None:
        self.source_dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.partition_config = partition_config
        self._readers = max(1, num_workers)
        self.placement = dataset.placement
        self._serves_loader = False
        self._position = LoaderPosition()
        self._is_used = False
        # Epoch and samples consumed, in shared memory for persistent workers. Positions of parts need no place here:
        # loading a state ends persistent workers.
        self._control = SharedNumbers(0, 0)
        self.current_batches = SharedNumbers(*[0] * max(1, num_workers))
        """Current batch of each worker (see `track_progress`)."""
        self.rings: list[RingBuffer] = []
        """Ring buffer of each worker; empty without workers or system support."""
        self._receiver: _Receiver | None = None
        self.message_sizes: MessageSizes
        self.indexed_source = None if batch_size is None else dataset.pipeline.indexed_source
        """The source if positions are arithmetic; None if each worker has its own position."""

    def __getstate__(self) -> dict[str, Any]:
        # Rings go only to a spawned worker; any other copy starts workers of its own.
        state = self.__dict__.copy()
        if get_spawning_popen() is None:
            state["rings"] = []
        return state | {"_receiver": None}

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch, for readers of ``loader.dataset``."""
        return len(self.source_dataset)

    @property
    def _is_in_worker(self) -> bool:
        """Whether this process is a worker of the loader, and not of another one, in which the loader was made."""
        worker = get_worker_info()
        return worker is not None and worker.dataset is self

    @property
    def lanes(self) -> int:
        """Number of readers of the job: the default number of lanes."""
        return self.partition_config.batches_per_step * self._readers

    def follow_ranks(self, position: LoaderPosition) -> bool:
        """Adopt the ranks of ``torch.distributed`` if it was initialised after the loader was made; return whether it was.

        Lightning's launcher does so: else each rank would read all samples.

        Raises:
            StateError: If the position is that of a state with parts of workers, which other ranks cannot continue.
        """
        dataset = self.source_dataset
        if dataset.has_given_placement or self.placement.world_size > 1:
            return False
        if not is_one_of_several() or dataset.placement == self.placement:
            return False
        if position.parts:
            raise StateError(
                "the steps of this pipeline change counts, and its state was loaded before torch.distributed was initialised, so "
                "each rank would skip what one rank has read; load the state after init_process_group"
            )
        self.placement = dataset.placement
        if self.indexed_source is not None:
            self.partition_config = replace(
                self.partition_config, world_size=self.placement.world_size
            )
        return True

    def begin(self, position: LoaderPosition) -> None:
        """Set the start of the next iteration; called in the main process before workers start."""
        self._position = position
        self._control.values[:] = position.epoch, position.consumed
        self.current_batches.values[:] = 0

    @contextmanager
    def serve_loader(self) -> Iterator[None]:
        """Allow iteration by the `ShardLoader` inside this context, also in workers started there."""
        self._serves_loader = True
        try:
            yield
        finally:
            self._serves_loader = False

    def open_channels(self, num_workers: int) -> None:
        """Open the rings and message sizes of new workers, before they start."""
        self.rings = open_rings(num_workers)
        self.message_sizes = MessageSizes()

    def receive_batches(
        self,
        sent: Iterator[Any],
        num_workers: int,
        prefetch_factor: int,
        *,
        allocate: NewTensor = new_tensor,
    ) -> Iterator[WorkerBatch]:
        """In the main process: yield the worker batches of the current workers.

        Args:
            sent: torch's iterator, of the messages of the workers in turn.
            num_workers: Number of workers.
            prefetch_factor: Messages that are requested from each worker before the first is received.
            allocate: As in `RingBuffer.unpack`.
        """
        rings = self.rings  # bound now: the next iteration may replace self.rings

        def unpack(packed: Any) -> WorkerBatch | None:
            if type(packed) is RingMessage:
                return WorkerBatch(*rings[packed.worker].unpack(packed, allocate))
            worker_batch: WorkerBatch | None = packed
            return worker_batch

        # Persistent workers serve the last iteration only: its messages come from the same iterator, and rings are used again.
        if self._receiver is not None and self._receiver.sent() is sent:
            self._receiver.is_current = False
        self._receiver = receiver = _Receiver(sent)
        items = receive_items(
            sent,
            num_workers,
            self.message_sizes,
            unpack,
            prefetch_factor=prefetch_factor,
            is_current=lambda: receiver.is_current,
        )
        return filter(None, items)  # without the gaps

    def set_order_options(self, order: Mapping[str, Any]) -> None:
        """Set order options from a state; they hold for later epochs too."""
        assert self.indexed_source is not None  # noqa: S101  (asked by the callers)
        self.indexed_source = self.indexed_source.with_options(**order)
        dataset = copy.copy(self.source_dataset)
        dataset.pipeline = replace(dataset.pipeline, source=self.indexed_source)
        dataset.follow_epoch(self.source_dataset)
        self.source_dataset = dataset

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of samples of an epoch."""
        assert self.indexed_source is not None and self.batch_size is not None  # noqa: S101, PT018  (asked by the callers)
        batch = self.indexed_source.options.microbatch or self.batch_size
        return self.indexed_source.order(batch=batch, lanes=self.lanes, epoch=epoch)

    def partition(
        self, position: LoaderPosition, opened: RankPartition | None = None
    ) -> RankPartition | None:
        """Return the steps of this rank from a position on; None if they are not known in advance.

        Args:
            position: The position.
            opened: The partition of the current iteration, whose plan is used if it is of the same epoch: that of a weighted mix of
                40,000 samples takes 25 ms.
        """
        if self.indexed_source is None:
            return None
        if opened is not None and opened.plan.epoch == position.epoch:
            plan = opened.plan
        else:
            plan = self.indexed_source.plan(self.order(position.epoch), position.epoch)
        return RankPartition(
            plan, self.partition_config, rank=self.placement.rank, consumed=position.consumed
        )

    def __iter__(self) -> Iterator[Any]:
        if not self._serves_loader:
            raise OptionError(_NOT_FOR_OTHERS)
        position = self._start_position()
        worker_info = current_worker_info(self, self.placement)
        partition = self.partition(position)
        worker_batches = (
            self._read_stream(worker_info, position)
            if partition is None
            else self._read_steps(partition, worker_info)
        )
        if not self._is_in_worker:
            return worker_batches
        tune_worker_process()
        tracked = track_progress(worker_batches, self.current_batches.values, worker_info.worker)
        steps = None
        if partition is not None:
            steps = WorkerSteps(partition, worker_info.worker, worker_info.num_workers)
        return send_messages(
            _insert_gaps(tracked, steps),
            worker_info.worker,
            self.message_sizes,
            self._message_packer(worker_info.worker),
        )

    def _message_packer(self, worker: int) -> Callable[[WorkerBatch | None], tuple[Any, float]]:
        """Return a function that packs a worker batch, with its bytes as in `WorkerMessage`."""
        if not self.rings:
            return lambda worker_batch: (PickledValue(worker_batch), math.inf)
        ring = self.rings[worker]
        ring.reset(
            give_back=self.indexed_source is not None and not self.indexed_source.catalog.is_local
        )

        def pack(worker_batch: WorkerBatch | None) -> tuple[Any, float]:
            if worker_batch is None:
                return None, 0
            message = ring.pack(tuple(worker_batch), worker)
            if message.pieces or message.rest:
                return PickledValue(message), math.inf
            return message, message.nbytes

        return pack

    def _start_position(self) -> LoaderPosition:
        """Return the start position; a reused persistent worker reads it from shared memory."""
        if not self._is_in_worker or not self._is_used:
            self._is_used = self._is_in_worker
            return self._position
        epoch, consumed = self._control.values.tolist()
        return LoaderPosition(epoch=epoch, consumed=consumed)

    def _read_steps(
        self, partition: RankPartition, worker_info: WorkerInfo
    ) -> Generator[WorkerBatch]:
        source, pipeline = self.indexed_source, self.source_dataset.pipeline
        assert source is not None  # noqa: S101  (it has a partition)
        skips, timings = SkipTracker(pipeline.on_error), WorkerTimings()

        def worker_batch(
            batch: Any, *, empty: bool, error: SkipBudgetError | None = None
        ) -> WorkerBatch:
            bad = source.with_locations(skips.drain_bad_samples()) if skips.drained else ()
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
                timings.with_read_stats(run.read_stats()),
                error,
            )

        run = IndexedRun(
            source,
            partition,
            worker_info,
            skips,
            pipeline.kept_fields,
            self._shared_blocks(worker_info.worker),
        )
        runner = pipeline.open_runner(
            partition.plan.epoch, skips, by_column=self.collate_fn is collate
        )
        try:
            started = perf_counter()
            steps = iter(WorkerSteps(partition, worker_info.worker, worker_info.num_workers))
            for step_numbers, samples in run.steps():
                read, step = perf_counter(), next(steps)
                items, numbers = runner(samples, step_numbers)
                if len(items) < partition.step_size(step):
                    done = items, numbers
                    items = replace_bad_samples(source, runner, partition, step, done, skips)
                ready = perf_counter()
                batch = self._collate(items)
                timings.add_batch(len(items), read - started, ready - read, perf_counter() - ready)
                timings.decode_s = runner.decode_s
                made = [worker_batch(batch, empty=not items)]
                # Freed here, so that this frame does not keep many MB of photos alive while the next are read.
                del samples, items, batch
                yield made.pop()
                started = perf_counter()
        except SkipBudgetError as error:
            yield worker_batch(None, empty=True, error=error)
        finally:
            runner.close()
            run.close()

    def _shared_blocks(self, worker: int) -> SharedBlocks | None:
        """Return the shared memory of a worker for raw samples; None where a step or function reads their bytes."""
        is_raw = self.source_dataset.pipeline.is_raw and self.collate_fn is collate
        return self.rings[worker].blocks if is_raw and self.rings and self._is_in_worker else None

    def _collate(self, items: Sequence[Any]) -> Any:
        if not items:
            return None
        return self.collate_fn(items if self.collate_fn is collate else list(items))

    def _read_stream(
        self, worker_info: WorkerInfo, position: LoaderPosition
    ) -> Generator[WorkerBatch]:
        # torch reads worker 0 first, so after a resume parts are rotated: worker 0 takes part `next_part`.
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
                timings.with_read_stats({}),
                error,
            )

        last, timings = None, WorkerTimings()
        try:
            for batch in self._collate_stream(run, timings):
                last = worker_batch(batch, empty=False)
                yield last
            if context.skips.counts != (
                last.skipped if last else {}
            ):  # bad samples after the last batch
                yield worker_batch(None, empty=True)
        except SkipBudgetError as error:
            yield worker_batch(None, empty=True, error=error)
        finally:
            run.close()

    def _collate_stream(self, run: Run, timings: WorkerTimings) -> Iterator[Any]:
        """Yield batches of a stream of items; with ``batch_size=None`` the items themselves."""
        size, started = self.batch_size, perf_counter()
        while items := list(islice(run, size or 1)):
            if size is not None and self.partition_config.drop_last and len(items) < size:
                return
            done = perf_counter()
            batch = items[0] if size is None else self._collate(items)
            timings.add_mixed_batch(len(items), done - started, perf_counter() - done)
            yield batch
            started = perf_counter()


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start workers whose inherited objects are not collected; explain what cannot be sent to spawned ones.

    Raises:
        OptionError: If a function of the dataset, or something else in it, cannot be pickled.
    """
    try:
        with forked_workers_keep_objects(), torch.device("cpu"):  # torch draws a seed there
            yield
    except Exception as error:
        # A PicklingError, or an AttributeError or TypeError of a local function.
        if isinstance(error, OSError) or "pickle" not in str(error):
            raise
        raise OptionError(
            f"the dataset cannot be sent to a worker that is spawned ({without_addresses(str(error))}); "
            "its functions must be importable: at the top level of a module, not lambdas or local functions"
        ) from error
