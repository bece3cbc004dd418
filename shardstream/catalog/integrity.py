"""Detect that the data are not those that were opened: bytes of shards by the sha256 in the manifest, a dataset that was replaced by its manifest.

A store returns the version of a file with each response, so a process detects a shard that changes between two of its reads. It cannot
detect a shard that it reads for the first time after another dataset replaced this one: a process that reads in order would
return old samples and then new ones. So manifests are compared at the end of an epoch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
    get_logger,
    plural,
)
from shardstream.format import Buffer, Manifest, ShardInfo
from shardstream.storage import (
    AdaptiveLimit,
    FileInfo,
    LazyShards,
    SeenManifest,
    Storage,
    folder_of_manifest,
    hints_of,
    join_url,
    read_manifest,
    translate_errors,
    version_url,
)

_log = get_logger(__name__)

Verify = Literal["sha256"]

DIGEST_CHUNK_BYTES = 1 << 20
_WHOLE_READ_BYTES = 4 * DIGEST_CHUNK_BYTES  # per read, while a whole shard is checked
_DIGEST_BYTES = 16
_ATTEMPTS = 4
_RETRY_S = 5.0  # short, because training with all data in the cache must not stop for a server that is down
_UNKNOWN, _CHUNKS_KNOWN, _FILE_KNOWN = range(3)


class _PendingCheck(Future[None]):
    """A shard that is being read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[AdaptiveLimit] = set()
        """Limits of other iterators that wait for this check."""


