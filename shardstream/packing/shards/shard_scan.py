"""Scan whole shards for their samples and checksums, several shards at a time."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np

from shardstream.catalog import open_headers
from shardstream.errors import OptionError, ShardStreamError, StorageError, WorkerError, plural
from shardstream.format import (
    ForwardReader,
    Member,
    Readable,
    ReadAt,
    ShardScan,
    TarDiagnostics,
    is_image_field,
    is_meta_name,
    iter_whole,
    open_decompressed,
    scan_members,
    split_member_name,
)
from shardstream.packing.job.key_hashes import (
    KeyHashes,
    decode_hashes,
    encode_hashes,
    hash_keys,
    place_of,
)
from shardstream.packing.job.report import Progress, ProgressFunction, logged
from shardstream.packing.shards.column_builder import ColumnBuilder, ColumnSummary
from shardstream.process import keep_freed_memory
from shardstream.samples import Numbers
from shardstream.storage import Cancellation, FieldFile, RangeStream, Storage, is_compressed
from shardstream.tasks import JSON, Executor, FuturesExecutor, Parts, RetryCount, Task

_REMOTE_READ_BYTES = 8 << 20
DEFAULT_THREADS = 4  # that read tars
# A tenth less processor time than 1 MiB, a fifth less than 8: the bytes are still in the processor's cache when they are hashed.
_LOCAL_READ_BYTES = 256 << 10
_HEAD_BYTES = 64 << 10  # of a member, which come with the bytes around it
_RANGE_BYTES = 64 << 10  # of the rest, at least
_ALIGNED_BYTES = 4 << 10  # parsers also go back a few bytes
_BUFFER_BYTES = 8 << 10  # of libraries that read a header
OnImage = Callable[[int, str, str, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        shard: URL of the shard, or of its index.
        what: Description of the problem.
        remedy: One action; empty if none is known.
        offset: Byte offset in that file.
        key: Key of the sample.
        severity: An error loses or changes samples, or stops a reader; a warning does not.
    """

    shard: str
    what: str
    remedy: str = ""
    offset: int | None = None
    key: str | None = None
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        location = self.shard
        if self.offset is not None:
            location += f", byte {self.offset}"
        if self.key is not None:
            location += f", sample {self.key!r}"
        return f"{location}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


