"""Pack samples into WebDataset tar shards on S3 or any fsspec file system, and stream them into PyTorch.

The rooms, lowest first: `format` says what the bytes mean, `codecs` the values of fields, `order` which sample comes when; `storage` reads bytes by URL,
`catalog` knows the shard and byte range of each sample, `fetch` reads samples ahead of their use; `pipeline` turns them into
batches, `loader` runs that in torch's workers. `tasks` runs work on shards in threads or processes, `packing` turns sources
into shards; `ray` reads with Ray Data; `viewer` shows a dataset in a browser; `cli` is the command line.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream.distributed import Placement
from shardstream.errors import (
    AccessDeniedError,
    CacheWarning,
    ChangedError,
    ClassesWarning,
    DecodeError,
    ImageWarning,
    IndexMismatchError,
    ManifestError,
    NoIndexWarning,
    NotFoundError,
    OptionError,
    ReportWarning,
    SampleError,
    ShardError,
    ShardStreamError,
    ShardWarning,
    SkipBudgetError,
    SourceError,
    StateError,
    StorageError,
    UnfinishedError,
    WorkerError,
)

if TYPE_CHECKING:
    from shardstream import ray
    from shardstream.catalog import Catalog, read_columns
    from shardstream.codecs import Audio, AudioDecoder, Video, VideoDecoder
    from shardstream.loader import (
        CatalogDataset,
        ObjectDataset,
        ObjectMapDataset,
        ShardDataset,
        ShardLoader,
        ShardMapDataset,
        collate,
        decode_sample,
        join,
        load_checkpoint,
        mix,
        save_checkpoint,
        show,
    )
    from shardstream.packing import ShardWriter, index, merge, pack, reshard, verify, write_shard
    from shardstream.pipeline import BadSample, ReadOptions, SkipBudget, read_shard
    from shardstream.storage import FieldFile
    from shardstream.tasks import Executor, FuturesExecutor, LocalExecutor, Parts, Task

__all__ = [
    "AccessDeniedError",
    "Audio",
    "AudioDecoder",
    "BadSample",
    "CacheWarning",
    "Catalog",
    "CatalogDataset",
    "ChangedError",
    "ClassesWarning",
    "DecodeError",
    "Executor",
    "FieldFile",
    "FuturesExecutor",
    "ImageWarning",
    "IndexMismatchError",
    "LocalExecutor",
    "ManifestError",
    "NoIndexWarning",
    "NotFoundError",
    "ObjectDataset",
    "ObjectMapDataset",
    "OptionError",
    "Parts",
    "Placement",
    "ReadOptions",
    "ReportWarning",
    "SampleError",
    "ShardDataset",
    "ShardError",
    "ShardLoader",
    "ShardMapDataset",
    "ShardStreamError",
    "ShardWarning",
    "ShardWriter",
    "SkipBudget",
    "SkipBudgetError",
    "SourceError",
    "StateError",
    "StorageError",
    "Task",
    "UnfinishedError",
    "Video",
    "VideoDecoder",
    "WorkerError",
    "collate",
    "decode_sample",
    "index",
    "join",
    "load_checkpoint",
    "merge",
    "mix",
    "pack",
    "ray",
    "read_columns",
    "read_shard",
    "reshard",
    "save_checkpoint",
    "show",
    "verify",
    "write_shard",
]

# Imported on first use: torch takes over a second to import, and the command line does not need it.
_LAZY = {
    "Audio": "codecs",
    "AudioDecoder": "codecs",
    "BadSample": "pipeline",
    "Catalog": "catalog",
    "CatalogDataset": "loader",
    "FieldFile": "storage",
    "Executor": "tasks",
    "FuturesExecutor": "tasks",
    "LocalExecutor": "tasks",
    "ObjectDataset": "loader",
    "ObjectMapDataset": "loader",
    "Parts": "tasks",
    "ReadOptions": "pipeline",
    "ShardDataset": "loader",
    "ShardLoader": "loader",
    "ShardMapDataset": "loader",
    "SkipBudget": "pipeline",
    "ShardWriter": "packing",
    "Video": "codecs",
    "VideoDecoder": "codecs",
    "Task": "tasks",
    "collate": "loader",
    "decode_sample": "loader",
    "index": "packing",
    "load_checkpoint": "loader",
    "merge": "packing",
    "join": "loader",
    "mix": "loader",
    "pack": "packing",
    "read_columns": "catalog",
    "read_shard": "pipeline",
    "reshard": "packing",
    "save_checkpoint": "loader",
    "show": "loader",
    "verify": "packing",
    "write_shard": "packing",
}


_LAZY_ROOMS = ("ray",)


def __getattr__(name: str) -> Any:
    if name in _LAZY_ROOMS:
        return import_module(f"shardstream.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'shardstream' has no attribute {name!r}")
    is_enabled = gc.isenabled()
    gc.disable()  # the import of torch leaves no garbage: a fourteenth of its time is saved
    try:
        value = getattr(import_module(f"shardstream.{_LAZY[name]}"), name)
    finally:
        if is_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
