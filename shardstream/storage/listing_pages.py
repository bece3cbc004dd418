"""List a remote folder page by page, one request each, where the client can do so."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardstream.errors import StorageError


@dataclass(frozen=True, slots=True)
class Page:
    """Some files of a listing, as entries of fsspec, and the names of some folders."""

    entries: Sequence[Mapping[str, Any]]
    folders: list[str] = field(default_factory=list)


class Listing(Protocol):
    """A listing that goes on after its last page; a failed request can be repeated."""

    is_complete: bool

    def next_page(self) -> Page:
        """Send one request."""


def open_listing(filesystem: Any, path: str, *, url: str, recursive: bool) -> Listing | None:
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
    if s3fs is not None and isinstance(filesystem, s3fs.S3FileSystem):
        return None if filesystem.version_aware else _S3Listing(filesystem, path, url, recursive)
    # obstore returns the folders directly under a prefix all at once.
    return (
        _ObstoreListing(filesystem, path, url)
        if recursive and hasattr(filesystem, "list_from")
        else None
    )


def endless_error(problem: str, url: str) -> StorageError:
    """Return the error of a listing that would have no end."""
    return StorageError(
        f"the listing is not complete, but the server {problem}",
        remedy="list it again, or look for a fault of the server or of a proxy before it",
        shard=url,
    )


class _S3Listing:
    """Pages of s3fs, without the dict of over 1 kB that its `find` makes for each file and keeps."""

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


class _ObstoreListing:
    """Pages of obstore's stream; after an error another stream begins after the last file."""

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem, self._path, self._url = filesystem, path, url
        self._bucket = path.partition("/")[0]
        self._stream: Iterator[Sequence[Any]] | None = None
        self._after: str | None = None
        self._first_names: set[str] = set()  # of the pages
        self.is_complete = False

    def next_page(self) -> Page:
        """Take one page of the stream."""
        if self._stream is None:
            self._stream = self._filesystem.list_from(self._path, self._after)
        try:
            found = next(self._stream, None)
        except Exception:
            self._stream = None
            raise
        if not found:
            self.is_complete = True
            return Page(())
        if found[0]["path"] in self._first_names:
            raise endless_error("repeats a page", self._url)
        self._first_names.add(found[0]["path"])
        self._after = f"{self._bucket}/{found[-1]['path']}"
        return Page(
            [
                {
                    "name": f"{self._bucket}/{one['path']}",
                    "size": one["size"],
                    "e_tag": one["e_tag"],
                }
                for one in found
            ]
        )
