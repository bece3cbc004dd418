"""A value taken apart for its way from a worker: its tensors and large bytes, and a pickle of all else.

By pickle's own means for that, persistent ids (https://docs.python.org/3/library/pickle.html#persistence-of-external-objects). What is
unpickled here was pickled by a worker of this process a moment ago, as torch does it; never what was read from anywhere.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

MOST_BYTES = 31 << 20
"""Larger tensors are left to torch: glibc would ask the system for their memory, page by page, each time."""
_LEAST_BYTES = 4096  # smaller bytes are pickled as fast


class Kind(NamedTuple):
    """What makes a tensor of bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]


_Id = tuple[int, Kind | None]
"""The number of a piece; of a tensor also what it is."""


def take_apart(value: Any) -> tuple[bytes | torch.Tensor, ...]:
    """Return the pieces of a value; the last is the pickle.

    Raises:
        Exception: Whatever its pickling raises.
    """
    packer = _Packer()
    packer.dump(value)
    return (*packer.pieces, packer.file.getvalue())


def put_together(pickled: bytes, load: Callable[[int, Kind | None], Any]) -> Any:
    """Return the value of a pickle; ``load`` returns a piece by its number, for a tensor with its kind."""
    return _Unpacker(pickled, load).load()


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor, shape (nbytes,), uint8: of itself if it is contiguous, else of a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(kind: Kind, data: memoryview) -> torch.Tensor:
    """Return a tensor with a copy of these bytes."""
    tensor = torch.empty(kind.shape, dtype=kind.dtype, device="cpu")
    bytes_of(tensor)[:] = data
    return tensor


class _Packer(reduction.ForkingPickler):
    """Pickles as torch does between processes, so that file descriptors and the like arrive."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.pieces: list[bytes | torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> _Id | None:
        """Set a value aside if it pays."""
        kind = type(value)
        if kind is bytes and len(value) >= _LEAST_BYTES:
            return self._set_aside(value), None
        if kind is torch.Tensor and _is_plain(value):
            return self._set_aside(value), Kind(value.dtype, tuple(value.shape))
        return None

    def _set_aside(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self.pieces))
        if number == len(self.pieces):
            self.pieces.append(value)
        return number


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, load: Callable[[int, Kind | None], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._load_piece = load
        self._loaded: dict[int, Any] = {}

    def persistent_load(self, pid: _Id) -> Any:
        number, kind = pid
        if number not in self._loaded:  # what was one object is one again
            self._loaded[number] = self._load_piece(number, kind)
        return self._loaded[number]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes, not too many, and nothing else, nor shares them with itself."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.nbytes <= min(MOST_BYTES, tensor.untyped_storage().nbytes())
    )
