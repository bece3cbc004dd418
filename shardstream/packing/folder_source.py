"""Read records from folders of classes, or from loose files grouped by name."""

from __future__ import annotations

import copy
import itertools
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

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
    fingerprint_of_many,
    is_image_name,
)
from shardstream.packing.split import Numbers
from shardstream.storage import FileList, ListedFile, Storage, list_files, sample_order

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
        listed = files if isinstance(files, FileList) else FileList(files)
        is_image = np.fromiter(map(is_image_name, listed.paths()), dtype=bool, count=len(listed))
        self._images = listed.take(np.flatnonzero(is_image))
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
        self.classes: Classes = tuple(sorted(set(map(self._class, self._images.paths()))))
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
        return np.array(
            [places[_top_folder(path)] for path in self._images.paths()], dtype=np.int64
        )

    def refuse_masks(self) -> None:
        """Refuse a folder of photos next to a folder of their masks (``images/0001.jpg``, ``masks/0001.png``): these are not classes.

        Raises:
            SourceError: If half of the images in a folder named like masks have the stem of one in a folder named otherwise.
        """
        masked = [name for name in self.classes if has_mask_word(name)]
        stems: dict[str, set[str]] = {name: set() for name in self.classes}
        for path in self._images.paths() if masked else ():
            stems[self._class(path)].add(_photo_stem(path))
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
        unknown = next(
            (path for path in self._images.paths() if self._class(path) not in known), None
        )
        if unknown is not None:
            raise SourceError(
                f"the class {self._class(unknown)!r} ({unknown}) is not among the {plural(len(classes), 'class')} of {where}; "
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
        first = 0
        for _, split in itertools.groupby(
            self._images.paths(), _top_folder if self.splits else _no_folder
        ):
            last = first + sum(1 for _ in split)
            yield from self._records(self._images[first:last])
            first = last

    def _records(self, files: FileList) -> Iterator[Record]:
        """Yield the records of one dataset."""
        labels = {name: label for label, name in enumerate(self.classes)}
        paths = _Paths(files, has_splits=bool(self.splits))
        make_key = KeyMaker(self._key or "", source=self._root)
        levels = key_levels(paths) if self._key is None else ()
        for index, file in enumerate(files):
            name = paths[index]
            path, _, extension = name.rpartition(".")
            folder = self._class(file.path)
            if self._key is None:
                key = file_key(name, index, int(levels[index]))
            else:
                names = {"index": index, "stem": path.rpartition("/")[2], "path": path}
                key = make_key(file.url, **names, **{"class": folder})
            fields = {
                canonical_field(extension): FileRef(file.url, file.size),
                "cls": labels[folder],
            }
            yield Record(key, fields, file.url)

    def _class(self, path: str) -> str:
        path = path.partition("/")[2] if self.splits else path
        return path.partition("/")[0]


class _Paths(Sequence[str]):
    """The paths of images in their dataset."""

    def __init__(self, files: FileList, *, has_splits: bool) -> None:
        self._files, self._has_splits = files, has_splits

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> _Paths: ...

    def __getitem__(self, at: int | slice) -> str | _Paths:
        if isinstance(at, slice):
            return _Paths(self._files[at], has_splits=self._has_splits)
        path = self._files.path(at)
        return path.partition("/")[2] if self._has_splits else path


def _top_folder(path: str) -> str:
    return path.partition("/")[0]


def _photo_stem(path: str) -> str:
    """Return the stem of an image; for ``0001_mask.png`` the stem of its photo."""
    stem = path.rpartition("/")[2].partition(".")[0]
    photo, _, last = stem.rpartition("_")
    return photo if photo and has_mask_word(last) else stem


def _no_folder(_: str) -> str:
    return ""


def _splits(root: str, images: FileList) -> tuple[str, ...]:
    """Return the names of the splits, if the folders right under the root are splits.

    Raises:
        SourceError: If some of the folders are splits, or splits without folders of classes: their names would become labels.
    """
    top_folders = sorted({_top_folder(path) for path in images.paths() if "/" in path})
    named = [name for name in top_folders if is_split(name)]
    has_classes = any(
        is_split(_top_folder(path)) and path.count("/") > 1 for path in images.paths()
    )
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


def _check_depth(root: str, images: FileList, depth: int) -> None:
    misplaced = next((path for path in images.paths() if path.count("/") <= depth), None)
    if misplaced is not None:
        folder, slash, name = misplaced.rpartition("/")
        raise SourceError(
            f"{misplaced} is directly in {'the folder of a split' if folder else 'this folder'}; put each image in the folder "
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
        splits = sorted({top for file in files if is_split(top := _top_folder(file.path))})
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
        return len(self._order)

    @property
    def length(self) -> int:
        """Number of samples."""
        return len(self._firsts) - 1

    @property
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
        return _fingerprint("files", self._files)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path."""
        make_key = KeyMaker(self._key, source=self._root)
        for index, (first, last) in enumerate(itertools.pairwise(self._firsts)):
            group = [self._files[number] for number in self._order[first:last].tolist()]
            where, (path, _) = group[0].url, _key_and_field(group[0].path)
            names = {"index": index, "stem": path.rpartition("/")[2], "path": path}
            fields = {_key_and_field(file.path)[1]: FileRef(file.url, file.size) for file in group}
            yield Record(make_key(where, **names), fields, where)

    @cached_property
    def _order(self) -> Numbers:
        """Numbers of the files in samples, sorted by key and field."""
        return sample_order(self._root, self._files)

    @cached_property
    def _firsts(self) -> array[int]:
        """Place of the first file of each sample in the order, and the number of files."""
        firsts, before = array("q"), None
        for place, number in enumerate(self._order.tolist()):
            key, _ = _key_and_field(self._files[number].path)
            if key != before:
                firsts.append(place)
            before = key
        firsts.append(len(self._order))
        return firsts


def _key_and_field(path: str) -> tuple[str, str]:
    parts = split_member_name(path)
    if parts is None:
        raise AssertionError(path)  # `sample_order` leaves such files out
    return parts[0], canonical_field(parts[1])


def guess_folder(
    root: str, files: Sequence[ListedFile], *, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Open a folder as class folders or as loose files, by its content.

    Class folders hold images alone; an image that has companions (``0001.jpg`` with ``0001.json``) is a loose sample.

    Raises:
        SourceError: As the sources do; or if a folder seems to hold the masks of another.
    """
    images = nested = 0
    for file in files:
        is_image = is_image_name(file.path)
        images += is_image
        nested += is_image and "/" in file.path
    if not nested or nested * 2 < images or _has_companions(files):
        return GroupedFilesSource(root, files, key=key)
    source = ClassFolderSource(root, files, key=key)
    source.refuse_masks()
    return source


def _has_companions(files: Sequence[ListedFile]) -> bool:
    """Return whether an image has the stem of another file."""
    before: tuple[str | None, bool] = (None, False)
    for file in files:  # mostly they are next to each other: no set is needed
        now = (_stem(file.path), is_image_name(file.path))
        if now[0] is not None and now[0] == before[0] and now[1] != before[1]:
            return True
        before = now
    others = {_stem(file.path) for file in files if not is_image_name(file.path)}
    return any(_stem(file.path) in others for file in files if others and is_image_name(file.path))


def _fingerprint(kind: str, files: Sequence[ListedFile]) -> str:
    parts = (part for file in files for part in (file.path, *file[2:]))
    return fingerprint_of_many(kind, parts)


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
