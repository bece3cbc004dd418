"""Read datasets with Ray Data, and run shard tasks on Ray. Ray is imported at the first use of a name.

A row passes through these files:

    read_dataset     the public function: check the arguments, plan, build a `ray.data.Dataset`
    read_plan        dataset size -> row ranges, one for each read task; pure arithmetic
    datasource       a Ray ``Datasource`` whose read tasks are row ranges
    read_task        read the rows of a range in a Ray worker; blocks of at most 8 MiB
    arrow_columns    samples -> Arrow table
    collate          batch of a Ray dataset -> tensors and lists

``executor`` runs tasks of `ss.reshard`, `ss.index` and `ss.verify` on a cluster. In this folder ``ray`` is Ray itself: imports are absolute.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError

if TYPE_CHECKING:
    from shardstream.ray.arrow_columns import rows_table
    from shardstream.ray.collate import Collate
    from shardstream.ray.executor import RayExecutor
    from shardstream.ray.read_dataset import plan_read, read
    from shardstream.ray.read_plan import cut_by_bytes, cut_rows

__all__ = ["Collate", "RayExecutor", "cut_by_bytes", "cut_rows", "plan_read", "read", "rows_table"]

_LAZY = {
    "Collate": "collate",
    "RayExecutor": "executor",
    "cut_by_bytes": "read_plan",
    "cut_rows": "read_plan",
    "plan_read": "read_dataset",
    "read": "read_dataset",
    "rows_table": "arrow_columns",
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
            remedy='run: pip install "shardstream[ray]"',
        ) from error
    value = getattr(import_module(f"shardstream.ray.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
