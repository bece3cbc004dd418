"""Read records from folders of classes, or from loose files grouped by name."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SourceError, get_logger, plural
from shardstream.format import (
    CLASSES_NAME,
    canonical_field,
    encode_classes,
    is_meta_name,
    split_member_name,
)
from shardstream.packing.job.key_hashes import find_repeat
from shardstream.packing.sources.file_keys import Levels, file_key, key_levels
from shardstream.packing.sources.folder_layout import (
    check_classes,
    check_depth,
    describe_files,
    find_splits,
    is_split,
    is_unsupported_image,
    refuse_containers,
    refuse_masks,
    refuse_metadata,
    refuse_sidecars,
    top_folder,
)
from shardstream.packing.sources.source import (
    FileRef,
    KeyMaker,
    Record,
    fingerprint_of_many,
    is_image_name,
    repeated_key,
)
from shardstream.packing.sources.split import SplitNumbers
from shardstream.storage import (
    FileList,
    FileRows,
    ListedFile,
    RowFile,
    Storage,
    iter_members,
    join_url,
    list_files,
    sort_rows,
    warn_of_rare_fields,
)

_log = get_logger(__name__)


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
        is_guess: Whether to refuse layouts that look like something else than folders of classes.

    Raises:
        SourceError: If the images are not in folders of classes.
    """

    shuffled = True
    folders: frozenset[str] = frozenset()
    has_unique_keys = True

    def __init__(
        self,
        root: str,
        files: Sequence[ListedFile],
        *,
        key: str | None = None,
        is_guess: bool = False,
    ) -> None:
        self._root = root
        self._make_key = None if key is None else KeyMaker(key, source=root)
        listed = files if isinstance(files, FileList) else FileList(files)
        count = sum(map(is_image_name, listed.paths()))
        if not count:
            raise SourceError(
                f"no images in folders of classes (CLASS/image.jpg) that can be packed, only {describe_files(listed.paths())}; "
                "convert other images, e.g. to jpg or png, or pack files as they are with kind='files' (--kind files)",
                shard=root,
            )
        self._images = listed
        if count < len(listed):
            self._images = FileList(
                (file for file in listed if is_image_name(file.path)), is_sorted=True
            )
        self.splits = find_splits(root, self._images, is_guess=is_guess)
        """Names of the splits, sorted; empty if the folders are classes."""
        depth = 1 if self.splits else 0
        check_depth(root, self._images, depth)
        self.classes: Classes = tuple(sorted(set(map(self._class, self._images.paths()))))
        """Names of the classes; a label is the position here."""
        self.empty_folders: tuple[str, ...] = ()
        """Names of folders that could be of classes, but hold no image."""
        if is_guess:
            refuse_masks(root, self._images, self._class)
            refuse_containers(root, self.classes)
        if len(listed) > count:
            check_classes(root, listed, self.classes, self._class, depth)
            if is_guess:
                refuse_sidecars(root, listed)
            skipped = (path for path in listed.paths() if not is_image_name(path))
            _log.warning(
                "%s: files that are not images are skipped: %s", root, describe_files(skipped)
            )
        self._datasets = _datasets(self._images, has_splits=bool(self.splits))
        if self._make_key is not None and not self._make_key.is_unique:
            self._compare_keys()

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

    def assigned(self) -> SplitNumbers:
        """Return the split of each image, as its number in `splits`; shape (n,)."""
        places = {name: place for place, name in enumerate(self.splits)}
        numbers = (places[top_folder(path)] for path in self._images.paths())
        return np.fromiter(numbers, dtype=np.uint16, count=len(self._images))

    def with_class_numbers(self, classes: Classes, where: str) -> ClassFolderSource:
        """Return the same images with the class numbers of a list of names.

        Raises:
            SourceError: If a folder is not among the classes.
        """
        unknown = frozenset(self.classes).difference(classes)
        if unknown:
            path = next(path for path in self._images.paths() if self._class(path) in unknown)
            raise SourceError(
                f"the class {self._class(path)!r} ({path}) is not in the list of {plural(len(classes), 'class')} of {where}; "
                "pack all splits in one run (a folder with train/ and val/ in it), or give the names of all classes "
                "with classes= (--classes)",
                shard=self._root,
            )
        changed = copy.copy(self)
        changed.classes = classes
        return changed

    def warn_of_empty_folders(self) -> None:
        """Log the folders without images that have no class number: they move the numbers of the others."""
        names = [f"{name}/" for name in self.empty_folders if name not in self.classes]
        if names:
            _log.warning(
                "%s: no image in %s, so classes have no number for it; to keep one, name all classes with classes= (--classes)",
                self._root,
                ", ".join(names[:10]) + (", ..." if len(names) > 10 else ""),
            )

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path."""
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return map(self._maker(), itertools.count(first), self._images.iter_from(first))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        make = self._maker()
        return (make(number, self._images[number]) for number in numbers)

    def _maker(self) -> Callable[[int, ListedFile], Record]:
        """Return a function that makes the record of an image from its number."""
        labels = {name: label for label, name in enumerate(self.classes)}

        def make(number: int, file: ListedFile) -> Record:
            extension = file.path.rpartition(".")[2]
            fields = {
                canonical_field(extension): FileRef(file.url, file.size),
                "cls": labels[self._class(file.path)],
            }
            return Record(self._key_of(number, file.path), fields, file.url)

        return make

    def _key_of(self, number: int, path: str) -> str:
        """Return the key of an image; its index is the number in its dataset."""
        index = number - self._datasets[bisect_right(self._datasets, number) - 1]
        name = path.partition("/")[2] if self.splits else path
        if self._make_key is None:
            return file_key(name, index, int(self._levels[number]))
        name = name.rpartition(".")[0]
        names = {"index": index, "stem": name.rpartition("/")[2], "path": name}
        return self._make_key.make(**names, **{"class": self._class(path)})

    @cached_property
    def _levels(self) -> Levels:
        """Levels of the default keys (see `file_key`)."""
        datasets = itertools.pairwise(self._datasets)
        return np.concatenate([key_levels(self._paths(*one)) for one in datasets])

    def _paths(self, first: int, last: int) -> _Paths:
        return _Paths(self._images, first, last, has_splits=bool(self.splits))

    def _compare_keys(self) -> None:
        """Compare all keys of each dataset.

        Raises:
            SourceError: If two are equal.
        """
        images = self._images
        for first, last in itertools.pairwise(self._datasets):
            files = enumerate(itertools.islice(images.iter_from(first), last - first), first)
            keys = (self._key_of(number, file.path) for number, file in files)

            def key_at(index: int, first: int = first) -> str:
                return self._key_of(first + index, images[first + index].path)

            if (found := find_repeat(keys, key_at)) is not None:
                one, other = (images[first + index].url for index in found)
                raise repeated_key(key_at(found[0]), one, other, source=self._root)

    def _class(self, path: str) -> str:
        path = path.partition("/")[2] if self.splits else path
        return path.partition("/")[0]


@dataclass(frozen=True, slots=True)
class _Paths(Collection[str]):
    """The paths of images in their dataset."""

    files: FileList
    first: int
    last: int
    has_splits: bool

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[str]:
        paths = itertools.islice(self.files.paths(self.first), len(self))
        return (path.partition("/")[2] for path in paths) if self.has_splits else paths

    def __contains__(self, path: object) -> bool:
        return any(path == one for one in self)


def _datasets(images: FileList, *, has_splits: bool) -> list[int]:
    """Return the number of the first image of each split, in the order of the paths, and the number of images."""
    firsts = [0]
    if has_splits:  # files are sorted by path, so those of a split follow each other
        for _, split in itertools.groupby(images.paths(), top_folder):
            firsts.append(firsts[-1] + sum(1 for _ in split))
        return firsts
    return [0, len(images)]


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
    has_unique_keys = True

    def __init__(self, root: str, files: Sequence[ListedFile], *, key: str | None = None) -> None:
        self._root = root
        self._files = files if isinstance(files, FileList) else FileList(files)
        self._make_key = KeyMaker(key or "{path}", source=root)
        tops = map(top_folder, self._files.paths())
        splits = sorted({top for top in tops if is_split(top)})
        if len(splits) > 1:
            _log.warning(
                "%s: the folders %s look like splits, but all files go into one dataset; pack each folder by itself if this is not "
                "intended",
                root,
                ", ".join(splits),
            )
        self.num_files = 0
        """Number of files in the samples."""
        convert = FileRows()
        self._file = convert.file
        # Of each sample its key, and for each of its files the field and the row of the file.
        self._samples = RowFile(self._groups(convert))
        warn_of_rare_fields(root, self._members)
        if key is not None and not self._make_key.is_unique:  # paths differ
            self._compare_keys()

    def _groups(self, convert: FileRows) -> Iterator[Sequence[Any]]:
        members = iter_members(self._root, self._files)
        for key, group in itertools.groupby(members, itemgetter(0)):
            rows = [(field, *convert.row(file._replace(version=None))) for _, field, file in group]
            self.num_files += len(rows)
            yield key, tuple(rows)

    def _members(self) -> Iterator[tuple[str, str, str]]:
        return ((key, row[0], row[1]) for key, rows in self._samples for row in rows)

    @property
    def name(self) -> str:
        """Kind and location of the source."""
        return f"files grouped by name in {self._root}"

    @property
    def length(self) -> int:
        """Number of samples."""
        return len(self._samples)

    @property
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
        return _fingerprint("files", self._files)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, sorted by path."""
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return map(self._record, itertools.count(first), self._samples.iter_from(first))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        return (self._record(number, self._samples[number]) for number in numbers)

    def _record(self, number: int, sample: Sequence[Any]) -> Record:
        path, rows = sample
        files = [(row[0], self._file(row[1:])) for row in rows]
        fields = {field: FileRef(file.url, file.size) for field, file in files}
        return Record(self._key_of(number, path), fields, files[0][1].url)

    def _key_of(self, number: int, path: str) -> str:
        return self._make_key.make(index=number, stem=path.rpartition("/")[2], path=path)

    def _compare_keys(self) -> None:
        """Compare all keys.

        Raises:
            SourceError: If two are equal.
        """
        keys = (self._key_of(number, sample[0]) for number, sample in enumerate(self._samples))
        found = find_repeat(keys, lambda number: self._key_of(number, self._samples[number][0]))
        if found is not None:
            one, other = self.records_at(found)
            raise repeated_key(one.key, one.where, other.where, source=self._root)


