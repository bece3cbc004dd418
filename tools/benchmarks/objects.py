"""List tars of a folder or bucket, and presign URLs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

_HOUR_S = 3600


@functools.cache
def s3_client() -> Any:
    """Return an S3 client for the server in the environment."""
    import boto3  # noqa: PLC0415  (local rows do without)

    return boto3.client("s3")


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key of an ``s3://`` URL.

    >>> split_url("s3://bucket/a/b.tar")
    ('bucket', 'a/b.tar')
    """
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def list_files(location: str) -> list[tuple[str, int]]:
    """Return paths or URLs of all files under a folder or prefix, with their sizes, sorted."""
    if not location.startswith("s3://"):
        found = (path for path in Path(location).rglob("*") if path.is_file())
        return sorted((str(path), path.stat().st_size) for path in found)
    bucket, prefix = split_url(location)
    pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return sorted(
        (f"s3://{bucket}/{entry['Key']}", entry["Size"])
        for page in pages
        for entry in page.get("Contents", ())
    )


def list_tars(location: str) -> list[str]:
    """Return paths or URLs of the tars under a folder or prefix, sorted."""
    return [name for name, _ in list_files(location) if name.endswith(".tar")]


def drop_pages(folder: str) -> None:
    """Drop the pages of all files under a folder from the page cache."""
    for name, _ in list_files(folder):
        with open(name, "rb") as stream:
            os.fsync(stream.fileno())  # pages that are not written yet stay
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def presign(url: str, operation: str = "get_object", **params: str) -> str:
    """Return a presigned http URL of an object, valid for an hour for a GET (or a PUT with "put_object"), with signed parameters."""
    bucket, key = split_url(url)
    url = s3_client().generate_presigned_url(
        operation, Params={"Bucket": bucket, "Key": key, **params}, ExpiresIn=_HOUR_S
    )
    return str(url)
