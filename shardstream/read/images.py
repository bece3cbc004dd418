"""Image bytes -> pictures and arrays, under WebDataset's names (``rgb8``, ``torchrgb``, ``pil``, …)."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from shardstream.errors import OptionError
from shardstream.format.pictures import PILLOW_FORMATS
from shardstream.read.fast import decode_jpeg, has_only_pixels

EXTENSIONS = frozenset(
    [
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoder:
    """Decoder of one of WebDataset's image names.

    Args:
        spec: ``l``, ``rgb`` or ``rgba``: numpy float32 from 0 to 1, shape (H, W) or (H, W, C). With ``8``: uint8 from 0 to
            255. With ``torch`` in front: a tensor, shape (H, W) or (C, H, W). With ``pil``: a loaded PIL image.
        to_tensor: Array -> tensor; needed for the ``torch`` names.
        max_side: Make larger images smaller, keeping their aspect, so that no side has more pixels. JPEG takes less time then.

    Raises:
        OptionError: If there is no such name.
    """

    spec: str
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None
    max_side: int | None = None

    def __post_init__(self) -> None:
        if self.spec not in _SPECS:
            raise OptionError(
                f"no image decoder is called {self.spec!r}; there are: {', '.join(sorted(_SPECS))}"
            )
        if self.max_side is not None and self.max_side < 1:
            raise OptionError(f"max_side must be 1 pixel or more, not {self.max_side}")

    def __call__(self, data: bytes) -> Any:
        """Decode the bytes of an image file."""
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

    def _pixels(self, data: bytes, mode: str) -> np.ndarray[Any, Any]:
        array = decode_jpeg(data, mode, least=self.max_side)
        if array is None:
            return np.asarray(open_image(data, mode, self.max_side))
        if self.max_side is None or max(array.shape) <= self.max_side:
            return array
        return np.asarray(_fit(PIL.Image.fromarray(array), self.max_side))

    def _picture(self, data: bytes, mode: str) -> PIL.Image.Image:
        array = decode_jpeg(data, mode, least=self.max_side) if has_only_pixels(data) else None
        if array is None:
            return open_image(data, mode, self.max_side)
        return _fit(PIL.Image.fromarray(array), self.max_side)


def open_image(data: bytes, mode: str, max_side: int | None = None) -> PIL.Image.Image:
    """Load an image in a mode (``L``, ``RGB``, ``RGBA``), no side longer than ``max_side`` pixels.

    Raises:
        OSError: If the bytes are no image of a format that Pillow decodes by itself, or cut.
        PIL.Image.DecompressionBombError: If it has more pixels than Pillow's limit (179 million).
    """
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
        if max_side is not None and max(image.size) > max_side:
            # JPEG decodes to 1/2, 1/4 or 1/8 in less time than to its full size.
            image.draft(None, _fitting(image.size, max_side))
        return _fit(image.convert(mode), max_side)


def _fit(image: PIL.Image.Image, max_side: int | None) -> PIL.Image.Image:
    if max_side is None or max(image.size) <= max_side:
        return image
    return image.resize(_fitting(image.size, max_side), PIL.Image.Resampling.BICUBIC)


def _fitting(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    longer = max(size)
    return max(1, round(size[0] * max_side / longer)), max(1, round(size[1] * max_side / longer))
