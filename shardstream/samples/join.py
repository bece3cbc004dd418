"""Samples of several datasets joined to one sample each, by position or by key, and the fetcher that reads and joins them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from shardstream.errors import IndexMismatchError, SampleError, plural
from shardstream.format import Columns, Rows, Sample
from shardstream.samples.base import Fetcher, Numbers, Samples, Stored, places_in
from shardstream.samples.view import View, ViewFetcher
from shardstream.storage import keep_masks, lost_masks

_OWN = ("__key__", "__url__")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """Samples that are added to those of a first dataset.

    Args:
        samples: The samples.
        numbers: For each sample of the join its number here, -1 if it has none; None if all numbers are equal, and later samples have none.
        some: Numbers of the samples of the join that have one here, ascending: the first is sample 0 here.
        kept: Numbers of the samples of the join that ``numbers`` has, ascending; None for all.
        fields: Field -> its name here; None for all fields, under their names.
        defaults: Fields, as bytes, of the samples that have none here.
        replaces: Whether fields of earlier datasets are replaced.
        is_strict: Whether a sample here without one of ``fields`` is an error.
        num_unused: Number of samples here whose key no sample has.
    """

    samples: Samples
    numbers: npt.NDArray[np.signedinteger[Any]] | None = None
    some: Numbers | None = None
    kept: Numbers | None = None
    fields: Mapping[str, str] | None = None
    defaults: Mapping[str, bytes]
    replaces: bool = False
    is_strict: bool = False
    num_unused: int = 0

    @property
    def known_fields(self) -> tuple[str, ...] | None:
        """Fields that it adds; None if they are unknown."""
        return self.samples.fields if self.fields is None else tuple(self.fields)

    @property
    def has_classes(self) -> bool:
        """Whether the field ``cls`` of the joined samples is that of these, whose class names count then."""
        is_own = self.fields is None or self.fields.get("cls") == "cls"
        return is_own and "cls" in (self.known_fields or ())

    def numbers_of(self, numbers: Numbers, nsamples: int) -> Numbers:
        """Return the number here of each sample of the join, which has ``nsamples``; -1 for none. A copy is a copy here, too."""
        copies, numbers = np.divmod(numbers, max(1, nsamples))
        theirs = numbers
        if self.numbers is not None:
            theirs = self.numbers[places_in(self.kept, numbers)].astype(np.int64)
        elif self.some is not None:
            theirs = np.searchsorted(self.some, numbers)
            theirs[np.append(self.some, -1)[theirs] != numbers] = -1
        elif self.replaces:
            theirs = np.where(numbers < len(self.samples), numbers, -1)
        return np.where(theirs < 0, -1, theirs + copies * len(self.samples))

    def restrict_to(self, kept: Numbers) -> JoinPart:
        """Return the part for some samples of the join, ascending."""
        if self.numbers is None:
            return self
        return replace(self, kept=kept, numbers=self.numbers[places_in(self.kept, kept)])


class JoinFetcher(ViewFetcher):
    """Read joined samples: each dataset by a fetcher of its own."""

    _view: Join
    _shares_requests = False  # each batch needs all datasets, so that none has requests to spare
    # Those of a view over one dataset would not join.
    read, find = Fetcher.read, Fetcher.find

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Send the requests of all datasets; return a function that returns the joined samples, or the first error of their parts.

        The function raises `IndexMismatchError` if samples of the same position have different keys.
        """
        if not len(numbers):
            return list
        join, waiting = self._view, [self.fetchers[0].request(numbers)]
        places = list[Numbers]()  # of the samples that a dataset has
        for part, fetcher in zip(join.parts, self.fetchers[1:], strict=True):
            theirs = part.numbers_of(numbers, len(join))
            places.append(np.flatnonzero(theirs >= 0))
            waiting.append(fetcher.request(theirs[places[-1]]))

        def wait() -> Rows:
            joined = _chosen(waiting[0](), join)
            for part, mine, wait_for_part in zip(join.parts, places, waiting[1:], strict=True):
                found = wait_for_part()
                joined = _join_columns(joined, found, part) or _join_rows(joined, found, mine, part)
            return joined

        return wait


