"""Convert between member names and (key, field), by WebDataset's rule; what a field holds, by its name: numbers, text, images, masks.

Pillow detects formats by content, not by name, and decodes some with other programs: an EPS in a field ``jpg`` would start
Ghostscript.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

from shardstream.errors import OptionError, SampleError

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

PILLOW_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "TGA"),
    *(("AVIF",) if find_spec("PIL.AvifImagePlugin") is not None else ()),  # since Pillow 11.3
)
"""Formats that Pillow decodes without other programs, as in ``PIL.Image.open(formats=)``, frequent ones first."""

IMAGE_FORMATS = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "JPEG"),
    **dict.fromkeys(("png", "apng"), "PNG"),
    "webp": "WEBP",
    "avif": "AVIF",
    "bmp": "BMP",
    "dib": "DIB",
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
    "gif": "GIF",
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
    **dict.fromkeys(("jp2", "j2k"), "JPEG2000"),
    "tga": "TGA",
}
"""Last part of a field's name -> Pillow's name of the format, for the images that are packed and decoded."""

UNSUPPORTED_IMAGES = frozenset(
    (
        *("heic", "heif", "jxl", "jxr", "jpx", "jpc", "j2c", "jpf", "qoi", "psd", "exr", "hdr"),
        *("svg", "dng", "cr2", "cr3", "nef", "arw", "orf", "raf", "rw2"),
        *("pcx", "dds", "eps", "ico"),
    )
)
"""Extensions of images that are not packed as such: they must be converted first."""

_MASK_WORDS = frozenset(
    (
        *("mask", "masks", "seg", "segm", "segmentation", "segmentations", "semseg", "semantic"),
        *("instance", "instances", "instanceids", "panoptic", "trimap", "depth", "disparity"),
        *("label", "labels", "labelmap", "labelids", "labeltrainids"),
        *("annotation", "annotations", "annot"),
    )
)
_PHOTOS = frozenset(("jpg", "jpeg", "jpe", "jfif", "webp", "avif"))
_LOSSLESS = frozenset(("png", "tif", "tiff", "bmp", "gif", "pgm", "ppm", "pnm", "pbm"))


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


def is_image_field(field: str) -> bool:
    """Return whether a field holds an image file.

    >>> is_image_field("seg.png"), is_image_field("json")
    (True, False)
    """
    return field.rpartition(".")[2] in IMAGE_FORMATS


def is_image_name(name: str) -> bool:
    """Return whether a file is an image that is packed, by its name; hidden files are not."""
    last = name.rpartition("/")[2]
    return "." in last[1:] and last[0] != "." and is_image_field(last.lower())


def check_masks(names: Iterable[str]) -> None:
    """Check the names of mask fields that a user gives: one that no image can have has no effect.

    Raises:
        OptionError: If one is not the name of an image field.
    """
    for name in names:
        if not is_image_field(name):
            raise OptionError(
                f"masks are fields of images, such as 'png' or 'seg.png', not {name!r}; if no field is a mask, pass masks=[] (--masks none)"
            )


def mask_fields(names: Iterable[str]) -> frozenset[str]:
    """Return the image fields of a sample that hold numbers, not colours.

    Two rules: a word of the name before its last part is mask, seg, label, depth, ...; or the sample has a lossless format and a
    photo of the same name (``jpg`` and ``png``, ``left.jpg`` and ``left.png``). A JPEG is lossy, so it is never a mask.

    >>> sorted(mask_fields(["jpg", "seg.png", "left_mask2.tif", "cls"])), sorted(mask_fields(["jpg", "png"]))
    (['left_mask2.tif', 'seg.png'], ['png'])
    """
    return _mask_fields(tuple(names))


@lru_cache(maxsize=1000)
def _mask_fields(names: tuple[str, ...]) -> frozenset[str]:
    parts = [(name, *name.lower().removesuffix(".gz").rpartition(".")[::2]) for name in names]
    photos = {stem for _, stem, form in parts if form in _PHOTOS}
    return frozenset(
        name
        for name, stem, form in parts
        if (form in _LOSSLESS and stem in photos)
        or (form in (*_LOSSLESS, "webp") and has_mask_word(stem))
    )


class UnsureMasks(NamedTuple):
    """Fields whose kind their own names do not tell."""

    by_photo: tuple[str, ...]
    """Masks only because the sample has a photo of the same name."""
    pictures: tuple[str, ...]
    """Lossless images that are no masks by the names of all fields, and fields of unknown formats."""


@lru_cache(maxsize=1000)
def unsure_masks(names: tuple[str, ...]) -> UnsureMasks:
    """Return the fields that would be of another kind beside other fields.

    >>> unsure_masks(("jpg", "png", "seg.png", "b.tif", "image", "cls"))
    UnsureMasks(by_photo=('png',), pictures=('b.tif', 'image'))
    """
    unsure = [name for name in names if _is_unsure(name) and not mask_fields([name])]
    masks = mask_fields(names)
    return UnsureMasks(
        tuple(name for name in unsure if name in masks),
        tuple(name for name in unsure if name not in masks),
    )


def _is_unsure(name: str) -> bool:
    _, dot, form = name.lower().removesuffix(".gz").rpartition(".")
    is_of_a_format = dot or form in IMAGE_FORMATS or form in INT_FIELDS | JSON_FIELDS | TEXT_FIELDS
    return form in (*_LOSSLESS, "webp") or not (is_of_a_format or name.startswith("__"))


def has_mask_word(name: str) -> bool:
    """Return True if a word of a field's or a folder's name means a mask.

    >>> has_mask_word("left_mask2.jpg"), has_mask_word("SegmentationClass"), has_mask_word("jpg")
    (True, True, False)
    """
    return not _MASK_WORDS.isdisjoint(words_of(name))


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case, without numbers; camel case is split.

    >>> words_of("JPEGImages"), words_of("trainA_2017"), words_of("left-mask2")
    (['jpeg', 'images'], ['train', 'a'], ['left', 'mask'])
    """
    return [*map(str.lower, re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))]
