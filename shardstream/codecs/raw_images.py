"""Read the bit depth and the stored numbers of an image: ``decode("raw")`` and ``decode("mask")``.

Pillow opens deep images of several channels as 8 bits, and clips 16 bits when it converts them, without a warning.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from shardstream.format import PILLOW_FORMATS

_PNG_DEPTH = 24  # byte of the bit depth in IHDR, which comes first
# BitsPerSample, PhotometricInterpretation, SampleFormat
_TIFF_BITS, _TIFF_SHADES, _TIFF_KINDS = 258, 262, 339
_WHITE_IS_ZERO = 0
_KINDS = {1: "unsigned", 2: "signed", 3: "float"}
_JPEG2000_SIZE = b"\xff\x4f\xff\x51"  # start of codestream, SIZ
_SIZ_COMPONENTS = 40  # bytes from there to the count of components
# in the third byte of the box av1C (AV1 codec ISO media file format binding)
_AVIF_HIGH, _AVIF_TWELVE = 0x40, 0x20


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


def stored_depth(image: PIL.Image.Image, data: bytes) -> BitDepth:
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


def scale_to_8_bits(image: PIL.Image.Image, depth: BitDepth) -> PIL.Image.Image:
    """Return an image of 9 to 16 bits as one of 8, by the high bits of each number, as Pillow reads colours of 16 bits.

    A TIFF that stores white as 0 is inverted, as Pillow does with 8 bits.

    Args:
        image: The file, opened.
        depth: Its `stored_depth`, of which `BitDepth.can_be_scaled` is true.
    """
    if not image.mode.startswith("I"):
        return image
    # Pillow scales grey of PGM and JPEG 2000 to 16 bits.
    shift = 8 if image.format in ("PPM", "JPEG2000") else depth.bits - 8
    numbers = (np.asarray(image) >> shift).astype(np.uint8)
    scaled = PIL.Image.fromarray(~numbers if _stores_white_as_0(image) else numbers)
    scaled.info = {**image.info}
    if isinstance(clear := image.info.get("transparency"), int):
        scaled.info["transparency"] = clear >> shift
    return scaled


def is_inverted(image: PIL.Image.Image) -> bool:
    """Return True if an opened TIFF stores white as 0; Pillow inverts such images of 1 to 8 bits."""
    return image.mode in ("1", "L") and _stores_white_as_0(image)


def _stores_white_as_0(image: PIL.Image.Image) -> bool:
    tags: Any = getattr(image, "tag_v2", {})
    return bool(tags.get(_TIFF_SHADES) == _WHITE_IS_ZERO)


def is_rendered(image: PIL.Image.Image, depth: BitDepth) -> bool:
    """Return True if Pillow changes the stored numbers: scaled to the range of its type, or inverted."""
    if image.format == "PPM" and image.mode in ("L", "I"):
        return stored_maximum(image) not in (255, 65535)
    return is_inverted(image) or (image.mode == "L" and depth.bits < 8)


def stored_maximum(image: PIL.Image.Image) -> int:
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


Pixels = np.ndarray[Any, np.dtype[Any]]

_TIFF_PLANAR = 284
_SIXTEEN_BITS = re.compile(r"(?:RGB|RGBA|RGBX|CMYK);16([LBN])")
_OTHER_ORDER = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}
_CHANGED_BY_PILLOW = re.compile(r"LAB|RGBa.*|.*;1[56]")  # raw modes whose numbers Pillow converts


class LossyDecodeError(ValueError):
    """Decoding would change the stored numbers of an image; the message names an alternative."""


def read_stored(data: bytes) -> Pixels:
    """Decode an image file to its stored numbers, without scaling or clipping; palette entries stay indices.

    Returns:
        Shape (H, W) or (H, W, C): bool for 1 bit, uint8 for 2 to 8, uint16, int16, uint32, int32 or float32.

    Raises:
        OSError: If the bytes are truncated, or not an image that Pillow decodes.
        LossyDecodeError: If Pillow would change the numbers, or there is more than one frame.
    """
    with _opened(data) as image:
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise LossyDecodeError(
                "an image with several frames or pages does not fit one array; store its frames as separate files"
            )
        depth = stored_depth(image, data)
        if image.format == "PNG":
            return _read_png(image, data, depth)
        if image.format == "TIFF":
            return _read_tiff(image, data, depth)
        if image.format == "PPM":
            return _read_ppm(image, depth)
        if image.format == "JPEG2000" and depth.bits != (16 if image.mode == "I;16" else 8):
            raise _changes(image, depth)
        fits = depth.fits_8_bits or image.mode == "I;16"
        if not fits or _CHANGED_BY_PILLOW.fullmatch(_rawmode(image)):
            raise _changes(image, depth)
        return _native(image)


def read_mask(data: bytes) -> Pixels:
    """Decode an image file to one whole number for each pixel: shape (H, W), uint8 for up to 8 bits, else as stored.

    Raises:
        OSError: If the bytes are truncated, or not an image that Pillow decodes.
        LossyDecodeError: If there are several channels or fractions, or the file is a JPEG, which is lossy.
    """
    if data[:2] == b"\xff\xd8":
        raise LossyDecodeError("a JPEG does not keep the numbers of a mask; store masks as PNG")
    pixels = read_stored(data)
    if pixels.ndim != 2 or pixels.dtype.kind not in "bui":
        raise LossyDecodeError(
            f"a mask needs one whole number for each pixel, got {pixels.dtype} of shape {pixels.shape}; "
            "decode it with 'raw'"
        )
    return pixels.astype(np.uint8) if pixels.dtype == bool else pixels


def shrink_to_nearest(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Scale an array down to ``size`` (width, height) by the nearest pixels; numbers are never averaged."""
    height, width = pixels.shape[:2]
    columns = ((np.arange(size[0]) + 0.5) * width / size[0]).astype(np.intp)
    rows = ((np.arange(size[1]) + 0.5) * height / size[1]).astype(np.intp)
    return np.ascontiguousarray(pixels[rows[:, None], columns])


