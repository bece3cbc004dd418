"""Say in ``index.json`` which writers go on to append, so that readers that follow the dataset wait for them.

A writer is listed from its opening until it is closed: one that was killed, or failed, stays, because nobody else knows that it will not go on.
The version stays the same, as no samples change.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from shardstream.errors import OptionError
from shardstream.format import DatasetVersion, OpenWriter
from shardstream.storage import Storage, Urls
from shardstream.versions.publish_version import AnyManifest, dataset_folder, publish_version


def this_writer(token: str) -> OpenWriter:
    """Return the entry of a writer of this process that publishes now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return OpenWriter(
        token=token, host=f"{socket.gethostname()} (process {os.getpid()})", published=now
    )


def open_writer(folder: str, storage: Storage, token: str) -> None:
    """List a writer of this process in a dataset.

    Raises:
        ChangedError: If other writers publish again and again.
        StorageError: If the manifest cannot be read or written.
    """
    _change_writers(
        folder, storage, lambda version: (*version.other_writers(token), this_writer(token))
    )


def close_writer(folder: str, storage: Storage, token: str) -> None:
    """List a writer no more; errors are those of `open_writer`."""
    _change_writers(folder, storage, lambda version: version.other_writers(token))


def close_writers(
    url: Urls, writer: str | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> list[OpenWriter]:
    """Close writers that were killed or have failed, so that readers that follow the dataset do not wait for them.

    What they have published stays. One that still runs goes on, and is listed again by its next publication.

    Args:
        url: Folder of the dataset.
        writer: Token of one of them; None for all.
        storage_options: For fsspec.

    Returns:
        The writers that were closed.

    Raises:
        OptionError: If no writer has this token.
        NotFoundError: If there is no dataset.
        ChangedError: If other writers publish again and again.
        StorageError: If the manifest cannot be read or written.
    """
    closed: list[OpenWriter] = []

    def left(version: DatasetVersion) -> tuple[OpenWriter, ...]:
        chosen = [one for one in version.writers if writer in (None, one.token)]
        if writer is not None and not chosen:
            known = ", ".join(one.token for one in version.writers) or "none"
            raise OptionError(
                f"no open writer is {writer!r}; open writers: {known}", shard=str(url)
            )
        closed[:] = chosen
        return tuple([one for one in version.writers if one not in chosen])

    _change_writers(dataset_folder(url), Storage(storage_options), left)
    return closed


def _change_writers(
    folder: str, storage: Storage, change: Callable[[DatasetVersion], tuple[OpenWriter, ...]]
) -> None:
    def changed(manifest: AnyManifest) -> AnyManifest | None:
        version = manifest.dataset_version
        writers = change(version)
        if writers == version.writers:
            return None
        return replace(manifest, dataset_version=replace(version, writers=writers))

    publish_version(folder, storage, changed)
