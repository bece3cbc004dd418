"""Compose a source and its stages. The only module that does so; it does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from shardstream.distributed import WorkerInfo
from shardstream.format import Columns
from shardstream.pipeline.bad_samples import OnError, SkipTracker
from shardstream.pipeline.decode import Decode
from shardstream.pipeline.indexed_source import CatalogSource, IndexedSource, SampleTransform
from shardstream.pipeline.keep_fields import KeepFields
from shardstream.pipeline.open_fields import OpenFields
from shardstream.pipeline.source import Source
from shardstream.pipeline.stage import (
    Context,
    ItemFunction,
    ItemStage,
    Run,
    Stage,
    State,
)
from shardstream.pipeline.step_signatures import describe
from shardstream.pipeline.stream_ops import Shuffle
from shardstream.pipeline.weighted_source import WeightedSource
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
        source = self.source.indexed
        for stage in self.stages:
            if not isinstance(stage, ItemStage):  # the stage may change the number of items
                source = None
        object.__setattr__(self, "indexed_source", source)

    def then(self, stage: Stage) -> Pipeline:
        """Return the pipeline with one more stage."""
        if isinstance(stage, Decode) and self.kept_fields is not None:
            stage = replace(stage, left_out=self.kept_fields.left_out)
        return replace(self, stages=(*self.stages, stage))

    @property
    def kept_fields(self) -> KeepFields | None:
        """The fields that are kept of each sample, before all other stages; None if all are."""
        first = self.stages[0] if self.stages else None
        return first if isinstance(first, KeepFields) else None

    @property
    def is_raw(self) -> bool:
        """Whether no step reads the bytes of fields."""
        has_steps = any(not isinstance(stage, KeepFields) for stage in self.stages)
        return isinstance(self.source, CatalogSource) and not has_steps

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs are known to differ: they are shuffled, samples are drawn, or steps get random numbers."""
        draws = any(
            isinstance(stage, Shuffle) or getattr(stage, "rng", False) for stage in self.stages
        )
        return draws or self.source.shuffle or isinstance(self.source, WeightedSource)

    @property
    def num_steps(self) -> int:
        """Number of stages that the user added; keys of random numbers, which ``fields=`` and ``lazy=`` must not change."""
        return sum(not isinstance(stage, KeepFields | OpenFields) for stage in self.stages)

    def storage_for(self, url: str) -> Storage:
        """Return the storage for another file, with the dataset's options if the protocols match."""
        storage, shard = self.source.place()
        return storage.uncached() if protocol_of(url) == protocol_of(shard) else Storage()

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
        if (source := self.source.indexed) is not None:
            described |= {"window": source.options.window, "block": source.options.block}
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
        run = self.source.open(worker_info, context)
        for stage in self.stages:
            run = stage.open(run, context)
        return run

    def open_transform(
        self, epoch: int, skips: SkipTracker, *, by_column: bool = False
    ) -> PipelineTransform:
        """Return all stages as one function on the samples of a step; needs `indexed_source`.

        Args:
            epoch: Number of the epoch.
            skips: Skip policy and counts of bad samples.
            by_column: As in `PipelineTransform`.
        """
        assert self.indexed_source is not None  # noqa: S101  (checked by the callers)
        context = Context(seed=self.source.seed, epoch=epoch, skips=skips)
        return PipelineTransform(
            self.indexed_source.open_transform(epoch, skips),
            self.stages,
            context,
            by_column=by_column,
        )


