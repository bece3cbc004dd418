"""Scan whole shards for their samples and checksums, several shards at a time."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import BinaryIO, Self, TypeVar, cast

from shardstream.errors import OptionError, WorkerError, plural
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
from shardstream.packing.job.report import Progress, ProgressFunction, logged
from shardstream.packing.shards.column_builder import VALUE_LIMIT_BYTES, ColumnBuilder
from shardstream.process_memory import keep_freed_memory
from shardstream.storage import Cancellation, RangeStream, Storage, is_compressed, map_file
from shardstream.tasks import JSON, Executor, FuturesExecutor, Parts, RetryCount, Task

_REMOTE_READ_BYTES = 8 << 20
# A tenth faster than 8 MiB: the bytes are still in the processor's cache when they are hashed.
DEFAULT_THREADS = 4  # that read tars
_LOCAL_READ_BYTES = 1 << 20
_HEADERS_READ_BYTES = 256 << 10  # at a time, where larger bodies are skipped
OnImage = Callable[[int, str, str, bytes], None]
_Task = TypeVar("_Task", bound=Task)


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

    def add_shard(self, samples: int, failures: int, size_bytes: int = 0) -> None:
        """Count a shard that is done.

        Args:
            samples: Its samples.
            failures: Errors in it.
            size_bytes: Its bytes, unless `add` has counted them.
        """
        self._report(shards=1, samples=samples, failures=failures, size_bytes=size_bytes)

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
        self._stopped = None if meter is None else meter.stopped
        self._hashes = hashes
        self._storage = storage
        self._read: ReadAt
        self._digest = hashlib.sha256()
        self._nbytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        keep_freed_memory()  # reuse the memory of one chunk for the next: a fifth faster
        if not self._hashes:
            self._read = self._open_headers()
            return self
        is_local = self._storage.local_path(self.url) is not None
        self._read_bytes = _LOCAL_READ_BYTES if is_local else _REMOTE_READ_BYTES
        tar = RangeStream(self._storage, self.url, self._size, cancelled=self._stopped)
        source = _TappedStream(tar, self._on_chunk, self._read_bytes)
        stream: Readable = source
        if is_compressed(self.url):
            stream = self._stack.enter_context(
                open_decompressed(cast("BinaryIO", source), shard=self.url)
            )
        self._source = source
        self._read = ForwardReader(stream, chunk_bytes=self._read_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_headers(self) -> ReadAt:
        """Open the tar to read little more than its headers: only their pages of a local file."""
        path = self._storage.local_path(self.url)
        if path is None:
            tar = RangeStream(self._storage, self.url, self._size, cancelled=self._stopped)
            return ForwardReader(tar, chunk_bytes=_HEADERS_READ_BYTES)
        mapped = self._stack.enter_context(closing(map_file(path, self.url)))
        return lambda offset, size: mapped[offset : offset + size]

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
        if columns is not None:
            members = self._take_values(members, columns)
        if on_image is not None:
            members = self._take_images(members, on_image)
        return scan_members(members, shard=self.url)

    def finish(self) -> tuple[str | None, int]:
        """Read the rest of the file; return its sha256 as hex digits, None if nothing is hashed, and its length in bytes."""
        if not self._hashes:
            if self._meter is not None:
                self._meter.add(self._size)
            return None, self._size
        while self._source.read(self._read_bytes):
            pass
        return self._digest.hexdigest(), self._nbytes

    def _keep(self, members: Iterator[Member]) -> Iterator[Member]:
        for member in members:
            self.members.append(member)
            yield member

    def _take_values(self, members: Iterator[Member], columns: ColumnBuilder) -> Iterator[Member]:
        for member in members:
            name, _, start, size = member
            parts = split_member_name(name)
            if parts is not None and not is_meta_name(name) and columns.columns_of(parts[1]):
                data = self._read(start, min(size, VALUE_LIMIT_BYTES + 1))
                columns.add(parts[0], {parts[1]: data})
            yield member

    def _take_images(self, members: Iterator[Member], on_image: OnImage) -> Iterator[Member]:
        for member in members:
            name, offset, start, size = member
            parts = split_member_name(name)
            if parts is not None and not is_meta_name(name) and is_image_field(parts[1]):
                data = self._read(start, size)
                if len(data) == size:  # else the tar is cut, which the scan tells
                    on_image(offset, *parts, data)
            yield member

    def _on_chunk(self, chunk: bytes) -> None:
        if self._meter is not None:
            self._meter.add(len(chunk))
        self._digest.update(chunk)
        self._nbytes += len(chunk)


class _TappedStream:
    """A stream that passes each chunk to a callback, also if a decompressor reads it in small pieces."""

    def __init__(
        self, stream: RangeStream, on_chunk: Callable[[bytes], None], chunk_bytes: int
    ) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._on_chunk = on_chunk
        self._buffer = b""
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        if self._position >= len(self._buffer):
            self._buffer, self._position = self._stream.read(self._chunk_bytes), 0
            if self._buffer:
                self._on_chunk(self._buffer)
        end = len(self._buffer) if size < 0 else self._position + size
        piece = self._buffer[self._position : end]
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


def run_shard_tasks(
    tasks: Sequence[_Task],
    on_result: Callable[[int, Mapping[str, JSON]], None],
    executor: Executor | None,
    *,
    threads: int | None,
    meter: ProgressMeter,
) -> None:
    """Run one task for each shard: all, or those of a part (see `Parts`).

    Args:
        tasks: The tasks, with different names; those with this ``meter`` count their bytes in it.
        on_result: Called with the number of each task and its result, in any order, in this thread; tells the meter of the shard.
        executor: Executor of the tasks; None uses ``threads`` threads of this process.
        threads: By default `DEFAULT_THREADS`; see `check_threads`.
        meter: Stopped at the first error, or an interrupt, so that threads end at their next chunk.

    Raises:
        WorkerError: If the executor has not run all tasks, and is not `Parts`.
    """
    left = {task.name: number for number, task in enumerate(tasks)}

    def done(task: Task, result: Mapping[str, JSON]) -> None:
        number = left.pop(task.name, None)
        if number is None:  # the executor has run it twice
            return
        on_result(number, result)

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
