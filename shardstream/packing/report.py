"""Progress of a packing job, and its report at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a job is."""

    samples: int
    """Written so far."""
    skipped: int
    """Left out so far."""
    size_bytes: int
    """Of the tars so far."""
    total: int | None
    """Records there are in all, if known."""
    kept: int = 0
    """Of the samples: those in shards of an earlier run that was stopped."""


class Skip(NamedTuple):
    """A record that was left out."""

    where: str
    """Its file or row."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """What was written to one data set.

    Args:
        name: Of the split; "" if there is but one.
        url: Its folder.
        samples: Samples in it.
        shards: Shards in it.
        total_bytes: Of its tars.
        kept: Of the shards: those of an earlier run that was stopped.
    """

    name: str
    url: str
    samples: int
    shards: int
    total_bytes: int
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What a job did.

    Args:
        source: What was packed, for people.
        splits: What was written where.
        seconds: How long it took.
        skipped: Records that were left out, with ``on_error="skip"``.
        files: Loose files that were grouped to samples; None for other sources.
        fields: How many samples have each field.
    """

    source: str
    splits: tuple[SplitReport, ...]
    seconds: float
    skipped: tuple[Skip, ...] = ()
    files: int | None = None
    fields: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples written."""
        return sum(split.samples for split in self.splits)

    @property
    def shards(self) -> int:
        """Shards written."""
        return sum(split.shards for split in self.splits)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(split.total_bytes for split in self.splits)

    @property
    def kept(self) -> int:
        """Of the shards: those of an earlier run that was stopped."""
        return sum(split.kept for split in self.splits)
