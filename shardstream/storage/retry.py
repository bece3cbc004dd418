"""Requests that are tried again where that can help, from the byte they had reached."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

from shardstream.errors import ChangedError
from shardstream.storage.error_messages import Verdict, is_answer, judge, no_ranges, tellable

if TYPE_CHECKING:
    from shardstream.storage.response import Piece
    from shardstream.storage.store import Storage

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0
# Patience with a server that has sent no HTTP answer at all, not even an error: more likely a wrong address.
_NEVER_REACHED_S = 10.0
_jitter = random.Random()  # of its own: the user's global generator is left alone


def fetch(
    storage: Storage, url: str, start: int = 0, end: int | None = None, **told: Unpack[Told]
) -> bytes:
    """Read a range, or a whole file, as `fetch_view` does, to bytes of its own."""
    return bytes(fetch_view(storage, url, start, end, **told))


class Told(TypedDict, total=False):
    """What may be known of a read: see `fetch_view`."""

    size: int | None
    most: int | None
    on_throttle: Callable[[], None] | None
    given_up: threading.Event | None


def fetch_view(  # noqa: PLR0913  (the one way in: what may be known of a read)
    storage: Storage,
    url: str,
    start: int = 0,
    end: int | None = None,
    *,
    size: int | None = None,
    most: int | None = None,
    on_throttle: Callable[[], None] | None = None,
    given_up: threading.Event | None = None,
) -> bytes | memoryview:
    """Read a range, or a whole file; after a fault go on at the byte reached, with growing pauses. Through the cache, if any.

    All bytes are of one version of the file: its ETag must stay what it was when this storage first read a range of it in this
    process, and its length what the caller says.

    Args:
        storage: Where the file is.
        url: Its URL.
        start: Offset of the first byte.
        end: Offset behind the last; None is the end of the file.
        size: Length of the file as a manifest says; None is unknown.
        most: Bytes to return of a file that is read to its end, however long a hostile server says it is.
        on_throttle: Called each time the server asks for fewer requests (503 SlowDown, 429).
        given_up: Once set, nobody waits for the bytes any more: a pause is cut short and no more requests are sent.

    Returns:
        The bytes; a view of a client's own memory where that saves a copy.

    Raises:
        MissingError: If the file is missing; at once.
        RefusedError: If access is refused; at once.
        ChangedError: If the file is not the one that was indexed, or changes meanwhile; at once.
        StorageError: If no byte comes for ``patience_s`` of the storage options.
    """

    def read(start: int, end: int | None) -> bytes | memoryview:
        # What the cache keeps under the version of a listing must be of that version.
        if storage.cache is not None and (etag := storage.cache.etag(url)) is not None:
            storage.pin(url, etag)
        reading = _Reading(storage, url, start, end, size)
        reading.most = most
        return _read(reading, on_throttle, given_up)

    if storage.cache is None or storage.local_path(url) is not None:
        return read(start, end)
    return storage.cache.read(
        url, start, end, size=size, most=most, read=read, look_up=lambda: storage.info(url)
    )


def _read(
    reading: _Reading, on_throttle: Callable[[], None] | None, given_up: threading.Event | None
) -> bytes | memoryview:
    storage, url, end = reading.storage, reading.url, reading.end
    turns = Turns(storage, url, on_throttle, given_up)
    while not reading.is_complete:
        try:
            piece = storage.read_once(
                url,
                reading.position,
                end,
                piecemeal=reading.has_broken_off,
                most=reading.bytes_left,
            )
        except Exception as error:  # noqa: BLE001  (judged: a bug keeps its type)
            turns.wait(error, reading.explain)
            continue
        reading.add(piece)
        storage.reached = True
        if not reading.is_complete:
            if piece.data:
                turns.begin_anew()
            turns.wait(piece.error or reading.too_short(), reading.explain)
    return reading.data


def patiently(
    storage: Storage, url: str, ask: Callable[[], _T], *, given_up: threading.Event | None = None
) -> _T:
    """Ask for something that may be asked twice, such as a listing, again while that can help.

    Args:
        storage: Where.
        url: For messages.
        ask: Asks once.
        given_up: Ends the pauses, and the attempts, when it is set from another thread.

    Raises:
        StorageError: If it still fails after ``patience_s``; at once if it is missing or refused.
    """
    turns = Turns(storage, url, given_up=given_up)
    while True:
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001  (judged: a bug keeps its type)
            turns.wait(error)
            continue
        storage.reached = True
        return answer


class AnswerCutError(OSError):
    """An answer with fewer bytes than it was asked for, which ends as if it were whole."""


class Turns:
    """The pauses between attempts, and when there are no more.

    Args:
        storage: Whose options say how long, and which texts no message may show.
        url: For messages.
        on_throttle: Called each time the server asks for fewer requests.
        given_up: Set when nobody wants the answer any more.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        on_throttle: Callable[[], None] | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        self._given_up = given_up
        self._storage, self._url, self._on_throttle = storage, url, on_throttle
        self.begin_anew()

    def begin_anew(self) -> None:
        """Bytes came: whatever fails now is a fault of its own."""
        self._count, self._paused_s, self._since = 0, 0.0, 0.0

    def wait(self, error: Exception, explain: Callable[[Verdict], Exception] | None = None) -> None:
        """Pause before the next attempt.

        Raises:
            StorageError: What the error means to the user, if trying again does not help or has lasted too long.
        """
        storage = self._storage
        verdict = judge(error, self._url, storage.secrets)
        storage.reached = storage.reached or verdict.throttled or is_answer(error)
        if verdict.throttled and self._on_throttle is not None:
            self._on_throttle()
        patience_s = storage.limits.patience_s
        if not storage.reached:
            patience_s = min(patience_s, _NEVER_REACHED_S)
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._count) * _jitter.uniform(0.5, 1.0)
        if self._count == 0:
            self._since = time.monotonic()
        passed_s = max(self._paused_s, time.monotonic() - self._since)
        self._count += 1
        self._paused_s += pause_s
        late = passed_s + pause_s > patience_s
        if not verdict.again or late or self._pause(pause_s):
            told = verdict.error if explain is None else explain(verdict)
            if verdict.again:
                told.add_note(f"tried {self._count} times in {passed_s:.0f} s")
            raise told from (None if told is error else tellable(error, storage.secrets))
        _log.debug("again after %.1f s: %s", pause_s, verdict.error)

    def _pause(self, pause_s: float) -> bool:
        """Wait; True if nobody waits for the answer any more."""
        if self._given_up is not None:
            return self._given_up.wait(pause_s)
        time.sleep(pause_s)
        return False


