"""Read some samples of a dataset, and run its steps on them, in the process of a part."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from shardstream.catalog import Catalog
from shardstream.errors import (
    OptionError,
    SampleError,
    ShardStreamError,
    SourceError,
    describe_error,
    plural,
)
from shardstream.format import Sample, has_mask_word, is_image_field
from shardstream.order import derive_key, permute
from shardstream.packing.encode import encode_sample
from shardstream.pipeline import (
    Context,
    Decode,
    KeepFields,
    Map,
    Records,
    Rename,
    Run,
    Stage,
    State,
    describe,
    function_name,
    open_stages,
)
from shardstream.samples import FetchOptions, Numbers, Samples, leaves_of, replace_leaves
from shardstream.storage import keep_masks
from shardstream.tasks import keep

_PREFETCH_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20  # of samples in memory as Python objects
_CHUNK_SAMPLES = 4096
_SMALL_PART = 4  # a range that needs up to a quarter of a catalog gets a copy of that
_PURPOSE = 0x7E5A  # separates this permutation from those of epochs

T = TypeVar("T")
_Stepped = tuple[Any, str, str]
"""A sample after the steps, and the key and URL that it had before."""
SampleFunction = Callable[..., Any]
"""Takes a sample, field -> bytes, with ``__key__`` and ``__url__``; or a list of samples."""


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
        samples: The samples of the dataset, or some with those of this range.
        order: Which of them.
        steps: The steps.
        job: Identity of the call.
        is_part: Whether there may be only the samples of this range.
    """

    samples: Samples
    order: Order
    steps: Kept[Steps]
    job: str
    is_part: bool = False

    def rows(self) -> Generator[Sample]:
        """Yield the samples (see `read_rows`)."""
        is_sparse = self.order.seed is not None
        return read_rows(self.samples, self.order.numbers(), is_sparse=is_sparse)

    def __reduce__(self) -> tuple[Any, ...]:
        samples = self.samples.restrict_to(self.order.numbers())
        leaves = [
            self._kept(place, whole, part)
            for place, (whole, part) in enumerate(
                zip(leaves_of(self.samples), leaves_of(samples), strict=True)
            )
        ]
        views = replace_leaves(samples, cast("Iterator[Samples]", itertools.repeat(None)))
        return _received, (views, leaves, self.order, self.steps, self.job)

    def _kept(self, place: int, whole: Samples, part: Samples) -> Kept[Samples]:
        """Return the catalog of all samples if most of it is needed: other ranges need it, too, with its indexes. Else some of it."""
        is_shared = isinstance(whole, Catalog) and part.num_shards > whole.num_shards // _SMALL_PART
        if self.is_part or not is_shared:
            return Kept("", "", part)
        return Kept(self.job, f"catalog {place}", whole)


def _received(
    views: Samples,
    leaves: Sequence[Kept[Samples]],
    order: Order,
    steps: Kept[Steps],
    job: str,
) -> SampleRange:
    """Return the range in the process that has received it."""
    samples = replace_leaves(views, (leaf.value for leaf in leaves))
    return SampleRange(samples=samples, order=order, steps=steps, job=job, is_part=True)


class Steps(NamedTuple):
    """What happens to the samples of a dataset before they are written."""

    stages: tuple[Stage, ...]
    signatures: tuple[str, ...]
    seed: int
    """Seed of stages with random numbers."""
    epoch: int
    """Epoch of these numbers."""
    fields: frozenset[str] | None
    """Fields to keep at the end; None keeps all."""
    lists: MapLists | None = None
    """A function that comes after the stages."""

    @property
    def are_described(self) -> bool:
        """Whether the signatures of the steps tell all that they do: they call no function of the user, or have a version."""
        return self.lists is None and all(map(_is_described, self.stages))


def steps_of(
    records: Records,
    function: SampleFunction | None,
    batch_size: int | None,
    fields: frozenset[str] | None,
) -> Steps:
    """Return the steps of a dataset, and after them a function of the user.

    Args:
        records: The dataset.
        function: Returns the new sample or samples; a class is instantiated once in each process.
        batch_size: Samples of a call of ``function``; None calls it with single samples.
        fields: Fields to keep at the end; None keeps all.

    Raises:
        OptionError: If ``batch_size`` is under 1, or used without a function.
    """
    if batch_size is not None and (batch_size < 1 or function is None):
        raise OptionError("batch_size is the number of samples that map gets at a time, 1 or more")
    steps = Steps(records.stages, records.steps, records.seed, records.epoch, fields)
    if function is None:
        return steps
    one = _Instance(function) if isinstance(function, type) else function
    last = Map(function=one) if batch_size is None else MapLists(one, batch_size)
    steps = steps._replace(signatures=(*steps.signatures, describe(last)))
    if isinstance(last, MapLists):
        return steps._replace(lists=last)
    return steps._replace(stages=(*steps.stages, last))


def _is_described(stage: Stage) -> bool:
    """Return whether the signature of a step tells all that it does: it calls no function of the user, or has a version."""
    if isinstance(stage, Decode):
        by_field = (stage.given or {}).get("fields") or {}
        return not (stage.handlers or any(map(callable, by_field.values())))
    return isinstance(stage, KeepFields | Rename) or getattr(stage, "version", None) is not None


