"""Write the manifest of a dataset, which has pages next to it if there are many shards, and read it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from shardstream.errors import ManifestError, NotFoundError
from shardstream.format import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    decode_pages,
    is_pages_name,
)
from shardstream.storage import OutputFolder, join_url


def write_manifest_files(folder: OutputFolder, files: Mapping[str, bytes]) -> None:
    """Write what `encode_manifest_files` returns, in its order."""
    for name, data in files.items():
        folder.write(name, data)


def holds_manifest(folder: OutputFolder, files: Mapping[str, bytes]) -> bool:
    """Return whether the manifest of a folder is the one among these files."""
    try:
        return folder.read(MANIFEST_NAME) == files[MANIFEST_NAME]
    except NotFoundError:
        return False


def remove_old_pages(
    folder: OutputFolder, names: Iterable[str], files: Mapping[str, bytes]
) -> None:
    """Delete the pages of an earlier manifest, after the new one is published.

    Args:
        folder: The folder of the dataset.
        names: Names of the files in it.
        files: The files of the new manifest.
    """
    for name in names:
        if is_pages_name(name) and name not in files:
            folder.remove(name)


def read_old_manifest(folder: OutputFolder) -> Manifest:
    """Return the manifest of a folder, to be replaced; an empty one if there is none, or it is invalid."""
    url = join_url(folder.url, MANIFEST_NAME)
    try:
        manifest = decode_manifest(folder.read(MANIFEST_NAME), url=url)
        if isinstance(manifest, Manifest):
            return manifest
        shards = decode_pages(partial(folder.read, manifest.pages_name), manifest, url=url)
        return Manifest(shards=shards, name=manifest.name, fields=manifest.fields)
    except (ManifestError, NotFoundError):
        return Manifest(shards=())