class VerifiedReader:
    """Read shards and compare them with their checksums; picklable, thread-safe and fork-safe.

    The first access reads a whole shard and compares its sha256. It keeps a digest of each MiB, with which all later reads
    are compared, so later reads are of whole MiB. Digests are in memory that forked processes share (16 bytes for each MiB), so
    workers of the next epoch reuse them; a spawned process starts without digests.

    Bytes that do not match are evicted from the cache and read again.

    Args:
        shards: At least one, each with its sha256 and a length above 0.
        storage: Storage of the shards.

    Raises:
        OptionError: If the manifest lacks a sha256 or a length.
    """

    def __init__(self, shards: Sequence[ShardInfo], storage: Storage) -> None:
        sizes: list[int] = []
        for shard in shards:
            if shard.sha256 is None or shard.filesize is None:
                raise OptionError(
                    "verify='sha256' needs a manifest with the sha256 of each shard",
                    remedy=(
                        "run 'shardstream index' on the folder "
                        "to write one (from the current bytes of the shards)"
                    ),
                    shard=shard.url,
                )
            sizes.append(shard.filesize)
        self._shards, self._storage, self._sizes = tuple(shards), storage, sizes
        self._firsts = [0, *np.cumsum([_chunks(size) for size in sizes]).tolist()]
        self._open_table()

    def __getstate__(self) -> dict[str, Any]:
        not_pickled = ("_state", "_digests", "_pending_checks")
        return {name: value for name, value in self.__dict__.items() if name not in not_pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_table()

    def _open_table(self) -> None:
        # Anonymous and shared: forked processes write to the same pages, and only written pages take memory.
        # At least a byte: a part of a dataset may have no shards, such as a round of deleted samples.
        self._state = mmap.mmap(-1, max(1, len(self._shards)))
        self._digests = mmap.mmap(-1, max(1, self._firsts[-1] * _DIGEST_BYTES))
        # Keyed by process: checks of a parent that were running at the fork do not run in the child.
        self._pending_checks: dict[tuple[int, int], _PendingCheck] = {}

    def read(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes:
        """Return the bytes ``start`` to ``end`` of a shard, checked.

        Args:
            shard: Number of the shard.
            start: Offset of the first byte.
            end: Offset after the last.
            concurrency: Limit to which throttling is reported, and the reads of a whole shard.

        Raises:
            IndexMismatchError: If the bytes do not match the manifest.
            StorageError: If they cannot be read.
        """
        while self._state[shard] != _CHUNKS_KNOWN:
            new_check = _PendingCheck()
            check = self._pending_checks.setdefault((os.getpid(), shard), new_check)
            if check is new_check:
                return self._read_first(shard, start, end, concurrency, new_check)
            if concurrency is not None:
                check.waiting.add(concurrency)
            check.result()  # ends when its reads do
        return self._read_known(shard, start, end, concurrency)

    def knows_file(self, shard: int, path: str) -> bool:
        """Return True if a local file was checked and is unchanged since."""
        return (self._state[shard], self._digest_of(shard, 0)) == (_FILE_KNOWN, _stamp(path))

    def check_file(self, shard: int, path: str, tar: Buffer) -> None:
        """Check a local shard that was just mapped to memory, once for all processes unless the file changes.

        Raises:
            IndexMismatchError: If it does not match the manifest.
        """
        stamp = _stamp(path)
        if (self._state[shard], self._digest_of(shard, 0)) == (_FILE_KNOWN, stamp):
            return
        sha256 = hashlib.sha256(tar).hexdigest()
        if sha256 != self._sha256(shard):
            raise self._mismatch_error(shard, sha256)
        self._store_digests(shard, _FILE_KNOWN, stamp)

    def _read_first(
        self,
        shard: int,
        start: int,
        end: int,
        concurrency: AdaptiveLimit | None,
        check: _PendingCheck,
    ) -> bytes:
        try:
            data = self._read_whole(shard, start, end, concurrency)
        except BaseException as error:
            if concurrency is not None and concurrency.closed.is_set():
                check.set_result(None)  # the read was cancelled: waiting threads start their own
            else:
                check.set_exception(error)
            raise
        else:
            check.set_result(None)
            return data
        finally:
            self._pending_checks.pop((os.getpid(), shard), None)

    def _read_whole(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None
    ) -> bytes:
        """Read a whole shard until it matches or the same wrong bytes come twice; return the wanted bytes."""
        sums_seen: set[str] = set()
        while True:
            sha256, digests, wanted = self._read_digests(shard, start, end, concurrency)
            if sha256 == self._sha256(shard):
                self._store_digests(shard, _CHUNKS_KNOWN, digests)
                return wanted
            self._storage.forget(self._shards[shard].url)
            if sha256 in sums_seen or len(sums_seen) == _ATTEMPTS - 1:
                raise self._mismatch_error(shard, sha256)
            sums_seen.add(sha256)

    def _read_digests(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None
    ) -> tuple[str, bytes, bytes]:
        """Read a shard once; return its sha256, the digests of its chunks and the wanted bytes."""
        size = self._sizes[shard]
        sha256, digests, wanted = hashlib.sha256(), bytearray(), bytearray()
        for low in range(0, size, _WHOLE_READ_BYTES):
            started = time.monotonic()
            data = memoryview(
                self._fetch(shard, low, min(low + _WHOLE_READ_BYTES, size), concurrency)
            )
            if concurrency is not None:
                concurrency.record_response(len(data), time.monotonic() - started)
            for other in tuple(self._pending_checks[os.getpid(), shard].waiting):
                other.record_activity()
            sha256.update(data)
            for position in range(0, len(data), DIGEST_CHUNK_BYTES):
                digests += _digest(data[position : position + DIGEST_CHUNK_BYTES])
            wanted += data[max(start - low, 0) : max(end - low, 0)]
        return sha256.hexdigest(), bytes(digests), bytes(wanted)

    def _read_known(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None
    ) -> bytes:
        """Read from a shard whose chunk digests are known."""
        low, high = self._bounds(shard, start // DIGEST_CHUNK_BYTES, _chunks(end))
        data = self._fetch(shard, low, high, concurrency)
        view = memoryview(data)
        edges = [*range(low, high, DIGEST_CHUNK_BYTES), high]
        mismatched = [
            left
            for left, right in pairwise(edges)
            if _digest(view[left - low : right - low])
            != self._digest_of(shard, left // DIGEST_CHUNK_BYTES)
        ]
        if mismatched:
            corrected = bytearray(data)
            for left in mismatched:
                chunk = self._read_again(shard, left // DIGEST_CHUNK_BYTES, concurrency)
                corrected[left - low : left - low + len(chunk)] = chunk
            data = bytes(corrected)
        return data[start - low : end - low]

    def _read_again(self, shard: int, number: int, concurrency: AdaptiveLimit | None) -> bytes:
        """Read a chunk that did not match again, from its source."""
        low, high = self._bounds(shard, number, number + 1)
        url = self._shards[shard].url
        for _ in range(_ATTEMPTS - 1):
            self._storage.forget(url, low, high)
            data = self._fetch(shard, low, high, concurrency)
            if _digest(data) == self._digest_of(shard, number):
                return data
        self._storage.forget(url, low, high)
        raise IndexMismatchError(
            f"{high - low} bytes differ from those that matched the manifest's sha256 before: they changed in the store or in "
            "transfer",
            remedy="run 'shardstream verify', and write the shard again from its source",
            shard=url,
            offset=low,
        )

    def _fetch(self, shard: int, low: int, high: int, concurrency: AdaptiveLimit | None) -> bytes:
        options = hints_of(concurrency) | {"size": self._sizes[shard]}
        return self._storage.read(self._shards[shard].url, low, high, **options)

    def _bounds(self, shard: int, first: int, last: int) -> tuple[int, int]:
        size = self._sizes[shard]
        return first * DIGEST_CHUNK_BYTES, min(last * DIGEST_CHUNK_BYTES, size)

    def _digest_of(self, shard: int, number: int) -> bytes:
        position = (self._firsts[shard] + number) * _DIGEST_BYTES
        return self._digests[position : position + _DIGEST_BYTES]

    def _store_digests(self, shard: int, state: int, digests: bytes) -> None:
        self._state[shard] = _UNKNOWN
        position = self._firsts[shard] * _DIGEST_BYTES
        self._digests[position : position + len(digests)] = digests
        self._state[shard] = state

    def _sha256(self, shard: int) -> str:
        return (self._shards[shard].sha256 or "").lower()

    def _mismatch_error(self, shard: int, sha256: str) -> IndexMismatchError:
        return IndexMismatchError(
            f"its sha256 is {sha256}, the manifest says {self._sha256(shard)}: the bytes have changed",
            remedy=(
                "run 'shardstream verify', "
                "and write the shard again from its source, or run 'shardstream index' if the change was intended"
            ),
            shard=self._shards[shard].url,
        )


def _stamp(path: str) -> bytes:
    """Return the identity of a local file, which changes when the file is replaced or written to."""
    with translate_errors(path):
        found = os.stat(path)
    identity = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return _digest(identity.encode())


def _chunks(nbytes: int) -> int:
    return -(-nbytes // DIGEST_CHUNK_BYTES)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def check_manifests(
    manifests: Mapping[str, SeenManifest],
    shards: Sequence[ShardInfo],
    storage: Storage,
    *,
    are_lazy: bool,
) -> None:
    """Check that the remote manifests of a dataset still list its shards; warn if a server does not respond.

    A manifest of a later version of the dataset is accepted where this version is kept. Local manifests are not read, except binary ones: local shards are compared
    by their file versions, which those of a binary manifest have from their first use only.

    Args:
        manifests: URL of each manifest -> how it was when the dataset was opened.
        shards: Shards of the dataset when it was opened.
        storage: Storage of the manifests.
        are_lazy: Whether they are `LazyShards`, or some of them.

    Raises:
        ChangedError: If a manifest is missing, or its entry for a shard has changed.
    """
    reading = storage.uncached(max_retry_s=_RETRY_S)
    for url, seen in manifests.items():
        if storage.local_path(url) is not None and not are_lazy:
            continue
        try:
            manifest = _read_changed(url, seen.sha256, reading)
            if manifest is not None:
                manifest = _read_kept(manifest, url, seen.version, reading)
        except NotFoundError as error:
            raise _replaced_error("its manifest is missing", url) from error
        except StorageError as error:
            warnings.warn(
                f"cannot check whether the dataset was replaced during this epoch: {error}",
                UserWarning,
                stacklevel=2,
            )
            continue
        if manifest is None:
            continue
        change = _find_change(shards, manifest, folder_of_manifest(url))
        if change is not None:
            raise _replaced_error(change, url)


def _read_changed(url: str, old_digest: str, storage: Storage) -> Manifest | None:
    """Return a manifest whose bytes have changed; None if they have not.

    Changed bytes are accepted when they are read twice: a single response may have been damaged in transfer.

    Raises:
        ManifestError: If it cannot be parsed in several attempts.
        StorageError: If it is missing or cannot be read.
    """
    file = FileInfo(url=url, size_or_none=None)
    digests_seen: set[str] = set()
    manifest: Manifest | None = None
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            manifest, digest = read_manifest(file, storage)
        except ManifestError:
            if not attempts_left:
                raise
            continue
        if digest == old_digest:
            return None
        if digest in digests_seen:
            return manifest
        digests_seen.add(digest)
    return manifest


def _read_kept(manifest: Manifest, url: str, version: int, storage: Storage) -> Manifest:
    """Return the manifest of the version that was read, if the current one is later and it is kept; else the current one.

    The number alone does not say that it is the same dataset: another one may have replaced it, and have versions of its own.

    Raises:
        StorageError: If it is missing or cannot be read.
    """
    current = manifest.dataset_version
    if current.number <= version or not current.has(version):
        return manifest
    _log.info(
        "%s: version %d was published, this epoch has read version %d",
        url,
        current.number,
        version,
    )
    kept = version_url(folder_of_manifest(url), current, version)
    return read_manifest(FileInfo(url=kept, size_or_none=None), storage)[0]


def _find_change(shards: Sequence[ShardInfo], manifest: Manifest, folder: str) -> str | None:
    """Describe how the shards under a folder differ from a manifest; shards that never had an entry have no sha256."""
    if isinstance(shards, LazyShards) and isinstance(manifest.shards, LazyShards):
        same = shards.has_same_beginning(manifest.shards)
        return None if same else "its manifest lists other shards"
    # Those in the folder, and those of others whose indexes are in it.
    mine = [shard for shard in shards if shard.index_url.startswith(f"{folder}/")]
    if isinstance(manifest.shards, LazyShards):
        found = manifest.shards.find_names(shard.url.removeprefix(f"{folder}/") for shard in mine)
        named = {shard.url: shard for shard in found.values()}
    else:
        named = {join_url(folder, shard.url): shard for shard in manifest.shards}
    others = [shard.url for shard in mine if _has_changed(shard, named.get(shard.url))]
    if not others:
        return None
    return f"{plural(len(others), 'shard')} changed in its manifest, such as {others[0]}"


def _has_changed(old_digest: ShardInfo, now: ShardInfo | None) -> bool:
    if now is None:
        return old_digest.sha256 is not None
    if (old_digest.nsamples, old_digest.filesize) != (now.nsamples, now.filesize):
        return True
    return None not in (old_digest.sha256, now.sha256) and old_digest.sha256 != now.sha256


def _replaced_error(change: str, url: str) -> ChangedError:
    return ChangedError(
        f"the dataset was replaced during this epoch, so the samples read may be of both datasets: {change}",
        remedy="open the dataset again and start the epoch again; write a new dataset to a folder of its own",
        shard=url,
    )
