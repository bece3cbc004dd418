"""Read S3, Google Cloud Storage and Azure with obstore, a Rust client that releases the GIL during requests.

One reader and one file system serve all three; `open_bucket` builds the store of a bucket from its settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Unpack
from urllib.parse import urlsplit
from urllib.request import getproxies

import obstore
from obstore.fsspec import FsspecStore
from obstore.store import AzureStore, GCSStore, S3Store

from shardstream.storage import fork_safety
from shardstream.storage.error_messages import NO_PROXY_AT, classify_error
from shardstream.storage.gcs_azure_config import CloudSettings
from shardstream.storage.response import (
    RangeResponse,
    RequestOptions,
    max_response_bytes,
    plain_etag,
)
from shardstream.storage.s3_config import S3Settings
from shardstream.storage.transfer import SLOWEST_BYTES_PER_S, Transfer, collect_parts

_AT_ONCE_BYTES = 8 << 20
_STREAM_CHUNK_BYTES = 256 << 10
_PAGE_FILES = 1000


class ObstoreReader:
    """Reads ranges with obstore; its retries are switched off, because `retry` retries.

    Args:
        kind: "s3", "gs" or "az".
        settings: Server and credentials.
    """

    def __init__(self, kind: str, settings: S3Settings | CloudSettings) -> None:
        self._open = partial(open_bucket, kind, settings, retries=False)
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        transfer: Transfer,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once."""
        bucket, _, key = path.partition("/")
        fork_safety.note_obstore_started()
        response = self._get(self._store(bucket), key, start, end)
        transfer.begin_body()
        meta = response.meta
        first, last = response.range
        is_at_once = last - first <= _AT_ONCE_BYTES and not options.get("keep_partial")
        body = (
            (whole.bytes() for whole in [response])
            if is_at_once
            else response.stream(_STREAM_CHUNK_BYTES)
        )
        limit = max_response_bytes(start, end, options.get("max_bytes"))
        parts, error = collect_parts(body, transfer, limit)
        data = memoryview(parts[0]) if len(parts) == 1 else b"".join(parts)
        return RangeResponse(
            data=data, size=meta["size"], version=plain_etag(meta["e_tag"]), error=error
        )

    @staticmethod
    def _get(store: Any, key: str, start: int, end: int | None) -> Any:
        """Request a range; a whole file, too: without one obstore takes any part that a cache returns for the file."""
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        try:
            return obstore.get(store, key, options=options)
        except Exception as refused:
            if (start, end) != (0, None) or not classify_error(refused, key).meaning.is_past_end:
                raise
            response = obstore.get(store, key)
            if response.meta["size"]:
                raise
            return response  # an empty file has no range

    def _store(self, bucket: str) -> Any:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = self._open(bucket)
            return self._stores[bucket]


class ObstoreFilesystem(FsspecStore):
    """An fsspec file system on obstore: lists and writes where s3fs, gcsfs or adlfs is not installed.

    obstore opens buckets with ``from_url``, which does not accept all settings that a reader has.

    Args:
        kind: "s3", "gs" or "az".
        open_store: Opens the store of a bucket.
    """

    cachable = False
    protocol = ("s3", "s3a", "gs", "gcs", "az", "abfs")  # type: ignore[assignment]  # as fsspec has it

    def __init__(self, kind: str, open_store: Callable[[str], Any]) -> None:
        self._open_store = open_store
        super().__init__(kind)  # type: ignore[call-overload]

    def list_from(self, path: str, after: str | None) -> Iterator[Sequence[Any]]:
        """Return a stream of pages of all files under a path, in the order of their names.

        Args:
            path: Bucket and prefix.
            after: Bucket and key of the file after which the listing begins; None: at the first.
        """
        bucket, prefix = self._split_path(path)
        offset = None if after is None else self._split_path(after)[1]
        return iter(
            obstore.list(self._open_store(bucket), prefix, offset=offset, chunk_size=_PAGE_FILES)
        )

    def _construct_store(self, bucket: str) -> Any:
        return self._open_store(bucket)


def open_filesystem(
    kind: str, settings: S3Settings | CloudSettings, *, retries: bool
) -> ObstoreFilesystem:
    """Open a file system for buckets of one kind."""
    return ObstoreFilesystem(kind, partial(open_bucket, kind, settings, retries=retries))


def open_bucket(
    kind: str, settings: S3Settings | CloudSettings, bucket: str, *, retries: bool
) -> Any:
    """Open the store of a bucket.

    Args:
        kind: "s3", "gs" or "az".
        settings: Server and credentials.
        bucket: Its name.
        retries: Whether obstore retries requests by itself.
    """
    options: dict[str, Any] = {
        "client_options": _client_options(settings, retries=retries),
        "retry_config": None if retries else {"max_retries": 0},
    }
    if isinstance(settings, S3Settings):
        provider: Any = None if settings.anonymous else settings.credentials
        return S3Store(bucket, config=_s3_config(settings), credential_provider=provider, **options)
    store: Any = {"gs": GCSStore, "az": AzureStore}[kind]
    return store(bucket, config=settings.config, **options)


def can_name(path: str) -> bool:
    """Return whether obstore can request a path: no empty, "." or ".." part, and no control characters."""
    parts = path.split("/")
    return len(parts) > 1 and all(
        part not in ("", ".", "..") and part.isprintable() for part in parts
    )


def _s3_config(settings: S3Settings) -> Any:
    """Return the configuration of an `S3Store`; every value is given, so that no variable changes it."""
    config: dict[str, Any] = {
        "region": settings.region,
        "skip_signature": settings.anonymous,
        "virtual_hosted_style_request": settings.virtual_hosts,
        "request_payer": settings.requester_pays,
    }
    if settings.endpoint:
        config |= {"endpoint": settings.endpoint, "aws_endpoint_url_s3": settings.endpoint}
    return config


def _client_options(settings: S3Settings | CloudSettings, *, retries: bool) -> dict[str, Any]:
    # Of a whole response: one that is read at once may arrive as slowly as any other; a longer one is resumed. Uploads may take longer.
    total_s = settings.read_timeout_s + _AT_ONCE_BYTES / SLOWEST_BYTES_PER_S
    client: dict[str, Any] = {
        "allow_http": bool(settings.endpoint and settings.endpoint.startswith("http://")),
        "connect_timeout": timedelta(seconds=settings.connect_s),
        "read_timeout": timedelta(seconds=settings.read_timeout_s),
        "timeout": timedelta(days=1) if retries else timedelta(seconds=total_s),
    }
    if isinstance(settings, S3Settings):
        client |= _without_redirects(settings)
    if isinstance(settings, S3Settings) and settings.verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(settings, S3Settings) and isinstance(settings.verify, str):
        client["root_certificate"] = Path(settings.verify).read_text()
    return client


def _without_redirects(settings: S3Settings) -> dict[str, str]:
    """Return the options with which no other host is asked than that of the endpoint, if there is one.

    obstore follows redirects, and has no option against it: any other host is asked through a proxy that no machine can have.
    """
    host = urlsplit(settings.endpoint or "").hostname
    has_proxy = bool({"http", "https", "all"} & getproxies().keys())
    # obstore spells names that are not ASCII, or end with a dot, differently.
    if not host or not host.isascii() or host.endswith(".") or has_proxy:
        return {}
    return {"proxy_url": f"http://{NO_PROXY_AT}", "proxy_excludes": host}
