"""Torch datasets and the loader: workers, batches, state."""

from typing import TYPE_CHECKING, Any

from shardstream.loader.batch_transfer import MAX_TENSOR_BYTES as MAX_TENSOR_BYTES
from shardstream.loader.batch_transfer import RingBuffer as RingBuffer
from shardstream.loader.batch_transfer import RingMessage as RingMessage
from shardstream.loader.checkpoint import find_checkpoints as find_checkpoints
from shardstream.loader.checkpoint import load_checkpoint as load_checkpoint
from shardstream.loader.checkpoint import read_states as read_states
from shardstream.loader.checkpoint import read_values as read_values
from shardstream.loader.checkpoint import save_checkpoint as save_checkpoint
from shardstream.loader.collation import collate as collate
from shardstream.loader.collation import cu_seqlens as cu_seqlens
from shardstream.loader.collation import load_safetensors as load_safetensors
from shardstream.loader.collation import load_tensors as load_tensors
from shardstream.loader.collation import to_tensor as to_tensor
from shardstream.loader.combined_datasets import join as join
from shardstream.loader.combined_datasets import mix as mix
from shardstream.loader.dataset import ShardDataset as ShardDataset
from shardstream.loader.dataset import StreamDataset as StreamDataset
from shardstream.loader.dataset import begin_epoch as begin_epoch
from shardstream.loader.dataset import current_worker_info as current_worker_info
from shardstream.loader.dataset import refuse_own_iteration as refuse_own_iteration
from shardstream.loader.dataset import refuse_placement as refuse_placement
from shardstream.loader.dataset_versions import Follow as Follow
from shardstream.loader.decoding import decode_sample as decode_sample
from shardstream.loader.device_transfer import DeviceCopies as DeviceCopies
from shardstream.loader.device_transfer import PinnedMemory as PinnedMemory
from shardstream.loader.device_transfer import check_same_device as check_same_device
from shardstream.loader.device_transfer import open_pinned_memory as open_pinned_memory
from shardstream.loader.device_transfer import prefetch as prefetch
from shardstream.loader.epochs import Epochs as Epochs
from shardstream.loader.iterator import WorkerIterator as WorkerIterator
from shardstream.loader.loader import ShardLoader as ShardLoader
from shardstream.loader.map_dataset import MapDataset as MapDataset
from shardstream.loader.object_dataset import CatalogDataset as CatalogDataset
from shardstream.loader.object_dataset import ObjectDataset as ObjectDataset
from shardstream.loader.option_checks import warn_of_lanes as warn_of_lanes
from shardstream.loader.past_training import FirstUse as FirstUse
from shardstream.loader.past_training import first_use as first_use
from shardstream.loader.past_training import plan as plan
from shardstream.loader.past_training import replay as replay
from shardstream.loader.progress import Cursor as Cursor
from shardstream.loader.rank_consistency import EpochAgreement as EpochAgreement
from shardstream.loader.rank_consistency import compare_in_store as compare_in_store

if TYPE_CHECKING:
    from shardstream.loader.accelerate import check_data_parallel as check_data_parallel


def __getattr__(name: str) -> Any:
    if name != "check_data_parallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardstream.loader.accelerate import check_data_parallel  # noqa: PLC0415  (Accelerate is an extra)

    return check_data_parallel


from shardstream.loader.stats import LoaderStats as LoaderStats
