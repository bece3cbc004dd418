"""A cache of chunks of remote files on a local disk, kept across epochs and processes.

A file is identified by its URL and its version (the ETag, else length and modification time), so a file that was replaced is read
again. A chunk that is missing, damaged or of another file is read from its source. Chunks are written under a temporary name and
renamed, so a partial chunk is never read; a process that is killed leaves a part that a later one deletes.

A chunk is a header and up to 1 MiB of data. The header, little-endian, has the magic, the name of the chunk (16 bytes), its length, the
CRC-32 of each 64 KiB page, and the CRC-32 of the header. Pages are checked one by one, so a small sample does not pay for a chunk.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, cast

from shardstream.errors import CacheWarning, OptionError, get_logger, parse_bytes, redact
from shardstream.storage.cache_space import (
    CacheSpace,
    on_disk,
    open_record,
    record_bytes,
    seal_record,
)
from shardstream.storage.response import plain_etag

_log = get_logger(__name__)

_PAGE_BYTES = 64 << 10
_PAGES = 16
CACHE_CHUNK_BYTES = _PAGES * _PAGE_BYTES
"""Large enough that opening a chunk costs little, small enough that few bytes are read around a range."""
_HEAD = struct.Struct(f"<8s16sI{_PAGES}I")
HEADER_BYTES = record_bytes(_HEAD)
_local = threading.local()

_MIN_BYTES = 4 * CACHE_CHUNK_BYTES
_NAME_BYTES = 16

ReadRange = Callable[[int, int | None], bytes | memoryview]


# The names that fsspec file systems use; digests of the bytes first.
_ETAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_hash", "sha", "blob_id")
_TIMES = (
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "modified",
    "modify",  # FTP
    "updated",
    "created",
)


def version_of(entry: Mapping[str, Any]) -> str | None:
    """Return the version of a file from an entry of an fsspec listing; None if it has none.

    >>> version_of({"size": 3, "ETag": "9a0364b9"}), version_of({"size": 3, "mtime": 12.5}), version_of({"size": 3})
    ('ETag 9a0364b9', 'mtime 12.5', None)
    """
    if generation := entry.get("generation"):  # Google's listings have other ETags than its files
        return f"generation {generation}"
    for name in _ETAGS:
        if entry.get(name):
            return f"ETag {entry[name]}"
    for name in _TIMES:
        if time := entry.get(name):
            # Some file systems list seconds, but look up a datetime.
            return f"{name} {time.timestamp() if isinstance(time, datetime) else time}"
    return None


def time_of(entry: Mapping[str, Any]) -> float | None:
    """Return when a file was written, from an entry of an fsspec listing, in seconds by the clock of the store; None if it has no such time.

    >>> time_of({"size": 3, "mtime": 12.5}), time_of({"size": 3})
    (12.5, None)
    """
    time = next((entry[name] for name in _TIMES if entry.get(name)), None)
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, int | float) else None


class FileRecord(NamedTuple):
    """Length and version of a remote file.

    Args:
        size: Length in bytes.
        identity: Digest of URL, version and length; None if the version is unknown.
        etag: ETag without quotes, if there is one.
    """

    size: int
    identity: bytes | None
    etag: str | None


class Cache:
    """Reads ranges of remote files through chunks on a local disk; picklable, safe with threads and processes.

    Args:
        folder: A folder on a local disk; created if missing, accessible to this user only.
        max_bytes: Limit of the bytes of all processes that use the folder; None leaves a tenth of the disk free.

    Raises:
        OptionError: If the folder is a file, or the cache in it is a link, belongs to another user, or can be written by others.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self._space = CacheSpace(folder, max_bytes)
        self._known: dict[str, FileRecord] = {}
        self._warned = False

    def record(self, url: str, size: int, version: str | None) -> FileRecord:
        """Record length and version of a file from a listing, for the life of this object."""
        identity = None
        if version is not None:
            # An ETag identifies the bytes; the signature in a query changes.
            place = redact(url) if version.startswith("ETag") else url
            # Azure quotes ETags in headers, but not in listings.
            text = "\0".join((place, version.replace('"', ""), str(size)))
            identity = hashlib.blake2b(text.encode(), digest_size=_NAME_BYTES).digest()
        kind, _, value = (version or "").partition(" ")
        known = self._known[url] = FileRecord(
            size, identity, plain_etag(value) if kind == "ETag" else None
        )
        return known

    def etag(self, url: str) -> str | None:
        """Return the recorded ETag of a file."""
        return self._known[url].etag if url in self._known else None

    def read(  # noqa: PLR0913  (hints of the caller)
        self,
        url: str,
        start: int,
        end: int | None,
        *,
        size: int | None = None,
        max_bytes: int | None = None,
        read: ReadRange,
        look_up: Callable[[], object],
    ) -> bytes | memoryview:
        """Return the bytes ``start`` to ``end`` of a remote file, or to its end.

        Args:
            url: The file.
            start: Offset of the first byte.
            end: Offset after the last byte; None is the end of the file.
            size: Length of the file, if the caller knows it.
            max_bytes: Bytes that are needed of a file that is read to its end.
            read: Reads a range from the source.
            look_up: Looks up a file that was not listed, which calls `record`.
        """
        if url not in self._known:
            look_up()
        known = self._known.get(url)
        if known is None or known.identity is None:
            self._warn_no_version(url)
            return read(start, end)
        # A file of another size is not the one that the caller means: the source raises the error.
        if size not in (None, known.size):
            return read(start, end)
        size, identity = known.size, known.identity
        end = _end(start, end, size, max_bytes)
        if not start < end <= size:  # past the end: the source raises the error
            return read(start, end)
        file = _CachedFile(self._space, identity, size)
        numbers = range(start // CACHE_CHUNK_BYTES, -(-end // CACHE_CHUNK_BYTES))
        out = io.BytesIO()
        gap_start: int | None = None
        for number in numbers:
            piece = file.read_cached(number, start, end)
            if piece is None:
                gap_start = number if gap_start is None else gap_start
                continue
            if gap_start is not None:
                out.write(file.read_source(gap_start, number, start, end, read))
                gap_start = None
            out.write(piece)
        if gap_start == numbers.start:  # no chunk was in the cache
            return bytes(file.read_source(gap_start, numbers.stop, start, end, read))
        if gap_start is not None:
            out.write(file.read_source(gap_start, numbers.stop, start, end, read))
        return out.getvalue()

    def forget(self, url: str, start: int = 0, end: int | None = None) -> None:
        """Delete the chunks with any of the bytes ``start`` to ``end``, which are damaged."""
        size, identity, _ = self._known.get(url, FileRecord(0, None, None))
        if identity is not None:
            file = _CachedFile(self._space, identity, size)
            for number in range(
                start // CACHE_CHUNK_BYTES, -(-(size if end is None else end) // CACHE_CHUNK_BYTES)
            ):
                file.delete_chunk(number)

    def _warn_no_version(self, url: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{redact(url)} is not cached: its file system does not report its length, or neither an ETag nor a modification time",
                CacheWarning,
                stacklevel=2,
            )


class _CachedFile:
    """The chunks of one version of a remote file."""

    def __init__(self, space: CacheSpace, identity: bytes, size: int) -> None:
        self._space, self._identity, self._size = space, identity, size

    def read_cached(self, number: int, start: int, end: int) -> memoryview | None:
        """Return the bytes of a chunk between ``start`` and ``end`` of the file; None if it is not in the cache."""
        name, path = self._name(number)
        base = number * CACHE_CHUNK_BYTES
        length = min(CACHE_CHUNK_BYTES, self._size - base)
        try:
            # The path may be anything: follow no link, wait for no pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._discard_damaged(path, length, error)
            return None
        try:
            piece = read_chunk(handle, name, length, max(start - base, 0), min(end - base, length))
            self._space.touch(handle)
        except (OSError, ChunkError) as error:
            self._discard_damaged(path, length, error)
            return None
        finally:
            os.close(handle)
        return piece

    def read_source(
        self, first: int, last: int, start: int, end: int, read: ReadRange
    ) -> bytes | memoryview:
        """Read the bytes of chunks ``first`` to ``last`` from the source, and keep the chunks if there is room."""
        base, limit = first * CACHE_CHUNK_BYTES, min(last * CACHE_CHUNK_BYTES, self._size)
        low, high = max(start, base), min(end, limit)
        whole = on_disk(HEADER_BYTES + CACHE_CHUNK_BYTES)
        cost = (last - first - 1) * whole + on_disk(
            HEADER_BYTES + (limit - base - 1) % CACHE_CHUNK_BYTES + 1
        )
        free_bytes = self._space.make_room(cost)
        kept = last - first if free_bytes >= cost else max(0, free_bytes // whole)
        if not kept:
            return read(low, high)  # no bytes around the range are read that will not be kept
        data = memoryview(read(base, limit if first + kept == last else high))
        for number in range(kept):
            chunk = data[number * CACHE_CHUNK_BYTES : (number + 1) * CACHE_CHUNK_BYTES]
            name, path = self._name(first + number)
            self._space.publish(path, (encode_header(name, chunk), chunk))
        return data[low - base : high - base]

    def delete_chunk(self, number: int) -> None:
        """Delete a chunk, if it exists."""
        length = min(CACHE_CHUNK_BYTES, self._size - number * CACHE_CHUNK_BYTES)
        self._space.discard(self._name(number)[1], HEADER_BYTES + length)

    def _discard_damaged(self, path: str, length: int, error: Exception) -> None:
        _log.warning("the cache file %s is damaged: %s; it is read from its source", path, error)
        self._space.discard(path, HEADER_BYTES + length)

    def _name(self, number: int) -> tuple[bytes, str]:
        name = hashlib.blake2b(
            number.to_bytes(8, "little"), key=self._identity, digest_size=_NAME_BYTES
        ).digest()
        return name, self._space.path_of(name.hex())


def _end(start: int, end: int | None, size: int, max_bytes: int | None) -> int:
    """Return the end of a read."""
    if end is not None:
        return end
    return size if max_bytes is None else min(size, start + max_bytes)


def open_cache(
    cache_dir: str | os.PathLike[str] | None, cache_bytes: int | str | None
) -> Cache | None:
    """Open the cache of the options ``cache_dir`` and ``cache_bytes``; None without them.

    Raises:
        OptionError: If one is invalid.
    """
    max_bytes = check_cache(cache_dir, cache_bytes)
    if cache_dir is None:
        return None
    return Cache(os.path.abspath(os.path.expanduser(cache_dir)), max_bytes)


def check_cache(
    cache_dir: str | os.PathLike[str] | None, cache_bytes: int | str | None
) -> int | None:
    """Check the options ``cache_dir`` and ``cache_bytes``, without creating a folder; return the limit in bytes.

    Raises:
        OptionError: If one is invalid.
    """
    if cache_dir is None:
        if cache_bytes is not None:
            raise OptionError("cache_bytes is set without cache_dir; set both")
        return None
    folder = os.fspath(cache_dir)
    if "://" in folder or not folder:
        raise OptionError(f"cache_dir must be a folder on this machine, not {folder!r}")
    max_bytes = None if cache_bytes is None else parse_bytes(cache_bytes)
    if max_bytes is not None and max_bytes < _MIN_BYTES:
        raise OptionError(f"cache_bytes must be {_MIN_BYTES:,} or more, not {max_bytes:,}")
    return max_bytes


class ChunkError(Exception):
    """A cache file is damaged, or is not the chunk that its name says."""


def encode_header(name: bytes, data: memoryview) -> bytes:
    """Return the header of a chunk."""
    sums = [zlib.crc32(data[at : at + _PAGE_BYTES]) for at in range(0, len(data), _PAGE_BYTES)]
    return seal_record(_HEAD, name, len(data), *sums, *[0] * (_PAGES - len(sums)))


def read_chunk(handle: int, name: bytes, length: int, start: int, end: int) -> memoryview:
    """Return the bytes ``start`` to ``end`` of a chunk that is ``length`` bytes long, checked.

    The next call of this thread overwrites the returned memory: a new buffer for each call would cost more than the rest.

    Args:
        handle: An open file of any kind.
        name: The chunk's name.
        length: Expected length of the chunk, from that of the remote file.
        start: Offset of the first byte in the chunk.
        end: Offset after the last byte, above ``start``.

    Raises:
        ChunkError: If the file is not this chunk, or damaged where it is read.
        OSError: If it cannot be read.
    """
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + length:
        raise ChunkError("no file of the right length")
    sums = _read_sums(os.pread(handle, HEADER_BYTES, 0), name, length)
    first, last = start // _PAGE_BYTES, -(-end // _PAGE_BYTES)
    base = first * _PAGE_BYTES
    size = min(last * _PAGE_BYTES, length) - base
    data = _buffer()[:size]
    if os.preadv(handle, [data], HEADER_BYTES + base) != size:
        raise ChunkError("it was truncated")
    for page in range(first, last):
        at = page * _PAGE_BYTES - base
        if zlib.crc32(data[at : at + _PAGE_BYTES]) != sums[page]:
            raise ChunkError(f"the checksum of its page {page} is wrong")
    return data[start - base : end - base]


def _buffer() -> memoryview:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(CACHE_CHUNK_BYTES))
    return cast("memoryview", _local.buffer)


def _read_sums(header: bytes, name: bytes, length: int) -> tuple[int, ...]:
    values = open_record(_HEAD, header)
    if values is None:
        raise ChunkError("its header is damaged")
    found, size, *sums = values
    if (found, size) != (name, length):
        raise ChunkError("it is another chunk")
    return tuple(sums)
