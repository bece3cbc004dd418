"""S3 by obstore: Rust, without Python's lock while bytes come, and without a copy of them."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from shardstream.storage import fork_safety
from shardstream.storage.response import RangeResponse, max_response_bytes
from shardstream.storage.s3_config import S3Settings

_AT_ONCE_BYTES = 8 << 20
_STREAM_CHUNK_BYTES = 256 << 10


class ObstoreReader:
    """Reads by obstore's own calls, with its retries switched off: `retry` does better.

    Args:
        settings: Server and credentials.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._stores: dict[str, S3Store] = {}
        self._lock = threading.Lock()

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Ask once for the bytes ``start`` to ``end``."""
        bucket, _, key = path.partition("/")
        options: Any = {}
        if end is not None:
            options = {"range": (start, end)}
        elif start:
            options = {"range": {"offset": start}}
        fork_safety.note_obstore_started()
        answer = obstore.get(self._store(bucket), key, options=options)
        meta = answer.meta
        parts: list[Any] = []
        error: Exception | None = None
        first, last = answer.range
        try:
            if last - first <= _AT_ONCE_BYTES and not keep_partial:
                parts.append(answer.bytes())
            else:
                left = max_response_bytes(start, end, max_bytes)
                for part in answer.stream(_STREAM_CHUNK_BYTES):
                    parts.append(part)
                    left -= len(part)
                    if left < 0:
                        break
        except Exception as broken:  # noqa: BLE001  (the caller judges it, and keeps what came)
            error = broken
        data = memoryview(parts[0]) if len(parts) == 1 else b"".join(parts)
        return RangeResponse(data=data, size=meta["size"], version=meta["e_tag"], error=error)

    def _store(self, bucket: str) -> S3Store:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = S3Store(
                    bucket, **store_arguments(self._settings, retries=False)
                )
            return self._stores[bucket]


def can_name(path: str) -> bool:
    """Tell whether obstore can ask for a path: it knows no empty, "." or ".." part of a key, and no control characters."""
    parts = path.split("/")
    return len(parts) > 1 and all(
        part not in ("", ".", "..") and part.isprintable() for part in parts
    )


def store_arguments(settings: S3Settings, *, retries: bool) -> dict[str, Any]:
    """Return the arguments of an `obstore.store.S3Store`. All is said, so that no variable changes it."""
    config: dict[str, Any] = {
        "region": settings.region,
        "skip_signature": settings.anonymous,
        "virtual_hosted_style_request": settings.virtual_hosts,
        "request_payer": settings.requester_pays,
    }
    if settings.endpoint:
        config |= {"endpoint": settings.endpoint, "aws_endpoint_url_s3": settings.endpoint}
    client: dict[str, Any] = {
        "allow_http": bool(settings.endpoint and settings.endpoint.startswith("http://")),
        "connect_timeout": timedelta(seconds=settings.connect_s),
        "read_timeout": timedelta(seconds=settings.read_timeout_s),
        "timeout": timedelta(days=1),  # of a whole answer; the limit is on the time without a byte
    }
    if settings.verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(settings.verify, str):
        client["root_certificate"] = Path(settings.verify).read_text()
    return {
        "config": config,
        "client_options": client,
        "retry_config": None if retries else {"max_retries": 0},
        "credential_provider": None if settings.anonymous else settings.credentials,
    }
