"""The two protocols of a pipeline: a stage describes a step and is pickled, a run is that step at work in one process."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from shardstream.errors import OptionError
from shardstream.order import derive_key
from shardstream.pipeline.bad_samples import SkipTracker

EPOCHS = 1 << 31
"""Epochs are numbered below this: a mix uses the bits above for its own purposes."""

State = dict[str, Any]
"""A position: plain JSON values, small, never samples."""

ItemFunction = Callable[[Any, int], Any]
"""``function(item, number)``: one item out for one in; the number is that of its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a run may depend on beside its items.

    Args:
        seed: Of the dataset.
        epoch: From 0.
        worker_number: Number of this loader worker among all of the job.
        skips: What becomes of bad samples; one account for the whole chain.
    """

    seed: int = 0
    epoch: int = 0
    worker_number: int = 0
    skips: SkipTracker = field(default_factory=SkipTracker)

    def generator(self, number: int, purpose: int) -> np.random.Generator:
        """Return the generator of a sample: the same on every topology and after every resume."""
        return np.random.Generator(
            np.random.PCG64(derive_key(self.seed, self.epoch, purpose, number))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a loader is.

    Args:
        epoch: From 0.
        consumed: Samples of the epoch that all ranks together have seen, where positions are arithmetic.
        parts: Else the state of each worker's part of the epoch.
        next_part: And the part whose turn it is.
    """

    epoch: int = 0
    consumed: int = 0
    parts: Mapping[int, State] = field(default_factory=dict)
    next_part: int = 0


def check_at_least(least: int, **options: int | None) -> None:
    """Refuse options that are no whole numbers, or below a number; None is no number to refuse.

    Raises:
        OptionError: Naming the first that is.
    """
    for name, value in options.items():
        if value is not None and whole_number(name, value) < least:
            raise OptionError(f"{name} must be at least {least}, not {value}")


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return an option as a plain ``int``, which JSON can hold; NumPy's numbers are taken, too.

    Raises:
        OptionError: If it is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def check_epoch(epoch: SupportsIndex) -> int:
    """Return an epoch as a plain ``int``.

    Raises:
        OptionError: If it is no whole number from 0 to 2**31 - 1.
    """
    number = whole_number("epoch", epoch)
    if not 0 <= number < EPOCHS:
        raise OptionError(f"epoch must be from 0 to {EPOCHS - 1}, not {number}")
    return number


class Run(Protocol):
    """A stage at work: an iterator with a position."""

    @property
    def number(self) -> int:
        """Sample number of the item handed out last, or a number that stands for it."""

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""

    def __next__(self) -> Any:
        """Return the next item."""

    def state_dict(self) -> State:
        """Return the position behind the item handed out last."""

    def load_state_dict(self, state: State) -> None:
        """Go to a position; nothing is read before the next item is asked for."""

    def close(self) -> None:
        """Give back files and threads, here and in the runs before."""


class Stage(Protocol):
    """The description of a step."""

    def open(self, source: Run, context: Context) -> Run:
        """Start the step on what the step before hands out."""


def check_stage(stage: object) -> None:
    """Refuse what is no stage.

    Raises:
        OptionError: If it is no dataclass, or has no ``open``.
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
    """A stage that hands out one item for each, so that it changes no counts and keeps no position."""

    threads: int = 0
    """Threads that work on items side by side, in order; 0 works in the caller's thread."""

    def bind(self, context: Context) -> ItemFunction:
        """Return the function for one epoch."""
        raise NotImplementedError

    def open(self, source: Run, context: Context) -> Run:
        """Start it on a stream."""
        function = self.bind(context)
        if self.threads:
            return _ThreadedItemRun(source, function, context, self.threads)
        return _ItemRun(source, function, context)


class SourceRun:
    """What most runs share: they own the run before them and have its number and position."""

    def __init__(self, source: Run) -> None:
        self.source = source

    @property
    def number(self) -> int:
        """Sample number of the item handed out last."""
        return self.source.number

    def __iter__(self) -> Iterator[Any]:
        return self  # type: ignore[return-value]  # the classes below have __next__

    def state_dict(self) -> State:
        """Return the position of the run before."""
        return self.source.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Send the run before to a position."""
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
        self._error: Exception | None = None  # of the source, behind all that is pending
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
                except Exception as error:  # noqa: BLE001  (raised when it is its turn)
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
