"""Convert between member names and (key, field), by WebDataset's rule."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardstream.errors import SampleError

RESERVED_FIELDS = frozenset({"__key__", "__url__"})
"""Entries of a sample that are not fields."""

INT_FIELDS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
"""Last parts of fields that hold one whole number, as ASCII digits."""
JSON_FIELDS = frozenset({"json", "jsn"})
"""Last parts of fields that hold a JSON value."""
TEXT_FIELDS = frozenset(
    {"txt", "text", "transcript", "md", "html", "htm", "xml", "yaml", "yml"}
    | {"csv", "tsv", "jsonl", "srt", "vtt"}
)
"""Last parts of fields that hold text, as UTF-8."""

_SPELLINGS = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif"}
_META = re.compile(r"__[^/]*__($|/)")
_FIELD = re.compile(r"[^\x00/]+")


def split_member_name(name: str) -> tuple[str, str] | None:
    """Split a member name into key and lower-cased field; None if it has no field.

    The key is the name up to the first dot after the last slash. A file whose last part starts with a dot has no key;
    WebDataset's regular expression would make an unintended sample, ``('a/', '_1.jpg')``, of ``a/._1.jpg``.

    >>> split_member_name("v1.0/0001.Seg.PNG")
    ('v1.0/0001', 'seg.png')
    >>> split_member_name("README") is None, split_member_name("a/.hidden") is None
    (True, True)
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base:
        return None
    return name[:dot], name[dot + 1 :].lower()


def canonical_field(extension: str) -> str:
    """Return the field for a file's extension: lower case, and one spelling for JPEG and TIFF.

    >>> canonical_field("JPEG"), canonical_field("Seg.TIFF")
    ('jpg', 'seg.tif')
    """
    stem, dot, last = extension.lower().rpartition(".")
    return stem + dot + _SPELLINGS.get(last, last)


def is_meta_name(name: str) -> bool:
    """Return True if readers skip this member because its first path part is in double underscores.

    >>> is_meta_name("__index__/x.json"), is_meta_name("a/__index__")
    (True, False)
    """
    return name.startswith("__") and _META.match(name) is not None


def member_name(key: str, field: str) -> str:
    """Join a key and a field to a member name that is parsed to the same key and field.

    >>> member_name("v1.0/0001", "seg.png")
    'v1.0/0001.seg.png'

    Raises:
        SampleError: If the name would be parsed differently, or would be extracted outside its folder.
    """
    name = f"{key}.{field}"
    if split_member_name(name) != (key, field):
        raise SampleError(_invalid_name_reason(key, field), key=key, field=field)
    parts = key.split("/")
    if field in RESERVED_FIELDS:
        raise SampleError(
            "this name is reserved for the sample's key or URL",
            remedy="choose another field",
            key=key,
            field=field,
        )
    if not _FIELD.fullmatch(field) or "\0" in key or ".." in parts or "" in parts:
        raise SampleError(
            "a key must be a relative path without empty or '..' parts, a field must have no slash, and neither may hold NUL",
            remedy="rename it",
            key=key,
            field=field,
        )
    if is_meta_name(name):
        raise SampleError(
            "readers skip names in double underscores", remedy="choose another key", key=key
        )
    if not name.isascii() and not is_name(name):
        raise SampleError(
            "the name cannot be written in UTF-8", remedy="rename it", key=key, field=field
        )
    return name


def find_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that comes a second time; None if they differ.

    >>> find_repeated(["a", "b", "a"]), find_repeated("ab")
    ('a', None)
    """
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def is_name(name: str) -> bool:
    """Return True if a name survives encoding and decoding and holds no NUL; some lone surrogates do not."""
    if name.isascii():
        return "\0" not in name
    try:
        raw = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return b"\0" not in raw and raw.decode("utf-8", "surrogateescape") == name


def _invalid_name_reason(key: str, field: str) -> str:
    last = key.rsplit("/", 1)[-1]
    if "." in last:
        suggestion = key[: len(key) - len(last)] + last.replace(".", "_")
        return f"a key ends at its first dot, so {key!r} would be read as another key; use {suggestion!r}"
    if not last:
        return "a key needs a name after its last slash"
    if not field:
        return "a field needs a name, such as 'jpg'"
    if "/" in field:
        return "a field must have no slash; the part before the last slash belongs to the key"
    return f"fields are read in lower case; write {field.lower()!r}"
