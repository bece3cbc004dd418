"""Test that every example runs in its own process, succeeds and leaves no files."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import S3Server

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
_TIMEOUT_S = 600


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short temporary folder: sockets between processes are in TMPDIR, and socket names have at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="ss-") as name:
        yield Path(name)


def environment(tmp_path: Path) -> dict[str, str]:
    """Environment without variables that select another S3 server, and with a temporary folder that the test checks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return clean | {
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",  # the tests share the machine
        "TMPDIR": str(tmp_path / "tmp"),
    }


def run(
    script: str, *arguments: str, tmp_path: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        cwd=tmp_path, env=environment(tmp_path) | variables, capture_output=True, text=True,
        check=False, timeout=_TIMEOUT_S,
    )  # fmt: skip


def left_running(tmp_path: Path) -> list[str]:
    """Return the running processes that an example started, identified by their environment."""
    mark = f"TMPDIR={tmp_path / 'tmp'}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def left_after_a_while(tmp_path: Path) -> list[str]:
    """Return the processes that do not end by themselves: those of Ray need seconds to see that their driver has ended."""
    for _ in range(3000):
        if not left_running(tmp_path):
            return []
        time.sleep(0.1)
    return left_running(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example_prints_the_documented_output(path: Path, tmp_path: Path) -> None:
    done = run(path.name, tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
    assert not left_after_a_while(tmp_path)
    assert not [left for left in (tmp_path / "tmp").iterdir() if "torch" not in left.name]


@pytest.mark.slow
def test_quickstart_trains_from_its_own_server(tmp_path: Path) -> None:
    done = run("quickstart.py", tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s3://" in done.stdout
    accuracy = re.search(r"accuracy\s+([\d.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95


@pytest.mark.slow
def test_quickstart_trains_from_a_folder_and_keeps_it(
    tmp_path: Path,
) -> None:
    dest = str(tmp_path / "digits")
    done = run("quickstart.py", "--dest", dest, tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "digits" / "val" / "index.json").is_file()
    again = run("quickstart.py", "--dest", dest, tmp_path=tmp_path)
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_interrupted_quickstart_stops_its_server(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "quickstart.py"],
        cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "quickstart" in process.stdout.readline()  # the server is up
        assert any("ThreadedMotoServer" in command for command in left_running(tmp_path))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=_TIMEOUT_S) == 130
    assert not left_running(tmp_path)


@pytest.mark.slow
def test_minio_example_uses_the_server_of_the_environment(s3: S3Server, tmp_path: Path) -> None:
    done = run("06_minio.py", tmp_path=tmp_path, **s3.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"server: {s3.endpoint}" in done.stdout


def test_examples_are_numbered_without_gaps_and_state_their_topic() -> None:
    assert [int(path.name[:2]) for path in SCRIPTS] == list(range(1, len(SCRIPTS) + 1))
    for path in SCRIPTS:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert "You learn:" in docstring, path.name


def test_examples_use_only_public_names() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert not re.search(r"(from|import) shardstream\.", path.read_text("utf-8")), path.name


@pytest.mark.slow
def test_notebook_runs_and_shows_pictures(tmp_path: Path) -> None:
    command = ["-W", "ignore", "-c", _RUN_NOTEBOOK, str(EXAMPLES / "12_notebook.ipynb")]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment(tmp_path), capture_output=True,
        text=True, check=False, timeout=_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = done.stdout.split("\f")
    assert [page.count("<img") for page in pages] == [0, 24, 1, 8, 0]
    assert all(len(page) < 100_000 for page in pages)
    assert "waiting for batches" in pages[-1]


_RUN_NOTEBOOK = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
print("\\f".join("".join(one.data.get("text/html", "") for one in cell if "data" in one) for cell in outputs))
"""
