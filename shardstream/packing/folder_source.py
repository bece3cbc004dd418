"""Read records from folders of classes, or from loose files grouped by name."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SourceError, plural
from shardstream.format import (
    CLASSES_NAME,
    canonical_field,
    encode_classes,
    has_mask_word,
    split_member_name,
)
from shardstream.packing.class_numbering import is_split
from shardstream.packing.file_keys import file_key, key_levels
from shardstream.packing.source import (
    FileRef,
    KeyMaker,
    Record,
    fingerprint_of,
    is_image_name,
)
from shardstream.packing.split import Numbers
from shardstream.storage import ListedFile, Storage, list_files, sample_members

_log = logging.getLogger(__name__)


class ClassFolderSource:
    """Images in a folder for each class: ``root/CLASS/…/image.jpg``, or ``root/SPLIT/CLASS/…/image.jpg``.

    A sample has the image, under its own extension, and ``cls``: the number of its class among the sorted folder names, which
    go to ``classes.json``. Folders named train, val, test, … with the folders of classes in them are splits: one dataset each, with
    one numbering. Other files are skipped, with a warning that counts them.

    By default the key is the image's stem; where another image of the split has the same one, it is the path without the extension, and
    where that is not unique either (``a.jpg``, ``a.png``), the path and the number of the image.

    Args:
        root: URL of the folder, for messages.
        files: Files under it.
        key: Template of the keys, from ``index``, ``stem``, ``path`` (without extension) and ``class``.

    Raises:
        SourceError: If the images are not in folders of classes.
    """

    shuffled = True
    folders: frozenset[str] = frozenset()

    def __init__(self, root: str, files: Sequence[ListedFile], *, key: str | None = None) -> None:
        self._root = root
        self._key = key
        self._images = [file for file in files if is_image_name(file.path)]
        if not self._images:
            raise SourceError(
                f"no images in folders of classes (CLASS/image.jpg) among {plural(len(files), 'file')}",
                shard=root,
            )
        self.splits = _splits(root, self._images)
        """Names of the splits, sorted; empty if the folders are classes."""
        _check_depth(root, self._images, 1 if self.splits else 0)
        if len(files) > len(self._images):
            _log.warning(
                "%s: files that are not images are skipped: %d",
                root,
                len(files) - len(self._images),
            )
        self.classes: Classes = tuple(sorted({self._class(file) for file in self._images}))
        """Names of the classes; a label is the position here."""

    @property
    def name(self) -> str:
        """Kind and location of the source."""
        splits_text = f" and {plural(len(self.splits), 'split')}" if self.splits else ""
        return f"images of {plural(len(self.classes), 'class')}{splits_text} in {self._root}"

    @property
    def length(self) -> int:
        """Number of images."""
        return len(self._images)

    @property
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
        return _fingerprint("images", self._images)

    @property
    def extras(self) -> Mapping[str, bytes]:
        """``classes.json``: the class names in the order of their labels."""
        return {CLASSES_NAME: encode_classes(self.classes)}

    def assigned(self) -> Numbers:
        """Return the split of each image, as its number in `splits`; shape (n,)."""
        places = {name: place for place, name in enumerate(self.splits)}
        return np.array([places[_top_folder(file)] for file in self._images], dtype=np.int64)

    def refuse_masks(self) -> None:
        """Refuse a folder of photos next to a folder of their masks (``images/0001.jpg``, ``masks/0001.png``): these are not classes.

        Raises:
            SourceError: If half of the images in a folder named like masks have the stem of one in a folder named otherwise.
        """
        masked = [name for name in self.classes if has_mask_word(name)]
        stems: dict[str, set[str]] = {name: set() for name in self.classes}
        for file in self._images if masked else ():
            stems[self._class(file)].add(_photo_stem(file))
        for name in masked:
            for other in sorted(stems.keys() - masked):
                if 2 * len(stems[name] & stems[other]) >= len(stems[name]):
                    raise SourceError(
                        f"the folder {name} seems to hold the masks of the images in {other}, and each folder would become a class; "
                        "give both the same name in one folder (0001.jpg, 0001.seg.png), pack them with kind='files' (--kind files), or, "
                        "if the folders are classes, pass kind='images' (--kind images)",
                        shard=self._root,
                    )

    def with_class_numbers(self, classes: Classes, where: str) -> ClassFolderSource:
        """Return the same images with the class numbers of a list of names.

        Raises:
            SourceError: If a folder is not among the classes.
        """
        known = frozenset(classes)
        unknown = next((file for file in self._images if self._class(file) not in known), None)
        if unknown is not None:
            raise SourceError(
                f"the class {self._class(unknown)!r} ({unknown.path}) is not among the {plural(len(classes), 'class')} of {where}; "
                "pack all splits in one run (a folder with train/ and val/ in it), or give the names of all classes "
                "with classes= (--classes)",
                shard=self._root,
            )
        changed = copy.copy(self)
        changed.classes = classes
        return changed

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path.

        Raises:
            SourceError: If two images of a split have the same key.
        """
        # Files are sorted by path, so those of a split follow each other.
        for _, split in itertools.groupby(self._images, _top_folder if self.splits else _no_folder):
            yield from self._records(list(split))

    def _records(self, files: Sequence[ListedFile]) -> Iterator[Record]:
        """Yield the records of one dataset."""
        labels = {name: label for label, name in enumerate(self.classes)}
        paths = [self._path(file) for file in files]
        make_key = KeyMaker(self._key or "", source=self._root)
        levels = key_levels(paths) if self._key is None else ()
        for index, file in enumerate(files):
            path, _, extension = paths[index].rpartition(".")
            folder = self._class(file)
            if self._key is None:
                key = file_key(paths[index], index, int(levels[index]))
            else:
                names = {"index": index, "stem": path.rpartition("/")[2], "path": path}
                key = make_key(file.url, **names, **{"class": folder})
            fields = {
                canonical_field(extension): FileRef(file.url, file.size),
                "cls": labels[folder],
            }
            yield Record(key, fields, file.url)

    def _path(self, file: ListedFile) -> str:
        """Return the path of an image in its dataset."""
        return file.path.partition("/")[2] if self.splits else file.path

    def _class(self, file: ListedFile) -> str:
        return self._path(file).partition("/")[0]


