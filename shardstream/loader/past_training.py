"""Look back at a training: make one of its batches again."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from shardstream.distributed import Placement
from shardstream.errors import OptionError, SampleError, StateError
from shardstream.loader.batch_dataset import BatchDataset
from shardstream.loader.checkpoint import read_values
from shardstream.loader.loader import ShardLoader
from shardstream.pipeline import LoaderPosition, State, check_epoch, find_states, whole_number


def replay(
    loader: ShardLoader,
    step: int,
    *,
    state: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    epoch: int | None = None,
    rank: int | None = None,
) -> Any:
    """Return the batch that a rank received at a step, made again in this process.

    Only the samples of this batch are read, and no other rank or worker is needed. It is the batch that was delivered: samples, decoding,
    random numbers of ``map(rng=True)``, and replacements of bad samples. What steps draw from global generators, or a store that failed
    for a time, may differ. Tensors are on the CPU.

    Args:
        loader: A loader of the dataset with the batch size of the training and its number of ranks, ``placement=ss.Placement(0, ranks)``
            of the dataset. Its position stays as it is. A state has the order; without one ``num_workers`` matters, too, where no ``lanes`` are set.
        step: From 0: the first batch after the state, at the begin of the epoch, or else after the position of the loader.
        state: A state of the training, or the file or URL of a checkpoint that holds one.
        epoch: An epoch instead, from its begin.
        rank: The rank; None for that of the loader.

    Raises:
        OptionError: If there is no such step or rank; or batches are not known before they are read, because steps change counts.
        StateError: If the state does not continue here, or a checkpoint holds none or several of the dataset.
        SampleError: If all samples of the batch were left out, so that none was delivered.
    """
    batches, position = _begin(loader, state, epoch)
    if rank is not None:
        batches.placement = Placement(rank, batches.placement.world_size)
    partition = batches.partition(position)
    if partition is None:
        raise OptionError(
            "no batch can be made again alone: steps change counts, so batches are not known before all are read"
        )
    number, end = whole_number("step", step), partition.num_steps
    if not 0 <= number < end:
        raise OptionError(
            f"there is no step {number}: from here on epoch {position.epoch} has {end} steps, numbered from 0; "
            "for another epoch pass epoch=, or a later state"
        )
    with closing(batches.read(position, partition.only(number))) as made:
        found = next(made)
    if found.error is not None:
        raise found.error
    if found.empty:
        raise SampleError(f"all samples of step {number} were left out, so no batch was delivered")
    return found.batch


def _begin(
    loader: ShardLoader, state: Mapping[str, Any] | str | os.PathLike[str] | None, epoch: int | None
) -> tuple[BatchDataset, LoaderPosition]:
    """Return batches like those of a loader, with the order of a state, and the position from which steps count."""
    loader._follow_dataset()
    batches, position = copy.copy(loader._batches), loader._cursor.position
    if state is not None and epoch is not None:
        raise OptionError("state= and epoch= both say where steps begin; pass one of them")
    if state is not None:
        position = batches.load(_state_of(state, batches), position.epoch)
    elif epoch is not None:
        position = LoaderPosition(epoch=check_epoch(epoch))
    return batches, position


def _state_of(state: Mapping[str, Any] | str | os.PathLike[str], batches: BatchDataset) -> State:
    """Return the state of the loader's dataset in a state, a checkpoint, or the file of one.

    Raises:
        StateError: If there is none, or several.
    """
    url = "" if isinstance(state, Mapping) else os.fspath(state)
    pipeline = batches.source_dataset.pipeline
    saved = read_values(url, pipeline.storage_for(url)) if url else state
    states = find_states(saved)
    own = [one for one in states if one.get("fingerprint") == pipeline.source.fingerprint]
    if not states or len(own) > 1:
        raise StateError(
            f"the checkpoint has {len(own) or 'no'} states of this dataset, one is needed; pass loader.state_dict() as it was saved",
            shard=url,
        )
    return (own or states)[0]
