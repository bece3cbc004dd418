"""Decode the images of a batch on the device of the loader, in the main process.

Workers send JPEG files as they are (`EncodedImage`), and the pixels of all other images. nvJPEG makes slightly other pixels than
libjpeg.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstream.errors import DecodeError, ImageWarning, OptionError, describe_error
from shardstream.loader.device_transfer import indexed_device
from shardstream.loader.nested_batches import map_nested
from shardstream.pipeline import EncodedImage, ImageDecoder

JpegDecoder = Callable[[list[bytes]], list[torch.Tensor]]
"""JPEG files -> their pixels on the device, each of shape (3, H, W), uint8, RGB."""


class ImageBatchDecoder:
    """Decode all encoded images of a batch at once.

    Args:
        device: Device of the pixels.
        decode_jpegs: Decoder of that device, which raises a RuntimeError if it cannot decode a file; None decodes one by one on
            the CPU.
    """

    def __init__(self, device: torch.device, decode_jpegs: JpegDecoder | None = None) -> None:
        self.device = device
        self._decode_jpegs = decode_jpegs

    def __call__(self, batch: Any) -> tuple[Any, list[torch.Tensor]]:
        """Return the batch with a tensor for each encoded image, and these tensors.

        Raises:
            DecodeError: If an image is damaged; it names the sample.
        """
        images: list[EncodedImage] = []

        def find(value: Any) -> Any:
            if type(value) is not EncodedImage:
                return None
            images.append(value)
            return value

        map_nested(batch, find)
        tensors = self._decode(images)
        ordered = iter(tensors)
        decoded = map_nested(
            batch, lambda value: next(ordered) if type(value) is EncodedImage else None
        )
        return decoded, tensors

    def _decode(self, images: Sequence[EncodedImage]) -> list[torch.Tensor]:
        """Return the pixels of each image, in the form of its ``spec``."""
        files = [image.content for image in images if isinstance(image.content, bytes)]
        on_device = iter(self._decode_on_device(files))
        tensors = []
        for image in images:
            pixels = next(on_device, None) if isinstance(image.content, bytes) else None
            if pixels is None:
                pixels = _decode_on_cpu(image).to(self.device)
            tensors.append(_to_spec(pixels, image.spec))
        return tensors

    def _decode_on_device(self, files: list[bytes]) -> list[torch.Tensor]:
        """Return the pixels of each file; an empty list if the CPU must decode them."""
        if self._decode_jpegs is None or not files:
            return []
        try:
            return self._decode_jpegs(files)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it does not tell which file
            warnings.warn(
                f"the {self.device} decodes none of {len(files)} JPEGs of a batch, so the CPU decodes them: {error}",
                ImageWarning,
                stacklevel=2,
            )
            return []


def open_decoder(decode_devices: Collection[str], device: torch.device | None) -> ImageBatchDecoder:
    """Return the decoder of a loader.

    Args:
        decode_devices: Devices that the steps of its dataset name; at least one.
        device: Device of the loader.

    Raises:
        OptionError: If these are not one device, or its decoder is missing.
    """
    devices = sorted(decode_devices)
    wanted = torch.device(devices[0])
    fits = (
        device is not None and wanted.type == device.type and wanted.index in (None, device.index)
    )
    if len(devices) > 1 or device is None or not fits:
        raise OptionError(
            f"the dataset decodes images on {', '.join(map(repr, devices))}, the loader has device={device and str(device)!r}; "
            f"pass device={devices[0]!r} to the ShardLoader and to every decode, or leave device out of decode"
        )
    return ImageBatchDecoder(device, None if device.type == "cpu" else TorchvisionDecoder(device))


@dataclass(frozen=True, slots=True)
class TorchvisionDecoder:
    """Decoder of JPEGs on a GPU, by torchvision and nvJPEG.

    Raises:
        OptionError: If torchvision cannot be imported.
    """

    device: torch.device

    def __post_init__(self) -> None:
        try:
            import torchvision.io  # noqa: F401, PLC0415  (optional, and slow to import)
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
            raise OptionError(
                f"decode(device={str(self.device)!r}) needs torchvision ({describe_error(error)}); install the one for "
                f"torch {torch.__version__}, or leave device out of decode"
            ) from error

    def __call__(self, files: list[bytes]) -> list[torch.Tensor]:
        """Return the pixels of each file, shape (3, H, W), uint8."""
        from torchvision.io import ImageReadMode, decode_jpeg  # noqa: PLC0415

        # Copied, because torch warns of memory that is not writable.
        tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        device = indexed_device(self.device)
        # It allocates on the current stream, but writes on one of its own that does not wait for the current one: work that is
        # queued there may still use the memory. (torchvision 0.26, decode_jpegs_cuda.cpp)
        torch.cuda.current_stream(device).synchronize()
        try:
            pixels: list[torch.Tensor] = decode_jpeg(tensors, mode=ImageReadMode.RGB, device=device)
        except RuntimeError:
            torch.cuda.synchronize(device)  # it may still write to the memory that it has freed
            raise
        return pixels


def _decode_on_cpu(image: EncodedImage) -> torch.Tensor:
    """Return pixels, shape (3, H, W), uint8."""
    content = image.content
    if isinstance(content, bytes):
        try:
            content = ImageDecoder(spec="rgb8")(content)
        except Exception as error:
            raise DecodeError(
                f"cannot be decoded: {describe_error(error)}",
                remedy="repack this sample, or leave device out of decode, so that on_error can skip it in the worker",
                shard=image.shard,
                key=image.key,
                field=image.field,
            ) from error
    return torch.from_numpy(content).permute(2, 0, 1)


def _to_spec(pixels: torch.Tensor, spec: str) -> torch.Tensor:
    """Return pixels of shape (3, H, W) as `ImageDecoder` arranges and scales them for a name."""
    arranged = pixels if spec.startswith("torch") else pixels.permute(1, 2, 0)
    return arranged if spec.endswith("8") else arranged.float() / 255
