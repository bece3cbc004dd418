"""Move items through stages that return one item per item: samples of a batch together, or a stream item by item.

Both call the function that a stage returns from ``bind``, keep the order, and leave an item that fails to the skip policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol

from shardstream.format import Columns, TupleColumns
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.stage import Context, Run, SourceRun, State

ItemFunction = Callable[[Any, int], Any]
"""``function(item, number)`` returns one item per item; ``number`` is the sample number."""

_DECODE_S = attrgetter("decode_s")

Moved = tuple[Sequence[Any], list[int]]
"""Items and their sample numbers, in order, without bad and refused samples."""


class ItemStage:
    """A stage that returns one item per item or refuses it, so that it needs no position.

    Subclasses have `apply`, or `bind` if the function depends on seed or epoch.
    """

    threads: int = 0
    """Threads that process items in parallel, keeping their order; 0 uses the caller's thread."""
    is_decoding = False
    """Whether its time counts as decoding in the statistics."""
    leads_by_column = False
    """Whether it takes columns even if later stages do not: single samples of its result share no memory."""

    def apply(self, item: Any, number: int) -> Any:
        """Return one item for an item; ``number`` is the sample number."""
        raise NotImplementedError

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        if type(self).apply is ItemStage.apply:  # else `on_error` could skip all items
            raise NotImplementedError(f"{type(self).__name__} has neither apply nor bind")
        return self.apply

    def apply_to_columns(self, columns: Columns) -> Columns | TupleColumns | None:  # noqa: ARG002
        """Return what the function of `bind` returns for these samples; None where it must be called for each of them.

        For stages that depend on nothing but the samples. A default batch of the result must equal that of single samples; arrays
        of one shape may be one array, shape (n, ...).
        """
        return None

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        function = self.bind(context)
        if self.threads:
            source = _AheadRun(source, function, self.threads)
            return ItemRun(source, lambda future, _: future.result(), context.skips)
        return ItemRun(source, function, context.skips)


class Step(Protocol):
    """A step that a `Runner` moves items through."""

    @property
    def decode_s(self) -> float:
        """Seconds of decoding, so far."""

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        """Return the items after the step."""

    def close(self) -> None:
        """Join its threads."""


class Runner:
    """Move samples through all steps; a step itself.

    Args:
        steps: Steps, in order.
        skips: Skip policy and counts of bad samples.
    """

    def __init__(self, steps: Sequence[Step], skips: SkipTracker) -> None:
        self._steps, self._skips = steps, skips
        self.decode_s = 0.0
        """Seconds of decoding, so far."""

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        """Return the samples after all steps; an error among ``items`` stands for a damaged sample.

        Raises:
            Exception: The error of a bad sample that the skip policy does not skip.
        """
        if not isinstance(items, Columns) and (list(map(type, items)).count(dict) < len(items)):
            items, numbers = self._undamaged(items, numbers)
        for step in self._steps:
            items, numbers = step(items, numbers)
        self.decode_s = sum(map(_DECODE_S, self._steps))
        return items, numbers

    def close(self) -> None:
        """Join the threads of all steps."""
        for step in self._steps:
            step.close()

    def _undamaged(self, items: Sequence[Any], numbers: list[int]) -> Moved:
        kept: list[Any] = []
        kept_numbers: list[int] = []
        for item, number in zip(items, numbers, strict=True):
            if isinstance(item, Exception):
                self._skips.skip_or_raise(item, number=number)
            else:
                kept.append(item)
                kept_numbers.append(number)
        return kept, kept_numbers


def open_runner(
    stages: Sequence[ItemStage],
    context: Context,
    *,
    first: Step | None = None,
    by_column: bool = False,
) -> Runner:
    """Return a runner of stages.

    Args:
        stages: Stages that return one item per item.
        context: Context that they share.
        first: Step before the stages.
        by_column: Apply the stages to whole columns if all can: for results that only the default `collate` reads. All or none,
            because rows of an array keep all of it in memory.
    """
    for stage in stages:
        by_column &= type(stage).apply_to_columns is not ItemStage.apply_to_columns
    steps: list[Step] = [] if first is None else [first]
    for place, stage in enumerate(stages):
        leads = place == 0 and stage.leads_by_column
        steps.append(_StageStep(stage, context, by_column=by_column or leads))
    return Runner(steps, context.skips)