def guess_folder(
    root: str, files: Sequence[ListedFile], *, key: str | None
) -> ClassFolderSource | GroupedFilesSource:
    """Open a folder as class folders or as loose files, by its content.

    Class folders hold images alone; an image that has companions (``0001.jpg`` with ``0001.json``) is a loose sample.

    Raises:
        SourceError: As the sources do; or if the folders do not seem to be classes.
    """
    listed = files if isinstance(files, FileList) else FileList(files)
    refuse_metadata(root, listed)
    images = nested = 0
    for path in listed.paths():
        is_image = is_image_name(path) or is_unsupported_image(path)
        images += is_image
        nested += is_image and "/" in path
    if not nested or nested * 2 < images or (images < len(listed) and _has_companions(listed)):
        return GroupedFilesSource(root, listed, key=key)
    return ClassFolderSource(root, listed, key=key, is_guess=True)


def _has_companions(files: FileList) -> bool:
    """Return whether an image has the stem of another file."""

    def read() -> Iterator[tuple[str, bool]]:
        for path in files.paths():
            if (parts := split_member_name(path)) is not None:
                yield parts[0], is_image_name(path)

    # Mostly they are next to each other: then nothing need be sorted.
    return any(_has_companion(rows()) for rows in (read, lambda: sort_rows(read())))


