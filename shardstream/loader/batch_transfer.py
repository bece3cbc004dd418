"""Send batches from a worker to the main process: tensors and large bytes through a ring buffer in shared memory, the rest as a pickle.

Only pickles made by this process and its own workers are loaded here, as torch does; never data that was read.

A batch of bytes is copied in and out once; through a pipe it is copied five times, 64 KiB per system call. For each tensor torch
would create a file in /dev/shm, which containers keep small, and send its descriptor (0.2 ms). Very large tensors, and the
tensors of batches that do not fit into the ring, still go that way.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import reduction
from operator import attrgetter
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
        # With 5, Python 3.14's default, arrays over read-only memory would come read-only.
        super().__init__(self.file, 4)
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


# Address space; physical memory is used only for messages in flight.
RING_BYTES = 256 << 20
# Messages start at multiples of these, so that a slightly larger message still fits into a freed place.
RING_STEP_BYTES, _SMALL_STEP_BYTES = 1 << 20, 1 << 16
_HEAD_BYTES = (
    mmap.PAGESIZE
)  # the number of unpacked messages, written by the main process; the worker's progress
_COUNT = struct.Struct("q")
_ALIGN_BYTES = 64
_START = attrgetter("start")


class RingMessage(NamedTuple):
    """Position of a serialised value in the ring, or the value's pieces."""

    number: int
    """Sequence number in the ring, from 1; 0 if the value is not in the ring."""
    start: int
    """Start offset in the ring."""
    places: list[tuple[int, int]]
    """Start and end of each tensor and large bytes object, relative to ``start``; the last one is the pickle."""
    pieces: list[Any] | None
    """The pieces themselves, the pickle last, if the ring had no room; else None."""
    rest: list[Any]
    """Objects that torch must send."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(end - start for start, end in self.places)

    @property
    def is_in_ring(self) -> bool:
        """Whether the message is only a place in the ring."""
        return self.pieces is None and not self.rest


class Channel:
    """Sends values from a worker to the main process in messages of a pipe: whole, where the system has no rings."""

    progress: int = 0
    """n while the worker makes its batch n, from 1, then -n; always 0 in a main process without shared memory."""

    def reset(self, *, give_back: bool) -> None:
        """In the worker: drop values that were not received."""

    def pack(self, value: Any) -> RingMessage:
        """In the worker: return the message for a value.

        Raises:
            SampleError: If the value cannot be pickled.
        """
        return _whole(*_serialize(value))

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main process: return the value of a message, here one that holds it.

        Args:
            message: The message of `pack`.
            allocate: Returns the memory that a tensor is copied to, such as pinned memory.
        """
        del allocate  # torch has brought the tensors
        pieces = message.pieces or []
        return deserialize_value(pieces[-1], message.rest, lambda number, _: pieces[number])


class _InFlight(NamedTuple):
    """What a message uses until it is unpacked."""

    number: int
    start: int
    """Start offset in the ring."""
    end: int


