"""A change that is killed at any moment leaves the old version or the new one, and the same call completes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["delete", "compact", "tag", "gc"])
def test_a_killed_change(operation: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.versions.killed_changes_job", str(tmp_path), operation]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 1
