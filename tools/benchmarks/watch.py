"""Measure the memory of a process's workers: ``python -m benchmarks.watch PID``.

It is a process, because a thread would change the result: malloc gives it an arena, which forked workers inherit and use besides
their own (13 MB more each).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Self

from benchmarks.processes import family, memory_bytes

_SAMPLE_EVERY_S = 0.02


class Watch:
    """Watches the workers of this process; use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", "benchmarks.watch", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def held_bytes(self) -> tuple[int, int]:
        """Return the maximum memory of a worker since the last call, and the mean over time of the largest worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        most, mean = self._process.stdout.readline().split()
        return int(most), int(mean)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # forked workers keep its input open
        self._process.communicate()


def main(parent: int) -> None:
    """Measure every 20 ms; print maximum and mean since the last line of input, and end with the input."""
    looks: list[int] = []
    while True:
        asked, _, _ = select.select([sys.stdin], [], [], _SAMPLE_EVERY_S)
        held = [memory_bytes(pid) for pid in family(parent) if pid not in (parent, os.getpid())]
        looks.append(max((one["anon"] + one["shmem"] for one in held), default=0))
        if asked:
            if not sys.stdin.readline():
                return
            print(max(looks), sum(looks) // len(looks), flush=True)
            looks.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]))
