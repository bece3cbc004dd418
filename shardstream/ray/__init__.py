"""Read and write datasets with Ray Data, and run shard tasks on Ray. Ray is imported at the first use of a name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError, how_to_install

if TYPE_CHECKING:
    from shardstream.ray.arrow_columns import rows_table as rows_table
    from shardstream.ray.executor import RayExecutor as RayExecutor
    from shardstream.ray.read_dataset import Collate as Collate
    from shardstream.ray.read_dataset import plan_read as plan_read
    from shardstream.ray.read_dataset import read as read
    from shardstream.ray.read_task import cut_by_bytes as cut_by_bytes
    from shardstream.ray.read_task import cut_rows as cut_rows
    from shardstream.ray.write_dataset import write as write

_LAZY = {
    "Collate": "read_dataset",
    "RayExecutor": "executor",
    "cut_by_bytes": "read_task",
    "cut_rows": "read_task",
    "plan_read": "read_dataset",
    "read": "read_dataset",
    "rows_table": "arrow_columns",
    "write": "write_dataset",
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
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
