"""Plan a pack: source, records in their order, splits, and what decides the bytes."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from shardstream.errors import ChangedError, OptionError, plural
from shardstream.format import CLASSES_NAME
from shardstream.packing.images import ImageOptions
from shardstream.packing.job.append import Base, check_append, read_base
from shardstream.packing.job.folder_state import ShardNames, Task, check_is_elsewhere
from shardstream.packing.job.parallel_encode import RecordEncoder
from shardstream.packing.shards.column_builder import columns_identity
from shardstream.packing.shards.part_writer import WriterOptions
from shardstream.packing.sources.class_numbering import (
    AnyClasses,
    continue_class_numbers,
    number_classes,
)
from shardstream.packing.sources.detection import AnySource, open_source
from shardstream.packing.sources.source import (
    Numbers,
    Record,
    ShuffledSource,
    Source,
    SourceOptions,
    SplitNumbers,
    shuffled_order,
)
from shardstream.storage import Storage, absolute_url, join_url

_BLOCK = 1 << 16  # records whose splits are looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRequest:
    """The arguments of `pack` that decide the dataset; picklable if the source is a URL.

    Args:
        source: What to pack.
        dest: Folder or pattern.
        source_options: How to read the source.
        limits: Maximum samples and bytes of a shard, and the name of the dataset.
        shuffle: Whether to shuffle; None: by the source.
        seed: Seed of the order and the splits.
        split: Name -> fraction.
        classes: Class names, or where they are.
        images: Changes to images.
        reading: ``storage_options`` of the source.
        writing: ``storage_options`` of the destination.
        skips: Whether records that cannot be packed are left out.
        appends: Whether the shards are appended to the dataset at the destination.
        checks_keys: Whether the keys are compared with those of this dataset.
        base: This dataset (see `with_base`).
    """

    source: AnySource
    dest: str | os.PathLike[str]
    source_options: SourceOptions
    limits: WriterOptions
    shuffle: bool | None
    seed: int
    split: Mapping[str, float]
    classes: AnyClasses | None
    images: ImageOptions
    reading: Mapping[str, Any] | None
    writing: Mapping[str, Any] | None
    skips: bool
    appends: bool = False
    checks_keys: bool = True
    base: Base | None = None

    def with_base(self, *, is_new: bool) -> PackRequest:
        """Return the request with the dataset that is appended to, and its columns, as all processes of a job are to see it.

        Args:
            is_new: Whether there are options of a new dataset.

        Raises:
            OptionError: If options do not go together, there is no dataset, or it has other columns than the user wants.
            StorageError: If it cannot be read.
        """
        check_append(is_append=self.appends, is_new=is_new, has_defaults=self.checks_keys)
        if self.split:
            raise _splits_error(tuple(self.split), ShardNames.parse(self.dest).folder)
        base = read_base(ShardNames.parse(self.dest).folder, Storage(self.writing))
        return replace(self, base=base, limits=base.limits_for(self.limits))

    def with_absolute_paths(self) -> PackRequest:
        """Return the request for a process with another current folder."""
        options, classes = self.source_options, self.classes
        if options.root is not None:
            options = replace(options, root=absolute_url(options.root))
        options = replace(options, allow=tuple(map(absolute_url, options.allow)))
        return replace(
            self,
            source=absolute_url(self.source)
            if isinstance(self.source, str | os.PathLike)
            else self.source,
            dest=absolute_url(self.dest),
            source_options=options,
            classes=absolute_url(classes) if isinstance(classes, str | os.PathLike) else classes,
        )

    def open(self) -> PackPlan:
        """Open the source, and plan the order of its records.

        Raises:
            OptionError: If an option does not fit the source.
            SourceError: If there is nothing to pack.
            StorageError: If the source cannot be reached.
        """
        reading, options = Storage(self.reading), self.source_options
        opened = open_source(self.source, reading, options)
        names = ShardNames.parse(self.dest)
        if opened.folders:
            check_is_elsewhere(opened.folders, names.folder, reading)
        if self.reading or self.writing:
            self._check_options(reads_remote=opened.reads_remote)
        splits = _split_names(opened, self.split)
        if self.base is None:
            folders = [*map(partial(folder_of_split, names), splits)]
            opened = number_classes(opened, self.classes, folders, Storage(self.writing))
            names_file = opened.extras.get(CLASSES_NAME)
            digest = None if names_file is None else sha256(names_file.encode()).hexdigest()[:16]
            numbers: dict[str, Any] = {"class_numbers": digest}
        else:
            opened, numbers = self._continue(opened, splits, self.base)
        asked: dict[str, Any] = {"max_samples": self.limits.max_samples}
        asked |= {"max_bytes": self.limits.max_bytes, "name": self.limits.name}
        asked |= {"kind": options.kind, "key": options.key, "fields": dict(options.fields) or None}
        root = None if options.root is None else absolute_url(options.root)
        asked |= {"root": root, "seed": self.seed, "shuffle": self.shuffle}
        asked |= {"split": list(self.split.items()), "template": names.template}
        asked |= numbers
        if options.allow:
            asked |= {"allow": [*map(absolute_url, options.allow)]}
        if options.header:
            asked |= {"header": list(options.header)}
        if self.limits.columns is not None:
            asked |= {"columns": columns_identity(self.limits.columns)}
        return _plan(
            opened,
            self,
            names=names,
            task=Task(source=opened.fingerprint, options=asked | self.images.encoding_options()),
            encoder=RecordEncoder(
                storage=reading, images=self.images, reads_remote=opened.reads_remote
            ),
        )

    def _continue(
        self, source: Source, splits: Sequence[str], base: Base
    ) -> tuple[Source, dict[str, Any]]:
        """Return the source as its samples are to be appended to a dataset, and what identifies that."""
        if splits != ("",):
            raise _splits_error(splits, base.url)
        source, numbers = continue_class_numbers(
            source, self.classes, base.classes, base.url, Storage(self.writing)
        )
        source = copy(source)  # it may be the user's object
        source.number_prefix = _prefix(source)
        source.may_repeat_keys |= self.checks_keys  # keys may also be those of the dataset
        # Not all names of the dataset, which others may extend meanwhile.
        return source, {"append": {"classes": numbers, "checks_keys": self.checks_keys}}

    def _check_options(self, *, reads_remote: bool) -> None:
        """Refuse options of stores where all files are on this machine.

        Raises:
            OptionError: If there are some.
        """
        classes = self.classes if isinstance(self.classes, str | os.PathLike) else self.dest
        storage = Storage(self.writing)
        is_local = all(storage.local_path(os.fspath(url)) for url in (self.dest, classes))
        is_other = self.reading != self.writing
        if self.writing and is_local and (is_other or not reads_remote):
            raise OptionError(
                "storage_options (--option) has no effect: all files are on this machine; leave it out"
            )
        if is_other and self.reading and not reads_remote:
            raise OptionError(
                "source_options (--source-option) has no effect: the source is on this machine; leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """A pack whose source is open.

    Args:
        source: The source.
        records: Its records in packing order.
        total: Their number, if it is known.
        splits: Names of the datasets.
        assigned: The split of each record; None if there is one.
        names: Folder and names of the shards.
        task: Source and options that decide the bytes.
        encoder: Opens files and encodes values.
    """

    source: Source
    records: Source
    total: int | None
    splits: tuple[str, ...]
    assigned: SplitNumbers | None
    names: ShardNames
    task: Task
    encoder: RecordEncoder

    def split_counts(self) -> list[int]:
        """Return the number of records of each split, if there are several."""
        assert self.assigned is not None  # noqa: S101  (so says the caller)
        return [int(count) for count in np.bincount(self.assigned, minlength=len(self.splits))]

    def iter_from(self, firsts: Mapping[int, int]) -> Iterator[tuple[int, Record]]:
        """Yield the records of some splits in packing order, each with the number of its split.

        Args:
            firsts: Number of each split -> position of its first record among those of the split.

        Raises:
            ChangedError: If there are more or fewer records than when they were assigned to splits.
        """
        assigned = self.assigned
        if assigned is None:
            for record in self.records.iter_from(firsts[0]):
                yield 0, record
            return
        begins = np.full(len(self.splits), len(assigned), dtype=np.int64)
        for split, first in firsts.items():
            begins[split] = _nth(assigned, split, first)
        begin, splits = int(begins.min()), _splits_from(assigned, begins)
        end = len(assigned)
        for record in self.records.iter_some(
            begin, lambda number: number >= end or bool(number >= begins[assigned[number]])
        ):
            assigned_split = next(splits, None)
            if assigned_split is None:
                raise self._changed_error("more")
            yield assigned_split, record
        if next(splits, None) is not None:
            raise self._changed_error("fewer")

    def _changed_error(self, found: str) -> ChangedError:
        return ChangedError(
            f"the source has {found} records than when they were counted for the splits; run this again, with a source that does not change",
            shard=self.source.name,
        )


def _splits_error(splits: Sequence[str], folder: str) -> OptionError:
    """Return the error of an append of several datasets, whose versions could not be published together: others may change each."""
    return OptionError(
        f"append takes one dataset, not the splits {', '.join(splits)}: append the folder of each to its own, such as "
        f"{join_url(folder, splits[0])}. To split new data, pack them elsewhere first, with split= (--split) and the classes of the dataset followed by "
        "new ones (classes=, --classes)",
        shard=folder,
    )


def _split_names(source: Source, split: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the datasets to write; one without a name if there are no splits."""
    if source.splits and split:
        raise OptionError(
            f"the source has splits already: {', '.join(source.splits)}; leave split (--split) out, or pack one of these folders",
            shard=source.name,
        )
    return source.splits or tuple(split) or ("",)


