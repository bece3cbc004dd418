"""Loader code of open_clip and timm, unmodified, over ``shardstream.webdataset`` and over webdataset."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from tests.webdataset import upstream

PACKAGES = {"open_clip": "open_clip_torch==3.3.0", "timm": "timm==1.0.31"}
PEER = {"open_clip": "webdataset==0.2.86", "timm": "webdataset==1.0.2"}  # open_clip's newest
STUBS = {"torchvision/__init__.py": "", "torchvision/datasets.py": "", "pandas.py": ""}
NUM_SHARDS, SHARD_SAMPLES = 8, 30
WORLD_SIZE = 2


def fetch(package: str, folder: Path) -> Path:
    """Return the folder with the unpacked package, or skip the test."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--dest",
        str(folder),
    ]
    try:
        subprocess.run([*command, package], check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"{package} cannot be fetched")
    wheels = [*folder.glob("*.whl")]
    if wheels:
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(folder)
        return folder
    pytest.skip(f"{package} has no wheel")


def write_shards(folder: Path) -> None:
    """Write image-text shards; text and class are the number of the sample."""
    folder.mkdir()
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    for shard in range(NUM_SHARDS):
        members: dict[str, bytes] = {}
        for number in range(shard * SHARD_SAMPLES, (shard + 1) * SHARD_SAMPLES):
            text = str(number).encode()
            members |= {
                f"{number:05}.jpg": stream.getvalue(),
                f"{number:05}.txt": text,
                f"{number:05}.cls": text,
            }
        upstream.write_tar(folder / f"shard-{shard:06}.tar", members)


def read(name: str, folder: Path, peer: Path | None, rank: int) -> list[int]:
    """Return the samples of one rank, read by webdataset in a folder, or by shardstream."""
    paths = [folder / "stubs", upstream.ROOT] if peer is None else [peer, folder / "stubs"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
    }
    program = Path(__file__).with_name("training_code.py")
    done = subprocess.run(
        [sys.executable, str(program), name, str(folder / "package"), str(folder / "shards"), str(NUM_SHARDS * SHARD_SAMPLES),
         str(WORLD_SIZE), "webdataset" if peer else "shardstream"],
        env=environment, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return [int(number) for number in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_loader_code_gives_each_sample_that_webdataset_gives(name: str, tmp_path: Path) -> None:
    fetch(PACKAGES[name], tmp_path / "package")
    peer = fetch(PEER[name], tmp_path / "peer")
    write_shards(tmp_path / "shards")
    for path, text in STUBS.items():
        (tmp_path / "stubs" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / path).write_text(text, encoding="utf-8")
    ours, theirs = (
        [number for rank in range(WORLD_SIZE) for number in read(name, tmp_path, one, rank)]
        for one in (None, peer)
    )
    assert len(set(ours)) == NUM_SHARDS * SHARD_SAMPLES
    assert set(ours) >= set(theirs)
    assert len(ours) == len(theirs)
