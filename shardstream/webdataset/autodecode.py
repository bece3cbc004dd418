"""Decode the fields of samples by their names; no decoder here runs code from the data."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import PIL.Image
import torch
from webdataset import autodecode as _theirs
from webdataset.autodecode import Continue, call_extension_handler, handle_extension, imagespecs

from shardstream.codecs import (
    VIDEO_EXTENSIONS,
    AudioDecoder,
    ImageDecoder,
    LossyDecodeError,
    VideoDecoder,
    audio_decoders,
    decode_buffer,
    decode_cbor,
    decode_gzip,
    decode_msgpack,
)
from shardstream.errors import DecodeError, OptionError, describe_error
from shardstream.format import PILLOW_FORMATS
from shardstream.loader import load_tensors, to_tensor
from shardstream.pipeline import BASIC
from shardstream.webdataset import utils
from shardstream.webdataset.handlers import UnsafeError

pytorch_weights_only = True
"""As in WebDataset; tensors are read without their pickles' code whatever it is."""

IMAGE_EXTENSIONS: list[str] = [*_theirs.IMAGE_EXTENSIONS, "avif"]
"""Extensions that image handlers decode."""

FieldHandler = Callable[[str, bytes], Any]
"""``handler(".jpg", data)`` returns a value, None to try the next handler, or a `Continue`."""


class DecodingError(DecodeError, _theirs.DecodingError):
    """A field that cannot be decoded.

    Args:
        message: What failed.
        url: URL of the shard.
        key: Key of the sample.
        k: Name of the field.
        sample: The sample.
    """

    def __init__(
        self,
        message: str = "cannot be decoded",
        url: Any = None,
        key: Any = None,
        k: Any = None,
        sample: Any = None,
    ) -> None:
        super().__init__(message, shard=url, key=key, field=k)
        self.url = url
        self.k = k
        self.sample = sample


def unpickle_loads(data: bytes) -> NoReturn:  # noqa: ARG001  (the signature of a decoder)
    """Refuse a pickle."""
    text = (
        "Unpickling is not allowed for security reasons when enforce_security is set"
        if utils.enforce_security
        else ""
    )
    raise UnsafeError(
        f"{text or 'a pickle could run code'}; repack the field as json, npy or pth, leave it as bytes with "
        "decode(only=[...]), or, if you trust the data, pass decode(wds.handle_extension('pyd pkl pickle', pickle.loads))"
    )


def torch_loads(data: bytes) -> Any:
    """Read tensors, numbers and text in plain lists and dicts, to the CPU.

    Raises:
        UnsafeError: If it holds anything else, or `utils.enforce_security` is set.
        ValueError: If it would take far more memory than its bytes.
    """
    if utils.enforce_security:
        raise UnsafeError(
            "torch.loads is not allowed for security reasons when enforce_security is set; store tensors as npy"
        )
    try:
        return load_tensors(data)
    except Exception as error:
        if "weights_only" not in f"{error} {error.__cause__}":  # torch's advice how to run the code
            raise
        raise UnsafeError(
            "a pth field needs the code of its pickle; store tensors, numbers and text in plain lists and dicts, leave it as bytes "
            "with decode(only=[...]), or, if you trust the data, pass decode(wds.handle_extension('pth', function)) with torch.load"
        ) from error


tenbin_loads, msgpack_loads, cbor_loads = decode_buffer, decode_msgpack, decode_cbor


decoders: dict[str, Callable[[bytes], Any]] = {
    **{
        name: BASIC[name]
        for name in ("txt", "text", "transcript", "cls", "cls2", "index", "inx", "id")
    },
    **{name: BASIC[name] for name in ("json", "jsn", "npy", "npz")},
    **dict.fromkeys(("pkl", "pickle", "pyd"), unpickle_loads),
    "pth": torch_loads,
    **dict.fromkeys(("ten", "tb"), tenbin_loads),
    **dict.fromkeys(("mp", "msg"), msgpack_loads),
    "cbor": cbor_loads,
}
"""Last part of a field -> decoder."""


def basichandlers(key: str, data: bytes) -> Any:
    """Decode text, numbers, JSON and arrays; None for other names."""
    decoder = decoders.get(key.rpartition(".")[2])
    return None if decoder is None else decoder(data)