def folder_of_split(names: ShardNames, split: str) -> str:
    """Return the folder of a split; that of the pack without splits."""
    return join_url(names.folder, split) if split else names.folder


def _nth(assigned: SplitNumbers, split: int, count: int) -> int:
    """Return the number of the record of a split that has ``count`` others before it; that of all records if there is none."""
    for start in range(0, len(assigned), _BLOCK):
        found = np.flatnonzero(assigned[start : start + _BLOCK] == split)
        if count < len(found):
            return start + int(found[count])
        count -= len(found)
    return len(assigned)


def _splits_from(assigned: SplitNumbers, begins: Numbers) -> Iterator[int]:
    """Yield the split of each record, in order; of each split only from a number of a record on."""
    for start in range(int(begins.min()), len(assigned), _BLOCK):
        block = assigned[start : start + _BLOCK]
        numbers = np.arange(start, start + len(block))
        yield from block[numbers >= begins[block]].tolist()


def _prefix(source: Source) -> str:
    """Return a text for keys that are running numbers, which those of the dataset may be, too: the same for the same source."""
    identity = source.fingerprint or uuid.uuid4().hex
    return f"{sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}-"


def _plan(source: Source, request: PackRequest, **opened: Any) -> PackPlan:
    """Return the plan of a pack; ``opened`` is the rest of it."""
    shuffle, seed, split = request.shuffle, request.seed, request.split
    records, splits = source, _split_names(source, split)
    if source.shuffled if shuffle is None else shuffle:
        if source.folders:
            raise OptionError(
                "tars cannot be shuffled when they are packed (all samples would have to be in memory); "
                "leave shuffle out: training shuffles when it reads"
            )
        records = ShuffledSource(source, seed=seed)
    elif split and source.length is None and not source.is_repeatable:
        records = source.in_any_order()
    assigned = records.assigned() if source.splits else None
    total = records.length
    if split:
        total = records.count()
        assigned = assign_splits(total, split, seed=seed)
    return PackPlan(
        source=source, records=records, total=total, splits=splits, assigned=assigned, **opened
    )


