"""Decode JPEG fast (simplejpeg), to the same pixels as Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import simplejpeg

_START_OF_IMAGE = b"\xff\xd8"
_START_OF_SCAN = 0xDA
_ABOUT_PIXELS = frozenset(
    (*range(0xC0, 0xD0), 0xDB, 0xDD, 0xE0, 0xFE)
)  # SOFn, DHT, DQT, DRI, APP0 (JFIF), COM
_SAME_PIXELS = {"RGB": ("YCbCr", "RGB", "Gray"), "L": ("Gray",)}
"""Mode -> colour spaces of files that libjpeg-turbo decodes to the same bits as Pillow."""


def decode_jpeg(
    data: bytes, mode: str, *, min_longer_side: int | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Decode a JPEG with libjpeg-turbo to Pillow's pixels, in two thirds of the time.

    Args:
        data: The file.
        mode: ``RGB`` or ``L``.
        min_longer_side: Minimum of the longer side in pixels; a larger image may be scaled by 1/2, 1/4 or 1/8 during decoding.

    Returns:
        Shape (H, W, 3) or (H, W), uint8; None where Pillow must decode: another format, other colours, unusual or damaged bytes,
        more pixels than Pillow accepts without a warning.
    """
    if mode not in _SAME_PIXELS or data[:2] != _START_OF_IMAGE:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        limit = PIL.Image.MAX_IMAGE_PIXELS
        if colours not in _SAME_PIXELS[mode] or (limit is not None and height * width > limit):
            return None
        smallest = {}
        if min_longer_side is not None and max(height, width) > min_longer_side:
            smallest = {"min_height": -(-height * min_longer_side // max(height, width)),
                        "min_width": -(-width * min_longer_side // max(height, width))}  # fmt: skip
        pixels: np.ndarray[Any, np.dtype[np.uint8]] = simplejpeg.decode_jpeg(
            data, "RGB" if mode == "RGB" else "GRAY", **smallest
        )
    except ValueError:
        return None
    return pixels if mode == "RGB" else pixels[:, :, 0]


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a JPEG that `decode_jpeg` can decode."""
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    return width, height


def has_only_pixels(data: bytes) -> bool:
    """Return True if a JPEG holds no EXIF and no colour profile, which Pillow keeps with an image.

    Pillow needs 30 us for this check. Markers: ITU-T T.81, annex B; any number of fill bytes, 0xFF, may precede one.
    """
    at = 2
    while data[at : at + 2] == b"\xff\xff" or (len(data) > at + 4 and data[at] == 0xFF):
        if data[at + 1] == 0xFF:
            at += 1
            continue
        if data[at + 1] == _START_OF_SCAN:
            return True
        if data[at + 1] not in _ABOUT_PIXELS:
            return False
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return False
