"""Compute the order of samples from sizes, seed and epoch."""

from shardstream.order.epoch_plan import EpochOrder, EpochPlan, default_block, default_window
from shardstream.order.mix_schedule import MixSchedule
from shardstream.order.partition import (
    PartitionConfig,
    RankPartition,
    Remainder,
    WorkerSteps,
    find_even_lane_counts,
    uneven_effect,
)
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute
from shardstream.order.weighted_plan import WeightedDraw, WeightedEpochPlan, draw_by_weight

__all__ = [
    "EpochOrder",
    "EpochPlan",
    "Ints",
    "MixSchedule",
    "PartitionConfig",
    "RankPartition",
    "Remainder",
    "WeightedDraw",
    "WeightedEpochPlan",
    "WorkerSteps",
    "default_block",
    "default_window",
    "derive_key",
    "derive_keys",
    "draw_by_weight",
    "find_even_lane_counts",
    "permute",
    "uneven_effect",
]
