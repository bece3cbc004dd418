"""Helpers of pipelines: the base class of stages, worker numbers, repetition."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from webdataset.utils import PipelineStage, guess_batchsize, identity, is_iterable

from shardstream.webdataset.environment import worker_numbers as pytorch_worker_info

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
