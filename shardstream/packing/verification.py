"""Read every byte of a dataset again, and list all problems."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from shardstream.errors import ShardStreamError, StorageError, plural, redact
from shardstream.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Offsets,
    ShardInfo,
    ShardScan,
    decode_index,
    iter_members,
    split_member_name,
)
from shardstream.packing.key_hashes import hash_keys
from shardstream.packing.shard_scan import (
    ProgressFunction,
    ProgressMeter,
    ShardScanner,
    run_shard_tasks,
)
from shardstream.packing.verify_checks import (
    Problem,
    ShardKeys,
    check_file,
    check_index,
    find_repeated_keys,
    problem_from_error,
)
from shardstream.storage import (
    LocatedShards,
    Storage,
    Urls,
    absolute_urls,
    is_compressed,
    is_journal,
    is_part,
    is_tar,
    locate_shards,
    parent_url,
)
from shardstream.tasks import JSON, Executor


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
    """The task that checks one tar; the result is its problems, and hashes of its keys.

    Args:
        info: The shard, as the manifest or its index describes it.
        has_index: Whether it has an index.
        storage: The storage of the files.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    info: ShardInfo
    has_index: bool
    storage: Storage
    meter: ProgressMeter | None = None

    @property
    def name(self) -> str:
        """Verb and tar."""
        return f"verify {redact(self.info.url)}"

    def run(self) -> Mapping[str, JSON]:
        """Read the shard; its problems are results, not errors."""
        info, problems = self.info, list[Problem]()
        scan: ShardScan | None = None
        nbytes = 0
        try:
            size = self.storage.info(info.url).size
            with ShardScanner(self.storage, info.url, size, self.meter) as shard:
                try:
                    scan = shard.scan()
                    problems += _check_diagnostics(shard, scan)
                except StorageError:
                    raise
                except ShardStreamError as error:
                    problems.append(problem_from_error(error, shard=info.url))
                sha256, nbytes = shard.finish()
        except ShardStreamError as error:  # it cannot be read at all
            scan = None
            problems.append(problem_from_error(error, shard=info.url))
        else:
            problems += check_file(info, sha256=sha256, nbytes=nbytes)
        keys: JSON = None
        if scan is not None:
            problems += _check_count(info, scan.offsets, self.storage, has_index=self.has_index)
            keys = {  # base64 of bytes: shorter than a million numbers in JSON
                "hashes": b64encode(hash_keys(scan.keys).tobytes()).decode(),
                "offsets": b64encode(scan.offsets.tobytes()).decode(),
            }
        return {"problems": [asdict(one) for one in problems], "keys": keys, "bytes": nbytes}


