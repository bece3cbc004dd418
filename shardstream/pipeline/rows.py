"""A source whose items are rows, made of parts of samples: of sequences packed to one length, of windows, of batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from shardstream.codecs import length_of, part_of
from shardstream.errors import OptionError, SampleError
from shardstream.order import (
    CopyPlan,
    EpochOrder,
    EpochPlan,
    RowPlan,
    WeightedDraw,
    WindowRows,
    draw_by_weight,
)
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.indexed_source import IndexedSource
from shardstream.pipeline.mix import EPOCHS_PER_PASS
from shardstream.pipeline.options import balance_of, refuse_options
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.sample_steps import find_field
from shardstream.pipeline.stage import Moved, Runner, State, Step
from shardstream.pipeline.step_signatures import describe
from shardstream.pipeline.stream_steps import Collate, collated
from shardstream.samples import RowItem, RowSamples

_IMMUTABLE = (str, bytes, int, float, bool, type(None))
_MOST_LEFT_OUT = 100_000  # 8 MB; later ones count in each of their rows


class RowMaker:
    """Makes a row of the samples of its parts; a frozen dataclass, picklable."""

    __slots__ = ()
    is_batch: ClassVar[bool] = False
    """Whether a row is a batch, which a loader with ``batch_size=None`` yields as it is."""
    needs_all: ClassVar[bool] = False
    """Whether a row without one of its parts is left out, as the bad sample is: else it is made of the others."""

    def length_of(self, sample: Any) -> int | None:  # noqa: ARG002
        """Return the length of a sample, to be compared with the one that rows were planned with; None, the default, to compare nothing.

        Raises:
            Exception: If the sample cannot be a part of a row.
        """
        return None

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the row of some parts, at least one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of a sample in a row.

    Args:
        sample: The sample, after the steps before.
        start: First element of the part.
        stop: Element after the last one; -1 for the end of the sample.
        is_shared: Whether another part has the same sample.
    """

    sample: Any
    start: int
    stop: int
    is_shared: bool = False

    def value(self, field: str) -> Any:
        """Return the value of a field of the sample, of its own if another part has the sample, too: steps may change it."""
        value = self.sample[field]
        if not self.is_shared or isinstance(value, _IMMUTABLE):
            return value
        return copy.deepcopy(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource(IndexedSource):
    """Rows that are made of the samples of a pipeline.

    Args:
        samples: The rows.
        shuffle: As in `IndexedSource`, like the next seven; sizes of the order count rows.
        seed: As above.
        options: As above.
        reading: As above.
        balance: As above.
        draw: As above.
        yields_batches: As above.
        is_new_each_epoch: As above.
        part: The samples, with the steps that they pass before they become parts.
        maker: Makes a row of its parts.
    """

    samples: RowSamples
    part: Pipeline
    maker: RowMaker

    @property
    def may_leave_out(self) -> bool:
        """Whether the steps before may leave samples out, and so all of a row."""
        return self.part.may_leave_out

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs are known to differ."""
        return self.is_new_each_epoch or self.shuffle or self.part.differs_by_epoch

    def order(self, *, batch: int, lanes: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch as `IndexedSource`, with blocks of two groups of rows if a window has room for eight."""
        order = IndexedSource.order(self, batch=batch, lanes=lanes, epoch=epoch)
        if self.options.block or not self.samples.can_coalesce:
            return order
        groups = 2 * self.samples.plan.rows_of_group
        block = min(groups, order.window // 8, order.nsamples // 128)
        return replace(order, block=max(order.block, block))

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""
        if not self.is_new_each_epoch:
            return IndexedSource.plan(self, order, epoch)
        return CopyPlan(order, epoch, copy=epoch % EPOCHS_PER_PASS)

    def number_of(self, number: int) -> None:
        """Return None: the number may count rows, or the samples in them."""

    def open_steps(self, epoch: int, skips: SkipTracker) -> Step | None:
        """Return the steps of the samples, and what makes rows of them."""
        return _RowSteps(self, self.part.open_runner(epoch, skips), skips)

    def describe(self, *, steps: bool) -> State:
        """Return how rows are made, which must equal that of a state."""
        rows = {"made by": describe(self.maker), "of": self.part.describe(steps=steps)}
        return IndexedSource.describe(self, steps=steps) | {"rows": rows}


def row_pipeline(pipeline: Pipeline, plan: RowPlan, maker: RowMaker, step: str) -> Pipeline:
    """Return a pipeline whose items are rows of the samples of another.

    Args:
        pipeline: The samples and their steps.
        plan: The parts of each row.
        maker: Makes a row of its parts.
        step: Name of the step, for errors.

    Raises:
        OptionError: If there are no rows.
    """
    source = rowable_source(pipeline, step)
    if not len(plan):
        raise OptionError(f"{step}: {plan.summary}, so there is nothing to read")
    options, samples, balance = source.options, RowSamples(source.samples, plan), None
    if plan.is_new_each_epoch:
        reason = f"where {step} makes other rows in each epoch, of other samples and costs"
        refuse_options(options, ["nodes", "exchange", "balance"], reason)
    if options.balance is not None:
        balance = balance_of(options.balance, samples, shuffle=source.shuffle)
    rows = RowSource(
        samples=samples,
        shuffle=source.shuffle,
        seed=source.seed,
        options=options,
        reading=source.reading,
        balance=balance,
        draw=None if source.draw is None else _draw_rows(source.draw, plan, step),
        yields_batches=maker.is_batch,
        is_new_each_epoch=plan.is_new_each_epoch,
        part=replace(pipeline, source=replace(source, balance=None)),
        maker=maker,
    )
    return Pipeline(source=rows, on_error=pipeline.on_error)


def _draw_rows(draw: WeightedDraw, plan: RowPlan, step: str) -> WeightedDraw:
    """Return how often rows are expected, each as often as its sample.

    Raises:
        OptionError: If a row may have several samples.
    """
    if not (isinstance(plan, WindowRows) and plan.lengths is not None):
        raise OptionError(
            f"{step} puts several samples into a row, but weights= draw each of them another number of times in each epoch; make a dataset of the samples "
            f"of each weight (where=, subset=), use {step} on each, and mix them by weights: ss.mix(datasets, weights)"
        )
    expected = draw.expected[plan.parts(np.arange(len(plan))).numbers]
    count = max(1, round(float(expected.sum())))
    return draw_by_weight(expected, num_samples=count, replacement=draw.replacement)


def rowable_source(pipeline: Pipeline, step: str) -> IndexedSource:
    """Return the source of a pipeline of whose samples rows can be planned.

    Raises:
        OptionError: If its samples have no numbers, are drawn anew in each epoch, or are batches already.
    """
    reason = f"{step} plans by the numbers of samples"
    source = pipeline.source_by_number(reason, f"put it after {step}")
    if source.is_new_each_epoch:
        raise OptionError(
            f"{step} plans rows of samples that stay the same, but here these are rows or batches that are made anew in each epoch; "
            f"put repack=True and batch_by_cost after {step}"
        )
    if source.draws and source.draw is None:
        raise OptionError(
            f"{step} plans rows of all samples, but the weights of this mix draw them anew in each epoch; use {step} on each dataset, and mix these by weights"
        )
    return source


class _RowSteps:
    """The steps of the samples of rows, each sample once in a call, and what makes rows of them."""

    def __init__(self, source: RowSource, runner: Runner, skips: SkipTracker) -> None:
        self._maker, self._runner, self._skips = source.maker, runner, skips
        self._rows, self._lengths = source.samples, source.samples.plan.lengths
        self._left_out = set[
            int
        ]()  # bad samples, and refused ones: each counts once, not in each of its rows

    @property
    def decode_s(self) -> float:
        return self._runner.decode_s

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        numbered = [self._numbers(*one) for one in zip(items, numbers, strict=True)]
        raw = {  # copies of rows have the same samples, which steps may change
            number: dict(sample) if isinstance(sample, dict) else sample
            for item, own in zip(items, numbered, strict=True)
            for number, sample in zip(own, item.samples, strict=True)
            if number not in self._left_out
        }
        kept, kept_numbers = self._runner(list(raw.values()), list(raw))
        samples = dict(zip(kept_numbers, kept, strict=True))
        for number in kept_numbers:
            try:
                self._check(samples[number], number)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, samples.pop(number), number)
        if len(self._left_out) < _MOST_LEFT_OUT:
            self._left_out |= raw.keys() - samples.keys()
        rows, row_numbers, used = list[Any](), list[int](), set[int]()
        for item, own, row_number in zip(items, numbered, numbers, strict=True):
            parts = _parts(item, own, samples, used)
            if not parts or (self._maker.needs_all and len(parts) < len(own)):
                continue
            try:
                rows.append(self._maker.make(parts))
                row_numbers.append(row_number)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, parts[0].sample)
        return rows, row_numbers

    def close(self) -> None:
        self._runner.close()

    def _numbers(self, item: RowItem, row_number: int) -> list[int]:
        """Return the numbers of the samples of a row; those of a copy of the row are copies, with random numbers of their own."""
        first = row_number // len(self._rows) * len(self._rows.whole)
        return [first + number for number in item.numbers]

    def _check(self, sample: Any, number: int) -> None:
        """Check that a sample is as long as its rows were planned.

        Raises:
            SampleError: If it is not: rows would be cut, or lack some of it.
        """
        length = self._maker.length_of(sample)
        if length is None or self._lengths is None:
            return
        planned = int(self._lengths[number % len(self._rows.whole)])
        if length != planned:
            raise SampleError.of(
                sample,
                f"the sample has {length} elements, but lengths= says {planned}, by which rows were planned; are the columns older than the "
                "shards, or does a step change the length? (shardstream index --columns writes them again)",
            )


