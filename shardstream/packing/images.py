"""Encode pixels as image files, and resize or convert image files."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError

from shardstream.codecs import BitDepth, is_plain_jpeg, is_rendered, scale_to_8_bits, stored_depth
from shardstream.errors import ImageWarning, OptionError, SampleError, SourceError
from shardstream.format import (
    IMAGE_FORMATS,
    PILLOW_FORMATS,
    check_masks,
    has_mask_word,
    is_image_field,
    mask_fields,
)

REENCODED = ("jpg", "png", "webp")
"""Formats that images can be converted to."""

DEFAULT_QUALITY = 90
_LOSSY = ("JPEG", "WEBP", "AVIF")
_SPACES = {b"CMYK": "CMYK", b"Lab ": "LAB"}  # colours of ICC profiles -> mode
_ORIENTATION = 0x0112  # the EXIF tag: 1 is upright
_AVERAGED = ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr")  # modes of photos; all others hold numbers
_MASK_SHADES = 32  # a grey image of no more shades may be a mask
_ID_SHADES = frozenset(range(_MASK_SHADES))
_ACCEPTED = (
    "a PIL image, a uint8 array (height, width[, 1, 3 or 4]), a uint16 array (height, width) for png or tif, "
    "a uint8 tensor (channels, height, width), or the bytes of an image file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Changes to image files while they are packed; none by default.

    Args:
        max_side: Longest side in pixels; larger images are made smaller, keeping their aspect. None: any size.
        quality: 1 to 100, of JPEG and WebP that are encoded again.
        format: Field that all images but masks become: "jpg", "png" or "webp". None: each stays what it is.
        masks: Fields that hold numbers, not shades: they keep their format, and are made smaller by taking the nearest pixel.
            None: by their names, see `mask_fields`.
        scale_16_bits: Scale whole numbers of 9 to 16 bits to 8 bits: the high bits of their full range are kept. Masks keep all.
        are_pictures: Whether grey images of few shades are pictures, unless their shades are small numbers; see `for_fields`.
        check: Decode all pixels of images that stay as they are.

    Raises:
        OptionError: If one is invalid.
    """

    max_side: int | None = None
    quality: int = DEFAULT_QUALITY
    format: str | None = None
    masks: tuple[str, ...] | None = None
    scale_16_bits: bool = False
    are_pictures: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        if self.max_side is not None and self.max_side < 1:
            raise OptionError(f"max_side must be 1 pixel or more, not {self.max_side}")
        if not 1 <= self.quality <= 100:
            raise OptionError(f"quality must be from 1 to 100, not {self.quality}")
        if self.masks is not None:
            check_masks(self.masks)
        if self.format is not None and self.format not in REENCODED:
            raise OptionError(
                f"images can be converted to {', '.join(REENCODED)}, not to {self.format!r}"
            )

    @property
    def changes_nothing(self) -> bool:
        """Whether every image stays as it is."""
        return self.max_side is None and self.format is None and not self.scale_16_bits

    def select_masks(self, fields: Iterable[str]) -> frozenset[str]:
        """Return the fields of a sample that are masks."""
        return mask_fields(fields) if self.masks is None else frozenset(self.masks)

    def for_fields(self, fields: Collection[str]) -> ImageOptions:
        """Return the options for a sample; its only image is a picture if it has a class."""
        if self.changes_nothing or "cls" not in fields or sum(map(is_image_field, fields)) > 1:
            return self
        return replace(self, are_pictures=True)

    def encoding_options(self) -> dict[str, Any]:
        """Return the options that decide the bytes of images, with the version of the encoder if images are encoded again.

        A pack with a check does not keep the shards of one without.
        """
        checked = {"check": True} if self.check else {}
        if self.changes_nothing:
            return checked
        options = asdict(self)
        del options["are_pictures"], options["check"]  # the fields decide the first; see `checked`
        if not self.scale_16_bits:
            del options["scale_16_bits"]
        return {**options, **checked, "pillow": PIL.__version__}


