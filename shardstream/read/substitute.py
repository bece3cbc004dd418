"""What a rank hands out where all samples of its batch are bad: another sample, so that it stays in step with the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardstream.errors import SampleError
from shardstream.format.group import read_sample
from shardstream.read.permute import derive_key
from shardstream.read.planned import Chain
from shardstream.read.share import Share
from shardstream.read.skip import Skips
from shardstream.storage.joined import AnyCatalog

_log = logging.getLogger(__name__)
_ATTEMPTS = 16
_SUBSTITUTE = 5


def substitute(
    catalog: AnyCatalog, chain: Chain, share: Share, step: int, skips: Skips
) -> Sequence[Any]:
    """Return one good sample of the epoch in place of a whole bad batch.

    Which one depends on the seed, the epoch and the place in it alone, so a resume takes the same.

    Args:
        catalog: The dataset.
        chain: The steps that a sample goes through.
        share: The rank's steps.
        step: Which of them is bad.
        skips: Counts what is bad on the way, too.

    Raises:
        SampleError: If no good one was found.
    """
    order, place = share.plan.order, share.consumed_after(step)
    for attempt in range(_ATTEMPTS):
        key = derive_key(order.seed, share.plan.epoch, share.rank, place, attempt, _SUBSTITUTE)
        number = key % len(catalog)
        try:
            sample = _read(catalog, number)
        except Exception as error:  # noqa: BLE001  (the skip policy decides)
            skips.take(error, number=number)
            continue
        items, _ = chain([sample], [number])
        if items:
            _log.warning(
                "all samples of step %s are bad: sample %s stands in for them", step, number
            )
            return items
    raise SampleError(
        f"all samples of a batch are bad, and so are {_ATTEMPTS} others: this rank would fall out of step with the others; "
        "mend the data"
    )


def _read(catalog: AnyCatalog, number: int) -> dict[str, Any]:
    shards, starts, ends = catalog.extents(np.array([number], dtype=np.int64))
    shard, start, end = int(shards[0]), int(starts[0]), int(ends[0])
    data = bytes(catalog.fetch(shard, start, end))
    return read_sample(data, start, start, end, catalog.url_of(shard))