def verify(
    urls: Urls,
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int = 4,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> VerifyReport:
    """Read a whole dataset again and compare it with its manifest, its indexes and itself.

    Checks of each tar: length and sha256 as in the manifest, valid headers, no links instead of fields, no data after its end,
    count of samples, index equal to a fresh scan. Checks of all: no repeated key, no tar or half-written file that the manifest
    does not list. A bad shard does not stop the verification.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list. Without a manifest there is less to compare with.
        storage_options: ``storage_options`` of fsspec.
        filesystem: An fsspec file system to use instead of looking one up by protocol.
        threads: Tars to read at a time; each takes about 32 MiB of memory, and each sample of the dataset 40 bytes.
        progress: Called with bytes done and bytes in all, from the threads that read, one at a time; with an executor after
            each tar, from this thread.
        executor: Executor that reads the tars, instead of ``threads`` threads of this process: e.g. ``LocalExecutor(processes=8)``.
            Storage options travel with the tasks. `Parts` reads a part of the tars: repeated keys are found within it only.

    Raises:
        OptionError: If the list of URLs is empty.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is found, or the place cannot be reached.
        ManifestError: If the manifest is invalid.
    """
    if executor is not None:  # its processes may have another current folder
        urls = absolute_urls(urls)
    storage = Storage(storage_options, filesystem)
    located = locate_shards(urls, storage)
    meter = ProgressMeter(sum(shard.filesize or 0 for shard in located.shards), progress)
    counted = meter if executor is None else None
    tasks = [
        VerifyShard(
            info=info, has_index=info.url in located.indexed, storage=storage, meter=counted
        )
        for info in located.shards
    ]
    results = run_shard_tasks(tasks, executor, threads=threads, meter=meter)
    keys = [
        _decode_keys(task.info.url, cast("dict[str, str]", result["keys"]))
        for task, result in results.items()
        if result["keys"] is not None
    ]
    problems = chain(
        (
            Problem(**one)
            for result in results.values()
            for one in cast("list[Any]", result["problems"])
        ),
        find_repeated_keys(keys, partial(_read_key, storage)),
        _find_stray_files(located, storage),
    )
    return VerifyReport(
        shards=len(located.shards),
        samples=sum(len(one.hashes) for one in keys),
        bytes=sum(cast("int", result["bytes"]) for result in results.values()),
        problems=tuple(problems),
        unchecked=len(tasks) - len(results),
    )


def _decode_keys(url: str, encoded: Mapping[str, str]) -> ShardKeys:
    hashes = np.frombuffer(b64decode(encoded["hashes"]), dtype=np.uint64)
    return ShardKeys(url, hashes, np.frombuffer(b64decode(encoded["offsets"]), dtype=np.int64))


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


def _check_count(
    info: ShardInfo, scanned: Offsets, storage: Storage, *, has_index: bool
) -> Iterator[Problem]:
    """Compare the samples found with the index, and with the manifest."""
    url = info.url + INDEX_SUFFIX
    if has_index:
        try:
            problem = check_index(decode_index(storage.read(url), url=url), scanned, url=url)
        except ShardStreamError as error:
            problem = problem_from_error(error, shard=url)
        if problem is not None:
            yield problem
    elif not is_compressed(info.url):
        yield Problem(
            shard=info.url,
            what=f"its index, {url.rsplit('/', 1)[-1]}, is missing",
            remedy="run 'shardstream index' to read it by number, shuffled and resumed exactly",
            severity="warning",
        )
    found = len(scanned) - 1
    if info.nsamples not in (None, found):
        yield Problem(
            shard=info.url,
            what=f"{plural(found, 'sample')}, the manifest or the index says {info.nsamples}",
            remedy="fetch it again, or run 'shardstream index' again if it was changed on purpose",
        )


def _find_stray_files(located: LocatedShards, storage: Storage) -> Iterator[Problem]:
    """List files of the folder that do not belong to the dataset."""
    if located.manifest_url is None:
        return
    known = {shard.url.rsplit("/", 1)[-1] for shard in located.shards}
    template = Problem(shard="", what="", severity="warning")
    for file in storage.list_folder(parent_url(located.manifest_url))[0]:
        name = file.url.rsplit("/", 1)[-1]
        if is_part(name):
            yield replace(
                template,
                shard=file.url,
                what="a half-written file of a killed writer",
                remedy="delete it when no writer is running",
            )
        elif is_journal(name):
            yield replace(
                template,
                shard=file.url,
                what="the journal of a pack or ShardWriter that is running, or was stopped after it had published",
                remedy="delete it when no writer is running",
            )
        elif is_tar(name) and name not in known:
            yield replace(
                template,
                shard=file.url,
                what=f"not in {MANIFEST_NAME}, so readers of the folder do not see it",
                remedy="run 'shardstream index' on the folder to include it, or delete it",
            )


def _read_key(storage: Storage, shard: str, start: int, end: int) -> str | None:
    """Read the key of the sample at an offset."""
    if is_compressed(shard):
        return None
    members = iter_members(
        lambda at, size: storage.read(shard, at, at + size), start=start, end=end, shard=shard
    )
    parts = split_member_name(next(members)[0])
    return None if parts is None else parts[0]