class _Instance:
    """Calls an instance of a class, which is made at the first call in each process, for example to load a model."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._made: Any = None
        self._lock = threading.Lock()
        self.__qualname__ = kind.__qualname__

    def __call__(self, *arguments: Any) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._kind()
        return self._made(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._kind,)


@dataclass(frozen=True, slots=True)
class MapLists:
    """Calls a function with lists of samples; it returns as many.

    Args:
        function: The function.
        size: Samples of a list, at most.
    """

    function: SampleFunction
    size: int

    def apply(self, stepped: Iterator[_Stepped]) -> Iterator[_Stepped]:
        """Yield the samples that the function makes, with the keys and URLs that they had before.

        Raises:
            SourceError: If the function raises an error of its own, or returns another number of samples.
        """
        while some := list(itertools.islice(stepped, self.size)):
            (_, first, url), (_, last, _) = some[0], some[-1]
            try:
                made = self.function([sample for sample, _, _ in some])
            except ShardStreamError:
                raise
            except Exception as error:
                error.add_note(
                    f"in map({function_name(self.function)}) on samples {first!r} to {last!r} of {url}"
                )
                raise _source_error(error) from error
            if not isinstance(made, list | tuple) or len(made) != len(some):
                found = len(made) if isinstance(made, list | tuple) else type(made).__name__
                raise SourceError(
                    f"map returned {found} for {plural(len(some), 'sample')}; with batch_size it returns a list of as many",
                    shard=url,
                    key=first,
                )
            for sample, (_, key, url) in zip(made, some, strict=True):
                yield sample, key, url


@dataclass(slots=True)
class _RangeRun:
    """The samples of a range, as the run that stages begin with."""

    rows: Generator[Sample]
    numbers: Iterator[int]
    number: int = -1
    origins: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Number -> key and URL, of the samples that are on their way."""
    is_at_end: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Sample:
        try:
            row = next(self.rows)
        except StopIteration:
            self.is_at_end = True
            raise
        self.number = next(self.numbers)
        self.origins[self.number] = row["__key__"], str(row["__url__"])
        return row

    def state_dict(self) -> State:
        """Return nothing: a part begins at its first sample."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.rows.close()


def read_rows(samples: Samples, numbers: Numbers, *, is_sparse: bool) -> Generator[Sample]:
    """Yield samples as field -> bytes; 4 MiB of them are in memory, and 64 MiB are prefetched.

    Args:
        samples: All samples.
        numbers: Which of them.
        is_sparse: As in `FetchOptions`.

    Raises:
        ShardError: If one is damaged.
        SampleError: If a joined sample lacks a field.
        StorageError: If they cannot be read.
    """
    size = max(1, min(_CHUNK_SAMPLES, int(_CHUNK_BYTES / samples.mean_bytes)))
    chunks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    options = FetchOptions(prefetch_bytes=_PREFETCH_BYTES, is_sparse=is_sparse)
    with closing(samples.open_fetcher(chunks, options)) as fetcher:
        for chunk in chunks:
            for row in fetcher.samples(chunk):
                if isinstance(row, Exception):
                    raise row
                yield row


def encoded_samples(
    samples: SampleRange,
) -> Generator[tuple[str, dict[str, bytes], Collection[str]]]:
    """Yield the samples that are left after all steps: key, encoded fields, and the pictures among these that a step has decoded.

    Raises:
        SourceError: If a function raises an error of its own, or the last step returns no sample.
        SampleError: If a value does not fit its field.
    """
    steps = samples.steps.value
    decoding = [stage for stage in steps.stages if isinstance(stage, Decode)]
    lists, fields = steps.lists, steps.fields
    with closing(_stepped(samples)) as stepped:
        for sample, key, url in stepped if lists is None else lists.apply(stepped):
            if not isinstance(sample, Mapping):
                raise SourceError(
                    f"the last step returned {type(sample).__name__}, not a dict of fields; to leave samples out use select",
                    shard=url,
                    key=key,
                )
            name = sample.get("__key__", key)
            if not isinstance(name, str):
                raise SampleError(
                    f"__key__ is text, not {type(name).__name__}; use str(key)", shard=url
                )
            kept = sample
            if fields is not None:
                kept = {field: value for field, value in sample.items() if field in fields}
                kept = keep_masks(sample, kept)
            try:
                pictures = _decoded_pictures(kept, decoding) if decoding else ()
                yield name, encode_sample(kept), pictures
            except SampleError as error:
                raise SampleError(str(error), shard=url, key=name) from error


def _decoded_pictures(sample: Mapping[str, Any], decoding: Sequence[Decode]) -> list[str]:
    """Return the fields with pixels that a step has decoded, but for masks: encoded again, they may have lost something in any format."""
    return [
        field
        for field, value in sample.items()
        if not isinstance(value, bytes)
        and is_image_field(field)
        and not has_mask_word(field)
        and any(stage.decodes(field) for stage in decoding)
    ]


def _stepped(samples: SampleRange) -> Generator[_Stepped]:
    """Yield the samples after all stages, with the keys and URLs that they had before."""
    steps, rows = samples.steps.value, samples.rows()
    if not steps.stages:
        with closing(rows):
            yield from ((row, row["__key__"], str(row["__url__"])) for row in rows)
        return
    first = _RangeRun(rows, iter(samples.order.numbers().tolist()))
    context = Context(seed=steps.seed, epoch=steps.epoch)
    with closing(open_stages(steps.stages, first, context)) as run:
        for item in _translated(run):
            yield item, *first.origins.pop(run.number)
    if not first.is_at_end:
        raise SourceError(
            "a step ended before its last sample; a step that is written has an item for each item",
            shard=samples.samples.url_of(0),
        )


def _translated(run: Run) -> Iterator[Any]:
    """Yield the items of a run; an error of the user's code becomes one that any process can raise."""
    while True:
        try:
            item = next(run)
        except StopIteration:
            return
        except ShardStreamError:
            raise
        except Exception as error:
            raise _source_error(error) from error
        yield item


def _source_error(error: Exception) -> SourceError:
    notes = "; ".join(getattr(error, "__notes__", ()))
    return SourceError(f"{describe_error(error)}{f' ({notes})' if notes else ''}")
