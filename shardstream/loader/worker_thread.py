"""Run the workers of a `WorkerPool` as threads of the main process, with the messages that worker processes send.

A step that releases the interpreter's lock, such as the decoding of a photo, runs while other threads run Python. A thread gets a
copy of the dataset and hands out copies of its batches, as a process does, so that no step or batch is used by two threads.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from shardstream.errors import OptionError, describe_error
from shardstream.loader.serialize import NewTensor, new_tensor
from shardstream.loader.shared_memory import Channel, RingMessage

_this_thread = threading.local()
_worker_info: Any = None  # in `_get_worker_info` the one of torch


class WorkerThread(threading.Thread):
    """A worker as a thread, with the attributes of a process that the pool uses.

    It cannot be ended from outside, only by closing its pipe. A step that takes long delays its end, but not that of the process.
    """

    exitcode = 0

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, int, Any, Connection], *, daemon: bool
    ) -> None:
        setup, number, channel, pipe = args
        self.pid = os.getpid()
        setup = replace(setup, dataset=_copied(setup.dataset))
        self._pipe = Connection(os.dup(pipe.fileno()))  # the pool closes its own, as for a process
        super().__init__(
            target=target,
            args=(setup, number, channel, self._pipe),
            name=f"ShardLoader worker {number}",
            daemon=daemon,
        )

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; not in this thread itself, which may collect a pool as garbage."""
        if self is not threading.current_thread():
            super().join(timeout)

    def run(self) -> None:
        """Serve the pool, then close the pipe, which is how the pool sees the end."""
        with self._pipe, suppress(SystemExit):  # the pool reports it
            super().run()


class ThreadContext:
    """Starts threads, in place of a context of ``multiprocessing``."""

    Pipe = staticmethod(multiprocessing.Pipe)
    Process = WorkerThread


class ThreadChannel(Channel):
    """Hands over the values of messages within a process; the pipe carries only their numbers."""

    def __init__(self) -> None:
        self._messages: dict[int, RingMessage] = {}
        self._numbers = itertools.count(1)

    def reset(self, *, give_back: bool) -> None:
        """In the worker: drop values that were not received."""
        del give_back
        self._messages.clear()

    def pack(self, value: Any) -> RingMessage:
        """In the worker: keep a copy of a value; return the message to send."""
        message = super().pack(value)
        number = next(self._numbers)
        self._messages[number] = message
        return RingMessage(number, 0, message.places, None, [])

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main thread: return the value."""
        return super().unpack(self._messages.pop(message.number), allocate)


def _copied(dataset: Any) -> Any:
    """Return a copy of a dataset.

    Raises:
        OptionError: If something in it cannot be copied.
    """
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise OptionError(
            f"the dataset cannot be copied for a worker that is a thread ({describe_error(error)}); give the class of what cannot "
            "be copied a __deepcopy__, which may return the object itself if threads can share it"
        ) from error


def set_worker_info(info: Any) -> None:
    """Set the worker that torch's ``get_worker_info`` returns in this thread.

    Before torch has workers that are threads, it has one variable for the whole process. Its function is changed, not replaced in
    its module, because other modules have imported it.
    """
    _this_thread.info = info
    vars(torch_worker)["_this_thread"] = _this_thread
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    """Return the worker of this thread, or that of the process."""
    return getattr(_this_thread, "info", _worker_info)


def _forget_worker() -> None:
    """In a forked process: its main thread is that of the step that forked it, but no worker of its parent."""
    vars(_this_thread).clear()


os.register_at_fork(after_in_child=_forget_worker)
