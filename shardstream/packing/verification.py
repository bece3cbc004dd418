"""Read every byte of a dataset again, and list all problems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

from shardstream.errors import (
    ChangedError,
    ShardStreamError,
    StorageError,
    plural,
    redact,
)
from shardstream.format import (
    MANIFEST_NAME,
    Offsets,
    ShardInfo,
    ShardScan,
    decode_index,
    is_pages_name,
)
from shardstream.packing.images import decode_error
from shardstream.packing.job.key_hashes import (
    OTHER_KEYS,
    KeyHashes,
    RepeatedKeys,
    decode_hashes,
    encode_hashes,
    find_repeated_keys,
    hash_keys,
    place_of,
)
from shardstream.packing.job.report import ProgressFunction
from shardstream.packing.shards.column_builder import columns_identity
from shardstream.packing.shards.shard_scan import (
    ProgressMeter,
    ShardScanner,
    check_threads,
    run_shard_tasks,
)
from shardstream.packing.verify_checks import (
    Problem,
    check_file,
    check_index,
    problem_from_error,
)
from shardstream.packing.verify_extras import ExtraFiles, check_presence
from shardstream.storage import (
    LocatedShards,
    PagedShards,
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
    """The task that checks one tar; the result is its problems, and 8 bytes for each key.

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
        info, problems = self.info, list[Problem]()
        extras = ExtraFiles(info, self.storage)
        scan, sha256, nbytes = self._scan(extras, problems)
        hashes: JSON = None
        if scan is not None:
            bad = _check_index(info, scan.offsets, self.storage) if self.has_index else None
            problems += [] if bad is None else [bad]
            read = replace(info, nsamples=len(scan.keys), filesize=nbytes, sha256=sha256)
            problems += chain(
                _check_count(info, scan.offsets, has_index=self.has_index), extras.check(read, scan)
            )
            # Base64 of bytes: shorter than a million numbers in JSON.
            hashes = encode_hashes(hash_keys(scan.keys))
        return {
            "problems": [asdict(one) for one in problems],
            "hashes": hashes,
            "bytes": nbytes,
            "fields": {} if scan is None else dict(scan.fields),
            "columns": columns_identity(extras.columns),
        }

    def _scan(
        self, extras: ExtraFiles, problems: list[Problem]
    ) -> tuple[ShardScan | None, str, int]:
        """Return the samples (None if they cannot be read), and SHA-256 and length of the tar."""
        url = self.info.url
        scan: ShardScan | None = None
        try:
            size = self.storage.info(url).size
            with ShardScanner(self.storage, url, size, self.meter) as shard:
                try:
                    scan = shard.scan(
                        keep_members=extras.has_members,
                        columns=extras.builder,
                        on_image=partial(_decode, url, problems) if self.decode else None,
                    )
                    extras.members = shard.members
                    problems += _check_diagnostics(shard, scan)
                except StorageError:
                    raise
                except ShardStreamError as error:
                    problems.append(problem_from_error(error, shard=url))
                sha256, nbytes = cast("tuple[str, int]", shard.finish())  # all bytes are hashed
        except ShardStreamError as error:  # it cannot be read at all
            problems.append(problem_from_error(error, shard=url))
            return None, "", 0
        problems += check_file(self.info, sha256=sha256, nbytes=nbytes)
        return scan, sha256, nbytes


