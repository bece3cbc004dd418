"""A value taken apart for its way from a worker: its tensors and large bytes, and a pickle of all else.

What is unpickled here was pickled by a worker of this process a moment ago, as torch does it; never what was read from anywhere.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

from shardstream.errors import SampleError

MAX_TENSOR_BYTES = 31 << 20
"""Larger tensors are left to torch: glibc would ask the system for their memory, page by page, each time."""
MIN_LARGE_BYTES = 4096  # smaller bytes are pickled as fast
_TORCH_TYPES = torch.Tensor, torch.UntypedStorage, torch.TypedStorage
# What begins so is a column of keys or of numbers, and not looked through.
_PLAIN = frozenset({str, int, float})


class TensorLayout(NamedTuple):
    """What makes a tensor of bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """As it lies in memory."""
    order: tuple[int, ...] | None
    """Where its dimensions are in there; None for as they are."""


LoadPiece = Callable[[int, TensorLayout | None], Any]


class SerializedValue(NamedTuple):
    """What a value was taken apart to."""

    pieces: list[bytes | torch.Tensor]
    """Contiguous tensors and large bytes; at last the pickle."""
    rest: list[Any]
    """What torch has to send: tensors that are not just their bytes, or very large; storages."""


def serialize_value(value: Any) -> SerializedValue:
    """Take a value apart; tensors are not copied.

    Raises:
        Exception: Whatever its pickling raises.
    """
    with suppress(RecursionError):  # it holds itself, or is very deep: pickle may know how
        value = _mark_large_bytes(value)
    packer = _Packer()
    packer.dump(value)
    return SerializedValue([*packer.pieces, packer.file.getvalue()], packer.rest)


def deserialize_value(pickled: bytes, rest: list[Any], load: LoadPiece) -> Any:
    """Return the value of a pickle; ``load`` returns a piece by its number, a tensor of this kind as it lay."""
    return _Unpacker(pickled, rest, load).load()


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous tensor, shape (nbytes,), uint8."""
    # One element is contiguous whatever its stride, but viewed as bytes only with 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def tensor_from_bytes(kind: TensorLayout, data: memoryview) -> torch.Tensor:
    """Return a tensor with a copy of these bytes."""
    tensor = torch.empty(kind.shape, dtype=kind.dtype, device="cpu")
    tensor_bytes(tensor)[:] = data
    return tensor


def unsendable_error(error: Exception) -> SampleError:
    """Return what to say of a batch that cannot be sent."""
    remedy = "turn what cannot be pickled to arrays, numbers or text in a map, or pass collate_fn"
    if isinstance(error, OSError):
        remedy = (
            "give TMPDIR a short path, /dev/shm more room, or the process more files (ulimit -n)"
        )
    return SampleError(
        f"a batch cannot be sent to the main process ({type(error).__name__}: {error}); {remedy}"
    )


class PickledValue:
    """A value that is pickled now, and is itself again where it is unpickled.

    torch's queue pickles in a thread of its own, where an error is printed and the batch never comes: the loader would wait for ever.

    Raises:
        SampleError: If it cannot be pickled.
    """

    __slots__ = ("_pickled",)

    def __init__(self, value: Any) -> None:
        try:
            self._pickled = bytes(reduction.ForkingPickler.dumps(value))
        except Exception as error:
            raise unsendable_error(error) from error

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


def is_picklable_type(kind: type) -> bool:
    """Tell whether another process finds a class by its name."""
    try:
        pickle.dumps(kind)
    except Exception:  # noqa: BLE001  (whatever a metaclass raises)
        return False
    return True


class _Large:
    """Stands for large bytes, or a list of them, while a value is pickled."""

    __slots__ = ("pieces", "value")

    def __init__(self, value: bytes | list[bytes]) -> None:
        self.value = value
        self.pieces = value if isinstance(value, list) else [value]


def _mark_large_bytes(value: Any) -> Any:
    """Return a value whose large bytes stand out: a pickler asks nobody about bytes, or, if it is told to, about every number."""
    kind = type(value)
    if kind is bytes:
        return _Large(value) if len(value) >= MIN_LARGE_BYTES else value
    if kind is dict:
        return {name: _mark_large_bytes(one) for name, one in value.items()}
    if (kind is list or kind is tuple) and value and type(value[0]) not in _PLAIN:
        if kind is list and type(value[0]) is bytes and _are_large(value):
            return _Large(value)
        return kind(map(_mark_large_bytes, value))
    return value


def _are_large(values: list[Any]) -> bool:
    return all(type(value) is bytes and len(value) >= MIN_LARGE_BYTES for value in values)


class _Packer(reduction.ForkingPickler):
    """Pickles as torch does between processes, but sets aside what torch would make shared memory of."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.pieces: list[bytes | torch.Tensor] = []
        self.rest: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Set a value aside, or say that it is pickled as it is; asked about all but plain numbers, text and containers."""
        if type(value) is _Large:
            return self._take_bytes(value)
        if type(value) is torch.Tensor and _is_plain(value):
            return self._take(value)
        if isinstance(value, _TORCH_TYPES):
            self.rest.append(value)
            return _rest, (len(self.rest) - 1,)
        return NotImplemented

    def _take_bytes(self, large: _Large) -> tuple[Any, ...]:
        first = len(self.pieces)
        self.pieces += large.pieces
        numbers = first if large.pieces is not large.value else range(first, len(self.pieces))
        return _large, (numbers,)

    def _take(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        tensor, order = tensor.resolve_conj().resolve_neg(), None
        if not tensor.is_contiguous():
            tensor, order = _contiguous_order(tensor)
        self.pieces.append(tensor)
        kind = TensorLayout(tensor.dtype, tuple(tensor.shape), order)
        return _tensor, (len(self.pieces) - 1, kind)


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, rest: list[Any], load: LoadPiece) -> None:
        super().__init__(io.BytesIO(pickled))

        def large(numbers: int | range) -> bytes | list[bytes]:
            if isinstance(numbers, int):
                one: bytes = load(numbers, None)
                return one
            return [load(number, None) for number in numbers]

        def tensor(number: int, kind: TensorLayout) -> torch.Tensor:
            found: torch.Tensor = load(number, kind)
            return found if kind.order is None else found.permute(kind.order)

        self._found = {"_large": large, "_tensor": tensor, "_rest": rest.__getitem__}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._found:
            return self._found[name]
        return super().find_class(module, name)


def _large(numbers: int | range) -> Any:
    """Stand in a pickle for large bytes, or a list of them, that an unpacker finds."""


def _tensor(number: int, kind: TensorLayout) -> Any:
    """Stand in a pickle for a tensor that an unpacker finds."""


def _rest(number: int) -> Any:
    """Stand in a pickle for what torch has sent."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes, not too many, and nothing else, nor shares them with itself."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.nbytes <= min(MAX_TENSOR_BYTES, tensor.untyped_storage().nbytes())
    )


def _contiguous_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return a contiguous tensor, and the order in which its dimensions make up this one, such as that of channels_last.

    A copy, in the usual order, where elements lie apart.
    """
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    lying = tensor.permute(by_stride)
    if not lying.is_contiguous():
        return tensor.contiguous(), None
    return lying, tuple(map(by_stride.index, range(tensor.ndim)))
