"""Image bytes -> pictures and arrays: WebDataset's names (``rgb8``, ``torchrgb``, ``pil``, …), and ``raw`` and ``mask``."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from shardstream.errors import ImageWarning, OptionError
from shardstream.format import PILLOW_FORMATS, is_rendered, stored_depth
from shardstream.pipeline.fast_decode import decode_jpeg, has_only_pixels, jpeg_size
from shardstream.pipeline.raw_image_decode import (
    LossError,
    read_mask,
    read_stored,
    shrink_by_choice,
)

EXTENSIONS = frozenset(
    [
        "avif",
        "bmp",
        "dib",
        "gif",
        "jp2",
        "j2k",
        "jpe",
        "jpeg",
        "jpg",
        "jfif",
        "pbm",
        "pgm",
        "png",
        "apng",
        "pnm",
        "ppm",
        "tga",
        "tif",
        "tiff",
        "webp",
    ]
)
"""Fields that are images, by their last part. Formats that Pillow hands to other programs (eps, wmf) are left out."""

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
# Ours: the numbers in the file
_STORED = {"raw": read_stored, "mask": read_mask}
IMAGE_NAMES = tuple(sorted([*_SPECS, *_STORED]))
"""What `ImageDecoder` takes as ``spec``."""
_ORIENTATION = 0x0112  # the EXIF tag: 1 is upright
_BY_CHOICE = ("1", "P", "PA")  # modes whose numbers cannot be averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoder:
    """Decoder of one image name.

    Args:
        spec: ``l``, ``rgb`` or ``rgba``: numpy float32 from 0 to 1, shape (H, W) or (H, W, C). With ``8``: uint8 from 0 to
            255. With ``torch`` in front: a tensor, shape (H, W) or (C, H, W). With ``pil``: a loaded PIL image.
            ``raw``: the stored numbers, see `read_stored`; ``mask``: one whole number for each pixel, see `read_mask`.
        to_tensor: Array -> tensor; needed for the ``torch`` names.
        max_side: Make larger images smaller, keeping their aspect, so that no side has more pixels. JPEG takes less time then.
        upright: Turn and mirror images as their EXIF orientation says. By default pixels stay in the order that is stored.
        is_mask: The pixels are numbers, not shades: never average them, and refuse files whose numbers ``spec`` would change.

    Raises:
        OptionError: If there is no such name.
    """

    spec: str
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None
    max_side: int | None = None
    upright: bool = False
    is_mask: bool = False

    def __post_init__(self) -> None:
        if self.spec not in IMAGE_NAMES:
            raise OptionError(
                f"no image decoder is called {self.spec!r}; there are: {', '.join(IMAGE_NAMES)}. "
                "For audio, video and other formats give a function: fields={'flac': function}"
            )
        if self.max_side is not None and self.max_side < 1:
            raise OptionError(f"max_side must be 1 pixel or more, not {self.max_side}")

    @property
    def makes_grey(self) -> bool:
        """Tell whether colours become shades of grey."""
        return self.spec in _SPECS and _SPECS[self.spec][2] == "L"

    @property
    def keeps_numbers(self) -> bool:
        """Tell whether the numbers of the file come out."""
        return self.spec in _STORED

    def __call__(self, data: bytes) -> Any:
        """Decode the bytes of an image file.

        Raises:
            OSError: If the bytes are no image of a format that Pillow decodes by itself, or cut.
            PIL.Image.DecompressionBombError: If it has more pixels than Pillow's limit (179 million).
            LossError: If ``spec`` cannot hold the numbers of the file.
        """
        if self.keeps_numbers:
            return self._stored(data)
        library, kind, mode = _SPECS[self.spec]
        if library == "pil":
            return self._picture(data, mode)
        array = self._pixels(data, mode)
        if library == "torch" and array.ndim == 3:
            array = array.transpose(2, 0, 1)
        if kind == "float":
            array = array.astype(np.float32) / np.float32(255)
        if library == "numpy":
            return array if array.flags.writeable else array.copy()
        assert self.to_tensor is not None  # noqa: S101  (dataset.py passes it)
        writable = array.flags.writeable and array.flags.c_contiguous
        return self.to_tensor(array if writable else np.array(array, order="C"))

    def _stored(self, data: bytes) -> np.ndarray[Any, Any]:
        pixels = self._turn(_STORED[self.spec](data), data)
        size = (pixels.shape[1], pixels.shape[0])
        if self.max_side is None or max(size) <= self.max_side:
            return pixels
        return shrink_by_choice(pixels, _fitting(size, self.max_side))

    def _pixels(self, data: bytes, mode: str) -> np.ndarray[Any, Any]:
        array = self._decode_fast(data, mode)
        if array is None:
            return np.asarray(self._open(data, mode))
        if self.max_side is not None:
            array = np.asarray(self._fit(PIL.Image.fromarray(array), jpeg_size(data)))
        return self._turn(array, data)

    def _picture(self, data: bytes, mode: str) -> PIL.Image.Image:
        array = self._decode_fast(data, mode) if has_only_pixels(data) else None
        if array is None:
            return self._open(data, mode)
        picture = PIL.Image.fromarray(array)
        return picture if self.max_side is None else self._fit(picture, jpeg_size(data))

    def _decode_fast(self, data: bytes, mode: str) -> np.ndarray[Any, Any] | None:
        """Decode a JPEG without Pillow; None if Pillow must do it."""
        # At a fraction of its size a JPEG is averaged.
        return decode_jpeg(data, mode, least=None if self.is_mask else self.max_side)

    def _open(self, data: bytes, mode: str) -> PIL.Image.Image:
        """Load an image in a mode (``L``, ``RGB``, ``RGBA``), no side longer than ``max_side`` pixels."""
        with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            self._check(image, data)
            by_choice, size = self.is_mask or image.mode in _BY_CHOICE, image.size
            reduced = None
            if self.max_side is not None and max(size) > self.max_side and not by_choice:
                # JPEG decodes to 1/2, 1/4 or 1/8 in less time than to its full size.
                reduced = image.draft(None, _fitting(size, self.max_side))
            converted = image.convert(mode)
            size = converted.size if reduced is None else size
            fitted = self._fit(converted, size, by_choice=by_choice)
        return PIL.ImageOps.exif_transpose(fitted) if self.upright else fitted

    def _turn(self, array: np.ndarray[Any, Any], data: bytes) -> np.ndarray[Any, Any]:
        return array if not self.upright else _TURNS[_orientation(data)](array)

    def _check(self, image: PIL.Image.Image, data: bytes) -> None:
        """Refuse, or warn of, a file of which the spec would lose something."""
        depth = stored_depth(image, data)
        if not depth.fits_8_bits:
            raise LossError(
                f"{depth} do not fit {self.spec!r}, which has 8 bits; 'raw' keeps them: decode(fields={{name: 'raw'}})"
            )
        if self.is_mask and (image.mode in _BY_CHOICE or is_rendered(image, depth)):
            raise LossError(
                f"{self.spec!r} would replace the numbers of a mask ({depth.bits} bits, mode {image.mode}) by colours or shades; "
                "'mask' keeps them: decode(fields={name: 'mask'}); masks=() if this field is no mask"
            )
        if self.makes_grey and image.mode == "P" and not _is_grey(image):
            warnings.warn(
                f"{self.spec!r} makes shades of grey of a palette image; 'mask' gives its stored numbers",
                ImageWarning,
                stacklevel=2,
            )
        if getattr(image, "is_animated", False) and image.format != "MPO":
            warnings.warn(
                f"{self.spec!r} decodes the first frame of an image that has several",
                ImageWarning,
                stacklevel=2,
            )

    def _fit(
        self, image: PIL.Image.Image, size: tuple[int, int], *, by_choice: bool = False
    ) -> PIL.Image.Image:
        """Make an image smaller that came from a file of ``size``, whatever a JPEG was decoded to: masks beside it must match."""
        if self.max_side is None or max(size) <= self.max_side:
            return image
        nearest = by_choice or self.is_mask
        resampling = PIL.Image.Resampling.NEAREST if nearest else PIL.Image.Resampling.BICUBIC
        return image.resize(_fitting(size, self.max_side), resampling)


def _fitting(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    longer = max(size)
    return max(1, round(size[0] * max_side / longer)), max(1, round(size[1] * max_side / longer))


def _orientation(data: bytes) -> int:
    """Return the EXIF (or XMP) orientation that is left to apply: 1 is upright. Pillow itself applies that of a TIFF."""
    if b"Exif" not in data and b"rientation" not in data and data[:2] == b"\xff\xd8":
        return 1
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
        found = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)
    return found if found in _TURNS else 1


_TURNS: dict[int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
"""EXIF orientation -> how to turn rows and columns, as ``PIL.ImageOps.exif_transpose`` does."""


def _is_grey(image: PIL.Image.Image) -> bool:
    """Tell whether each entry of a palette is the shade of grey of its own number."""
    palette = np.frombuffer(bytes(image.getpalette("RGB") or ()), np.uint8).reshape(-1, 3)
    return bool((palette == np.arange(len(palette))[:, None]).all())
