"""Number classes by the user's list, else as in a split packed before, else by sorted names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from unicodedata import normalize

from shardstream.catalog import (
    Classes,
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

_compose = partial(normalize, "NFC")
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
    siblings: Sequence[str] = ()
    if classes is None:
        numbered = source.with_own_class_numbers()
        siblings = sibling_folders(folders)
    else:
        numbered = source.with_class_numbers(*read_given_classes(classes, storage))
    if numbered.classes is None:
        return numbered
    own = numbered.classes
    if classes is None and len({*map(str.casefold, map(_compose, map(str.strip, own)))}) < len(own):
        _warn_of_spellings(own, source.name)
    found = read_all_classes([*folders, *siblings], storage)
    replaced = {folder: found.pop(folder) for folder in folders if folder in found}
    if found:
        numbered = _number_as_siblings(numbered, found, folders[0])
    assert numbered.classes is not None  # noqa: S101  (as before)
    if replaced and (difference := find_difference({"this pack": numbered.classes} | replaced)):
        _log.warning(
            "class numbers change: %s; --classes with the old %s keeps them",
            difference,
            CLASSES_NAME,
        )
    # They move the numbers of the others.
    empty = sorted({*source.empty_folders}.difference(numbered.labels))
    if empty:
        _log.warning(
            "%s: no image in %s, so classes have no number for it; to keep one, name all classes with classes= (--classes)",
            source.name,
            ", ".join(f"{name}/" for name in empty[:10]) + (", ..." if len(empty) > 10 else ""),
        )
    return numbered


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
    if is_free:
        _warn_of_spellings(names, source.name)
    if is_free or classes is not None:
        source = source.with_class_numbers(names, place)
    return source, {name: number for number, name in enumerate(names) if name in mine}


def _warn_of_spellings(names: Classes, place: str) -> None:
    """Warn of classes whose names differ in upper case, blanks at their ends, or composed letters (macOS writes "e" and an accent), alone."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(_compose(name.strip()).casefold(), []).append(name)
    first = next((found for found in spellings.values() if len(found) > 1), None)
    if first is not None:
        _log.warning(
            "%s: %s are %d classes; if they are one, correct the labels",
            place,
            " and ".join(map(ascii, first)),
            len(first),
        )


def _number_as_siblings(source: Source, found: Mapping[str, Classes], folder: str) -> Source:
    """Return a source whose classes have the numbers of the packed splits of its dataset, which are not to change."""
    difference = find_difference(found)
    if difference is not None:
        raise OptionError(
            f"the splits that are packed already number their classes differently: {difference}; choose with classes= (--classes)",
            shard=folder,
        )
    place = max(found, key=lambda one: len(found[one]))
    if found[place] == source.classes:
        return source
    renumbered = source.with_class_numbers(found[place], place)
    _log.warning(
        "%s: classes are numbered as in %s, which is packed already",
        folder,
        join_url(place, CLASSES_NAME),
    )
    return renumbered


def warn_of_siblings(names: Classes, folder: str, storage: Storage) -> None:
    """Warn if another split of the dataset, perhaps packed at the same time, numbers its classes differently."""
    try:
        found = read_all_classes(sibling_folders([folder]), storage)
    except StorageError as error:
        _log.warning("%s: class numbers of other splits are unknown: %s", folder, error)
        return
    if found and (difference := find_difference({folder: names} | found)):
        _log.warning(
            "class numbers differ among splits: %s; pack one of them again with --classes",
            difference,
        )


def sibling_folders(folders: Iterable[str]) -> list[str]:
    """Return the URLs that other splits of a dataset would have: another split's name in the last part.

    Nothing is listed: the parent may be a bucket of a million names.

    >>> sibling_folders(["s3://b/out/train2017"])[:2]
    ['s3://b/out/val2017', 's3://b/out/test2017']
    >>> sibling_folders(["out/cats"])
    []
    """
    siblings = dict.fromkeys(folders, False)
    for given in [*siblings]:
        is_relative = given.rpartition("/")[2] in (".", "..")
        folder = os.path.abspath(given) if is_relative else given
        scheme, separator, path = folder.rpartition("://")
        parent, slash, last = path.rpartition("/")
        found = list(_SPLIT.finditer(last))
        if not found or (separator and not slash):  # a bucket name is not a split name
            continue
        split_name, rest = found[-1].group(), last[found[-1].end() :]
        prefix = f"{scheme}{separator}{parent}{slash}{last[: found[-1].start()]}"
        for name in SPLIT_NAMES:
            if name != split_name.lower():
                siblings.setdefault(prefix + _match_case(name, split_name) + rest, True)
    return [one for one, is_other in siblings.items() if is_other]


def _match_case(name: str, example: str) -> str:
    if example.isupper():
        return name.upper()
    return name.capitalize() if example[:1].isupper() else name