class _StageStep:
    """An item stage in one epoch and process."""

    def __init__(self, stage: ItemStage, context: Context, *, by_column: bool) -> None:
        self.decode_s = 0.0
        self.apply = stage.bind(context)
        self._is_decoding = stage.is_decoding
        self._by_column = stage.apply_to_columns if by_column else None
        self._skips = context.skips
        self._pool = _open_pool(stage.threads) if stage.threads else None

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        begin = perf_counter()
        columns = None
        if self._by_column is not None and isinstance(items, Columns):
            columns = self._by_column(items)
        moved = self._one_by_one(items, numbers) if columns is None else (columns, numbers)
        if self._is_decoding:
            self.decode_s += perf_counter() - begin
        return moved

    def _one_by_one(self, items: Sequence[Any], numbers: list[int]) -> Moved:
        items, apply, pool, futures = list(items), self.apply, self._pool, None
        if pool is not None and len(items) > 1:
            futures = [
                pool.submit(apply, item, number)
                for item, number in zip(items, numbers, strict=True)
            ]
        kept: list[Any] = []
        kept_numbers: list[int] = []
        for place, (item, number) in enumerate(zip(items, numbers, strict=True)):
            try:
                kept.append(apply(item, number) if futures is None else futures[place].result())
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, item, number)
            else:
                kept_numbers.append(number)
        return kept, kept_numbers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class ItemRun(SourceRun):
    """Call a function on each item of a stream.

    Args:
        source: The run before.
        function: Returns one item per item.
        skips: Skip policy and counts of bad samples.
    """

    def __init__(self, source: Run, function: ItemFunction, skips: SkipTracker) -> None:
        super().__init__(source)
        self._function, self._skips = function, skips

    def __next__(self) -> Any:
        while True:
            item = next(self.source)
            try:
                return self._function(item, self.source.number)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                # Without its number: steps before may have changed the numbers of samples.
                self._skips.skip_or_raise(error, item)


class StepRun(SourceRun):
    """Move the samples of a stream through a step, one by one.

    Args:
        source: The run before.
        step: As in `Runner`.
    """

    def __init__(self, source: Run, step: Step) -> None:
        super().__init__(source)
        self._step = step

    def __next__(self) -> Any:
        items: Sequence[Any] = ()
        while not items:  # the step skips bad samples
            item = next(self.source)
            items, _ = self._step([item], [self.source.number])
        return items[0]

    def close(self) -> None:
        """Join the threads of the step, and close the source."""
        self._step.close()
        super().close()


class _AheadRun(SourceRun):
    """Call a function on items ahead of their use, in threads; the items are futures of the results, in order."""

    def __init__(self, source: Run, function: ItemFunction, threads: int) -> None:
        super().__init__(source)
        self._function = function
        self._pool = _open_pool(threads)
        self._ahead = 2 * threads
        self._pending: deque[tuple[Future[Any], int, State]] = deque()
        self._error: Exception | None = None  # of the source; raised after all pending items
        self._state = source.state_dict()
        self._number = 0

    @property
    def number(self) -> int:
        return self._number

    def __next__(self) -> Future[Any]:
        while len(self._pending) < self._ahead and self._error is None:
            try:
                item = next(self.source)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  (raised after the pending items)
                self._error = error
                break
            number = self.source.number
            future = self._pool.submit(self._function, item, number)
            self._pending.append((future, number, self.source.state_dict()))
        if not self._pending:
            failed, self._error = self._error, None
            raise failed or StopIteration
        future, self._number, self._state = self._pending.popleft()
        return future

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state: State) -> None:
        self._pending.clear()
        self._error = None
        self.source.load_state_dict(state)
        self._state = state

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.source.close()


def _open_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shardstream-map")
