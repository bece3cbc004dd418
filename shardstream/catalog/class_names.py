"""Read the class names of stored datasets from the ``classes.json`` in the folder of their shards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

from shardstream.errors import (
    AccessDeniedError,
    ClassesWarning,
    ManifestError,
    NotFoundError,
    OptionError,
    get_logger,
    plural,
    redact,
    shown,
)
from shardstream.format import CLASSES_NAME, MANIFEST_NAME, DatasetVersion, decode_classes
from shardstream.storage import LocatedShards, Storage, folder_of_manifest, join_url

_log = get_logger(__name__)

_THREADS = 16
CLASSES_LIMIT_BYTES = 64 << 20  # about a million names

Classes = tuple[str, ...]


def read_classes(
    folder: str, storage: Storage, version: DatasetVersion | None = None
) -> Classes | None:
    """Return the class names of a dataset, in the order of their numbers; None if its folder has no ``classes.json``.

    Raises:
        ManifestError: If the file is not a list of names, or lacks names that were added by this version or one before it.
        StorageError: If the folder cannot be read.
    """
    url = join_url(folder, CLASSES_NAME)
    # Of a remote store this would be a request more.
    if storage.local_path(url) is not None and not storage.exists(url):
        return None
    try:
        data = storage.read(url, max_bytes=CLASSES_LIMIT_BYTES + 1)
    except NotFoundError:
        return None
    if len(data) > CLASSES_LIMIT_BYTES:
        raise ManifestError(
            f"over {CLASSES_LIMIT_BYTES:,} bytes of class names, the limit; write a shorter list",
            shard=url,
        )
    names = decode_classes(data, url=url)
    if version is not None and version.class_counts and len(names) <= version.class_counts[-1][1]:
        raise ManifestError(
            f"it has {plural(len(names), 'name')}, but version {version.class_counts[-1][0]} of the dataset added some: it is older than "
            f"{MANIFEST_NAME}; copy it from the same dataset again",
            shard=url,
        )
    return names


def read_all_classes(
    folders: Sequence[str], storage: Storage, version: DatasetVersion | None = None
) -> dict[str, Classes]:
    """Return folder -> class names of the folders that have a ``classes.json``; an invalid file is skipped with a logged warning.

    Raises:
        StorageError: If a folder cannot be read.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-look") as pool:
        found = pool.map(partial(_read_leniently, storage=storage, version=version), folders)
        return {
            folder: names for folder, names in zip(folders, found, strict=True) if names is not None
        }


def _read_leniently(
    folder: str, storage: Storage, version: DatasetVersion | None
) -> Classes | None:
    try:
        return read_classes(folder, storage, version)
    except AccessDeniedError:  # S3 denies access to a missing file without the permission to list
        return None
    except ManifestError as error:
        _log.warning("the class names are unknown: %s", error)
        return None


def find_difference(found: Mapping[str, Classes]) -> str | None:
    """Return a text on two datasets that number a class differently; None if one list of names fits all.

    >>> find_difference({"train/": ("a", "b", "c"), "val/": ("a", "c")})
    "'b' is class 1 in train/, where val/ has 'c'"
    >>> find_difference({"train/": ("a", "b", "c"), "val/": ("a", "b")}) is None
    True
    """
    longest = max(found, key=lambda place: len(found[place]), default="")
    for place, names in found.items():
        for number, (expected, name) in enumerate(zip(found[longest], names, strict=False)):
            if name != expected:
                return f"{expected!r} is class {number} in {longest}, where {place} has {name!r}"
    return None


def common_classes(found: Mapping[str, Classes]) -> Classes | None:
    """Return the class names of datasets; None if there are none, or they differ."""
    if not found or find_difference(found) is not None:
        return None
    return max(found.values(), key=len)


def warn_of_difference(found: Mapping[str, Classes]) -> None:
    """Warn where datasets that are read together number their classes differently."""
    difference = find_difference(found)
    if difference is not None:
        warnings.warn(
            f"class numbers differ: {shown(redact(difference))}. One value of 'cls' means several classes; "
            "pack again with one list of names (shardstream pack --classes), or silence this if your steps renumber them",
            ClassesWarning,
            stacklevel=3,
        )


class ClassNames:
    """The class names of the folders or datasets that are read together.

    Args:
        found: Folder or dataset -> its class names; those without any are left out.
    """

    def __init__(self, found: Mapping[str, Classes]) -> None:
        self._found = found

    @property
    def found(self) -> Mapping[str, Classes]:
        """Folder or dataset -> its class names.

        Raises:
            StorageError: If a folder cannot be read.
        """
        return self._found

    @property
    def names(self) -> Classes | None:
        """Class names in the order of their numbers; None if there are none, or datasets differ."""
        return common_classes(self.found)

    @property
    def checked_names(self) -> Classes | None:
        """Class names in the order of their numbers; None if there are none.

        Raises:
            OptionError: If datasets number their classes differently.
        """
        difference = find_difference(self.found)
        if difference is not None:
            raise OptionError(
                f"class numbers differ among these shards: {difference}; write each folder separately"
            )
        return self.names


class StoredClassNames(ClassNames):
    """The class names of shards, read at the first access.

    Args:
        located: The shards.
        storage: Storage of the shards.
    """

    def __init__(self, located: LocatedShards, storage: Storage) -> None:
        self._storage = storage
        self._manifest_url, self._count = located.manifest_url, located.num_classes
        self._version = located.version
        self.folders = located.folders
        """Folders of the shards."""

    @cached_property
    def found(self) -> Mapping[str, Classes]:
        """Folder -> class names: of the manifest's folder, or else of each folder of shards that has some.

        Raises:
            StorageError: If a folder cannot be read.
        """
        first = () if self._manifest_url is None else (folder_of_manifest(self._manifest_url),)
        found = read_all_classes(first, self._storage, self._version)
        found = {folder: names[: self._count] for folder, names in found.items()}
        rest = [folder for folder in self.folders if folder not in first]
        return found or read_all_classes(rest, self._storage)
