"""Source + stages: the only module that composes the steps of a sample's way. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from shardstream.distributed import WorkerInfo
from shardstream.pipeline.bad_samples import OnError, SkipTracker
from shardstream.pipeline.indexed_source import Chain, IndexedSource
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
from shardstream.storage import Storage, protocol_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Where samples come from and what is done to them; picklable.

    Args:
        source: Raw samples.
        stages: In order.
        on_error: What becomes of bad samples.
        steps: What a state says of the stages: described before they run, for functions may count in fields of their own.
    """

    source: Source
    stages: tuple[Stage, ...] = ()
    on_error: OnError = "raise"
    steps: tuple[str, ...] = ()
    indexed_source: IndexedSource | None = field(init=False, repr=False, compare=False)
    """The source, if each sample of its plan comes out as one item, so that a position is one number."""

    def __post_init__(self) -> None:
        new = self.stages[len(self.steps) :]
        if new:
            object.__setattr__(self, "steps", (*self.steps, *map(describe, new)))
        source = self.source.indexed
        for stage in self.stages:
            if not isinstance(stage, ItemStage):  # it changes counts
                source = None
        object.__setattr__(self, "indexed_source", source)

    def then(self, stage: Stage) -> Pipeline:
        """Return the pipeline with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    def storage_for(self, url: str) -> Storage:
        """Return the storage for another file: with the options of the data's, if the protocol is theirs."""
        storage, shard = self.source.place()
        return storage.uncached() if protocol_of(url) == protocol_of(shard) else Storage()

    def identity(self, worker_info: WorkerInfo, epoch: int) -> State:
        """Return what the state of a stream must agree with to be continued."""
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
        described = self.source.describe(steps=True)
        if described:
            identity["mix"] = described
        return identity | self.source.order_identity(worker_info, epoch)

    def describe(self, *, steps: bool) -> State:
        """Return what a part of a mix is, for the mix's state.

        Args:
            steps: With its stages, on which positions depend where some step changes counts.
        """
        described: State = {"seed": self.source.seed, "shuffle": self.source.shuffle}
        described |= {"stages": list(self.steps)} if steps else {}
        if (source := self.source.indexed) is not None:
            described |= {"window": source.options.window, "block": source.options.block}
        mixed = self.source.describe(steps=steps)
        return described | ({"mix": mixed} if mixed else {})

    def context(self, worker_info: WorkerInfo, epoch: int) -> Context:
        """Return what the stages of one loader worker share."""
        return Context(
            seed=self.source.seed,
            epoch=epoch,
            worker_number=worker_info.number,
            skips=SkipTracker(self.on_error),
        )

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Start the whole chain for one loader worker, item by item."""
        run = self.source.open(worker_info, context)
        for stage in self.stages:
            run = stage.open(run, context)
        return run

    def chain(self, epoch: int, skips: SkipTracker) -> ItemChain:
        """Return all steps of an exact pipeline as one function on the samples of a step."""
        assert self.indexed_source is not None  # noqa: S101  (asked by the callers)
        context = Context(seed=self.source.seed, epoch=epoch, skips=skips)
        return ItemChain(self.indexed_source.chain(epoch, skips), self.stages, context)


class ItemChain:
    """All stages of an exact pipeline as one function on the samples of a step.

    Args:
        first: Done before the stages, if anything: the parts of a mix have steps of their own.
        stages: Each hands out one item for each.
        context: What they share.
    """

    def __init__(self, first: Chain | None, stages: tuple[Stage, ...], context: Context) -> None:
        self._first = first
        self._skips = context.skips
        self._exit = ExitStack()
        self._functions: list[tuple[ItemFunction, ThreadPoolExecutor | None]] = []
        for stage in stages:
            assert isinstance(stage, ItemStage)  # noqa: S101  (Pipeline.is_exact)
            pool = None
            if stage.threads:
                pool = self._exit.enter_context(
                    ThreadPoolExecutor(stage.threads, thread_name_prefix="shardstream-map")
                )
            self._functions.append((stage.bind(context), pool))

    def __call__(self, items: Sequence[Any], numbers: list[int]) -> tuple[Sequence[Any], list[int]]:
        """Return the items after all stages, and their numbers; bad ones are left out."""
        if self._first is None and not self._functions:
            return items, numbers  # columns stay columns
        items = list(items)
        if self._first is not None:
            items, numbers = self._first(items, numbers)
        for function, pool in self._functions:
            if (pool is None or len(items) == 1) and self._skips.budget is None:
                try:
                    items = [
                        function(item, number) for item, number in zip(items, numbers, strict=True)
                    ]
                except StopIteration as error:  # outside of a generator it would end the epoch
                    self._skips.skip_or_raise(error)
            else:
                items, numbers = self._guarded(function, pool, items, numbers)
        return items, numbers

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


def _call(function: ItemFunction, item: Any, number: int) -> Callable[[], Any]:
    return lambda: function(item, number)