def encode_image(field: str, value: object) -> bytes:
    """Return the bytes of an image file; JPEG, AVIF and WebP at quality 90, masks as lossless WebP.

    Args:
        field: Name of the field; its last part determines the format.
        value: A PIL image; a uint8 array of shape (height, width) or (height, width, 1, 3 or 4); a uint16 array of shape
            (height, width), for png and tif; a uint8 tensor of shape (height, width) or (channels, height, width).

    Raises:
        SampleError: If the value is anything else, or the format cannot hold it.
    """
    image = value if isinstance(value, Image.Image) else _from_pixels(field, value)
    file_format = IMAGE_FORMATS[field.rpartition(".")[2]]
    is_mask = has_mask_word(field)
    if is_mask and file_format == "JPEG" and image.mode not in _AVERAGED[1:]:
        raise SampleError(
            "a JPEG does not keep the numbers of a mask; use a field that ends in png", field=field
        )
    if not _can_hold(file_format, image):
        raise SampleError(
            f"{file_format} cannot hold the numbers of an image of mode {image.mode}; use the field 'png', 'tif' or 'npy'",
            field=field,
        )
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise SampleError(
            "an animation, or several pages, would keep one frame; give the bytes of its file",
            field=field,
        )
    try:
        return _save(
            image, file_format, DEFAULT_QUALITY, is_mask=is_mask, orientation=_orientation(image)
        )
    except (OSError, ValueError, KeyError) as error:
        raise SampleError(
            f"{file_format} cannot hold an image of mode {image.mode} ({error}); convert it first, e.g. image.convert('RGB')",
            field=field,
        ) from error


def reencode(
    data: bytes, field: str, options: ImageOptions, *, where: str, is_mask: bool = False
) -> tuple[str, bytes]:
    """Resize or convert an image file as the options require; else return its bytes unchanged.

    The header is always checked, so that a broken image fails here and not in training.

    Pixels keep their stored order and EXIF orientation; other EXIF data is dropped, colour profiles are kept.
    Transparency becomes white where the format has none. Palettes, single bits and numbers of more than 8 bits are never averaged.

    Args:
        data: The image file.
        field: Name of the field; its last part changes with the format.
        options: Size and format.
        where: The file or row it comes from, for messages.
        is_mask: Whether to keep its format and average no pixels.

    Returns:
        Field and bytes.

    Raises:
        SourceError: If the file is not a readable image, or would lose frames or numbers.
    """
    if options.changes_nothing and is_plain_jpeg(data, Image.MAX_IMAGE_PIXELS):
        return field, data
    old = field.rpartition(".")[2]
    new = old if is_mask else options.format or old
    try:
        with _refuse_bombs(), Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            if _changes(image, data, options, is_mask=is_mask):
                data = _encode_again(
                    image, data, field, IMAGE_FORMATS[new], options, is_mask=is_mask
                )
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise SourceError(
            f"not a readable image ({_cause(error)}); fix it, or skip such files with on_error='skip' (--skip-errors)",
            shard=where,
        ) from error
    except Image.DecompressionBombWarning as error:
        raise SourceError(f"the image is suspiciously large: {error}", shard=where) from error
    except _LossyEncodeError as error:
        raise SourceError(str(error), shard=where) from error
    return field.removesuffix(old) + new, data


def _changes(image: Image.Image, data: bytes, options: ImageOptions, *, is_mask: bool) -> bool:
    """Return whether an image has another size, format or depth than the options require."""
    if options.changes_nothing:
        return False
    if options.format is not None and not is_mask:
        # By its bytes: a PNG may be called .jpg. An MPO is a JPEG with more views.
        stored = "JPEG" if image.format == "MPO" else image.format
        if IMAGE_FORMATS[options.format] != stored:
            return True
    is_large = options.max_side is not None and max(image.size) > options.max_side
    return is_large or _scales(image, data, options, is_mask=is_mask)


def decode_error(data: bytes) -> str | None:
    """Decode all pixels of an image file, as readers do; return what is wrong with them, None if nothing is."""
    try:
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            image.load()
    except Exception as error:  # noqa: BLE001  (damaged files raise more than OSError, such as struct.error)
        return _cause(error)
    return None


def _cause(error: Exception) -> str:
    return (
        "unknown format"
        if isinstance(error, UnidentifiedImageError)
        else str(error) or type(error).__name__
    )


