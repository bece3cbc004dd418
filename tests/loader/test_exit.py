"""Test that scripts exit without messages of shardstream in any state of its readers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

import shardstream as ss
from tests.static_server import serve_files

SCRIPT = """
import sys
import shardstream as ss

dataset = ss.ShardDataset(sys.argv[1], shuffle=True, seed=0)
held = []
for workers, persistent, taken in ((0, False, 3), (1, False, 3), (2, True, 8)):
    context = "fork" if workers else None
    loader = ss.ShardLoader(
        dataset, batch_size=8, num_workers=workers, persistent_workers=persistent, multiprocessing_context=context
    )
    batches, samples = iter(loader), iter(dataset)
    for _ in range(taken):
        batch, sample = next(batches), next(samples)
    if taken == 8:
        assert next(batches, None) is None
    held.append((loader, batches, samples))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """64 samples of 10 kB."""
    folder = tmp_path_factory.mktemp("photos")
    with ss.ShardWriter(folder, max_samples=16) as writer:
        for number in range(64):
            writer.write({"__key__": f"{number:03}", "jpg": bytes(10_000)})
    return str(folder)


def test_script_exit_prints_nothing(photos: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, photos],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


REMOTE_SCRIPT = """
import sys
import shardstream as ss

held = []
for url, client in zip(sys.argv[1:], ("http", "s3fs", None)):
    options = {"s3_client": client} if client else None
    dataset = ss.ShardDataset(url, storage_options=options, read=ss.ReadOptions(prefetch_bytes=30_000))
    streamed = ss.ShardDataset(url, storage_options=options, read=ss.ReadOptions(index="ignore"))
    held += iter(dataset), iter(streamed), iter(ss.ShardLoader(dataset, batch_size=2))
    for iterator in held:
        next(iterator)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_exit_with_open_remote_iterators_prints_nothing(
    photos: str, bucket: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(REMOTE_SCRIPT)
    fsspec.filesystem("s3").put(photos, f"{bucket}/photos", recursive=True)
    with serve_files(Path(photos)) as server:
        done = subprocess.run(
            [sys.executable, script, *[f"{bucket}/photos"] * 2, server.url],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
