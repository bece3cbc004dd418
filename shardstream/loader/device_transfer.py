"""Copy batches to pinned memory, and to a device ahead of their use.

    worker batches -> prefetch_batches -> StartedBatch -> (handed out) finish() -> batch on the device

A copy starts when a batch arrives and runs on a stream of its own, from pinned memory, while the device computes. A batch is
finished when it is handed out: the current stream then waits for the copy, and the batch's memory is marked as used by it.

torch pins batches in a thread of its own, and only tensors that torch has sent. Here a batch is unpacked from the ring of its
worker (`batch_transfer`) straight into pinned (page-locked) memory, from which a GPU copies while the CPU goes on: one copy, no thread. torch's
allocator of pinned memory reuses a block only after the copies to a device that read it have finished, so a batch may be dropped while it
is still being copied.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import (
    Callable,
    Generator,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from shardstream.errors import OptionError
from shardstream.loader.worker import WorkerBatch, change_batch
from shardstream.pipeline import like_tuple

_ATOMS = frozenset({str, bytes, int, float, bool, type(None)})


def map_nested(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a batch with converted values; containers keep their types, and the given batch is not changed.

    Args:
        value: The batch, or a part of it.
        convert: Returns the new value; None to search a container, or to leave any other value as it is. It is not called
            for text, bytes and plain numbers.
    """
    if type(value) in _ATOMS:
        return value
    converted = convert(value)
    if converted is not None:
        return converted
    if isinstance(value, Mapping):
        return _map_mapping(value, convert)
    if isinstance(value, Sequence):
        return _map_sequence(value, convert)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, convert)
    return value


def _map_mapping(value: Mapping[Any, Any], convert: Callable[[Any], Any]) -> Any:
    new = {name: map_nested(one, convert) for name, one in value.items()}
    if type(value) is dict:
        return new
    # As in torch's pin_memory: a mapping may have more than its items, such as a default factory.
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        for name, one in new.items():  # not update(): transformers.ModelOutput refuses it
            clone[name] = one
        return clone
    return _rebuilt(value, new)


def _map_sequence(value: Sequence[Any], convert: Callable[[Any], Any]) -> Any:
    if all(type(one) in _ATOMS for one in value):  # columns of keys, ranges, bytearrays
        return value
    new = [map_nested(one, convert) for one in value]
    if type(value) is list:
        return new
    if isinstance(value, tuple):
        return like_tuple(value, new)
    if isinstance(value, MutableSequence):
        clone = copy.copy(value)
        for place, one in enumerate(new):
            clone[place] = one
        return clone
    return _rebuilt(value, new)


def _rebuilt(model: Any, new: Any) -> Any:
    """Return new contents in a container like ``model``; as they are, if its type cannot be built from them."""
    try:
        return type(model)(new)
    except TypeError:
        return new


def _map_dataclass(value: Any, convert: Callable[[Any], Any]) -> Any:
    old = {one.name: getattr(value, one.name) for one in fields(value)}
    changed = {
        name: new for name, one in old.items() if (new := map_nested(one, convert)) is not one
    }
    if not changed:
        return value
    clone = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(clone, name, new)  # it may be frozen
    return clone


class PinnedMemory:
    """Pinned memory of torch's caching allocator, for the current accelerator."""

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def pin(self, value: Any) -> Any:
        """Return a tensor, or an object with ``pin_memory()``, in pinned memory; one that is pinned stays as it is."""
        return value.pin_memory()

    def pin_batch(self, batch: Any) -> Any:
        """Return a batch with all its tensors pinned, also inside containers, as torch does."""
        return map_nested(batch, self._pin_leaf)

    def _pin_leaf(self, value: Any) -> Any:
        return self.pin(value) if hasattr(value, "pin_memory") else None


def open_pinned_memory() -> PinnedMemory | None:
    """Return pinned memory; None without an accelerator that uses it, where torch warns and pins nothing."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # torch < 2.6
        return PinnedMemory() if torch.cuda.is_available() else None
    if not accelerator.is_available() or accelerator.current_accelerator().type == "mps":
        return None
    return PinnedMemory()


_T = TypeVar("_T")
_S = TypeVar("_S")


class CopyStream(Protocol):
    """The device calls that copies ahead of their use need."""

    is_asynchronous: bool
    """Whether copies from pinned memory return before they are done."""

    def activate(self) -> AbstractContextManager[Any]:
        """Return a context in which copies and allocations are made on the copy stream."""

    def record_event(self) -> Any:
        """Return an event that is reached when all copies started so far are done."""

    def hand_over(self, event: Any, tensors: list[torch.Tensor]) -> None:
        """Let the current stream wait for the event, and mark the tensors as used by it."""


class CudaCopyStream:
    """A CUDA stream for copies to one device.

    Args:
        device: With an index.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def activate(self) -> AbstractContextManager[Any]:
        """Return a context with the stream as the current one."""
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        """Return an event after all copies so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def hand_over(self, event: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        """Let the current stream wait for the event; keep the tensors' memory until its work with them is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            # They were allocated on the copy stream, which would else reuse their memory as soon as they are freed.
            tensor.record_stream(current)


class BlockingCopies:
    """Copies on the current stream that have ended when they return."""

    is_asynchronous = False

    def activate(self) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()

    def record_event(self) -> None:
        """Return None: nothing is under way."""

    def hand_over(self, event: None, tensors: list[torch.Tensor]) -> None:
        """Do nothing."""


