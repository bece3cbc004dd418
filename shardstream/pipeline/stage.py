"""Protocols of a pipeline: a source reads raw samples, a stage describes a step and is pickled, a run executes it in one process.

Items move through stages that return one item per item, the samples of a batch together or a stream item by item: both call the function that a
stage returns from ``bind``, keep the order, and leave an item that fails to the skip policy.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol, SupportsIndex

import numpy as np

from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError
from shardstream.format import Columns, TupleColumns
from shardstream.order import derive_key
from shardstream.pipeline.bad_samples import BadSample, SkipTracker
from shardstream.storage import Storage

EPOCHS = 1 << 31
"""Epoch numbers are below this limit; a mix uses the higher bits for the passes of its parts."""

State = dict[str, Any]
"""A position: a few plain JSON values, never samples."""
ItemFunction = Callable[[Any, int], Any]
"""``function(item, number)`` returns one item per item; ``number`` is the sample number."""

_DECODE_S = attrgetter("decode_s")

Moved = tuple[Sequence[Any], list[int]]
"""Items and their sample numbers, in order, without bad and refused samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Values that a run may depend on, apart from its items.

    Args:
        seed: Seed of the dataset.
        epoch: Epoch number, from 0.
        global_worker: Number of this loader worker among all workers of the job.
        skips: Skip policy and counts of bad samples, shared by the whole chain.
    """

    seed: int = 0
    epoch: int = 0
    global_worker: int = 0
    skips: SkipTracker = field(default_factory=SkipTracker)

    def generator(self, number: int, purpose: int) -> np.random.Generator:
        """Return the random generator of a sample, the same for every topology and after every resume."""
        return np.random.Generator(
            np.random.PCG64(derive_key(self.seed, self.epoch, purpose, number))
        )


def check_at_least(least: int, **options: int | None) -> None:
    """Check that options are whole numbers of at least ``least``; None passes.

    Raises:
        OptionError: Names the first option that fails.
    """
    for name, value in options.items():
        if value is not None and whole_number(name, value) < least:
            raise OptionError(f"{name} must be at least {least}, not {value}")


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return an option as a plain ``int``, which JSON can hold; NumPy integers are accepted.

    Raises:
        OptionError: If it is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def set_whole_numbers(options: object, least: int, *names: str) -> None:
    """Replace fields of a frozen dataclass by plain ints, which states can hold as JSON; None stays.

    Raises:
        OptionError: If one is not a whole number of at least ``least``.
    """
    for name in names:
        if (value := getattr(options, name)) is not None:
            check_at_least(least, **{name: value})
            object.__setattr__(options, name, whole_number(name, value))


def check_epoch(epoch: SupportsIndex) -> int:
    """Return an epoch as a plain ``int``.

    Raises:
        OptionError: If it is not a whole number from 0 to 2**31 - 1.
    """
    number = whole_number("epoch", epoch)
    if not 0 <= number < EPOCHS:
        raise OptionError(f"epoch must be from 0 to {EPOCHS - 1}, not {number}")
    return number


class Run(Protocol):
    """An executing stage: an iterator with a position."""

    @property
    def number(self) -> int:
        """Sample number of the item returned last, or another number that identifies it."""

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""

    def __next__(self) -> Any:
        """Return the next item."""

    def state_dict(self) -> State:
        """Return the position after the item returned last."""

    def load_state_dict(self, state: State) -> None:
        """Move to a position; nothing is read before the next ``__next__``."""

    def close(self) -> None:
        """Close files and join threads of this run and the runs before it."""


class Stage(Protocol):
    """The description of a step."""

    def open(self, source: Run, context: Context) -> Run:
        """Start the step on the items of the run before it."""


def check_stage(stage: object) -> None:
    """Check that an object is a stage.

    Raises:
        OptionError: If it is not a dataclass instance, or has no ``open``.
    """
    if not is_dataclass(stage) or isinstance(stage, type):
        raise OptionError(
            f"a stage is an instance of a frozen dataclass, not {stage!r}; for a function use map()"
        )
    if not callable(getattr(stage, "open", None)):
        raise OptionError(
            f"{type(stage).__name__} has no open(source, context); write one, or inherit from ItemStage"
        )


class SourceRun:
    """Base of runs that own the run before them and have its number and position."""

    def __init__(self, source: Run) -> None:
        self.source = source

    @property
    def number(self) -> int:
        """Sample number of the item returned last."""
        return self.source.number

    def __iter__(self) -> Iterator[Any]:
        return self  # type: ignore[return-value]  # the classes below have __next__

    def state_dict(self) -> State:
        """Return the position of the run before."""
        return self.source.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Move the run before to a position."""
        self.source.load_state_dict(state)

    def close(self) -> None:
        """Close the run before."""
        self.source.close()


