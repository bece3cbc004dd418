"""Publish the next version of a dataset: replace ``index.json`` if it is still the one that was read.

New files are written before, under names of their own, and the ``index.json`` of before becomes ``versions/N.json``. So a writer that is
killed leaves the old version, and of two writers at once the second applies its change to the version of the first.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from shardstream.errors import NotFoundError, OptionError
from shardstream.format import (
    MANIFEST_NAME,
    BinaryManifest,
    Manifest,
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
