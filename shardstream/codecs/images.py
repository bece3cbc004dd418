"""Decode image bytes to PIL images or arrays: WebDataset's names (``rgb8``, ``torchrgb``, ``pil``, …), ``raw`` and ``mask``."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import simplejpeg

from shardstream.codecs.raw_images import (
    BitDepth,
    LossyDecodeError,
    is_rendered,
    read_mask,
    read_stored,
    scale_to_8_bits,
    shrink_to_nearest,
    stored_depth,
)
from shardstream.errors import ImageWarning, OptionError
from shardstream.format import PILLOW_FORMATS

# name -> (library, type, mode), as in webdataset.autodecode
_SPECS: dict[str, tuple[str, str, str]] = {
    "l8": ("numpy", "uint8", "L"),
    "rgb8": ("numpy", "uint8", "RGB"),
    "rgba8": ("numpy", "uint8", "RGBA"),
    "l": ("numpy", "float", "L"),
    "rgb": ("numpy", "float", "RGB"),
    "rgba": ("numpy", "float", "RGBA"),
    "torchl8": ("torch", "uint8", "L"),
    "torchrgb8": ("torch", "uint8", "RGB"),
    "torchrgba8": ("torch", "uint8", "RGBA"),
    "torchl": ("torch", "float", "L"),
    "torchrgb": ("torch", "float", "RGB"),
    "torch": ("torch", "float", "RGB"),
    "torchrgba": ("torch", "float", "RGBA"),
    "pill": ("pil", "", "L"),
    "pil": ("pil", "", "RGB"),
    "pilrgb": ("pil", "", "RGB"),
    "pilrgba": ("pil", "", "RGBA"),
}
# names that WebDataset does not have: the numbers stored in the file
_STORED = {"raw": read_stored, "mask": read_mask}
IMAGE_NAMES = tuple(sorted([*_SPECS, *_STORED]))
"""Values of ``spec`` for `ImageDecoder`."""
_ORIENTATION = 0x0112  # EXIF tag; 1 means upright
_NEAREST_PIXEL = ("1", "P", "PA")  # modes whose numbers must not be averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoder:
    """Decode images to the type that ``spec`` names.

    Args:
        spec: ``l``, ``rgb`` or ``rgba``: numpy float32 from 0 to 1, shape (H, W) or (H, W, C). With ``8``: uint8 from 0 to
            255. With ``torch`` in front: a tensor, shape (H, W) or (C, H, W). With ``pil``: a loaded PIL image.
            ``raw``: the stored numbers, see `read_stored`; ``mask``: one whole number for each pixel, see `read_mask`.
        to_tensor: Array -> tensor; needed for the ``torch`` names.
        max_side: Maximum of both sides in pixels; larger images are scaled down, keeping their aspect. JPEG then decodes faster.
        upright: Rotate and mirror images by their EXIF orientation. By default pixels keep their stored order.
        scale_16_bits: Scale whole numbers of 9 to 16 bits, which ``spec`` cannot hold, to 8 bits.
        is_mask: The pixels are numbers, not shades: never average them, and refuse files whose numbers ``spec`` would change.

    Raises:
        OptionError: If ``spec`` is unknown, or ``max_side`` is below 1.
    """

    spec: str
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None
    max_side: int | None = None
    upright: bool = False
    scale_16_bits: bool = False
    is_mask: bool = False

    def __post_init__(self) -> None:
        if self.spec not in IMAGE_NAMES:
            raise OptionError(
                f"no image decoder is called {self.spec!r}; available: {', '.join(IMAGE_NAMES)}"
            )
        if self.max_side is not None and self.max_side < 1:
            raise OptionError(f"max_side must be 1 pixel or more, not {self.max_side}")

    @property
    def makes_grey(self) -> bool:
        """Whether colours become shades of grey."""
        return self.spec in _SPECS and _SPECS[self.spec][2] == "L"

    @property
    def keeps_numbers(self) -> bool:
        """Whether the stored numbers of the file are returned."""
        return self.spec in _STORED

    def __call__(self, data: bytes) -> Any:
        """Decode the bytes of an image file.

        Raises:
            OSError: If the bytes are truncated, or not an image that Pillow decodes without other programs.
            PIL.Image.DecompressionBombError: If the image has more pixels than Pillow's limit (179 million).
            LossyDecodeError: If ``spec`` cannot hold the numbers of the file.
        """
        if self.keeps_numbers:
            return self._decode_stored(data)
        library, kind, mode = _SPECS[self.spec]
        if library == "pil":
            return self._decode_colours(data, mode)
        array = self._decode_pixels(data, mode)
        if library == "torch" and array.ndim == 3:
            array = array.transpose(2, 0, 1)
        if kind == "float":
            array = array.astype(np.float32) / np.float32(255)
        if library == "numpy":
            return array if array.flags.writeable else array.copy()
        assert self.to_tensor is not None  # noqa: S101  (dataset.py passes it)
        writable = array.flags.writeable and array.flags.c_contiguous
        return self.to_tensor(array if writable else np.array(array, order="C"))

    def _decode_stored(self, data: bytes) -> np.ndarray[Any, Any]:
        pixels = self._apply_orientation(_STORED[self.spec](data), data)
        size = (pixels.shape[1], pixels.shape[0])
        if self.max_side is None or max(size) <= self.max_side:
            return pixels
        return shrink_to_nearest(pixels, _fit_size(size, self.max_side))

    def _decode_pixels(self, data: bytes, mode: str) -> np.ndarray[Any, Any]:
        array = self._decode_fast(data, mode)
        if array is None:
            return np.asarray(self._open(data, mode))
        if self.max_side is not None:
            array = np.asarray(self._shrink(PIL.Image.fromarray(array), jpeg_size(data)))
        return self._apply_orientation(array, data)

    def _decode_colours(self, data: bytes, mode: str) -> PIL.Image.Image:
        array = self._decode_fast(data, mode) if has_only_pixels(data) else None
        if array is None:
            return self._open(data, mode)
        picture = PIL.Image.fromarray(array)
        return picture if self.max_side is None else self._shrink(picture, jpeg_size(data))

    def _decode_fast(self, data: bytes, mode: str) -> np.ndarray[Any, Any] | None:
        """Decode a JPEG without Pillow; None if Pillow must do it."""
        # Decoding at a fraction of the size averages pixels, so masks are decoded at full size.
        return decode_jpeg(data, mode, min_longer_side=None if self.is_mask else self.max_side)

    def _open(self, data: bytes, mode: str) -> PIL.Image.Image:
        """Load an image in a mode (``L``, ``RGB``, ``RGBA``), no side longer than ``max_side`` pixels."""
        with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            depth = stored_depth(image, data)
            scales = self.scale_16_bits and depth.can_be_scaled
            self._check(image, depth, scales=scales)
            picture = scale_to_8_bits(image, depth) if scales else image
            nearest_pixel, size = self.is_mask or image.mode in _NEAREST_PIXEL, image.size
            reduced = None
            if self.max_side is not None and max(size) > self.max_side and not nearest_pixel:
                # Decoding a JPEG at 1/2, 1/4 or 1/8 takes less time than at full size.
                reduced = image.draft(None, _fit_size(size, self.max_side))
            converted = picture.convert(mode)
            size = converted.size if reduced is None else size
            shrunk = self._shrink(converted, size, nearest_pixel=nearest_pixel)
        return PIL.ImageOps.exif_transpose(shrunk) if self.upright else shrunk

    def _apply_orientation(self, array: np.ndarray[Any, Any], data: bytes) -> np.ndarray[Any, Any]:
        return array if not self.upright else _ORIENTATION_TRANSFORMS[_orientation(data)](array)

    def _check(self, image: PIL.Image.Image, depth: BitDepth, *, scales: bool) -> None:
        """Raise an error or warn if ``spec`` would lose information of the file."""
        if not depth.fits_8_bits and not scales:
            scaled = depth.can_be_scaled and not self.is_mask
            raise LossyDecodeError(
                f"{depth} do not fit {self.spec!r}, which has 8 bits; to keep them use decode(fields={{name: 'raw'}})"
                + (
                    f", to scale them to 8 bits decode({self.spec!r}, scale_16_bits=True)"
                    if scaled
                    else ""
                )
            )
        is_changed = image.mode in _NEAREST_PIXEL or is_rendered(image, depth)
        if self.is_mask and is_changed and not scales:
            raise LossyDecodeError(
                f"{self.spec!r} would replace the numbers of a mask ({depth.bits} bits, mode {image.mode}) by colours or shades; "
                "to keep them use decode(fields={name: 'mask'}), or masks=() if this field is not a mask"
            )
        if self.makes_grey and image.mode == "P" and not _is_grey(image):
            warnings.warn(
                f"{self.spec!r} turns a palette image into shades of grey; 'mask' returns its stored numbers",
                ImageWarning,
                stacklevel=2,
            )
        if getattr(image, "is_animated", False) and image.format != "MPO":
            warnings.warn(
                f"{self.spec!r} decodes only the first frame of an image with several",
                ImageWarning,
                stacklevel=2,
            )

    def _shrink(
        self, image: PIL.Image.Image, size: tuple[int, int], *, nearest_pixel: bool = False
    ) -> PIL.Image.Image:
        """Scale an image down by the ``size`` of its file, not of the decoded JPEG, so that masks get the same size."""
        if self.max_side is None or max(size) <= self.max_side:
            return image
        nearest = nearest_pixel or self.is_mask
        resampling = PIL.Image.Resampling.NEAREST if nearest else PIL.Image.Resampling.BICUBIC
        return image.resize(_fit_size(size, self.max_side), resampling)


def _fit_size(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    longer = max(size)
    return max(1, round(size[0] * max_side / longer)), max(1, round(size[1] * max_side / longer))


def _orientation(data: bytes) -> int:
    """Return the EXIF or XMP orientation to apply; 1 is upright. Pillow already applies that of a TIFF."""
    if b"Exif" not in data and b"rientation" not in data and data[:2] == b"\xff\xd8":
        return 1
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
        found = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)
    return found if found in _ORIENTATION_TRANSFORMS else 1


_ORIENTATION_TRANSFORMS: dict[int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
"""EXIF orientation -> function on rows and columns that does the same as ``PIL.ImageOps.exif_transpose``."""


def _is_grey(image: PIL.Image.Image) -> bool:
    """Return True if each palette entry is the shade of grey of its own index."""
    palette = np.frombuffer(bytes(image.getpalette("RGB") or ()), np.uint8).reshape(-1, 3)
    return bool((palette == np.arange(len(palette))[:, None]).all())


_START_OF_IMAGE = b"\xff\xd8"
_START_OF_SCAN = 0xDA
# SOFn, DHT, DQT, DRI, APP0 (JFIF), COM
_ABOUT_PIXELS = frozenset((*range(0xC0, 0xD0), 0xDB, 0xDD, 0xE0, 0xFE))
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