def _top_folder(file: ListedFile) -> str:
    return file.path.partition("/")[0]


def _photo_stem(file: ListedFile) -> str:
    """Return the stem of an image; for ``0001_mask.png`` the stem of its photo."""
    stem = file.path.rpartition("/")[2].partition(".")[0]
    photo, _, last = stem.rpartition("_")
    return photo if photo and has_mask_word(last) else stem


def _no_folder(_: ListedFile) -> str:
    return ""


def _splits(root: str, images: Sequence[ListedFile]) -> tuple[str, ...]:
    """Return the names of the splits, if the folders right under the root are splits.

    Raises:
        SourceError: If some of the folders are splits, or splits without folders of classes: their names would become labels.
    """
    top_folders = sorted({_top_folder(file) for file in images if "/" in file.path})
    named = [name for name in top_folders if is_split(name)]
    has_classes = any(is_split(_top_folder(file)) and file.path.count("/") > 1 for file in images)
    if named == top_folders and has_classes:
        return tuple(top_folders)
    if len(named) > 1:
        not_splits = [name for name in top_folders if name not in named]
        problem = f"{not_splits[0]} does not" if not_splits else "and hold no folders of classes"
        raise SourceError(
            f"the folders {', '.join(named)} look like splits, {problem}; pack splits as SPLIT/CLASS/image.jpg, "
            "or each folder by itself",
            shard=root,
        )
    return ()


def _check_depth(root: str, images: Sequence[ListedFile], depth: int) -> None:
    misplaced = next((file for file in images if file.path.count("/") <= depth), None)
    if misplaced is not None:
        folder, slash, name = misplaced.path.rpartition("/")
        raise SourceError(
            f"{misplaced.path} is directly in {'the folder of a split' if folder else 'this folder'}; put each image in the folder "
            f"of its class ({folder}{slash}CLASS/{name}), or pack loose files with kind='files' (--kind files)",
            shard=root,
        )


class GroupedFilesSource:
    """Loose files, one sample for each base name: ``0001.jpg`` and ``0001.json`` make the sample ``0001``.

    Files without an extension are skipped, with a warning that counts them.

    Args:
        root: URL of the folder, for messages.
        files: Files under it.
        key: Template of the keys, from ``index``, ``stem`` and ``path`` (up to the first dot); by default the path.
    """

    shuffled = False
    extras: Mapping[str, bytes] = {}
    folders: frozenset[str] = frozenset()

    def __init__(self, root: str, files: Sequence[ListedFile], *, key: str | None = None) -> None:
        self._root = root
        self._files = files
        self._key = key or "{path}"
        splits = sorted({_top_folder(file) for file in files if is_split(_top_folder(file))})
        if len(splits) > 1:
            _log.warning(
                "%s: the folders %s look like splits, but all files go into one dataset; pack each folder by itself if this is not "
                "intended",
                root,
                ", ".join(splits),
            )

    @property
    def name(self) -> str:
        """Kind and location of the source."""
        return f"files grouped by name in {self._root}"

    @property
    def num_files(self) -> int:
        """Number of files in the samples."""
        return sum(map(len, self._groups.values()))

    @property
    def length(self) -> int:
        """Number of samples."""
        return len(self._groups)

    @property
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
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
    def _groups(self) -> dict[str, dict[str, ListedFile]]:
        groups: dict[str, dict[str, ListedFile]] = {}
        for key, field, file in sample_members(self._root, self._files):
            groups.setdefault(key, {})[field] = file
        return groups


def guess_folder(
    root: str, files: Sequence[ListedFile], *, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Open a folder as class folders or as loose files, by its content.

    Class folders hold images alone; an image that has companions (``0001.jpg`` with ``0001.json``) is a loose sample.

    Raises:
        SourceError: As the sources do; or if a folder seems to hold the masks of another.
    """
    images = {file.path for file in files if is_image_name(file.path)}
    nested = [path for path in images if "/" in path]
    stems = {_stem(path) for path in images}
    companions = any(_stem(file.path) in stems for file in files if file.path not in images)
    if not nested or companions or len(nested) * 2 < len(images):
        return GroupedFilesSource(root, files, key=key)
    source = ClassFolderSource(root, files, key=key)
    source.refuse_masks()
    return source


def _fingerprint(kind: str, files: Sequence[ListedFile]) -> str:
    return fingerprint_of(kind, *(part for file in files for part in (file.path, *file[2:])))


def _stem(path: str) -> str | None:
    parts = split_member_name(path)
    return None if parts is None else parts[0]


def folder_source(
    root: str, storage: Storage, *, kind: str | None, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Open a folder as ``images``, as ``files``, or by its content.

    Raises:
        OptionError: If the kind is unknown.
        SourceError: If the folder does not have that structure.
    """
    files = list_files(root, storage)
    if not files:
        raise SourceError("no files found; check the path", shard=root)
    if kind is None:
        return guess_folder(root, files, key=key)
    if kind == "images":
        return ClassFolderSource(root, files, key=key)
    if kind == "files":
        return GroupedFilesSource(root, files, key=key)
    raise OptionError(f"a folder is packed as kind 'images' or 'files', not {kind!r}")