def split_counts(count: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Return how many of ``count`` samples each split gets: all of them, rounded by the largest remainder.

    >>> split_counts(10, {"train": 0.75, "val": 0.25})
    {'train': 8, 'val': 2}

    Raises:
        OptionError: If the fractions do not make one whole, a name cannot be a folder, or a split would be empty.
    """
    for name, fraction in fractions.items():
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise OptionError(
                f"a split's name must have only letters, digits, '-' and '_', not {name!r}"
            )
        if not 0 < fraction < 1:
            raise OptionError(
                f"the fraction of split {name!r} must be between 0 and 1, not {fraction}"
            )
    if not math.isclose(sum(fractions.values()), 1, abs_tol=1e-6):
        raise OptionError(
            f"the fractions of the splits add up to {sum(fractions.values()):g}, not 1; write for example train=0.9,val=0.1"
        )
    exact = {name: fraction * count for name, fraction in fractions.items()}
    counts = {name: int(part + 1e-9) for name, part in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    empty = next((name for name, size in counts.items() if not size), None)
    if empty is not None:
        raise OptionError(
            f"split {empty!r} would be empty: the source has {plural(count, 'sample')}"
        )
    return counts


def assign_splits(count: int, fractions: Mapping[str, float], *, seed: int) -> SplitNumbers:
    """Return for each record the number of its split, in the order of the fractions; shape (count,).

    Raises:
        OptionError: As `split_counts`.
    """
    counts = list(split_counts(count, fractions).values())
    labels = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    assigned = np.empty(count, dtype=np.uint16)
    first = 0
    for numbers in shuffled_order(count, seed=seed, purpose="split"):
        assigned[numbers] = labels[first : first + len(numbers)]
        first += len(numbers)
    return assigned
