"""Values for the progress and the report of a packing job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardstream.errors import OptionError, plural


class Progress(NamedTuple):
    """Progress of `pack`, `reshard`, `index` or `verify`."""

    samples: int
    """Samples written so far; for `index` and `verify` those of the shards that have been read."""
    skipped: int
    """Records or samples left out so far: by ``select``, or because of an error."""
    size_bytes: int
    """Bytes of the tars so far, written or read."""
    total: int | None
    """Number of all records, if known."""
    kept: int = 0
    """Samples in shards of an earlier run that was stopped."""
    shards: int = 0
    """Shards that are done."""
    failures: int = 0
    """Records that were skipped because of an error; for `verify` errors that were found."""
    retries: int = 0
    """Tasks that were run again because their worker died (see `Executor`)."""
    total_bytes: int | None = None
    """Bytes of all tars, if known: those that `index` and `verify` read."""


ProgressFunction = Callable[[Progress], object]


class Skip(NamedTuple):
    """A skipped record."""

    where: str
    """Its file or row."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """Result of one split.

    Args:
        name: Name of the split; "" without splits.
        url: URL of its folder.
        samples: Samples in it.
        shards: Shards in it.
        total_bytes: Bytes of its tars.
        kept: Shards of an earlier run that was stopped.
    """

    name: str
    url: str
    samples: int
    shards: int
    total_bytes: int
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """Result of a packing job.

    Args:
        source: Description of the source.
        splits: Result of each split.
        seconds: Duration of the job.
        skipped: Records that were skipped, with ``on_error="skip"``.
        files: Loose files that were grouped to samples; None for other sources.
        fields: Number of samples that have each field.
        unfinished: Parts of the job that are not done, by this process or another one; if any, nothing is published yet.
        warnings: Findings that may be mistakes, e.g. keys of added fields that no sample has; known when the dataset is published.
    """

    source: str
    splits: tuple[SplitReport, ...]
    seconds: float
    skipped: tuple[Skip, ...] = ()
    files: int | None = None
    fields: Mapping[str, int] = field(default_factory=dict)
    unfinished: int = 0
    warnings: tuple[str, ...] = ()

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
        """Shards of an earlier run that was stopped."""
        return sum(split.kept for split in self.splits)


def skipped_before_error(count: int, first: Skip, folder: str) -> OptionError:
    """Describe that a run that does not skip records goes on after one that did.

    Args:
        count: Number of its skipped records.
        first: One of them.
        folder: Folder of the dataset.
    """
    return OptionError(
        f"the stopped run skipped {plural(count, 'record')}, the first: {first.reason}; "
        "continue with on_error='skip' (--skip-errors), or start again with overwrite=True (--overwrite)",
        shard=folder,
    )
