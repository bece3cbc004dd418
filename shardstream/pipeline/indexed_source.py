"""Read samples by number in the order of a plan: the source of a dataset, and its run in one loader worker."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from shardstream.catalog import warn_of_numbers
from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError, redact
from shardstream.format import DatasetVersion, Rows, Sample
from shardstream.order import (
    BalancedEpochPlan,
    EpochOrder,
    EpochPlan,
    Ints,
    NodeEpochPlan,
    PartitionConfig,
    RankPartition,
    StepBalance,
    StoredBlocksPlan,
    WeightedDraw,
    WeightedEpochPlan,
    WorkerSteps,
    default_block,
    default_window,
)
from shardstream.pipeline.bad_samples import BadSample, SkipTracker
from shardstream.pipeline.options import (
    Balance,
    OrderOptions,
    ReadOptions,
    SampleWeights,
    Weights,
    are_by_number,
    balance_of,
    draw_of,
    refuse_options,
)
from shardstream.pipeline.sample_steps import KeepFields
from shardstream.pipeline.stage import Context, Run, Source, State, Step, StepRun
from shardstream.samples import Fetcher, FetchOptions, Lengths, Samples, chunk_steps
from shardstream.storage import Storage

_DEFAULT_MICROBATCH = 64
_LOOSE_WINDOW = 64
# Samples planned at a time, which keeps the cost per sample under a microsecond; bytes parsed at a time.
_CHUNK_SAMPLES, LOOK_AHEAD_BYTES = 16384, 64 << 20
# Bytes copied at a time: few, so that the batches of several workers come evenly, but enough samples of each shard.
_MIN_COPIED_BYTES, _MAX_COPIED_BYTES, _SAMPLES_PER_SHARD = 5 << 19, 10 << 20, 20
_CHUNK_STEPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSource(Source):
    """A source that reads samples, or rows of them, in the order of an epoch plan, so that a position is one number.

    Args:
        samples: All samples by number.
        shuffle: Use a different order in each epoch.
        seed: Seed of the order.
        options: Options of the order.
        reading: Options of prefetching.
        balance: Costs of the samples, of ``options.balance``.
        draw: How often each sample is expected in an epoch, if they are drawn by weight; copy c of sample i has the number
            ``i + c * len(samples)``.
        yields_batches: Whether an item is a batch; of a mix, one of each part.
        is_new_each_epoch: Whether items, or those of a part, are made of other samples in each epoch.
        counted_in: The version of the dataset, if values that are given by the numbers of samples may be of another one.
    """

    samples: Samples
    shuffle: bool = False
    seed: int = 0
    options: OrderOptions = field(default_factory=OrderOptions)
    reading: ReadOptions = field(default_factory=ReadOptions)
    balance: StepBalance | None = None
    draw: WeightedDraw | None = None
    yields_batches: bool = False
    is_new_each_epoch: bool = False
    counted_in: DatasetVersion | None = None

    def check_numbers(
        self, given: SampleWeights | Weights | Lengths, what: str, *, stacklevel: int = 5
    ) -> None:
        """Warn of values by the numbers of samples, if these may be numbers of an earlier version."""
        if are_by_number(given):
            warn_of_numbers(what, self.counted_in, stacklevel=stacklevel)

    @property
    def substitutes(self) -> tuple[int, ...]:
        """Numbers of samples that replace those of a rank where none of the epoch is left; by default none."""
        return ()

    @property
    def draws(self) -> bool:
        """Whether samples are drawn by weight, so that an epoch has some several times, others not."""
        return self.draw is not None

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs are known to differ."""
        return self.shuffle or self.draw is not None

    @property
    def nsamples(self) -> int:
        """Number of samples from which default sizes are computed: all, or those of an epoch where they are drawn."""
        return len(self.samples) if self.draw is None else self.draw.num_samples

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""
        return self.samples.fingerprint

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""
        return self.samples.checksums

    @property
    def summary(self) -> str:
        """Size of the dataset, and of an epoch if samples are drawn, for ``repr``."""
        if self.draw is None:
            return self.samples.summary
        how = "" if self.draw.replacement else ", each at most once"
        return f"{self.samples.summary}, {self.draw.num_samples} drawn by weight{how}"

    def order(self, *, batch: int, lanes: int, epoch: int) -> EpochOrder:  # noqa: ARG002  (the same every epoch)
        """Return the order of an epoch for a microbatch; ``options.lanes`` takes precedence over ``lanes``."""
        options, nsamples = self.options, self.nsamples
        total_bytes = self.samples.total_bytes * nsamples // max(1, len(self.samples))
        if self.samples.can_coalesce:
            least = self.samples.least_block
            window = max(default_window(nsamples, total_bytes, batch), -(-least // batch) * batch)
            window = options.window or window
            block = least if least > 1 else default_block(nsamples, total_bytes)
            block = options.block or block
        else:  # reading neighbours saves nothing: shuffle single samples; windows only group the requests
            window = options.window or max(1, _LOOSE_WINDOW // batch) * batch
            block = options.block or 1
        return EpochOrder(
            nsamples=nsamples,
            batch=batch,
            shuffle=self.shuffle,
            seed=self.seed,
            lanes=options.lanes or math.lcm(lanes, options.nodes),
            nodes=options.nodes,
            exchange=options.exchange,
            # Without shuffle all readers share a window: it only sets how much is fetched together.
            window=window if self.shuffle else window * lanes,
            block=block,
        )

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""
        if self.draw is not None:
            plan: EpochPlan = WeightedEpochPlan(order, epoch, self.draw)
        elif order.nodes > 1:
            plan = NodeEpochPlan(order, epoch)
        elif self.samples.blocks is not None and order.block == self.samples.least_block:
            plan = StoredBlocksPlan(order, epoch, firsts=self.samples.blocks)
        else:
            plan = EpochPlan(order, epoch)
        return plan if self.balance is None else BalancedEpochPlan(plan, self.balance)

    def with_options(self, **changes: Any) -> Self:
        """Return the same source with other options of the order."""
        return replace(self, options=replace(self.options, **changes))

    def restrict_to(self, numbers: Ints) -> Self:
        """Return a source with the same orders that may have some samples only, and is smaller when it is pickled."""
        return replace(self, samples=self.samples.restrict_to(numbers))

    def describe(self, *, steps: bool) -> State:  # noqa: ARG002
        """Return what must equal that of a state, where there are such: nodes that keep their blocks, costs of samples and weights."""
        options, found = self.options, dict[str, Any]()
        if options.nodes > 1:
            found |= {"nodes": options.nodes, "exchange": options.exchange}
        if self.balance is not None:
            found |= {"balance": self.balance.describe()}
        if self.draw is not None:
            found |= {"weights": self.draw.describe()}
        return found

    def fetch_options(self, num_workers: int = 1) -> FetchOptions:
        """Return the options with which a fetcher of the samples is opened."""
        return FetchOptions(
            prefetch_bytes=self.reading.prefetch_bytes,
            hedge=self.reading.hedge,
            num_workers=num_workers,
            # A reader may have few samples of many if they are drawn, or dealt to batches by cost.
            is_sparse=self.draw is not None or self.balance is not None,
        )

    def number_of(self, number: int) -> int | None:
        """Return the number of a sample in the dataset, by the number with which a step got it; None if that is ambiguous."""
        return number % len(self.samples)

    def with_locations(self, bad: Iterable[BadSample]) -> tuple[BadSample, ...]:
        """Return bad samples with their number in the dataset, and the shard and offset that it says."""
        done: list[BadSample] = []
        for one in bad:
            number = None if one.number is None else self.number_of(one.number)
            found = replace(one, number=number)
            if number is not None and one.offset is None:
                url, offset = self.samples.place_of(number)
                found = replace(found, shard=redact(url), offset=offset)
            done.append(found)
        return tuple(done)

    def open_steps(self, epoch: int, skips: SkipTracker) -> Step | None:  # noqa: ARG002
        """Return the steps that samples pass before the pipeline's own stages, as one; None if there are none."""
        return None

    def order_identity(self, worker_info: WorkerInfo, epoch: int) -> State:
        """Return the numbers of the order that must equal those of a state."""
        partition = default_partition(self, worker_info, epoch)
        order = partition.plan.order
        identity: State = {"microbatch": order.batch, "lanes": order.lanes, "block": order.block}
        identity |= {"remainder": partition.config.remainder}
        return identity | ({"window": order.window} if order.shuffle else {})

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Open the part of one loader worker, item by item, of a dataset that is iterated without a `ShardLoader`."""
        partition = default_partition(self, worker_info, context.epoch)
        run = IndexedRun(self, partition, worker_info, context.skips)
        steps = self.open_steps(context.epoch, context.skips)
        return run if steps is None else StepRun(run, steps)

    def place(self) -> tuple[Storage, str]:
        """Return the storage of the first shard, and its URL."""
        return self.samples.storage, self.samples.url_of(0) if self.samples.num_shards else ""


def numbered_source(source: Source) -> IndexedSource:
    """Return a source whose samples have numbers.

    Raises:
        OptionError: If its shards are read without an index, or are followed.
    """
    if not isinstance(source, IndexedSource):
        raise OptionError(source.lacks_numbers, shard=source.place()[1])
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSource(IndexedSource):
    """The samples of one dataset, as they are stored."""

    def drawn(self, weights: SampleWeights | Weights | None) -> SamplesSource:
        """Return the source, with samples drawn by weight if there are weights, and with costs if its order has ``balance=``.

        Args:
            weights: One for each sample, or the path or URL of a ``.npy`` file of them; or by class.

        Raises:
            OptionError: If the options of the order or the weights are not possible.
            StorageError: If the file of the weights cannot be read.
        """
        source, options = self, self.options
        if weights is not None:
            reason = "with weights=, which draw other samples in each epoch"
            refuse_options(options, ["nodes", "exchange"], reason)
            self.check_numbers(weights, "weights=")
            source = replace(source, draw=draw_of(source.samples, weights))
        source.order(batch=options.microbatch or 1, lanes=1, epoch=0)  # validates
        if isinstance(options.balance, Balance):  # else None
            self.check_numbers(options.balance.costs, "balance=")
            balance = balance_of(options.balance, source.samples, shuffle=source.shuffle)
            source = replace(source, balance=balance)
        return source


def partition_config(
    source: IndexedSource, *, ranks: int, batch_size: int, drop_last: bool
) -> PartitionConfig:
    """Return how the batches of a source are distributed over ranks.

    Raises:
        OptionError: If the microbatch of the source does not divide the batch.
    """
    microbatch = source.options.microbatch or batch_size
    if batch_size % microbatch:
        raise OptionError(f"batch_size={batch_size} must be a multiple of microbatch={microbatch}")
    return PartitionConfig(
        world_size=ranks,
        microbatches=batch_size // microbatch,
        remainder=source.options.remainder,
        drop_last=drop_last,
        whole_lanes=source.samples.has_costly_windows,
    )


def default_microbatch(nsamples: int, readers: int) -> int:
    """Return the microbatch of a dataset that is iterated without a `ShardLoader`: 64, or less where readers would get none.

    >>> default_microbatch(100_000, 8), default_microbatch(25, 2)
    (64, 1)
    """
    return max(1, min(_DEFAULT_MICROBATCH, nsamples // (8 * readers)))


def default_partition(source: IndexedSource, worker_info: WorkerInfo, epoch: int) -> RankPartition:
    """Return the steps of a rank of a dataset that is iterated without a `ShardLoader`."""
    batch = source.options.microbatch or default_microbatch(
        source.nsamples, worker_info.num_global_workers
    )
    if source.options.microbatch is None and source.options.window is not None:
        batch = math.gcd(batch, source.options.window)
    order = source.order(batch=batch, lanes=worker_info.num_global_workers, epoch=epoch)
    config = PartitionConfig(
        world_size=worker_info.placement.world_size, remainder=source.options.remainder
    )
    return RankPartition(source.plan(order, epoch), config, rank=worker_info.placement.rank)


def plan_steps(partition: RankPartition, steps: WorkerSteps) -> Iterator[list[Ints]]:
    """Yield the sample numbers of the steps, one array per step, in lists that start small so that reading starts early."""
    width = partition.config.microbatches * partition.plan.order.batch * partition.plan.spread
    start, size = 0, 4
    while start < len(steps):
        yield partition.samples(steps[start : start + size])
        start, size = start + size, min(4 * size, max(1, _CHUNK_SAMPLES // width))


def group_by_window(partition: RankPartition, steps: WorkerSteps) -> Iterator[Ints]:
    """Yield the sample numbers of these steps grouped by window, in order of first use, so that each group is fetched together."""
    plan, lanes = partition.plan, partition.plan.order.lanes
    last_windows: dict[int, int] = {}  # lane -> its last window
    for start in range(0, steps.num_full, _CHUNK_STEPS):
        full = steps[start : min(steps.num_full, start + _CHUNK_STEPS)]
        windows = plan.windows(partition.batches(full).ravel())
        for window in windows[np.sort(np.unique(windows, return_index=True)[1])].tolist():
            lane = window % lanes if plan.order.shuffle else 0
            if window <= last_windows.get(lane, -1):
                continue
            last_windows[lane] = window
            own_steps = partition.steps_of_window(window)
            own_steps = own_steps[steps.contain(own_steps)]  # other steps are in the tail
            batches = partition.batches(own_steps).ravel()
            yield plan.batches(batches[plan.windows(batches) == window]).ravel()
    if steps.num_full < len(steps):
        yield partition.tail()


class IndexedRun:
    """Raw samples of one reader, in the order of the plan.

    Args:
        source: The dataset.
        partition: Steps of the rank.
        worker_info: The worker that reads.
        skips: Skip policy for damaged samples.
        keeps: First stage of the pipeline, if it keeps some fields: the bytes of others are not read where that is cheap.
    """

    def __init__(
        self,
        source: IndexedSource,
        partition: RankPartition,
        worker_info: WorkerInfo,
        skips: SkipTracker,
        keeps: KeepFields | None = None,
    ) -> None:
        self.number = -1
        self._source, self._partition = source, partition
        self._worker_info = worker_info
        self._skips, self._keeps = skips, keeps
        self._taken = 0
        self._fetcher: Fetcher | None = None
        self._samples: Generator[tuple[int, Sample], None, None] | None = None

    def __iter__(self) -> IndexedRun:
        return self

    def __next__(self) -> Sample:
        if self._samples is None:
            self._samples = self._read_samples()
        self.number, sample = next(self._samples)
        return sample

    def read_stats(self) -> dict[str, float]:
        """Return the reading statistics so far, as `Fetcher.stats`."""
        return {} if self._fetcher is None else self._fetcher.stats()

    def state_dict(self) -> State:
        """Return the number of samples that this reader has consumed."""
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Move to the position after the first ``taken`` samples of this reader."""
        self.close()
        self._taken = state["taken"]

    def close(self) -> None:
        """Close files and threads."""
        if self._samples is not None:
            self._samples.close()
        self._samples = None
        if self._fetcher is not None:
            self._fetcher.close()
        self._fetcher = None

    def steps(self) -> Generator[tuple[list[int], Rows], None, None]:
        """Yield the numbers and samples of each step from the position on; an error stands for a damaged sample."""
        width = self._partition.config.microbatches * self._partition.plan.order.batch
        first, samples_to_skip = divmod(self._taken, width)
        worker_info = self._worker_info
        steps = WorkerSteps(self._partition, worker_info.worker, worker_info.num_workers, first)
        upcoming = group_by_window(self._partition, steps)
        if samples_to_skip:  # do not fetch samples that a resume skips in its first step
            skipped_numbers = next(plan_steps(self._partition, steps))[0][:samples_to_skip]
            upcoming = (
                kept
                for numbers in upcoming
                if len(kept := numbers[~np.isin(numbers, skipped_numbers)])
            )
        samples = self._source.samples
        mean_bytes = samples.mean_bytes
        self._fetcher = samples.open_fetcher(
            upcoming, self._source.fetch_options(worker_info.num_workers)
        )
        with closing(self._fetcher) as fetcher:
            few, many = int(_MIN_COPIED_BYTES / mean_bytes), int(_MAX_COPIED_BYTES / mean_bytes)
            max_copied = min(many, max(few, _SAMPLES_PER_SHARD * samples.num_shards))
            choice = None if self._keeps is None else self._keeps.chosen
            max_samples = 1  # read the first few steps one by one, so that the first batch waits for its own samples only
            for chunk in plan_steps(self._partition, steps):
                chunk[0], samples_to_skip = chunk[0][samples_to_skip:], 0
                for some in chunk_steps(chunk, max_samples):
                    found = fetcher.read(some, max_copied, choice)
                    for numbers in some:  # zip() would hold a step's samples during the next read
                        samples_of_step = next(found)
                        self._taken += len(numbers)
                        yield numbers.tolist(), samples_of_step
                        del samples_of_step  # batches of photos are many MB
                max_samples = int(LOOK_AHEAD_BYTES / mean_bytes)
        samples.check_manifests()

    def _read_samples(self) -> Generator[tuple[int, Sample], None, None]:
        for numbers, found in self.steps():
            first = self._taken - len(numbers)
            for taken, (number, sample) in enumerate(zip(numbers, found, strict=True), start=1):
                self._taken = first + taken
                if isinstance(sample, Exception):
                    self._skips.skip_or_raise(sample, number=self._source.number_of(number))
                else:
                    yield number, sample
