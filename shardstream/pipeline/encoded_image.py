"""Images whose pixels are made later, for a whole batch, on the device of the loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from shardstream.errors import OptionError, redact
from shardstream.format import Sample
from shardstream.pipeline.fast_decode import is_plain_jpeg
from shardstream.pipeline.image_decode import ImageDecoder

DEVICE_SPECS = ("rgb8", "rgb", "torchrgb8", "torchrgb", "torch")
"""Image names that can be decoded on a device."""
_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EncodedImage:
    """An image in a worker that becomes a tensor on the device in the main process; it has no pixels before.

    Args:
        content: A JPEG file; or pixels that a worker had to decode, shape (H, W, 3), uint8.
        spec: Image name of the result, one of `DEVICE_SPECS`.
        key: Key of the sample, for errors.
        shard: URL of the shard, for errors.
        field: Field of the image, for errors.
    """

    content: bytes | np.ndarray[Any, Any]
    spec: str
    key: str | None = None
    shard: str | None = None
    field: str | None = None

    def located(self, sample: Sample, field: str) -> EncodedImage:
        """Return the image with its place."""
        return replace(self, key=sample.get("__key__"), shard=sample.get("__url__"), field=field)

    def __getattr__(self, name: str) -> NoReturn:
        if name in self.__slots__:  # not set yet, while it is unpickled
            raise AttributeError(name)
        raise AttributeError(f"{name!r}: {self._no_pixels()}")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._no_pixels())

    def _no_pixels(self) -> str:
        return (
            f"field {self.field!r} of sample {self.key!r} in {redact(str(self.shard))} has no pixels before the batch is on the device; "
            "change the pixels of the batch, or decode without device="
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredImageDecoder:
    """Leave JPEG files to the device, and decode all other images here, so that ``on_error`` applies to them.

    Args:
        spec: Image name of the result.
        scale_16_bits: As in `ImageDecoder`.

    Raises:
        OptionError: If a device cannot decode to that name.
    """

    spec: str
    scale_16_bits: bool = False

    def __post_init__(self) -> None:
        if self.spec not in DEVICE_SPECS:
            raise OptionError(
                f"decode(device=) makes {', '.join(DEVICE_SPECS)}, not {self.spec!r}; pass one of these, or leave device out"
            )

    def __call__(self, data: bytes) -> EncodedImage:
        """Return the image, without its place.

        Raises:
            Exception: Any error of `ImageDecoder`, for files that are not plain JPEGs.
        """
        decode = ImageDecoder(spec="rgb8", scale_16_bits=self.scale_16_bits)
        content = data if is_plain_jpeg(data) else decode(data)
        return EncodedImage(content=content, spec=self.spec)


def check_decode_device(device: object, *, max_side: int | None, upright: bool) -> str:
    """Return the name of a device that decodes images.

    Raises:
        OptionError: If there is no decoder for it, or an option needs pixels in the worker.
    """
    name = str(device)
    if name.partition(":")[0] not in _DEVICE_TYPES:
        raise OptionError(
            f"decode(device={name!r}): images are decoded on 'cuda', or on 'cpu' in the main process; leave device out to decode "
            "in the workers"
        )
    if max_side is not None or upright:
        option = "upright" if max_side is None else "max_side"
        raise OptionError(
            f"decode(device={name!r}) does not support {option}: the workers have no pixels; leave {option} out and do the same "
            "to the batch, or leave device out"
        )
    return name
