"""Ask about a training: which samples come when, one of its batches made again, its checkpoint before some samples were used."""

from __future__ import annotations

import copy
import os
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardstream.catalog import Keys, find_keys
from shardstream.distributed import Placement
from shardstream.errors import OptionError, SampleError, StateError
from shardstream.loader.batch_dataset import BatchDataset, as_is
from shardstream.loader.checkpoint import find_checkpoints, read_values
from shardstream.loader.dataset import StreamDataset
from shardstream.loader.loader import ShardLoader
from shardstream.order import Ints
from shardstream.pipeline import (
    EpochSamples,
    LoaderPosition,
    SkipTracker,
    State,
    check_at_least,
    check_epoch,
    compare_states,
    find_states,
    parse_state,
    whole_number,
)
from shardstream.samples import has_deleted_since, samples_in_rows

SavedState = Mapping[str, Any] | str | os.PathLike[str]
"""A state, a checkpoint that holds one, or the file or URL of one: of torch, or ``.json``, such as ``trainer_state.json`` of a Hugging Face Trainer."""
_NOT_ORDER = {"past", "steps"}  # differences of states of one order


def plan(  # noqa: PLR0913  (the public door)
    dataset: StreamDataset,
    epoch: int | None = None,
    *,
    ranks: int = 1,
    workers: int = 0,
    batch_size: int | None = None,
    drop_last: bool = False,
    state: SavedState | None = None,
) -> EpochSamples:
    """Return which samples each rank of a training reads at each step of an epoch, and when a sample comes; nothing of the data is read.

        ss.plan(dataset, epoch=3, ranks=8, workers=2, batch_size=64).samples(1200)

    `ShardLoader.plan` returns the same for a loader. Steps are batches of a `ShardLoader`: other loaders order samples otherwise.

    Args:
        dataset: A `ShardDataset`, `mix`, `join`, ...; its placement does not matter.
        epoch: From 0; by default that of the state, or 0.
        ranks: Number of ranks.
        workers: ``num_workers`` of their loaders, by which the order has its lanes unless ``lanes=`` of `OrderOptions` does.
        batch_size: Samples of a batch of one rank; None where items are batches, as those of ``batch_by_cost``.
        drop_last: As in `ShardLoader`.
        state: A saved ``loader.state_dict()``, or the file or URL of a checkpoint that holds one: its epoch is planned from its position on,
            also if ``epoch`` names it, and others in its order. Ranks, workers and batches may be others than those of the training that saved it.

    Raises:
        OptionError: If it is not known before samples are read, because steps change counts or shards have no index; or a number is invalid.
        StateError: If the dataset cannot continue the state.
    """
    check_at_least(1, ranks=ranks, batch_size=batch_size)
    check_at_least(0, workers=workers)
    if batch_size is None and not dataset.pipeline.source_by_number().yields_batches:
        raise OptionError("plan needs batch_size=, the samples of a batch of one rank")
    batches = BatchDataset(
        dataset,
        batch_size=batch_size,
        collate_fn=as_is,
        num_workers=workers,
        drop_last=drop_last,
    )
    batches.partition_config = replace(batches.partition_config, world_size=ranks)
    position = LoaderPosition()
    if state is not None:
        position = batches.load(_state_of(state, batches), 0)
    if epoch is not None and epoch != position.epoch:
        position = LoaderPosition(epoch=check_epoch(epoch))
    return batches.epoch_samples(position)


