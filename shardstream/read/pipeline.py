"""Source + stages: the only module that composes the steps of a sample's way. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from shardstream.placement import Reader
from shardstream.read.plan import Order, Plan, default_block, default_window
from shardstream.read.share import Remainder, Share, Split
from shardstream.read.skip import OnError, Skips
from shardstream.read.source import PlannedRun
from shardstream.read.stage import Context, ItemFunction, ItemStage, Run, Stage
from shardstream.read.whole import WholeShards
from shardstream.storage.catalog import Catalog

PLAIN_MICROBATCH = 64
"""Microbatch of a dataset that is iterated without a `ShardLoader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSamples:
    """A dataset that is read by number, in the order of a plan.

    Args:
        catalog: Its samples.
        shuffle: As in `Order`, like the next five; None stands for a default computed from the catalog.
        remainder: As in `Split`.
        prefetch_bytes: Held ahead of use by each worker.
    """

    catalog: Catalog
    shuffle: bool
    seed: int
    lanes: int | None
    microbatch: int | None
    window: int | None
    block: int | None
    remainder: Remainder
    prefetch_bytes: int

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""
        return self.catalog.fingerprint

    def order(self, *, batch: int, readers: int) -> Order:
        """Return the order of samples for a microbatch, and for that many loader workers in the job."""
        nsamples, total_bytes = len(self.catalog), self.catalog.total_bytes
        window = self.window or default_window(nsamples, total_bytes, batch)
        return Order(
            nsamples=nsamples,
            batch=batch,
            shuffle=self.shuffle,
            seed=self.seed,
            lanes=self.lanes or readers,
            # Read in order, a window is shared by all readers: it only says how much is worth fetching together.
            window=window if self.shuffle else window * readers,
            block=self.block or default_block(nsamples, total_bytes),
        )

    def open(self, reader: Reader, epoch: int, skips: Skips) -> Run:
        """Start reading the samples of one loader worker, for a dataset that is iterated by itself."""
        order = self.order(batch=self.microbatch or PLAIN_MICROBATCH, readers=reader.total)
        split = Split(world_size=reader.placement.world_size, remainder=self.remainder)
        return self.open_share(
            Share(Plan(order, epoch), split, rank=reader.placement.rank), reader, skips
        )

    def open_share(self, share: Share, reader: Reader, skips: Skips) -> PlannedRun:
        """Start reading what one loader worker takes of a share."""
        return PlannedRun(
            self.catalog,
            share,
            worker=reader.worker,
            num_workers=reader.num_workers,
            skips=skips,
            prefetch_bytes=self.prefetch_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Where samples come from and what is done to them; picklable.

    Args:
        source: Raw samples.
        stages: In order.
        on_error: What becomes of bad samples.
    """

    source: PlannedSamples | WholeShards
    stages: tuple[Stage, ...] = ()
    on_error: OnError = "raise"

    def then(self, stage: Stage) -> Pipeline:
        """Return the pipeline with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    @property
    def is_exact(self) -> bool:
        """Whether each sample of the plan comes out as one item, so that positions are a matter of arithmetic."""
        return isinstance(self.source, PlannedSamples) and all(
            isinstance(stage, ItemStage) for stage in self.stages
        )

    def open(self, reader: Reader, context: Context) -> Run:
        """Start the whole chain for one loader worker."""
        run = self.source.open(reader, context.epoch, context.skips)
        for stage in self.stages:
            run = stage.open(run, context)
        return run

    def context(self, reader: Reader, epoch: int) -> Context:
        """Return what the stages of one loader worker share."""
        return Context(
            seed=self.source.seed, epoch=epoch, reader=reader.number, skips=Skips(self.on_error)
        )


class ItemChain:
    """All stages of an exact pipeline as one function on the samples of a step.

    Args:
        stages: Each hands out one item for each.
        context: What they share.
    """

    def __init__(self, stages: tuple[Stage, ...], context: Context) -> None:
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

    def __call__(self, items: list[Any], numbers: list[int]) -> list[Any]:
        """Return the items after all stages; bad ones are left out."""
        for function, pool in self._functions:
            if pool is None and self._skips.budget is None:
                items = [
                    function(item, number) for item, number in zip(items, numbers, strict=True)
                ]
            else:
                items, numbers = self._guarded(function, pool, items, numbers)
        return items

    def close(self) -> None:
        """Join the threads."""
        self._exit.close()

    def _guarded(
        self,
        function: ItemFunction,
        pool: ThreadPoolExecutor | None,
        items: list[Any],
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
        for call, number in zip(calls, numbers, strict=True):
            try:
                kept.append((call(), number))
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.take(error)
        return [item for item, _ in kept], [number for _, number in kept]


def _call(function: ItemFunction, item: Any, number: int) -> Callable[[], Any]:
    return lambda: function(item, number)