def _has_companion(rows: Iterator[tuple[str, bool]]) -> bool:
    return any(one[0] == other[0] and one[1] != other[1] for one, other in itertools.pairwise(rows))


def _fingerprint(kind: str, files: Sequence[ListedFile]) -> str:
    parts = (part for file in files for part in (file.path, *file[2:]))
    return fingerprint_of_many(kind, parts)


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
    if kind == "files":
        return GroupedFilesSource(root, files, key=key)
    if kind not in (None, "images"):
        raise OptionError(f"a folder is packed as kind 'images' or 'files', not {kind!r}")
    guessed = kind is None
    source = (
        guess_folder(root, files, key=key) if guessed else ClassFolderSource(root, files, key=key)
    )
    if isinstance(source, ClassFolderSource):
        source.empty_folders = _empty_folders(source, root, storage)
    return source


def _empty_folders(source: ClassFolderSource, root: str, storage: Storage) -> tuple[str, ...]:
    """Return the sorted names of the folders beside those of classes that hold no image."""
    if storage.local_path(root) is None:  # a folder of an object store is the names of its files
        return ()
    parents = [join_url(root, split) for split in source.splits] or [root]
    names = {
        name for url in parents for name in storage.list_folder(url)[1] if not is_meta_name(name)
    }
    return tuple(sorted(names.difference(source.classes)))
