"""Run an attack in a child process with limits on memory and time."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path


def survived(attack: Callable[[], object], *, memory_bytes: int, timeout_s: float = 60) -> str:
    """Run an attack in a forked child with a memory limit; return its result as text.

    Returns:
        The result as text, or the name and message of its exception.

    Raises:
        AssertionError: If it hung or killed its process.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(attack, memory_bytes, there))
    child.start()
    there.close()
    try:
        assert here.poll(timeout_s), f"it runs on after {timeout_s} s"
        try:
            return str(here.recv())
        except EOFError:
            child.join(5)
            raise AssertionError(f"it ended its process: exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        here.close()


def _run(attack: Callable[[], object], memory_bytes: int, answer: Connection) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        outcome = str(attack())
    except Exception as error:  # noqa: BLE001  (that is what is asked)
        outcome = f"{type(error).__name__}: {error}"
    answer.send(outcome)
    answer.close()
    os._exit(0)  # nothing of pytest's runs at the end of a fork
