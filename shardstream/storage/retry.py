"""Retry failed requests with backoff, resume reads at the byte they reached, and read a remote file as a stream of such reads."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from shardstream.errors import ChangedError, StorageError, get_logger
from shardstream.storage.error_messages import (
    ErrorClassification,
    classify_error,
    http_status,
    safe_cause,
)
from shardstream.storage.response import (
    SLOWEST_BYTES_PER_S,
    Cancellation,
    RequestOptions,
    ranges_ignored_error,
    response_version,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardstream.storage.response import RangeResponse
    from shardstream.storage.store import Storage

_T = TypeVar("_T")
_log = get_logger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0
# Retry timeout of a server that has never sent a response, not even an error: its address is probably wrong. Requests to it fail at
# once for a while after that: a table may have links to it in every row.
_NEVER_REACHED_S = 10.0
_SILENT_FOR_S = 60.0
_SERVERS_KEPT = 1024
_jitter = random.Random()  # separate: the user's global generator must not advance
BUFFER_BYTES = 8 << 20  # a reader of lines requests few bytes at a time


class ReadHints(RequestOptions, total=False):
    """Optional arguments of a read."""

    size: int | None
    """Length of the file in the manifest; None if unknown."""
    on_throttle: Callable[[], None] | None
    """Called each time the server throttles (503 SlowDown, 429)."""


def read_remote(
    storage: Storage, url: str, start: int, end: int | None, **hints: Unpack[ReadHints]
) -> bytes | memoryview:
    """Read a range or a whole file; after a failure resume at the byte reached, with backoff (see `Storage.read_view`)."""
    return _RangeRead(storage, url, start, end, hints).receive_all().data


def read_whole(storage: Storage, url: str, max_bytes: int) -> tuple[bytes, str | None]:
    """Read a small file of at most so many bytes; return them and their version, None if the client knows none."""
    whole = _RangeRead(storage, url, 0, None, {"max_bytes": max_bytes}).receive_all()
    return bytes(whole.data), whole.version


def retry_call(
    storage: Storage,
    url: str,
    call_once: Callable[[], _T],
    *,
    cancelled: threading.Event | None = None,
) -> _T:
    """Retry an idempotent request, such as a listing, while a retry can help.

    Args:
        storage: Its options set the retry timeout.
        url: The URL, for messages.
        call_once: Sends the request once.
        cancelled: Ends pauses and retries when another thread sets it.

    Raises:
        StorageError: If the request still fails after ``retry_timeout_s``; at once if the file is missing or access is refused.
    """
    backoff = Backoff(storage, url, cancelled=cancelled)
    while True:
        try:
            response = call_once()
        except Exception as error:  # noqa: BLE001  (classified: a bug keeps its type)
            backoff.wait(error)
            continue
        backoff.note_response()
        return response


class Servers:
    """Which servers have responded, and which never did until the retry timeout; picklable (without them) and thread-safe."""

    def __init__(self) -> None:
        self._silent_since: OrderedDict[str, float | None] = OrderedDict()
        self.honours_conditions: dict[str, bool] = {}
        """Whether a server refuses writes whose condition does not hold, by bucket."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_silent_since": OrderedDict(), "honours_conditions": {}}

    def have_responded(self, url: str) -> bool:
        """Return whether the server of a URL has sent bytes or an error."""
        return self._silent_since.get(_server(url), 0.0) is None

    def note(self, url: str, *, is_silent: bool) -> None:
        """Record that the server of a URL responded, or did not."""
        server = _server(url)
        if is_silent or not self.have_responded(url):
            self._silent_since[server] = time.monotonic() if is_silent else None
            while len(self._silent_since) > _SERVERS_KEPT:
                with suppress(KeyError):  # another thread was first
                    self._silent_since.popitem(last=False)

    def check(self, url: str) -> None:
        """Raise an error if the server of a URL was silent a moment ago.

        Raises:
            StorageError: If it was.
        """
        since = self._silent_since.get(_server(url))
        if since is not None and time.monotonic() - since < _SILENT_FOR_S:
            raise StorageError(
                f"{_server(url)} did not answer a moment ago, and is not asked again for {_SILENT_FOR_S:.0f} s",
                remedy="check the URL and the network",
                shard=url,
            )


def _server(url: str) -> str:
    """Return protocol and host of a URL, or the protocol and bucket; of a chain, the last.

    >>> _server("zip://a.tar::https://me:secret@host:80/b.zip"), _server("s3://bucket/a.tar")
    ('https://host:80', 's3://bucket')
    """
    protocol, _, rest = url.rpartition("::")[2].partition("://")
    return f"{protocol}://{re.split('[/?#]', rest, maxsplit=1)[0].rpartition('@')[2]}"


class TruncatedResponseError(OSError):
    """A response that ended normally with fewer bytes than requested."""


