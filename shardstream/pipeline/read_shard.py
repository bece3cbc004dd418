"""Read one shard from start to end, outside a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, BinaryIO

from shardstream.format import ForwardReader, Sample, TarDiagnostics, iter_samples, open_by_content
from shardstream.storage import Storage

_READ_BYTES = 4 << 20


def read_shard(
    shard: str | os.PathLike[str] | BinaryIO, *, storage_options: Mapping[str, Any] | None = None
) -> Iterator[Sample]:
    """Yield the samples of one tar, plain or compressed with gzip or zstd, with fields as bytes.

    Args:
        shard: URL or path, or a binary stream from its current position, which stays open.
        storage_options: As in `ShardDataset`.

    Raises:
        StorageError: If it cannot be read.
        ShardError: If it is damaged or cut.
        SampleError: If its members do not form samples.
    """
    if isinstance(shard, str | os.PathLike):
        url = os.fspath(shard)
        opened: Any = Storage(storage_options).open(url)
    else:
        url = str(getattr(shard, "name", ""))
        opened = nullcontext(shard)
    diagnostics = TarDiagnostics()
    with opened as file, open_by_content(file, shard=url) as (stream, size):
        read = ForwardReader(stream, chunk_bytes=_READ_BYTES)
        for _, sample in iter_samples(read, end=size, shard=url, diagnostics=diagnostics):
            yield sample
    diagnostics.warn(url)
