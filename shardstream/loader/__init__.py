"""Torch datasets and the loader: workers, batches, state.

A batch passes through these files:

    dataset, map_dataset, object_dataset, mix_dataset, join_dataset   public datasets; their methods are in ``steps``
    loader, option_checks           the loader in the main process; checks of its options
    epoch_positions, lightning      where an iteration of a loader begins, and what its state holds
    epoch_counter, epoch_chain      epochs of plain loaders and loops, and of datasets chained from one
    rank_consistency                compare the order of samples between ranks
    worker, replacement_samples     make the batches of one rank in a worker process
    decoder_tables                  names that ``decode`` gets -> decoders of fields
    seeded_function                 global generators with the randomness of a sample
    collation                       samples -> tensors
    worker_pool, worker_process     start workers, send them positions, receive their batches
    serialize, shared_memory        send a batch from a worker to the main process
    pinned_memory, device_transfer  pin batches, and copy them to a device ahead of their use; ``nested_batches`` finds their tensors
    worker_errors                   report a worker that died
    iterator, stats                 position and timing of an epoch
    notebook_view                   datasets, samples and batches in notebooks
    worker_timings, stats_advice    time by phase; what limits an epoch, and what to change
    trial                           measure a dataset with different numbers of workers
    checkpoint                      save and load training checkpoints

``accelerate`` adapts a loader to Hugging Face Accelerate's ``prepare``.
"""

from typing import TYPE_CHECKING, Any

from shardstream.loader.checkpoint import load_checkpoint, save_checkpoint
from shardstream.loader.collation import (
    collate,
    load_safetensors,
    load_tensors,
    to_tensor,
)
from shardstream.loader.dataset import (
    CatalogDataset,
    ShardDataset,
    StreamDataset,
    current_worker_info,
)
from shardstream.loader.decode_sample import decode_sample
from shardstream.loader.device_transfer import (
    DeviceCopies,
    check_same_device,
    prefetch,
)
from shardstream.loader.iterator import WorkerIterator
from shardstream.loader.join_dataset import join
from shardstream.loader.loader import ShardLoader
from shardstream.loader.map_dataset import ShardMapDataset
from shardstream.loader.mix_dataset import mix
from shardstream.loader.notebook_view import show
from shardstream.loader.object_dataset import ObjectDataset, ObjectMapDataset
from shardstream.loader.option_checks import warn_of_lanes
from shardstream.loader.pinned_memory import PinnedMemory, open_pinned_memory
from shardstream.loader.rank_consistency import EpochAgreement, compare_in_store
from shardstream.loader.serialize import MAX_TENSOR_BYTES
from shardstream.loader.shared_memory import RingBuffer, RingMessage, open_rings
from shardstream.loader.trial import Trial, fewest_workers, run_trials

if TYPE_CHECKING:
    from shardstream.loader.accelerate import check_data_parallel

__all__ = [
    "MAX_TENSOR_BYTES",
    "CatalogDataset",
    "DeviceCopies",
    "EpochAgreement",
    "ObjectDataset",
    "ObjectMapDataset",
    "PinnedMemory",
    "RingBuffer",
    "RingMessage",
    "ShardDataset",
    "ShardLoader",
    "ShardMapDataset",
    "StreamDataset",
    "Trial",
    "WorkerIterator",
    "check_data_parallel",
    "check_same_device",
    "collate",
    "compare_in_store",
    "current_worker_info",
    "decode_sample",
    "fewest_workers",
    "join",
    "load_checkpoint",
    "load_safetensors",
    "load_tensors",
    "mix",
    "open_pinned_memory",
    "open_rings",
    "prefetch",
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
