"""Detect the rank and world size of this process; the only module that reads the environment for them.

The rank is detected once, in the main process, and pickled with the dataset: a spawned loader worker has no process group, so
detection there would give rank 0 of 1.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardstream.errors import OptionError

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Numbers of processes that mpirun and srun have started, which may or may not be ranks of one training; the last one may be that of the mpirun itself."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank and number of processes of the job.

    Args:
        rank: This process, from 0.
        world_size: Processes in the job, at least 1.

    Raises:
        OptionError: If the rank is not below the world size.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OptionError(
                f"rank {self.rank} of world size {self.world_size} does not exist; ranks are 0 to world_size - 1"
            )

    @classmethod
    def detect(cls) -> Placement:
        """Detect the placement from the job's launcher.

        Sources in order: an initialised ``torch.distributed``, Ray Train, ``RANK`` and ``WORLD_SIZE`` (torchrun; on the first
        node also ``LOCAL_RANK`` and ``WORLD_SIZE``, of Lightning); else rank 0 of 1. Also 0 of 1 inside a Hugging Face Accelerate loader that splits the samples over the ranks itself.

        Raises:
            OptionError: If only one of the two variables is set, or they are not numbers.
        """
        if accelerate_loader() is not None:
            return cls()
        return placement_of_torch() or _from_ray_train() or _from_variables() or cls()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One loader worker of one rank.

    Args:
        placement: The rank that the worker serves.
        worker: Number of the worker in its rank, from 0.
        num_workers: Workers of the rank, at least 1 (a loader without workers reads as one).
    """

    placement: Placement
    worker: int = 0
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.num_workers:
            raise OptionError(f"worker {self.worker} of {self.num_workers} does not exist")

    @property
    def global_worker(self) -> int:
        """Number of this worker in the whole job, from 0."""
        return self.placement.rank * self.num_workers + self.worker

    @property
    def num_global_workers(self) -> int:
        """Workers of the whole job."""
        return self.placement.world_size * self.num_workers


def accelerate_loader() -> str | None:
    """Return the class of a calling Accelerate loader that splits samples over ranks; else None.

    Accelerate (and with it the Hugging Face Trainer) splits an ``IterableDataset`` over the ranks itself without informing the
    dataset: if the dataset split as well, all but one of its parts would be lost. Only the call stack shows the caller. A forked
    worker inherits the stack of its parent; a spawned one gets its placement when it is pickled, below the same call.
    """
    if "accelerate.data_loader" not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            loader = frame.f_locals.get("self")
            if _splits_samples(loader):
                return type(loader).__name__
        frame = frame.f_back
    return None


def is_called_by_accelerate() -> bool:
    """Return whether a module of Accelerate has called the caller of this function."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("accelerate.")


def _splits_samples(loader: Any) -> bool:
    """Return whether an object of ``accelerate.data_loader`` decides which samples a rank gets."""
    accelerate = sys.modules["accelerate.data_loader"]
    if isinstance(loader, accelerate.IterableDatasetShard):
        return True
    # type(), not isinstance(): Accelerate's loaders override __class__ with torch's class.
    if issubclass(type(loader), accelerate.DataLoaderDispatcher):
        return bool(accelerate.PartialState().num_processes > 1)
    if not issubclass(type(loader), accelerate.DataLoaderAdapter):
        return False
    # While spawned workers start, only the loader is on the stack. One made for a single process splits nothing, unless all
    # ranks share a model (tensor or context parallelism) and need the same samples.
    state = sys.modules["accelerate.state"].AcceleratorState
    config = state._shared_state.get("parallelism_config")
    shares_samples = config is not None and config.non_data_parallel_size > 1
    dataset = getattr(loader, "dataset", None)
    return shares_samples or isinstance(dataset, accelerate.IterableDatasetShard)


def is_one_of_several() -> bool:
    """Return whether ``torch.distributed`` runs more than one rank."""
    return (placement_of_torch() or Placement()).world_size > 1


def warn_without_ranks(*, stacklevel: int) -> None:
    """Warn where srun or mpirun has started several processes, but nothing says which rank this one is."""
    if "RANK" in os.environ or "ray" in sys.modules or placement_of_torch() is not None:
        return
    for name in _LAUNCHED:
        if (count := os.environ.get(name) or "1") != "1":
            warnings.warn(
                f"{name}={count}, but torch.distributed is not initialised, and RANK and WORLD_SIZE are not set: each of these processes that reads this dataset "
                "reads all samples of it; set both before Python starts, or pass placement=ss.Placement(rank, world_size), ss.Placement(0, 1) if this is intended",
                UserWarning,
                stacklevel=stacklevel + 1,
            )
            return


def placement_of_torch() -> Placement | None:
    """Return the rank of ``torch.distributed``; None if it is not initialised."""
    # Looked up, not imported: if nothing has imported torch.distributed, it is not initialised.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Placement(distributed.get_rank(), distributed.get_world_size())


def _from_ray_train() -> Placement | None:
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, AttributeError, DeprecationWarning):
        # ray.train is imported, but this is not one of its workers; in a trial of Ray Tune it raises the warning
        return None
    return None if rank is None or world_size is None else Placement(rank, world_size)


def _from_variables() -> Placement | None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None and os.environ.get("NODE_RANK") == "0":
        # Lightning's own launcher sets no RANK; on other nodes it is known when torch.distributed is initialised
        rank = os.environ.get("LOCAL_RANK")
    try:
        return Placement(int(rank or ""), int(world_size or ""))
    except ValueError as error:
        raise OptionError(
            f"RANK={rank!r} and WORLD_SIZE={world_size!r} must both be whole numbers; "
            "set both, or neither, or make the dataset after torch.distributed is initialised (with Lightning: in "
            "train_dataloader()), or pass placement=ss.Placement(rank, world_size)"
        ) from error
