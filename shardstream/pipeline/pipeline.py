"""Compose a source and its stages. The only module that does so; it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError
from shardstream.pipeline.bad_samples import BadSampleReport, OnError, SkipTracker
from shardstream.pipeline.indexed_source import IndexedSource, numbered_source
from shardstream.pipeline.sample_steps import KeepFields, OpenFields, Select
from shardstream.pipeline.stage import (
    Context,
    ItemStage,
    Run,
    Runner,
    Source,
    Stage,
    State,
    open_runner,
    open_stages,
)
from shardstream.pipeline.step_signatures import describe
from shardstream.pipeline.stream_steps import Shuffle
from shardstream.storage import Storage, protocol_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A source and the stages applied to its samples; picklable.

    Args:
        source: Raw samples.
        stages: Stages in order of execution.
        on_error: Policy for bad samples.
        steps: Signatures of the stages for states, taken before the stages run because callable objects may change their own fields.
    """

    source: Source
    stages: tuple[Stage, ...] = ()
    on_error: OnError = "raise"
    steps: tuple[str, ...] = ()
    indexed_source: IndexedSource | None = field(init=False, repr=False, compare=False)
    """The source if each planned sample gives one item, so that a position is one number; else None."""

    def __post_init__(self) -> None:
        new = self.stages[len(self.steps) :]
        if new:
            object.__setattr__(self, "steps", (*self.steps, *map(describe, new)))
        source = self.source if isinstance(self.source, IndexedSource) else None
        for stage in self.stages:
            if not isinstance(stage, ItemStage):  # the stage may change the number of items
                source = None
        object.__setattr__(self, "indexed_source", source)

    def then(self, stage: Stage) -> Pipeline:
        """Return the pipeline with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    @property
    def kept_fields(self) -> KeepFields | None:
        """The fields that are kept of each sample, before all other stages; None if all are."""
        first = self.stages[0] if self.stages else None
        return first if isinstance(first, KeepFields) else None

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs are known to differ: they are shuffled, samples are drawn, or steps get random numbers."""
        draws = any(
            isinstance(stage, Shuffle) or getattr(stage, "rng", False) for stage in self.stages
        )
        return draws or self.source.differs_by_epoch

    @property
    def may_leave_out(self) -> bool:
        """Whether samples may be left out, so that their number is an upper bound: bad ones, or those that a `Select` refuses."""
        refuses = any(isinstance(stage, Select) for stage in self.stages)
        return self.on_error != "raise" or refuses or self.source.may_leave_out

    @property
    def num_steps(self) -> int:
        """Number of stages that the user added; keys of random numbers, which ``fields=`` and ``lazy=`` must not change."""
        return sum(not isinstance(stage, KeepFields | OpenFields) for stage in self.stages)

    def source_by_number(
        self, reason: str = "no plan says which sample comes when", remedy: str = ""
    ) -> IndexedSource:
        """Return the source, of which each sample gives one item or none.

        Args:
            reason: What needs it, for the message.
            remedy: As in `OptionError`.

        Raises:
            OptionError: If shards are read without an index, or a step changes how many items there are.
        """
        source = numbered_source(self.source)
        for step, stage in zip(self.steps, self.stages, strict=True):
            if not isinstance(stage, ItemStage):
                changes = f"the step {step.partition('(')[0]} changes how many items there are"
                raise OptionError(f"{reason}: {changes}", remedy=remedy)
        return source

    def storage_for(self, url: str) -> Storage:
        """Return the storage for another file, with the dataset's options if the protocols match."""
        storage, shard = self.source.place()
        return storage.uncached() if protocol_of(url) == protocol_of(shard) else Storage()

    def open_report(self, placement: Placement) -> BadSampleReport | None:
        """Return the report of bad samples of a rank; None if they are not skipped."""
        budget = SkipTracker(self.on_error).budget
        if budget is None:
            return None
        return BadSampleReport(budget.report, placement, self.storage_for(budget.report or ""))

    def identity(self, worker_info: WorkerInfo, epoch: int) -> State:
        """Return the values that must equal those of a state before it is resumed."""
        identity: State = {
            "fingerprint": self.source.fingerprint,
            "checksums": self.source.checksums,
            "seed": self.source.seed,
            "shuffle": self.source.shuffle,
            "stages": list(self.steps),
            "rank": worker_info.placement.rank,
            "world_size": worker_info.placement.world_size,
            "num_workers": worker_info.num_workers,
        }
        identity |= self.source.describe(steps=True)
        return identity | self.source.order_identity(worker_info, epoch)

    def describe(self, *, steps: bool) -> State:
        """Describe this part of a mix for the state of the mix.

        Args:
            steps: Include the stages; positions depend on them where a step changes the number of items.
        """
        described: State = {"seed": self.source.seed, "shuffle": self.source.shuffle}
        described |= {"stages": list(self.steps)} if steps else {}
        if isinstance(self.source, IndexedSource):
            options = self.source.options
            described |= {"window": options.window, "block": options.block}
        return described | self.source.describe(steps=steps)

    def context(self, worker_info: WorkerInfo, epoch: int) -> Context:
        """Return the context that the stages of one loader worker share."""
        return Context(
            seed=self.source.seed,
            epoch=epoch,
            global_worker=worker_info.global_worker,
            skips=SkipTracker(self.on_error),
        )

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Open the source and all stages for one loader worker."""
        return open_stages(self.stages, self.source.open(worker_info, context), context)

    def open_runner(self, epoch: int, skips: SkipTracker, *, by_column: bool = False) -> Runner:
        """Return all steps of the samples; needs `indexed_source`.

        Args:
            epoch: Number of the epoch.
            skips: Skip policy and counts of bad samples.
            by_column: As in `open_runner`.
        """
        assert self.indexed_source is not None  # noqa: S101  (checked by the callers)
        return open_runner(
            cast("tuple[ItemStage, ...]", self.stages),  # as `indexed_source` is set
            Context(seed=self.source.seed, epoch=epoch, skips=skips),
            first=self.indexed_source.open_steps(epoch, skips),
            by_column=by_column,
        )
