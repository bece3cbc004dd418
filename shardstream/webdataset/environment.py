"""Environment variables and process numbers that WebDataset's pipelines depend on."""

from __future__ import annotations

import os
import re
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info

from shardstream.distributed import Placement
from shardstream.errors import OptionError

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NESTED = 10  # variables whose values name variables

_inherited: list[Placement] = []
"""Placement of the main process, in a spawned worker, which has no process group to detect it."""


def variable(name: str) -> str | None:
    """Return an environment variable, None if it is not set."""
    return os.environ.get(name)


def substitute_variables(url: str) -> str:
    """Replace each ``${X}`` in a URL by the environment variable ``WDS_X``.

    Raises:
        OptionError: If a variable is not set.
    """
    for _ in range(_NESTED):
        replaced = _VARIABLE.sub(_value_of, url)
        if replaced == url:
            break
        url = replaced
    return url


def _value_of(match: re.Match[str]) -> str:
    name = f"WDS_{match[1]}"
    value = variable(name)
    if value is None:
        raise OptionError(f"the URL names {match[0]}, but {name} is not set; export {name}")
    return value


def main_placement() -> Placement | None:
    """Return the placement to pickle for a worker that is being spawned; None otherwise."""
    return Placement.detect() if get_spawning_popen() is not None else None


def inherit_placement(placement: Placement | None) -> None:
    """Remember the placement of the main process in a spawned worker."""
    if placement is not None:
        _inherited[:] = [placement]


def worker_numbers(group: Any = None) -> tuple[int, int, int, int]:
    """Return rank, world size, number of the loader worker, and number of workers.

    The worker is torch's; ``WORKER`` and ``NUM_WORKERS`` come first.

    Args:
        group: Process group whose rank counts; None is the whole job.
    """
    if group is not None and distributed.is_available() and distributed.is_initialized():
        placement = Placement(distributed.get_rank(group), distributed.get_world_size(group))
    else:
        placement = Placement.detect()
        if placement.world_size == 1 and _inherited and get_worker_info() is not None:
            placement = _inherited[0]
    worker, workers = variable("WORKER"), variable("NUM_WORKERS")
    if worker is not None and workers is not None:
        return placement.rank, placement.world_size, int(worker), int(workers)
    info = get_worker_info()
    if info is None:
        return placement.rank, placement.world_size, 0, 1
    return placement.rank, placement.world_size, info.id, info.num_workers
