"""Read the bit depth and number type of an image file from its header.

Pillow opens deep images of several channels as 8 bits, and clips 16 bits when it converts them, without a warning.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_PNG_DEPTH = 24  # byte of the bit depth in IHDR, which comes first
_TIFF_BITS, _TIFF_SHADES, _TIFF_KINDS = (
    258,
    262,
    339,
)  # BitsPerSample, PhotometricInterpretation, SampleFormat
_WHITE_IS_ZERO = 0
_KINDS = {1: "unsigned", 2: "signed", 3: "float"}
_JPEG2000_SIZE = b"\xff\x4f\xff\x51"  # start of codestream, SIZ
_SIZ_COMPONENTS = 40  # bytes from there to the count of components
_AVIF_HIGH, _AVIF_TWELVE = (
    0x40,
    0x20,
)  # in the third byte of the box av1C (AV1 codec ISO media file format binding)


class BitDepth(NamedTuple):
    """Bits of a stored number, and its type: "unsigned", "signed" or "float"."""

    bits: int
    kind: str = "unsigned"

    @property
    def fits_8_bits(self) -> bool:
        """Whether every stored number is in the range 0 to 255."""
        return self.bits <= 8 and self.kind == "unsigned"

    @property
    def can_be_scaled(self) -> bool:
        """Whether the range of the stored numbers is known, and larger than 0 to 255."""
        return 8 < self.bits <= 16 and self.kind == "unsigned"

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.kind} numbers"


def stored_depth(image: Image, data: bytes) -> BitDepth:
    """Return the bit depth and type of the numbers of an image file.

    Args:
        image: The file, opened and not loaded.
        data: Bytes of the file.
    """
    form = image.format
    if form == "PNG":
        return BitDepth(data[_PNG_DEPTH])
    if form == "TIFF":
        tags: Any = getattr(image, "tag_v2", {})
        kind = _KINDS.get(max(tags.get(_TIFF_KINDS, (1,))), "unsigned")
        return BitDepth(max(tags.get(_TIFF_BITS, (1,))), kind)
    if image.mode == "F":
        return BitDepth(32, "float")
    if form == "PPM":
        return BitDepth(stored_maximum(image).bit_length())
    if form == "JPEG2000":
        return _jpeg2000_depth(data)
    if form == "AVIF":
        return BitDepth(_avif_bits(data))
    return BitDepth(8)


def scale_to_8_bits(image: Image, depth: BitDepth) -> Image:
    """Return an image of 9 to 16 bits as one of 8, by the high bits of each number, as Pillow reads colours of 16 bits.

    A TIFF that stores white as 0 is inverted, as Pillow does with 8 bits.

    Args:
        image: The file, opened.
        depth: Its `stored_depth`, of which `BitDepth.can_be_scaled` is true.
    """
    from PIL import Image as pil  # noqa: N813, PLC0415  (other users of this room read no images)

    if not image.mode.startswith("I"):
        return image
    # Pillow scales grey of PGM and JPEG 2000 to 16 bits.
    shift = 8 if image.format in ("PPM", "JPEG2000") else depth.bits - 8
    numbers = (np.asarray(image) >> shift).astype(np.uint8)
    scaled = pil.fromarray(~numbers if _stores_white_as_0(image) else numbers)
    scaled.info = {**image.info}
    if isinstance(clear := image.info.get("transparency"), int):
        scaled.info["transparency"] = clear >> shift
    return scaled


def is_inverted(image: Image) -> bool:
    """Return True if an opened TIFF stores white as 0; Pillow inverts such images of 1 to 8 bits."""
    return image.mode in ("1", "L") and _stores_white_as_0(image)


def _stores_white_as_0(image: Image) -> bool:
    tags: Any = getattr(image, "tag_v2", {})
    return bool(tags.get(_TIFF_SHADES) == _WHITE_IS_ZERO)


def is_rendered(image: Image, depth: BitDepth) -> bool:
    """Return True if Pillow changes the stored numbers: scaled to the range of its type, or inverted."""
    if image.format == "PPM" and image.mode in ("L", "I"):
        return stored_maximum(image) not in (255, 65535)
    return is_inverted(image) or (image.mode == "L" and depth.bits < 8)


def stored_maximum(image: Image) -> int:
    """Return the maximum value in the header of a PGM or PPM file; Pillow scales it to 255 or 65535."""
    if image.mode == "1":
        return 1
    codec, _, _, options = image.tile[0]  # type: ignore[attr-defined]
    if codec == "raw":
        return 65535 if image.mode == "I" else 255
    return int(options[1])


def _jpeg2000_depth(data: bytes) -> BitDepth:
    """Read the precisions of all components (ITU-T T.800, A.5.1)."""
    start = data.find(_JPEG2000_SIZE) + _SIZ_COMPONENTS
    count = int.from_bytes(data[start : start + 2])
    precisions = data[start + 2 : start + 2 + 3 * count : 3]
    kind = "signed" if any(precision & 0x80 for precision in precisions) else "unsigned"
    return BitDepth(max(((precision & 0x7F) + 1 for precision in precisions), default=8), kind)


def _avif_bits(data: bytes) -> int:
    """Read the bit depths of all items: 8, 10 or 12."""
    bits = 8
    for found in re.finditer(rb"av1C..(.)", data.partition(b"mdat")[0], re.DOTALL):
        flags = found[1][0]
        if flags & _AVIF_HIGH:
            bits = max(bits, 12 if flags & _AVIF_TWELVE else 10)
    return bits
