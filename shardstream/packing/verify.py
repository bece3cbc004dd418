"""Read every byte of a dataset again, and list all problems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from shardstream.catalog import open_headers, open_samples, read_classes
from shardstream.errors import (
    AccessDeniedError,
    ChangedError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
    plural,
    redact,
)
from shardstream.format import (
    FIRST_VERSION,
    KEY_COLUMN,
    MANIFEST_NAME,
    Member,
    Offsets,
    ShardInfo,
    ShardScan,
    columns_in_file,
    decode_column_file,
    decode_index,
    decode_member_index,
    encode_member_index,
    is_records_name,
    is_replaced_name,
    iter_groups,
    iter_members,
)
from shardstream.packing.images import decode_error
from shardstream.packing.job.key_hashes import (
    OTHER_KEYS,
    KeyHashes,
    RepeatedKeys,
    find_repeated_keys,
)
from shardstream.packing.job.report import ProgressFunction
from shardstream.packing.shards.column_builder import ColumnBuilder
from shardstream.packing.shards.shard_scan import (
    Problem,
    ProgressMeter,
    ShardResult,
    ShardScanner,
    check_threads,
    noted,
    scan_shards,
)
from shardstream.storage import (
    LazyShards,
    LocatedShards,
    Storage,
    Urls,
    absolute_url,
    absolute_urls,
    dataset_of_change,
    deleted_by_shard,
    folder_of_manifest,
    is_compressed,
    is_journal,
    is_part,
    is_tar,
    join_url,
    locate_shards,
    parent_url,
)
from shardstream.tasks import JSON, Executor
from shardstream.versions import files_of_versions

_INDEX_AGAIN = "run 'shardstream index' again"
_COLUMNS_AGAIN = "run 'shardstream index --columns' again"
_CHANGED = f"fetch it again, or {_INDEX_AGAIN} if it was changed on purpose"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of `verify`.

    Args:
        shards: Shards of the dataset.
        samples: Samples in those that could be read.
        bytes: Bytes read.
        problems: Errors and warnings, in the order of the shards.
        unchecked: Shards that were not read, because they belong to other parts (see `Parts`).
    """

    shards: int
    samples: int
    bytes: int
    problems: tuple[Problem, ...]
    unchecked: int = 0

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that are not warnings; empty if the dataset is intact."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyShard:
    """The task that checks one tar and the files next to it.

    Args:
        info: The shard, as the manifest or its index describes it.
        has_index: Whether it has an index.
        storage: The storage of the files.
        decode: Whether to decode images.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    info: ShardInfo
    has_index: bool
    storage: Storage
    decode: bool = False
    meter: ProgressMeter | None = None

    @property
    def name(self) -> str:
        """Verb and tar."""
        return f"verify {redact(self.info.url)}"

    def run(self) -> Mapping[str, JSON]:
        """Read the shard; its problems are results, not errors."""
        info, url, problems = self.info, self.info.url, list[Problem]()
        columns_file = self._read(info.columns_url, problems)
        members_file = None if is_compressed(url) else self._read(info.members_url, problems)
        builder = _builder_of(columns_file, info, problems)
        result = ShardResult(
            columns=None if builder is None else [one.spec for one in builder.columns]
        )
        with noted(problems, url), self._open() as shard:
            scan = None
            with noted(problems, url, but=StorageError):
                scan = shard.scan(
                    keep_members=members_file is not None,
                    columns=builder,
                    on_image=partial(_decode, url, problems) if self.decode else None,
                )
                problems += _check_diagnostics(shard, scan)
            sha256, nbytes = shard.finish()
            result = replace(result, nbytes=nbytes, sha256=sha256)
            problems += check_file(info, sha256=sha256 or "", nbytes=nbytes)
            if scan is not None:
                result = result.with_samples(scan)
                problems += check_count(info, len(scan.keys), has_index=self.has_index)
                if self.has_index:
                    with noted(problems, info.index_url):
                        data = self.storage.read_bounded(info.index_url)
                        problems += check_index(data, scan.offsets, url=info.index_url)
                if columns_file is not None and builder is not None:
                    with noted(problems, info.columns_url):
                        read = replace(
                            info, nsamples=len(scan.keys), filesize=nbytes, sha256=sha256
                        )
                        problems += check_columns(columns_file, builder, scan.keys, read)
                if members_file is not None:
                    with noted(problems, info.members_url):
                        problems += check_members(members_file, shard.members, url=info.members_url)
        return replace(result, problems=problems).encode()

    def _open(self) -> ShardScanner:
        url = self.info.url
        return ShardScanner(self.storage, url, self.storage.info(url).size, self.meter)

    def _read(self, url: str, problems: list[Problem]) -> bytes | None:
        """Read a file that may be next to the shard; None if it is missing, or cannot be read."""
        with noted(problems, url), suppress(NotFoundError):
            return self.storage.read_bounded(url)
        return None


def _builder_of(
    columns_file: bytes | None, info: ShardInfo, problems: list[Problem]
) -> ColumnBuilder | None:
    """Return the columns of a file of columns, to be made again; None if there is none, or it cannot be read."""
    # Without pyarrow they cannot be read.
    with noted(problems, info.columns_url), suppress(OptionError):
        if columns_file is not None:
            columns = columns_in_file(columns_file, url=info.columns_url)
            return ColumnBuilder(columns, shard=info.url)
    return None


def verify(  # noqa: PLR0913  (public door)
    urls: Urls,
    *,
    version: int | str | None = None,
    decode: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> VerifyReport:
    """Read a whole dataset again and compare it with its manifest, its indexes and itself.

    Checks of each tar: length and sha256 as in the manifest, valid headers, no links instead of fields, no data after its end,
    count of samples; index, index of members and columns equal to those of a fresh scan. Checks of all: no repeated key, valid class
    names, no tar or half-written file that the manifest does not list, the same columns in all shards, and, if nothing else is wrong,
    the manifest's sums and fields. A bad shard does not stop the verification.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list. Without a manifest there is less to compare with.
        version: Number or tag of a version of the dataset; by default the current one. The files of all versions are known in each case.
        decode: Also decode every image, and list the key of each that cannot be decoded: a file that was cut before it was packed has a valid
            checksum. It costs the time of an epoch; ``executor=LocalExecutor(processes=8)`` uses several cores best.
        storage_options: ``storage_options`` of fsspec.
        filesystem: An fsspec file system to use instead of looking one up by protocol.
        threads: Tars to read at a time, by default 4; each takes about 4 MiB of memory (remote: 32 MiB) and 150 bytes for each of its samples. Each sample of the dataset
            takes 16 bytes of a temporary file (in ``TMPDIR``), which is made from 500,000 samples on.
        progress: Called with a `Progress` after each piece, from the threads that read, one at a time; with an executor after each tar,
            from this thread.
        executor: Executor that reads the tars, instead of ``threads`` threads of this process: e.g. ``LocalExecutor(processes=8)``.
            Storage options travel with the tasks. `Parts` reads a part of the tars: repeated keys are found within it only.

    Raises:
        OptionError: If the list of URLs is empty, or names a shard twice.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is found, or the place cannot be reached, or the temporary folder is full.
        ChangedError: If a shard with a repeated key is replaced during the verification.
        ManifestError: If the manifest is invalid.
    """
    check_threads(threads, executor)
    if executor is not None:  # its processes may have another current folder
        urls = absolute_urls(urls)
    storage = Storage(storage_options, filesystem)
    located = locate_shards(urls, storage, version)
    total = sum(shard.filesize or 0 for shard in located.shards)
    meter = ProgressMeter("verify", total, progress, executor)
    tasks = [
        VerifyShard(
            info=info,
            has_index=info.url in located.indexed,
            storage=storage,
            decode=decode,
            meter=meter if executor is None else None,
        )
        for info in located.shards
    ]
    with closing(KeyHashes()) as keys:
        gone = deleted_by_shard(located)
        results = scan_shards(tasks, keys, executor, threads=threads, meter=meter, left_out=gone)
        repeated = find_repeated_keys(
            keys,
            located.shards,
            lambda shard, samples: _read_keys(located.shards[shard].url, storage, samples),
        )
    again = partial(verify, decode=decode, storage_options=storage_options, filesystem=filesystem)
    problems = [
        *chain.from_iterable(one.problems for one in results.values()),
        *_problems_of_keys(repeated),
        *_problems_of_classes(located, storage),
        *problems_of_versions(located, storage, lambda url: again(url).problems),
        *find_stray_files(located, storage),
        *check_presence({tasks[number].info.url: one.columns for number, one in results.items()}),
    ]
    return _report(located, storage, results, problems)


def _report(
    located: LocatedShards,
    storage: Storage,
    results: Mapping[int, ShardResult],
    problems: Sequence[Problem],
) -> VerifyReport:
    """Return the results of all shards; if nothing is wrong so far, compare the totals."""
    num_shards = len(located.shards)
    report = VerifyReport(
        shards=num_shards,
        samples=sum(one.nsamples or 0 for one in results.values()),
        bytes=sum(one.nbytes for one in results.values()),
        problems=tuple(problems),
        unchecked=num_shards - len(results),
    )
    if report.unchecked or report.errors:
        return report
    fields = sum((Counter(one.fields) for one in results.values()), Counter[str]())
    wrong = _check_totals(located, storage, report, fields)
    return replace(report, problems=(*problems, *wrong))


def _read_keys(url: str, storage: Storage, samples: Sequence[int]) -> list[str]:
    """Read the keys of some samples of a shard, by a pass over its headers: its index may be wrong.

    Raises:
        ChangedError: If the shard has fewer samples.
        ShardStreamError: If it cannot be read.
    """
    with open_headers(url, storage) as (read, end):
        members = iter_members(read, end=end, shard=url)
        keys = [group.key for group in iter_groups(members, shard=url)]
    if samples[-1] >= len(keys):
        raise ChangedError(
            "the shard was replaced while the dataset was verified; verify it again", shard=url
        )
    return [keys[sample] for sample in samples]


def _problems_of_keys(found: RepeatedKeys | None) -> Iterator[Problem]:
    if found is None:
        return
    for one in found.listed:
        yield Problem(shard=one.later, what=str(one), remedy=OTHER_KEYS, key=one.key)
    if found.others:
        yield Problem(
            shard=found.listed[-1].later,
            what=f"{plural(found.others, 'more key')} in two shards",
            remedy="check whether a shard was copied under another name",
        )


def _problems_of_classes(located: LocatedShards, storage: Storage) -> list[Problem]:
    """Read the class names, which readers leave out with a warning where they are invalid."""
    problems, manifest = list[Problem](), located.manifest_url
    for folder in located.folders if manifest is None else (folder_of_manifest(manifest),):
        # S3 denies access to a missing file without the permission to list.
        with noted(problems, folder), suppress(AccessDeniedError):
            read_classes(folder, storage, located.version)
    return problems


def _decode(
    url: str, problems: list[Problem], offset: int, key: str, field: str, data: bytes
) -> None:
    """Append a problem if an image cannot be decoded."""
    cause = decode_error(data)
    if cause is not None:
        problems.append(
            Problem(
                shard=url,
                what=f"the image in the field {field!r} cannot be decoded ({cause})",
                remedy="pack the sample again from a whole file, or without it",
                offset=offset,
                key=key,
            )
        )


def _check_diagnostics(shard: ShardScanner, scan: ShardScan) -> Iterator[Problem]:
    is_loss = shard.diagnostics.has_links_of_samples(scan.keys, scan.fields)
    for finding in shard.diagnostics.findings():
        yield Problem(
            shard=shard.url,
            what=finding.what,
            remedy=finding.remedy,
            offset=finding.offset,
            severity="error" if finding.is_loss and is_loss else "warning",
        )


def _check_totals(
    located: LocatedShards, storage: Storage, report: VerifyReport, fields: Mapping[str, int]
) -> Iterator[Problem]:
    """Compare the totals of the manifest, which may lack them, with those of the tars."""
    if located.manifest_url is None:
        return
    document = json.loads(storage.read_bounded(located.manifest_url))
    found = {"nsamples": report.samples, "total_bytes": report.bytes}
    listed = {name: document.get(name) for name in found}
    if document.get("fields"):
        found |= {f"fields[{name!r}]": count for name, count in fields.items()}
        listed |= {f"fields[{name!r}]": count for name, count in document["fields"].items()}
    replaced = {name for one in (located.version or FIRST_VERSION).replaced for name in one.fields}
    for name in sorted((found.keys() | listed.keys()) - {f"fields[{one!r}]" for one in replaced}):
        if listed.get(name, 0) not in (None, found.get(name, 0)):
            yield Problem(
                shard=located.manifest_url,
                what=f"{name} is {listed.get(name, 0)}, the tars have {found.get(name, 0)}",
                remedy="run 'shardstream index' again",
            )


def check_file(info: ShardInfo, *, sha256: str, nbytes: int) -> Iterator[Problem]:
    """Compare length and sha256 of a file with the manifest."""
    if info.filesize is not None and info.filesize != nbytes:
        yield Problem(
            shard=info.url,
            what=f"{nbytes} bytes, the manifest says {info.filesize}: it was cut or written again",
            remedy=_CHANGED,
        )
    elif info.sha256 is not None and info.sha256.lower() != sha256:
        yield Problem(
            shard=info.url,
            what=f"sha256 is {sha256[:16]}…, the manifest says {info.sha256[:16]}…: some bytes changed",
            remedy=_CHANGED,
        )


def check_count(info: ShardInfo, found: int, *, has_index: bool) -> Iterator[Problem]:
    """Compare the number of samples with the manifest; warn of a missing index."""
    if not has_index and not is_compressed(info.url):
        yield Problem(
            shard=info.url,
            what=f"its index, {info.index_url.rsplit('/', 1)[-1]}, is missing",
            remedy="run 'shardstream index' to read it by number, shuffled and resumed exactly",
            severity="warning",
        )
    if info.nsamples not in (None, found):
        yield Problem(
            shard=info.url,
            what=f"{plural(found, 'sample')}, the manifest or the index says {info.nsamples}",
            remedy=_CHANGED,
        )


def check_index(data: bytes, scanned: Offsets, *, url: str) -> Iterator[Problem]:
    """Compare an index with the offsets that a fresh scan found."""
    index = decode_index(data, url=url)
    if np.array_equal(index, scanned):
        return
    common = min(len(index), len(scanned))
    differing = np.flatnonzero(index[:common] != scanned[:common])
    number = int(differing[0]) if differing.size else common - 1
    indexed_text = f"byte {index[number]}" if differing.size else plural(len(index) - 1, "sample")
    scanned_text = f"byte {scanned[number]}" if differing.size else f"{len(scanned) - 1}"
    yield Problem(
        shard=url,
        what=f"the index is not that of its tar: it says {indexed_text} where a scan finds {scanned_text} (sample {number} of the shard)",
        remedy=_INDEX_AGAIN,
    )


def check_members(data: bytes, members: Sequence[Member], *, url: str) -> Iterator[Problem]:
    """Compare an index of members with the members that a fresh scan found."""
    listed = decode_member_index(data, url=url)
    read = decode_member_index(encode_member_index(members, shard=url))
    for number, (one, other) in enumerate(zip_longest(listed, read)):
        if one != other:
            yield Problem(
                shard=url,
                what=f"it is not that of its tar: sample {number} of the shard has {_shown(other)}, it says {_shown(one)}",
                remedy="run 'shardstream index --members' again",
            )
            return


def check_columns(
    data: bytes, builder: ColumnBuilder, keys: Sequence[str], info: ShardInfo
) -> Iterator[Problem]:
    """Compare a file of columns with the values that a fresh scan found, the first wrong one of each column.

    Args:
        data: The file.
        builder: The values.
        keys: Keys of the samples.
        info: The shard as it was read.
    """
    found = decode_column_file(data, info, None)
    read = decode_column_file(builder.encode(keys, info), info, None)
    if found[KEY_COLUMN] != read[KEY_COLUMN]:
        yield Problem(
            shard=info.columns_url,
            what="the keys are not those of the shard",
            remedy=_COLUMNS_AGAIN,
        )
        return
    for name in [one.name for one in builder.columns if not one.is_computed]:
        values = zip(keys, found[name].to_pylist(), read[name].to_pylist(), strict=True)
        wrong = next((one for one in values if not _is_same(*one[1:])), None)
        if wrong is not None:
            key, listed, value = wrong
            yield Problem(
                shard=info.columns_url,
                what=f"the column {name} says {listed!r:.60}, the sample has {value!r:.60}",
                remedy=_COLUMNS_AGAIN,
                key=key,
            )


def check_presence(columns: Mapping[str, Sequence[str] | None]) -> Iterator[Problem]:
    """Compare the columns of all shards: readers need the same in each.

    Args:
        columns: URL of a shard -> its columns; None if it has no file of columns.
    """
    first = next(((url, found) for url, found in columns.items() if found is not None), None)
    for url, found in columns.items() if first is not None else ():
        if first is not None and found != first[1]:
            listed = (
                "no columns" if found is None else f"the columns {', '.join(found) or 'of keys'}"
            )
            yield Problem(
                shard=url,
                what=f"{listed}, but {first[0]} has {', '.join(first[1]) or 'those of keys'}",
                remedy="run 'shardstream index --columns' on all shards",
            )


def _is_same(one: Any, other: Any) -> bool:
    both_nan = one != one and other != other  # noqa: PLR0124
    return type(one) is type(other) and (one == other or both_nan)


def _shown(members: Sequence[tuple[str, int, int, str]] | None) -> str:
    if members is None:
        return "nothing"
    return ", ".join(f"{field} at byte {start}" for field, start, *_ in members)[:200]


def problems_of_versions(
    located: LocatedShards, storage: Storage, find_problems: Callable[[str], Sequence[Problem]]
) -> list[Problem]:
    """Check the files of all versions of a dataset but their shards, and the datasets that have replaced fields of this one.

    Args:
        located: The shards of a version.
        storage: Their storage.
        find_problems: Returns the problems of another dataset.
    """
    problems, version = list[Problem](), located.version
    if located.manifest_url is None or version is None:
        return problems
    folder = folder_of_manifest(located.manifest_url)
    for number in version.kept_numbers:
        with noted(problems, folder):
            locate_shards(folder, storage, number)
    for url in dict.fromkeys(join_url(folder, one.url) for one in version.replaced):
        with noted(problems, url):
            problems += find_problems(url)
    for one in version.replaced if not problems else ():
        with noted(problems, folder):
            open_samples(located, storage, fields=one.fields)
    return problems


def find_stray_files(located: LocatedShards, storage: Storage) -> Iterator[Problem]:
    """List files of the folder that do not belong to the dataset."""
    url = located.manifest_url or ""
    if not url or is_replaced_name(url.rpartition("/")[2]):  # in the folder of the whole dataset
        return
    folder = absolute_url(folder_of_manifest(url))  # as files are listed
    has_versions = located.version not in (None, FIRST_VERSION)
    known: Container[str]
    if has_versions:
        try:
            known = files_of_versions(folder, storage)
        except ManifestError:  # `problems_of_versions` has it
            return
    else:
        names = {shard.url.rsplit("/", 1)[-1] for shard in located.shards}
        if isinstance(located.shards, LazyShards):
            names.update(one.records for one in located.shards.manifest.files)
        known = names
    files = storage.find(folder) if has_versions else storage.list_folder(folder)[0]
    start = len(join_url(folder, "x")) - 1
    for file in files:
        what, remedy = _describe_stray(file.url, start, known, has_versions=has_versions)
        if what:
            yield Problem(shard=file.url, what=what, remedy=remedy, severity="warning")


def _describe_stray(
    url: str, start: int, known: Container[str], *, has_versions: bool
) -> tuple[str, str]:
    """Return what is wrong with a file of a dataset, and what to do; two empty texts if nothing is.

    Args:
        url: The file.
        start: Where its name relative to the dataset begins.
        known: The names of the files that belong to it.
        has_versions: Whether these are those of several versions.
    """
    name = url[start:]
    remedy = "delete it when no writer is running"
    if is_part(name):
        return "a half-written file of a killed writer", remedy
    if has_versions and name not in known and dataset_of_change(parent_url(url)) is not None:
        return (
            "no version lists it: its writer is running, or was stopped",
            "'shardstream gc' deletes it when it is a day old",
        )
    if is_journal(name):
        return (
            "the journal of a pack or ShardWriter that is running, or was stopped after it had published",
            remedy,
        )
    if is_records_name(name) and name not in known:
        what = f"records of a manifest that {MANIFEST_NAME} does not name, left by a killed writer"
        return what, remedy
    if is_tar(name) and "/" not in name and name not in known:
        what = f"not in {MANIFEST_NAME}, so readers of the folder do not see it"
        if has_versions:
            return what, "delete it"
        return what, "run 'shardstream index' on the folder to include it, or delete it"
    return "", ""
