"""S3 as an fsspec file system by obstore alone, for listing and writing where s3fs is not installed."""

from __future__ import annotations

from typing import Any

from obstore.fsspec import FsspecStore
from obstore.store import S3Store


class ObstoreFilesystem(FsspecStore):
    """obstore's own file system, whose buckets are opened with the arguments that `s3_obstore.ObstoreReader` has.

    Its way to open them, ``from_url``, does not take all of these.

    Args:
        arguments: Of an `S3Store`.
    """

    cachable = False
    protocol = ("s3", "s3a")  # type: ignore[assignment]  # as fsspec has it

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        super().__init__("s3")

    def _construct_store(self, bucket: str) -> S3Store:
        return S3Store(bucket, **self._arguments)