def replay(
    loader: ShardLoader,
    step: int,
    *,
    state: SavedState | None = None,
    epoch: int | None = None,
    rank: int | None = None,
) -> Any:
    """Return the batch that a rank received at a step, made again in this process.

    Only the samples of this batch are read, and no other rank or worker is needed. It is the batch that was delivered: samples, decoding,
    random numbers of ``map(rng=True)``, and replacements of bad samples. What steps or a ``collate_fn`` draw from global generators, or a
    store that failed for a time, may differ. Tensors are on the CPU.

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
    saved = None if state is None else _state_of(state, loader._batches)
    batches, position = _begin(loader, saved, epoch)
    if saved is not None:
        _warn_of_difference(saved, batches.state_at(position, None), ("topology", "digest"))
        if batches.indexed_source and has_deleted_since(batches.indexed_source.samples):
            warnings.warn(
                f"samples that were deleted since version {saved['versions']} are left out of the batch; open the dataset with version= to make it as it was "
                "delivered",
                UserWarning,
                stacklevel=2,
            )
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
    if number and batches.placement.world_size == 1:
        _warn_of_empty_batches(batches, position)
    with closing(batches.read(position, partition.only(number))) as made:
        found = next(made)
    if found.error is not None:
        raise found.error
    if found.empty:
        raise SampleError(f"all samples of step {number} were left out, so no batch was delivered")
    return found.batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstUse:
    """The first use of each of some samples, and the last checkpoint before all of them.

    Args:
        state: State of the loader in the last checkpoint before any of the samples was used; None if one was used before the first
            checkpoint, so that a training without them begins anew.
        checkpoint: URL of this checkpoint; None also if states were given.
        numbers: The samples that come in the epochs of the run, ascending, in ``dataset.samples``; shape (n,), int64, as all below.
        epochs: Epoch of the first use of each.
        steps: Its step, from the begin of the epoch, as in ``loader.plan(epoch)``.
        ranks: Its rank.
    """

    state: State | None
    checkpoint: str | None
    numbers: Ints
    epochs: Ints
    steps: Ints
    ranks: Ints


def first_use(
    loader: ShardLoader,
    run: SavedState | Sequence[SavedState],
    *,
    numbers: Sequence[int] | Ints | None = None,
    keys: Keys | None = None,
) -> FirstUse:
    """Return the last checkpoint of a run before any of some samples was used, and the first use of each.

    Nothing of the data is read, and of checkpoints only their states. Epochs are counted from 0 to that of the last checkpoint, to its end. A sample
    counts as used from the begin of the step that the plan has it in, also if it was bad, refused or skipped there.

    Args:
        loader: A loader of the dataset, in the version that the run has read, with its batch size and number of ranks, as in `replay`. If the ranks
            or batches of the run were others for a time, the checkpoint is right, or up to one step too early; steps and ranks are those of this loader.
        run: Folder or URL of the checkpoints of `save_checkpoint`; or states or checkpoints, in the order of the training.
        numbers: Numbers of the samples in ``dataset.samples``.
        keys: Keys instead, which are found as in ``subset=``.

    Raises:
        OptionError: If there is no such sample, neither or both are given, or steps change counts.
        NotFoundError: If the folder has no checkpoint.
        StateError: If the last state does not continue here, or the order of the run changed, or it went back to an earlier position.
        StorageError: If checkpoints or keys cannot be read.
    """
    if (numbers is None) == (keys is None):
        raise OptionError("first_use takes numbers= or keys=, one of them")
    saved = _saved_states(run, loader._batches)
    last = saved[-1][1]
    batches, position = _begin(loader, last, None)
    here = batches.present_dataset
    if last.get("fingerprint") != here.pipeline.source.fingerprint:
        raise StateError(
            f"the run has read other data (version {last.get('versions')} of the dataset) than the loader (version {[*here.versions]}); "
            "open the dataset with version="
        )
    mine = batches.state_at(position, None)
    others = [one for _, one in saved if one.get("topology") not in (None, mine.get("topology"))]
    _warn_of_difference((others or [last])[-1], mine, ("topology",))
    _check_run([state for _, state in saved])
    wanted = numbers
    if keys is not None and batches.indexed_source is not None:
        wanted = find_keys(samples_in_rows(batches.indexed_source.samples), keys, "keys=")
    uses = _first_uses(batches, np.asarray(wanted), last["epoch"])
    begun = np.lexsort((uses[2], uses[1]))[:1]
    place = len(saved) - 1
    if len(begun):
        per_step = batches.placement.world_size * (batches.batch_size or 1)
        first = int(uses[1, begun[0]]), int(uses[2, begun[0]]) * per_step
        place = bisect_right([(one["epoch"], one["consumed"]) for _, one in saved], first) - 1
    url, state = saved[place] if place >= 0 else (None, None)
    found, epochs, steps, ranks = uses
    return FirstUse(
        state=state, checkpoint=url, numbers=found, epochs=epochs, steps=steps, ranks=ranks
    )


def _first_uses(batches: BatchDataset, wanted: Ints, last_epoch: int) -> Ints:
    """Return number, epoch, step and rank of the first use of samples, ascending by number; shape (4, n)."""
    found = [np.empty((4, 0), dtype=np.int64)]
    for epoch in range(last_epoch + 1):
        plan = batches.epoch_samples(LoaderPosition(epoch=epoch))
        if epoch == 0 and not plan.is_exact:
            _warn_of_replacements(batches)
        planned = plan.where(numbers=wanted)  # in the order of steps
        used, firsts = np.unique(planned.numbers, return_index=True)
        steps, ranks = planned.steps[firsts], planned.ranks[firsts]
        found.append(np.stack([used, np.full_like(used, epoch), steps, ranks]))
        wanted = np.setdiff1d(wanted, used)
        if not len(wanted):
            break
    uses = np.concatenate(found, axis=1)
    return uses[:, np.argsort(uses[0])]


def _refills(batches: BatchDataset) -> bool:
    """Return whether each sample that is left out is replaced."""
    budget = SkipTracker(batches.source_dataset.pipeline.on_error).budget
    return budget is not None and budget.refill


def _warn_of_empty_batches(batches: BatchDataset, position: LoaderPosition) -> None:
    """Warn if a single rank may have received fewer batches than there were steps, which a loop that counts batches does not see."""
    if not (_refills(batches) or batches.epoch_samples(position).is_exact):
        warnings.warn(
            "one rank alone receives no batch for a step of which all samples were bad, refused or deleted, but the step counts: a loop that "
            "counts its batches may call this step by a smaller number; state_dict()['consumed'] counts such samples, too",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_replacements(batches: BatchDataset) -> None:
    """Warn if samples may come as replacements, which no plan knows: it depends on the data where they are drawn."""
    refills = _refills(batches)
    if refills or batches.placement.world_size > 1:
        which = (
            "for bad or refused samples"
            if refills
            else "where all samples of a batch were bad or refused"
        )
        warnings.warn(
            f"{which} others of the epoch were read, which may have been used earlier than found here",
            UserWarning,
            stacklevel=4,
        )


def _saved_states(
    run: SavedState | Sequence[SavedState], batches: BatchDataset
) -> list[tuple[str | None, State]]:
    """Return the states of a run with the URLs of their checkpoints, at least one.

    Raises:
        OptionError: If none are given.
    """
    if isinstance(run, str | os.PathLike):
        url = os.fspath(run)
        run = find_checkpoints(url, batches.source_dataset.pipeline.storage_for(url))
    elif isinstance(run, Mapping):
        run = [run]
    saved = [
        (None if isinstance(one, Mapping) else os.fspath(one), _state_of(one, batches))
        for one in run
    ]
    if not saved:
        raise OptionError("first_use needs at least one state of the run")
    return saved


def _check_run(states: Sequence[State]) -> None:
    """Check that states are of one order, and in the order of the training; warn if that is not known.

    Raises:
        StateError: If they are not.
    """
    for state in states[:-1]:
        differences = compare_states(state, states[-1])
        before, now = (changes or [] for changes in differences.pop("mix.changes", ([], [])))
        changed = {name: pair for name, pair in differences.items() if name not in _NOT_ORDER}
        if now[: len(before)] != before:  # weights given since then are no other order before
            changed["mix.changes"] = before, now
        if changed:
            raise StateError(
                f"data or order of the run changed, so a state does not say which samples came before: {changed} (of a state, and of the last one); "
                "pass the states since then"
            )
    pasts = {state["past"] for state in states if "past" in state}
    if pasts - {state["state_checksum"] for state in states}:
        warnings.warn(
            "the run continued a state that is not given, of other data, order or steps: if not only steps differed, samples "
            "may have been used before where this finds no use",
            UserWarning,
            stacklevel=3,
        )
    for one, later in pairwise(states):
        if (later["epoch"], later["consumed"]) < (one["epoch"], one["consumed"]):
            raise StateError(
                f"the run went back: a state at sample {later['consumed']} of epoch {later['epoch']} follows one at sample {one['consumed']} "
                f"of epoch {one['epoch']}; pass the states of one pass over the epochs, in the order of the training"
            )


def _begin(
    loader: ShardLoader, state: State | None, epoch: int | None
) -> tuple[BatchDataset, LoaderPosition]:
    """Return batches like those of a loader, with the order of a state, and the position from which steps count."""
    loader._follow_dataset()
    loader._progress.cursor.refuse_followed("which samples a step has read is not known")
    batches, position = copy.copy(loader._batches), loader._progress.cursor.position
    if state is not None and epoch is not None:
        raise OptionError("state= and epoch= both say where steps begin; pass one of them")
    if state is not None:
        position = batches.load(state, position.epoch)
    elif epoch is not None:
        position = LoaderPosition(epoch=check_epoch(epoch))
    return batches, position


def _warn_of_difference(state: State, here: State, names: Sequence[str]) -> None:
    """Warn of fields of a state that do not decide where it continues, but which batches come."""
    other = {
        name: (state[name], here.get(name))
        for name in names
        if name in state and state[name] != here.get(name)
    }
    if other:
        warnings.warn(
            f"the state was saved otherwise: {other} (there, here); steps and batches are those of a training that continues it as this loader does. "
            "A digest is one of data, order and steps: see ss.compare_states",
            UserWarning,
            stacklevel=3,
        )


def _state_of(state: SavedState, batches: BatchDataset) -> State:
    """Return the state of the loader's dataset in a state, a checkpoint, or the file of one.

    Raises:
        StateError: If there is none, or several.
    """
    url = "" if isinstance(state, Mapping) else os.fspath(state)
    pipeline = batches.source_dataset.pipeline
    storage, saved = pipeline.storage_for(url), state
    if url.endswith(".json"):
        saved = parse_state(storage.read_bounded(url).decode(errors="replace"))
    elif url:
        saved = read_values(url, storage)
    states = find_states(saved)
    own = [one for one in states if one.get("fingerprint") == pipeline.source.fingerprint]
    if not states or len(own) > 1:
        raise StateError(
            f"the checkpoint has {len(own) or 'no'} states of this dataset, one is needed; pass loader.state_dict() as it was saved",
            shard=url,
        )
    return (own or states)[0]
