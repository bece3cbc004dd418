"""Read records from folders of classes, or from loose files grouped by name."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Self

import numpy as np

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SourceError, get_logger, plural
from shardstream.format import canonical_field, is_image_name, is_meta_name, split_member_name
from shardstream.packing.job.cut import SplitNumbers
from shardstream.packing.job.key_hashes import RepeatedKey, find_repeat
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
    FILE_KEYS,
    FileRef,
    Record,
    Source,
    fingerprint_of,
    has_numbers,
    make_key,
)
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


class FolderSource(Source):
    """Files under a folder, of which each record names one or several."""

    may_repeat_keys = False  # they are compared before any file is read

    _kind: str
    _root: str
    _files: FileList
    """All files of the records, for the fingerprint."""
    _items: FileList | RowFile[Any]
    """What the records are made of, in their order."""
    _datasets: Sequence[int]
    """Number of the first record of each dataset, and of all records."""
    _key: str
    """Template of the keys."""

    @property
    def length(self) -> int:
        """Number of records."""
        return len(self._items)

    @property
    def has_sizes(self) -> bool:
        """True: the listing has them."""
        return True

    @property
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
        parts = itertools.chain.from_iterable((file.path, *file[2:]) for file in self._files)
        return fingerprint_of(self._kind, parts)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return map(self._record, itertools.count(first), self._items.iter_from(first))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        return (self._record(number, self._items[number]) for number in numbers)

    def in_any_order(self) -> Self:
        """Return this source."""
        return self

    @abstractmethod
    def _record(self, number: int, item: Any) -> Record:
        """Make a record from its number and its item."""

    @abstractmethod
    def _key_of(self, number: int, item: Any) -> str:
        """Make the key of a record."""

    def _choose_key(self, *templates: str) -> None:
        """Take the first template with which all keys of each dataset differ: to compare 10^6 takes seconds, to pack the files hours.

        Raises:
            SourceError: If there is none.
        """
        found = None
        for self._key in templates:
            found = None if has_numbers(self._key) else self._find_repeated()
            if found is None:
                return
        if found is not None:
            one, other = found
            raise SourceError(
                str(RepeatedKey(one.key, one.where, other.where)),
                remedy="choose another, e.g. key='{index:08d}' (--key)",
                shard=self._root,
            )

    def _find_repeated(self) -> tuple[Record, Record] | None:
        """Return two records of a dataset that have one key."""
        for first, last in itertools.pairwise(self._datasets):
            items = itertools.islice(self._items.iter_from(first), last - first)

            def key_at(number: int, first: int = first) -> str:
                return self._key_of(first + number, self._items[first + number])

            found = find_repeat(map(self._key_of, itertools.count(first), items), key_at)
            if found is not None:
                one, other = self.records_at(first + number for number in found)
                return one, other
        return None


class ClassFolderSource(FolderSource):
    """Images in a folder for each class: ``root/CLASS/…/image.jpg``, or ``root/SPLIT/CLASS/…/image.jpg``.

    A sample has the image, under its own extension, and ``cls``: the number of its class among the sorted folder names, which
    go to ``classes.json``. Folders named train, val, test, … with the folders of classes in them are splits: one dataset each, with
    one numbering. Other files are skipped, with a warning that counts them.

    By default the keys are the stems of the images; if two images of a dataset have one stem, they are the paths without extension, and if these
    are not unique either (``a.jpg``, ``a.png``), the paths and the numbers of the images.

    Args:
        root: URL of the folder, for messages.
        files: Files under it.
        key: Template of the keys, from ``index``, ``stem``, ``path`` (without extension) and ``class``.
        is_guess: Whether to refuse layouts that look like something else than folders of classes.

    Raises:
        SourceError: If the images are not in folders of classes.
    """

    shuffled = True
    classes: Classes
    _kind = "images"
    _items: FileList

    def __init__(
        self, root: str, listed: FileList, *, key: str | None = None, is_guess: bool = False
    ) -> None:
        self._root = root
        count = sum(map(is_image_name, listed.paths()))
        if not count:
            raise SourceError(
                f"no images in folders of classes (CLASS/image.jpg) that can be packed, only {describe_files(listed.paths())}; "
                "convert other images, e.g. to jpg or png, or pack files as they are with kind='files' (--kind files)",
                shard=root,
            )
        images = listed
        if count < len(listed):
            images = FileList((file for file in listed if is_image_name(file.path)), is_sorted=True)
        self._files = self._items = images
        self.splits = find_splits(root, images, is_guess=is_guess)
        depth = 1 if self.splits else 0
        check_depth(root, images, depth)
        self.set_classes(sorted(set(map(self._class, images.paths()))))
        if is_guess:
            refuse_masks(root, images, self._class)
            refuse_containers(root, self.classes)
        if len(listed) > count:
            check_classes(root, listed, self.classes, self._class, depth)
            if is_guess:
                refuse_sidecars(root, listed)
            skipped = (path for path in listed.paths() if not is_image_name(path))
            _log.warning(
                "%s: files that are not images are skipped: %s", root, describe_files(skipped)
            )
        groups = itertools.groupby(images.paths(), top_folder) if self.splits else ((root, images),)
        # Files are sorted by path, so those of a split follow each other.
        self._datasets = [0, *itertools.accumulate(sum(1 for _ in one) for _, one in groups)]
        self._choose_key(*(FILE_KEYS if key is None else (key,)))
        splits_text = f" and {plural(len(self.splits), 'split')}" if self.splits else ""
        self.name = f"images of {plural(len(self.classes), 'class')}{splits_text} in {root}"

    def assigned(self) -> SplitNumbers:
        """Return the split of each image, as its number in `splits`; shape (n,)."""
        firsts = [self._items[first].path for first in self._datasets[:-1]]
        # By name: "train-2/a" comes before "train/a", but "train" before "train-2".
        numbers = [self.splits.index(top_folder(path)) for path in firsts]
        return np.repeat(np.array(numbers, dtype=np.uint16), np.diff(self._datasets))

    def with_class_numbers(self, classes: Classes, where: str) -> Self:
        """Return the same images with the class numbers of a list of names.

        Raises:
            SourceError: If a folder is not among the classes.
        """
        unknown = frozenset(self.classes).difference(classes)
        if unknown:
            path = next(path for path in self._items.paths() if self._class(path) in unknown)
            raise SourceError(
                f"the class {self._class(path)!r} ({path}) is not in the list of {plural(len(classes), 'class')} of {where}; "
                "pack all splits in one run (a folder with train/ and val/ in it), or give the names of all classes "
                "with classes= (--classes)",
                shard=self._root,
            )
        changed = copy.copy(self)
        changed.set_classes(classes)
        return changed

    def _record(self, number: int, item: ListedFile) -> Record:
        path = self._in_dataset(item.path)
        field = canonical_field(path.rpartition(".")[2])
        fields = {field: FileRef(item.url, item.size), "cls": self.labels[top_folder(path)]}
        return Record(self._key_of(number, item), fields, item.url)

    def _key_of(self, number: int, item: ListedFile) -> str:
        """Make the key of an image; the index in it is the number in its dataset."""
        name = self._in_dataset(item.path)
        path = name.rpartition(".")[0]
        index = number - self._datasets[bisect_right(self._datasets, number) - 1]
        names = {"index": index, "stem": path.rpartition("/")[2], "path": path}
        return make_key(self._key, names | {"class": top_folder(name)}, source=self._root)

    def _in_dataset(self, path: str) -> str:
        return path.partition("/")[2] if self.splits else path

    def _class(self, path: str) -> str:
        return top_folder(self._in_dataset(path))


class GroupedFilesSource(FolderSource):
    """Loose files, one sample for each base name: ``0001.jpg`` and ``0001.json`` make the sample ``0001``.

    Files without an extension are skipped, with a warning that counts them.

    Args:
        root: URL of the folder, for messages.
        files: Files under it.
        key: Template of the keys, from ``index``, ``stem`` and ``path`` (up to the first dot); by default the path.
    """

    _kind = "files"
    _items: RowFile[Any]

    def __init__(self, root: str, files: FileList, *, key: str | None = None) -> None:
        self.name = f"files grouped by name in {root}"
        self._root = root
        self._files = files
        tops = map(top_folder, files.paths())
        splits = sorted({top for top in tops if is_split(top)})
        if len(splits) > 1:
            _log.warning(
                "%s: the folders %s look like splits, but all files go into one dataset; pack each folder by itself if this is not "
                "intended",
                root,
                ", ".join(splits),
            )
        convert = FileRows()
        self._file = convert.file
        # Of each sample its key, and for each of its files the field and the row of the file.
        self._items = RowFile(self._groups(convert))
        self._datasets = (0, len(self._items))
        self.num_files = sum(len(rows) for _, rows in self._items)
        warn_of_rare_fields(root, self._members)
        self._key = "{path}"  # they differ
        if key is not None:
            self._choose_key(key)

    def _groups(self, convert: FileRows) -> Iterator[Sequence[Any]]:
        members = iter_members(self._root, self._files)
        for key, group in itertools.groupby(members, itemgetter(0)):
            rows = [(field, *convert.row(file._replace(version=None))) for _, field, file in group]
            yield key, tuple(rows)

    def _members(self) -> Iterator[tuple[str, str, str]]:
        return ((key, row[0], row[1]) for key, rows in self._items for row in rows)

    def _record(self, number: int, item: Sequence[Any]) -> Record:
        files = [(row[0], self._file(row[1:])) for row in item[1]]
        fields = {field: FileRef(file.url, file.size) for field, file in files}
        return Record(self._key_of(number, item), fields, files[0][1].url)

    def _key_of(self, number: int, item: Sequence[Any]) -> str:
        names = {"index": number, "stem": item[0].rpartition("/")[2], "path": item[0]}
        return make_key(self._key, names, source=self._root)


def folder_source(
    root: str, storage: Storage, *, kind: str | None, key: str | None
) -> FolderSource:
    """Open a folder as ``images``, as ``files``, or by its content.

    Class folders hold images alone; an image that has companions (``0001.jpg`` with ``0001.json``) is a loose sample.

    Raises:
        OptionError: If the kind is unknown.
        SourceError: If the folder does not have that structure, or the folders do not seem to be classes.
    """
    files = list_files(root, storage)
    if not files:
        raise SourceError("no files found; check the path", shard=root)
    if kind not in (None, "images", "files"):
        raise OptionError(f"a folder is packed as kind 'images' or 'files', not {kind!r}")
    source: FolderSource
    if kind == "files" or (kind is None and not _has_class_folders(root, files)):
        source = GroupedFilesSource(root, files, key=key)
    else:
        source = ClassFolderSource(root, files, key=key, is_guess=kind is None)
        source.empty_folders = _empty_folders(source, root, storage)
    source.reads_remote = storage.local_path(root) is None
    return source


def _has_class_folders(root: str, files: FileList) -> bool:
    """Return whether most images are in folders, and have no companions.

    Raises:
        SourceError: If the folders seem to be anything but classes.
    """
    refuse_metadata(root, files)
    images = nested = 0
    for path in files.paths():
        is_image = is_image_name(path) or is_unsupported_image(path)
        images += is_image
        nested += is_image and "/" in path
    if not nested or nested * 2 < images:
        return False
    return images == len(files) or not _has_companions(files)


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


def _empty_folders(source: ClassFolderSource, root: str, storage: Storage) -> tuple[str, ...]:
    """Return the sorted names of the folders beside those of classes that hold no image."""
    if storage.local_path(root) is None:  # a folder of an object store is the names of its files
        return ()
    parents = [join_url(root, split) for split in source.splits] or [root]
    names: set[str] = set()
    for url in parents:
        names.update(storage.list_folder(url)[1])
    return tuple(sorted(itertools.filterfalse(is_meta_name, names.difference(source.classes))))
