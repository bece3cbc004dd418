"""Decide by the names of fields how they are shown, and make their pictures.

Pictures are always decoded and encoded again, so that a browser parses only ours.
"""

from __future__ import annotations

import io
import math
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageDraw
import simplejpeg

from shardstream.codecs import (
    VIDEO_EXTENSIONS,
    AudioDecoder,
    ImageDecoder,
    Video,
    audio_decoders,
    decode_jpeg,
    iter_npz,
    sound_peaks,
)
from shardstream.errors import OptionError
from shardstream.format import (
    IMAGE_FORMATS,
    INT_FIELDS,
    JSON_FIELDS,
    PILLOW_FORMATS,
    TEXT_FIELDS,
    has_mask_word,
    is_image_field,
    mask_fields,
)
from shardstream.pipeline import BASIC

Kind = Literal["picture", "mask", "video", "sound", "array", "json", "text", "class", "other"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_FORMATS, "picture"),
    **dict.fromkeys(VIDEO_EXTENSIONS, "video"),
    **dict.fromkeys(audio_decoders(AudioDecoder()), "sound"),
    **dict.fromkeys(("npy", "npz", "ten", "tb"), "array"),
    **dict.fromkeys(JSON_FIELDS, "json"),
    **dict.fromkeys((*TEXT_FIELDS, *INT_FIELDS, "caption", "svg", "log", "js", "css"), "text"),
    **dict.fromkeys(("cls", "cls2", "class"), "class"),
}
# The types that a browser plays; it is sent nothing else of the data but pictures made here.
_PLAYED = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "oga": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "webm": "video/webm",
}
_FIRST: tuple[Kind, ...] = ("picture", "video", "sound", "mask", "array")
_EXCERPT: tuple[Kind, ...] = ("text", "json")


class Thumbnail(NamedTuple):
    """The fields that a card shows."""

    kind: Kind | None
    """Kind of the picture; None for none."""
    field: str | None
    """The field that it is made of."""
    excerpt: str | None
    """The field whose beginning is shown as text."""


def kinds_of(fields: Sequence[str]) -> dict[str, Kind]:
    """Return the kind of each field of a sample.

    >>> kinds_of(["jpg", "seg.png", "cls", "mask.npy", "x.pyd"])
    {'jpg': 'picture', 'seg.png': 'mask', 'cls': 'class', 'mask.npy': 'array', 'x.pyd': 'other'}
    """
    masks = mask_fields(fields)
    return {
        name: "mask"
        if name in masks and is_image_field(name)
        else _KINDS.get(extension(name), "other")
        for name in fields
    }


def is_mask_array(name: str) -> bool:
    """Return whether a field is an array of class numbers, by its name.

    >>> is_mask_array("seg.npy"), is_mask_array("npy")
    (True, False)
    """
    return extension(name) == "npy" and has_mask_word(name.rpartition(".")[0])


def choose_thumbnail(fields: Sequence[str]) -> Thumbnail:
    """Return what the card of a sample shows: the first picture, else video, sound, mask, array; and the first text.

    >>> choose_thumbnail(["txt", "seg.png", "jpg"])
    Thumbnail(kind='picture', field='jpg', excerpt='txt')
    """
    kinds = kinds_of(fields)
    kind, field = next(
        ((kind, name) for kind in _FIRST for name in fields if kinds[name] == kind), (None, None)
    )
    excerpt = next(
        (name for kind in _EXCERPT for name in fields if kinds[name] == kind and name != field),
        None,
    )
    return Thumbnail(kind, field, excerpt)


def played_type(field: str) -> str | None:
    """Return the type with which a browser is sent a sound or a video; None for all other fields.

    >>> played_type("left.mp3"), played_type("html")
    ('audio/mpeg', None)
    """
    return _PLAYED.get(extension(field))


def extension(field: str) -> str:
    """Return the last part of a field's name, in lower case."""
    return field.rsplit(".", 1)[-1].lower()


Array = np.ndarray[Any, Any]

