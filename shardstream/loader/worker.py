"""Make the batches of one rank in a loader's workers."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch

from shardstream.distributed import WorkerInfo, is_one_of_several
from shardstream.errors import OptionError, SkipBudgetError, StateError, without_addresses
from shardstream.loader.collation import collate
from shardstream.loader.dataset import SplitDataset, StreamDataset, current_worker_info
from shardstream.loader.replacement_samples import replace_bad_samples
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
from shardstream.process_memory import forked_workers_keep_objects

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


def change_batch(change: Callable[[Any], Any], worker_batch: WorkerBatch) -> WorkerBatch:
    """Return a worker batch whose batch is changed by a function."""
    return worker_batch._replace(batch=change(worker_batch.batch))


def as_is(worker_batch: Any) -> Any:
    """Return a worker batch unchanged: the collate function that torch gets, because workers make whole batches."""
    return worker_batch


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
        self.indexed_source = None if batch_size is None else dataset.pipeline.indexed_source
        """The source if positions are arithmetic; None if each worker has its own position."""

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch, for readers of ``loader.dataset``."""
        return len(self.source_dataset)

    @property
    def is_remote(self) -> bool:
        """Whether positions are arithmetic and the samples are not on local disks."""
        return self.indexed_source is not None and not self.indexed_source.samples.is_local

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
        raise OptionError(_NOT_FOR_OTHERS)

    def read(self, position: LoaderPosition) -> Generator[WorkerBatch]:
        """Return the batches of this process from a position on: of one worker, or of the whole rank outside of workers.

        Args:
            position: The position.
        """
        worker_info = current_worker_info(self, self.placement)
        partition = self.partition(position)
        if partition is None:
            return self._read_stream(worker_info, position)
        return self._read_steps(partition, worker_info)

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

        run = IndexedRun(source, partition, worker_info, skips, pipeline.kept_fields)
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

    def _collate(self, items: Sequence[Any]) -> Any:
        if not items:
            return None
        return self.collate_fn(items if self.collate_fn is collate else list(items))

    def _read_stream(
        self, worker_info: WorkerInfo, position: LoaderPosition
    ) -> Generator[WorkerBatch]:
        # Worker 0 is read first, so after a resume parts are rotated: worker 0 takes part `next_part`.
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
    # Forked workers inherit a default device. Only if it is another one: in this context each function of torch calls Python, and
    # `is_contiguous` takes 6 us, not 0.1.
    is_cpu = torch.empty(0).device.type == "cpu"
    try:
        with forked_workers_keep_objects(), nullcontext() if is_cpu else torch.device("cpu"):
            yield
    except Exception as error:
        # A PicklingError, or an AttributeError or TypeError of a local function.
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            error.add_note(
                "each worker needs three open files in the main process: raise the limit (ulimit -n), or use fewer workers"
            )
        if isinstance(error, OSError) or "pickle" not in str(error):
            raise
        raise OptionError(
            f"the dataset cannot be sent to a worker that is spawned ({without_addresses(str(error))}); "
            "its functions must be importable: at the top level of a module, not lambdas or local functions"
        ) from error
