"""Run shard tasks on a Ray cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import ray
import ray.exceptions

from shardstream.errors import OptionError, StorageError, WorkerError, get_logger
from shardstream.tasks import JSON, Task, run_task

_CONNECT_TIMEOUT_S = 10.0  # ray.init retries an address that does not answer for several minutes
_TASKS_PER_SLOT = 2  # so that no worker waits for the driver
_LOCAL = ("auto", "local")
_RETRY_WAIT_S = 1.0  # before a task is run again: a machine without memory needs a moment
# Errors of Ray that say nothing about the task, or that it was killed for the memory that others used.
_DEATHS = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,  # the result was on a node that died
)

_log = get_logger(__name__)


class _Running(NamedTuple):
    """A submitted task."""

    task: Task
    attempts: int
    """How often it was run before."""


class RayExecutor:
    """Runs tasks on the workers of a Ray cluster; results do not depend on it.

    A cluster that this process is connected to (``ray.init``) is used; else the executor connects for the time of each job. Tasks whose
    worker dies are run again. After an error, tasks that were submitted run on. When the driver dies, run the same command again: finished parts are kept.

    Storage options travel with the tasks. Credentials in variables of this process do not: give them to the cluster, or pass
    ``runtime_env={"env_vars": {...}}``.

    Args:
        address: Address of the cluster, e.g. "10.0.0.5:6379" or "ray://host:10001", or "auto"; by default that in ``RAY_ADDRESS``, else
            Ray is started on this machine.
        num_cpus: CPUs of each task; 0, with ``in_flight``, runs tasks whatever CPUs are free.
        memory: Bytes of memory that Ray reserves for each task; None reserves none.
        max_retries: How often a task is run again when its worker dies or runs out of memory.
        in_flight: Maximum of submitted tasks; by default two for each that can run at a time.
        runtime_env: As in ``ray.init``, e.g. ``{"pip": ["shardstream"]}``.

    Raises:
        OptionError: If a number is out of range.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        memory: int | None = None,
        max_retries: int = 3,
        in_flight: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if num_cpus < 0 or (num_cpus == 0 and in_flight is None):
            raise OptionError(f"num_cpus must be over 0, or 0 with in_flight=, not {num_cpus}")
        if max_retries < 0:
            raise OptionError(f"max_retries must be 0 or more, not {max_retries}")
        if in_flight is not None and in_flight < 1:
            raise OptionError(f"in_flight must be 1 or more, not {in_flight}")
        self.retries = 0
        """Tasks that were run again because their worker had died, since this executor was made."""
        self._max_retries = max_retries
        self._address = address
        self._num_cpus = num_cpus
        self._in_flight = in_flight
        self._runtime_env = dict(runtime_env or {})
        self._options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "memory": memory,
            "max_retries": 0,  # Ray does not say how often it has run a task again
            "retry_exceptions": False,
        }
        if self._runtime_env:
            self._options["runtime_env"] = self._runtime_env

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks (see `Executor.run`).

        Raises:
            StorageError: If no cluster answers at the address.
            OptionError: If no node of the cluster can run a task, or a task cannot be sent to a worker.
            WorkerError: If workers die more often than ``max_retries``, or lack this package.
        """
        in_flight: dict[Any, _Running] = {}
        with self._connected():
            submit = ray.remote(run_task).options(**self._options).remote
            most = self._in_flight or _TASKS_PER_SLOT * self._slots()
            # After an error the rest is not cancelled: in Ray 2.60, ray.cancel of a task that just ends may abort the driver
            # ("Tried to complete task that was not pending"). What is submitted runs on, and changes nothing that a second run would not.
            for task in tasks:
                while len(in_flight) >= most:
                    self._collect(in_flight, submit, done)
                in_flight[_submit(submit, task)] = _Running(task, 0)
            while in_flight:
                self._collect(in_flight, submit, done)

    def _collect(
        self,
        in_flight: dict[Any, _Running],
        submit: Callable[[Task], Any],
        done: Callable[[Task, Mapping[str, JSON]], None],
    ) -> None:
        """Wait for a task to end, and hand over the results of all that have ended; run tasks again whose worker has died."""
        # Without fetch_local=False, `wait` fetches the results, which are small.
        ready, _ = ray.wait(list(in_flight), num_returns=1)
        for reference in ready:
            task, attempts = in_flight.pop(reference)
            try:
                result = ray.get(reference)
            except ray.exceptions.RayError as error:
                if attempts >= self._max_retries or not isinstance(error, _DEATHS):
                    raise_own_error(error, task.name)
                self.retries += 1
                cause = first_line(error)
                _log.warning(
                    "the worker of task %r died (%s); the task is run again", task.name, cause
                )
                time.sleep(_RETRY_WAIT_S)
                in_flight[_submit(submit, task)] = _Running(task, attempts + 1)
            else:
                done(task, result)

    def _slots(self) -> int:
        """Return how many tasks the cluster can run at a time.

        Raises:
            OptionError: If no node has the CPUs of one; Ray would wait for such a node forever.
        """
        cpus = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        slots = sum(int(count // self._num_cpus) for count in cpus)
        if not slots:
            raise OptionError(
                f"a task needs {self._num_cpus} CPUs, and the largest node of the Ray cluster has {max(cpus, default=0):g}; "
                "use a smaller num_cpus"
            )
        return slots

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connect to the cluster, unless this process is connected already."""
        if ray.is_initialized():
            yield
            return
        address = self._address or os.environ.get("RAY_ADDRESS")
        _check_answers(address)
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StorageError(
                f"cannot connect to the Ray cluster at {address}: {error}",
                remedy="check the address, and that 'ray status' works there",
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Check that something listens at the address of a cluster, within seconds.

    Raises:
        OptionError: If the address has no port.
        StorageError: If nothing listens there.
    """
    if address is None or address in _LOCAL:
        return
    host, _, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise OptionError(
            f"the address of a Ray cluster is HOST:PORT, ray://HOST:PORT or 'auto', not {address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StorageError(
            f"no Ray cluster answers at {address} ({error})",
            remedy="check the address, and that the cluster runs",
        ) from error


def _submit(submit: Callable[[Task], Any], task: Task) -> Any:
    try:
        return submit(task)
    except TypeError as error:  # raised by Ray for what cannot be pickled
        raise OptionError(
            f"task {task.name!r} cannot be sent to a Ray worker ({str(error).splitlines()[0]}); what its functions refer to must be picklable"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def raise_own_error(error: ray.exceptions.RayError, name: str) -> NoReturn:
    """Raise the error of a task as it was raised in the worker, or say why no worker could run it."""
    cause = getattr(error, "cause", None)
    text = str(error)
    if "No module named" in text:
        missing = text.partition("No module named")[2].split("\n")[0].strip(" '\"")
        raise WorkerError(
            f"the Ray worker of task {name!r} cannot import {missing!r}; install it on all nodes, or pass "
            'runtime_env={"pip": [...]}'
        ) from error
    if isinstance(cause, Exception):
        raise cause from None
    raise WorkerError(
        f"the Ray worker of task {name!r} died more often than it is retried: {first_line(error)} "
        "If it ran out of memory, use fewer tasks at a time (num_cpus=) or reserve memory (memory=)"
    ) from error