_QUALITY = 82
_PNG_MODES = ("1", "P", "LA", "RGBA", "PA")
_WAVE_COLOUR = (64, 132, 214)
_LINE_COLOUR = (214, 120, 40)
_SMALL_PICTURE = 256
_SMALL_SIDE = 64  # pixel by pixel up to this side
_DECODES = threading.Semaphore(4)  # fields that are decoded at a time
_LARGE = threading.Lock()  # of these, one of over `_LARGE_BYTES`
_LARGE_BYTES = 64 << 20
NPZ_LIMIT_BYTES = 256 << 20
_PIECE = 1 << 20  # numbers of an array that are converted at a time


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
    with _decoding(_decoded_bytes(kind, field, data)):
        if kind == "picture":
            return _photo(data, side)
        if kind == "mask":
            return _mask(ImageDecoder(spec="mask")(data), side, overlay=overlay)
        if kind == "video":
            return _encoded(_fitted(PIL.Image.fromarray(_still(data)), side))
        if kind == "sound":
            return _png(draw_waveform(sound_peaks(data, side), side))
        if kind == "array":
            array = _first_array(field, data)
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
    if array.dtype.kind not in "buifc" or not array.size:
        raise OptionError(f"an array of {array.dtype} and shape {array.shape} has no picture")
    while array.ndim > 3 or (array.ndim == 3 and not _is_colour(array)):
        array = array[array.shape[0] // 2]
    if array.ndim <= 1:
        line = array.reshape(-1)
        return _line(_real(line[np.arange(side) * len(line) // side]).astype(np.float64), side)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    steps = [max(1, length // (2 * side)) for length in array.shape[:2]]
    pixels = _to_bytes(_real(array[:: steps[0], :: steps[1]]))
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
    count, zeros, total, low, high = 0, 0, 0.0, math.inf, -math.inf
    for piece in _finite_pieces(array):
        count, zeros = count + piece.size, zeros + int((piece == 0).sum())
        low, high = float(piece.min(initial=low)), float(piece.max(initial=high))
        total += float(piece.sum())
    found["not_finite"] = array.size - count
    if count:
        bars, squares = np.zeros(24, np.int64), 0.0
        for piece in _finite_pieces(array):
            bars += np.histogram(piece, bins=24, range=(low, high))[0]
            squares += float(np.square(piece - total / count).sum())
        found |= {
            "min": low,
            "max": high,
            "mean": total / count,
            "std": math.sqrt(squares / count),
            "zeros": zeros,
            "histogram": bars.tolist(),
        }
    if array.dtype.kind in "bui" and array.size <= _PIECE:
        distinct = np.unique(array)
        if len(distinct) <= 20:
            found["values"] = distinct.tolist()
    return found


def npz_statistics(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the `statistics` of each array of a ``.npz`` file, of which one is in memory at a time.

    Raises:
        Exception: Any error of the decoder: the bytes are damaged, or the arrays over `NPZ_LIMIT_BYTES`.
    """
    with _decoding(_decoded_bytes("array", "npz", data)):
        arrays = iter_npz(data, limit_bytes=NPZ_LIMIT_BYTES)
        return {name: statistics(array) for name, array in arrays}


def _finite_pieces(array: Array) -> Iterator[Array]:
    """Yield the finite numbers of an array as float64, some at a time."""
    flat = array.ravel(order="K")
    for start in range(0, flat.size, _PIECE):
        numbers = flat[start : start + _PIECE].astype(np.float64)
        yield numbers[np.isfinite(numbers)]


@contextmanager
def _decoding(size: int) -> Iterator[None]:
    """Wait until a field may take so many bytes of memory."""
    with _LARGE if size > _LARGE_BYTES else nullcontext(), _DECODES:
        yield


def _decoded_bytes(kind: Kind, field: str, data: bytes) -> int:
    """Return about how many bytes a field takes once decoded, by its header; those of a damaged one are its own."""
    try:
        if kind in ("picture", "mask"):
            size = image_size(data)
            return 4 * int(size["width"]) * int(size["height"])
        if kind == "array" and extension(field) == "npz":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return sum(entry.file_size for entry in archive.infolist())
    except Exception:  # noqa: BLE001  (the decoder raises it again, for the page to show)
        return len(data)
    return len(data)


def _first_array(field: str, data: bytes) -> Any:
    if extension(field) == "npz":
        return next(iter_npz(data, limit_bytes=NPZ_LIMIT_BYTES))[1]
    value = BASIC[extension(field)](data)
    return value[0] if isinstance(value, list) else value  # of a .ten


def _real(array: Array) -> Array:
    return np.abs(array) if array.dtype.kind == "c" else array


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
        if image.mode not in ("L", "RGB") and 4 * image.width * image.height > _LARGE_BYTES:
            # before a conversion
            image.thumbnail((2 * side, 2 * side), PIL.Image.Resampling.NEAREST)
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
    scale = (height - 3) / (high - low) if high > low else 0.0
    points = [(x, height - 2 - (value - low) * scale) for x, value in enumerate(finite.tolist())]
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
