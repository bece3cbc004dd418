"""Torch datasets and the loader: workers, batches, state."""

from typing import TYPE_CHECKING, Any

from shardstream.loader.checkpoint import (
    find_checkpoints,
    load_checkpoint,
    read_states,
    read_values,
    save_checkpoint,
)
from shardstream.loader.collation import (
    collate,
    cu_seqlens,
    load_safetensors,
    load_tensors,
    to_tensor,
)
from shardstream.loader.cursor import Cursor
from shardstream.loader.dataset import (
    ShardDataset,
    StreamDataset,
    begin_epoch,
    current_worker_info,
    refuse_placement,
)
from shardstream.loader.decode_sample import decode_sample
from shardstream.loader.device_transfer import (
    DeviceCopies,
    check_same_device,
    prefetch,
)
from shardstream.loader.epochs import Epochs
from shardstream.loader.follow import Follow
from shardstream.loader.iterator import WorkerIterator
from shardstream.loader.join_dataset import join
from shardstream.loader.loader import ShardLoader
from shardstream.loader.map_dataset import MapDataset
from shardstream.loader.mix_dataset import mix
from shardstream.loader.notebook_view import show
from shardstream.loader.object_dataset import CatalogDataset, ObjectDataset
from shardstream.loader.option_checks import warn_of_lanes
from shardstream.loader.past_training import FirstUse, first_use, plan, replay
from shardstream.loader.pinned_memory import PinnedMemory, open_pinned_memory
from shardstream.loader.rank_consistency import EpochAgreement, compare_in_store
from shardstream.loader.serialize import MAX_TENSOR_BYTES
from shardstream.loader.shared_memory import RingBuffer, RingMessage
from shardstream.loader.trial import Trial, fewest_workers, run_trials

if TYPE_CHECKING:
    from shardstream.loader.accelerate import check_data_parallel

__all__ = [
    "MAX_TENSOR_BYTES",
    "CatalogDataset",
    "Cursor",
    "DeviceCopies",
    "EpochAgreement",
    "Epochs",
    "FirstUse",
    "Follow",
    "MapDataset",
    "ObjectDataset",
    "PinnedMemory",
    "RingBuffer",
    "RingMessage",
    "ShardDataset",
    "ShardLoader",
    "StreamDataset",
    "Trial",
    "WorkerIterator",
    "begin_epoch",
    "check_data_parallel",
    "check_same_device",
    "collate",
    "compare_in_store",
    "cu_seqlens",
    "current_worker_info",
    "decode_sample",
    "fewest_workers",
    "find_checkpoints",
    "first_use",
    "join",
    "load_checkpoint",
    "load_safetensors",
    "load_tensors",
    "mix",
    "open_pinned_memory",
    "plan",
    "prefetch",
    "read_states",
    "read_values",
    "refuse_placement",
    "replay",
    "run_trials",
    "save_checkpoint",
    "show",
    "to_tensor",
    "warn_of_lanes",
]


def __getattr__(name: str) -> Any:
    if name != "check_data_parallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardstream.loader.accelerate import check_data_parallel  # noqa: PLC0415  (Accelerate is an extra)

    return check_data_parallel
