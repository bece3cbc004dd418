"""Read some samples of a dataset, in the process of a part."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from shardstream.format import Sample
from shardstream.order import derive_key, permute
from shardstream.packing.job.kept_values import keep
from shardstream.pipeline import Stage
from shardstream.samples import FetchOptions, Join, JoinPart, Numbers, Samples, Subset, Table

_PREFETCH_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20  # of samples in memory as Python objects
_CHUNK_SAMPLES = 4096
_PURPOSE = 0x7E5A  # separates this permutation from those of epochs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """A value that all tasks of a job share: another process keeps the one that it receives first, such as indexes or a model.

    Args:
        job: Identity of the call; "" keeps nothing.
        name: Name of the value in its job.
        value: The value; picklable.
    """

    job: str
    name: str
    value: T

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.job, self.name, self.value)


def _receive(job: str, name: str, value: T) -> Kept[T]:
    received = Kept(job, name, value)
    return keep(job, name, lambda: received) if job else received


class Order(NamedTuple):
    """Places of samples in the order of a job."""

    first: int
    last: int
    size: int
    """Number of all samples."""
    seed: int | None
    """Seed of a random order; None keeps the order of the dataset."""

    def numbers(self) -> Numbers:
        """Return the numbers of the samples in the dataset, shape (last - first,)."""
        places = np.arange(self.first, self.last, dtype=np.int64)
        if self.seed is None:
            return places
        return permute(places, self.size, derive_key(self.seed, _PURPOSE))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRange:
    """Some samples of a dataset and the steps that they pass. Pickled, it has what these samples need, not the whole dataset.

    Args:
        samples: The samples of the dataset; or those of this range, if ``is_part``.
        order: Which of them.
        stages: The steps.
        job: Identity of the call.
        is_part: Whether these are the samples of this range only, in their order.
    """

    samples: Samples
    order: Order
    stages: Kept[tuple[Stage, ...]]
    job: str
    is_part: bool = False

    def rows(self) -> Generator[Sample]:
        """Yield the samples as field -> bytes; 4 MiB of them are in memory, and 64 MiB are prefetched.

        Raises:
            ShardError: If one is damaged.
            SampleError: If a joined sample lacks a field.
            StorageError: If they cannot be read.
        """
        samples = self.samples
        numbers = np.arange(len(samples)) if self.is_part else self.order.numbers()
        size = max(1, min(_CHUNK_SAMPLES, int(_CHUNK_BYTES / samples.mean_bytes)))
        chunks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        opened = samples.open_fetcher(chunks, FetchOptions(prefetch_bytes=_PREFETCH_BYTES))
        with closing(opened) as fetcher:
            for chunk in chunks:
                for row in fetcher.samples(chunk):
                    if isinstance(row, Exception):
                        raise row
                    yield row

    def __reduce__(self) -> tuple[Any, ...]:
        samples, numbers, job = self.samples, self.order.numbers(), self.job
        join = samples if isinstance(samples, Join) else None
        parts = [] if join is None else [_sent(part, numbers, len(join)) for part in join.parts]
        leaf, own = _leaf_of(samples if join is None else join.first, numbers)
        if join is None and self.order.seed is None:  # each shard is of few parts
            leaf, job = leaf.restrict_to(own), ""
        sent = _Sent(
            catalogs=Kept(job, "catalogs", (leaf, *(other for _, other in parts))),
            own=_compressed(own),
            parts=tuple(part for part, _ in parts),
            left_out=frozenset() if join is None else join.left_out,
            order=self.order,
            stages=self.stages,
            job=self.job,
        )
        return _received, (sent,)


class _Sent(NamedTuple):
    """What is pickled of a range."""

    catalogs: Kept[tuple[Any, ...]]
    """The first dataset and the joined ones, without choices of samples; None for tables."""
    own: Numbers | range
    """Numbers of the samples in the first dataset."""
    parts: tuple[JoinPart, ...]
    """The joined datasets for these samples; those of shards without the shards."""
    left_out: frozenset[str]
    order: Order
    stages: Kept[tuple[Stage, ...]]
    job: str


def _sent(part: JoinPart, numbers: Numbers, nsamples: int) -> tuple[JoinPart, Samples | None]:
    """Return the part of a join for some samples, without its shards, which all tasks share; rows of a table go with it."""
    theirs = part.numbers_of(numbers, nsamples)
    has = theirs >= 0
    leaf, found = _leaf_of(part.samples, theirs[has])
    table = None
    if isinstance(leaf, Table):
        table, found = leaf.take(found), np.arange(len(found))
    theirs = np.full(len(numbers), -1, dtype=np.int64)
    theirs[has] = found
    part = replace(part, samples=cast("Samples", table), numbers=theirs)
    return part, None if table is not None else leaf


def _leaf_of(samples: Samples, numbers: Numbers) -> tuple[Samples, Numbers]:
    """Return the samples that a subset is of, and the numbers of samples there."""
    while isinstance(samples, Subset):
        numbers = samples.whole_numbers(numbers)
        samples = samples.whole
    return samples, numbers


def _compressed(numbers: Numbers) -> Numbers | range:
    first, last = int(numbers[0]), int(numbers[-1])
    is_run = last - first == len(numbers) - 1 and bool((np.diff(numbers) == 1).all())
    return range(first, last + 1) if is_run else numbers


def _received(sent: _Sent) -> SampleRange:
    """Return the range in the process that has received it."""
    leaf, *others = sent.catalogs.value
    samples: Samples = Subset(leaf, np.asarray(sent.own, dtype=np.int64))
    if sent.parts:
        joined = [
            part if other is None else replace(part, samples=other)
            for part, other in zip(sent.parts, others, strict=True)
        ]
        samples = Join(samples, joined, sent.left_out)
    return SampleRange(
        samples=samples, order=sent.order, stages=sent.stages, job=sent.job, is_part=True
    )
