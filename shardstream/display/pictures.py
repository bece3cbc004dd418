"""Make the pictures of a page from field bytes: pictures are always decoded and encoded again, so that a browser parses only ours."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import simplejpeg

from shardstream.codecs import AudioDecoder, Video
from shardstream.display.field_kinds import Kind, extension, is_mask_array
from shardstream.errors import OptionError
from shardstream.format import PILLOW_FORMATS
from shardstream.pipeline import BASIC, ImageDecoder, decode_jpeg

Array = np.ndarray[Any, Any]

_QUALITY = 82
_PNG_MODES = ("1", "P", "LA", "RGBA", "PA")
_WAVE_COLOUR = (64, 132, 214)
_LINE_COLOUR = (214, 120, 40)
_SMALL_PICTURE = 256
_SMALL_SIDE = 64  # pixel by pixel up to this side
_DECODES = threading.Semaphore(
    4
)  # decoded pictures in memory: a photo of 100 megapixels takes 300 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An encoded picture.

    Args:
        data: The file.
        media_type: Its type.
    """

    data: bytes
    media_type: str


def render(kind: Kind, field: str, data: bytes, side: int, *, overlay: bool = False) -> Picture:
    """Return the picture of a field.

    Args:
        kind: Kind of the field.
        field: Name of the field.
        data: Its bytes.
        side: Maximum of both sides, in pixels.
        overlay: Return a mask with a transparent background, to lay it over another picture.

    Raises:
        OptionError: If the kind has no picture, or a package is missing.
        Exception: Any error of a decoder: the bytes are damaged, or too large.
    """
    with _DECODES:
        if kind == "picture":
            return _photo(data, side)
        if kind == "mask":
            return _mask(ImageDecoder(spec="mask")(data), side, overlay=overlay)
        if kind == "video":
            return _encoded(_fitted(PIL.Image.fromarray(_still(data)), side))
        if kind == "sound":
            samples = AudioDecoder(mono=True)(data).samples
            return _png(draw_waveform(peaks(samples[0], side), side))
        if kind == "array":
            value = BASIC[extension(field)](data)
            array = next(iter(value.values())) if isinstance(value, Mapping) else value
            array = array[0] if isinstance(array, list) else array  # of a .ten
            if is_mask_array(field) and np.ndim(array) == 2:
                return _mask(array, side, overlay=overlay)
            return _png(picture_of_array(np.asarray(array), side))
    raise OptionError(f"a field of kind {kind!r} has no picture")


def render_value(value: Any, side: int) -> Picture | None:
    """Return the picture of a value that the user's function returned; None if it is none."""
    if isinstance(value, PIL.Image.Image):
        return _encoded(_fitted(value, side))
    if hasattr(value, "__array__") and not np.isscalar(value):  # arrays, and tensors
        array = np.asarray(value)
        if array.ndim and array.dtype.kind in "buif" and array.size:
            return _png(picture_of_array(array, side))
    return None


def image_size(data: bytes) -> dict[str, Any]:
    """Return width, height, format and mode of a picture, by its header."""
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
        return {
            "width": image.width,
            "height": image.height,
            "format": image.format,
            "mode": image.mode,
        }


def peaks(samples: Array, count: int) -> Array:
    """Return the minimum and maximum of ``count`` parts of a sound, shape (2, n).

    >>> peaks(np.array([0.0, 1.0, -1.0, 0.5]), 2).tolist()
    [[0.0, -1.0], [1.0, 0.5]]
    """
    count = max(1, min(count, len(samples)))
    starts = np.arange(count) * len(samples) // count
    return np.stack([np.minimum.reduceat(samples, starts), np.maximum.reduceat(samples, starts)])