def verify(  # noqa: PLR0913  (public door)
    urls: Urls,
    *,
    decode: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> VerifyReport:
    """Read a whole dataset again and compare it with its manifest, its indexes and itself.

    Checks of each tar: length and sha256 as in the manifest, valid headers, no links instead of fields, no data after its end,
    count of samples; index, index of members and columns equal to those of a fresh scan. Checks of all: no repeated key, no tar or
    half-written file that the manifest does not list, the same columns in all shards, and, if nothing else is wrong, the manifest's
    sums and fields. A bad shard does not stop the verification.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list. Without a manifest there is less to compare with.
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
    located = locate_shards(urls, storage)
    total = sum(shard.filesize or 0 for shard in located.shards)
    meter = ProgressMeter("verify", total, progress, executor)
    counted = meter if executor is None else None
    tasks = [
        VerifyShard(
            info=info,
            has_index=info.url in located.indexed,
            storage=storage,
            decode=decode,
            meter=counted,
        )
        for info in located.shards
    ]
    with KeyHashes() as keys:
        all_results = _Results(keys)

        def count(number: int, result: Mapping[str, JSON]) -> None:
            before = keys.count
            all_results.add(number, result)
            errors = sum(one.severity == "error" for one in all_results.problems[number])
            # Tasks in other processes have no meter that counts their bytes.
            size_bytes = 0 if executor is None else cast("int", result["bytes"])
            meter.add_shard(keys.count - before, errors, size_bytes)

        run_shard_tasks(tasks, count, executor, threads=threads, meter=meter)
        columns = all_results.columns
        found = [
            *chain.from_iterable(one for _, one in sorted(all_results.problems.items())),
            *_problems_of_keys(
                find_repeated_keys(keys, located.shards, partial(_read_keys, located, storage))
            ),
            *_find_stray_files(located, storage),
            *check_presence({tasks[one].info.url: columns[one] for one in sorted(columns)}),
        ]
        unchecked = len(tasks) - len(all_results.problems)
        if not unchecked and not any(one.severity == "error" for one in found):
            found += _check_totals(located, storage, all_results)
        return VerifyReport(
            shards=len(located.shards),
            samples=keys.count,
            bytes=all_results.nbytes,
            problems=tuple(found),
            unchecked=unchecked,
        )


class _Results:
    """What the tasks have found, by the number of the shard."""

    def __init__(self, keys: KeyHashes) -> None:
        self.keys = keys
        self.problems: dict[int, list[Problem]] = {}
        self.columns: dict[int, Sequence[str] | None] = {}
        self.fields = Counter[str]()
        self.nbytes = 0

    def add(self, number: int, result: Mapping[str, JSON]) -> None:
        """Take the result of a shard."""
        self.problems[number] = [Problem(**one) for one in cast("list[Any]", result["problems"])]
        self.columns[number] = cast("list[str] | None", result["columns"])
        self.fields.update(cast("dict[str, int]", result["fields"]))
        self.nbytes += cast("int", result["bytes"])
        if result["hashes"] is not None:
            hashes = decode_hashes(cast("str", result["hashes"]))
            self.keys.add(hashes, place_of(number, len(hashes)))


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


def _check_index(info: ShardInfo, scanned: Offsets, storage: Storage) -> Problem | None:
    """Compare the samples found with the index."""
    url = info.index_url
    try:
        return check_index(decode_index(storage.read_bounded(url), url=url), scanned, url=url)
    except ShardStreamError as error:
        return problem_from_error(error, shard=url)


def _check_count(info: ShardInfo, scanned: Offsets, *, has_index: bool) -> Iterator[Problem]:
    """Compare the number of samples with the manifest; warn of a missing index."""
    url = info.index_url
    if not has_index and not is_compressed(info.url):
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


def _check_totals(located: LocatedShards, storage: Storage, results: _Results) -> Iterator[Problem]:
    """Compare the totals of the manifest, which may lack them, with those of the tars."""
    if located.manifest_url is None:
        return
    document = json.loads(storage.read_bounded(located.manifest_url))
    found = {"nsamples": results.keys.count, "total_bytes": results.nbytes}
    listed = {name: document.get(name) for name in found}
    if document.get("fields"):
        found |= {f"fields[{name!r}]": count for name, count in results.fields.items()}
        listed |= {f"fields[{name!r}]": count for name, count in document["fields"].items()}
    for name in sorted(found.keys() | listed.keys()):
        if listed.get(name, 0) not in (None, found.get(name, 0)):
            yield Problem(
                shard=located.manifest_url,
                what=f"{name} is {listed.get(name, 0)}, the tars have {found.get(name, 0)}",
                remedy="run 'shardstream index' again",
            )


def _find_stray_files(located: LocatedShards, storage: Storage) -> Iterator[Problem]:
    """List files of the folder that do not belong to the dataset."""
    if located.manifest_url is None:
        return
    known = {shard.url.rsplit("/", 1)[-1] for shard in located.shards}
    pages = located.shards.manifest.pages_name if isinstance(located.shards, PagedShards) else None
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
        elif is_pages_name(name) and name != pages:
            yield replace(
                template,
                shard=file.url,
                what=f"pages of a manifest that {MANIFEST_NAME} does not name, left by a killed writer",
                remedy="delete it when no writer is running",
            )
        elif is_tar(name) and name not in known:
            yield replace(
                template,
                shard=file.url,
                what=f"not in {MANIFEST_NAME}, so readers of the folder do not see it",
                remedy="run 'shardstream index' on the folder to include it, or delete it",
            )


def _read_keys(
    located: LocatedShards, storage: Storage, number: int, samples: Sequence[int]
) -> list[str]:
    """Read the keys of some samples of a shard, by another pass over it.

    Raises:
        ChangedError: If the shard has fewer samples than before.
        ShardStreamError: If it can no longer be read.
    """
    url = located.shards[number].url
    size = storage.info(url).size
    with ShardScanner(storage, url, size, None, hashes=is_compressed(url)) as shard:
        keys = shard.scan().keys
    if samples[-1] >= len(keys):
        raise ChangedError(
            "the shard was replaced while the dataset was verified; verify it again", shard=url
        )
    return [keys[sample] for sample in samples]


def _problems_of_keys(found: RepeatedKeys) -> Iterator[Problem]:
    for one in found.listed:
        yield Problem(shard=one.later, what=str(one), remedy=OTHER_KEYS, key=one.key)
    if found.others:
        yield Problem(
            shard=found.listed[-1].later,
            what=f"{plural(found.others, 'more key')} in two shards",
            remedy="check whether a shard was copied under another name",
        )