@contextmanager
def noted(
    problems: list[Problem], url: str, *, but: type[ShardStreamError] | None = None
) -> Iterator[None]:
    """Append the error of a block to the problems, by default as one of this file; raise one of the type ``but``."""
    try:
        yield
    except ShardStreamError as error:
        if but is not None and isinstance(error, but):
            raise
        problem = Problem(
            shard=error.shard or url,
            what=error.what,
            remedy=error.remedy,
            offset=error.offset,
            key=error.key,
        )
        problems.append(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """Result of a task that reads one tar.

    Args:
        problems: Findings about it.
        nsamples: Number of its samples; None if they cannot be read.
        nbytes: Bytes read.
        sha256: Hex digits, if the bytes were hashed.
        fields: Number of samples that have each field.
        columns: Columns of its file of columns (``name=source``); None if there is none.
        summary: Number and type of the values of columns.
        key_hashes: Hashes of all keys, in order (see `encode_hashes`).
    """

    problems: Sequence[Problem] = ()
    nsamples: int | None = None
    nbytes: int = 0
    sha256: str | None = None
    fields: Mapping[str, int] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    summary: ColumnSummary = field(default_factory=dict)
    key_hashes: str = ""

    @property
    def errors(self) -> int:
        """Number of problems that are not warnings."""
        return sum(one.severity == "error" for one in self.problems)

    def with_samples(self, scan: ShardScan) -> ShardResult:
        """Return the result with the samples of the shard."""
        hashes = encode_hashes(hash_keys(scan.keys))  # shorter than a million numbers in JSON
        return replace(self, nsamples=len(scan.keys), fields=scan.fields, key_hashes=hashes)

    def encode(self) -> dict[str, JSON]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> ShardResult:
        """Read what `encode` has returned."""
        problems = [Problem(**one) for one in document["problems"]]
        return cls(**{**document, "problems": problems})


class StoppedError(Exception):
    """Raised inside a pass when the whole job is cancelled."""


class ProgressMeter:
    """Counts bytes and shards of all passes for the caller's progress function, and stops them all on demand.

    Args:
        title: Verb of the job, for the log.
        total: Bytes to read.
        progress: Called from several threads, one at a time.
        executor: Its retries are counted.
    """

    def __init__(
        self, title: str, total: int, progress: ProgressFunction | None, executor: Executor | None
    ) -> None:
        self._progress = logged(title, progress)
        self._update = Progress(0, 0, 0, None, total_bytes=total)
        self._retries = RetryCount(executor)
        # Tasks in other processes have no meter that counts their bytes.
        self._counts_bytes_of_shards = executor is not None
        self._lock = threading.Lock()
        self.stopped = Cancellation()

    def add(self, count: int) -> None:
        """Count some bytes.

        Raises:
            StoppedError: After `stop`.
        """
        if self.stopped.is_set():
            raise StoppedError
        self._report(size_bytes=count)

    def add_shard(self, result: ShardResult) -> None:
        """Count a shard that is done."""
        self._report(
            shards=1,
            samples=result.nsamples or 0,
            failures=result.errors,
            size_bytes=result.nbytes * self._counts_bytes_of_shards,
        )

    def stop(self) -> None:
        """Make every pass end at its next chunk, and end the read of a remote one."""
        self.stopped.set()

    def _report(self, **counts: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            before = self._update._asdict()
            after = {name: before[name] + count for name, count in counts.items()}
            self._update = self._update._replace(**after, retries=self._retries.count)
            self._progress(self._update)


class ShardScanner:
    """Reads one tar from its first byte to its last, once; or only its headers, where nothing is hashed.

    Use it as a context manager; call `scan`, then `finish`, which also works after a failed scan.

    Args:
        storage: The storage of the files.
        url: URL of the tar.
        size: Length of the tar in bytes.
        meter: Counts the bytes that are read; None counts nothing.
        hashes: Hash all bytes; else read headers only, of a remote file where bodies are larger than what is read at once (256 KiB).
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        size: int,
        meter: ProgressMeter | None,
        *,
        hashes: bool = True,
    ) -> None:
        self.url = url
        self.members: list[Member] = []
        self.diagnostics = TarDiagnostics()
        """Findings about skipped members and the end of the tar; known after `scan`."""
        self._size = size
        self._meter = meter
        self._hashes = hashes
        self._storage = storage
        self._read: ReadAt
        self._digest = hashlib.sha256()
        self._nbytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        keep_freed_memory()  # reuse the memory of one chunk for the next: a fifth faster
        stopped = None if self._meter is None else self._meter.stopped
        if not self._hashes:
            headers = open_headers(self.url, self._storage, size=self._size, cancelled=stopped)
            self._read, _ = self._stack.enter_context(headers)
            return self
        is_local = self._storage.local_path(self.url) is not None
        chunk_bytes = _LOCAL_READ_BYTES if is_local else _REMOTE_READ_BYTES
        tar = RangeStream(self._storage, self.url, self._size, cancelled=stopped)
        source: Any = _TappedStream(tar, self._on_chunk, chunk_bytes)
        stream = self._stack.enter_context(open_decompressed(source, shard=self.url))
        self._source: Readable = source
        self._read = ForwardReader(stream, chunk_bytes=chunk_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def scan(
        self,
        *,
        keep_members: bool = False,
        columns: ColumnBuilder | None = None,
        on_image: OnImage | None = None,
    ) -> ShardScan:
        """Find the samples, and check that no data that readers would miss follows them.

        Args:
            keep_members: Fill `members`, with 100 to 200 bytes for each.
            columns: Takes the values of its columns.
            on_image: Called with offset, key, field and file of each image.

        Raises:
            ShardError: If the tar is damaged, cut or empty, or another one is appended to it.
            SampleError: If a key or a field is repeated, or a value does not fit its column.
        """
        end = None if is_compressed(self.url) else self._size
        members = iter_whole(self._read, end=end, shard=self.url, diagnostics=self.diagnostics)
        if keep_members:
            members = self._keep(members)
        if columns is not None or on_image is not None:
            members = self._take_bodies(members, columns, on_image)
        return scan_members(members, shard=self.url)

    def finish(self) -> tuple[str | None, int]:
        """Read the rest of the file; return its sha256 as hex digits, None if nothing is hashed, and its length in bytes."""
        if not self._hashes:
            if self._meter is not None:
                self._meter.add(self._size)
            return None, self._size
        while self._source.read(_LOCAL_READ_BYTES):
            pass
        return self._digest.hexdigest(), self._nbytes

    def _keep(self, members: Iterator[Member]) -> Iterator[Member]:
        for member in members:
            self.members.append(member)
            yield member

    def _take_bodies(
        self, members: Iterator[Member], columns: ColumnBuilder | None, on_image: OnImage | None
    ) -> Iterator[Member]:
        """Pass members on, and the bodies of some to ``columns`` and ``on_image``."""
        for member in members:
            name, offset, start, size = member
            parts = split_member_name(name)
            if parts is not None and not is_meta_name(name):
                if columns is not None and columns.takes(parts[1]):
                    columns.add_member(*parts, MemberFile(self._read, self._fetch, start, size))
                if on_image is not None and is_image_field(parts[1]):
                    data = self._read(start, size)
                    if len(data) == size:  # else the tar is cut, which the scan tells
                        on_image(offset, *parts, data)
            yield member

    def _fetch(self, start: int, end: int) -> bytes:
        return self._storage.read(self.url, start, end, size=self._size)

    def _on_chunk(self, chunk: bytes) -> None:
        if self._meter is not None:
            self._meter.add(len(chunk))
        self._digest.update(chunk)
        self._nbytes += len(chunk)


class MemberFile(FieldFile):
    """A field of a tar that is being read from its start to its end.

    Its first bytes come from that pass, as all do if it is read whole; other parts, such as tables at the end of a video, by requests of their own.

    Args:
        read: Reads the tar at growing offsets.
        fetch: Reads any range of it, by one request.
        start: Offset of the first byte in the tar.
        size: Number of bytes.
    """

    def __init__(
        self, read: ReadAt, fetch: Callable[[int, int], bytes], start: int, size: int
    ) -> None:
        super().__init__()
        self.block_bytes = _BUFFER_BYTES
        self._read_at, self._fetch_range = read, fetch
        self._start, self._size = start, size
        self._kept, self._kept_start = b"", 0

    def __getitem__(self, part: slice) -> bytes:
        """Return a part of the bytes.

        Raises:
            StorageError: If they cannot be read.
        """
        start, end, _ = part.indices(self._size)
        if end <= _HEAD_BYTES:
            return self._read_at(self._start, end)[start:]
        if not self._kept_start <= start <= end <= self._kept_start + len(self._kept):
            first = start - start % _ALIGNED_BYTES
            read_end = min(max(end, first + _RANGE_BYTES), self._size)
            try:
                self._kept = self._fetch_range(self._start + first, self._start + read_end)
            except StorageError as error:
                self.failure = error
                raise
            self._kept_start = first
        return self._kept[start - self._kept_start : end - self._kept_start]

    def read(self) -> bytes:
        """Return all bytes."""
        return self._read_at(self._start, self._size)


class _TappedStream:
    """A stream that passes each chunk to a callback, also if a decompressor reads it in small pieces."""

    def __init__(
        self, stream: Readable, on_chunk: Callable[[bytes], None], chunk_bytes: int
    ) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._on_chunk = on_chunk
        self._buffer = b""
        self._position = 0

    def read(self, size: int, /) -> bytes:
        if self._position >= len(self._buffer):
            self._buffer, self._position = self._stream.read(self._chunk_bytes), 0
            if self._buffer:
                self._on_chunk(self._buffer)
        piece = self._buffer[self._position : self._position + size]
        self._position += len(piece)
        return piece

    def seekable(self) -> bool:
        return False


def check_threads(threads: int | None, executor: Executor | None) -> None:
    """Refuse a number of threads that would have no effect.

    Raises:
        OptionError: If it is under 1, or an executor runs the tasks.
    """
    if threads is None:
        return
    if threads < 1:
        raise OptionError(f"threads must be 1 or more, not {threads}")
    if executor is not None:
        raise OptionError(
            "threads (--threads) have no effect with an executor (--processes, --part, --ray), which runs the tasks; leave one out"
        )


def scan_shards(
    tasks: Sequence[Task],
    keys: KeyHashes,
    executor: Executor | None,
    *,
    threads: int | None,
    meter: ProgressMeter,
    left_out: Mapping[int, Numbers] = MappingProxyType({}),
) -> dict[int, ShardResult]:
    """Run one task for each shard, or those of a part (see `Parts`); return number of the shard -> result, in order.

    Args:
        tasks: The tasks, with different names; those with this ``meter`` count their bytes in it. Their results are those of
            `ShardResult.encode`.
        keys: Gets the keys of all shards.
        executor: Executor of the tasks; None uses ``threads`` threads of this process.
        threads: By default `DEFAULT_THREADS`; see `check_threads`.
        meter: Stopped at the first error, or an interrupt, so that threads end at their next chunk.
        left_out: Number of a shard -> numbers of its samples whose keys are left out, shape (n,).

    Raises:
        WorkerError: If the executor has not run all tasks, and is not `Parts`.
    """
    left = {task.name: number for number, task in enumerate(tasks)}
    results: dict[int, ShardResult] = {}

    def done(task: Task, document: Mapping[str, JSON]) -> None:
        number = left.pop(task.name, None)
        if number is None:  # the executor has run it twice
            return
        result = ShardResult.decode(document)
        hashes = decode_hashes(result.key_hashes)
        places = place_of(number, len(hashes))
        gone = left_out.get(number)
        if gone is not None:
            gone = gone[gone < len(hashes)]  # a shard that is missing or cut has fewer keys
            hashes, places = np.delete(hashes, gone), np.delete(places, gone)
        keys.add(hashes, places)
        results[number] = replace(result, key_hashes="")
        meter.add_shard(result)

    if executor is not None:
        executor.run(tasks, done)
    else:
        with ThreadPoolExecutor(
            threads or DEFAULT_THREADS, thread_name_prefix="shardstream-pass"
        ) as pool:
            try:
                FuturesExecutor(pool).run(tasks, done)
            except BaseException:
                meter.stop()  # before the end of the block waits for the threads
                raise
    if left and not isinstance(executor, Parts):
        raise WorkerError(
            f"the executor ended without running {plural(len(left), 'task')}, the first: {next(iter(left))}"
        )
    return dict(sorted(results.items()))
