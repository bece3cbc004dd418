"""Replace a file only if it is still the one that was read (compare-and-swap), so that no change of another writer is lost.

    local disk              the folder is locked while the file is compared, written and renamed
    S3                      If-Match with the ETag that was read, If-None-Match for a new file
    Azure, Google           the same, with ETags and generations
    memory://               a lock of this process
    any other store         compared, then written: two writers at once may lose a change, so `update_file` warns

A response may be lost after the server has written the file. The next attempt is then refused; if the bytes there are those that
were sent, the write has succeeded. So the bytes of each writer must be unique, for example by a random identity in them.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import warnings
from collections.abc import Callable
from functools import partial

from shardstream.errors import ChangedError, NotFoundError, StorageError, get_logger
from shardstream.storage.error_messages import classify_error, http_status
from shardstream.storage.fork_safety import new_lock
from shardstream.storage.multipart_upload import S3Object, takes_parts
from shardstream.storage.publish import (
    locked_error,
    part_of,
    publish_bytes,
    release_lock,
    remove,
    try_lock,
)
from shardstream.storage.response import UNSUPPORTED
from shardstream.storage.retry import Backoff, read_whole, retry_call
from shardstream.storage.store import SIDECAR_LIMIT_BYTES, Storage
from shardstream.storage.urls import parent_url

_log = get_logger(__name__)

_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_LOCK_POLL_S = 0.01
_SERVER_ERROR = 500  # from this status on, the file may have been written
_NO_ETAG = "0" * 32
_pauses = random.SystemRandom()  # a seeded generator would give forked processes the same pauses
_writing = new_lock()  # held while a file is compared and written: no child is forked that would share the lock of its folder

_Put = Callable[[bytes, str | None], str | None]
"""Sends a file once, unless another one than that of the token is there; returns the new token, if the server sent it."""


class LostResponseError(ChangedError):
    """A write whose response was lost, to a file that has been replaced since: it may or may not have succeeded in between."""


def read_with_version(storage: Storage, url: str) -> tuple[bytes | None, str | None]:
    """Read a small file and a token of exactly these bytes; past any cache.

    Returns:
        The bytes, and an opaque token for `replace_if`: the ETag of the response, or a digest of the bytes. None and None if there is no
        file.

    Raises:
        ChangedError: If the file is replaced during the read.
        StorageError: If it cannot be read, or has over 1 GiB.
    """
    try:
        data, version = read_whole(storage.uncached(), url, SIDECAR_LIMIT_BYTES + 1)
    except NotFoundError:
        return None, None
    if len(data) > SIDECAR_LIMIT_BYTES:
        raise StorageError(
            f"the file has over {SIDECAR_LIMIT_BYTES:,} bytes, the limit of a file that is changed",
            shard=url,
        )
    return data, _token(data, version)


def replace_if(
    storage: Storage, url: str, data: bytes, token: str | None, *, timeout_s: float = _TIMEOUT_S
) -> str:
    """Publish a small file if the one that was read is still there; return its token.

    Args:
        storage: The storage to write to.
        url: The file.
        data: Its bytes, which no other writer sends.
        token: From `read_with_version`; None if there was no file.
        timeout_s: Time to wait for another writer of a local folder, in seconds.

    Raises:
        ChangedError: If another file is there, or none.
        LostResponseError: If that is so, and these bytes may have been there before.
        StorageError: If it cannot be written; whether it was is unknown if the server did not respond.
    """
    if storage.local_path(url) is not None:
        return _replace_local(storage, url, data, token, timeout_s)
    put = _conditional_put(storage, url)
    if put is None:
        with _writing:
            return _compare_and_write(storage, url, data, token)
    return _send(storage, url, data, token, put)


def is_conditional(storage: Storage, url: str) -> bool:
    """Return whether a file can be replaced without losing a change of another writer (see the table above).

    The first time, it is tried at an S3 server, with a small object beside the file: servers that do not know a condition may ignore it.

    Raises:
        StorageError: If that fails.
    """
    filesystem = storage.resolve(url)[0]
    return (
        storage.local_path(url) is not None
        or "memory" in filesystem.protocol
        or _conditional_put(storage, url) is not None
    )


def update_file(
    storage: Storage,
    url: str,
    change: Callable[[bytes | None], bytes | None],
    *,
    is_done: Callable[[bytes], bool] | None = None,
    tries: int = 1000,
    timeout_s: float = _TIMEOUT_S,
) -> bytes | None:
    """Change a small file; return the bytes that were written.

    If another writer replaces the file first, it is read and changed again, after a pause.

    Args:
        storage: The storage of the file.
        url: The file.
        change: Returns the new bytes, which no other writer sends, for the present ones (None: no file); None to write nothing.
        is_done: Returns whether bytes that another writer published go on from those that ``change`` returned last. It is asked only if the
            response to a write was lost and the file replaced since. Without it that is an error, because the change could be made twice.
        tries: Limit of the attempts.
        timeout_s: Time after which no attempt begins, and to wait for the lock of a local folder, in seconds.

    Returns:
        The bytes; None if ``change`` returned None.

    Raises:
        ChangedError: If other writers were first each time.
        LostResponseError: If it is not known whether the change was made.
        StorageError: If the file cannot be read or written.
    """
    if not is_conditional(storage, url):
        warnings.warn(
            f"{parent_url(url)}: this store has no conditional writes, so only one process at a time may change a dataset: of two, the change of "
            "one may be lost (docs/clouds.md lists the stores that have them)",
            stacklevel=2,
        )
    deadline = time.monotonic() + timeout_s
    for number in range(tries):
        found, token = read_with_version(storage, url)
        data = change(found)
        if data is None:
            return None
        left_s = deadline - time.monotonic()
        try:
            replace_if(storage, url, data, token, timeout_s=left_s)
        except ChangedError as error:
            if isinstance(error, LostResponseError):
                if is_done is None:
                    raise
                if is_done(read_with_version(storage, url)[0] or b""):
                    return data
            if left_s < 0:
                break
            time.sleep(_pauses.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**number)))
        else:
            return data
    raise ChangedError(
        f"other writers replaced the file each time, {number + 1} times in {timeout_s:.0f} s; run it again when they have ended",
        shard=url,
    )


def _conditional_put(storage: Storage, url: str) -> _Put | None:
    """Return how a file is sent on a condition; None if its store cannot do that."""
    if takes_parts(storage.resolve(url)[0]):
        return _s3_put(storage, url) if _honours_conditions(storage, url) else None
    return None


def _s3_put(storage: Storage, url: str) -> _Put:
    target = S3Object(storage, url, repeats=False)

    def put(data: bytes, token: str | None) -> str | None:
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        return target.put_if(data, **condition)

    return put


def _honours_conditions(storage: Storage, url: str) -> bool:
    """Return whether an S3 server refuses writes whose condition does not hold; it is tried once for each bucket."""
    bucket = storage.resolve(url)[1].partition("/")[0]
    known = storage.servers.honours_conditions
    if bucket not in known:
        trial = part_of(url)  # a name that is cleaned up, if this process is killed
        target = S3Object(storage, trial, repeats=False)
        is_refused = partial(_is_refused, storage, target, trial)
        is_refused(IfNoneMatch="*")
        try:
            known[bucket] = is_refused(IfNoneMatch="*") and is_refused(IfMatch=_NO_ETAG)
        finally:
            try:
                remove(storage, trial)
            except StorageError as error:
                _log.info("an empty file is left: %s", error)
    return known[bucket]


def _is_refused(storage: Storage, target: S3Object, url: str, **condition: str) -> bool:
    def put_once() -> bool:
        try:
            target.put_if(b"", **condition)
        except Exception as error:
            meaning = classify_error(error, url, storage.secrets).meaning
            if meaning.kind is ChangedError or meaning is UNSUPPORTED:
                return meaning is not UNSUPPORTED
            raise
        return False

    return retry_call(storage, url, put_once)


def _send(storage: Storage, url: str, data: bytes, token: str | None, put: _Put) -> str:
    """Send a file on a condition, again if the response is lost."""
    backoff = Backoff(storage, url)
    sent = token
    # A client of the user repeats requests unseen.
    may_be_written = not storage.is_s3(url)
    while True:
        try:
            return put(data, sent) or _token(data, None)
        except Exception as error:  # noqa: BLE001  (classified: a bug keeps its type)
            kind = classify_error(error, url, storage.secrets).meaning.kind
            is_gone = token is not None and issubclass(kind, NotFoundError)
            if not is_gone and not issubclass(kind, ChangedError):
                status = http_status(error)
                may_be_written |= status is None or status >= _SERVER_ERROR
                backoff.wait(error)
                continue
        found, version = read_with_version(storage, url)
        if found == data and version is not None:  # the response to an earlier attempt was lost
            return version
        if version != token or token is None:
            kind = LostResponseError if may_be_written else ChangedError
            raise kind("the file was replaced meanwhile", shard=url)
        if sent != token:
            raise StorageError(
                f"the server refuses a write on the condition of the ETag that it has itself, {token}",
                shard=url,
            )
        sent = f'"{token}"'  # Ceph takes an ETag without quotes only, others want them


def _replace_local(
    storage: Storage, url: str, data: bytes, token: str | None, timeout_s: float
) -> str:
    """Replace a file of this machine while its folder is locked; wait for other writers, which hold the lock for a moment."""
    folder = os.path.dirname(storage.local_path(url) or "")
    deadline = time.monotonic() + timeout_s
    while True:
        with _writing:
            lock = try_lock(folder, parent_url(url), for_a_moment=True)
            if lock is not None:
                try:
                    return _compare_and_write(storage, url, data, token)
                finally:
                    release_lock(lock)
        if time.monotonic() > deadline:
            raise locked_error(parent_url(url), is_own_lock=False)
        time.sleep(_pauses.uniform(0, _LOCK_POLL_S))


def _compare_and_write(storage: Storage, url: str, data: bytes, token: str | None) -> str:
    if read_with_version(storage, url)[1] != token:
        raise ChangedError("the file was replaced meanwhile", shard=url)
    publish_bytes(storage, url, data)
    return _token(data, None)


def _token(data: bytes, version: str | None) -> str:
    """Return the ETag of a file, or a digest of its bytes if the client knows none."""
    is_etag = version is not None and not version.startswith("Last-Modified")
    return str(version) if is_etag else f"sha256 {hashlib.sha256(data).hexdigest()}"