class _Reading:
    """What has come of a range, and whether it is all of one file."""

    def __init__(
        self, storage: Storage, url: str, start: int, end: int | None, size: int | None
    ) -> None:
        self.storage, self.url, self.end = storage, url, end
        self._told_size = size
        self.most: int | None = None
        self._size: int | None = None  # as the server says
        self._version: str | None = None
        self._pins = (start, end) != (0, None) or size is not None
        self._parts: list[bytes | memoryview] = []
        self._start = self.position = start
        self.is_complete = end is not None and end <= start
        self.has_broken_off = False

    @property
    def data(self) -> bytes | memoryview:
        return (self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))[: self.most]

    @property
    def bytes_left(self) -> int | None:
        """Of ``most``, what has not come."""
        return None if self.most is None else self._start + self.most - self.position

    def add(self, piece: Piece) -> None:
        """Take what a request brought.

        Raises:
            ChangedError: If it is of another version of the file.
            StorageError: If it is more than was asked for.
        """
        self._check(piece)
        limit = self._size if self.end is None else self.end
        if limit is not None and len(piece.data) > limit - self.position:
            # They are from the start of the file: other samples than those that are meant.
            raise no_ranges(self.url, self.position)
        self._parts.append(piece.data)
        self.position += len(piece.data)
        self.has_broken_off |= piece.error is not None
        if self.end is not None:
            self.is_complete = self.position >= self.end
        elif self._size is not None:
            self.is_complete = self.position >= self._size
        else:
            self.is_complete = piece.error is None
        if self.bytes_left is not None:
            self.is_complete |= self.bytes_left <= 0

    def _check(self, piece: Piece) -> None:
        if piece.size is not None:
            self._check_size(piece.size)
            self._size = piece.size
        if piece.version is None:
            return
        if self._version is None:
            pinned = self.storage.pin(self.url, piece.version) if self._pins else piece.version
            self._version = pinned
        if self._version != piece.version:
            raise ChangedError(
                f"the file changed while it was read: its ETag was {self._version}, it is {piece.version}",
                remedy="start again, and run 'shardstream index' if it was written anew",
                shard=self.url,
                offset=self.position,
            )

    def _check_size(self, size: int) -> None:
        known = self._told_size if self._size is None else self._size
        if known not in (None, size):
            raise ChangedError(
                f"the file changed: it has {size} bytes, the manifest or an earlier answer says {known}",
                remedy="run 'shardstream index' again",
                shard=self.url,
            )
        if size < (self._start if self.end is None else self.end):
            raise ChangedError(
                f"the file is shorter than its index says: it has {size} bytes, wanted are those up to {self.end or 'its end'} "
                f"from {self._start}",
                remedy="run 'shardstream index' again, or write the shard again",
                shard=self.url,
                offset=self._start,
            )

    def _look_up_size(self) -> None:
        size = self.storage.info(self.url).told_size
        if size is not None:
            self._check_size(size)

    def too_short(self) -> Exception:
        """Say that an answer ended early without a word.

        Raises:
            ChangedError: If it is the file itself that does.
        """
        if self._size is None and self.end is not None:
            self._look_up_size()
        wanted = (self._size or 0) - self._start if self.end is None else self.end - self._start
        return AnswerCutError(f"got {self.position - self._start} of {wanted} bytes")

    def explain(self, verdict: Verdict) -> Exception:
        """Return the error of a verdict.

        Raises:
            ChangedError: If the server says that the file ends before the range, with the file's length.
        """
        if verdict.past_end:
            self._look_up_size()
        return verdict.error