class _LossyEncodeError(Exception):
    """A conversion would lose frames or numbers of an image."""


def _encode_again(
    image: Image.Image,
    data: bytes,
    field: str,
    file_format: str,
    options: ImageOptions,
    *,
    is_mask: bool,
) -> bytes:
    """Return the bytes of an image in a format and size; the field is that of the source, for messages."""
    depth = stored_depth(image, data)
    scales = _scales(image, data, options, is_mask=is_mask)
    _check_loss(image, BitDepth(8) if scales else depth, file_format, is_mask=is_mask)
    exif_orientation = _orientation(image)
    image = scale_to_8_bits(image, depth) if scales else image
    nearest_pixel = is_mask or image.mode not in _AVERAGED
    shrinks = options.max_side is not None and max(image.size) > options.max_side
    if not nearest_pixel and options.masks is None and (shrinks or file_format in _LOSSY):
        option = "max_side" if shrinks else "image_format"
        _check_shades(image, field, option, are_pictures=options.are_pictures)
    if "transparency" in image.info and image.mode in ("L", "RGB") and not is_mask:
        image = image.convert("RGBA")  # one colour is clear: an average of it is not
    shrunk = _shrink(image, options.max_side, nearest_pixel=nearest_pixel)
    converted = _convert_for_format(shrunk, file_format)
    if not _can_hold(file_format, converted):
        raise _LossyEncodeError(
            f"{file_format} cannot hold {depth}; leave image_format (--image-format) out"
            + (", or pass scale_16_bits=True (--scale-16-bits)" if depth.can_be_scaled else "")
        )
    return _save(
        converted, file_format, options.quality, is_mask=is_mask, orientation=exif_orientation
    )


def _scales(image: Image.Image, data: bytes, options: ImageOptions, *, is_mask: bool) -> bool:
    """Return whether the numbers of an image are scaled to 8 bits."""
    return options.scale_16_bits and not is_mask and stored_depth(image, data).can_be_scaled


def _check_loss(image: Image.Image, depth: BitDepth, file_format: str, *, is_mask: bool) -> None:
    """Refuse a conversion that loses frames, or bits that the format could hold."""
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # an MPO is a photo with extra views that cameras add
        raise _LossyEncodeError(
            f"an animation of {frames} frames would keep the first alone; "
            "pack it without image options, or leave it out"
        )
    if not depth.fits_8_bits and image.mode in _AVERAGED and file_format not in _LOSSY:
        raise _LossyEncodeError(
            f"{depth} of {image.format} {image.mode} would be cut to 8 bits; pack it without image options, allow it with "
            "scale_16_bits (--scale-16-bits), or turn images into jpg or webp with image_format (--image-format)"
        )
    if is_mask and file_format == "JPEG":
        raise _LossyEncodeError(
            "a JPEG does not keep the numbers of a mask when it is written again; pack it without max_side (--max-side), "
            "or say which fields are masks with masks (--masks)"
        )
    if is_mask and is_rendered(image, depth):
        raise _LossyEncodeError(
            f"a mask of {depth} would be stretched to 8 bits; pack it without max_side (--max-side)"
        )


def _check_shades(image: Image.Image, field: str, option: str, *, are_pictures: bool) -> None:
    """Refuse a grey image that looks like a mask if an option would mix its shades, or warn of it if it is a picture."""
    if image.format == "JPEG" or image.mode != "L":
        return
    counted = image.getcolors(_MASK_SHADES)
    if counted is None or len(counted) == 1:
        return
    shades = {shade for _, shade in counted}
    if are_pictures and not _are_ids(shades):
        warnings.warn(
            f"grey images of few shades in the field {field!r} are taken for pictures, because they have a class, and {option} mixes "
            f"their shades; if they are masks, pass masks=[{field!r}] (--masks {field})",
            ImageWarning,
            stacklevel=2,
        )
        return
    raise _LossyEncodeError(
        f"it has {len(shades)} shades of grey, as a mask has, and {option} would mix them; pass the fields that are masks, "
        f"masks=[{field!r}] (--masks {field}), or, if none are, masks=[] (--masks none). A stopped pack with finished "
        "shards must then start again, with overwrite=True (--overwrite)"
    )