class ImageHandler:
    """Decode images to the given form.

    Args:
        imagespec: A name of `imagespecs`: "l8", "rgb8", "rgba8" are uint8 arrays, without the 8 float32 from 0 to 1, with the
            prefix "torch" tensors, with "pil" PIL images.
        extensions: Names to decode.

    Raises:
        OptionError: If the name is unknown.
    """

    def __init__(self, imagespec: str, extensions: Iterable[str] = IMAGE_EXTENSIONS) -> None:
        if imagespec not in imagespecs:
            raise OptionError(
                f"unknown imagespec {imagespec!r}; it is one of {', '.join(imagespecs)}"
            )
        self.imagespec = imagespec
        self.extensions = set(extensions)
        self._decode = ImageDecoder(spec=imagespec, to_tensor=to_tensor)

    def __call__(self, key: str, data: bytes) -> Any:
        """Return the image, None for other names."""
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        try:
            return self._decode(data)
        except PIL.UnidentifiedImageError as error:
            raise DecodeError(
                f"not an image of a format that is decoded ({', '.join(PILLOW_FORMATS)})",
                remedy="convert it, or pass decode(wds.handle_extension('NAME', function))",
            ) from error
        except LossyDecodeError as error:
            name = key.rpartition(".")[2]
            raise DecodeError(
                f"field {key.removeprefix('.')!r}: an image would lose its numbers, which {self.imagespec!r} holds in 8 bits",
                remedy=f"to scale 16 bits to 8 use decode(wds.handle_extension({name!r}, lambda data: "
                f"ss.decode_sample({{{name!r}: data}}, {self.imagespec!r}, scale_16_bits=True)[{name!r}]), {self.imagespec!r})",
            ) from error


imagehandler = ImageHandler


def torch_video(key: str, data: bytes) -> Any:
    """Decode a video to (frames, sound, info) as ``torchvision.io.read_video``, all frames at once; None for other names.

    Raises:
        OptionError: If the extra ``video`` is not installed.
    """
    return _VIDEO(data) if key.rpartition(".")[2].lower() in VIDEO_EXTENSIONS else None


def torch_audio(key: str, data: bytes) -> Any:
    """Decode sound to a tensor, shape (C, T), float32, and its rate, as ``torchaudio.load``; None for other names.

    Raises:
        OptionError: If the extra ``audio`` is not installed, or libsndfile does not read formats of this name.
    """
    decoder = _AUDIO.get(key.rpartition(".")[2].lower())
    return None if decoder is None else decoder(data)


_AUDIO = audio_decoders(AudioDecoder(to_tensor=to_tensor))
_VIDEO = VideoDecoder(to_tensor=to_tensor)


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Unpack a field whose name ends in ``.gz``, up to 1 GiB."""
    return Continue(key.removesuffix(".gz"), decode_gzip(data)) if key.endswith(".gz") else None


default_pre_handlers: list[FieldHandler] = [gzfilter]
default_post_handlers: list[FieldHandler] = [basichandlers]


class Decoder(_theirs.Decoder):
    """Decode samples by handlers; the first that returns a value counts, and without one a field stays bytes.

    Args:
        handlers: Handlers, in order.
        pre: Handlers before them; None is `gzfilter`.
        post: Handlers after them; None is `basichandlers`.
        only: Fields to decode, as a list or text separated by spaces; None decodes all.
        partial: Leave values that are not bytes as they are; else they are errors.

    Raises:
        OptionError: If a handler cannot be called.
    """

    def __init__(
        self,
        handlers: Sequence[FieldHandler],
        pre: Sequence[FieldHandler] | None = None,
        post: Sequence[FieldHandler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
    ) -> None:
        before = default_pre_handlers if pre is None else pre
        after = default_post_handlers if post is None else post
        self.handlers: list[FieldHandler] = [*before, *handlers, *after]
        self.only = None if only is None else set(only.split() if isinstance(only, str) else only)
        self.partial = partial
        if not all(map(callable, self.handlers)):
            raise OptionError(f"decode takes functions and image names, not {self.handlers}")

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode the fields of a sample.

        Raises:
            DecodingError: If a field cannot be decoded.
        """
        return {name: self._decode_field(name, value, sample) for name, value in sample.items()}

    def _decode_field(self, name: str, value: Any, sample: dict[str, Any]) -> Any:
        if name.startswith("__"):
            return value.decode("utf-8") if isinstance(value, bytes) else value
        if (self.only is not None and name not in self.only) or (
            self.partial and not isinstance(value, bytes)
        ):
            return value
        try:
            return self.decode1(name, _check_bytes(value))
        except OptionError:  # an error of the program or the installation, not of the sample
            raise
        except Exception as error:
            raise DecodingError(
                f"cannot be decoded: {describe_error(error)}",
                url=sample.get("__url__"),
                key=sample.get("__key__"),
                k=name,
                sample=sample,
            ) from error

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode the fields of a sample, see `decode`."""
        if not isinstance(sample, dict):
            raise OptionError(
                f"decode works on dicts, not on {type(sample).__name__}: put it before to_tuple and batched"
            )
        return self.decode(sample)


def _check_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(
            f"the field is {type(value).__name__}, not bytes; pass partial=True to leave it"
        )
    return value


default_decoder = Decoder([])
