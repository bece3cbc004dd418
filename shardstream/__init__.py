"""Pack samples into WebDataset tar shards on S3 or any fsspec file system, and stream them into PyTorch.

The packages, lowest first: `format` defines the bytes of shards and indexes, `order` the order of samples; `storage` reads bytes
by URL, `catalog` locates the shard and byte range of each sample, `fetch` prefetches samples; `pipeline` turns them into batches,
`loader` runs the pipeline in torch's workers. `packing` turns sources into shards; `cli` is the command line.
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
from shardstream.process_memory import pause_gc_for_import

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

__all__ = [
    "AccessDeniedError",
    "BadSample",
    "CacheWarning",
    "Catalog",
    "CatalogDataset",
    "ChangedError",
    "ClassesWarning",
    "DecodeError",
    "ImageWarning",
    "IndexMismatchError",
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

# Imported on first use: torch takes over a second to import, and the command line does not need it.
_LAZY = {
    "BadSample": "pipeline.bad_sample_report",
    "Catalog": "catalog.base",
    "CatalogDataset": "loader.dataset",
    "ObjectDataset": "loader.object_dataset",
    "ObjectMapDataset": "loader.object_dataset",
    "ReadOptions": "pipeline.indexed_source",
    "ShardDataset": "loader.dataset",
    "ShardLoader": "loader.loader",
    "ShardMapDataset": "loader.map_dataset",
    "SkipBudget": "pipeline.bad_samples",
    "ShardWriter": "packing.shard_writer",
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
    with pause_gc_for_import():
        value = getattr(import_module(f"shardstream.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
