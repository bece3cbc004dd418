"""The batches of one rank: their order, which a state sets, and their partition over ranks and workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from operator import itemgetter
from typing import Any

from shardstream.distributed import WorkerInfo, placement_of_torch
from shardstream.errors import OptionError, StateError
from shardstream.loader.collation import collate
from shardstream.loader.dataset import SplitDataset, StreamDataset, current_worker_info
from shardstream.loader.dataset_versions import dataset_of_state
from shardstream.loader.epochs import is_called_by_lightning
from shardstream.loader.rank_consistency import EpochAgreement
from shardstream.loader.worker import WorkerBatch, WorkerPart, read_steps, read_stream
from shardstream.order import EpochOrder, PartitionConfig, RankPartition
from shardstream.pipeline import (
    EpochSamples,
    IndexedRun,
    IndexedSource,
    LoaderPosition,
    MixIndexedSource,
    OrderOptions,
    SkipTracker,
    State,
    check_state,
    data_identity,
    part_state,
    partition_config,
    past_of,
    plan_state,
    position_in,
    resumed_source,
    state_digest,
)
from shardstream.samples import has_deleted_since

_NOT_FOR_OTHERS = (
    "only its ShardLoader can read this dataset, but another loader was built around it (accelerate's skip_first_batches does so); "
    "iterate the ShardLoader itself: after load_state_dict, or Accelerate's load_state, it continues from the saved state. "
    "For a Hugging Face Trainer return shardstream.integrations.hf.TrainerLoader(loader) from get_train_dataloader"
)


def as_is(worker_batch: Any) -> Any:
    """Return a worker batch unchanged: the collate function that torch gets, because workers make whole batches."""
    return worker_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """The present versions of a dataset, which are read after the rest of an epoch in earlier ones.

    Args:
        dataset: Of the present versions.
        begin: Position where the rest begins.
        past: As in `past_of`.
    """

    dataset: StreamDataset
    begin: LoaderPosition
    past: str


class BatchDataset(SplitDataset):
    """Batches of one rank, split over the loader's workers.

    Args:
        dataset: Source of the samples.
        batch_size: Items of a batch; None yields single items.
        collate_fn: Makes a batch of a list of items.
        num_workers: Worker processes.
        drop_last: Drop a last batch, or step of all ranks, of less than full size.
    """

    new_source: IndexedSource | None = None
    """The source, if it is another one than the workers got when they were started."""
    is_last_read = True
    """Whether the batches that are read now are the last ones of the iteration."""

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any],
        num_workers: int,
        drop_last: bool,
    ) -> None:
        source = dataset.pipeline.indexed_source
        if source is not None and source.yields_batches:
            if batch_size is not None and collate_fn is collate:
                raise OptionError(
                    f"batch_by_cost makes batches already, and batch_size={batch_size} would make batches of these; use batch_size=None, or pass a "
                    "collate_fn that takes a list of batches"
                )
            if batch_size is None:
                batch_size, collate_fn = 1, itemgetter(0)  # a step has one item, which is a batch
        self.source_dataset = dataset
        self.following: _Following | None = None
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.placement = dataset.placement
        self.indexed_source = None if batch_size is None else source
        """The source if positions are arithmetic; None if each worker has its own position."""
        self.num_readers = max(1, num_workers)
        """Processes of this rank that read."""
        self.partition_config = PartitionConfig(drop_last=drop_last)
        indexed = self.indexed_source
        self._given = OrderOptions() if indexed is None else indexed.options
        if self.indexed_source is not None and batch_size is not None:
            self.partition_config = partition_config(
                self.indexed_source,
                ranks=self.placement.world_size,
                batch_size=batch_size,
                drop_last=drop_last,
            )
        # Computed for the first state: hashing the names of all shards takes time.
        self._data: State | None = None
        self._past: str | None = None

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch, for readers of ``loader.dataset``."""
        return len(self.source_dataset)

    def __getstate__(self) -> dict[str, Any]:
        # Workers read one of both, and are started again for the other.
        return vars(self) | ({} if get_spawning_popen() is None else {"following": None})

    def at(self, position: LoaderPosition) -> BatchDataset:
        """Return the batches of the versions that are read at a position: the present ones outside of the rest of an epoch in earlier ones.

        An epoch that is begun again is read in the present ones.
        """
        following = self.following
        if following is None:
            return self
        begin = following.begin
        if position.epoch == begin.epoch and position.consumed >= begin.consumed:
            return self
        present = copy.copy(self)
        present.following, present._past = None, following.past
        present._read(following.dataset)
        return present

    def move_to(self, position: LoaderPosition) -> None:
        """Begin an iteration at a position: read the versions of it from here on."""
        vars(self).update(vars(self.at(position)))

    @property
    def present_dataset(self) -> StreamDataset:
        """The dataset of the present versions."""
        return self.source_dataset if self.following is None else self.following.dataset

    def next_round(self, position: LoaderPosition, agreement: EpochAgreement | None) -> bool:  # noqa: ARG002
        """Wait for the samples that come after those of the iteration; return False if there are none."""
        return False

    @property
    def is_remote(self) -> bool:
        """Whether positions are arithmetic and the samples are not on local disks."""
        return self.indexed_source is not None and not self.indexed_source.samples.is_local

    def follow_ranks(self, position: LoaderPosition) -> bool:
        """Adopt the ranks of ``torch.distributed`` if it was initialised after the loader was made; return whether it was.

        Lightning's launcher does so: else each rank would read all samples.

        Raises:
            StateError: If the position is that of a state with parts of workers, which other ranks cannot continue.
        """
        dataset = self.source_dataset
        if dataset._has_given_placement or self.placement.world_size > 1:
            return False
        ranks = placement_of_torch()
        if ranks is None or ranks.world_size == 1 or dataset.placement == self.placement:
            return False
        if position.parts:
            raise StateError(
                "the steps of this pipeline change counts, and its state was loaded before torch.distributed was initialised, so "
                "each rank would skip what one rank has read; load the state after init_process_group"
            )
        self.placement, self._data = dataset.placement, None
        if self.indexed_source is not None:
            self.partition_config = replace(
                self.partition_config, world_size=self.placement.world_size
            )
        return True

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of samples of an epoch."""
        source = self.indexed_source
        assert source is not None and self.batch_size is not None  # noqa: S101, PT018  (asked by the callers)
        lanes = self.partition_config.batches_per_step * self.num_readers
        batch = source.options.microbatch or self.batch_size
        return source.order(batch=batch, lanes=lanes, epoch=epoch)

    def partition(
        self, position: LoaderPosition, opened: RankPartition | None = None
    ) -> RankPartition | None:
        """Return the steps of this rank from a position on; None if they are not known in advance.

        Args:
            position: The position.
            opened: The partition of the current iteration, whose plan is used if it is of the same epoch: that of a weighted mix of
                40,000 samples takes 25 ms.
        """
        if self.following is not None and (present := self.at(position)) is not self:
            return present.partition(position)
        if self.indexed_source is None:
            return None
        if opened is not None and opened.plan.epoch == position.epoch:
            plan = opened.plan
        else:
            plan = self.indexed_source.plan(self.order(position.epoch), position.epoch)
        return RankPartition(
            plan, self.partition_config, rank=self.placement.rank, consumed=position.consumed
        )

    def epoch_samples(self, position: LoaderPosition) -> EpochSamples:
        """Return which samples all ranks read from a position on.

        Raises:
            OptionError: If that is not known before they are read.
        """
        if self.following is not None and (present := self.at(position)) is not self:
            return present.epoch_samples(position)
        source, epoch = self.indexed_source, position.epoch
        if source is None:
            self.source_dataset.pipeline.source_by_number()
            raise OptionError("no plan says which samples make a batch, as batch_size= is None")
        return EpochSamples(
            source,
            source.plan(self.order(epoch), epoch),
            self.partition_config,
            workers=self.num_readers,
            consumed=position.consumed,
            may_leave_out=self.source_dataset.pipeline.may_leave_out
            or has_deleted_since(source.samples),
        )

    def whole_epoch(self, position: LoaderPosition) -> RankPartition | None:
        """Return the steps of this rank in the epoch of a position, from its start on; None if they are not known in advance."""
        rest = self.partition(position)
        return rest and RankPartition(rest.plan, self.partition_config, rank=self.placement.rank)

    def __iter__(self) -> Iterator[Any]:
        raise OptionError(_NOT_FOR_OTHERS)

    def read(
        self, position: LoaderPosition, partition: RankPartition | None = None
    ) -> Generator[WorkerBatch]:
        """Return the batches of this process from a position on: of one worker, or of the whole rank outside of workers.

        Args:
            position: The position.
            partition: The steps to read, if not all.
        """
        info, source = current_worker_info(self, self.placement), self.indexed_source
        pipeline, partition = self.source_dataset.pipeline, partition or self.partition(position)
        make_batch = self.collate_fn
        if source is None or partition is None:
            # Worker 0 is read first, so after a resume parts are rotated: worker 0 takes part `next_part`.
            number = (info.worker + position.next_part) % info.num_workers
            info = replace(info, worker=number)
            context = pipeline.context(info, position.epoch)
            run = pipeline.open(info, context)
            if number in position.parts:
                run.load_state_dict(position.parts[number])
            part = WorkerPart(
                number=number,
                run=run,
                skips=context.skips,
                source=pipeline.source,
                position=run.state_dict,
            )
            drop_last = self.partition_config.drop_last
            items = read_stream(part, self.batch_size or 1, drop_last=drop_last)
            return part.batches(items, itemgetter(0) if self.batch_size is None else make_batch)
        skips, by_column = SkipTracker(pipeline.on_error), make_batch is collate
        steps = IndexedRun(source, partition, info, skips, pipeline.kept_fields)
        part = WorkerPart(
            number=info.worker,
            run=steps,
            skips=skips,
            source=source,
            read_stats=steps.read_stats,
        )
        runner = pipeline.open_runner(position.epoch, skips, by_column=by_column)
        items = read_steps(part, steps, runner, partition, info)
        return part.batches(items, collate if by_column else lambda rows: make_batch(list(rows)))

    def topology(self, epoch: int) -> State:
        """Return the fields that a state with a position for each worker must match."""
        worker_info = WorkerInfo(self.placement, 0, self.num_readers)
        identity = self.source_dataset.pipeline.identity(worker_info, epoch)
        identity |= {"batch_size": self.batch_size, "versions": [*self.source_dataset.versions]}
        return {"kind": "parts", **identity}

    def state_at(self, position: LoaderPosition, opened: RankPartition | None) -> State:
        """Return the state of a position, in JSON values.

        Args:
            position: The position.
            opened: As in `partition`.
        """
        if self.following is not None and (present := self.at(position)) is not self:
            return present.state_at(position, None)
        if self.indexed_source is None:
            return part_state(self.topology(position.epoch), position)
        is_opened = opened is not None and opened.plan.epoch == position.epoch
        order = opened.plan.order if opened and is_opened else self.order(position.epoch)
        if self._data is None:
            source = self.indexed_source
            data = data_identity(source) | {"versions": [*self.source_dataset._versions]}
            data |= {} if self._past is None else {"past": self._past}
            if self.following is not None and has_deleted_since(source.samples):
                data["deletions"] = [*self.following.dataset.versions]
            steps = {"stages": self.source_dataset.pipeline.steps} | source.describe(steps=True)
            digest = state_digest(plan_state(order, data, position) | steps)
            config = self.partition_config
            topology = {
                "ranks": config.world_size,
                "batch_size": self.batch_size,
                "remainder": config.remainder,
                "drop_last": config.drop_last,
            }
            self._data = data | {"digest": digest, "topology": topology}
        return plan_state(order, self._data, position)

    def load(self, state: Mapping[str, Any], epoch: int) -> LoaderPosition:
        """Return the position of a state; adopt its order, also for later epochs.

        Args:
            state: The saved state.
            epoch: The current epoch.

        Raises:
            StateError: If an exact resume is impossible.
        """
        if self.indexed_source is None:
            check_state(state, expected=self.topology(epoch))
            return position_in(state)
        batch_size = self.batch_size or 1
        source = self._resume(state, batch_size)
        microbatches = batch_size // (source.options.microbatch or batch_size)
        self.partition_config = replace(self.partition_config, microbatches=microbatches)
        position, nsamples = position_in(state), self.order(state["epoch"]).nsamples
        if position.consumed > nsamples:
            raise StateError(
                f"this state is damaged: {position.consumed} of {nsamples} samples are consumed"
            )
        if self.following is not None and is_called_by_lightning():
            self._check_lengths(position)
        self._past = state.get("past")
        past = past_of(state, self.state_at(position, None)["digest"])
        if past != self._past:
            self._past, self._data = past, None
        return position

    def with_weights(
        self, weights: Mapping[str, float], position: LoaderPosition
    ) -> MixIndexedSource:
        """Return the source of a mix with other weights from a position on.

        Raises:
            OptionError: If the samples are not those of a mix whose weights can change, or the weights are invalid for it.
        """
        source = self.indexed_source
        if not isinstance(source, MixIndexedSource):
            raise OptionError(
                "set_weights needs the dataset of ss.mix, with steps after it that yield one item per item"
            )
        changed = source.changed_at(position.epoch, position.consumed, weights)
        changed.plan(self.order(position.epoch), position.epoch)  # lanes need samples of each part
        return changed

    def set_source(self, source: IndexedSource) -> None:
        """Read another source, with the order of its options and its weights, also after the rest of an epoch in earlier versions."""
        self._read(_with_source(self.source_dataset, source))
        following = self.following
        if following is not None:
            present = _adopt(following.dataset.pipeline.indexed_source, source)
            dataset = _with_source(following.dataset, present)
            self.following = replace(following, dataset=dataset)

    def _check_lengths(self, position: LoaderPosition) -> None:
        """Refuse epochs of other lengths than that of a position.

        Raises:
            StateError: If the next epoch has another number of batches.
        """
        following = LoaderPosition(epoch=position.epoch + 1)
        steps, next_steps = [
            0 if whole is None else whole.num_steps
            for whole in map(self.whole_epoch, (position, following))
        ]
        if steps != next_steps:
            raise StateError(
                f"epoch {position.epoch} of the state's version has {steps} batches, later ones of the present version have {next_steps}, but Lightning "
                "reads as many in each epoch as in the first; finish the epoch with version= of the dataset and max_epochs="
            )

    def _read(self, dataset: StreamDataset) -> None:
        self.source_dataset, self._data = dataset, None
        self.indexed_source = dataset.pipeline.indexed_source

    def _resume(self, state: Mapping[str, Any], batch_size: int) -> IndexedSource:
        """Return the source of a state, with its order; read it, and the present one from the next epoch on.

        Raises:
            StateError: If an exact resume is impossible.
        """
        present = self.present_dataset
        dataset = dataset_of_state(present, state)
        assert dataset.pipeline.indexed_source is not None  # noqa: S101  (as in all versions)
        source = resumed_source(dataset.pipeline.indexed_source, self._given, state, batch_size)
        position, self.following = position_in(state), None
        if dataset is present:
            self._read(_with_source(present, source))
        elif not position.consumed:  # nothing of the epoch was read
            self._read(_with_source(present, _adopt(present.pipeline.indexed_source, source)))
        else:
            rest = present._with_pipeline(dataset.pipeline)
            rest._versions = dataset._versions
            self._read(rest)
            past = state["state_checksum"]
            self.following = _Following(dataset=present, begin=position, past=past)
            self.set_source(source)
        return source


def _adopt(present: IndexedSource | None, source: IndexedSource) -> IndexedSource:
    """Return a source with the order and the weights of that of an earlier version."""
    assert present is not None  # noqa: S101  (as in all versions)
    names = ("microbatch", "lanes", "window", "block")
    adopted = present.with_options(**{name: getattr(source.options, name) for name in names})
    if isinstance(adopted, MixIndexedSource) and isinstance(source, MixIndexedSource):
        return replace(adopted, changes=source.changes)
    return adopted


def _with_source(dataset: StreamDataset, source: IndexedSource) -> StreamDataset:
    changed = dataset._with_pipeline(replace(dataset.pipeline, source=source))
    changed._remake = dataset._remake  # order and weights are taken from the state
    return changed
