"""Replace a file only if it is still the one that was read (compare-and-swap), so that no change of another writer is lost.

    local disk              the folder is locked while the file is compared, written and renamed
    S3, Azure, Google       the server compares the ETag that was read, or the generation, or refuses where a file exists
    memory://               a lock of this process
    any other store         (also a server that ignores such conditions)
                                   compared, then written: two writers at once may lose a change, so `update_file` warns

A response may be lost after the server has written the file. The next attempt is then refused; if the bytes there are those that
were sent, the write has succeeded. So the bytes of each writer must be unique, for example by a random identity in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from shardstream.errors import ChangedError, ManifestError, NotFoundError, StorageError, get_logger
from shardstream.process import new_lock
from shardstream.storage.error_messages import classify_error, http_status
from shardstream.storage.multipart_upload import PART_BYTES, S3Object, takes_parts
from shardstream.storage.publish import (
    locked_error,
    part_of,
    publish_bytes,
    release_lock,
    remove,
    try_lock,
)
from shardstream.storage.response import UNSUPPORTED, Cancellation, plain_etag, run_on_loop
from shardstream.storage.retry import Backoff, read_whole, retry_call
from shardstream.storage.store import SIDECAR_LIMIT_BYTES, Storage
from shardstream.storage.urls import parent_url

_log = get_logger(__name__)

_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_LOCK_POLL_S = 0.01
_SERVER_ERROR = 500  # from this status on, the file may have been written
_TRIAL, _NO_ETAG = b"shardstream", "0" * 32
_pauses = random.SystemRandom()  # a seeded generator would give forked processes the same pauses
_writing = new_lock()  # held while a file is compared and written: no child is forked that would share the lock of its folder


class _Sender(NamedTuple):
    """How a file is sent to a store."""

    put: Callable[[bytes, str | None], str | None]
    """Sends bytes, unless another file than that of a token is there; returns the new token, if the server sent it."""
    sends_once: bool = False
    """Whether the client never repeats a request, so that a refusal says that nothing was written."""


class LostResponseError(ChangedError):
    """A write whose response may have been lost, to a file that has been replaced since: it may have succeeded in between."""


def read_with_version(storage: Storage, url: str) -> tuple[bytes | None, str | None]:
    """Read a small file and a token of exactly these bytes; past any cache.

    Returns:
        The bytes, and an opaque token for `replace_if`: the ETag of the response, or a digest of the bytes. None and None if there is no
        file.

    Raises:
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
    sender = _conditional_sender(storage, url)
    if sender is None:
        with _writing:
            return _compare_and_write(storage, url, data, token)
    return _send(storage, url, data, token, sender)


def is_conditional(storage: Storage, url: str) -> bool:
    """Return whether a file can be replaced without losing a change of another writer (see the table above).

    A server is tried once, with a small file beside this one: those that do not know a condition may ignore it.

    Raises:
        StorageError: If that fails.
    """
    filesystem = storage.resolve(url)[0]
    return (
        storage.local_path(url) is not None
        or "memory" in filesystem.protocol
        or _conditional_sender(storage, url) is not None
    )


