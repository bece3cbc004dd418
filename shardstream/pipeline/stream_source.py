"""A source whose readers each have a stream of their own: positions are kept, not computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardstream.distributed import WorkerInfo
from shardstream.pipeline.stage import Context, Run, State
from shardstream.storage.store import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource(ABC):
    """Raw samples, split over readers by something coarser than a plan.

    Args:
        shuffle: Another order every epoch.
        seed: Any whole number.
    """

    shuffle: bool = False
    seed: int = 0

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""

    @property
    @abstractmethod
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""

    def describe(self, *, steps: bool) -> State:  # noqa: ARG002
        """Return what a state must agree with beside the data; nothing unless it is a mix."""
        return {}

    @abstractmethod
    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Start the stream of one loader worker."""

    @abstractmethod
    def place(self) -> tuple[Storage, str]:
        """Return the storage of its first shard, and the URL of that."""
