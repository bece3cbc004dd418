"""Read records from folders of classes, or from loose files grouped by name."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Self

import numpy as np

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SourceError, get_logger, plural
from shardstream.format import (
    UNSUPPORTED_IMAGES,
    canonical_field,
    has_mask_word,
    is_image_name,
    is_meta_name,
    split_member_name,
    words_of,
)
from shardstream.packing.job.key_hashes import RepeatedKey, find_repeat
from shardstream.packing.sources.class_numbering import SPLIT_NAMES
from shardstream.packing.sources.source import (
    FILE_KEYS,
    FileRef,
    Record,
    Source,
    SplitNumbers,
    fingerprint_of,
    has_numbers,
    make_key,
)
from shardstream.packing.sources.tables import METADATA_NAMES
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
# Folders that hold the images of all classes, not those of one.
_CONTAINERS = frozenset(
    (
        *("image", "images", "img", "imgs", "jpeg", "jpegs", "jpg", "jpgs", "png", "pngs"),
        *("data", "dataset", "datasets", "files", "frames"),
    )
)
_SIDECARS = frozenset(("txt", "json", "xml", "caption", "csv", "yaml", "yml", "mat", "npy", "npz"))
_SHOWN = 8  # extensions in a warning
_COUNTED = 1000  # extensions: names such as "x.0001" have a new one for each file
_ADVICE = (
    "pack loose files with kind='files' (--kind files), or, if the folders are classes, pass "
    "kind='images' (--kind images)"
)


class FolderSource(Source):
    """Files under a folder, of which each record names one or several."""

    may_repeat_keys = False  # they are compared before any file is read
    has_sizes = True  # the listing has them

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
    def fingerprint(self) -> str:
        """Hash of paths, sizes, and times or ETags."""
        parts = itertools.chain.from_iterable(map(itemgetter(0, 2, 3), self._files))
        return fingerprint_of(self._kind, parts)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return map(self._record, itertools.count(first), self._items.iter_from(first))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        for number in numbers:
            yield self._record(number, self._items[number])

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
            refuse_masks(root, images, self.classes, self._class)
            refuse_containers(root, self.classes)
        if len(listed) > count:
            check_classes(root, listed, self.classes, self._class, depth)
            if is_guess:
                refuse_sidecars(root, listed)
            skipped = (path for path in listed.paths() if not is_image_name(path))
            _log.warning(
                "%s: files that are not images are skipped: %s", root, describe_files(skipped)
            )
        counts = Counter(map(top_folder, images.paths())).values() if self.splits else (count,)
        # Files are sorted by path, so those of a split follow each other.
        self._datasets = [0, *itertools.accumulate(counts)]
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
    names: set[str] = set()
    for split in source.splits or ("",):
        for _, folders in storage.folder_pages(join_url(root, split)):
            names.update(folders)
    return tuple(sorted(itertools.filterfalse(is_meta_name, names.difference(source.classes))))


def is_split(name: str) -> bool:
    """Return whether a folder is a part of a dataset, by its name.

    >>> [is_split(name) for name in ("Train", "train2017", "val_images", "trainA", "trains", "test-tube")]
    [True, True, True, True, False, False]
    """
    words = _own_words(name) - _CONTAINERS
    return bool(words) and words.issubset(SPLIT_NAMES)


def is_unsupported_image(path: str) -> bool:
    """Return whether a file is an image in a format that is not packed, by its name."""
    return path.rpartition(".")[2].lower() in UNSUPPORTED_IMAGES


def describe_files(paths: Iterable[str]) -> str:
    """Count files by their extensions, with an example of each.

    >>> describe_files(["a/1.heic", "README", "a/2.HEIC"])
    '2 .heic (a/1.heic), 1 without an extension (README)'
    """
    counts, examples = Counter[str](), dict[str, str]()
    for path in paths:
        stem, dot, extension = path.rpartition("/")[2].rpartition(".")
        kind = f".{extension.lower()}" if dot and stem else "without an extension"
        if kind not in counts and len(counts) >= _COUNTED:
            kind = "others"
        counts[kind] += 1
        examples.setdefault(kind, path)
    listed = [f"{count:,} {kind} ({examples[kind]})" for kind, count in counts.most_common(_SHOWN)]
    return ", ".join(listed) + (", …" if len(counts) > _SHOWN else "")


def find_splits(root: str, images: FileList, *, is_guess: bool) -> tuple[str, ...]:
    """Return the names of the splits, if the folders right under the root are splits.

    Args:
        root: The folder, for messages.
        images: The images under it.
        is_guess: Whether folders named like splits, without folders of classes, are refused: else they are classes.

    Raises:
        SourceError: If some of the folders are splits, or splits without folders of classes: their names would become labels.
    """
    tops = sorted({top_folder(path) for path in images.paths() if "/" in path})
    named = list(filter(is_split, tops))
    if not named:
        return ()
    has_classes = any(is_split(top_folder(path)) and path.count("/") > 1 for path in images.paths())
    if named == tops and has_classes:
        return tuple(tops)
    if is_guess or (has_classes and len(named) > 1):
        others = [name for name in tops if name not in named]
        problem = f"{others[0]} does not" if others else "and hold no folders of classes"
        raise SourceError(
            f"the folders {', '.join(named)} look like splits, {problem}; pack splits as SPLIT/CLASS/image.jpg, or each "
            f"folder by itself, {_ADVICE}",
            shard=root,
        )
    return ()


def check_depth(root: str, images: FileList, depth: int) -> None:
    """Refuse images that are not in the folder of a class, ``depth`` folders deep.

    Raises:
        SourceError: If there is one.
    """
    for path in images.paths():
        if path.count("/") > depth:
            continue
        folder, slash, name = path.rpartition("/")
        raise SourceError(
            f"{path} is directly in {'the folder of a split' if folder else 'this folder'}; put each image in the folder "
            f"of its class ({folder}{slash}CLASS/{name}), or pack loose files with kind='files' (--kind files)",
            shard=root,
        )


def check_classes(
    root: str, listed: FileList, classes: Iterable[str], class_of: Callable[[str], str], depth: int
) -> None:
    """Refuse a folder of a class whose images are all in formats that are not packed: later classes would get other numbers.

    Raises:
        SourceError: If there is one.
    """
    known = frozenset(classes)
    lost = sorted(
        path
        for path in listed.paths()
        if is_unsupported_image(path) and path.count("/") > depth and class_of(path) not in known
    )
    if lost:
        raise SourceError(
            f"the class {class_of(lost[0])!r} has no image that can be packed, only {describe_files(lost)}; convert them, e.g. to "
            "jpg or png, or move the folder elsewhere",
            shard=root,
        )


def refuse_containers(root: str, classes: Iterable[str]) -> None:
    """Refuse folders that seem to hold the images of all classes (``images``, ``data``), or one folder of masks.

    Raises:
        SourceError: If there is one.
    """
    names = list(classes)
    for name in names:
        if _own_words(name) and _own_words(name) <= _CONTAINERS:
            raise SourceError(
                f"the folder {name} seems to hold images of all classes, but would become a class; name the folder that holds the "
                f"folders of classes, {_ADVICE}",
                shard=root,
            )
    if len(names) == 1 and has_mask_word(names[0]):
        raise SourceError(
            f"the folder {names[0]} seems to hold masks, but would become a class; {_ADVICE}",
            shard=root,
        )


def refuse_sidecars(root: str, listed: FileList) -> None:
    """Refuse to skip files that belong to images by their names, such as YOLO's ``labels/0001.txt``.

    Raises:
        SourceError: If half of the text, JSON, XML, ... files have the stem of an image.
    """

    def rows() -> Iterator[tuple[str, bool, str]]:
        for path in listed.paths():
            stem, _, extension = path.rpartition("/")[2].rpartition(".")
            if is_image_name(path) or extension.lower() in _SIDECARS:
                yield stem, is_image_name(path), path

    count, found = 0, list[str]()
    for _, group in itertools.groupby(sort_rows(rows()), itemgetter(0)):
        same_stem = list(group)
        others = [path for _, is_image, path in same_stem if not is_image]
        count += len(others)
        found += others if len(others) < len(same_stem) else []
    if found and 2 * len(found) >= count:
        raise SourceError(
            f"{plural(len(found), 'file')} with the names of images would be left out ({found[0]}); give an image and its files one "
            f"name in one folder (0001.jpg, 0001.txt), {_ADVICE}",
            shard=root,
        )


def refuse_metadata(root: str, listed: FileList) -> None:
    """Refuse folders below this one that have tables of their own files, as splits of Hugging Face have.

    Raises:
        SourceError: If there is one.
    """
    for path in listed.paths():
        folder, _, name = path.rpartition("/")
        if folder and name in METADATA_NAMES:
            raise SourceError(
                f"{path} seems to describe the files of its folder, and would be left out; pack that folder by itself, {_ADVICE}",
                shard=root,
            )


def refuse_masks(
    root: str, images: FileList, classes: Iterable[str], class_of: Callable[[str], str]
) -> None:
    """Refuse a folder of photos next to a folder of their masks (``images/0001.jpg``, ``masks/0001.png``): these are not classes.

    Raises:
        SourceError: If half of the images in a folder named like masks have the stem of one in a folder named otherwise.
    """
    masked = frozenset(filter(has_mask_word, classes))
    if not masked:
        return
    stems = sort_rows((_photo_stem(path), class_of(path)) for path in images.paths())
    counts, shared = Counter[str](), Counter[tuple[str, str]]()
    for _, rows in itertools.groupby(stems, itemgetter(0)):
        folders = {folder for _, folder in rows}
        counts.update(folders & masked)
        shared.update(itertools.product(folders & masked, folders - masked))
    for name, other in sorted(shared):
        if 2 * shared[name, other] >= counts[name]:
            raise SourceError(
                f"the folder {name} seems to hold the masks of the images in {other}, and each folder would become a class; "
                f"give both the same name in one folder (0001.jpg, 0001.seg.png), {_ADVICE}",
                shard=root,
            )


def top_folder(path: str) -> str:
    """Return the first part of a path."""
    return path.partition("/")[0]


def _photo_stem(path: str) -> str:
    """Return the stem of an image; for ``0001_mask.png`` the stem of its photo."""
    stem = path.rpartition("/")[2].partition(".")[0]
    photo, _, last = stem.rpartition("_")
    return photo if photo and has_mask_word(last) else stem


def _own_words(name: str) -> frozenset[str]:
    return frozenset(word for word in words_of(name) if len(word) > 1)
