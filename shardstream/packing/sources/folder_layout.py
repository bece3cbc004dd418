"""Decide by the names of folders and files whether a folder of images has a folder for each class."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from shardstream.errors import SourceError, plural
from shardstream.format import UNSUPPORTED_IMAGES, has_mask_word, is_image_name, words_of
from shardstream.packing.sources.class_numbering import SPLIT_NAMES
from shardstream.packing.sources.tables import METADATA_NAMES
from shardstream.storage import FileList, sort_rows

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
    has_classes = any(is_split(top_folder(path)) and path.count("/") > 1 for path in images.paths())
    if named == tops and has_classes:
        return tuple(tops)
    if named and (is_guess or (has_classes and len(named) > 1)):
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


def refuse_masks(root: str, images: FileList, class_of: Callable[[str], str]) -> None:
    """Refuse a folder of photos next to a folder of their masks (``images/0001.jpg``, ``masks/0001.png``): these are not classes.

    Raises:
        SourceError: If half of the images in a folder named like masks have the stem of one in a folder named otherwise.
    """
    masked = frozenset(filter(has_mask_word, map(class_of, images.paths())))
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
