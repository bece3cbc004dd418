"""Publish whole or not at all: nothing half-written is ever visible under its final name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardstream.errors import StorageError
from shardstream.storage.filesystem import Storage, explained, parent_url

# Where a PUT is one act: the object is there whole or not at all.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "memory", "hf"})
_PART_MARK = ".part-"


@contextmanager
def publish(storage: Storage, url: str) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at ``url`` when the block ends well, and never otherwise.

    On a local disk it is written beside its final place, flushed to the disk and renamed. For other file systems it is
    spooled to a temporary file, sent, and its length checked there.

    Raises:
        StorageError: If it cannot be written; the place is as it was.
    """
    path = storage.local_path(url)
    with _local_file(Path(path)) if path is not None else _remote_file(storage, url) as stream:
        yield stream


def publish_bytes(storage: Storage, url: str, data: bytes) -> None:
    """Publish a small file."""
    with publish(storage, url) as stream:
        stream.write(data)


def is_part(name: str) -> bool:
    """Tell whether a file is what a killed writer left behind."""
    return _PART_MARK in name


def remove(storage: Storage, url: str) -> None:
    """Delete a file; one that is not there is fine."""
    filesystem, path = storage.resolve(url)
    with explained(url):
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            return


@contextmanager
def _local_file(path: Path) -> Iterator[BinaryIO]:
    with explained(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}{_PART_MARK}", dir=path.parent)
        part = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            with explained(str(path)):
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)
                os.fsync(stream.fileno())
        with explained(str(path)):
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def _remote_file(storage: Storage, url: str) -> Iterator[BinaryIO]:
    filesystem, path = storage.resolve(url)
    with tempfile.NamedTemporaryFile(prefix="shardstream-") as spool:
        yield cast("BinaryIO", spool)
        spool.flush()
        size = spool.tell()
        with explained(url):
            _send(filesystem, Path(spool.name), path)
    sent = storage.info(url).size
    if sent != size:
        raise StorageError(f"{sent} of {size} bytes arrived; pack it again", shard=url)


def _send(filesystem: Any, source: Path, path: str) -> None:  # noqa: ANN401
    protocols = filesystem.protocol
    atomic = _ATOMIC.intersection((protocols,) if isinstance(protocols, str) else protocols)
    if atomic:
        filesystem.put_file(str(source), path)
        return
    part = f"{path}{_PART_MARK}{os.getpid()}"
    try:
        filesystem.makedirs(parent_url(path), exist_ok=True)
        filesystem.put_file(str(source), part)
        filesystem.mv(part, path)
    except BaseException:
        if filesystem.exists(part):
            filesystem.rm_file(part)
        raise