def update_file(
    storage: Storage,
    url: str,
    change: Callable[[bytes | None], bytes | None],
    *,
    is_done: Callable[[bytes], bool] | None = None,
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
    for number in count():
        data, token = _apply(storage, url, change)
        if data is None:
            return None
        left_s = deadline - time.monotonic()
        try:
            replace_if(storage, url, data, token, timeout_s=left_s)
        except ChangedError as error:
            if isinstance(error, LostResponseError):
                now = read_with_version(storage, url)[0]
                if is_done is None or now is None:
                    raise
                if is_done(now):
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


def _apply(
    storage: Storage, url: str, change: Callable[[bytes | None], bytes | None]
) -> tuple[bytes | None, str | None]:
    """Return the new bytes of a file, and the token of the present ones."""
    while True:  # each time another writer has published
        found, token = read_with_version(storage, url)
        try:
            return change(found), token
        except (ManifestError, StorageError):
            # A file that only the old bytes name may be gone: `gc` has removed their version meanwhile.
            if read_with_version(storage, url)[1] == token:
                raise


def _conditional_sender(storage: Storage, url: str) -> _Sender | None:
    """Return how a file is sent on a condition; None if its store cannot do that, or does not say so and ignores it."""
    sender = _find_sender(storage, url)
    return sender if sender is not None and _honours_conditions(storage, url) else None


def _find_sender(storage: Storage, url: str) -> _Sender | None:
    filesystem, path = storage.resolve(url)
    if takes_parts(filesystem):
        target = S3Object(storage, url, repeats=False)
        return _Sender(target.put_if, sends_once=target.sends_once)
    package = type(filesystem).__module__.partition(".")[0]
    if package == "adlfs":
        return _Sender(partial(_put_azure, filesystem, path))
    if package == "gcsfs":
        return _Sender(partial(_put_google, storage, url), sends_once=True)
    return None


def _put_azure(filesystem: Any, path: str, data: bytes, token: str | None) -> str | None:
    """Send a blob by the client of adlfs, which itself knows no conditions."""
    container, blob, _ = filesystem.split_path(path)
    condition: dict[str, Any] = {"overwrite": False}
    if token is not None:
        from azure.core import MatchConditions  # type: ignore[import-not-found]  # noqa: PLC0415

        condition = {"overwrite": True, "etag": token}
        condition["match_condition"] = MatchConditions.IfNotModified

    async def upload() -> Any:
        client = filesystem.service_client.get_blob_client(container=container, blob=blob)
        async with client:
            return await client.upload_blob(data, retry_total=0, **condition)

    response = _run(filesystem, upload(), data)
    return plain_etag(response["etag"])


def _put_google(storage: Storage, url: str, data: bytes, token: str | None) -> None:
    """Send an object by the session of gcsfs, whose reads return no generation: it is looked up before the bytes are compared."""
    generation = "0"  # no object
    if token is not None:
        generation = str(storage.info(url).version).partition(" ")[2]
        if read_with_version(storage, url)[1] != token:
            raise _changed_error(url)
    filesystem, path = storage.resolve(url)
    bucket, name, _ = filesystem.split_path(path)
    send_once = type(filesystem)._request.__wrapped__  # its decorator repeats requests
    address = f"{filesystem._location}/upload/storage/v1/b/{bucket}/o"
    condition = {"uploadType": "media", "name": name, "ifGenerationMatch": generation}
    try:
        _run(filesystem, send_once(filesystem, "POST", address, data=data, **condition), data)
    except FileExistsError as error:  # gcsfs means the condition
        raise _changed_error(url) from error


def _honours_conditions(storage: Storage, url: str) -> bool:
    """Return whether a server refuses writes whose condition does not hold; it is tried once for each bucket."""
    bucket = storage.resolve(url)[1].partition("/")[0]
    known = storage.servers.honours_conditions
    if bucket not in known:
        trial = part_of(url)  # a name that is cleaned up, if this process is killed
        _is_refused(storage, trial, None)
        try:
            known[bucket] = all(_is_refused(storage, trial, token) for token in (None, _NO_ETAG))
        finally:
            try:
                remove(storage, trial)
            except StorageError as error:
                _log.info("a file of 11 bytes is left: %s", error)
    return known[bucket]


def _is_refused(storage: Storage, url: str, token: str | None) -> bool:
    """Return whether a small file is refused under a condition."""
    sender = _find_sender(storage, url)
    assert sender is not None  # noqa: S101  (`_conditional_sender` has found it)

    def put_once() -> bool:
        try:
            sender.put(_TRIAL, token)
        except Exception as error:
            meaning = classify_error(error, url, storage.secrets).meaning
            if meaning.kind is ChangedError or meaning is UNSUPPORTED:
                return meaning is not UNSUPPORTED
            raise
        return False

    return retry_call(storage, url, put_once)


def _send(storage: Storage, url: str, data: bytes, token: str | None, sender: _Sender) -> str:
    """Send a file on a condition, again if the response is lost."""
    backoff = Backoff(storage, url)
    sent = token
    may_be_written = not sender.sends_once
    while True:
        try:
            return sender.put(data, sent) or _token(data, None)
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
            if may_be_written:
                raise LostResponseError(
                    "the response to a write may have been lost, and another writer has replaced the file since",
                    remedy="look whether the change is in it, and make it again if not",
                    shard=url,
                )
            raise _changed_error(url)
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
            raise locked_error(parent_url(url))
        time.sleep(_pauses.uniform(0, _LOCK_POLL_S))


def _compare_and_write(storage: Storage, url: str, data: bytes, token: str | None) -> str:
    if read_with_version(storage, url)[1] != token:
        raise _changed_error(url)
    publish_bytes(storage, url, data)
    return str(read_with_version(storage, url)[1])


def _changed_error(url: str) -> ChangedError:
    return ChangedError("the file was replaced meanwhile", shard=url)


def _run(filesystem: Any, request: Awaitable[Any], body: bytes) -> Any:
    """Run a request on the event loop of a file system, with the time limit of a part of an upload to S3."""
    limit_s = S3Object.response_timeout_s * max(1, len(body) // PART_BYTES)
    return run_on_loop(filesystem.loop, asyncio.wait_for(request, limit_s), Cancellation())


def _token(data: bytes, version: str | None) -> str:
    """Return the ETag of a file, or a digest of its bytes if the client knows none."""
    is_etag = version is not None and not version.startswith("Last-Modified")
    return str(version) if is_etag else f"sha256 {hashlib.sha256(data).hexdigest()}"
