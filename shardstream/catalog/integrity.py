"""Bytes of shards, compared with the sha256 that the manifest has of each: what was flipped on its way or at rest is noticed."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from shardstream.errors import IndexMismatchError, OptionError
from shardstream.format import Buffer, ShardInfo
from shardstream.storage import AdaptiveLimit, Storage, hints_of, translate_errors

Verify = Literal["sha256"]

DIGEST_CHUNK_BYTES = 1 << 20
_WHOLE_READ_BYTES = 4 * DIGEST_CHUNK_BYTES  # of the pass over a whole shard
_DIGEST_BYTES = 16
_ATTEMPTS = 4
_UNKNOWN, _CHUNKS_KNOWN, _FILE_KNOWN = range(3)


class _PendingCheck(Future[None]):
    """A shard that is being read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[AdaptiveLimit] = set()
        """Of other iterators, which wait for the end of this."""


class VerifiedReader:
    """Reads shards that have been compared with their checksums; picklable, safe among threads and forked processes.

    A shard is read whole once, and its sha256 compared. What is kept of it is a digest of each MiB, with which all later reads
    are compared; so those are of whole MiB. Digests lie in memory that processes share from the fork on (16 bytes for each MiB), so
    workers of the next epoch have those of this one; a spawned process begins anew.

    A wrong answer is asked for again, and thrown out of the cache, if it came from there.

    Args:
        shards: At least one, each with its sha256 and its length, which is not 0.
        storage: Where they are.

    Raises:
        OptionError: If the manifest does not have those.
    """

    def __init__(self, shards: Sequence[ShardInfo], storage: Storage) -> None:
        sizes: list[int] = []
        for shard in shards:
            if shard.sha256 is None or shard.filesize is None:
                raise OptionError(
                    "verify='sha256' needs a manifest with the sha256 of each shard",
                    remedy=(
                        "run 'shardstream index' on the folder "
                        "to write one (it takes the shards as they are now)"
                    ),
                    shard=shard.url,
                )
            sizes.append(shard.filesize)
        self._shards, self._storage, self._sizes = tuple(shards), storage, sizes
        self._firsts = [0, *np.cumsum([_chunks(size) for size in sizes]).tolist()]
        self._open_table()

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_state", "_digests", "_pending_checks")
        return {name: value for name, value in self.__dict__.items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_table()

    def _open_table(self) -> None:
        # Anonymous and shared: a forked process writes to the same pages, and only those that are written to take memory.
        self._state = mmap.mmap(-1, len(self._shards))
        self._digests = mmap.mmap(-1, self._firsts[-1] * _DIGEST_BYTES)
        # By process, too: what a parent was at when it forked goes on there, not here.
        self._pending_checks: dict[tuple[int, int], _PendingCheck] = {}

    def read(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes:
        """Return the bytes ``start`` to ``end`` of a shard, checked.

        Args:
            shard: Its number.
            start: Offset of the first byte.
            end: Offset behind the last.
            concurrency: Told of throttling, and of what comes while the shard is read whole.

        Raises:
            IndexMismatchError: If the bytes are not those of the manifest.
            StorageError: If they are out of reach.
        """
        while self._state[shard] != _CHUNKS_KNOWN:
            mine = _PendingCheck()
            check = self._pending_checks.setdefault((os.getpid(), shard), mine)
            if check is mine:
                return self._read_first(shard, start, end, concurrency, mine)
            if concurrency is not None:
                check.waiting.add(concurrency)
            check.result()  # ends when its reads do
        return self._read_known(shard, start, end, concurrency)

    def knows_file(self, shard: int, path: str) -> bool:
        """Tell whether a local file is the one that a shard was found in, and unchanged since."""
        return (self._state[shard], self._digest_of(shard, 0)) == (_FILE_KNOWN, _stamp(path))

    def check_file(self, shard: int, path: str, tar: Buffer) -> None:
        """Compare a local shard that was just mapped to memory; once for all processes, unless the file is changed.

        Raises:
            IndexMismatchError: If it is not that of the manifest.
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
                check.set_result(None)  # it was given up: who waits reads for itself
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
        """Read all of a shard, until it fits or the same wrong bytes come twice; return what is wanted of it."""
        seen: set[str] = set()
        while True:
            sha256, digests, wanted = self._read_digests(shard, start, end, concurrency)
            if sha256 == self._sha256(shard):
                self._store_digests(shard, _CHUNKS_KNOWN, digests)
                return wanted
            self._storage.forget(self._shards[shard].url)
            if sha256 in seen or len(seen) == _ATTEMPTS - 1:
                raise self._mismatch_error(shard, sha256)
            seen.add(sha256)

    def _read_digests(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None
    ) -> tuple[str, bytes, bytes]:
        """Read a shard once; return its sha256, the digests of its chunks and the wanted bytes."""
        size = self._sizes[shard]
        sha256, digests, wanted = hashlib.sha256(), bytearray(), bytearray()
        for low in range(0, size, _WHOLE_READ_BYTES):
            begin = time.monotonic()
            data = memoryview(
                self._fetch(shard, low, min(low + _WHOLE_READ_BYTES, size), concurrency)
            )
            if concurrency is not None:
                concurrency.record_response(len(data), time.monotonic() - begin)
            for other in tuple(self._pending_checks[os.getpid(), shard].waiting):
                other.record_activity()
            sha256.update(data)
            for at in range(0, len(data), DIGEST_CHUNK_BYTES):
                digests += _digest(data[at : at + DIGEST_CHUNK_BYTES])
            wanted += data[max(start - low, 0) : max(end - low, 0)]
        return sha256.hexdigest(), bytes(digests), bytes(wanted)

    def _read_known(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None
    ) -> bytes:
        """Read of a shard whose chunks are known."""
        low, high = self._bounds(shard, start // DIGEST_CHUNK_BYTES, _chunks(end))
        data = self._fetch(shard, low, high, concurrency)
        view = memoryview(data)
        edges = [*range(low, high, DIGEST_CHUNK_BYTES), high]
        bad = [
            left
            for left, right in pairwise(edges)
            if _digest(view[left - low : right - low])
            != self._digest_of(shard, left // DIGEST_CHUNK_BYTES)
        ]
        if bad:
            mended = bytearray(data)
            for left in bad:
                chunk = self._read_again(shard, left // DIGEST_CHUNK_BYTES, concurrency)
                mended[left - low : left - low + len(chunk)] = chunk
            data = bytes(mended)
        return data[start - low : end - low]

    def _read_again(self, shard: int, number: int, concurrency: AdaptiveLimit | None) -> bytes:
        """Read a chunk from its source that did not come as it was."""
        low, high = self._bounds(shard, number, number + 1)
        url = self._shards[shard].url
        for _ in range(_ATTEMPTS - 1):
            self._storage.forget(url, low, high)
            data = self._fetch(shard, low, high, concurrency)
            if _digest(data) == self._digest_of(shard, number):
                return data
        self._storage.forget(url, low, high)
        raise IndexMismatchError(
            f"{high - low} bytes are not those that fitted the manifest's sha256 before: they changed in the store or on the "
            "way",
            remedy="run 'shardstream verify', and write the shard again from its source",
            shard=url,
            offset=low,
        )

    def _fetch(self, shard: int, low: int, high: int, concurrency: AdaptiveLimit | None) -> bytes:
        told = hints_of(concurrency) | {"size": self._sizes[shard]}
        return self._storage.read(self._shards[shard].url, low, high, **told)

    def _bounds(self, shard: int, first: int, last: int) -> tuple[int, int]:
        size = self._sizes[shard]
        return first * DIGEST_CHUNK_BYTES, min(last * DIGEST_CHUNK_BYTES, size)

    def _digest_of(self, shard: int, number: int) -> bytes:
        at = (self._firsts[shard] + number) * _DIGEST_BYTES
        return self._digests[at : at + _DIGEST_BYTES]

    def _store_digests(self, shard: int, state: int, digests: bytes) -> None:
        self._state[shard] = _UNKNOWN
        at = self._firsts[shard] * _DIGEST_BYTES
        self._digests[at : at + len(digests)] = digests
        self._state[shard] = state

    def _sha256(self, shard: int) -> str:
        return (self._shards[shard].sha256 or "").lower()

    def _mismatch_error(self, shard: int, sha256: str) -> IndexMismatchError:
        return IndexMismatchError(
            f"its sha256 is {sha256}, the manifest says {self._sha256(shard)}: bytes of it have changed",
            remedy=(
                "run 'shardstream verify', "
                "and write it again from its source, or run 'shardstream index' if it was changed on purpose"
            ),
            shard=self._shards[shard].url,
        )


def open_verified_reader(
    verify: Verify | None, shards: Sequence[ShardInfo], storage: Storage
) -> VerifiedReader | None:
    """Open what an option asks for; None if it asks for nothing.

    Raises:
        OptionError: If it makes no sense, or the manifest has no checksums.
    """
    if verify is None:
        return None
    if verify != "sha256":
        raise OptionError(f"verify is 'sha256' or None, not {verify!r}")
    return VerifiedReader(shards, storage)


def _stamp(path: str) -> bytes:
    """Return what tells a local file from the one that was there before."""
    with translate_errors(path):
        found = os.stat(path)
    identity = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return _digest(identity.encode())


def _chunks(nbytes: int) -> int:
    return -(-nbytes // DIGEST_CHUNK_BYTES)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
