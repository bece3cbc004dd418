"""Decode fields: the method of datasets, the decoders that its names choose, and its use on one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

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
from shardstream.format import IMAGE_FORMATS, Sample, check_masks
from shardstream.loader.collation import load_safetensors, load_tensors, to_tensor
from shardstream.pipeline import (
    BASIC,
    Context,
    Decode,
    Decoder,
    Handler,
    ItemStage,
    Stage,
    check_at_least,
    open_runner,
)

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


class DecodeStep:
    """The steps that decode fields."""

    def then(self, stage: Stage) -> Self:
        """Append a custom stage: a frozen dataclass with ``open(source, context)``.

        An `ItemStage` has ``bind(context)`` instead, yields one item per item, and keeps positions exact on any number of ranks
        and workers. See docs/extending.md.

        Args:
            stage: Picklable stage. If steps change counts, its fields are compared when a state is loaded.

        Raises:
            OptionError: If it is not a stage, or changes counts in a map-style dataset.
        """
        raise NotImplementedError

    def decode(  # noqa: PLR0913  (the public door)
        self,
        *handlers: str | AudioDecoder | VideoDecoder | Handler,
        only: str | Sequence[str] | None = None,
        fields: dict[str, str | Decoder] | None = None,
        max_side: int | None = None,
        upright: bool = False,
        scale_16_bits: bool = False,
        masks: Sequence[str] | None = None,
        threads: int = 0,
    ) -> Self:
        """Decode fields by extension: txt, cls, json, npy, npz, pt, …; images, sound and others if their name is given.

        Image names: "l8", "rgb8", "rgba8" are uint8 arrays, shape (H, W) or (H, W, C); without the 8 float32 from 0 to 1; with
        the prefix "torch" tensors, shape (H, W) or (C, H, W); "pil" PIL images. "raw" gives the stored numbers in their own
        depth; "mask" one integer per pixel, shape (H, W). If a name cannot hold the numbers of a file, such as 16 bits or
        fractions for "rgb8", a `DecodeError` is raised. Of an animation the first frame is decoded, with an `ImageWarning`.

        "audio" decodes sound (wav, flac, mp3, ogg, opus, ...) to an `Audio`: samples (float32, shape (C, T)) and rate;
        "torch_audio" the same with a tensor; ``ss.codecs.AudioDecoder(rate=16000, mono=True)`` resamples. "video" (mp4, mkv,
        webm, avi, ...) gives a `Video`, whose frames and sound are decoded when they are asked for; "torch_video" a `VideoClip`
        of all frames and the sound, as tensors. The name of a decoder of an installed package (entry point
        ``shardstream.decoders``) decodes the fields of that extension.

        Args:
            handlers: Names, at most one each for images, sound and video, and WebDataset's functions ``handler(".jpg", data)``.
            only: Fields to decode; the others stay bytes.
            fields: Decoders of single fields, by name or extension: a name, or ``function(data)``.
            max_side: Limit of the longest side, in pixels; larger images are shrunk with their aspect ratio. A JPEG decodes at
                least twice as fast if that halves it. Masks, palette images and fields decoded as "mask" or "raw" keep their
                numbers: they are resized to the nearest pixel. Images with another name in ``fields`` keep their size.
            upright: Apply the EXIF orientation. By default pixels stay in stored order, as in torchvision and WebDataset: boxes
                and masks must match this choice.
            scale_16_bits: Scale images of 9 to 16 bits to the 8 bits of names such as "rgb8": the high bits of their full range are
                kept. Masks, "mask" and "raw" keep all.
            masks: Fields that are masks. By default those with a word such as mask, seg, label or depth before the extension,
                and a png (or another lossless format) next to a jpg of the same name.
            threads: Number of decoding threads, in order; image decoders release the GIL.

        Raises:
            OptionError: If a name is unknown, a mask is no image field, or an argument is invalid.
        """
        check_at_least(0, threads=threads)
        check_at_least(1, max_side=max_side)
        mask_names = None if masks is None else frozenset(as_list(masks))
        check_masks(mask_names or ())
        named = [one for one in handlers if isinstance(one, str | AudioDecoder | VideoDecoder)]
        functions = tuple(
            one for one in handlers if not isinstance(one, str | AudioDecoder | VideoDecoder)
        )
        for function in functions:
            check_decoder(function)
        tables = decoder_tables(
            named,
            fields or {},
            max_side=max_side,
            pixels=PixelOptions(upright, scale_16_bits),
        )
        given = {"images": named, "max_side": max_side, "upright": upright, "fields": fields}
        given |= {"scale_16_bits": scale_16_bits}
        stage = Decode(
            table=tables.table,
            mask_table=tables.mask_table,
            masks=mask_names,
            handlers=functions,
            only=None if only is None else frozenset(as_list(only)),
            threads=threads,
            given={name: value for name, value in given.items() if value} or None,
            known=KNOWN_FIELDS,
        )
        return self.then(stage)


class _OneStep(DecodeStep):
    """Receives the stage that a step of a dataset appends."""

    stage: Stage | None = None

    def then(self, stage: Stage) -> Self:
        """Keep the stage."""
        self.stage = stage
        return self


def decode_sample(
    sample: Sample, *handlers: str | AudioDecoder | VideoDecoder | Handler, **options: Any
) -> Sample:
    """Decode the fields of one sample, as `ShardDataset.decode` does.

    >>> decode_sample({"__key__": "a", "cls": b"7", "txt": b"cat"})
    {'__key__': 'a', 'cls': 7, 'txt': 'cat'}

    Args:
        sample: Fields as bytes; other values stay as they are.
        handlers: As in ``decode``: names, and functions ``handler(".jpg", data)``.
        options: As in ``decode``: ``only``, ``fields``, ``max_side``, ``upright``, ``scale_16_bits``, ``masks``.

    Raises:
        DecodeError: If a field cannot be decoded.
        OptionError: If an option is invalid.
    """
    stage = cast("ItemStage", _OneStep().decode(*handlers, **options).stage)
    (decoded,), _ = open_runner([stage], Context())([sample], [0])
    return cast("Sample", decoded)


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


def as_list(names: str | Sequence[str]) -> Sequence[str]:
    """Return one name as a list, and several as they are."""
    return [names] if isinstance(names, str) else names