class PipelineTransform:
    """All stages of an exact pipeline as one function on the samples of a step.

    Args:
        first: Transform to apply before the stages, or None; the parts of a mix have their own steps.
        stages: Stages that return one item per item.
        context: Context that the stages share.
        by_column: Apply the stages to whole columns as far as they can: for results that only the default `collate` reads.
    """

    def __init__(
        self,
        first: SampleTransform | None,
        stages: tuple[Stage, ...],
        context: Context,
        *,
        by_column: bool,
    ) -> None:
        self._first = first
        self._leading = _stages_by_column(stages, all_stages=by_column) if first is None else []
        self._skips = context.skips
        self._exit = ExitStack()
        self._functions: list[tuple[ItemFunction, ThreadPoolExecutor | None, bool]] = []
        self._own_decode_s = self.decode_s = 0.0  # without and with those of the first transform
        for stage in stages:
            assert isinstance(stage, ItemStage)  # noqa: S101  (checked by `Pipeline.indexed_source`)
            pool = None
            if stage.threads:
                pool = self._exit.enter_context(
                    ThreadPoolExecutor(stage.threads, thread_name_prefix="shardstream-map")
                )
            self._functions.append((stage.bind(context), pool, isinstance(stage, Decode)))

    def __call__(self, items: Sequence[Any], numbers: list[int]) -> tuple[Sequence[Any], list[int]]:
        """Return the items after all stages, and their numbers, without bad samples."""
        items, done = self._by_column(items)
        functions = self._functions[done:]
        if self._first is None and not functions:
            return items, numbers  # columns stay columns
        items = list(items)
        if self._first is not None:
            items, numbers = self._first(items, numbers)
        for function, pool, decodes in functions:
            begin = perf_counter() if decodes else 0.0
            if (pool is None or len(items) == 1) and self._skips.budget is None:
                try:
                    items = [
                        function(item, number) for item, number in zip(items, numbers, strict=True)
                    ]
                except StopIteration as error:  # would silently end the epoch
                    self._skips.skip_or_raise(error)
            else:
                items, numbers = self._guarded(function, pool, items, numbers)
            self._own_decode_s += perf_counter() - begin if decodes else 0.0
        self.decode_s = self._own_decode_s + (0.0 if self._first is None else self._first.decode_s)
        return items, numbers

    def _by_column(self, items: Sequence[Any]) -> tuple[Sequence[Any], int]:
        """Apply the leading stages that can be applied to columns; return their number, too."""
        done = 0
        for stage in self._leading:
            begin = perf_counter()
            changed = stage.apply_to_columns(items) if isinstance(items, Columns) else None
            if changed is None:
                break
            items, done = changed, done + 1
            self._own_decode_s += perf_counter() - begin if isinstance(stage, Decode) else 0.0
        self.decode_s = self._own_decode_s
        return items, done

    def close(self) -> None:
        """Join the threads."""
        self._exit.close()
        if self._first is not None:
            self._first.close()

    def _guarded(
        self,
        function: ItemFunction,
        pool: ThreadPoolExecutor | None,
        items: Sequence[Any],
        numbers: list[int],
    ) -> tuple[list[Any], list[int]]:
        calls: list[Callable[[], Any]]
        if pool is None:
            calls = [
                _call(function, item, number) for item, number in zip(items, numbers, strict=True)
            ]
        else:
            calls = [
                pool.submit(function, item, number).result
                for item, number in zip(items, numbers, strict=True)
            ]
        kept: list[tuple[Any, int]] = []
        for call, item, number in zip(calls, items, numbers, strict=True):
            try:
                kept.append((call(), number))
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, item, number)
        return [item for item, _ in kept], [number for _, number in kept]


def _stages_by_column(stages: Sequence[Stage], *, all_stages: bool) -> list[ItemStage]:
    """Return the stages to apply to columns; without ``all_stages`` only those after which single samples are the same.

    All or none of the stages: rows of an array keep all of it in memory.
    """
    items = [stage for stage in stages if isinstance(stage, ItemStage)]
    if all_stages and all(
        type(stage).apply_to_columns is not ItemStage.apply_to_columns for stage in items
    ):
        return items
    return items[:1] if isinstance(items[0] if items else None, KeepFields) else []


def _call(function: ItemFunction, item: Any, number: int) -> Callable[[], Any]:
    return lambda: function(item, number)
