"""Run a program on two ranks that it starts itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two_ranks(job: Path, url: str, folder: Path) -> None:
    """Run a job of this folder, ``job URL PORT FOLDER``, and fail with its output if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = subprocess.run(
        [sys.executable, job, url, port, folder],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(job.parents[2])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
