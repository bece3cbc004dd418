"""Protocols of a pipeline: a stage describes a step and is pickled, a run executes it in one process."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from shardstream.errors import OptionError
from shardstream.format import Columns, TupleColumns
from shardstream.order import derive_key
from shardstream.pipeline.bad_samples import SkipTracker

EPOCHS = 1 << 31
"""Epoch numbers are below this limit; a mix uses the higher bits for the passes of its parts."""

State = dict[str, Any]
"""A position: a few plain JSON values, never samples."""

ItemFunction = Callable[[Any, int], Any]
"""``function(item, number)`` returns one item per item; ``number`` is the sample number."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """Position of a loader.

    Args:
        epoch: Epoch number, from 0.
        consumed: Samples of the epoch that all ranks together have received, for indexed sources.
        parts: For other sources: the state of each worker's part of the epoch.
        next_part: For other sources: the part that is read next.
    """

    epoch: int = 0
    consumed: int = 0
    parts: Mapping[int, State] = field(default_factory=dict)
    next_part: int = 0


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


class ItemStage:
    """A stage that returns one item per item, so that it needs no position."""

    threads: int = 0
    """Threads that process items in parallel, keeping their order; 0 uses the caller's thread."""

    def bind(self, context: Context) -> ItemFunction:
        """Return the function for one epoch."""
        raise NotImplementedError

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
            return _ThreadedItemRun(source, function, context, self.threads)
        return _ItemRun(source, function, context)


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


class _ItemRun(SourceRun):
    def __init__(self, source: Run, function: ItemFunction, context: Context) -> None:
        super().__init__(source)
        self._function = function
        self._skips = context.skips

    def __next__(self) -> Any:
        while True:
            item = next(self.source)
            try:
                return self._function(item, self.source.number)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, item)


class _ThreadedItemRun(SourceRun):
    def __init__(self, source: Run, function: ItemFunction, context: Context, threads: int) -> None:
        super().__init__(source)
        self._function = function
        self._skips = context.skips
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardstream-map")
        self._ahead = 2 * threads
        self._pending: deque[tuple[Future[Any], int, State]] = deque()
        self._error: Exception | None = None  # of the source; raised after all pending items
        self._state = source.state_dict()
        self._number = 0

    @property
    def number(self) -> int:
        return self._number

    def __next__(self) -> Any:
        while True:
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
            try:
                return future.result()
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error)

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