class StartedBatch:
    """A batch whose copy to the device has started.

    Args:
        value: The batch; plain tensors are on the device.
        tensors: The tensors that were allocated on the copy stream.
        event: Of the copy stream, after the copy.
        copies: The copies that it belongs to.
    """

    __slots__ = ("_copies", "_event", "_tensors", "_value")

    def __init__(
        self, value: Any, tensors: list[torch.Tensor], event: Any, copies: DeviceCopies
    ) -> None:
        self._value, self._tensors, self._event, self._copies = value, tensors, event, copies

    def finish(self) -> Any:
        """Return the batch, ready for work on the current stream; call it once."""
        self._copies.stream.hand_over(self._event, self._tensors)
        value, self._value, self._tensors = self._value, None, []  # the caller alone keeps them
        return map_nested(value, self._move_rest)

    def _move_rest(self, value: Any) -> Any:
        """Move a value that `DeviceCopies.start` left; on the current stream, because its tensors are not known."""
        return value.to(self._copies.device) if _is_movable(value) else None


class DeviceCopies:
    """Copies of batches to one device.

    Args:
        device: The device, with an index if there are several of its type.
        stream: Stream of the copies; None opens the one for the device.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None) -> None:
        self.device = device
        self.stream = stream or open_stream(device)

    def start(self, batch: Any) -> StartedBatch:
        """Start the copy of a batch, which is pinned if the stream is asynchronous."""
        tensors: list[torch.Tensor] = []
        with self.stream.activate():

            def move(one: Any) -> Any:
                if not _is_plain(one):
                    return one if _is_movable(one) else None  # for `StartedBatch.finish`
                moved = one.to(self.device, non_blocking=self.stream.is_asynchronous)
                tensors.append(moved)
                return moved

            value = map_nested(batch, move)
            return StartedBatch(value, tensors, self.stream.record_event(), self)


def prefetch(
    items: Iterator[_T], start: Callable[[_T], _S], *, depth: int, is_ready: Callable[[], bool]
) -> Generator[_S]:
    """Start items ahead of their use, and yield them in order.

    An item is taken ahead only if it is ready, so that no item waits for a later one. An error takes the place of its item: the
    items before it are yielded first.

    Args:
        items: The items.
        start: Starts the work on an item.
        depth: Items started at most, with the one that is yielded next.
        is_ready: Returns whether the next item can be taken without waiting.

    Raises:
        Exception: Any error of ``items`` or ``start``, at its turn.
    """
    started: deque[_S] = deque()
    end = None
    while True:
        while end is None and (not started or (len(started) < depth and is_ready())):
            try:
                started.append(start(next(items)))
            except Exception as error:  # noqa: BLE001  (raised after the items before it)
                end = error
        if not started:
            break
        yield started.popleft()
    try:
        if end is not None and not isinstance(end, StopIteration):
            raise end
    finally:
        del end  # its traceback refers to this frame


def open_stream(device: torch.device) -> CopyStream:
    """Return the stream for copies to a device; only CUDA has one here, other devices copy on the current stream."""
    return CudaCopyStream(device) if device.type == "cuda" else BlockingCopies()


def check_device(device: str | int | torch.device) -> torch.device:
    """Return a device that is available, as given; nothing is allocated on a GPU.

    Raises:
        OptionError: If it is not a device, or not available.
    """
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device={device!r} is not a device; pass 'cuda', 'cuda:1', 'cpu' or a torch.device"
        ) from error
    if checked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (checked.index or 0) >= count:
            raise OptionError(
                f"device={str(checked)!r} is not available: torch {torch.__version__} sees {count} CUDA devices; check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES, or leave device out"
            )
        return checked
    try:
        torch.empty(0, device=checked)
    except Exception as error:  # its type depends on the backend
        raise OptionError(
            f"device={str(checked)!r} is not available: torch {torch.__version__} makes no tensor there; leave device out"
        ) from error
    return checked


def indexed_device(device: torch.device) -> torch.device:
    """Return a device with its index: that of the current device, where none is given."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def check_same_device(own: torch.device | None, trainer: torch.device, name: str) -> None:
    """Check that a trainer, which moves batches itself, would not move them on to another device.

    Args:
        own: Device of the loader; None and the CPU pass.
        trainer: Device of the trainer.
        name: Name of the trainer.

    Raises:
        OptionError: If the devices differ.
    """
    if own is None or own.type == "cpu" or indexed_device(own) == indexed_device(trainer):
        return
    raise OptionError(
        f"the loader puts batches on {str(own)!r}, but {name} would copy them again to {str(trainer)!r}; "
        "give the loader the same device, or leave device out"
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose copy is one block of memory; a subclass may hold several tensors."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_nested)
    )


def _is_movable(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def place_batches(
    worker_batches: Iterator[WorkerBatch],
    device: torch.device | None,
    pinned_memory: PinnedMemory | None,
    depth: int,
    is_ready: Callable[[], bool],
) -> Iterator[WorkerBatch]:
    """Pin the batches, and start their copies to the device.

    Args:
        worker_batches: The batches.
        device: Where they go; None or the CPU if they stay.
        pinned_memory: Pins them, if they are to be pinned.
        depth: Batches on the device at most.
        is_ready: Whether the next batch can be taken without waiting.
    """
    if pinned_memory is not None:
        worker_batches = map(partial(change_batch, pinned_memory.pin_batch), worker_batches)
    if device is None or device.type == "cpu":
        return worker_batches
    start = partial(change_batch, DeviceCopies(indexed_device(device)).start)
    return prefetch(worker_batches, start, depth=depth, is_ready=is_ready)
