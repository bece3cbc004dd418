"""Base class of sources, which read the raw samples of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from shardstream.distributed import WorkerInfo
from shardstream.pipeline.bad_sample_report import BadSample
from shardstream.pipeline.stage import Context, Run, State
from shardstream.storage import Storage


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