class Join(View):
    """Samples of a first dataset, in its order, each with the fields of one sample of other datasets.

    Shards, places and columns are those of the first.

    Args:
        first: The first dataset.
        parts: The others.
        kept: Fields of the first that are kept, where a sample has them; None for all. Where its fields are unknown, each sample has them.
    """

    fetcher_type = JoinFetcher

    def __init__(
        self, first: Samples, parts: Sequence[JoinPart], kept: Collection[str] | None = None
    ) -> None:
        super().__init__([first, *(part.samples for part in parts)])
        self.parts, self.kept = tuple(parts), None if kept is None else frozenset(kept)
        self.is_strict = first.fields is None
        self.can_coalesce = first.can_coalesce  # others may be tables, or in any order

    @property
    def first(self) -> Samples:
        """The first dataset."""
        return self.inner[0]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def prefetch_weights(self) -> list[float]:
        """Mean size of the samples of each dataset: each batch needs all of them."""
        return [one.mean_bytes for one in self.inner]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples; the mean size of those of each dataset, times the number of samples."""
        means = (one.total_bytes / max(1, len(one)) for one in self.inner)
        return int(sum(means) * len(self.first))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the datasets, with which of their samples are joined, and with the chosen fields."""
        digest = hashlib.sha256(f"join {self.first.fingerprint}\n".encode())
        digest.update(b"" if self.kept is None else f"{sorted(self.kept)}\n".encode())
        for part in self.parts:
            fields = None if part.fields is None else sorted(part.fields.items())
            defaults = sorted(part.defaults.items())
            digest.update(f"{part.samples.fingerprint} {fields} {defaults}\n".encode())
            for one in (part.numbers, part.some):
                digest.update(b"" if one is None else one.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields of all datasets; None if those of one are unknown."""
        own = self.first.fields if self.kept is None else self.kept
        found = [own, *(part.known_fields for part in self.parts)]
        if None in found:
            return None
        return tuple(sorted({name for names in found for name in names or ()}))

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(len(self), 'sample')} of {len(self.inner)} datasets"

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers: a sample is where it is in the first dataset."""
        return np.zeros(len(numbers), dtype=np.int64), numbers

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:
        """Return the numbers that a dataset has for some samples, shape (m,): all of them in the first, in others those that are joined."""
        if not place:
            return numbers
        theirs = self.parts[place - 1].numbers_of(numbers, len(self))
        return theirs[theirs >= 0]

    def find_stored(self, numbers: Numbers) -> Iterator[Stored]:
        """Yield where the samples of the first dataset are stored, and then those that are joined to them."""
        yield from super().find_stored(numbers)
        for part in self.parts:
            theirs = part.numbers_of(numbers, len(self))
            mine = np.flatnonzero(theirs >= 0)
            yield Stored(part.samples, mine, theirs[mine], is_joined=True, fields=part.fields)

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample in all datasets, shape (n,)."""
        sizes = self.first.sizes(numbers)
        for part in self.parts:
            theirs = part.numbers_of(numbers, len(self))
            has = theirs >= 0
            sizes[has] += part.samples.sizes(theirs[has])
        return sizes

    def restrict_to(self, numbers: Numbers) -> Self:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        part, kept = super().restrict_to(numbers), np.unique(numbers % len(self))
        part.parts = tuple([one.restrict_to(kept) for one in part.parts])
        return part

    def with_inner(self, inner: Sequence[Samples]) -> Self:
        """Return the join of others, which have the same numbers as the inner samples."""
        made = super().with_inner(inner)
        others = zip(self.parts, made.inner[1:], strict=True)
        made.parts = tuple([replace(part, samples=samples) for part, samples in others])
        return made


def _chosen(samples: Rows, join: Join) -> Rows:
    """Return samples of the first dataset with the fields that are kept."""
    if join.kept is None:
        return samples
    names = join.kept.union(_OWN)
    if isinstance(samples, Columns) and (not join.is_strict or names <= samples.columns.keys()):
        kept = {name: one for name, one in samples.columns.items() if name in names}
        if not lost_masks(samples.columns, kept):
            return Columns(kept)
    return [row if isinstance(row, Exception) else _choose(row, names, join) for row in samples]


def _choose(row: Sample, names: frozenset[str], join: Join) -> Sample | Exception:
    absent = sorted(names.difference(row))
    if absent and join.is_strict:
        return SampleError.of(
            row,
            f"no such field, which was to be kept; the sample has {', '.join(sorted(row.keys() - _OWN))}",
            remedy="correct its name, or run 'shardstream index' on the folder if some samples lack it",
            field=absent[0],
        )
    return keep_masks(row, {name: one for name, one in row.items() if name in names})


def _names_in(part: JoinPart, fields: Iterable[str]) -> dict[str, str]:
    """Return field -> its name there, of those that a sample of the other dataset adds."""
    if part.fields is None:
        return {field: field for field in fields if field not in _OWN}
    known = frozenset(fields)
    return {field: name for field, name in part.fields.items() if name in known}


def _join_columns(samples: Rows, others: Rows, part: JoinPart) -> Columns | None:
    """Join whole columns; None where samples are missing, of several forms or wrong, or two datasets have a field."""
    if not (isinstance(samples, Columns) and isinstance(others, Columns)):
        return None
    mine, theirs = samples.columns, others.columns
    names = _names_in(part, theirs)
    if part.is_strict and len(names) < len(part.fields or ()):
        return None
    added = {field: theirs[name] for field, name in names.items()}
    are_new = part.replaces or added.keys().isdisjoint(mine)
    if mine["__key__"] != theirs["__key__"] or not are_new:
        return None
    if len(set(names.values())) < len(names):  # they would share the memory of a column
        return None
    if lost_masks(theirs, added):
        return None
    return Columns({**mine, **added})


def _join_rows(
    samples: Rows, others: Rows, places: Numbers, part: JoinPart
) -> list[Sample | Exception]:
    """Join samples one by one; ``places`` are those of the samples that the other dataset has."""
    rows = [row if isinstance(row, Exception) else dict(row) for row in samples]
    found: dict[int, Sample | Exception] = dict(zip(places.tolist(), others, strict=True))
    return [_join(row, found.get(place), part) for place, row in enumerate(rows)]


def _join(
    row: Sample | Exception, other: Sample | Exception | None, part: JoinPart
) -> Sample | Exception:
    """Add the fields of another sample to a sample; an error takes the place of both.

    Raises:
        IndexMismatchError: If they have different keys.
    """
    if isinstance(row, Exception) or isinstance(other, Exception):
        return row if isinstance(row, Exception) else cast("Exception", other)
    if other is None:
        return _with_fields(row, part.defaults, "missing=")
    key = other["__key__"]
    if key != row["__key__"]:
        raise IndexMismatchError(
            f"joined samples have the keys {row['__key__']!r} and {key!r}, the second in {other.get('__url__')}: "
            "the datasets are not in the same order",
            remedy="run 'shardstream index --columns __key__' on each, to join them by key",
            shard=row.get("__url__"),
            key=row["__key__"],
        )
    names = _names_in(part, other)
    missing = [field for field in part.fields or () if field not in names]
    if part.is_strict and missing:
        return SampleError.of(
            row,
            f"its sample or row in {other.get('__url__')} has no such field",
            remedy="pass missing='keep' (--missing keep) if some samples lack it",
            field=missing[0],
        )
    added = keep_masks(other, {field: other[name] for field, name in names.items()})
    if len(set(names.values())) < len(names):  # a step may change one of them in place
        added = {field: deepcopy(value) for field, value in added.items()}
    if part.replaces:
        row.update(added)
        return row
    return _with_fields(row, added, str(other.get("__url__")))


def _with_fields(row: Sample, added: Mapping[str, object], url: str) -> Sample | Exception:
    both = next((field for field in added if field in row), None)
    if both is not None:
        return SampleError.of(
            row,
            f"two of the joined datasets have the field {both!r}; the second is {url}",
            remedy=f"take it under another name, {{URL: {{'new.{both}': {both!r}}}}}, or leave it out: ss.join(first, {{URL: fields}})",
            field=both,
        )
    row.update(added)
    return row