def _are_ids(shades: Collection[object]) -> bool:
    """Return whether shades are small numbers, and 255, as class ids are: a picture of them is nearly black.

    >>> _are_ids({0, 1, 255}), _are_ids({0, 255}), _are_ids({0, 90, 200})
    (True, False, False)
    """
    ids = {*shades} - {0, 255}
    return bool(ids) and ids <= _ID_SHADES


@contextmanager
def _refuse_bombs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image; Pillow itself turns a TIFF, when it loads it."""
    return 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)


def _shrink(image: Image.Image, max_side: int | None, *, nearest_pixel: bool) -> Image.Image:
    if max_side is not None and max(image.size) > max_side:
        # Sizes are Pillow's in both cases, so that a mask still fits its photo.
        if nearest_pixel:
            image.thumbnail((max_side, max_side), Image.Resampling.NEAREST, reducing_gap=None)
        else:
            # Lets JPEG decode at a fraction of its size, then reduces by boxes, then by Lanczos.
            image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=3.0)
    image.load()
    return image


def _convert_for_format(image: Image.Image, file_format: str) -> Image.Image:
    """Convert an image to a mode that the format supports."""
    clear = image.mode == "P" and "transparency" in image.info
    if file_format in ("JPEG", "PPM", "BMP", "DIB") and (
        clear or image.mode in ("RGBA", "LA", "PA", "La", "RGBa")
    ):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if file_format not in ("JPEG", "TIFF") and image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB")
    if image.mode == "PA" and file_format != "TIFF":
        return image.convert("RGBA")
    if image.mode == "P" and file_format in ("JPEG", "PPM", "JPEG2000"):
        return image.convert("RGB")
    return image


def _can_hold(file_format: str, image: Image.Image) -> bool:
    """Return whether a format keeps the numbers of an image of more than 8 bits; Pillow clips them in some without an error."""
    if image.mode == "F":
        return file_format == "TIFF"
    if image.mode.startswith("I;16"):
        return file_format in ("PNG", "TIFF", "PPM")
    if image.mode == "I" and file_format in ("PNG", "PPM"):
        low, high = image.getextrema()
        return low >= 0 and high <= 65535  # type: ignore[operator]
    return image.mode != "I" or file_format == "TIFF"


def _save(
    image: Image.Image, file_format: str, quality: int, *, is_mask: bool, orientation: int = 1
) -> bytes:
    options: dict[str, Any] = {"quality": quality} if file_format in _LOSSY else {}
    if is_mask and file_format == "WEBP":
        options = {"lossless": True, "exact": True}
    if file_format == "GIF":
        options["optimize"] = False  # would renumber the palette
    if profile := image.info.get("icc_profile"):
        # Its bytes 16 to 19 name the colours that it describes: CMYK is wrong once the image is RGB.
        is_other = profile[16:20] in _SPACES and image.mode != _SPACES[profile[16:20]]
        keeps = not is_other and file_format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
        options["icc_profile"] = profile if keeps else None
    if 2 <= orientation <= 8:
        options["exif"] = Image.Exif()
        options["exif"][_ORIENTATION] = orientation
    out = io.BytesIO()
    image.save(out, file_format, **options)
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
        raise SampleError(f"{type(value).__name__} is not an image; give {_ACCEPTED}", field=field)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    is_16_bit = pixels.dtype == np.uint16 and pixels.ndim == 2
    if pixels.dtype != np.uint8 and not is_16_bit:
        advice = (
            "multiply values from 0 to 1 by 255, round, and convert them to uint8"
            if pixels.dtype.kind == "f"
            else "convert them to uint8, or keep them as 'npy'"
        )
        raise SampleError(f"pixels are uint8, these are {pixels.dtype}; {advice}", field=field)
    if (
        not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
        or not pixels.size
    ):
        raise SampleError(
            f"pixels of shape {tuple(value.shape)} are not an image; give {_ACCEPTED}", field=field
        )
    return Image.fromarray(np.ascontiguousarray(pixels))
