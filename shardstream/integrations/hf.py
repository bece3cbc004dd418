"""Use a `ShardLoader` in the Hugging Face ``Trainer``, with exact resume from its checkpoints.

Return a `TrainerLoader` from ``get_train_dataloader`` and give the Trainer a `LoaderStateCallback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from shardstream.errors import OptionError, StateError
from shardstream.loader import ShardLoader, check_data_parallel, check_same_device


class TrainerLoader(DataLoader[Any]):
    """Adapter of a `ShardLoader` that a Hugging Face ``Trainer`` can resume.

    To skip batches, the Trainer builds another loader around the dataset of this one. That loader gets placeholders, then the
    batches of the `ShardLoader` from its position on, so nothing is read twice.

    Args:
        loader: Batches of this rank: dicts of tensors, as the model takes them.
    """

    dataset: _Resumed
    _is_accelerate_prepared = True  # already split by rank; the Trainer moves batches to the device

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader
        super().__init__(_Resumed(loader), batch_size=None, collate_fn=_return_unchanged)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # the iterator of the ShardLoader
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; called by the Trainer."""
        self.loader.set_epoch(epoch)


class _Resumed(IterableDataset[Any]):
    """Placeholders for the batches that the Trainer skips, then the remaining batches of the epoch."""

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader
        self.dropped: int | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.dropped is None:
            raise StateError(
                "the Trainer resumes in the middle of an epoch, but the loader's position is not known; "
                "pass callbacks=[LoaderStateCallback()] to the Trainer, also in the run that saves"
            )
        dropped, self.dropped = self.dropped, None
        for _ in range(dropped):
            yield None
        yield from self.loader


class LoaderStateCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # of no known type
    """Save the state of the `TrainerLoader` in the Trainer's checkpoints, and load it on resume.

    The state is part of ``trainer_state.json``. A checkpoint that cannot be continued exactly is refused: its data, order,
    number of ranks or number of batches (which the Trainer counts in steps) differs.
    """

    def __init__(self) -> None:
        self.states: list[Any] = []
        self._loader: TrainerLoader | None = None

    def state(self) -> dict[str, Any]:
        """Return the loader's state for the Trainer's checkpoint, one per rank if they differ."""
        if self._loader is not None:
            own_state = self._loader.loader.state_dict()
            if not _differs_among_ranks(own_state):
                self.states = [own_state]
            elif self.states[own_state["rank"] : own_state["rank"] + 1] != [own_state]:
                raise StateError(
                    "the loader's state of this step has not been gathered from the other ranks; "
                    "pass LoaderStateCallback as the last callback"
                )
        return {"args": {}, "attributes": {"states": self.states}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the loader; load its state if the Trainer resumes.

        Raises:
            OptionError: If the Trainer does not train on a `TrainerLoader`, or on another device than the loader's.
            StateError: If the checkpoint cannot be continued exactly.
        """
        loader = kwargs.get("train_dataloader")
        if not isinstance(loader, TrainerLoader):
            raise OptionError(
                f"LoaderStateCallback needs a TrainerLoader, not {type(loader).__name__}: "
                "return TrainerLoader(loader) from get_train_dataloader"
            )
        check_data_parallel(loader.loader.placement)
        check_same_device(loader.loader.device, args.device, "the Trainer")
        self._loader = loader
        name = type(self).__name__
        saved = state.stateful_callbacks.setdefault(name, {}).get("attributes", {}).get("states")
        if state.global_step > 0 and saved:
            _resume(loader, saved, args, state)
        elif state.global_step > 0 and not args.ignore_data_skip:
            raise StateError(
                "the checkpoint holds no state of the loader; set ignore_data_skip=True to restart its epoch"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gather the states of all ranks before a checkpoint is saved."""
        if control.should_save and self._loader is not None:
            self.states = _gather_states(self._loader.loader.state_dict())

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop the reference to the loader; the next training sets its own."""
        self._loader = None


def _gather_states(own_state: Any) -> list[Any]:
    """Return the states of all ranks; a single one if they are equal."""
    if not _differs_among_ranks(own_state):
        return [own_state]
    states: list[Any] = [None] * own_state["world_size"]
    torch.distributed.all_gather_object(states, own_state)
    return states


def _differs_among_ranks(state: Mapping[str, Any]) -> bool:
    return state["kind"] == "parts" and int(state["world_size"]) > 1


def _resume(
    loader: TrainerLoader, saved: Sequence[Any], args: TrainingArguments, state: TrainerState
) -> None:
    """Load a saved state and compare its position with the Trainer's."""
    rank = loader.loader.placement.rank if len(saved) > 1 else 0
    if rank >= len(saved):
        raise StateError(f"the checkpoint holds states of {len(saved)} ranks, none of rank {rank}")
    counted = _count_batches(loader.loader, whole_epoch=True)
    is_same = loader.loader.state_dict().get("fingerprint") == saved[rank].get("fingerprint")
    loader.loader.load_state_dict(saved[rank])
    steps = _count_batches(loader.loader, whole_epoch=True)
    if not is_same and steps != counted:
        raise StateError(
            f"the epoch of the checkpoint, in an earlier version of the dataset, has {steps} batches, but the Trainer has counted {counted}; finish the epoch "
            "with version= of the dataset"
        )
    per_epoch = state.max_steps if steps is None else -(-steps // args.gradient_accumulation_steps)
    epoch, steps_of_epoch = divmod(state.global_step, max(1, per_epoch))
    batches = steps_of_epoch * args.gradient_accumulation_steps
    left = _count_batches(loader.loader, whole_epoch=False)
    read = None if steps is None or left is None else steps - left
    is_epoch_start = batches == 0 and read is None  # the Trainer itself chooses the epoch
    is_same_position = args.ignore_data_skip or read is None or read == batches
    if not is_epoch_start and (loader.loader.epoch != epoch or not is_same_position):
        raise StateError(
            f"the Trainer resumes after batch {batches} of epoch {epoch}, the saved state of the loader after batch "
            f"{'?' if read is None else read} of epoch {loader.loader.epoch}; use the same numbers of ranks, batch size and gradient "
            "accumulation steps (a dataset of unknown length needs .with_length(n)), or start again"
        )
    loader.dataset.dropped = None if args.ignore_data_skip else batches


def _count_batches(loader: ShardLoader, *, whole_epoch: bool) -> int | None:
    """Return the number of batches of the epoch, or those left in it; None if unknown."""
    try:
        return len(loader) if whole_epoch else loader.batches_left
    except (TypeError, OptionError):
        return None


def _return_unchanged(batch: Any) -> Any:
    return batch
