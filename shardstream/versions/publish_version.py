"""Publish the next version of a dataset: replace ``index.json`` if it is still the one that was read.

New files are written before, under names of their own, and the ``index.json`` of before becomes ``versions/N.json``. So a writer that is
killed leaves the old version, and of two writers at once the second applies its change to the version of the first.

The manifest also lists the writers that go on to append, so that readers that follow the dataset wait for them. A writer is listed from its opening
until it is closed: one that was killed, or failed, stays, because nobody else knows that it will not go on. That changes no samples, and no version.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from shardstream.errors import NotFoundError, OptionError
from shardstream.format import (
    MANIFEST_NAME,
    BinaryManifest,
    DatasetVersion,
    Manifest,
    OpenWriter,
    ShardInfo,
    decode_all_shards,
    decode_manifest,
    encode_manifest_files,
    ranges_of,
    version_name,
)
from shardstream.storage import (
    Storage,
    Urls,
    absolute_urls,
    dataset_of_change,
    expand_urls,
    folder_of_manifest,
    is_tar,
    join_url,
    publish_bytes,
    update_file,
)

AnyManifest = Manifest | BinaryManifest


def dataset_folder(url: Urls) -> str:
    """Return the URL of the folder of a dataset that is to be changed.

    Raises:
        OptionError: If it names tars, several datasets, or a part of one.
    """
    urls = expand_urls(absolute_urls(url))
    folder = folder_of_manifest(urls[0]) if urls[0].endswith(".json") else urls[0].rstrip("/")
    if len(urls) != 1 or is_tar(folder) or dataset_of_change(folder) is not None:
        raise OptionError(f"name the folder of one dataset, the one with its index.json, not {url}")
    return folder


def publish_version(
    folder: str, storage: Storage, change: Callable[[AnyManifest], AnyManifest | None]
) -> AnyManifest:
    """Publish a changed manifest, and keep the one of before.

    Args:
        folder: URL of the folder of the dataset.
        storage: Where it is.
        change: Returns the next manifest (see `next_version`) for the current one, and writes the files that it names; or None if there is
            nothing to change. It is called again if another writer has published meanwhile.

    Returns:
        The manifest that is current then.

    Raises:
        NotFoundError: If there is no manifest.
        ChangedError: If other writers published too often meanwhile.
        StorageError: If it cannot be read or written.
    """
    url = join_url(folder, MANIFEST_NAME)
    current: list[AnyManifest] = []
    read: list[AnyManifest] = []

    def change_bytes(old: bytes | None) -> bytes | None:
        if old is None:
            raise NotFoundError(
                "there is no dataset with an index.json here; name its folder, or write one by 'shardstream index'",
                shard=url,
            )
        before = decode_manifest(old, url=url)
        after = change(before)
        read[:], current[:] = [before], [before if after is None else after]
        if after is None:
            return None
        number = before.dataset_version.number
        if after.dataset_version.has(number) and after.dataset_version.number != number:
            publish_bytes(storage, join_url(folder, version_name(number)), old)
        files = encode_manifest_files(after)
        data = files.pop(MANIFEST_NAME)
        for name, content in files.items():
            publish_bytes(storage, join_url(folder, name), content)
        return data

    def is_done(found: bytes) -> bool:
        """Return whether the version that was written last is this manifest, or one before it; tags may be added since."""
        mine, now = current[0].dataset_version, decode_manifest(found, url=url).dataset_version
        if mine.number == read[0].dataset_version.number:  # a tag, which can be set again
            return False
        if now.number > mine.number:
            kept = storage.uncached().read(join_url(folder, version_name(mine.number)))
            now = decode_manifest(kept, url=url).dataset_version
        return (now.number, now.writer) == (mine.number, mine.writer)

    update_file(storage, url, change_bytes, is_done=is_done)
    return current[0]


def all_shards(manifest: AnyManifest, folder: str, storage: Storage) -> Sequence[ShardInfo]:
    """Return the shards of a manifest, with URLs relative to the folder of the dataset.

    Raises:
        ManifestError, IndexMismatchError: If the records of a `BinaryManifest` are damaged.
        StorageError: If they cannot be read.
    """
    if isinstance(manifest, Manifest):
        return manifest.shards
    url = join_url(folder, MANIFEST_NAME)
    return decode_all_shards(
        lambda name: storage.read_bounded(join_url(folder, name)), manifest, url=url
    )


def next_version(manifest: AnyManifest, operation: str, **changes: Any) -> AnyManifest:
    """Return a manifest as the next version, with some attributes of its `DatasetVersion` changed."""
    before = manifest.dataset_version
    number = before.number + 1
    is_compaction = operation == "compact"  # it removes all deleted samples
    version = replace(
        before,
        number=number,
        operation=operation,
        renumbered=(*before.renumbered, *[number] * is_compaction),
        kept=ranges_of([*before.kept_numbers, before.number]),
        **stamp(),
        **changes,
    )
    return replace(manifest, dataset_version=version)


def stamp() -> dict[str, Any]:
    """Return the attributes of a `DatasetVersion` that make those of any two writers differ."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": now, "writer": uuid.uuid4().hex[:12]}


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
