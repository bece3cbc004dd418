"""Compute the order of samples from sizes, seed and epoch."""

from shardstream.order.balanced_plan import BalancedEpochPlan, StepBalance
from shardstream.order.cost_batches import BatchLimits, CostBatches
from shardstream.order.epoch_plan import (
    CopyPlan,
    EpochOrder,
    EpochPlan,
    Places,
    default_block,
    default_window,
)
from shardstream.order.mix_schedule import MixSchedule, SteppedMixSchedule
from shardstream.order.node_plan import NodeEpochPlan
from shardstream.order.packed_rows import BestFitRows, ConcatRows, Long
from shardstream.order.partition import (
    EpochSteps,
    PartitionConfig,
    RankPartition,
    Remainder,
    StepPlaces,
    WorkerSteps,
    find_even_lane_counts,
    uneven_effect,
)
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute
from shardstream.order.row_plan import RowParts, RowPlan
from shardstream.order.weighted_plan import WeightedDraw, WeightedEpochPlan, draw_by_weight
from shardstream.order.window_rows import WindowRows

__all__ = [
    "BalancedEpochPlan",
    "BatchLimits",
    "BestFitRows",
    "ConcatRows",
    "CopyPlan",
    "CostBatches",
    "EpochOrder",
    "EpochPlan",
    "EpochSteps",
    "Ints",
    "Long",
    "MixSchedule",
    "NodeEpochPlan",
    "PartitionConfig",
    "Places",
    "RankPartition",
    "Remainder",
    "RowParts",
    "RowPlan",
    "StepBalance",
    "StepPlaces",
    "SteppedMixSchedule",
    "WeightedDraw",
    "WeightedEpochPlan",
    "WindowRows",
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
