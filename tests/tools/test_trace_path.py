"""Test that the tracer runs, and counts only functions of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRACER = Path(__file__).parent.parent.parent / "tools" / "trace_path.py"


def run_tracer(*options: str) -> list[str]:
    command = [sys.executable, "-W", "error", str(TRACER), *options]
    done = subprocess.run(
        command, check=False, cwd=TRACER.parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def num_functions(rows: list[str]) -> int:
    return int(rows[1].removeprefix("open to first batch").split()[2])


def test_table_has_a_row_for_each_path_and_none_became_longer() -> None:
    rows = run_tracer("--list")
    # Samples that are not decoded have a shorter path.
    assert num_functions(run_tracer("--plain", "--limits")) < num_functions(rows)
    head, *lines = rows
    assert head.split()[:3] == ["path", "files", "limit"]
    paths = (
        "open to first batch",
        "next batch",
        "first state_dict",
        "next state_dict",
        "with one worker",
        "ShardWriter, 40 samples",
        "pack of four photos",
    )
    for path, row in zip(paths, lines[: len(paths)], strict=True):
        files, _, functions, _, comprehensions = map(int, row.removeprefix(path).split())
        assert 0 < files <= functions
        assert comprehensions < functions
        begin = lines.index(path, len(paths)) + 1
        listed = [line for line in lines[begin : begin + files] if line.startswith("  ")]
        names = [line.partition(": ")[2].split(", ") for line in listed]
        assert len(listed) == files
        assert sum(map(len, names)) == functions
