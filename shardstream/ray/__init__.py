"""Read and write datasets with Ray Data, and run shard tasks on Ray. Ray is imported at the first use of a name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError, how_to_install

if TYPE_CHECKING:
    from shardstream.ray.arrow_columns import rows_table
    from shardstream.ray.collate import Collate
    from shardstream.ray.executor import RayExecutor
    from shardstream.ray.read_dataset import plan_read, read
    from shardstream.ray.read_plan import cut_by_bytes, cut_rows
    from shardstream.ray.write import write

__all__ = [
    "Collate",
    "RayExecutor",
    "cut_by_bytes",
    "cut_rows",
    "plan_read",
    "read",
    "rows_table",
    "write",
]

_LAZY = {
    "Collate": "collate",
    "RayExecutor": "executor",
    "cut_by_bytes": "read_plan",
    "cut_rows": "read_plan",
    "plan_read": "read_dataset",
    "read": "read_dataset",
    "rows_table": "arrow_columns",
    "write": "write",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("ray")
        if name != "RayExecutor":  # Ray Data takes a second to import
            import_module("ray.data")
    except ModuleNotFoundError as error:
        raise OptionError(
            f"ss.ray.{name} needs Ray, and {error.name} is not installed",
            remedy=how_to_install("ray"),
        ) from error
    import_module(f"{__name__}.{_LAZY[name]}")
    # Importing `read` and `write`, also by one another, binds their names to the modules.
    for other, home in _LAZY.items():
        module = sys.modules.get(f"{__name__}.{home}")
        if module is not None and hasattr(module, other):
            globals()[other] = getattr(module, other)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
