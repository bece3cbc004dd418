"""Serialise batches for transfer from a worker: tensors and large bytes separately, the rest as a pickle.

Only pickles made by this process's own workers are loaded here, as torch does; never data that was read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

from shardstream.errors import SampleError, describe_error

MAX_TENSOR_BYTES = 31 << 20
"""Larger tensors are left to torch: glibc maps blocks this large anew each time, with page faults."""
# Smaller fields are pickled as fast as they are sent otherwise.
_MIN_LARGE_BYTES = 4096
_TORCH_TYPES = torch.Tensor, torch.UntypedStorage, torch.TypedStorage
# A sequence that starts with one of these is a column of keys or numbers, and is not searched for bytes.
_PLAIN = frozenset({str, int, float})
_SEARCHED = frozenset({bytes, dict, list, tuple})


class TensorLayout(NamedTuple):
    """Layout for rebuilding a tensor from its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape in memory order."""
    order: tuple[int, ...] | None
    """Permutation from memory order to the tensor's dimensions; None for the identity."""


LoadPiece = Callable[[int, TensorLayout | None], Any]
NewTensor = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Shape and dtype -> an uninitialised tensor on the CPU."""


class SerializedValue(NamedTuple):
    """A value split into raw pieces, a pickle, and objects for torch."""

    pieces: list[bytes | torch.Tensor]
    """Contiguous tensors and large bytes; the last one is the pickle."""
    rest: list[Any]
    """Objects that torch must send: storages, and tensors that are very large or more than plain bytes."""


def serialize_value(value: Any) -> SerializedValue:
    """Serialise a value; tensors are not copied unless their elements lie apart.

    Raises:
        Exception: Any error of its pickling.
    """
    with suppress(RecursionError):  # recursive or very deep: pickle may still handle it
        value = _mark_large_bytes(value)
    packer = _Packer()
    packer.dump(value)
    return SerializedValue([*packer.pieces, packer.file.getvalue()], packer.rest)


def deserialize_value(pickled: bytes, rest: list[Any], load: LoadPiece) -> Any:
    """Rebuild a value; ``load`` returns a piece by number, as a tensor if given a layout."""
    return _Unpacker(pickled, rest, load).load()


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous tensor, shape (nbytes,), uint8."""
    # One element is contiguous whatever its stride, but viewed as bytes only with 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in ordinary memory."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def tensor_from_bytes(kind: TensorLayout, data: memoryview, allocate: NewTensor) -> torch.Tensor:
    """Return a new tensor with a copy of the bytes."""
    tensor = allocate(kind.shape, kind.dtype)
    tensor_bytes(tensor)[:] = data
    return tensor


def unsendable_error(error: Exception) -> SampleError:
    """Return the error for a batch that cannot be sent."""
    remedy = "convert unpicklable values to arrays, numbers or text in a map, or pass collate_fn"
    if isinstance(error, RuntimeError) and "shared memory" in str(error):  # of torch
        remedy = "there is no room in /dev/shm: enlarge it (docker run --shm-size), or use smaller batches, fewer workers or a smaller prefetch_factor"
    elif isinstance(error, OSError):
        remedy = (
            "give TMPDIR a short path, /dev/shm more room, or the process more files (ulimit -n)"
        )
    return SampleError(
        f"a batch cannot be sent to the main process ({describe_error(error)}); {remedy}"
    )


def is_picklable_type(kind: type) -> bool:
    """Return whether another process can find a class by its name."""
    try:
        pickle.dumps(kind)
    except Exception:  # noqa: BLE001  (whatever a metaclass raises)
        return False
    return True


class _Large:
    """Marks large bytes, or a list of them, for the packer."""

    __slots__ = ("pieces", "value")

    def __init__(self, value: bytes | list[bytes]) -> None:
        self.value = value
        self.pieces = value if isinstance(value, list) else [value]


def _mark_large_bytes(value: Any) -> Any:
    """Wrap large bytes in `_Large`: a pickler has no hook for bytes, except one called for every number too."""
    kind = type(value)
    if kind is bytes:
        return _Large(value) if len(value) >= _MIN_LARGE_BYTES else value
    if kind is dict:
        return {name: _mark_large_bytes(one) for name, one in value.items()}
    if (kind is list or kind is tuple) and value and type(value[0]) not in _PLAIN:
        return _mark_sequence(value)
    return value


def _mark_sequence(values: list[Any] | tuple[Any, ...]) -> Any:
    """Wrap the large bytes in a column; small bytes, and dicts of numbers and text, are recognised all at once."""
    kinds = set(map(type, values))
    if kinds == {bytes}:
        if max(map(len, values)) < _MIN_LARGE_BYTES:
            return values
        if type(values) is list and min(map(len, values)) >= _MIN_LARGE_BYTES:
            return _Large(values)
    if kinds == {dict}:
        inner = chain.from_iterable(map(dict.values, values))
        if _SEARCHED.isdisjoint(map(type, inner)):
            return values
    return type(values)(map(_mark_large_bytes, values))


class _Packer(reduction.ForkingPickler):
    """Pickler as in torch's multiprocessing, but with tensors and large bytes kept out of the pickle."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.pieces: list[bytes | torch.Tensor] = []
        self.rest: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Replace tensors, storages and marked bytes by references; not called for plain numbers, text and containers."""
        if type(value) is _Large:
            return self._take_bytes(value)
        if type(value) is torch.Tensor and _is_plain(value):
            if value.nbytes <= MAX_TENSOR_BYTES:
                return self._take(value)
            # Else torch would move it to shared memory, where a function that uses it again changes it.
            if not value.is_shared():  # type: ignore[no-untyped-call]
                value = value.clone()
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
            stored: torch.Tensor = load(number, kind)
            return stored if kind.order is None else stored.permute(kind.order)

        self._found = {"_large": large, "_tensor": tensor, "_rest": rest.__getitem__}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._found:
            return self._found[name]
        return super().find_class(module, name)


def _large(numbers: int | range) -> Any:
    """Reference in a pickle to large bytes, or a list of them; resolved by `_Unpacker`."""


def _tensor(number: int, kind: TensorLayout) -> Any:
    """Reference in a pickle to a tensor; resolved by `_Unpacker`."""


def _rest(number: int) -> Any:
    """Reference in a pickle to an object that torch sends; resolved by `_Unpacker`."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by its bytes, and without repeated memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def _contiguous_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return a contiguous view and the permutation back, such as for channels_last.

    If elements lie apart, a contiguous copy and None.
    """
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    permuted = tensor.permute(by_stride)
    if not permuted.is_contiguous():
        return tensor.contiguous(), None
    return permuted, tuple(map(by_stride.index, range(tensor.ndim)))
