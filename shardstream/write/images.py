"""Images: pixels -> the bytes of an image file, and image files made smaller on the way in."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageOps, UnidentifiedImageError

from shardstream.errors import OptionError, SampleError, SourceError
from shardstream.format.pictures import PILLOW_FORMATS, is_plain_jpeg

IMAGE_FORMATS = {
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "tiff": "TIFF",
    "gif": "GIF",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
    "pnm": "PPM",
}
"""Last part of a field -> the name that Pillow has for the format."""

REENCODED = ("jpg", "png", "webp")
"""Formats that images are turned into."""

DEFAULT_QUALITY = 90
_LOSSY = ("JPEG", "WEBP")
_ORIENTATION = 0x0112  # the EXIF tag: 1 is upright
_ACCEPTED = (
    "a PIL image, a uint8 array (height, width[, 1, 3 or 4]), a uint8 tensor (channels, height, width), "
    "or the bytes of an image file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How images that come as files are changed on the way in; by default not at all.

    Args:
        max_side: Longest side in pixels; larger images are made smaller, keeping their aspect. None: any size.
        quality: 1 to 100, of JPEG and WebP that are written anew.
        format: Field that all images become: "jpg", "png" or "webp". None: each stays what it is.

    Raises:
        OptionError: If one makes no sense.
    """

    max_side: int | None = None
    quality: int = DEFAULT_QUALITY
    format: str | None = None

    def __post_init__(self) -> None:
        if self.max_side is not None and self.max_side < 1:
            raise OptionError(f"max_side must be 1 pixel or more, not {self.max_side}")
        if not 1 <= self.quality <= 100:
            raise OptionError(f"quality goes from 1 to 100, not {self.quality}")
        if self.format is not None and self.format not in REENCODED:
            raise OptionError(
                f"images are turned into {', '.join(REENCODED)}, not into {self.format!r}"
            )

    @property
    def changes_nothing(self) -> bool:
        """Tell whether every image stays as it is."""
        return self.max_side is None and self.format is None

    def decisive(self) -> dict[str, Any]:
        """Return what decides the bytes of images: for those written anew, the version of the encoder, too."""
        if self.changes_nothing:
            return {}
        return {**asdict(self), "pillow": PIL.__version__}


def is_image_field(field: str) -> bool:
    """Tell whether a field holds an image file.

    >>> is_image_field("seg.png"), is_image_field("json")
    (True, False)
    """
    return field.rpartition(".")[2] in IMAGE_FORMATS


def encode_image(field: str, value: object) -> bytes:
    """Return the bytes of an image file; JPEG and WebP at quality 90.

    Args:
        field: Its last part says the format.
        value: A PIL image; a uint8 array of shape (height, width) or (height, width, 1, 3 or 4); a uint8 tensor of shape
            (height, width) or (channels, height, width).

    Raises:
        SampleError: If the value is anything else, or the format cannot hold it.
    """
    image = value if isinstance(value, Image.Image) else _from_pixels(field, value)
    form = IMAGE_FORMATS[field.rpartition(".")[2]]
    try:
        return _save(image, form, DEFAULT_QUALITY)
    except (OSError, ValueError, KeyError) as error:
        raise SampleError(
            f"{form} cannot hold an image of mode {image.mode} ({error}); convert it first, e.g. image.convert('RGB')",
            field=field,
        ) from error


def reencode(data: bytes, field: str, options: ImageOptions, *, where: str) -> tuple[str, bytes]:
    """Make an image file smaller, or another format, where the options ask for it; else return its bytes as they are.

    The header is looked at in any case: what is no image shall not be found out in training.

    What is written anew is turned upright, as EXIF says, and loses its EXIF; colour profiles stay. Transparency becomes
    white where the format has none.

    Args:
        data: The image file.
        field: Where it goes; its last part changes with the format.
        options: What is asked for.
        where: The file or row it comes from, for messages.

    Returns:
        Field and bytes.

    Raises:
        SourceError: If the file is no image that can be read, or an animation that would lose its frames.
    """
    if options.changes_nothing and is_plain_jpeg(data, Image.MAX_IMAGE_PIXELS):
        return field, data
    old = field.rpartition(".")[2]
    new = options.format or old
    same_format = IMAGE_FORMATS[new] == IMAGE_FORMATS[old]
    try:
        with _bombs_refused(), Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            if options.changes_nothing:
                return field, data
            fits = options.max_side is None or max(image.size) <= options.max_side
            if fits and same_format:
                return field, data
            if getattr(image, "n_frames", 1) > 1:
                raise SourceError(
                    f"an animation of {image.n_frames} frames would keep the first alone; "  # type: ignore[attr-defined]
                    "pack it without image options, or leave it out",
                    shard=where,
                )
            smaller = _fit(image, options.max_side)
            encoded = _save(
                _for_format(smaller, IMAGE_FORMATS[new]), IMAGE_FORMATS[new], options.quality
            )
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        detail = "unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
        raise SourceError(
            f"no image that can be read ({detail}); mend it, or leave such files out with on_error='skip' (--skip-errors)",
            shard=where,
        ) from error
    except Image.DecompressionBombWarning as error:
        raise SourceError(f"the image is suspiciously large: {error}", shard=where) from error
    return field[: len(field) - len(old)] + new, encoded


@contextmanager
def _bombs_refused() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _fit(image: Image.Image, max_side: int | None) -> Image.Image:
    turned = image.getexif().get(_ORIENTATION, 1) != 1
    if image.mode == "P":  # palette entries cannot be averaged
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    elif image.mode == "1":
        image = image.convert("L")
    if max_side is not None and max(image.size) > max_side:
        # Lets JPEG decode at a fraction of its size, then reduces by boxes, then by Lanczos.
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=3.0)
    image.load()
    return ImageOps.exif_transpose(image) if turned else image


def _for_format(image: Image.Image, form: str) -> Image.Image:
    """Give an image a mode that the format has."""
    if form in ("JPEG", "PPM", "BMP") and image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if form not in ("JPEG", "TIFF") and image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB")
    return image


def _save(image: Image.Image, form: str, quality: int) -> bytes:
    options: dict[str, Any] = {"quality": quality} if form in _LOSSY else {}
    if image.info.get("icc_profile") and form in ("JPEG", "PNG", "WEBP", "TIFF"):
        options["icc_profile"] = image.info["icc_profile"]
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _from_pixels(field: str, value: object) -> Image.Image:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        pixels = value.detach().cpu().numpy()
        if pixels.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
    elif isinstance(value, np.ndarray):
        pixels = value
    else:
        raise SampleError(f"{type(value).__name__} is no image; give {_ACCEPTED}", field=field)
    if pixels.dtype != np.uint8:
        advice = (
            "multiply values from 0 to 1 by 255, round, and convert them to uint8"
            if pixels.dtype.kind == "f"
            else "convert them to uint8, or keep them as 'npy'"
        )
        raise SampleError(f"pixels are uint8, these are {pixels.dtype}; {advice}", field=field)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if (
        not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
        or not pixels.size
    ):
        raise SampleError(
            f"pixels of shape {tuple(value.shape)} are no image; give {_ACCEPTED}", field=field
        )
    return Image.fromarray(np.ascontiguousarray(pixels))