def open_stages(stages: Sequence[Stage], source: Run, context: Context) -> Run:
    """Return a run of the last stage; each stage takes the items of the one before it."""
    run = source
    for stage in stages:
        run = stage.open(run, context)
    return run


class Source(ABC):
    """Raw samples of one or several datasets; a frozen dataclass, picklable.

    A source partitions its samples over loader workers. `IndexedSource` does so by a plan, so that a position is one number; other
    sources give each worker a stream with its own position.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of the order."""

    @property
    @abstractmethod
    def shuffle(self) -> bool:
        """Whether each epoch has a different order."""

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs are known to differ."""
        return self.shuffle

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""

    @property
    @abstractmethod
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""

    @property
    def may_leave_out(self) -> bool:
        """Whether steps of its parts may leave samples out."""
        return False

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return "streams"

    @property
    def lacks_numbers(self) -> str:
        """Why its samples have no numbers, where they have none, and what to do."""
        return "these shards are read without an index, so their samples have no numbers; run 'shardstream index' on their folder"

    def describe(self, *, steps: bool) -> State:  # noqa: ARG002
        """Return the values that must equal those of a state: of a mix under "mix", of weights of samples under "weights".

        Args:
            steps: Include the stages of the parts.
        """
        return {}

    def order_identity(self, worker_info: WorkerInfo, epoch: int) -> State:  # noqa: ARG002
        """Return the numbers of the order that must equal those of a state."""
        return {}

    def with_locations(self, bad: Iterable[BadSample]) -> tuple[BadSample, ...]:
        """Return bad samples with their number in the dataset, and their place, where the source knows them."""
        return tuple(bad)

    @abstractmethod
    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Open the stream of one loader worker."""

    @abstractmethod
    def place(self) -> tuple[Storage, str]:
        """Return the storage of the first shard, and its URL; an empty string if there are no shards."""


class ItemStage:
    """A stage that returns one item per item or refuses it, so that it needs no position.

    Subclasses have `apply`, or `bind` if the function depends on seed or epoch.
    """

    threads: int = 0
    """Threads that process items in parallel, keeping their order; 0 uses the caller's thread."""
    is_decoding = False
    """Whether its time counts as decoding in the statistics."""
    leads_by_column = False
    """Whether it takes columns even if later stages do not: single samples of its result share no memory."""

    def apply(self, item: Any, number: int) -> Any:
        """Return one item for an item; ``number`` is the sample number."""
        raise NotImplementedError

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        if type(self).apply is ItemStage.apply:  # else `on_error` could skip all items
            raise NotImplementedError(f"{type(self).__name__} has neither apply nor bind")
        return self.apply

    def apply_to_columns(self, columns: Columns) -> Columns | TupleColumns | None:  # noqa: ARG002
        """Return what the function of `bind` returns for these samples; None where it must be called for each of them.

        For stages that depend on nothing but the samples. A default batch of the result must equal that of single samples; arrays
        of one shape may be one array, shape (n, ...).
        """
        return None

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        function = self.bind(context)
        if self.threads:
            source = _AheadRun(source, function, self.threads)
            return ItemRun(source, lambda future, _: future.result(), context.skips)
        return ItemRun(source, function, context.skips)


class Step(Protocol):
    """A step that a `Runner` moves items through."""

    @property
    def decode_s(self) -> float:
        """Seconds of decoding, so far."""

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        """Return the items after the step."""

    def close(self) -> None:
        """Join its threads."""


class Runner:
    """Move samples through all steps; a step itself.

    Args:
        steps: Steps, in order.
        skips: Skip policy and counts of bad samples.
    """

    def __init__(self, steps: Sequence[Step], skips: SkipTracker) -> None:
        self._steps, self._skips = steps, skips
        self.decode_s = 0.0
        """Seconds of decoding, so far."""

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        """Return the samples after all steps; an error among ``items`` stands for a damaged sample.

        Raises:
            Exception: The error of a bad sample that the skip policy does not skip.
        """
        if not isinstance(items, Columns) and (list(map(type, items)).count(dict) < len(items)):
            items, numbers = self._undamaged(items, numbers)
        for step in self._steps:
            items, numbers = step(items, numbers)
        self.decode_s = sum(map(_DECODE_S, self._steps))
        return items, numbers

    def close(self) -> None:
        """Join the threads of all steps."""
        for step in self._steps:
            step.close()

    def _undamaged(self, items: Sequence[Any], numbers: list[int]) -> Moved:
        kept: list[Any] = []
        kept_numbers: list[int] = []
        for item, number in zip(items, numbers, strict=True):
            if isinstance(item, Exception):
                self._skips.skip_or_raise(item, number=number)
            else:
                kept.append(item)
                kept_numbers.append(number)
        return kept, kept_numbers


