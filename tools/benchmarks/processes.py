"""CPU time and memory of this process and its descendants, as Linux counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int | None = None) -> Iterator[int]:
    """Yield a process and its running descendants."""
    pid = os.getpid() if pid is None else pid
    yield pid
    children: list[str] = []
    with suppress(OSError):  # it has ended, or one of its threads has
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    for child in children:
        yield from family(int(child))


def cpu_s() -> float:
    """Return CPU seconds of this process and its descendants, including ended ones."""
    ticks = 0
    for pid in family():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))  # own, and of ended children
    return ticks / _TICKS


def memory_bytes(pid: int) -> dict[str, int]:
    """Return resident memory of a process by kind: "anon", "file" (mapped), "shmem", and "peak" of all."""
    names = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem", "VmHWM": "peak"}
    found = dict.fromkeys(names.values(), 0)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = 1024 * int(value.split()[0])
    return found


def peak_rss_bytes() -> int:
    """Return the sum of the peaks of resident memory of this process and its running descendants."""
    return sum(memory_bytes(pid)["peak"] for pid in family())
