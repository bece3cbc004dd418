"""Compute the order of samples from sizes, seed and epoch.

No file of this package does I/O or keeps state. The order of an epoch is computed in these steps:

    permutation    permute 0 to n - 1 for any n, without memory
    epoch_plan     batch number -> sample numbers of one epoch
    weighted_plan  weights -> how often each sample comes, and the plan of an epoch of them
    mix_schedule   place in a mix -> dataset that fills it
    partition      steps of an epoch -> steps of each rank and worker
"""

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
