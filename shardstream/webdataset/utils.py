"""Helpers of pipelines: the base class of stages, repetition, environment variables and process numbers."""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info
from webdataset.utils import PipelineStage, guess_batchsize, identity, is_iterable

from shardstream.distributed import Placement
from shardstream.errors import OptionError

enforce_security = False
"""True also refuses local files and GOPEN_REWRITE, as ``WDS_SECURE=1`` does. Commands and pickles are refused either way."""


def make_seed(*args: Any) -> int:
    """Mix values into a seed from 0 to 2**31 - 1, the same in every process."""
    seed = 0
    for arg in args:
        # Python salts the hash of text and bytes by process
        number = hash(arg) if isinstance(arg, int) else zlib.crc32(repr(arg).encode())
        seed = (seed * 31 + number) & 0x7FFFFFFF
    return seed


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that differs between all workers of all ranks, while a rank has under 1000."""
    rank, _, worker, _ = pytorch_worker_info(group)
    return rank * 1000 + worker


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[[Any], int] = guess_batchsize,
) -> Iterator[Any]:
    """Yield the items of a source again and again, up to a number of epochs, batches or samples."""
    epochs = batches = samples = 0
    while nepochs is None or epochs < nepochs:
        count = 0
        for batch in source:
            yield batch
            count += 1
            batches += 1
            if nbatches is not None and batches >= nbatches:
                return
            if nsamples is not None:
                samples += batchsize(batch)
                if samples >= nsamples:
                    return
        if not count:
            warnings.warn("the source to repeat is empty", stacklevel=2)
            return
        epochs += 1


_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NESTED = 10  # variables whose values name variables

_inherited: list[Placement] = []
"""Placement of the main process, in a spawned worker, which has no process group to detect it."""


def variable(name: str) -> str | None:
    """Return an environment variable, None if it is not set; no other module of the room reads them."""
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


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
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
