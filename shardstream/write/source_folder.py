"""Sources that are folders, or prefixes of a bucket: a folder for each class, or loose files grouped by their names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from shardstream.errors import OptionError, SourceError, plural
from shardstream.format.names import canonical_field, split_member_name
from shardstream.storage.filesystem import Storage
from shardstream.storage.listing import Listed, list_files, sample_members
from shardstream.write.source import (
    FileRef,
    KeyMaker,
    Record,
    fingerprint_of,
    is_image_name,
)

_log = logging.getLogger(__name__)

CLASSES_NAME = "classes.json"
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "dev"})


class ClassFolderSource:
    """Images in a folder for each class: ``root/CLASS/…/image.jpg``.

    A sample has the image, under its own extension, and ``cls``: the number of its class among the sorted folder names, which
    go to ``classes.json``. Other files are passed over, with a warning that counts them.

    Args:
        root: URL of the folder, for messages.
        files: What is under it.
        key: Template of the keys, from ``index``, ``stem``, ``path`` (without extension) and ``class``.
    """

    shuffled = True
    folders: frozenset[str] = frozenset()

    def __init__(self, root: str, files: Sequence[Listed], *, key: str | None = None) -> None:
        self._root = root
        self._key = key or "{index:08d}"
        self._images = [file for file in files if is_image_name(file.path)]
        stray = next((file for file in self._images if "/" not in file.path), None)
        if stray is not None:
            raise SourceError(
                f"{stray.path} lies right in this folder; put each image in the folder of its class "
                f"(CLASS/{stray.path}), or pack loose files with kind='files' (--kind files)",
                shard=root,
            )
        if not self._images:
            raise SourceError(
                f"no images in folders of classes (CLASS/image.jpg) among {plural(len(files), 'file')}",
                shard=root,
            )
        if len(files) > len(self._images):
            _log.warning(
                "%s: files that are no images are left out: %d",
                root,
                len(files) - len(self._images),
            )
        self.classes = tuple(sorted({file.path.split("/", 1)[0] for file in self._images}))
        """Folder names; a label is the position here."""
        deep = any(file.path.count("/") > 1 for file in self._images)
        if deep and _SPLITS.issuperset(self.classes):
            raise SourceError(
                f"these folders look like splits, not classes: {', '.join(self.classes)}; "
                "pack each of them by itself, to a destination of its own",
                shard=root,
            )

    @property
    def name(self) -> str:
        """What it is and where."""
        return f"images of {plural(len(self.classes), 'class')} in {self._root}"

    @property
    def length(self) -> int:
        """How many images there are."""
        return len(self._images)

    @property
    def fingerprint(self) -> str:
        """Changes with paths, sizes, and times or ETags."""
        return _fingerprint("images", self._images)

    @property
    def extras(self) -> Mapping[str, bytes]:
        """``classes.json``: the class names in the order of their labels."""
        text = json.dumps(self.classes, ensure_ascii=False, indent=1)
        return {CLASSES_NAME: f"{text}\n".encode()}

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path."""
        labels = {name: label for label, name in enumerate(self.classes)}
        make_key = KeyMaker(self._key, source=self._root)
        for index, file in enumerate(self._images):
            path, _, extension = file.path.rpartition(".")
            folder = file.path.split("/", 1)[0]
            names = {"index": index, "stem": path.rpartition("/")[2], "path": path, "class": folder}
            fields = {
                canonical_field(extension): FileRef(file.url, file.size),
                "cls": labels[folder],
            }
            yield Record(make_key(file.url, **names), fields, file.url)


class GroupedFilesSource:
    """Loose files, one sample for each base name: ``0001.jpg`` and ``0001.json`` make the sample ``0001``.

    Files without an extension are passed over, with a warning that counts them.

    Args:
        root: URL of the folder, for messages.
        files: What is under it.
        key: Template of the keys, from ``index``, ``stem`` and ``path`` (up to the first dot); by default the path.
    """

    shuffled = False
    extras: Mapping[str, bytes] = {}
    folders: frozenset[str] = frozenset()

    def __init__(self, root: str, files: Sequence[Listed], *, key: str | None = None) -> None:
        self._root = root
        self._files = files
        self._key = key or "{path}"

    @property
    def name(self) -> str:
        """What it is and where."""
        return f"files grouped by name in {self._root}"

    @property
    def length(self) -> int:
        """How many samples there are."""
        return len(self._groups)

    @property
    def fingerprint(self) -> str:
        """Changes with paths, sizes, and times or ETags."""
        return _fingerprint("files", self._files)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path."""
        make_key = KeyMaker(self._key, source=self._root)
        for index, (path, group) in enumerate(self._groups.items()):
            where = next(iter(group.values())).url
            names = {"index": index, "stem": path.rpartition("/")[2], "path": path}
            fields = {field: FileRef(file.url, file.size) for field, file in group.items()}
            yield Record(make_key(where, **names), fields, where)

    @cached_property
    def _groups(self) -> dict[str, dict[str, Listed]]:
        groups: dict[str, dict[str, Listed]] = {}
        for key, field, file in sample_members(self._root, self._files):
            groups.setdefault(key, {})[field] = file
        return groups


def guess_folder(
    root: str, files: Sequence[Listed], *, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Tell a folder of class folders from one of loose files.

    Class folders hold images alone; an image that has companions (``0001.jpg`` with ``0001.json``) is a loose sample.

    Raises:
        SourceError: As the sources do.
    """
    images = {file.path for file in files if is_image_name(file.path)}
    nested = [path for path in images if "/" in path]
    stems = {_stem(path) for path in images}
    companions = any(_stem(file.path) in stems for file in files if file.path not in images)
    if not nested or companions or len(nested) * 2 < len(images):
        return GroupedFilesSource(root, files, key=key)
    return ClassFolderSource(root, files, key=key)


def _fingerprint(kind: str, files: Sequence[Listed]) -> str:
    return fingerprint_of(kind, *(part for file in files for part in (file.path, *file[2:])))


def _stem(path: str) -> str | None:
    parts = split_member_name(path)
    return None if parts is None else parts[0]


def folder_source(
    root: str, storage: Storage, *, kind: str | None, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Open a folder as ``images``, as ``files``, or as what it looks like.

    Raises:
        OptionError: If the kind is another.
        SourceError: If the folder does not look like that.
    """
    files = list_files(root, storage)
    if not files:
        raise SourceError("no files are here; check the path", shard=root)
    if kind is None:
        return guess_folder(root, files, key=key)
    if kind == "images":
        return ClassFolderSource(root, files, key=key)
    if kind == "files":
        return GroupedFilesSource(root, files, key=key)
    raise OptionError(f"a folder is packed as kind 'images' or 'files', not {kind!r}")
