"""Choose the decoders of fields from the names that ``decode`` gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardstream.codecs import (
    IMAGE_NAMES,
    VIDEO_EXTENSIONS,
    AudioDecoder,
    ImageDecoder,
    VideoDecoder,
    audio_decoders,
    installed_decoders,
)
from shardstream.errors import OptionError
from shardstream.format import IMAGE_FORMATS
from shardstream.loader.collation import load_safetensors, load_tensors, to_tensor
from shardstream.pipeline import BASIC, Decoder

Named = str | AudioDecoder | VideoDecoder
"""What chooses the decoders of a kind of fields."""

_TENSORS = {"pt": load_tensors, "pth": load_tensors, "safetensors": load_safetensors}
_MEDIA: dict[str, AudioDecoder | VideoDecoder] = {
    "audio": AudioDecoder(),
    "torch_audio": AudioDecoder(to_tensor=to_tensor),
    "video": VideoDecoder(),
    "torch_video": VideoDecoder(to_tensor=to_tensor),
}
KNOWN_FIELDS = frozenset(
    {*BASIC, *_TENSORS, *IMAGE_FORMATS, *VIDEO_EXTENSIONS, *audio_decoders(AudioDecoder()), "bin"}
)
"""Last parts of fields that some decoder takes, and the one for other bytes."""


class PixelOptions(NamedTuple):
    """Options of images in all fields."""

    upright: bool = False
    """Apply the EXIF orientation."""
    scale_16_bits: bool = False
    """Scale whole numbers of 9 to 16 bits to 8 bits, where a name has 8 bits."""


class DecoderTables(NamedTuple):
    """Decoders by field, or by its last part."""

    table: dict[str, Decoder]
    mask_table: dict[str, Decoder]
    """For mask fields."""


def decoder_tables(
    named: Sequence[Named],
    fields: Mapping[str, str | Decoder],
    *,
    max_side: int | None,
    pixels: PixelOptions,
) -> DecoderTables:
    """Return the decoders that the options of `ItemSteps.decode` choose.

    Args:
        named: Names of decoders, and decoders with options, at most one for each kind of field.
        fields: Decoders of single fields.
        max_side: Longest side of images, in pixels.
        pixels: Options of all images.

    Raises:
        OptionError: If a name is unknown, or options exclude each other.
    """
    table: dict[str, Decoder] = {**BASIC, **_TENSORS}
    mask_table: dict[str, Decoder] = {}
    _check_one_of_a_kind(named)
    for name in named:
        if name in IMAGE_NAMES:
            decoder = _image_decoder(name, pixels, max_side=max_side)
            table |= dict.fromkeys(IMAGE_FORMATS, decoder)
            mask_decoder = replace(decoder, is_mask=True, scale_16_bits=False)
            mask_table |= dict.fromkeys(IMAGE_FORMATS, mask_decoder)
        else:
            table |= _other_decoders(name)
    single = {name: _field_decoder(given, pixels, max_side) for name, given in fields.items()}
    return DecoderTables(table | single, table | mask_table | single)


def check_decoder(given: object) -> None:
    """Check that a decoder of the user is a function.

    Raises:
        OptionError: If it is not callable.
    """
    if not callable(given):
        raise OptionError(
            f"decode takes {_available()}, and functions, not {given!r}; decode() alone decodes text, numbers, JSON and arrays"
        )


def _check_one_of_a_kind(named: Sequence[Named]) -> None:
    kinds = [_kind(name) for name in named]
    for kind in kinds:
        if kinds.count(kind) > 1:
            given = [name for name, other in zip(named, kinds, strict=True) if other == kind]
            raise OptionError(
                f"decode takes one {kind} name, not {given}; pass the others by field: fields={{'seg.png': 'mask'}}"
            )


def _kind(name: Named) -> str:
    if name in IMAGE_NAMES:
        return "image"
    decoder = _MEDIA.get(name) if isinstance(name, str) else name
    return str(name) if decoder is None else type(decoder).__name__.removesuffix("Decoder").lower()


def _other_decoders(name: Named) -> dict[str, Decoder]:
    """Return the decoders of sound and video by extension, or of an installed package by its name."""
    decoder = _other_decoder(name) if isinstance(name, str) else name
    if isinstance(decoder, AudioDecoder):
        return audio_decoders(decoder)
    if isinstance(decoder, VideoDecoder):
        return dict.fromkeys(VIDEO_EXTENSIONS, decoder)
    return {str(name): decoder}


def _other_decoder(name: str) -> Decoder:
    decoder = _MEDIA.get(name) or installed_decoders().get(name)
    if decoder is None:
        raise OptionError(
            f"no decoder is called {name!r}; available: {_available()}. For other formats pass a function: fields={{'dcm': function}}"
        )
    return decoder


def _available() -> str:
    installed = sorted(installed_decoders())
    return (
        f"image names ({', '.join(IMAGE_NAMES)}), names of sound and video ({', '.join(_MEDIA)})"
        + (f", decoders of installed packages ({', '.join(installed)})" if installed else "")
    )


def _image_decoder(spec: object, pixels: PixelOptions, *, max_side: int | None) -> ImageDecoder:
    return ImageDecoder(spec=str(spec), to_tensor=to_tensor, max_side=max_side, **pixels._asdict())


def _field_decoder(given: object, pixels: PixelOptions, max_side: int | None) -> Decoder:
    """Return the decoder of a single field; a grey image name must not average a mask's numbers."""
    if isinstance(given, str):
        if given not in IMAGE_NAMES:
            return _other_decoder(given)
        decoder = _image_decoder(given, pixels, max_side=None)
        mask_max_side = max_side if decoder.keeps_numbers else None
        return replace(decoder, is_mask=decoder.makes_grey, max_side=mask_max_side)
    check_decoder(given)
    return given  # type: ignore[return-value]
