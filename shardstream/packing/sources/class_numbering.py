"""Number classes by the user's list, else as in a split packed before, else by sorted names."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence

from shardstream.catalog import (
    Classes,
    common_classes,
    find_difference,
    read_all_classes,
    read_classes,
)
from shardstream.errors import OptionError, StorageError, get_logger
from shardstream.format import CLASSES_NAME, MANIFEST_NAME, decode_classes
from shardstream.packing.sources.source import SamplesSource, Source
from shardstream.storage import Storage, join_url, parent_url

_log = get_logger(__name__)

SPLIT_NAMES = (
    *("train", "val", "test", "dev", "eval", "holdout"),
    *("training", "valid", "validation", "testing", "evaluation"),
)
"""Names of folders that hold parts of one dataset."""

# "train2017" and "imagenet-val" count, "trainer" does not.
_SPLIT = re.compile(rf"(?<![a-z])(?:{'|'.join(SPLIT_NAMES)})(?![a-z])", re.IGNORECASE)

AnyClasses = str | os.PathLike[str] | Sequence[str]
"""Names in the order of their numbers, or the URL of a ``classes.json`` or of the folder of a packed dataset."""


def read_given_classes(classes: AnyClasses, storage: Storage) -> tuple[Classes, str]:
    """Return the names that the user gives, and their origin for messages.

    Raises:
        OptionError: If they are not distinct names, or a folder has none.
        ManifestError: If a ``classes.json`` is not a list of names.
        StorageError: If it is missing or cannot be reached.
    """
    if not isinstance(classes, str | os.PathLike):
        names = tuple(classes)
        if not names or len(set(names)) < len(names) or not all(isinstance(n, str) for n in names):
            raise OptionError(f"classes must be distinct names, not {names[:5]!r}")
        return names, "classes"
    url = os.fspath(classes)
    folder = parent_url(url) if url.rpartition("/")[2] == MANIFEST_NAME else url
    if folder.endswith(".json"):
        found: Classes | None = decode_classes(storage.read_bounded(folder), url=folder)
    else:
        found = read_classes(folder, storage)
    if not found:
        raise OptionError(
            f"no class names found; name a {CLASSES_NAME}, or the folder of a packed dataset that has one",
            shard=url,
        )
    return found, url


def number_classes(
    source: Source, classes: AnyClasses | None, folders: Sequence[str], storage: Storage
) -> Source:
    """Return a source whose classes have the numbers that the user gives, or those of a split that is packed already.

    A warning is logged if the names at the destination change, or a folder has no number because it is empty.

    Args:
        source: The source.
        classes: The user's choice; None takes those of a split in the same parent folder as the destination, if there is one.
        folders: Destination folder of each split.
        storage: Storage of these folders and of ``classes``.

    Raises:
        OptionError: If the source numbers no classes, or existing splits contradict each other.
        SourceError: If the source has a class that is not among the names.
        StorageError: If a place cannot be reached.
    """
    renumbered = _apply_numbers(source, classes, folders, storage)
    if renumbered.classes is None:
        return renumbered
    difference = find_difference(
        {"this pack": renumbered.classes} | read_all_classes(folders, storage)
    )
    if difference is not None:
        _log.warning(
            "class numbers change: %s; --classes with the old %s keeps them",
            difference,
            CLASSES_NAME,
        )
    # They move the numbers of the others.
    empty = [f"{name}/" for name in source.empty_folders if name not in renumbered.labels]
    if empty:
        _log.warning(
            "%s: no image in %s, so classes have no number for it; to keep one, name all classes with classes= (--classes)",
            source.name,
            ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else ""),
        )
    return renumbered


def continue_class_numbers(
    source: Source, classes: AnyClasses | None, known: Classes | None, url: str, storage: Storage
) -> tuple[Source, dict[str, int]]:
    """Return a source whose classes have the numbers of a dataset, new ones the next; and the numbers of its own classes, ascending.

    Args:
        source: The source.
        classes: The user's choice, which begins with the names of the dataset, or is a beginning of them.
        known: Names of the classes of the dataset, if it has some.
        url: Its folder.
        storage: Storage of ``classes``.

    Raises:
        OptionError: If the numbers contradict those of the dataset, or these are unknown.
        SourceError: If the source has a class that is not among the user's names.
        StorageError: If ``classes`` cannot be read.
    """
    own, place, is_free = None, source.name, False
    if classes is not None:
        own, place = read_given_classes(classes, storage)
        known = known or ()
    else:
        source = source.with_own_class_numbers()
        own, is_free = source.classes, source.classes is not None
        if own is None and CLASSES_NAME in source.extras:  # tars keep their numbers
            own = tuple(json.loads(source.extras[CLASSES_NAME]))
        if isinstance(source, SamplesSource):  # so do samples
            own = source.named_classes
    if own is None:
        return source, {}
    if known is None:
        raise OptionError(
            f"the dataset has no {CLASSES_NAME}, so the numbers of its classes are unknown; write the names there first, in the order of "
            "their numbers, or pass them as classes= (--classes)",
            shard=url,
        )
    mine = set(own)
    if is_free:
        own = (*known, *sorted(mine.difference(known)))
    difference = find_difference({url: known, place: own})
    if difference is not None:
        raise OptionError(
            f"class numbers differ from those of the dataset: {difference}; leave classes= (--classes) out, or number the classes of the "
            f"source as {join_url(url, CLASSES_NAME)} does",
            shard=url,
        )
    names = max(known, own, key=len)
    if is_free or classes is not None:
        source = source.with_class_numbers(names, place)
    return source, {name: number for number, name in enumerate(names) if name in mine}


def _apply_numbers(
    source: Source, classes: AnyClasses | None, folders: Sequence[str], storage: Storage
) -> Source:
    if classes is not None:
        return source.with_class_numbers(*read_given_classes(classes, storage))
    source = source.with_own_class_numbers()
    if source.classes is None:
        return source
    found = sibling_classes(folders, storage)
    difference = find_difference(found)
    if difference is not None:
        raise OptionError(
            f"the splits that are packed already number their classes differently: {difference}; choose with classes= (--classes)",
            shard=folders[0],
        )
    names = common_classes(found)
    if names is None or names == source.classes:
        return source
    place = max(found, key=lambda folder: len(found[folder]))
    renumbered = source.with_class_numbers(names, place)
    _log.warning(
        "%s: classes are numbered as in %s, which is packed already",
        folders[0],
        join_url(place, CLASSES_NAME),
    )
    return renumbered


def warn_of_siblings(names: Classes, folders: Sequence[str], storage: Storage) -> None:
    """Warn if another split of the dataset, perhaps packed at the same time, numbers its classes differently."""
    try:
        found = sibling_classes(folders, storage)
    except StorageError as error:
        _log.warning("%s: class numbers of other splits are unknown: %s", folders[0], error)
        return
    difference = find_difference({folders[0]: names} | found)
    if difference is not None:
        _log.warning(
            "class numbers differ among splits: %s; pack one of them again with --classes",
            difference,
        )


def sibling_classes(folders: Sequence[str], storage: Storage) -> dict[str, Classes]:
    """Return folder -> class names of the packed splits that belong to the same dataset as some folders."""
    siblings = dict.fromkeys(itertools.chain.from_iterable(map(sibling_folders, folders)))
    return read_all_classes([one for one in siblings if one not in folders], storage)


def sibling_folders(folder: str) -> list[str]:
    """Return the URLs that other splits of a dataset would have: another split's name in the last part.

    Nothing is listed: the parent may be a bucket of a million names.

    >>> sibling_folders("s3://b/out/train2017")[:2]
    ['s3://b/out/val2017', 's3://b/out/test2017']
    >>> sibling_folders("out/cats")
    []
    """
    if folder.rpartition("/")[2] in (".", ".."):
        folder = os.path.abspath(folder)
    scheme, separator, path = folder.rpartition("://")
    parent, slash, last = path.rpartition("/")
    found = list(_SPLIT.finditer(last))
    if not found or (separator and not slash):  # a bucket name is not a split name
        return []
    split_name = found[-1].group()
    prefix = f"{scheme}{separator}{parent}{slash}{last[: found[-1].start()]}"
    other_splits = (name for name in SPLIT_NAMES if name != split_name.lower())
    return [
        prefix + _match_case(other, split_name) + last[found[-1].end() :] for other in other_splits
    ]


def _match_case(name: str, example: str) -> str:
    if example.isupper():
        return name.upper()
    return name.capitalize() if example[:1].isupper() else name