def _parts(
    item: RowItem, numbers: Sequence[int], samples: dict[int, Any], used: set[int]
) -> list[RowPart]:
    """Return the parts of a row, without those of bad samples; adds the numbers of their samples to ``used``."""
    parts = list[RowPart]()
    for number, start, stop in zip(numbers, item.starts, item.stops, strict=True):
        if number in samples:
            parts.append(RowPart(samples[number], start, stop, is_shared=number in used))
            used.add(number)
    return parts


def common_length(sample: Any, fields: Sequence[str], step: str) -> int:
    """Return the length of some fields of a sample, which is the same for all.

    Raises:
        SampleError: If it lacks one, one has no length, or they differ.
    """
    lengths = dict[str, int]()
    for names in fields:
        name = find_field(names, sample, step)
        try:
            lengths[name] = length_of(sample[name])
        except TypeError as error:
            raise SampleError.of(sample, f"{step}: {error}", field=name) from error
    if len({*lengths.values()}) > 1:
        raise SampleError.of(
            sample, f"{step}: fields of one sample have different lengths: {lengths}"
        )
    return next(iter(lengths.values()))


_STEP = "windows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(RowMaker):
    """Makes windows of a long field: a sample with a part of the field, and ``__start__``, the place of its first element.

    Args:
        fields: Fields of which a window has a part, with one length in each sample.
    """

    fields: tuple[str, ...]

    def length_of(self, sample: Any) -> int | None:
        """Return the length of the fields of a sample.

        Raises:
            SampleError: If it lacks one, they have no parts, or differ.
        """
        return common_length(sample, self.fields, _STEP)

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the window."""
        (part,) = parts
        cut = {find_field(name, part.sample, _STEP) for name in self.fields}
        window = {
            name: part_of(part.sample[name], part.start, part.stop)
            if name in cut
            else part.value(name)
            for name in part.sample
        }
        return window | {"__start__": part.start}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWindows(RowMaker):
    """Makes windows of samples that follow each other: a dict of the list of values of each field; arrays of one shape are stacked.

    ``__key__`` is that of the first sample.
    """

    needs_all: ClassVar[bool] = True

    def length_of(self, sample: Any) -> int | None:
        """Return the samples as they are: None.

        Raises:
            SampleError: If it is no dict.
        """
        if not isinstance(sample, dict):
            raise SampleError(
                f"{_STEP} of samples take dicts, not {type(sample).__name__}: put it before to_tuple"
            )
        return None

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the window."""
        names = dict.fromkeys(name for part in parts for name in part.sample)
        window: dict[str, Any] = {}
        for name in names:
            if name.startswith("__"):
                window[name] = parts[0].sample.get(name)
                continue
            lacking = next((part.sample for part in parts if name not in part.sample), None)
            if lacking is not None:
                raise SampleError(
                    f"{_STEP}: a sample lacks the field {name!r}, which others of its window have",
                    shard=lacking.get("__url__"),
                    key=lacking.get("__key__"),
                    field=name,
                )
            values = [part.value(name) for part in parts]
            shapes = {getattr(value, "shape", None) for value in values}
            is_array = isinstance(values[0], np.ndarray) and len(shapes) == 1
            window[name] = np.stack(values) if is_array else values
        return window


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches(RowMaker):
    """Makes batches of samples.

    Args:
        collate: Makes a batch of a list of samples.
        name: As in `Map`.
        version: As in `Map`.
    """

    collate: Collate
    name: str | None = None
    version: int | str | None = None
    is_batch: ClassVar[bool] = True

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the batch."""
        return collated(self.collate, [part.sample for part in parts])