class Backoff:
    """Pauses between attempts, with a limit on their total time.

    Args:
        storage: Its options set the retry timeout and the secrets that no message may show.
        url: The URL, for messages.
        on_throttle: Called each time the server throttles.
        cancelled: Set when the response is not needed any more.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        on_throttle: Callable[[], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._cancelled = cancelled
        self._storage, self._url, self._on_throttle = storage, url, on_throttle
        storage.servers.check(url)
        self.reset()

    def reset(self) -> None:
        """Start a new retry timeout after bytes have arrived."""
        self._count, self._paused_s, self._since = 0, 0.0, 0.0

    def note_response(self) -> None:
        """Record that the server has responded."""
        self._storage.servers.note(self._url, is_silent=False)

    def wait(
        self,
        error: Exception,
        error_of_failure: Callable[[ErrorClassification], Exception] | None = None,
    ) -> None:
        """Pause before the next attempt.

        Raises:
            StorageError: The translated error, if a retry cannot help or the retry timeout has passed.
        """
        storage = self._storage
        classification = classify_error(error, self._url, storage.secrets)
        meaning = classification.meaning
        if meaning.is_throttled or http_status(error) is not None:
            self.note_response()
        if meaning.is_throttled and self._on_throttle is not None:
            self._on_throttle()
        retry_timeout_s = storage.timeouts.retry_timeout_s
        is_unknown = not storage.servers.have_responded(self._url)
        if is_unknown:
            retry_timeout_s = min(retry_timeout_s, _NEVER_REACHED_S)
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._count) * _jitter.uniform(0.5, 1.0)
        if self._count == 0:
            self._since = time.monotonic()
        passed_s = max(self._paused_s, time.monotonic() - self._since)
        self._count += 1
        self._paused_s += pause_s
        late = passed_s + pause_s > retry_timeout_s
        if is_unknown and meaning.is_silent and late:
            storage.servers.note(self._url, is_silent=True)
        if not meaning.is_retryable or late or self._pause(pause_s):
            raised = (
                classification.error
                if error_of_failure is None
                else error_of_failure(classification)
            )
            if meaning.is_retryable:
                raised.add_note(f"tried {self._count} times in {passed_s:.0f} s")
            raise raised from (None if raised is error else safe_cause(error, storage.secrets))
        _log.debug("retrying after %.1f s: %s", pause_s, classification.error)

    def _pause(self, pause_s: float) -> bool:
        """Wait; return True if the request was cancelled."""
        if self._cancelled is not None:
            return self._cancelled.wait(pause_s)
        time.sleep(pause_s)
        return False


class _RangeRead:
    """The received bytes of a range, checked to be of one version of the file."""

    def __init__(
        self, storage: Storage, url: str, start: int, end: int | None, hints: ReadHints
    ) -> None:
        self.storage, self.url, self.end, self._hints = storage, url, end, hints
        self._expected_size = hints.get("size")
        self._max_bytes = hints.get("max_bytes")
        # A whole small file, such as a manifest, may be replaced during the read: that begins again.
        self._pins = (start, end) != (0, None) or self._expected_size is not None
        self._start = start
        self.is_complete = end is not None and end <= start
        self._begin = time.monotonic()
        self.begin()

    def receive_all(self) -> Self:
        """Send requests until all bytes have arrived."""
        hints = self._hints
        backoff = Backoff(self.storage, self.url, hints.get("on_throttle"), hints.get("cancelled"))
        self.look_up_version()
        while not self.is_complete:
            try:
                self._receive(backoff)
            except ChangedError:
                if self._pins:
                    raise
                self.begin()
        return self

    def _receive(self, backoff: Backoff) -> None:
        """Send one request and add its response; pause if that is not the rest."""
        try:
            response = self.storage.read_once(
                self.url,
                self.position,
                self.end,
                on_receive=self._hints.get("on_receive"),
                cancelled=self._hints.get("cancelled"),
                max_bytes=self.bytes_left,
            )
        except Exception as error:  # noqa: BLE001  (classified: a bug keeps its type)
            backoff.wait(error, self.error_of_failure)
            return
        self.add(response)
        backoff.note_response()
        if not self.is_complete:
            if response.data and not self.is_slow:
                backoff.reset()
            backoff.wait(response.error or self.too_short(), self.error_of_failure)

    def begin(self) -> None:
        """Begin with the first byte."""
        self._size: int | None = None  # sent by the server
        self.version: str | None = None
        """Version of the file that the bytes are of."""
        self._parts: list[bytes | memoryview] = []
        self.position = self._start

    @property
    def data(self) -> bytes | memoryview:
        return (self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))[
            : self._max_bytes
        ]

    @property
    def bytes_left(self) -> int | None:
        """Bytes of ``max_bytes`` that have not arrived."""
        return None if self._max_bytes is None else self._start + self._max_bytes - self.position

    @property
    def is_slow(self) -> bool:
        """Whether all responses together were too slow: a server that sends a byte before each cut would be read from for ever."""
        received_s = (self.position - self._start) / SLOWEST_BYTES_PER_S
        return time.monotonic() - self._begin > self.storage.timeouts.total_s + received_s

    def add(self, response: RangeResponse) -> None:
        """Append the bytes of a response.

        Raises:
            ChangedError: If the response is of another version of the file.
            StorageError: If it has more bytes than requested.
        """
        self._check(response)
        limit = self._size if self.end is None else self.end
        if limit is not None and len(response.data) > limit - self.position:
            # The server ignored the range and sent the file from its start: these are bytes of other samples.
            raise ranges_ignored_error(self.url, self.position)
        self._parts.append(response.data)
        self.position += len(response.data)
        if self.end is not None:
            self.is_complete = self.position >= self.end
        elif self._size is not None:
            self.is_complete = self.position >= self._size
        else:
            self.is_complete = response.error is None
        if self.bytes_left is not None:
            self.is_complete |= self.bytes_left <= 0

    def _check(self, response: RangeResponse) -> None:
        if response.size is not None:
            self._check_size(response.size)
            self._size = response.size
        version, pinned = response.version, self.storage.pinned(self.url) if self._pins else None
        if version is None and pinned is not None:  # the client, or this response, has none
            version = self._look_up()
        if self.version is None:
            is_first = self._pins and pinned is None and version is not None
            self.version = (
                self.storage.pin(self.url, str(version)) if is_first else pinned or version
            )
        if self.version != version:
            raise ChangedError(
                f"the file changed while it was read: its version was {self.version}, now {version}",
                remedy="start again, and run 'shardstream index' if the shard was rewritten",
                shard=self.url,
                offset=self.position,
            )

    def _check_size(self, size: int) -> None:
        known = self._expected_size if self._size is None else self._size
        if known not in (None, size):
            raise ChangedError(
                f"the file changed: it has {size} bytes, the manifest or an earlier response says {known}",
                remedy="run 'shardstream index' again",
                shard=self.url,
            )
        if size < (self._start if self.end is None else self.end):
            raise ChangedError(
                f"the file is shorter than its index says: it has {size} bytes, "
                f"the requested range is {self._start} to {self.end or 'its end'}",
                remedy="run 'shardstream index' again, or write the shard again",
                shard=self.url,
                offset=self._start,
            )

    def look_up_version(self) -> None:
        """Pin the version of a file before its first range is read, if its client reads ranges without versions."""
        if self._pins and not self.storage.has_versions(self.url):
            version = self._look_up()
            if version is not None:
                self.storage.pin(self.url, version)

    def _look_up(self) -> str | None:
        """Look the file up, check its length, and return its version."""
        found = self.storage.info(self.url)
        if found.size_or_none is not None:
            self._check_size(found.size_or_none)
        return response_version(found.version)

    def too_short(self) -> Exception:
        """Return the error of a response that ended early without one.

        Raises:
            ChangedError: If the file itself is shorter than the range.
        """
        if self._size is None and self.end is not None:
            self._look_up()
        wanted = (self._size or 0) - self._start if self.end is None else self.end - self._start
        return TruncatedResponseError(f"got {self.position - self._start} of {wanted} bytes")

    def error_of_failure(self, classification: ErrorClassification) -> Exception:
        """Return the error of a verdict.

        Raises:
            ChangedError: If the server reports that the file ends before the range; the message has the file's length.
        """
        if classification.meaning.is_past_end:
            self._look_up()
        return classification.error


class RangeFile(io.RawIOBase, ABC):
    """A file of known length that is read by ranges: in order, or by seeks.

    Args:
        size: Its length in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size, self._position = size, 0

    @abstractmethod
    def _read_range(self, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end``, which are in the file, or fewer."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Continue at an offset; return it, counted from the start.

        Raises:
            OSError: If it is before the start.
        """
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a seek before the start of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes; an empty result is the end.

        Raises:
            StorageError: If the file is shorter than its length, or cannot be reached.
        """
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        data = self._read_range(start, end) if start < end else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill a buffer as far as `read` does; return how many bytes."""
        data = self.read(len(view := memoryview(buffer)))
        view[: len(data)] = data
        return len(data)


class RangeStream(RangeFile):
    """Reads a remote file, each piece by one range read.

    Not a file object of fsspec, for two reasons: clients return truncated bodies without an error (`Storage.read` checks the
    length), and a file object reads ahead bytes that a seek then discards.

    Args:
        storage: The storage of the file.
        url: URL of the file.
        size: Length of the file in bytes.
        min_read_bytes: Minimum bytes of one range read; smaller reads (decompressors read 8 KiB) take from these.
        cancelled: Ends a read when another thread sets it.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        size: int,
        *,
        min_read_bytes: int = 0,
        cancelled: Cancellation | None = None,
    ) -> None:
        super().__init__(size)
        self._storage, self._url, self._cancelled = storage, url, cancelled
        self._min_read_bytes = min_read_bytes
        self._kept, self._kept_start = b"", 0

    def _read_range(self, start: int, end: int) -> bytes:
        at = start - self._kept_start
        if not 0 <= at < len(self._kept):
            read_end = min(max(end, start + self._min_read_bytes), self._size)
            self._kept = self._storage.read(
                self._url, start, read_end, size=self._size, cancelled=self._cancelled
            )
            self._kept_start, at = start, 0
        return self._kept[at : at + end - start]
