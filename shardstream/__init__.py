"""Pack samples into WebDataset tar shards on S3 or any fsspec file system, and stream them into PyTorch.

The rooms, lowest first: `format` says what the bytes mean, `order` which sample comes when; `storage` reads bytes by URL,
`catalog` knows the shard and byte range of each sample, `fetch` reads samples ahead of their use; `pipeline` turns them into
batches, `loader` runs that in torch's workers. `tasks` runs work on shards in threads or processes, `packing` turns sources
into shards; `cli` is the command line.
"""

from __future__ import annotations

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
    from shardstream.catalog.base import Catalog
    from shardstream.loader.checkpoint import load_checkpoint, save_checkpoint
    from shardstream.loader.collation import collate
    from shardstream.loader.dataset import CatalogDataset, ShardDataset
    from shardstream.loader.loader import ShardLoader
    from shardstream.loader.map_dataset import ShardMapDataset
    from shardstream.loader.mix_dataset import mix
    from shardstream.loader.object_dataset import ObjectDataset, ObjectMapDataset
    from shardstream.packing.indexing import index
    from shardstream.packing.job import pack
    from shardstream.packing.shard_writer import ShardWriter
    from shardstream.packing.verification import verify
    from shardstream.pipeline.bad_sample_report import BadSample
    from shardstream.pipeline.bad_samples import SkipBudget
    from shardstream.pipeline.indexed_source import ReadOptions
    from shardstream.tasks.executor import Executor, FuturesExecutor, LocalExecutor, Task

__all__ = [
    "AccessDeniedError",
    "BadSample",
    "CacheWarning",
    "Catalog",
    "CatalogDataset",
    "ChangedError",
    "ClassesWarning",
    "DecodeError",
    "Executor",
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
    "WorkerError",
    "collate",
    "index",
    "load_checkpoint",
    "mix",
    "pack",
    "save_checkpoint",
    "verify",
]

# Looked up when first used: torch takes over a second to import, and the command line does without.
_LAZY = {
    "BadSample": "pipeline.bad_sample_report",
    "Catalog": "catalog.base",
    "CatalogDataset": "loader.dataset",
    "Executor": "tasks.executor",
    "FuturesExecutor": "tasks.executor",
    "LocalExecutor": "tasks.executor",
    "ObjectDataset": "loader.object_dataset",
    "ObjectMapDataset": "loader.object_dataset",
    "ReadOptions": "pipeline.indexed_source",
    "ShardDataset": "loader.dataset",
    "ShardLoader": "loader.loader",
    "ShardMapDataset": "loader.map_dataset",
    "SkipBudget": "pipeline.bad_samples",
    "ShardWriter": "packing.shard_writer",
    "Task": "tasks.executor",
    "collate": "loader.collation",
    "index": "packing.indexing",
    "load_checkpoint": "loader.checkpoint",
    "mix": "loader.mix_dataset",
    "pack": "packing.job",
    "save_checkpoint": "loader.checkpoint",
    "verify": "packing.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardstream' has no attribute {name!r}")
    value = getattr(import_module(f"shardstream.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
