"""Pack samples into WebDataset tar shards on S3 or any fsspec file system, and stream them into PyTorch.

The rooms, lowest first: `format` says what the bytes mean, `codecs` the values of fields, `order` which sample comes when; `storage` reads bytes by URL,
`samples` are known by number, `fetch` reads byte ranges ahead of their use, `catalog` knows the shard and byte range of each sample; `pipeline` turns
samples into batches, `loader` does so in worker processes. `tasks` runs work on shards in threads or processes, `packing` turns sources
into shards, and `versions` changes them; `tables` reads those of others in place; `ray` reads with Ray Data; `viewer` shows a dataset in a browser; `cli` is the command line. Each room has a README.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream import errors
from shardstream.distributed import Placement
from shardstream.errors import ShardStreamError

if TYPE_CHECKING:
    from shardstream import catalog, codecs, ray, tasks, versions
    from shardstream.display import show
    from shardstream.loader import (
        ObjectDataset,
        ShardDataset,
        ShardLoader,
        decode_sample,
        first_use,
        join,
        load_checkpoint,
        mix,
        plan,
        replay,
        save_checkpoint,
    )
    from shardstream.packing import (
        ShardWriter,
        compact,
        index,
        merge,
        pack,
        replace_fields,
        reshard,
        verify,
    )
    from shardstream.pipeline import (
        Balance,
        OrderOptions,
        ReadOptions,
        SkipBudget,
        Weights,
        WeightSchedule,
        compare_states,
    )
    from shardstream.versions import delete

__all__ = [
    "Balance",
    "ObjectDataset",
    "OrderOptions",
    "Placement",
    "ReadOptions",
    "ShardDataset",
    "ShardLoader",
    "ShardStreamError",
    "ShardWriter",
    "SkipBudget",
    "WeightSchedule",
    "Weights",
    "catalog",
    "codecs",
    "compact",
    "compare_states",
    "decode_sample",
    "delete",
    "errors",
    "first_use",
    "index",
    "join",
    "load_checkpoint",
    "merge",
    "mix",
    "pack",
    "plan",
    "ray",
    "replace_fields",
    "replay",
    "reshard",
    "save_checkpoint",
    "show",
    "tasks",
    "verify",
    "versions",
]

# Imported on first use: torch takes over a second to import, and the command line does not need it.
_LAZY = {
    "Balance": "pipeline",
    "ObjectDataset": "loader",
    "OrderOptions": "pipeline",
    "ReadOptions": "pipeline",
    "ShardDataset": "loader",
    "ShardLoader": "loader",
    "ShardWriter": "packing",
    "SkipBudget": "pipeline",
    "WeightSchedule": "pipeline",
    "Weights": "pipeline",
    "compact": "packing",
    "compare_states": "pipeline",
    "decode_sample": "loader",
    "delete": "versions",
    "first_use": "loader",
    "index": "packing",
    "join": "loader",
    "load_checkpoint": "loader",
    "merge": "packing",
    "mix": "loader",
    "pack": "packing",
    "replace_fields": "packing",
    "replay": "loader",
    "plan": "loader",
    "reshard": "packing",
    "save_checkpoint": "loader",
    "show": "display",
    "verify": "packing",
}
_ROOMS = frozenset(
    {"catalog", "codecs", "loader", "packing", "pipeline", "ray", "storage", "tasks", "versions"}
)


def __getattr__(name: str) -> Any:
    room = name if name in _ROOMS else _LAZY.get(name)
    if room is None:
        raise AttributeError(f"module 'shardstream' has no attribute {name!r}")
    is_enabled = gc.isenabled()
    gc.disable()  # the import of torch leaves no garbage: a fourteenth of its time is saved
    try:
        module = import_module(f"shardstream.{room}")
        value = module if room == name else getattr(module, name)
    finally:
        if is_enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
