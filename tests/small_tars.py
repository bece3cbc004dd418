"""Write small tars for the tests of packing and of the command line."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from shardstream.format import END_OF_ARCHIVE, encode_member


def tar_bytes(members: list[tuple[str, bytes]], *, end: bytes = END_OF_ARCHIVE) -> bytes:
    """Return a tar as shardstream writes it."""
    return (
        b"".join(bytes(part) for name, data in members for part in encode_member(name, data)) + end
    )


def samples(first: int, count: int, *, size: int = 700) -> list[tuple[str, bytes]]:
    """Return members of samples 0000, 0001, …: a bin of ``size`` bytes, and a cls."""
    numbers = range(first, first + count)
    return [
        member
        for number in numbers
        for member in (
            (f"{number:04d}.bin", bytes([number % 256]) * size),
            (f"{number:04d}.cls", str(number % 10).encode()),
        )
    ]


def make_dataset(folder: Path, *, shards: int = 3, count: int = 4) -> list[Path]:
    """Write tars of ``count`` samples each, without indexes and manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"train-{shard:06d}.tar" for shard in range(shards)]
    for number, path in enumerate(paths):
        path.write_bytes(tar_bytes(samples(number * count, count)))
    return paths


def foreign_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Write a tar with Python's tarfile, with a folder entry."""
    with tarfile.open(path, "w") as tar:
        folder = tarfile.TarInfo("stuff/")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def png_bytes() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "png")
    return stream.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
