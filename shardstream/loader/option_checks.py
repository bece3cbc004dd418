"""Checks of `ShardLoader` options: errors and warnings with remedies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from shardstream.errors import OptionError
from shardstream.loader.batch_dataset import BatchDataset, as_is
from shardstream.loader.dataset import StreamDataset
from shardstream.loader.dataset_versions import FollowSource
from shardstream.order import (
    EpochOrder,
    PartitionConfig,
    StepBalance,
    find_even_lane_counts,
    uneven_effect,
)
from shardstream.pipeline import (
    LoaderPosition,
    OrderOptions,
    ReadOptions,
    SkipTracker,
    check_at_least,
)

_DATASET_OPTIONS = {
    name: f"{name}=" for name in ("fields", "order", "read", "seed", "subset", "weights", "where")
} | {
    field.name: f"{argument}=ss.{kind.__name__}({field.name}=)"
    for argument, kind in (("order", OrderOptions), ("read", ReadOptions))
    for field in fields(kind)
}
"""Option of a dataset -> how it is given there."""
WARN_WINDOWS_BYTES = 4_000_000_000  # of windows in one worker


def unwrap_rebuilt(
    dataset: StreamDataset | BatchDataset,
    collate_fn: Callable[[list[Any]], Any] | None,
    options: dict[str, Any],
) -> tuple[StreamDataset, Callable[[list[Any]], Any] | None]:
    """Return the dataset and collate function that a loader was given first, if it is built again.

    Lightning does so for ``overfit_batches``, with the attributes that torch's loader keeps.

    Args:
        dataset: The argument of the loader.
        collate_fn: The argument of the loader.
        options: Of torch's loader; the generator is removed if it is an attribute of the other loader.
    """
    if not isinstance(dataset, BatchDataset):
        return dataset, collate_fn
    if collate_fn is as_is:
        collate_fn = options["generator"] = None
    return dataset.present_dataset, collate_fn or dataset.collate_fn


def check_options(
    dataset: StreamDataset, batch_size: int | None, shuffle: bool | None, options: Mapping[str, Any]
) -> None:
    """Refuse invalid or unsupported options of a loader.

    Args:
        dataset: Dataset to read.
        batch_size: Items of a batch; None for single items.
        shuffle: The loader's argument, compared with the dataset's; None skips the comparison.
        options: All other arguments of the loader.

    Raises:
        OptionError: With the remedy.
    """
    size = 1 if batch_size is None else batch_size
    check_at_least(1, batch_size=size, prefetch_to_device=options["prefetch_to_device"])
    if batch_size is None and options["drop_last"]:
        raise OptionError("drop_last needs a batch_size: single items have no last batch")
    if not isinstance(dataset, StreamDataset):
        raise OptionError(
            f"a ShardLoader reads a ShardDataset, not {type(dataset).__name__}; use torch's DataLoader for that"
        )
    if shuffle is not None and shuffle != dataset.pipeline.source.shuffle:
        raise OptionError(
            f"shuffle={shuffle} differs from the dataset's; pass shuffle={shuffle} to ShardDataset(...), not to the loader"
        )
    misplaced = sorted(_DATASET_OPTIONS.keys() & options.keys())
    if misplaced:
        places = ", ".join(_DATASET_OPTIONS[name] for name in misplaced)
        raise OptionError(
            f"{', '.join(misplaced)}: options of the dataset; pass {places} to ShardDataset(...), not to the loader"
        )
    if options.get("sampler") is not None or options.get("batch_sampler") is not None:
        raise OptionError(
            "a ShardLoader takes no sampler, the dataset splits and shuffles; draw by weight with ShardDataset(weights=), and for "
            "other samplers use dataset.by_number() with torch's DataLoader"
        )
    if not options.get("in_order", True):
        raise OptionError(
            "in_order=False is not supported, a state counts batches in order; leave it at True"
        )
    method, context = options["worker_method"], options.get("multiprocessing_context")
    if method not in ("multiprocessing", "thread") or (method == "thread" and context is not None):
        raise OptionError(
            f"worker_method must be 'multiprocessing', or 'thread' without multiprocessing_context, not {method!r}"
        )
    source = dataset.pipeline.indexed_source
    budget = SkipTracker(dataset.pipeline.on_error).budget
    if budget is not None and budget.refill and (source is None or batch_size is None):
        reason = (
            "with batch_size=None"
            if batch_size is None
            else "with version=Follow()"
            if isinstance(dataset.pipeline.source, FollowSource)
            else "after steps that change counts, or without an index"
        )
        raise OptionError(
            f"SkipBudget(refill=True) has no effect {reason}; set refill=False, or use a batch_size, an index and only steps that "
            "yield one item per item"
        )
    microbatch = None if source is None else source.options.microbatch
    if batch_size is not None and microbatch is not None and batch_size % microbatch:
        raise OptionError(
            f"batch_size={batch_size} must be a multiple of the dataset's microbatch={microbatch}"
        )


def warn_of_lanes(batches: BatchDataset, begin: LoaderPosition) -> None:
    """Warn if several workers must read the same windows, one must hold too many bytes of them, or steps from a position on cost ranks unequally.

    Raises:
        OptionError: If the ranks are not a multiple of the groups whose costs are balanced.
    """
    if batches.indexed_source is None or not batches.indexed_source.shuffle:
        return
    config, order, num_workers = batches.partition_config, batches.order(0), batches.num_readers
    lanes = order.lanes
    lanes_per_step = config.batches_per_step * num_workers
    lane_counts = sorted(set(find_even_lane_counts(config, num_workers, lanes)))
    balance = batches.indexed_source.balance
    if balance is not None and config.world_size > 1:
        _check_balance(balance, config, order, begin)
    elif balance is None and lanes % lanes_per_step:
        warnings.warn(
            f"lanes={lanes} is not a multiple of {config.world_size} ranks x {num_workers} workers x {config.microbatches} "
            f"microbatches: the order stays exact, but {uneven_effect(order, config, num_workers)}. "
            f"Lanes that fit: {str(lane_counts)[1:-1]}",
            UserWarning,
            stacklevel=4,
        )
    if config.world_size > 1 and config.world_size % order.nodes:
        warnings.warn(
            f"{config.world_size} ranks are not a multiple of nodes={order.nodes}: the order stays exact, but ranks read blocks that are in "
            "the caches of other nodes; from the next epoch on, use the number of nodes that you have",
            UserWarning,
            stacklevel=4,
        )
    samples, window = batches.indexed_source.samples, order.window
    held_bytes = min(-(-lanes * config.microbatches // lanes_per_step) * window, len(samples)) * (
        samples.total_bytes // max(1, len(samples))
    )
    if held_bytes > WARN_WINDOWS_BYTES and not samples.is_local:
        warnings.warn(
            f"with lanes={lanes} each of {num_workers} workers holds {held_bytes / 1e9:.1f} GB of windows; "
            f"set a window below {window} samples with order=ss.OrderOptions(window=), or use more workers",
            UserWarning,
            stacklevel=4,
        )


def _check_balance(
    balance: StepBalance, config: PartitionConfig, order: EpochOrder, begin: LoaderPosition
) -> None:
    """Check that the batches of a step of these ranks are batches that cost the same; warn if they are not."""
    given, step = balance.group_size, config.batches_per_step
    if given and step % given and given % step:
        raise OptionError(
            f"balance= has group_size={given}, but {config.world_size} ranks x {config.microbatches} microbatches of a step are not a "
            "multiple of it; choose another one, or another number of ranks"
        )
    if not given and order.lanes % step:
        reason = f"lanes={order.lanes} are not a multiple of the {step} batches of a step"
    elif begin.consumed // order.batch % min(given or order.lanes, step):
        reason = (
            f"the state is in the middle of a step of {step} batches: it was saved on other ranks"
        )
    else:
        return
    warnings.warn(
        f"{reason}, so steps of this epoch have batches of two rounds: the samples are exact, but their costs are not balanced",
        UserWarning,
        stacklevel=5,
    )
