"""Source without an index: whole shards, each read sequentially."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream.catalog import check_manifests
from shardstream.distributed import WorkerInfo
from shardstream.errors import ChangedError
from shardstream.format import (
    ForwardReader,
    Sample,
    ShardInfo,
    TarDiagnostics,
    checksum,
    fingerprint,
    iter_samples,
    open_decompressed,
)
from shardstream.order import derive_key, permute
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.stage import Context, Run, Source, State
from shardstream.storage import (
    FileVersions,
    LazyShards,
    LocatedShards,
    RangeStream,
    SeenManifest,
    Storage,
    is_compressed,
    refuse_deleted,
)

_SHARD_ORDER = 4
STREAM_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSource(Source):
    """A dataset that is partitioned by whole shards.

    Args:
        shards: Shards in the order of the dataset.
        storage: Storage that holds the shards.
        files: Versions of the local shards when the dataset was opened.
        manifests: URL of each manifest that lists the shards -> SHA-256 of its bytes.
        shuffle: Permute the shards; a later stage shuffles samples.
        seed: Seed of the order.
    """

    shards: Sequence[ShardInfo]
    storage: Storage
    files: FileVersions
    manifests: Mapping[str, SeenManifest]
    shuffle: bool = False
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""
        shards = self.shards
        return (
            shards.manifest.fingerprint if isinstance(shards, LazyShards) else fingerprint(shards)
        )

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits that change with the bytes of the shards; None without checksums."""
        shards = self.shards
        return [shards.manifest.checksum if isinstance(shards, LazyShards) else checksum(shards)]

    def place(self) -> tuple[Storage, str]:
        """Return the storage, and the URL of the first shard."""
        return self.storage, self.shards[0].url if self.shards else ""

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Start reading the shards of one loader worker."""
        order = np.arange(len(self.shards))
        if self.shuffle and len(order):
            order = permute(order, len(order), derive_key(self.seed, context.epoch, _SHARD_ORDER))
        return SequentialRun(
            self,
            order[worker_info.global_worker :: worker_info.num_global_workers].tolist(),
            context.skips,
        )


def open_sequential_source(
    located: LocatedShards, storage: Storage, *, shuffle: bool, seed: int
) -> SequentialSource:
    """Return a source of shards, and record the current versions of local ones."""
    refuse_deleted(located, "reading shards from start to end")
    if isinstance(located.shards, LazyShards):
        files = FileVersions(located.shards.local_path)
    else:
        files = FileVersions([storage.local_path(shard.url) for shard in located.shards])
    return SequentialSource(
        shards=located.shards,
        storage=storage,
        files=files,
        manifests=located.manifests,
        shuffle=shuffle,
        seed=seed,
    )


class SequentialRun:
    """Raw samples of a list of shards, one shard after the other."""

    def __init__(self, source: SequentialSource, shards: list[int], skips: SkipTracker) -> None:
        self.number = -1
        self._source = source
        self._shards = shards
        self._skips = skips
        self._place = 0  # index in the list of shards
        self._taken = 0  # samples taken of that shard
        self._offset = 0  # byte offset after the last of them
        self._samples: Generator[Sample, None, None] | None = None

    def __iter__(self) -> SequentialRun:
        return self

    def __next__(self) -> Sample:
        if self._samples is None:
            self._samples = self._read()
        return next(self._samples)

    def state_dict(self) -> State:
        """Return the shard, the samples taken of it and the byte offset after them."""
        return {"shard": self._place, "taken": self._taken, "offset": self._offset}

    def load_state_dict(self, state: State) -> None:
        """Move to a shard and an offset in it."""
        self.close()
        self._place, self._taken, self._offset = state["shard"], state["taken"], state["offset"]

    def close(self) -> None:
        """Close the shard that is open."""
        if self._samples is not None:
            self._samples.close()
        self._samples = None

    def _read(self) -> Generator[Sample, None, None]:
        while self._place < len(self._shards):
            shard = self._shards[self._place]
            info = self._source.shards[shard]
            error: Exception | None = None
            self._source.files.version(shard)
            try:
                yield from self._read_shard(shard, info)
            except Exception as caught:  # noqa: BLE001  (the skip policy decides; the rest of the shard is lost)
                error = caught
            # A file that is overwritten during the read looks damaged or ends early: report the change instead.
            self._source.files.check([shard])
            if error is not None:
                self._skips.skip_or_raise(error)
            self._place, self._taken, self._offset = self._place + 1, 0, 0
        source = self._source
        are_lazy = isinstance(source.shards, LazyShards)
        check_manifests(source.manifests, source.shards, source.storage, are_lazy=are_lazy)

    def _read_shard(self, shard: int, info: ShardInfo) -> Generator[Sample, None, None]:
        compressed = is_compressed(info.url)
        start, skip_left = (0, self._taken) if compressed else (self._offset, 0)
        with self._open(info) as raw, open_decompressed(raw, shard=info.url) as stream:
            read = ForwardReader(stream, chunk_bytes=STREAM_READ_BYTES)
            end = None if compressed else self._size(info)
            diagnostics = TarDiagnostics()
            samples = iter_samples(
                read, start=start, end=end, shard=info.url, diagnostics=diagnostics
            )
            checked = -1
            for group, sample in samples:
                if skip_left:
                    skip_left -= 1
                    continue
                self.number = derive_key(shard, self._taken)
                # New bytes were read since the last check: check again before they are returned.
                if checked != read.position:
                    self._source.files.check([shard])
                    checked = read.position
                self._taken, self._offset = self._taken + 1, group.end
                yield sample
        diagnostics.warn(info.url)
        if skip_left:
            raise ChangedError(
                f"{skip_left} of the {self._taken} samples read before the resume are missing; restart the epoch",
                shard=info.url,
            )

    @contextmanager
    def _open(self, info: ShardInfo) -> Iterator[Any]:
        """Open a local file, or a remote one by ranges, each checked for its length and retried."""
        storage = self._source.storage
        if storage.local_path(info.url) is not None:
            with storage.open(info.url) as stream:
                yield stream
        else:
            yield RangeStream(storage, info.url, self._size(info), min_read_bytes=STREAM_READ_BYTES)

    def _size(self, info: ShardInfo) -> int:
        return self._source.storage.info(info.url).size if info.filesize is None else info.filesize
