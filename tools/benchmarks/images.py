"""Photo preprocessing of a training, the same for all contestants: decode, random resized crop to 224 x 224."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

SIDE = 224


def crop_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Draw a crop box as torchvision's ``RandomResizedCrop`` does: 8 to 100 % of the area, sides 3:4 to 4:3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def crop(image: Image.Image) -> torch.Tensor:
    """Return a random part of an image, shape (3, 224, 224), uint8."""
    small = image.resize(
        (SIDE, SIDE), Image.Resampling.BILINEAR, box=crop_box(image.width, image.height)
    )
    pixels: npt.NDArray[np.uint8] = np.array(small)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def load(data: bytes) -> Image.Image:
    """Decode a JPEG with Pillow."""
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def scale_down(data: bytes, max_side: int) -> bytes:
    """Decode a JPEG at a fraction of its size, make it smaller, and encode it, all with Pillow, as ``ss.pack(max_side=…)`` does."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=3.0)
        image.save(out, "JPEG", quality=90)
    return out.getvalue()


def crop_pixels(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return a random part of an image, shape (3, 224, 224), uint8, with torch's resize.

    torchvision's ``v2.RandomResizedCrop`` does the same with tensors. Values differ from those of `crop` by 0.01 on average.

    Args:
        pixels: Shape (H, W, 3).
    """
    left, top, right, bottom = map(int, crop_box(pixels.shape[1], pixels.shape[0]))
    part = torch.from_numpy(pixels).permute(2, 0, 1)[None, :, top:bottom, left:right]
    size = (SIDE, SIDE)
    return torch.nn.functional.interpolate(part, size=size, mode="bilinear", antialias=True)[0]


def example_fast(data: bytes) -> torch.Tensor:
    """Decode a JPEG with libjpeg-turbo, and crop it with torch."""
    import simplejpeg  # noqa: PLC0415  (an extra)

    return crop_pixels(simplejpeg.decode_jpeg(data, "RGB"))


def example_pillow(data: bytes) -> torch.Tensor:
    """Decode a JPEG with Pillow, and crop it."""
    return crop(load(data))


def example(sample: Any) -> tuple[torch.Tensor, int]:
    """Return image and label of a raw sample, decoded with Pillow."""
    return example_pillow(sample["jpg"]), int(sample["cls"])
