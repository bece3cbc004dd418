"""Upload a file to S3 in parts while it is written; it becomes visible when they are joined.

Parts are 8 MiB: one is filled while up to four are in flight, and the client copies each of them. So an upload takes at most 72 MiB of
memory and nothing on the disk. A file smaller than one part is sent in one request. Each request has the MD5 of its bytes, which the
server checks. At the end the ETag of the whole file is compared, or, where the server's ETag is not that MD5, its length.

A request may arrive long after it was sent. So a file of a folder that another writer may take over is sent on the condition that none is
there. If one is, it is looked up, the owner of the folder is checked, random bytes replace it on the condition of its ETag, the owner is
checked again, and the file is sent on the condition of theirs, which no file has ever again: another writer may publish the earlier bytes, and
their ETag. So a file that arrives after another writer has published is refused.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import mimetypes
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from shardstream.errors import ChangedError, NotFoundError, StorageError, get_logger
from shardstream.storage.error_messages import classify_error
from shardstream.storage.response import UNSUPPORTED, Cancellation, Transfer, plain_etag
from shardstream.storage.retry import retry_call
from shardstream.storage.s3_request import Upload
from shardstream.storage.store import Storage

_log = get_logger(__name__)

PART_BYTES = 8 << 20
_IN_FLIGHT = 4
_PARTS_OF_A_SIZE = 2000  # S3 takes 10,000: sizes double every 2,000, which makes 520 GB
_MD5 = re.compile(r"[0-9a-f]{32}(-\d+)?")
_NO_FILE = {"IfNoneMatch": "*"}
_CONDITIONS = frozenset({"IfMatch", "IfNoneMatch"})
_QUOTES = ("", '"') * 4  # around ETags: Ceph takes none, other servers may want them


class _Part(NamedTuple):
    md5: bytes
    size: int
    etag: str
    """The ETag that the server returned."""


class S3Upload(io.RawIOBase):
    """A stream whose bytes are sent while they are written; end it with `finish` or `abort`. Used by one thread at a time.

    Args:
        storage: A storage whose file system for the URL is s3fs (see `takes_parts`).
        url: The file.
        is_only_writer: Whether no other process writes this file. Unfinished uploads of it, left by a killed writer, are then aborted.
        check_owner: Raises if another writer has taken the folder over, whose files must not be replaced.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        is_only_writer: bool = False,
        check_owner: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._is_only_writer, self._check_owner = is_only_writer, check_owner
        self._object = S3Object(storage, url)
        self._pieces: list[memoryview] = []
        self._held_bytes = 0
        self._parts: list[Future[_Part]] = []
        self._uploads_in_flight: deque[Future[_Part]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._upload_id: Future[str] | None = None
        self.etag: str | None = None
        """ETag of the file; known after `finish`, if the server returned one."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append bytes; wait while four parts are in flight.

        Raises:
            StorageError: If a part could not be sent.
        """
        # Bytes do not change until they are sent; the caller may fill any other buffer again.
        view = memoryview(data if isinstance(data, bytes) else bytes(data))
        at = 0
        while at < len(view):
            if self._held_bytes == self._part_bytes:  # and there is more: at least two parts
                self._send_part()
            piece = view[at : at + self._part_bytes - self._held_bytes]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            at += len(piece)
        return len(view)

    def end(self) -> None:
        """Send the last part of a file of several parts, without waiting for the response.

        Raises:
            StorageError: If an earlier part could not be sent.
        """
        if self._upload_id is not None and self._pieces:
            self._send_part()

    def finish(self) -> None:
        """Send the rest, join the parts, and check the file.

        Raises:
            StorageError: If that fails, or the server has other bytes, or another writer has taken the folder over.
        """
        if self._upload_id is None:
            body = self._take()
            parts = [_part_of(body)]
            send: Callable[..., str | None] = partial(
                self._object.put, "put_object", body, parts[0], **self._object.kind
            )
        else:
            self.end()
            parts = [future.result() for future in self._parts]
            send = partial(self._join, self._upload_id.result(), parts)
        if self._check_owner is None:
            etag_or_none = send()
        else:
            etag_or_none = self._object.send_as_owner(send, parts, self._check_owner)
        self.etag = plain_etag(etag_or_none)
        if etag_or_none is None or _plain(etag_or_none) != _etag_of(parts):
            self._object.check(self._object.head(), parts, is_known=etag_or_none is not None)
        self.abort()

    def _join(self, upload_id: str, parts: list[_Part], **condition: Any) -> str | None:
        etag_or_none = self._object.join(upload_id, parts, **condition)
        self._upload_id = None  # else `abort` still drops it
        return etag_or_none

    def abort(self) -> None:
        """Abort the upload; does nothing after `finish` or a second time."""
        self._pieces.clear()
        self._held_bytes = 0
        self._object.stop_retries(self._uploads_in_flight)
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None and not upload_id.cancelled() and upload_id.exception() is None:
            self._object.abort(upload_id.result())

    @property
    def _part_bytes(self) -> int:
        return int(PART_BYTES << (len(self._parts) // _PARTS_OF_A_SIZE))

    def _take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        return body

    def _send_part(self) -> None:
        if self._upload_id is None or self._pool is None:
            self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="shardstream-part")
            self._upload_id = self._pool.submit(
                self._object.begin, is_only_writer=self._is_only_writer
            )
        while len(self._uploads_in_flight) >= _IN_FLIGHT:
            self._uploads_in_flight.popleft().result()
        number = len(self._parts) + 1
        future = self._pool.submit(self._object.put_part, self._upload_id, number, self._take())
        self._uploads_in_flight.append(future)
        self._parts.append(future)


class S3Object:
    """One object of a bucket: requests for it, with retries.

    Args:
        storage: A storage whose file system for the URL is s3fs (see `takes_parts`).
        url: The file.
        repeats: Whether the client repeats a request that failed, too.
    """

    response_timeout_s = 120.0
    """Time limit of a request of 8 MiB, which needs 0.07 MB/s: a server that stopped reading fails it."""
    abort_timeout_s = 5.0
    """Time that requests in flight get to end when an upload is aborted."""

    def __init__(self, storage: Storage, url: str, *, repeats: bool = True) -> None:
        self._storage, self._url = storage, url
        filesystem, path = storage.resolve(url, repeats=repeats)
        self._filesystem = filesystem
        self._bucket, self._key, _ = filesystem.split_path(path)
        self._cancelled = threading.Event()
        self._requests: set[Future[Any]] = set()
        self._http, self._ended = storage.s3_http(url), Cancellation()
        kind = mimetypes.guess_type(self._key)[0]
        self.kind: dict[str, Any] = {} if kind is None else {"ContentType": kind}

    def begin(self, *, is_only_writer: bool) -> str:
        """Begin an upload in parts."""
        if is_only_writer:
            self.abort_all()
        return str(self._call("create_multipart_upload", **self.kind)["UploadId"])

    def put(self, method: str, body: bytes, part: _Part, **arguments: Any) -> str:
        """Send bytes with their MD5; return their ETag."""
        digest = base64.b64encode(part.md5).decode()
        response = self._call(method, len(body), Body=body, ContentMD5=digest, **arguments)
        return str(response.get("ETag", ""))

    def send_as_owner(
        self,
        send: Callable[..., str | None],
        parts: list[_Part],
        check_owner: Callable[[], None],
    ) -> str | None:
        """Send the object, but never over one of a writer that has taken the folder over; return its ETag (see above).

        Args:
            send: Sends it on a condition; returns its ETag, None if it is not known whether it was sent.
            parts: Its bytes.
            check_owner: Raises if another writer has taken the folder over.

        Raises:
            ChangedError: If others replace it each time.
        """
        condition = _NO_FILE
        refused: tuple[type[StorageError], ...] = (ChangedError,)
        for sign in _QUOTES:
            with suppress(*refused):
                etag = send(**condition)
                if etag is None:
                    check_owner()
                return etag
            condition, refused, found = _NO_FILE, (ChangedError,), None
            with suppress(NotFoundError):
                found = self.head()
            if found is None:
                check_owner()
                continue
            etag = found["ETag"]
            if _plain(etag) == _etag_of(parts) or not may_be_md5(_plain(etag), found, len(parts)):
                with suppress(StorageError):  # the response to an earlier attempt was lost
                    self.check(found, parts, is_known=False)
                    return str(etag)
            check_owner()
            body, refused = uuid.uuid4().bytes, (ChangedError, NotFoundError)
            with suppress(*refused):
                seen = {"IfMatch": f"{sign}{plain_etag(etag)}{sign}"}
                etag = self.put("put_object", body, _part_of(body), **seen)
                condition = {"IfMatch": f"{sign}{plain_etag(etag)}{sign}"}
            check_owner()
        raise ChangedError(
            "another writer replaces this file each time; wait until it ends, or write elsewhere",
            shard=self._url,
        )

    @property
    def sends_once(self) -> bool:
        """Whether `put_if` sends a file once: aiohttp, the client of s3fs, repeats a PUT unseen if the connection breaks off."""
        return self._http is not None

    def put_if(self, body: bytes, etag: str | None) -> str | None:
        """Send a small file in one request, which the server refuses unless the present one has an ETag; return its ETag.

        Args:
            body: The bytes.
            etag: The ETag; None if there must be no file.

        Raises:
            Exception: Any error of the client.
        """
        name, value = ("If-None-Match", "*") if etag is None else ("If-Match", etag)
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        if self._http is not None:
            client, path = self._http
            kind = {"Content-Type": self.kind["ContentType"]} if self.kind else {}
            upload = Upload(path, len(body), digest, headers={name: value, **kind})
            return plain_etag(client.put(upload, body, Transfer(self._limit_s(len(body)))))
        options = {name.replace("-", ""): value, **self.kind}
        found = self.request("put_object", len(body), Body=body, ContentMD5=digest, **options)
        return plain_etag(found.get("ETag"))

    def put_part(self, upload_id: Future[str], number: int, body: bytes) -> _Part:
        """Send one part, when the upload has begun."""
        begun, part = upload_id.result(), _part_of(body)
        if self._http is None:
            etag = self.put("upload_part", body, part, UploadId=begun, PartNumber=number)
            return part._replace(etag=etag)
        # The client of s3fs takes twice the processor time: an upload to a server on the same two cores takes 1.3 times as long.
        client, path = self._http
        query = f"?partNumber={number}&uploadId={quote(begun, safe='~')}"
        upload = Upload(path, len(body), base64.b64encode(part.md5).decode(), query)
        etag = retry_call(
            self._storage,
            self._url,
            lambda: client.put(
                upload, body, Transfer(self._limit_s(len(body)), cancelled=self._ended)
            ),
            cancelled=self._cancelled,
        )
        return part._replace(etag=etag)

    def join(self, upload_id: str, sent: list[_Part], **condition: Any) -> str | None:
        """Join the parts; return the ETag of the object, None if the upload is gone."""
        parts = [{"PartNumber": n, "ETag": part.etag} for n, part in enumerate(sent, start=1)]
        try:
            response = self._call(
                "complete_multipart_upload",
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **condition,
            )
        except NotFoundError:
            # Joined by a request whose response was lost, or aborted by another writer.
            _log.info(
                "%s: the server does not know the upload any more; checking the object", self._url
            )
            return None
        return str(response.get("ETag", ""))

    def abort(self, upload_id: str) -> None:
        """Abort an upload; errors are logged."""
        try:
            with self._storage.translate_errors(self._url):
                self.request("abort_multipart_upload", UploadId=upload_id)
        except NotFoundError:
            return
        except StorageError as error:
            _log.warning("%s: an unfinished upload is left on the server (%s)", self._url, error)

    def abort_all(self) -> None:
        """Abort all uploads of this object.

        If the server does not list them, they stay: they use space, but are not visible.
        """
        try:
            with self._storage.translate_errors(self._url):
                response = self.request("list_multipart_uploads", Prefix=self._key, Key=None)
        except StorageError as error:
            _log.info("%s: cannot list unfinished uploads: %s", self._url, error)
            return
        for upload in response.get("Uploads") or ():
            if upload["Key"] == self._key:
                self.abort(upload["UploadId"])

    def head(self) -> dict[str, Any]:
        """Look the object up."""
        return self._call("head_object")

    def check(self, found: dict[str, Any], parts: list[_Part], *, is_known: bool) -> None:
        """Compare the object on the server with the parts that were sent.

        Args:
            found: What `head` has returned.
            parts: The parts that were sent.
            is_known: Whether the server confirmed that it joined them; otherwise the object may be an older one.

        Raises:
            StorageError: If they differ.
        """
        size = sum(part.size for part in parts)
        if found["ContentLength"] != size:
            raise StorageError(
                f"{found['ContentLength']} of {size} bytes arrived; write it again", shard=self._url
            )
        etag = _plain(found.get("ETag", ""))
        is_md5 = may_be_md5(etag, found, len(parts))
        if etag != _etag_of(parts) if is_md5 else not is_known:
            self._compare(parts)

    def stop_retries(self, uploads_in_flight: deque[Future[_Part]]) -> None:
        """Stop retries; requests in flight get `abort_timeout_s` to end."""
        self._cancelled.set()
        wait(uploads_in_flight, timeout=self.abort_timeout_s)
        self._ended.set()
        for request in list(self._requests):
            request.cancel()

    def _compare(self, parts: list[_Part]) -> None:
        """Read the object and compare its bytes: an ETag that looks like an MD5 may be something else."""
        start = 0
        for part in parts:
            data = self._storage.read(self._url, start, start + part.size)
            if hashlib.md5(data, usedforsecurity=False).digest() != part.md5:
                raise StorageError(
                    "other bytes arrived than were sent; check the network and the server, and write it again",
                    shard=self._url,
                    offset=start,
                )
            start += part.size

    def _limit_s(self, nbytes: int) -> float:
        return self.response_timeout_s * max(1, nbytes // PART_BYTES)

    def _call(self, method: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        def send() -> dict[str, Any]:
            try:
                return self.request(method, nbytes, **arguments)
            except Exception as error:
                plain = {name: arguments[name] for name in arguments.keys() - _CONDITIONS}
                meaning = classify_error(error, self._url).meaning
                if meaning is not UNSUPPORTED or len(plain) == len(arguments):
                    raise
                return self.request(method, nbytes, **plain)

        return retry_call(self._storage, self._url, send, cancelled=self._cancelled)

    def request(self, method: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """Send one request; errors of the client are not translated."""
        target = {"Bucket": self._bucket, "Key": self._key} | arguments
        target = {name: value for name, value in target.items() if value is not None}
        request = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(self._filesystem._call_s3(method, **target), self._limit_s(nbytes)),
            self._filesystem.loop,
        )
        self._requests.add(request)
        try:
            return cast("dict[str, Any]", request.result())
        except CancelledError as error:
            raise StorageError(
                "the request was cancelled: its upload was aborted", shard=self._url
            ) from error
        finally:
            self._requests.discard(request)


def takes_parts(filesystem: Any) -> bool:
    """Return whether `S3Upload` can write to a file system, which must be s3fs."""
    return hasattr(filesystem, "_call_s3")


def _part_of(body: bytes) -> _Part:
    return _Part(hashlib.md5(body, usedforsecurity=False).digest(), len(body), "")


def _plain(etag: str) -> str:
    return etag.strip('"').lower()


def may_be_md5(etag: str, found: dict[str, Any], num_parts: int) -> bool:
    """Return whether an ETag may be an MD5 of the bytes (of parts: of their MD5s); ETags of encrypted objects are not."""
    if found.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in found:
        return False
    match = _MD5.fullmatch(etag)
    return match is not None and match[1] in (None if num_parts == 1 else f"-{num_parts}",)


def _etag_of(parts: list[_Part]) -> str:
    if len(parts) == 1:
        return parts[0].md5.hex()
    joined = hashlib.md5(b"".join(part.md5 for part in parts), usedforsecurity=False)
    return f"{joined.hexdigest()}-{len(parts)}"