class RingBuffer(Channel):
    """Shared memory that a worker fills and the main process empties, in the same order.

    Picklable only while a process is started. Uses ``memfd_create`` (Linux), which is not limited by the size of /dev/shm.
    """

    def __init__(self, handle: int | None = None) -> None:
        self._handle = os.memfd_create("shardstream") if handle is None else handle
        size = _HEAD_BYTES + RING_BYTES
        os.ftruncate(self._handle, size)
        self._memory = mmap.mmap(self._handle, size)
        self._in_flight: deque[_InFlight] = deque()
        self._number = 0

    def __reduce__(self) -> tuple[Callable[[Any], RingBuffer], tuple[Any]]:
        return _attach, (reduction.DupFd(self._handle),)

    @property
    def progress(self) -> int:
        """See `Channel`."""
        (number,) = _COUNT.unpack_from(self._memory, _COUNT.size)
        return int(number)

    @progress.setter
    def progress(self, number: int) -> None:
        _COUNT.pack_into(self._memory, _COUNT.size, number)

    # `close` is bound at definition: at interpreter exit the module `os` may already be cleared.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_handle"):
            close(self._handle)

    def reset(self, *, give_back: bool) -> None:
        """In the worker: reset the ring and drop undelivered batches.

        Args:
            give_back: Return the ring's pages to the system; otherwise it keeps its peak memory. New page faults cost
                milliseconds, which matters only for epochs as short as those of small local datasets.
        """
        self._in_flight.clear()
        if give_back:
            with suppress(OSError):  # not supported in some sandboxes
                self._memory.madvise(mmap.MADV_REMOVE, _HEAD_BYTES, RING_BYTES)

    def pack(self, value: Any) -> RingMessage:
        """In the worker: copy a value into the ring; return the message to send, which holds the value if there is no room.

        Raises:
            SampleError: If the value cannot be pickled.
        """
        pieces, rest = _serialize(value)
        places = _lay_out_pieces(pieces)
        size = places[-1][1]
        start = self._find_room(size)
        if start is None:
            return _whole(pieces, rest)
        base = _HEAD_BYTES + start
        for piece, (first, last) in zip(pieces, places, strict=True):
            data = piece if isinstance(piece, bytes) else tensor_bytes(piece).data
            self._memory[base + first : base + last] = data
        self._number += 1
        self._in_flight.append(_InFlight(self._number, start, start + size))
        return RingMessage(self._number, start, places, None, rest)

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main process: copy a value out of the ring and free its space.

        Args:
            message: The message of `pack`.
            allocate: Returns the memory that a tensor is copied to, such as pinned memory.
        """
        if message.pieces is not None:
            return super().unpack(message)
        base = _HEAD_BYTES + message.start
        view = memoryview(self._memory)

        def load(number: int, kind: TensorLayout | None) -> Any:
            start, end = message.places[number]
            if kind is None:
                return self._memory[base + start : base + end]
            return tensor_from_bytes(kind, view[base + start : base + end], allocate)

        start, end = message.places[-1]
        value = deserialize_value(self._memory[base + start : base + end], message.rest, load)
        # Last: from here on the worker may overwrite the message.
        _COUNT.pack_into(self._memory, 0, message.number)
        return value

    def _find_room(self, size: int) -> int | None:
        """Return the lowest offset with ``size`` free bytes (first fit touches few pages), or None."""
        (unpacked,) = _COUNT.unpack_from(self._memory)
        while self._in_flight and self._in_flight[0].number <= unpacked:
            self._in_flight.popleft()
        place, step = 0, RING_STEP_BYTES if size > RING_STEP_BYTES // 2 else _SMALL_STEP_BYTES
        for message in sorted(self._in_flight, key=_START):
            if place + size <= message.start:
                return place
            place = -(-message.end // step) * step
        return place if place + size <= RING_BYTES else None


def _lay_out_pieces(pieces: list[Any]) -> list[tuple[int, int]]:
    """Return start and end of each piece in a message; tensors are aligned."""
    places, end = [], 0
    for piece in pieces:
        if isinstance(piece, bytes):
            start, end = end, end + len(piece)
        else:
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            end = start + piece.nbytes
        places.append((start, end))
    return places


def open_channels(workers: int) -> Sequence[Channel]:
    """Return a channel for each worker: a ring, if the system supports it."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # a sandbox, or a limit on address space, open files or file size
            return [RingBuffer() for _ in range(workers)]
    return [Channel() for _ in range(workers)]


def _serialize(value: Any) -> SerializedValue:
    try:
        return serialize_value(value)
    except Exception as error:
        raise unsendable_error(error) from error


def _whole(pieces: list[Any], rest: list[Any]) -> RingMessage:
    """Return a message that holds its pieces; tensors are copied, because torch sends their memory, which a step may use again."""
    held = [one if isinstance(one, bytes) else one.clone() for one in pieces]
    return RingMessage(0, 0, _lay_out_pieces(pieces), held, rest)


def _attach(handle: Any) -> RingBuffer:
    return RingBuffer(handle.detach())
