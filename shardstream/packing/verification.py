"""A dataset against itself: every byte of every shard is read again, and every problem listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from shardstream.errors import ShardStreamError, StorageError, plural
from shardstream.format.index import INDEX_SUFFIX, Offsets, ShardScan, decode_index
from shardstream.format.manifest import MANIFEST_NAME, ShardInfo
from shardstream.format.names import split_member_name
from shardstream.format.tar_reader import iter_members
from shardstream.packing.shard_scan import ProgressFunction, ProgressMeter, ShardScanner, run_all
from shardstream.packing.verify_checks import (
    Problem,
    ShardKeys,
    check_file,
    check_index,
    hash_keys,
    problem_from_error,
    repeated_keys,
)
from shardstream.storage.atomic_write import is_part
from shardstream.storage.discover import LocatedShards, Urls, is_compressed, is_tar, locate_shards
from shardstream.storage.journal_marker import is_journal
from shardstream.storage.store import Storage, parent_url


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` read and found.

    Args:
        shards: Shards of the dataset.
        samples: Samples in those that could be read.
        bytes: Bytes read.
        problems: In the order of the shards; errors and warnings.
    """

    shards: int
    samples: int
    bytes: int
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that are no mere warnings; none means that the dataset is sound."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    problems: tuple[Problem, ...]
    keys: ShardKeys | None = None
    nbytes: int = 0


def verify(
    urls: Urls,
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int = 4,
    progress: ProgressFunction | None = None,
) -> VerifyReport:
    """Read a whole dataset again and compare it with its manifest, its indexes and itself.

    Of each tar: length and sha256 as in the manifest, sound headers, no links where fields should be, nothing behind its end, count of samples, index equal
    to a fresh scan. Of all: no key twice, no tar or half-written file beside those of the manifest. It goes on after a bad
    shard.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list. Without a manifest there is less to compare with.
        storage_options: What fsspec takes.
        filesystem: An fsspec file system to use instead of looking one up.
        threads: Tars to read at a time; each takes about 32 MiB of memory, and each sample of the dataset 40 bytes.
        progress: Told bytes done and bytes in all, from the threads that read, one at a time.

    Raises:
        OptionError: If there is nothing to look for.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is there, or the place is out of reach.
        ManifestError: If the manifest cannot be understood.
    """
    storage = Storage(storage_options, filesystem)
    located = locate_shards(urls, storage)
    meter = ProgressMeter(sum(shard.filesize or 0 for shard in located.shards), progress)
    work = partial(_verify_shard, located=located, storage=storage, meter=meter)
    done = run_all(work, located.shards, threads=threads, meter=meter)
    keys = [one.keys for one in done if one.keys is not None]
    repeated = repeated_keys(keys, partial(_read_key, storage))
    problems = chain(*(one.problems for one in done), repeated, _find_stray_files(located, storage))
    return VerifyReport(
        shards=len(located.shards),
        samples=sum(len(one.hashes) for one in keys),
        bytes=sum(one.nbytes for one in done),
        problems=tuple(problems),
    )


def _verify_shard(
    info: ShardInfo, *, located: LocatedShards, storage: Storage, meter: ProgressMeter
) -> _Verified:
    problems: list[Problem] = []
    scan: ShardScan | None = None
    try:
        size = storage.info(info.url).size
        with ShardScanner(storage, info.url, size, meter) as shard:
            try:
                scan = shard.scan()
                problems += _check_notes(shard, scan)
            except StorageError:
                raise
            except ShardStreamError as error:
                problems.append(problem_from_error(error, shard=info.url))
            sha256, nbytes = shard.finish()
    except ShardStreamError as error:  # it cannot be read at all
        return _Verified(problems=(*problems, problem_from_error(error, shard=info.url)))
    problems += check_file(info, sha256=sha256, nbytes=nbytes)
    if scan is None:
        return _Verified(problems=tuple(problems), nbytes=nbytes)
    problems += _check_count(info, scan.offsets, located, storage)
    keys = ShardKeys(info.url, hash_keys(scan.keys), scan.offsets)
    return _Verified(problems=tuple(problems), keys=keys, nbytes=nbytes)


def _check_notes(shard: ShardScanner, scan: ShardScan) -> Iterator[Problem]:
    is_loss = shard.notes.has_links_of_samples(scan.keys, scan.fields)
    for finding in shard.notes.findings():
        yield Problem(
            shard=shard.url,
            what=finding.what,
            remedy=finding.remedy,
            offset=finding.offset,
            severity="error" if finding.is_loss and is_loss else "warning",
        )


def _check_count(
    info: ShardInfo, scanned: Offsets, located: LocatedShards, storage: Storage
) -> Iterator[Problem]:
    """Compare the samples found with the index, and with the manifest."""
    url = info.url + INDEX_SUFFIX
    if info.url in located.indexed:
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
    """List what lies beside the shards and belongs to no dataset."""
    if located.manifest_url is None:
        return
    known = {shard.url.rsplit("/", 1)[-1] for shard in located.shards}
    stray = Problem(shard="", what="", severity="warning")
    for file in storage.list_folder(parent_url(located.manifest_url))[0]:
        name = file.url.rsplit("/", 1)[-1]
        if is_part(name):
            yield replace(
                stray,
                shard=file.url,
                what="a half-written file that a killed writer left behind",
                remedy="delete it when no writer is at work",
            )
        elif is_journal(name):
            yield replace(
                stray,
                shard=file.url,
                what="the journal of a pack or ShardWriter that is at work, or was stopped after it had published",
                remedy="delete it when no writer is at work",
            )
        elif is_tar(name) and name not in known:
            yield replace(
                stray,
                shard=file.url,
                what=f"not in {MANIFEST_NAME}, so readers of the folder do not see it",
                remedy="run 'shardstream index' on the folder to take it in, or delete it",
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
