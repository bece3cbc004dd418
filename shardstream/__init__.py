"""Pack samples into WebDataset tar shards on S3 or any fsspec file system, and stream them into PyTorch.

The way of a sample: `write` turns sources into shards (source, encode, writer, roll, job); `format` says what the bytes mean;
`storage` finds and fetches them; `read` turns them into batches (plan, share, source, decode, transform, batch, loader).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream.errors import (
    CacheWarning,
    ChangedError,
    ClassesWarning,
    DecodeError,
    ImageWarning,
    IndexMismatchError,
    ManifestError,
    MissingError,
    NoIndexWarning,
    OptionError,
    RefusedError,
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
from shardstream.memory import importing
from shardstream.placement import Placement

if TYPE_CHECKING:
    from shardstream.read.by_number import ShardMapDataset
    from shardstream.read.checkpoint import load_checkpoint, save_checkpoint
    from shardstream.read.dataset import ShardDataset
    from shardstream.read.loader import ShardLoader
    from shardstream.read.mixed import mix
    from shardstream.read.objects import ObjectDataset, ObjectMapDataset
    from shardstream.read.quarantine import BadSample
    from shardstream.read.skip import SkipBudget
    from shardstream.read.tensors import collate
    from shardstream.write.indexing import index
    from shardstream.write.job import pack
    from shardstream.write.roll import ShardWriter
    from shardstream.write.verify import verify

__all__ = [
    "BadSample",
    "CacheWarning",
    "ChangedError",
    "ClassesWarning",
    "DecodeError",
    "ImageWarning",
    "IndexMismatchError",
    "ManifestError",
    "MissingError",
    "NoIndexWarning",
    "ObjectDataset",
    "ObjectMapDataset",
    "OptionError",
    "Placement",
    "RefusedError",
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

# Looked up when first used: torch takes over a second to import, and the command line does without.
_LAZY = {
    "BadSample": "read.quarantine",
    "ObjectDataset": "read.objects",
    "ObjectMapDataset": "read.objects",
    "ShardDataset": "read.dataset",
    "ShardLoader": "read.loader",
    "ShardMapDataset": "read.by_number",
    "SkipBudget": "read.skip",
    "ShardWriter": "write.roll",
    "collate": "read.tensors",
    "index": "write.indexing",
    "load_checkpoint": "read.checkpoint",
    "mix": "read.mixed",
    "pack": "write.job",
    "save_checkpoint": "read.checkpoint",
    "verify": "write.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shardstream' has no attribute {name!r}")
    with importing():
        return getattr(import_module(f"shardstream.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
