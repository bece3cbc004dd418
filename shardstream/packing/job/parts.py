"""Cut jobs into parts, write one part, and leave a record of it: a small JSON file in the folder of the dataset."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shardstream.errors import NotFoundError, ShardError, StorageError
from shardstream.format import ShardInfo, member_bytes
from shardstream.packing.job.folder_state import Journal, ShardNames, Task
from shardstream.packing.job.key_hashes import Hashes, encode_hashes
from shardstream.packing.shards.column_builder import ColumnSummary
from shardstream.packing.shards.part_writer import PartResult, PartWriter, Skip, WriterOptions
from shardstream.packing.sources.source import Numbers
from shardstream.storage import (
    FileInfo,
    OutputFolder,
    Storage,
    join_url,
    open_output_folder,
    part_record_name,
)
from shardstream.tasks import JSON

T = TypeVar("T")
Place = tuple[int, int]
"""Numbers of a job and of one of its parts."""

_FILL = 0.9  # of a part that is cut by the mean size: the rest is room for larger samples
_BLOCK_BYTES = 512
_PLAIN_NAME_BYTES = 100  # of a name in a header of one block
_PLAIN_SIZE = 8**11


def cut_by_size(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Numbers:
    """Cut a sequence of sizes into runs of at most ``max_samples`` and ``max_bytes``, each as long as possible.

    Args:
        sizes: The sizes, in arrays of any length.
        max_samples: Maximum length of a run, at least 1.
        max_bytes: Maximum sum of a run; a single size may exceed it.

    Returns:
        The start of each run, and the number of sizes.

    >>> cut_by_size([np.array([2, 2, 2]), np.array([9, 1])], 10, 5).tolist()
    [0, 2, 3, 4, 5]
    """
    return np.array(list(iter_cuts(sizes, max_samples, max_bytes)), dtype=np.int64)


def iter_cuts(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Iterator[int]:
    """Yield what `cut_by_size` returns, each as soon as the sizes that are read so far decide it."""
    yield 0
    passed = 0  # sizes before the last cut
    waiting = np.empty(0, dtype=np.int64)  # sizes after it
    for some in sizes:
        waiting = np.concatenate((waiting, some))
        ends = np.concatenate(([0], np.cumsum(waiting)))
        first = 0
        while True:
            fits = int(np.searchsorted(ends, ends[first] + max_bytes, side="right")) - 1
            last = min(max(fits, first + 1), first + max_samples)
            if last >= len(waiting):  # the run may go on in the next array
                break
            yield passed + last
            first = last
        waiting = waiting[first:]
        passed += first
    yield passed + len(waiting)


def number_parts(
    items: Iterable[tuple[int, T, int]],
    max_items: int,
    max_bytes: float,
    firsts: Sequence[int] = (0,),
) -> Iterator[tuple[Place, T]]:
    """Yield each item with the numbers of its job and of its part; the parts of each job are cut as by `cut_by_size`.

    Args:
        items: The items, each with the number of its job and with its bytes in a shard; one is read at a time.
        max_items: Maximum items of a part, at least 1.
        max_bytes: Maximum bytes of a part; a single item may exceed it.
        firsts: Number of the first part of each job.

    >>> list(number_parts([(0, "a", 2), (1, "a", 2), (0, "b", 3), (0, "b", 3), (1, "c", 9)], 10, 5, [0, 7]))
    [((0, 0), 'a'), ((1, 7), 'a'), ((0, 0), 'b'), ((0, 1), 'b'), ((1, 8), 'c')]
    """
    parts = [*firsts]
    counts, totals = [0] * len(parts), [0] * len(parts)
    for job, item, more in items:
        if counts[job] and (counts[job] >= max_items or totals[job] + more > max_bytes):
            parts[job] += 1
            counts[job] = totals[job] = 0
        counts[job] += 1
        totals[job] += more
        yield (job, parts[job]), item


def fields_bytes(key: str, sizes: Iterable[tuple[str, int]]) -> int:
    """Return how many bytes a sample takes in a tar.

    Args:
        key: Its key.
        sizes: Each field with its length in bytes.

    >>> fields_bytes("a", [("txt", 2), ("jpg", 513)])
    2560
    >>> [fields_bytes("a", [("bin", size)]) - size for size in (8**11 - 512, 8**11)]
    [512, 1536]
    """
    room = _PLAIN_NAME_BYTES - len(key) - 1 if key.isascii() else 0
    total = 0
    for name, size in sizes:
        if len(name) < room and size < _PLAIN_SIZE and name.isascii():
            total += _BLOCK_BYTES + (size + _BLOCK_BYTES - 1 & -_BLOCK_BYTES)
        else:
            total += member_bytes(f"{key}.{name}", size)
    return total


def records_that_fit(mean_bytes: float, max_samples: int, max_bytes: float) -> int:
    """Return how many records make a part of a mean size: 90 % of the limit.

    >>> [records_that_fit(1000.0, limit, 100_000) for limit in (10_000, 50)], records_that_fit(1000.0, 50, 10)
    ([90, 50], 1)
    """
    return min(max_samples, max(1, int(_FILL * max_bytes / max(mean_bytes, 1.0))))


class PartWork(Protocol):
    """The work of one part; picklable if other processes run it, and the same whenever it is run."""

    def write(self, writer: PartWriter) -> PartResult:
        """Write the samples of the part; return what the writer does not count."""


def combine_results(results: Iterable[PartResult]) -> PartResult:
    """Return the results of all parts, in order, as one, without the hashes of their keys."""
    shards: list[ShardInfo] = []
    fields = Counter[str]()
    skipped: list[Skip] = []
    columns: list[ColumnSummary] = []
    column_bytes: list[int] = []
    warnings: list[str] = []
    for one in results:
        shards += one.shards
        fields.update(one.fields)
        skipped += one.skipped
        columns += one.columns
        column_bytes += one.column_bytes
        warnings += one.warnings
    return PartResult(
        shards=tuple(shards),
        fields=fields,
        skipped=tuple(skipped),
        columns=tuple(columns),
        column_bytes=tuple(column_bytes),
        warnings=tuple(dict.fromkeys(warnings)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFiles:
    """The files of one part: its shards, and then its record.

    Args:
        names: Folder of the dataset, as an absolute URL, and names of its shards.
        storage_options: ``storage_options`` of the folder.
        run_id: Identity of the job.
        number: Number of the part, from 0.
        of: Number of parts in the terms of `Parts`, for messages; 0 with other executors.
        limits: Maximum samples and bytes of a shard, and its columns.
        replaces: Whether shards of these names may exist already (see `PartWriter`).
        keeps_keys: Whether the record has the hashes of the keys.
    """

    names: ShardNames
    storage_options: Mapping[str, Any] | None
    run_id: str
    number: int
    of: int
    limits: WriterOptions
    replaces: bool
    keeps_keys: bool

    def check_owner(self, folder: OutputFolder) -> None:
        """Check that the job still owns the folder (see `Journal.check_owner`)."""
        Journal(folder=folder, task=Task(source=None, options={}), run=self.run_id).check_owner()

    def find(self) -> PartResult | None:
        """Return the result of an earlier run of this part, if its shards are in place."""
        try:
            folder = open_output_folder(self.names.folder, self.storage_options)
            found = read_record(folder, part_record_name(self.number), self.run_id)
        except ShardError:  # damaged: the part is run again
            return None
        if found is None:
            return None
        result, storage = found[1], Storage(self.storage_options)

        def look_up(name: str) -> FileInfo | None:
            with suppress(NotFoundError):
                return storage.info(self.names.url(name))
            return None

        return result if result.changed_file(look_up) is None else None

    def open(self, check_owner: Callable[[], None] | None = None) -> OpenPart:
        """Begin to write the part.

        Args:
            check_owner: As of `OutputFolder`; by default that of the part, which is called first.
        """
        folder = open_output_folder(self.names.folder, self.storage_options)
        hashes: list[Hashes] = []
        folder.check_owner = check_owner or partial(self.check_owner, folder)
        if check_owner is None:
            folder.check_owner()
        writer = PartWriter(
            folder,
            self.limits,
            name=partial(self.names.name, self.number),
            replaces=self.replaces,
            add_keys=(lambda some, _: hashes.append(some)) if self.keeps_keys else None,
        )
        return OpenPart(self, folder, writer, hashes)

    def record(self, folder: OutputFolder, result: PartResult) -> None:
        """Record the published shards of the part.

        Raises:
            StorageError: If another run has taken the folder over.
        """
        folder.check_owner()
        document = {"run": self.run_id, "part": self.number, "of": self.of, **asdict(result)}
        name, data = part_record_name(self.number), json.dumps(document).encode()
        folder.write(name, data)
        try:
            folder.check_owner()
        except StorageError:  # taken over in between: the record is no file of the other writer
            if folder.read(name) == data:
                folder.remove(name)
            raise


class OpenPart(NamedTuple):
    """A part that is being written."""

    files: PartFiles
    folder: OutputFolder
    writer: PartWriter
    hashes: list[Hashes]
    """Those of the keys of each shard, if they are kept."""

    def end(self, written: PartResult | None = None) -> PartResult:
        """Wait until all shards are published, then record them, and close the writer; return the whole result."""
        with closing(self.writer) as writer:
            writer.end()
            writer.drain()
            hashes = encode_hashes(np.concatenate(self.hashes)) if self.hashes else ""
            result = replace(writer.result(written), key_hashes=hashes)
            self.files.record(self.folder, result)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """The task of one part: runs it, unless its record says that it is done.

    Args:
        files: Its shards and its record.
        work: Its work.
        keeps_skips: Whether the shards of an earlier run that skipped records are kept.
    """

    files: PartFiles
    work: PartWork
    keeps_skips: bool

    @property
    def name(self) -> str:
        """Number of the part, and the folder."""
        return f"part {self.files.number} of {self.files.names.folder}"

    def run(self) -> Mapping[str, JSON]:
        """Write the shards and the record; a second run changes nothing."""
        files = self.files
        result = files.find()
        is_kept = result is not None and (self.keeps_skips or not result.skipped)
        if result is None or not is_kept:
            part = files.open()
            with closing(part.writer) as writer:
                result = part.end(self.work.write(writer))
        # The hashes are in the record: `publish` compares them.
        return {**asdict(replace(result, key_hashes="")), "kept": is_kept}


def read_record(folder: OutputFolder, name: str, run: str) -> tuple[int, PartResult] | None:
    """Read a record of a part by its name; return the number of parts that it names (see `PartFiles`), and the result.

    Returns:
        None if there is no record of the job.

    Raises:
        ShardError: If it is damaged.
    """
    data = folder.read(name)
    if data is None:
        return None
    try:
        document = json.loads(data)
        if document["run"] != run:
            return None
        return int(document["of"]), PartResult.decode(document)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ShardError(
            f"the record of a part cannot be read ({type(error).__name__}: {error})",
            remedy="run the parts again (finished shards are kept), then merge",
            shard=join_url(folder.url, name),
        ) from error


def missing_parts(files: Mapping[str, FileInfo], parts: int) -> list[int]:
    """Return the numbers of the parts that have no record among some files."""
    return [number for number in range(parts) if part_record_name(number) not in files]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """The job of one dataset, and its destination; its identity is equal in all processes that run a part of it.

    Args:
        kind: Verb of the job, e.g. "reshard".
        title: Description of the source, for reports.
        names: Folder and names of the shards.
        source: Text that changes with the source; None if that is unknown: then a stopped job begins again.
        options: All options that decide the bytes, as JSON values.
        limits: Maximum samples and bytes of a shard, its columns, and the name of the dataset.
        parts: Number of parts, which source and options decide; 0 if it is not known before they are run.
        extras: Small text files that are published with the manifest, by name.
        storage_options: ``storage_options`` of the destination; not part of the identity.
        split: Name of the split; "" without splits.
        call: Identity of this call, of a job whose source has none.
        works: Work of each part, in order, where the parts are not those of a stream.
        skips: Whether records that cannot be packed are skipped; if not, an earlier run that did so is not continued.
        keeps_keys: Whether the keys of the samples are compared when the dataset is published.
    """

    kind: str
    title: str
    names: ShardNames
    source: str | None
    options: Mapping[str, Any]
    limits: WriterOptions
    call: str
    parts: int = 0
    extras: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, Any] | None = None
    split: str = ""
    works: Iterable[PartWork] = ()
    skips: bool = False
    keeps_keys: bool = True

    @property
    def task(self) -> Task:
        """Source and options, for the journal; `merge` needs no more."""
        options = {"job": self.kind, **self.options, "template": self.names.template}
        extras = dict(sorted(self.extras.items()))
        return Task(
            source=self.source, options=options | {"name": self.limits.name, "extras": extras}
        )

    @property
    def run(self) -> str:
        """Identity of the job, 32 hex digits: equal for all its processes."""
        task = self.task
        text = json.dumps([task.source or self.call, dict(task.options)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def new_journal(self) -> Journal:
        """Open the folder; return the journal of the job when it begins, which is not written yet."""
        folder = open_output_folder(self.names.folder, self.storage_options)
        return Journal(folder=folder, task=self.task, parts=self.parts, run=self.run)
