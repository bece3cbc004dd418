"""Protocols of a pipeline: a source reads raw samples, a stage describes a step and is pickled, a run executes it in one process."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError
from shardstream.order import derive_key
from shardstream.pipeline.bad_samples import BadSample, SkipTracker
from shardstream.storage import Storage

EPOCHS = 1 << 31
"""Epoch numbers are below this limit; a mix uses the higher bits for the passes of its parts."""

State = dict[str, Any]
"""A position: a few plain JSON values, never samples."""


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
