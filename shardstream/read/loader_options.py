"""What a `ShardLoader` refuses, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardstream.errors import OptionError
from shardstream.read.dataset import StreamDataset
from shardstream.read.planned import Options


def check_options(
    dataset: StreamDataset, batch_size: int | None, shuffle: bool | None, options: Mapping[str, Any]
) -> None:
    """Refuse what a loader over a plan cannot do.

    Args:
        dataset: What is to be read.
        batch_size: Items of a batch; None for single items.
        shuffle: What the caller thinks of the order; None for nothing.
        options: All other arguments of the loader.

    Raises:
        OptionError: Saying what to do instead.
    """
    if batch_size is None and options["drop_last"]:
        raise OptionError("drop_last needs a batch_size: single items have no last batch")
    if not isinstance(dataset, StreamDataset):
        raise OptionError(
            f"a ShardLoader reads a ShardDataset, not {type(dataset).__name__}; use torch's DataLoader for that"
        )
    if shuffle is not None and shuffle != dataset.pipeline.shuffle:
        raise OptionError(
            f"the order belongs to the dataset: say ShardDataset(..., shuffle={shuffle}) there, nothing here"
        )
    misplaced = sorted({field.name for field in fields(Options)} & set(options))
    if misplaced:
        raise OptionError(
            f"{', '.join(misplaced)}: the order belongs to the dataset, say it in ShardDataset(...)"
        )
    if options.get("sampler") is not None or options.get("batch_sampler") is not None:
        raise OptionError("a stream has no sampler: the dataset's plan splits and shuffles")
    if not options.get("in_order", True):
        raise OptionError("in_order=False: a position counts batches in order; leave it at True")
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, not {batch_size}")
    source = dataset.pipeline.planned
    microbatch = None if source is None else source.options.microbatch
    if batch_size is not None and microbatch is not None and batch_size % microbatch:
        raise OptionError(
            f"batch_size={batch_size} must be a multiple of the dataset's microbatch={microbatch}"
        )
