"""Row `scale`: from the URL of up to 10^6 shards to the first batch, and the memory after 300 batches.

Only the manifest takes space; the bytes of tars and indexes are computed when they are read.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem

from benchmarks.case import Case, Result
from benchmarks.processes import memory_bytes
from shardstream.format import (
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    encode_index,
    encode_manifest_files,
    encode_member,
)
from shardstream.pipeline import ReadOptions

SAMPLES = 10_000
"""Samples of each shard."""
_SAMPLE_BYTES = 1024  # a header and a padded body
_BATCHES = 300


def measure(case: Case) -> Result:
    """Time the first shuffled batch of a dataset of ``case.samples`` samples, without worker processes.

    "open_s" is the part of opening the dataset, "pickled_bytes" what a spawned worker gets, "requests" and "read_bytes" what was read up to
    the first batch, "held_bytes" the memory taken by 300 batches: what a worker holds besides its imports.
    """
    from shardstream import ShardDataset, ShardLoader  # noqa: PLC0415  (the import is not timed here)

    shards = case.samples // SAMPLES
    writer = get_context("fork").Process(target=write_manifest, args=(Path(case.cache), shards))
    writer.start()  # in a process of its own: its memory is not that of a reader
    writer.join()
    store = ManyShards(case.cache)
    base_bytes = memory_bytes(os.getpid())["anon"]
    begin = time.perf_counter()
    dataset = ShardDataset("many://many/", read=ReadOptions(filesystem=store), shuffle=True, seed=0)
    open_s = time.perf_counter() - begin
    pickled_bytes = len(pickle.dumps(dataset))
    begin = time.perf_counter()
    batches = iter(ShardLoader(dataset, batch_size=case.batch_size))
    keys = set(next(batches)["__key__"])
    first_s = time.perf_counter() - begin
    requests, read_bytes = len(store.requests), sum(size for _, size in store.requests)
    for _ in range(_BATCHES - 1):
        keys |= set(next(batches)["__key__"])
    expected = _BATCHES * case.batch_size
    return Result(
        seconds=open_s + first_s,
        samples=0,  # so that the time is compared
        wrong="" if len(keys) == expected else f"{len(keys)} samples instead of {expected}",
        extra={
            "open_s": open_s,
            "pickled_bytes": pickled_bytes,
            "requests": requests,
            "read_bytes": read_bytes,
            "held_bytes": memory_bytes(os.getpid())["anon"] - base_bytes,
        },
    )


def write_manifest(folder: Path, shards: int) -> None:
    """Write the manifest of a dataset with that many shards to a local folder."""
    filesize = SAMPLES * _SAMPLE_BYTES + 1024
    listed = [
        ShardInfo(
            url=f"{number:07d}.tar", nsamples=SAMPLES, filesize=filesize, sha256=f"{number:064x}"
        )
        for number in range(shards)
    ]
    manifest = Manifest(shards=listed, name="many", fields={"txt": SAMPLES * shards})
    for name, data in encode_manifest_files(manifest).items():
        (folder / name).write_bytes(data)


class ManyShards(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The store: ``many://many/``. Each sample has the key of its shard and number, and one field ``txt``.

    Args:
        folder: Local folder with the manifest (see `write_manifest`).
    """

    protocol = "many"
    cachable = False

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder=folder, **options)
        self._folder = Path(folder)
        self.requests: list[tuple[str, int]] = []
        """Name and bytes of each file or range that this process read."""

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the size of a file."""
        name = path.rsplit("/", 1)[-1]
        if name.endswith(".tar"):
            size = SAMPLES * _SAMPLE_BYTES + 1024
        elif name.endswith(".idx"):
            size = 8 * (SAMPLES + 1)
        else:
            size = (self._folder / name).stat().st_size
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the folder; asked for only where the manifest lists all shards."""
        names = [file.name for file in self._folder.iterdir()]
        shards = json.loads((self._folder / MANIFEST_NAME).read_text())["shardlist"]
        names += [f"{shard['url']}{suffix}" for shard in shards for suffix in ("", ".idx")]
        paths = [f"{path.rstrip('/')}/{name}" for name in names]
        return [self.info(one) for one in paths] if detail else paths

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the bytes of a range."""
        name = path.rsplit("/", 1)[-1]
        start = start or 0
        end = self.info(path)["size"] if end is None else end
        if name.endswith(".tar"):
            data = self._tar(int(name[:-4]), start, end)
        elif name.endswith(".idx"):
            data = encode_index(np.arange(SAMPLES + 1) * _SAMPLE_BYTES)[start:end]
        else:
            with open(self._folder / name, "rb") as file:
                file.seek(start)
                data = file.read(end - start)
        self.requests.append((name, len(data)))
        return data

    def _tar(self, shard: int, start: int, end: int) -> bytes:
        first, last = start // _SAMPLE_BYTES, -(-end // _SAMPLE_BYTES)
        samples = [
            b"".join(encode_member(f"{shard:07d}_{number:05d}.txt", b"text"))
            for number in range(first, last)
        ]
        return b"".join(samples)[start - first * _SAMPLE_BYTES : end - first * _SAMPLE_BYTES]
