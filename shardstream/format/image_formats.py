"""List the supported image formats, find mask fields, and check JPEGs without Pillow.

Pillow detects formats by content, not by name, and decodes some with other programs: an EPS in a field ``jpg`` would start
Ghostscript.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec

import simplejpeg

from shardstream.errors import OptionError

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
        *(
            "svg",
            "dng",
            "cr2",
            "cr3",
            "nef",
            "arw",
            "orf",
            "raf",
            "rw2",
            "pcx",
            "dds",
            "eps",
            "ico",
        ),
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
    parts = [(name, *name.lower().rpartition(".")[::2]) for name in names]
    photos = {stem for _, stem, form in parts if form in _PHOTOS}
    return frozenset(
        name
        for name, stem, form in parts
        if (form in _LOSSLESS and stem in photos)
        or (form in (*_LOSSLESS, "webp") and has_mask_word(stem))
    )


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
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_plain_jpeg(data: bytes, max_pixels: int | None) -> bool:
    """Return True for a JPEG whose header libjpeg-turbo accepts, up to the pixels.

    Takes 2 us, where Pillow takes 30 to open it. For False, Pillow must decide: another format, a rare kind, or no image.

    Args:
        data: An image file.
        max_pixels: Larger images give False; None for no limit.
    """
    if data[:2] != b"\xff\xd8":
        return False
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return False
    pixels: int = height * width
    return 0 < pixels <= (max_pixels or pixels)