def open_runner(
    stages: Sequence[ItemStage],
    context: Context,
    *,
    first: Step | None = None,
    by_column: bool = False,
) -> Runner:
    """Return a runner of stages.

    Args:
        stages: Stages that return one item per item.
        context: Context that they share.
        first: Step before the stages.
        by_column: Apply the stages to whole columns if all can: for results that only the default `collate` reads. All or none,
            because rows of an array keep all of it in memory.
    """
    for stage in stages:
        by_column &= type(stage).apply_to_columns is not ItemStage.apply_to_columns
    steps: list[Step] = [] if first is None else [first]
    for place, stage in enumerate(stages):
        leads = place == 0 and stage.leads_by_column
        steps.append(_StageStep(stage, context, by_column=by_column or leads))
    return Runner(steps, context.skips)


class _StageStep:
    """An item stage in one epoch and process."""

    def __init__(self, stage: ItemStage, context: Context, *, by_column: bool) -> None:
        self.decode_s = 0.0
        self.apply = stage.bind(context)
        self._is_decoding = stage.is_decoding
        self._by_column = stage.apply_to_columns if by_column else None
        self._skips = context.skips
        self._pool = _open_pool(stage.threads) if stage.threads else None

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        begin = perf_counter()
        columns = None
        if self._by_column is not None and isinstance(items, Columns):
            columns = self._by_column(items)
        moved = self._one_by_one(items, numbers) if columns is None else (columns, numbers)
        if self._is_decoding:
            self.decode_s += perf_counter() - begin
        return moved

    def _one_by_one(self, items: Sequence[Any], numbers: list[int]) -> Moved:
        items, apply, pool, futures = list(items), self.apply, self._pool, None
        if pool is not None and len(items) > 1:
            futures = [
                pool.submit(apply, item, number)
                for item, number in zip(items, numbers, strict=True)
            ]
        kept: list[Any] = []
        kept_numbers: list[int] = []
        for place, (item, number) in enumerate(zip(items, numbers, strict=True)):
            try:
                kept.append(apply(item, number) if futures is None else futures[place].result())
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, item, number)
            else:
                kept_numbers.append(number)
        return kept, kept_numbers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # after an error those of the rest of a batch


class ItemRun(SourceRun):
    """Call a function on each item of a stream.

    Args:
        source: The run before.
        function: Returns one item per item.
        skips: Skip policy and counts of bad samples.
    """

    def __init__(self, source: Run, function: ItemFunction, skips: SkipTracker) -> None:
        super().__init__(source)
        self._function, self._skips = function, skips

    def __next__(self) -> Any:
        while True:
            item = next(self.source)
            try:
                return self._function(item, self.source.number)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                # Without its number: steps before may have changed the numbers of samples.
                self._skips.skip_or_raise(error, item)


class StepRun(SourceRun):
    """Move the samples of a stream through a step, one by one.

    Args:
        source: The run before.
        step: As in `Runner`.
    """

    def __init__(self, source: Run, step: Step) -> None:
        super().__init__(source)
        self._step = step

    def __next__(self) -> Any:
        items: Sequence[Any] = ()
        while not items:  # the step skips bad samples
            item = next(self.source)
            items, _ = self._step([item], [self.source.number])
        return items[0]

    def close(self) -> None:
        """Join the threads of the step, and close the source."""
        self._step.close()
        super().close()


class _AheadRun(SourceRun):
    """Call a function on items ahead of their use, in threads; the items are futures of the results, in order."""

    def __init__(self, source: Run, function: ItemFunction, threads: int) -> None:
        super().__init__(source)
        self._function = function
        self._pool = _open_pool(threads)
        self._ahead = 2 * threads
        self._pending: deque[tuple[Future[Any], int, State]] = deque()
        self._error: Exception | None = None  # of the source; raised after all pending items
        self._state = source.state_dict()
        self._number = 0

    @property
    def number(self) -> int:
        return self._number

    def __next__(self) -> Future[Any]:
        while len(self._pending) < self._ahead and self._error is None:
            try:
                item = next(self.source)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  (raised after the pending items)
                self._error = error
                break
            number = self.source.number
            future = self._pool.submit(self._function, item, number)
            self._pending.append((future, number, self.source.state_dict()))
        if not self._pending:
            failed, self._error = self._error, None
            raise failed or StopIteration
        future, self._number, self._state = self._pending.popleft()
        return future

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state: State) -> None:
        self._pending.clear()
        self._error = None
        self.source.load_state_dict(state)
        self._state = state

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.source.close()


def _open_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shardstream-map")
