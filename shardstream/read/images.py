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

    Raises:
        OptionError: If there is no such name.
    """

    spec: str
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.spec not in _SPECS:
            raise OptionError(
                f"no image decoder is called {self.spec!r}; there are: {', '.join(sorted(_SPECS))}"
            )

    def __call__(self, data: bytes) -> Any:
        """Decode the bytes of an image file."""
        library, kind, mode = _SPECS[self.spec]
        image = open_image(data, mode)
        if library == "pil":
            return image
        array = np.asarray(image)
        if library == "torch" and array.ndim == 3:
            array = array.transpose(2, 0, 1)
        if kind == "float":
            array = array.astype(np.float32) / np.float32(255)
        if library == "numpy":
            return array if array.flags.writeable else array.copy()
        assert self.to_tensor is not None  # noqa: S101  (dataset.py passes it)
        return self.to_tensor(np.array(array, order="C"))


def open_image(data: bytes, mode: str) -> PIL.Image.Image:
    """Load an image in a mode (``L``, ``RGB``, ``RGBA``).

    Raises:
        OSError: If the bytes are no image of a format that Pillow decodes by itself, or cut.
        PIL.Image.DecompressionBombError: If it has more pixels than Pillow's limit (179 million).
    """
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
        return image.convert(mode)
