"""What a `ShardLoader` refuses or warns of, and what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardstream.errors import OptionError
from shardstream.loader.dataset import StreamDataset
from shardstream.loader.worker import BatchDataset
from shardstream.order import fitting_lanes
from shardstream.pipeline import ReadOptions, SkipTracker

_READ_OPTIONS = frozenset(field.name for field in fields(ReadOptions))
WARN_WINDOWS_BYTES = 4_000_000_000  # of windows in one worker


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
    if shuffle is not None and shuffle != dataset.pipeline.source.shuffle:
        raise OptionError(
            f"the order belongs to the dataset: say ShardDataset(..., shuffle={shuffle}) there, nothing here"
        )
    misplaced = sorted(_READ_OPTIONS.intersection(options))
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
    source = dataset.pipeline.indexed_source
    budget = SkipTracker(dataset.pipeline.on_error).budget
    if budget is not None and budget.refill and (source is None or batch_size is None):
        why = (
            "with batch_size=None"
            if batch_size is None
            else "after steps that change counts, or without an index"
        )
        raise OptionError(
            f"SkipBudget(refill=True) has no effect {why}; say refill=False, or give a batch_size, an index and only steps that hand out "
            "one item for each"
        )
    microbatch = None if source is None else source.options.microbatch
    if batch_size is not None and microbatch is not None and batch_size % microbatch:
        raise OptionError(
            f"batch_size={batch_size} must be a multiple of the dataset's microbatch={microbatch}"
        )


def warn_of_lanes(batches: BatchDataset, num_workers: int) -> None:
    """Say when several workers must read the same windows, or one must hold very many."""
    if batches.indexed_source is None or not batches.indexed_source.options.shuffle:
        return
    config, lanes = batches.partition_config, batches.indexed_source.options.lanes or batches.lanes
    unit = config.batches_per_step * num_workers
    fitting = sorted(set(fitting_lanes(config, num_workers, lanes)))
    if lanes % unit:
        warnings.warn(
            f"lanes={lanes} is no multiple of {config.world_size} ranks x {num_workers} workers x {config.microbatches} "
            f"microbatches: the order stays exact, but workers read parts of the same windows. Lanes that fit: {str(fitting)[1:-1]}",
            UserWarning,
            stacklevel=4,
        )
    catalog, window = batches.indexed_source.catalog, batches.order(0).window
    held_bytes = min(-(-lanes * config.microbatches // unit) * window, len(catalog)) * (
        catalog.total_bytes // max(1, len(catalog))
    )
    if held_bytes > WARN_WINDOWS_BYTES and not catalog.is_local:
        warnings.warn(
            f"with lanes={lanes} each of {num_workers} workers holds {held_bytes / 1e9:.1f} GB of windows; "
            f"say a smaller window= than {window} samples, or use more workers",
            UserWarning,
            stacklevel=4,
        )
