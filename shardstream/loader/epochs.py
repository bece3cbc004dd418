"""Count the epochs of loops that do not count them, and find on the call stack what Lightning does with a loader.

torch tells a worker neither its epoch nor its iteration. So all processes append to one file in memory what happens: a call of
`set_epoch`, the begin of an iteration. Each process reads the same events in the same order, and finds the same epochs. An append is
atomic, so there is no lock that a killed process could keep.

Lightning takes a batch ahead where the length of a loader is not known, to know which one is the last; and it stops after
``limit_train_batches``. Its checkpoints ask for the state of the loader in the middle of that. Only the call stack shows it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from shardstream.errors import StateError
from shardstream.pipeline import LoaderPosition
from shardstream.process import new_lock

_CHOSEN, _RESUMED, _BEGUN, _REPEATED = range(4)
_NO_WORKER = -1
_RECORD = struct.Struct(
    "=8q"
)  # 64 bytes: none lies in two pages of memory, so it is there as a whole or not
_lock = new_lock()
LOOP_MODULES = ("lightning.pytorch.loops", "pytorch_lightning.loops")


class _Event(NamedTuple):
    """What a process has done.

    Args:
        kind: Called `set_epoch`, loaded a state, or begun an iteration: of the next epoch, or of the last one again.
        dataset: Number of the dataset.
        epoch: Of the first two kinds.
        process: The process that reads, or that has started the worker which reads.
        author: The process that has done it.
        base_seed: Of a worker: drawn for each iterator of a loader, the same in all its workers.
        worker: Number of the worker.
        iteration: Number of the iteration in the author: workers have several if they are persistent or repeat the dataset.
    """

    kind: int
    dataset: int
    epoch: int = 0
    process: int = 0
    author: int = 0
    base_seed: int = 0
    worker: int = _NO_WORKER
    iteration: int = 0


@dataclass(slots=True)
class _Iterator:
    """One iterator of a loader with workers: the workers that have begun, and the epochs of their iterations."""

    workers: set[int] = field(default_factory=set)
    epochs: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Reader:
    """Iterations by one process and by its workers.

    Args:
        epoch: Of the latest iteration; of the next one if there was none since `set_epoch`.
        has_begun: Whether there was an iteration since `set_epoch`.
        has_warned: Whether it was told that an epoch repeats.
        iterators: The latest iterator of each base seed.
        iterator_of: The iterator of each worker process.
    """

    epoch: int
    has_begun: bool = False
    has_warned: bool = False
    iterators: dict[int, _Iterator] = field(default_factory=dict)
    iterator_of: dict[int, _Iterator] = field(default_factory=dict)

    def follow(self, event: _Event) -> tuple[int, bool]:
        """Return the epoch of an iteration, and whether to warn that it is read again: once."""
        epochs, iteration = self._iterator(event).epochs, event.iteration
        if event.kind == _RESUMED:
            if epochs.get(iteration) != event.epoch:  # else another worker was first
                epochs[iteration] = self.epoch = event.epoch
            return event.epoch, False
        if iteration in epochs:  # another worker was first, and may be some iterations ahead
            return epochs[iteration], False
        repeats = self.has_begun and event.kind == _REPEATED
        warns = repeats and not self.has_warned
        self.epoch += self.has_begun and not repeats
        self.has_begun, self.has_warned = True, self.has_warned or warns
        epochs[iteration] = self.epoch
        return self.epoch, warns

    def _iterator(self, event: _Event) -> _Iterator:
        if event.worker != _NO_WORKER and event.iteration == 0 and event.kind != _RESUMED:
            iterator = self.iterators.get(event.base_seed)
            # The user may have set the seed, so that it is that of an earlier iterator, too.
            if iterator is None or event.worker in iterator.workers:
                iterator = self.iterators[event.base_seed] = _Iterator()
            iterator.workers.add(event.worker)
            self.iterator_of[event.author] = iterator
        return self.iterator_of.get(event.author, _Iterator())


class Epochs:
    """The epoch of each iteration of a dataset, in all processes. Copies and pickles count for themselves from the chosen epoch on.

    Args:
        epoch: The first epoch.
        calls: Number of the calls of `set_epoch` before.
    """

    def __init__(self, epoch: int = 0, calls: int = 0) -> None:
        self._file, self._chosen = _shared_file(), (epoch, calls)
        self._offset = os.fstat(self._file).st_size
        self._numbers: tuple[int, ...] = (int.from_bytes(os.urandom(7), "big"),)
        """Of this dataset, and before it those of the datasets whose `set_epoch` it follows."""
        self._readers: dict[int, _Reader] = {}
        self._own: dict[int, tuple[int, int, bool]] = {}
        """Process -> number of its iterations, epoch of the last one, and whether to warn; a fork has that of its parent, too."""

    def chained(self) -> Epochs:
        """Return epochs that are counted apart, and follow later calls of `set_epoch` of these, too."""
        chained = Epochs()
        with _lock:  # the events that this process has not read are read by both
            chained._file, chained._offset, chained._chosen = self._file, self._offset, self._chosen
        chained._numbers = (*self._numbers, *chained._numbers)
        return chained

    @property
    def chosen(self) -> tuple[int, int]:
        """The epoch of the last call of `set_epoch`, and the number of calls."""
        with _lock:
            if os.fstat(self._file).st_size > self._offset:  # asked at each state
                self._read_events()
            return self._chosen

    @property
    def current(self) -> int:
        """The epoch of the latest iteration of this process, or the chosen one if there was none since."""
        chosen, process = self.chosen[0], _reading_process()
        if process != os.getpid() and os.getpid() in self._own:
            return self._own[os.getpid()][1]
        return self._readers[process].epoch if process in self._readers else chosen

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._append(_Event(_CHOSEN, self._numbers[-1], epoch))

    def begin(self, *, counts: bool) -> tuple[int, bool]:
        """Begin an iteration.

        Args:
            counts: Whether to read the next epoch; else the last one is read again until `set_epoch`.

        Returns:
            Its epoch, and whether to warn that it is read again: once.
        """
        _, epoch, warns = self._append(self._event(_BEGUN if counts else _REPEATED, 0))
        return epoch, warns

    def resume(self, epoch: int) -> None:
        """Let the iteration that has begun last read the epoch of a state, and the next one the epoch after it."""
        self._append(self._event(_RESUMED, epoch))

    def _event(self, kind: int, epoch: int) -> _Event:
        process, author, worker = _reading_process(), os.getpid(), get_worker_info()
        iterations, *_ = self._own.get(author, (0,))
        event = _Event(kind, self._numbers[-1], epoch, process, author)
        if worker is not None:
            event = event._replace(base_seed=worker.seed - worker.id, worker=worker.id)
        return event._replace(iteration=iterations - (kind == _RESUMED))

    def _append(self, event: _Event) -> tuple[int, int, bool]:
        """Append an event; return what this process has done last."""
        with _lock:
            os.write(self._file, _RECORD.pack(*event))
            self._read_events()
            return self._own.get(os.getpid(), (0, 0, False))

    def _read_events(self) -> None:
        """Follow the events that this process has not seen yet."""
        size = os.fstat(self._file).st_size - self._offset
        events = os.pread(self._file, size, self._offset)
        self._offset += len(events)
        for event in map(_Event._make, _RECORD.iter_unpack(events)):
            if event.kind == _CHOSEN and event.dataset in self._numbers:
                self._chosen = event.epoch, self._chosen[1] + 1
                for reader in self._readers.values():
                    reader.epoch, reader.has_begun = event.epoch, False
            elif event.dataset == self._numbers[-1]:
                reader = self._readers.setdefault(event.process, _Reader(self._chosen[0]))
                begun = reader.follow(event)
                if event.author == os.getpid():
                    self._own[event.author] = event.iteration + 1, *begun

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return Epochs, self.chosen
        return _received, (self.__dict__ | {"_file": DupFd(self._file)},)


def _received(state: dict[str, Any]) -> Epochs:
    """Return the epochs of the process that has spawned this one."""
    epochs = Epochs()
    epochs.__dict__ |= state | {"_file": state["_file"].detach()}
    return epochs


@cache
def _shared_file() -> int:
    """Return the file of this process and of those that it forks; where the system has none in memory, it is on the disk."""
    try:
        file = os.memfd_create("dataset-epochs")
    except (AttributeError, OSError):
        with TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def _reading_process() -> int:
    """Return the process that reads: this one, or the one that has started this worker of torch."""
    parent = None if get_worker_info() is None else parent_process()
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def received_position(
    loader: object, position: LoaderPosition, before: LoaderPosition, following: LoaderPosition
) -> LoaderPosition:
    """Return the position of a state: after the last batch that the training has received.

    Args:
        loader: A calling training loop of Lightning may have taken batches from it that it has not used yet.
        position: Position after the last batch that it has handed out.
        before: Position before that batch.
        following: Position where its next iteration begins.

    Raises:
        StateError: If there are several.
    """
    for loop in _calling_loops():
        fetcher: Any = getattr(loop, "_data_fetcher", None)
        combined = getattr(fetcher, "_combined_loader", None)
        if combined is None or not any(one is loader for one in combined.flattened):
            continue
        ahead = len(getattr(fetcher, "batches", ()))
        if ahead > 1:
            raise StateError(
                f"Lightning holds {ahead} batches for later steps, which a state would lose; let it fetch one ahead, or set the "
                "length with .with_length(n), so that it fetches none"
            )
        if ahead:
            return before
        return following if fetcher.done else position
    return position


def is_called_by_lightning() -> bool:
    """Return whether a loop of Lightning is on the call stack, which has counted the batches of an epoch."""
    return next(_calling_loops(), None) is not None


def is_overfit_by_lightning() -> bool:
    """Return whether a calling Trainer has ``overfit_batches``: it takes the same batches in each epoch."""
    for loop in _calling_loops():
        trainer = getattr(loop, "trainer", None)
        if getattr(trainer, "overfit_batches", 0) > 0:
            return True
    return False


def epoch_of_reloading_lightning() -> int:
    """Return the epoch of a calling Trainer that makes its loaders again after some epochs, so that each of them begins at 0; else 0."""
    for loop in _calling_loops():
        trainer: Any = getattr(loop, "trainer", None)
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0) > 0:
            return int(trainer.current_epoch)
    return 0


def _calling_loops() -> Iterator[Any]:
    """Yield the loops of Lightning on the call stack, which a forked worker inherits from its parent."""
    if sys.modules.keys().isdisjoint(LOOP_MODULES):
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(LOOP_MODULES):
            yield frame.f_locals.get("self")
        frame = frame.f_back
