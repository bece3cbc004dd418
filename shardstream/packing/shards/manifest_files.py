"""Write the manifest of a dataset, which has pages next to it if there are many shards, and read it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256

from shardstream.errors import ManifestError, NotFoundError
from shardstream.format import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    decode_pages,
    encode_manifest_files,
    is_pages_name,
)
from shardstream.storage import OutputFolder, join_url


class ManifestFiles:
    """The files of a new manifest: ``index.json``, and its pages if there are many shards.

    Args:
        folder: Folder of the dataset.
        manifest: The manifest.
        before: Names of the files in the folder.
        check_owner: Raises if another job has taken the folder over.
    """

    def __init__(
        self,
        folder: OutputFolder,
        manifest: Manifest,
        before: Iterable[str],
        check_owner: Callable[[], None],
    ) -> None:
        self._folder, self._before, self._check_owner = folder, before, check_owner
        self._files = encode_manifest_files(manifest)
        self._is_written = False

    @property
    def sha256(self) -> str:
        """Hash of ``index.json``."""
        return sha256(self._files[MANIFEST_NAME]).hexdigest()

    def are_there(self) -> bool:
        """Return whether the manifest of the folder is this one."""
        try:
            return self._folder.read(MANIFEST_NAME) == self._files[MANIFEST_NAME]
        except NotFoundError:
            return False

    def write(self) -> None:
        """Write the files, then delete the pages of an earlier manifest.

        Raises:
            StorageError: If another run has taken the folder over, or a file cannot be written; call `remove` then.
        """
        self._check_owner()
        self._is_written = True
        for name, data in self._files.items():
            self._folder.write(name, data)
        # A run that took the folder in between has not seen the manifest, so it must not stay.
        self._check_owner()
        for name in self._before:
            if is_pages_name(name) and name not in self._files:
                self._folder.remove(name)

    def remove(self) -> None:
        """Delete the manifest if `write` was to write it, also if an error said that it has not.

        Raises:
            StorageError: If it cannot be deleted.
        """
        if self._is_written and self.are_there():
            self._folder.remove(MANIFEST_NAME)


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