def draw_waveform(found: Array, side: int) -> PIL.Image.Image:
    """Draw peaks as a picture with a transparent background."""
    height = max(16, side // 2)
    image = PIL.Image.new("RGBA", (side, height))
    draw = PIL.ImageDraw.Draw(image)
    middle, scale = height / 2, height / 2 - 1
    for x in range(side):
        low, high = found[:, x * found.shape[1] // side]
        draw.line(
            (x, middle - float(high) * scale, x, middle - float(low) * scale), fill=_WAVE_COLOUR
        )
    draw.line((0, middle, side, middle), fill=_WAVE_COLOUR)
    return image


def picture_of_array(array: Array, side: int) -> PIL.Image.Image:
    """Draw an array: a line, a grey or a colour picture; of more dimensions the middle of the first ones."""
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind not in "buif" or not array.size:
        raise OptionError(f"an array of {array.dtype} and shape {array.shape} has no picture")
    while array.ndim > 3 or (array.ndim == 3 and not _is_colour(array)):
        array = array[array.shape[0] // 2]
    if array.ndim <= 1:
        return _line(array.reshape(-1).astype(np.float64), side)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    steps = [max(1, length // (2 * side)) for length in array.shape[:2]]
    pixels = _to_bytes(array[:: steps[0], :: steps[1]])
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
    if max(image.size) < _SMALL_SIDE:  # so that single numbers can be seen
        factor = max(1, side // max(image.size) // 2)
        image = image.resize(
            (image.width * factor, image.height * factor), PIL.Image.Resampling.NEAREST
        )
    return _fitted(image, side)


def statistics(array: Array) -> dict[str, Any]:
    """Return shape, dtype and numbers of an array, in JSON values."""
    found: dict[str, Any] = {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "bytes": int(array.nbytes),
    }
    if array.dtype.kind not in "buif" or not array.size:
        return found
    numbers = array.astype(np.float64, copy=False).ravel()
    finite = numbers[np.isfinite(numbers)]
    found["not_finite"] = int(numbers.size - finite.size)
    if finite.size:
        found |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "std": float(finite.std()),
            "zeros": int((finite == 0).sum()),
        }
        counts, _ = np.histogram(finite, bins=24)
        found["histogram"] = counts.tolist()
    if array.dtype.kind in "bui":
        distinct = np.unique(array.ravel()[: 1 << 20])
        if len(distinct) <= 20 and array.size <= 1 << 20:
            found["values"] = distinct.tolist()
    return found


def _photo(data: bytes, side: int) -> Picture:
    """Decode a picture, with its pixels in the stored order, as a dataset does by default."""
    # Small ones are scaled while they are decoded, to between 3/4 and twice the side: 3 ms for a photo of 640 x 480, where a resize takes 5.
    pixels = decode_jpeg(data, "RGB", min_longer_side=side * 3 // 4)
    if pixels is not None and side <= _SMALL_PICTURE and max(pixels.shape) <= 2 * side:
        encoded = simplejpeg.encode_jpeg(pixels, quality=_QUALITY, colorspace="RGB")
        return Picture(data=encoded, media_type="image/jpeg")
    if pixels is not None:
        return _encoded(_fitted(PIL.Image.fromarray(pixels), side))
    with PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as opened:
        if opened.format == "JPEG":
            opened.draft("RGB", (side, side))
        opened.load()
        image: PIL.Image.Image = opened
        if image.mode.startswith(("I", "F")):
            return _png(picture_of_array(np.asarray(image), side))
        if image.mode in ("P", "PA"):
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        return _encoded(_fitted(image, side))


def _still(data: bytes) -> Array:
    """Return the frame in the middle of a video. PyAV, as torchcodec would import torch."""
    video = Video(data=data, library="pyav")
    frame: Array = video.frames([len(video) // 2])[0]
    return frame


def _mask(numbers: Array, side: int, *, overlay: bool) -> Picture:
    """Colour a mask: each number has a colour of its own, 0 is black, or transparent in an overlay."""
    if numbers.ndim == 3:
        numbers = numbers[:, :, 0]
    steps = [max(1, -(-length // side)) for length in numbers.shape]
    small = numbers[:: steps[0], :: steps[1]].astype(np.int64)
    hue = (small * 137) % 256  # neighbouring numbers get hues far apart
    bands = [hue, np.full_like(hue, 190), np.full_like(hue, 255)]
    coloured = PIL.Image.merge("HSV", [PIL.Image.fromarray(one.astype(np.uint8)) for one in bands])
    rgb = np.asarray(coloured.convert("RGB"))
    alpha = np.where(small == 0, 0 if overlay else 255, 255).astype(np.uint8)
    rgb = np.where((small == 0)[:, :, None], 0, rgb).astype(np.uint8)
    image = PIL.Image.fromarray(np.dstack([rgb, alpha]) if overlay else rgb)
    return _png(image)


def _is_colour(array: Array) -> bool:
    return array.shape[-1] in (1, 3, 4) or array.shape[0] in (1, 3, 4)


def _to_bytes(array: Array) -> Array:
    """Scale numbers to 0 to 255; bytes stay as they are, and numbers that are not finite are 0."""
    if array.dtype == np.uint8:
        return array
    numbers = array.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        return np.zeros(array.shape, np.uint8)
    low, high = numbers[finite].min(), numbers[finite].max()
    scaled = (np.where(finite, numbers, low) - low) * (255 / (high - low) if high > low else 0)
    pixels: Array = scaled.astype(np.uint8)
    return pixels


def _line(numbers: Array, side: int) -> PIL.Image.Image:
    height = max(16, side // 2)
    image = PIL.Image.new("RGBA", (side, height))
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    low, high = float(finite.min()), float(finite.max())
    at = np.arange(side) * len(finite) // side
    scale = (height - 3) / (high - low) if high > low else 0.0
    points = [(x, height - 2 - (float(finite[n]) - low) * scale) for x, n in enumerate(at.tolist())]
    PIL.ImageDraw.Draw(image).line(points, fill=_LINE_COLOUR, width=2)
    return image


def _fitted(image: PIL.Image.Image, side: int) -> PIL.Image.Image:
    if max(image.size) <= side:
        return image
    width, height = image.size
    scale = side / max(image.size)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return image.resize(size, PIL.Image.Resampling.BILINEAR, reducing_gap=2.0)


def _encoded(image: PIL.Image.Image) -> Picture:
    if image.mode in _PNG_MODES:
        return _png(image.convert("RGBA") if image.mode != "1" else image)
    if image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY)
    return Picture(data=stream.getvalue(), media_type="image/jpeg")


def _png(image: PIL.Image.Image) -> Picture:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return Picture(data=stream.getvalue(), media_type="image/png")
