"""Count the epochs of a dataset, for loops and plain loaders that do not count them themselves."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from shardstream.storage import new_lock

_MAX_LOADERS = 16  # that start their workers at the same time
# Epoch and calls of `set_epoch`, before the readers: length and JSON.
_CHOSEN = struct.Struct("=qq")
_LENGTH = struct.Struct("=q")
_PLACE_BYTES = 1 << 20  # of address space, for each counter; a thousand readers fit
_MAX_READERS_BYTES = _PLACE_BYTES - _CHOSEN.size - _LENGTH.size
_PLACES = 64  # in a file: a process may have 256 files open
_lock = new_lock()  # `lockf` excludes other processes only


class Worker(NamedTuple):
    """A worker of a torch loader, by the values that torch gives it.

    Args:
        base_seed: Drawn for each iterator of a loader: the same in all its workers.
        number: From 0.
    """

    base_seed: int
    number: int


@dataclass(slots=True)
class _Loader:
    """Passes over the dataset by the workers of one iterator of a loader; several if they are persistent or repeat the dataset.

    Args:
        base_seed: Of the workers.
        begun: Numbers of the workers that have begun; another worker with one of them is of another iterator.
        start: Pass that has the epoch ``epoch``; the next pass has the next epoch.
        epoch: Epoch of that pass.
        calls: Calls of `set_epoch` before it.
        latest: The latest pass that a worker has begun.
    """

    base_seed: int
    begun: list[int]
    start: int
    epoch: int
    calls: int
    latest: int


@dataclass(slots=True)
class _Reader:
    """Iterations by one process and by its workers.

    Args:
        epoch: Of the latest iteration; of the next one if there was none since `set_epoch`.
        calls: Calls of `set_epoch` before it.
        iterations: Number of iterations since `set_epoch`.
        has_warned: Whether it was told that an epoch repeats.
        loaders: The latest iterators with workers.
    """

    epoch: int
    calls: int
    iterations: int = 0
    has_warned: bool = False
    loaders: list[_Loader] = field(default_factory=list)


class EpochCounter:
    """The epoch of each iteration of a dataset, in memory that forked and spawned processes share.

    torch tells a worker neither its epoch nor its iteration. So the first worker of an iterator takes the next epoch and notes it
    under their common seed, and the others find it. Later passes of the same workers count on from it, because one worker may be
    some passes ahead of another. Copies and pickles begin at the chosen epoch, in memory of their own.

    Args:
        epoch: The first epoch.
        calls: Number of calls of `set_epoch`.
    """

    def __init__(self, epoch: int = 0, calls: int = 0) -> None:
        with _lock:
            if not _last or _last[0].places == _PLACES:
                _last[:] = [_new_memory()]
            memory = _last[0]
            start, memory.places = memory.places * _PLACE_BYTES, memory.places + 1
        self._attach(memory, start)
        os.pwrite(self._memory.handle, _CHOSEN.pack(epoch, calls), self._start)

    def _attach(self, memory: _Memory, start: int) -> None:
        self._memory, self._start = memory, start
        # Of this process, if it is a worker: the number of its passes, the epoch of the last one, and the calls before it.
        self._passes, self._epoch, self._calls = 0, 0, 0

    @property
    def chosen(self) -> tuple[int, int]:
        """The epoch of the last call of `set_epoch`, and the number of calls. An epoch that is read after a number is not older."""
        epoch, calls = _CHOSEN.unpack(os.pread(self._memory.handle, _CHOSEN.size, self._start))
        return epoch, calls

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        with self._locked():
            data = _CHOSEN.pack(epoch, self.chosen[1] + 1)
            os.pwrite(self._memory.handle, data, self._start)

    def current(self, worker: Worker | None) -> int:
        """Return the epoch of the latest iteration of this process, or the chosen one if there was none since."""
        if self._passes:
            return self._epoch
        with self._reader_of(worker) as reader:
            return reader.epoch

    def begin(self, worker: Worker | None, *, counts: bool) -> tuple[int, bool]:
        """Begin an iteration.

        Args:
            worker: The worker that begins; None outside of workers.
            counts: Whether to read the next epoch; else the last one is read again until `set_epoch`.

        Returns:
            Its epoch, and whether to warn that it is read again: once.
        """
        with self._reader_of(worker) as reader:
            epoch = reader.epoch + (counts and reader.iterations > 0)
            is_first, warns = True, False
            if worker is not None:
                epoch, is_first = self._begin_pass(reader, worker, epoch, counts=counts)
            if is_first:
                warns = not counts and reader.iterations > 0 and not reader.has_warned
                reader.has_warned |= warns
                reader.epoch = max(reader.epoch, epoch)
                reader.iterations += 1
            return epoch, warns

    def _begin_pass(
        self, reader: _Reader, worker: Worker, epoch: int, *, counts: bool
    ) -> tuple[int, bool]:
        """Begin a pass of a worker, in a given epoch if it is the first worker; return the pass's epoch, and whether it is."""
        number, self._passes = self._passes, self._passes + 1
        last, loader = self._epoch, _find(reader, worker, is_new=number == 0)
        is_first = loader is None or number > loader.latest
        if loader is None:
            if number and self._calls == reader.calls:  # other loaders have displaced it
                epoch = last + counts
            loader = _Loader(worker.base_seed, [], number, epoch, reader.calls, number)
            reader.loaders = [*reader.loaders[1 - _MAX_LOADERS :], loader]
        elif is_first and loader.calls != reader.calls:
            loader.start, loader.epoch, loader.calls = number, epoch, reader.calls
        loader.latest = max(loader.latest, number)
        if number == 0:
            loader.begun.append(worker.number)
        passes = number - loader.start
        self._epoch = loader.epoch + passes * counts if passes >= 0 else last + counts
        self._calls = loader.calls
        return self._epoch, is_first

    def resume(self, worker: Worker | None, epoch: int) -> None:
        """Let the iteration that has begun last read the epoch of a state, and the next one the epoch after it."""
        with self._reader_of(worker) as reader:
            reader.epoch = epoch
            if worker is not None and (loader := _find(reader, worker, is_new=False)) is not None:
                self._epoch = loader.epoch = epoch
                loader.start, loader.calls = self._passes - 1, reader.calls

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the memory. If the process is killed, the system releases the lock."""
        with _lock:
            fcntl.lockf(self._memory.handle, fcntl.LOCK_EX, 1, self._start)
            try:
                yield
            finally:
                fcntl.lockf(self._memory.handle, fcntl.LOCK_UN, 1, self._start)

    @contextmanager
    def _reader_of(self, worker: Worker | None) -> Iterator[_Reader]:
        """Return the iterations of this process, or of the one that has started this worker; write down what was changed."""
        parent = None if worker is None else parent_process()
        process = str(os.getpid() if parent is None else parent.pid)
        with self._locked():
            handle, start = self._memory.handle, self._start + _CHOSEN.size
            (size,) = _LENGTH.unpack(os.pread(handle, _LENGTH.size, start))
            content = os.pread(handle, size, start + _LENGTH.size)
            readers: dict[str, Any] = json.loads(content or "{}")
            epoch, calls = self.chosen
            reader = _Reader(epoch, calls)
            if (found := readers.pop(process, None)) is not None:
                reader = _Reader(
                    **found | {"loaders": [_Loader(**one) for one in found["loaders"]]}
                )
            if reader.calls != calls:
                reader.epoch, reader.calls, reader.iterations = epoch, calls, 0
            yield reader
            readers[process] = asdict(reader)
            while len(content := json.dumps(readers).encode()) > _MAX_READERS_BYTES:
                del readers[next(iter(readers))]  # the one that has not begun for longest
            # At once: the process may be killed.
            os.pwrite(handle, _LENGTH.pack(len(content)) + content, start)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _attached, (self._memory, self._start)
        return EpochCounter, self.chosen


@dataclass(eq=False)
class _Memory:
    """A file in memory with places for some counters. The place of one that has ended is not used again: a forked child may read it.

    Args:
        handle: Its descriptor.
        places: Places that are used.
    """

    handle: int
    places: int = 0

    def __reduce__(self) -> tuple[Any, ...]:  # of a counter that is sent to a spawned process
        return _attached_memory, (DupFd(self.handle),)


# The file of this process with free places. A forked child needs another one: else both would use the same places.
_last: list[_Memory] = []
os.register_at_fork(after_in_child=_last.clear)


def _new_memory() -> _Memory:
    """Return a file of zeros in memory, or where the system has none, as in some sandboxes, on the disk; its last counter closes it."""
    try:
        handle = os.memfd_create("dataset-epochs")
    except (AttributeError, OSError):
        with TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, _PLACES * _PLACE_BYTES)
    memory = _Memory(handle)
    weakref.finalize(memory, os.close, handle).atexit = False
    return memory


def _attached_memory(handle: Any) -> _Memory:
    return _Memory(
        handle.detach()
    )  # never closed: that would release the locks of its other counters


def _attached(memory: _Memory, start: int) -> EpochCounter:
    counter = object.__new__(EpochCounter)
    counter._attach(memory, start)
    return counter


def _find(reader: _Reader, worker: Worker, *, is_new: bool) -> _Loader | None:
    """Return the iterator that a worker belongs to, if one of its workers has begun."""
    for loader in reversed(reader.loaders):
        if loader.base_seed == worker.base_seed and not (is_new and worker.number in loader.begun):
            return loader
    return None
