"""Read forward-only streams by offset, and decompress compressed tars."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, cast

from shardstream.errors import OptionError, ShardError, how_to_install

DEFAULT_READ_BYTES = 1 << 20
INFLATED_FREE_BYTES = 4 << 30  # a compressed tar of any size may unpack to this many bytes
INFLATED_RATIO_LIMIT = 1000  # beyond that, to this many times its size; labels reach 540 with zstd
_MAGIC_BYTES = 6
_SUFFIX_BY_MAGIC = ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst"))


class Readable(Protocol):
    """Stream that a `ForwardReader` reads: a file object, or any object with these two methods."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes from the current position; none at the end."""
        ...

    def seekable(self) -> bool:
        """Return True if the stream also has ``seek(offset)``."""
        ...


class ForwardReader:
    """Read a stream at growing offsets: the ``read(offset, size)`` of `iter_members` and `iter_samples`.

    Memory is bounded by one chunk plus the last bytes requested. Bytes between two requests are skipped chunk by chunk, or
    by one ``seek`` if the stream is seekable.

    >>> import io
    >>> read = ForwardReader(io.BytesIO(b"0123456789"), chunk_bytes=4)
    >>> read(1, 2), read(6, 9)
    (b'12', b'6789')

    Args:
        stream: Read from its current position, which is offset 0. Only an empty read means the end.
        chunk_bytes: Bytes to read from the stream at a time.
    """

    def __init__(self, stream: Readable, *, chunk_bytes: int = DEFAULT_READ_BYTES) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._can_seek = stream.seekable()
        self._buffer = b""
        self._start = 0
        self._last_offset = 0

    @property
    def position(self) -> int:
        """Bytes read from the stream so far."""
        return self._start + len(self._buffer)

    def __call__(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from an offset of the stream; fewer only at its end.

        Raises:
            ValueError: If the offset is before that of the last request.
        """
        if offset < self._last_offset:
            raise ValueError(f"a stream cannot go back from byte {self._last_offset} to {offset}")
        self._last_offset = offset
        at = offset - self._start
        if at + size > len(self._buffer):
            self._fetch(offset, size)
            at = offset - self._start
        return self._buffer[at : at + size] if at >= 0 else b""

    def _fetch(self, offset: int, size: int) -> None:
        """Make the kept bytes begin at or before ``offset`` and hold ``size`` bytes from there, if the stream has them."""
        if self._can_seek and offset > self.position + self._chunk_bytes:
            cast("BinaryIO", self._stream).seek(offset)
            self._start, self._buffer = offset, b""
        while offset > self.position:
            if not self._next(self._chunk_bytes):
                return
        if offset + size <= self.position:  # without a copy of the chunk
            return
        pieces = [self._buffer[offset - self._start :]]
        missing = size - len(pieces[0])
        while missing > 0:
            # A long body is read exactly, so that the kept bytes are returned without a copy.
            piece = self._take(self._chunk_bytes if size <= self._chunk_bytes else missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        self._start, self._buffer = offset, b"".join(pieces)

    def _next(self, size: int) -> bool:
        """Replace the kept bytes by the next chunk; False at the end, where the position stays."""
        self._start = self.position
        self._buffer = self._take(size)
        return bool(self._buffer)

    def _take(self, size: int) -> bytes:
        # A size from a header may be wrong: never request more than a chunk at once.
        return self._stream.read(min(size, self._chunk_bytes))


@contextmanager
def open_decompressed(stream: BinaryIO, *, shard: str) -> Iterator[Readable]:
    """Open the tar inside a ``.tar.gz``, ``.tgz`` or ``.tar.zst``; any other stream stays as it is.

    Bytes are decompressed as they are read, so a decompression bomb costs no memory; beyond 4 GiB the limit is 1,000 times the
    compressed size.

    Args:
        stream: The file's bytes.
        shard: URL of the file; its suffix selects the compression.

    Raises:
        OptionError: If it is zstd and ``zstandard`` is not installed.
        ShardError: While reading, if the compressed bytes are damaged or truncated, or exceed the limit.
    """
    name = shard.lower()
    packed = _CountingStream(stream)
    with _decompress(name, packed, shard) as inner:
        yield stream if inner is None else inner


@contextmanager
def open_by_content(stream: Readable, *, shard: str) -> Iterator[tuple[Readable, int | None]]:
    """Open a tar that may be compressed with gzip or zstd, by its first bytes; yield it and its length, None if unknown.

    Args:
        stream: The file's bytes, from its current position.
        shard: URL of the file, for messages.

    Raises:
        OptionError: If it is zstd and ``zstandard`` is not installed.
        ShardError: If it is compressed with bzip2 or xz; while reading, as in `open_decompressed`.
    """
    head = stream.read(_MAGIC_BYTES)
    whole = _CountingStream(stream, head)
    if head.startswith((b"BZh", b"\xfd7zXZ")):
        raise ShardError(
            "it is compressed with bzip2 or xz, which are not read",
            remedy="unpack it, or compress it with gzip or zstd",
            shard=shard,
        )
    name = next((name for magic, name in _SUFFIX_BY_MAGIC if head.startswith(magic)), "")
    with _decompress(name, whole, shard) as inner:
        if inner is not None:
            yield inner, None
        elif stream.seekable():
            file = cast("BinaryIO", stream)
            start = file.tell() - len(head)
            size = file.seek(0, os.SEEK_END) - start
            file.seek(start)
            yield _FromOffset(file, start), size
        else:
            yield whole, None


@contextmanager
def _decompress(name: str, packed: _CountingStream, shard: str) -> Iterator[Readable | None]:
    """Open the decompressor for a file name; None for other names."""
    if name.endswith((".gz", ".tgz")):
        with gzip.GzipFile(fileobj=cast("BinaryIO", packed), mode="rb") as inner:
            yield _DecompressedStream(inner, packed, shard)
    elif name.endswith(".zst"):
        with _zstd_reader(packed, shard) as inner:
            yield _DecompressedStream(inner, packed, shard)
    else:
        yield None


class _FromOffset:
    """A seekable stream whose current position is offset 0."""

    def __init__(self, stream: BinaryIO, start: int) -> None:
        self._stream = stream
        self._start = start

    def read(self, size: int, /) -> bytes:
        return self._stream.read(size)

    def seek(self, offset: int, /) -> int:
        return self._stream.seek(self._start + offset)

    def seekable(self) -> bool:
        return True


class _CountingStream:
    """A stream that begins with bytes that were read already, and counts those that are read from it, such as by a decompressor."""

    def __init__(self, stream: Readable, head: bytes = b"") -> None:
        self._stream, self._head = stream, head
        self.taken = 0

    def read(self, size: int = -1, /) -> bytes:
        if self._head:
            data = self._head if size < 0 else self._head[:size]
            self._head = self._head[len(data) :]
        else:
            data = self._stream.read(size)
        self.taken += len(data)
        return data

    def seekable(self) -> bool:
        return False


class _DecompressedStream:
    """Turn errors of a decompressor into `ShardError`, and stop decompression bombs."""

    def __init__(self, inner: Any, packed: _CountingStream, shard: str) -> None:
        self._inner = inner
        self._packed = packed
        self._shard = shard
        self._given = 0

    def read(self, size: int, /) -> bytes:
        data = self._read(size)
        if size and not data and not self._given and self._packed.taken:
            raise self._damaged(EOFError("they unpack to nothing, or the file is empty"))
        self._given += len(data)
        if self._given > INFLATED_FREE_BYTES + INFLATED_RATIO_LIMIT * self._packed.taken:
            raise ShardError(
                f"{self._packed.taken} bytes unpack to more than {self._given}: a decompression bomb? "
                "If not, unpack it to a plain tar",
                shard=self._shard,
            )
        return data

    def _read(self, size: int) -> bytes:
        try:
            return cast("bytes", self._inner.read(size))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._damaged(error) from error
        except Exception as error:
            # zstandard is optional, so its error class cannot be imported here
            if type(error).__name__ == "ZstdError":
                raise self._damaged(error) from error
            raise

    def seekable(self) -> bool:
        return False

    def _damaged(self, error: Exception) -> ShardError:
        return ShardError(
            f"the compressed bytes are damaged or cut ({error})",
            remedy="fetch or write the shard again",
            shard=self._shard,
        )


def _zstd_reader(stream: _CountingStream, shard: str) -> Any:
    try:
        import zstandard  # noqa: PLC0415  (an extra: needed for .tar.zst alone)
    except ImportError as error:
        raise OptionError(
            f".tar.zst needs one more package: {how_to_install('zstd')}", shard=shard
        ) from error
    # zstandard refuses windows over 128 MiB by default.
    packed = cast("BinaryIO", stream)
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
