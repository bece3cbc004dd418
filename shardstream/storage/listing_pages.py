"""List a remote folder page by page, one request each, where the client can do so."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardstream.errors import StorageError


@dataclass(frozen=True, slots=True)
class Page:
    """Some files of a listing, as entries of fsspec, and the names of some folders."""

    entries: Sequence[Mapping[str, Any]]
    folders: list[str] = field(default_factory=list)


def open_listing(filesystem: Any, path: str, *, url: str, recursive: bool) -> S3Listing | None:
    """Return the listing of a folder in pages; None if this client lists all at once.

    Args:
        filesystem: An fsspec file system.
        path: The folder or prefix on it, with its bucket.
        url: Its URL, for messages.
        recursive: Whether to list files in folders below it, and no folders.
    """
    if not path.strip("/"):  # all buckets
        return None
    s3fs = sys.modules.get("s3fs")
    if s3fs is None or not isinstance(filesystem, s3fs.S3FileSystem) or filesystem.version_aware:
        return None
    return S3Listing(filesystem, path, url, recursive)


def endless_error(problem: str, url: str) -> StorageError:
    """Return the error of a listing that would have no end."""
    return StorageError(
        f"the listing is not complete, but the server {problem}",
        remedy="list it again, or look for a fault of the server or of a proxy before it",
        shard=url,
    )


class S3Listing:
    """Pages of s3fs, one request each and repeatable, without the dict of over 1 kB that its `find` makes for each file and keeps."""

    def __init__(self, filesystem: Any, path: str, url: str, recursive: bool) -> None:
        bucket, key, _ = filesystem.split_path(path)
        self._filesystem, self._bucket, self._url = filesystem, bucket, url
        self._request = {"Bucket": bucket, "Delimiter": "" if recursive else "/"}
        self._request["Prefix"] = self._prefix = f"{key.lstrip('/')}/" if key else ""
        self._tokens: set[str] = set()
        self.is_complete = False

    def next_page(self) -> Page:
        """Send one request."""
        response = self._filesystem.call_s3(
            "list_objects_v2", self._filesystem.req_kw, **self._request
        )
        entries = [
            one | {"name": f"{self._bucket}/{one['Key']}", "size": one["Size"]}
            for one in response.get("Contents", ())
            if one["Key"] != self._prefix or not self._request["Delimiter"]
        ]
        folders = [
            one["Prefix"][len(self._prefix) : -1] for one in response.get("CommonPrefixes", ())
        ]
        self.is_complete = not response.get("IsTruncated")
        if not self.is_complete:
            self._request["ContinuationToken"] = self._next_token(response)
        return Page(entries, folders)

    def _next_token(self, response: Mapping[str, Any]) -> str:
        """Return the token of the next page.

        Raises:
            StorageError: If the listing would have no end.
        """
        token = response.get("NextContinuationToken")
        if not token:
            raise endless_error("sends no token for the next page", self._url)
        if token in self._tokens:
            raise endless_error("repeats a page", self._url)
        self._tokens.add(token)
        return str(token)