def _opened(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)


def _native(image: PIL.Image.Image) -> Pixels:
    """Return the pixels as Pillow holds them, in this machine's byte order, writable."""
    image.load()  # in np.asarray, numpy would hide an AttributeError of the codec
    pixels = np.asarray(image)
    return np.array(pixels, pixels.dtype.newbyteorder("="))


def _rawmode(image: Any) -> str:
    """Return Pillow's name for the pixel layout in the file, or "" if the codec has none."""
    options = image.tile[0][3] if image.tile else ""
    name = options[0] if isinstance(options, tuple) and options else options
    return name if isinstance(name, str) else ""


def _changes(image: PIL.Image.Image, depth: BitDepth) -> LossyDecodeError:
    return LossyDecodeError(
        f"Pillow changes {depth} of {image.format}, {_rawmode(image) or image.mode}, when it reads them; "
        "pass your own decoder for this field: decode(fields={name: function})"
    )


def _read_png(image: PIL.Image.Image, data: bytes, depth: BitDepth) -> Pixels:
    if depth.bits < 8 and image.mode == "L":
        return _unscaled(_native(image), 255, (1 << depth.bits) - 1)
    if depth.bits <= 8:
        return _native(image)
    if _rawmode(image) == "LA;16B":  # 4 bytes per pixel: read them as four channels of 8 bits
        _lay_out(image, "RGBA")
        return _native(image).view(">u2").astype(np.uint16)
    if image.mode in ("RGB", "RGBA"):
        return _read_sixteen_bits(image, data, depth)
    return _native(image).astype(np.uint16)


def _read_tiff(image: Any, data: bytes, depth: BitDepth) -> Pixels:
    if image.mode == "P":
        return _native(image)
    if depth.bits > 8 and image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        if image.tag_v2.get(_TIFF_PLANAR, 1) != 1:
            raise _changes(image, depth)
        return _read_sixteen_bits(image, data, depth)
    if depth.bits <= 8 and _CHANGED_BY_PILLOW.fullmatch(_rawmode(image)):
        raise _changes(image, depth)
    inverted = is_inverted(image)
    pixels = _native(image)
    if inverted:
        pixels = ~pixels
    if image.mode == "L" and depth.bits < 8:
        pixels = _unscaled(pixels, 255, (1 << depth.bits) - 1)
    if depth.kind == "float" or image.mode == "1":
        return pixels
    stored = {"unsigned": "u", "signed": "i"}[depth.kind]
    size = 1 if depth.bits <= 8 else 2 if depth.bits <= 16 else 4
    return pixels.astype(f"{stored}{size}")  # lossless: Pillow's type is at least as large


def _read_ppm(image: PIL.Image.Image, depth: BitDepth) -> Pixels:
    if image.mode in ("1", "F"):
        return _native(image)
    if depth.bits > 8 and image.mode != "I":
        raise _changes(image, depth)
    maximum, top = stored_maximum(image), 65535 if image.mode == "I" else 255
    pixels = _native(image)
    pixels = pixels if maximum == top else _unscaled(pixels, top, maximum)
    return pixels.astype(np.uint16) if image.mode == "I" else pixels


def _unscaled(pixels: Pixels, top: int, maximum: int) -> Pixels:
    """Undo Pillow's scaling of 0…maximum to 0…top; exact because maximum is smaller than top."""
    return ((pixels.astype(np.int64) * maximum + top // 2) // top).astype(pixels.dtype)


def _read_sixteen_bits(image: PIL.Image.Image, data: bytes, depth: BitDepth) -> Pixels:
    """Read several channels of 16 bits. Pillow keeps only the high bytes, so the low bytes are read in the other byte order."""
    found = _SIXTEEN_BITS.fullmatch(_rawmode(image))
    if found is None:
        raise _changes(image, depth)
    name = found[0]
    with _opened(data) as reopened:
        _lay_out(reopened, name[:-1] + _OTHER_ORDER[found[1]])
        low = _native(reopened)
    return _native(image).astype(np.uint16) << 8 | low


def _lay_out(image: Any, rawmode: str) -> None:
    """Make Pillow read the pixels of the file with another layout of the same size."""
    tiles = []
    for tile in image.tile:
        options = (rawmode, *tile[3][1:]) if isinstance(tile[3], tuple) else rawmode
        make = getattr(type(tile), "_make", tuple)  # a named tuple since Pillow 10.4
        tiles.append(make((*tile[:3], options)))
    image.tile = tiles
