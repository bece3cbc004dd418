"""Mix indexed datasets lane by lane with a computed schedule, so that a position stays one number."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shardstream.errors import OptionError, plural
from shardstream.order import (
    BalancedEpochPlan,
    CopyPlan,
    EpochOrder,
    EpochPlan,
    MixSchedule,
    StepBalance,
    default_window,
)
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.indexed_source import IndexedSource
from shardstream.pipeline.mix_plan import EPOCHS_PER_PASS, MixEpochPlan, MixLanes, lane_lengths
from shardstream.pipeline.options import OrderOptions, ReadOptions
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.runner import Moved, Runner, Step
from shardstream.pipeline.stage import State, check_at_least, whole_number
from shardstream.pipeline.step_signatures import function_name
from shardstream.samples import Concat, FetchOptions

Stop = Literal["first_exhausted", "all_exhausted"]

_MOST_SEGMENTS = 1024  # of an epoch: each takes 8 bytes for each lane and dataset, and about 0.3 ms when the epoch begins


@dataclass(frozen=True, slots=True)
class WeightSchedule:
    """Weights of a mix by the step of the training, for ``weights=`` of `mix`.

        ss.WeightSchedule({0: {"web": 1, "code": 0}, 1000: {"web": 0.5, "code": 0.5}}, step=256)

    A step is a number of samples that all ranks together receive, so the weights are the same on any number of ranks and workers,
    and after a resume on others. Epoch e of the mix begins at sample ``e * samples`` of the training. A microbatch has the weights
    of its first sample.

    Args:
        weights: First step -> weights by name from that step on, beginning with step 0; or a function of the step (not of the epoch) that
            returns weights by name.
        step: Samples of a step: usually the batch size times the number of ranks.
        every: Steps between two calls of a function, whose weights hold until the next call: up to 1,024 calls in an epoch.

    Raises:
        OptionError: If the steps are no whole numbers from 0 on, or ``every`` does not belong to a function.
    """

    weights: Mapping[int, Mapping[str, float]] | Callable[[int], Mapping[str, float]]
    _: KW_ONLY
    step: int
    every: int | None = None

    def __post_init__(self) -> None:
        check_at_least(1, step=self.step, every=self.every)
        if callable(self.weights) == (self.every is None):
            raise OptionError("WeightSchedule needs every= for a function, and for nothing else")
        if not callable(self.weights):
            steps = [whole_number("a step of WeightSchedule", step) for step in self.weights]
            if 0 not in steps or min(steps) < 0:
                raise OptionError(
                    f"the steps of WeightSchedule begin with 0, not {sorted(steps)[:1]}"
                )

    @property
    def table(self) -> dict[int, Mapping[str, float]]:
        """First step -> weights, in the order of the steps; empty for a function."""
        return {} if callable(self.weights) else dict(sorted(self.weights.items()))

    def describe(self) -> State:
        """Return the values that must equal those of a state."""
        described: Any = [[step, dict(weights)] for step, weights in self.table.items()]
        if callable(self.weights):
            described = function_name(self.weights)
        return {"step": self.step, "every": self.every, "weights": described}

    def segments(self, first: int, samples: int) -> list[tuple[int, Mapping[str, float]]]:
        """Return the weights of some samples of the training, each with the sample from which they hold, counted from ``first``.

        Raises:
            OptionError: If they are too many.
        """
        if callable(self.weights) and self.every is not None:
            size = self.every * self.step
            calls = range(first // size, -(-(first + samples) // size))
            steps = [call * self.every for call in calls]
        else:
            steps = [step for step in self.table if step * self.step < first + samples]
            num_over = sum(step * self.step <= first for step in steps)
            steps = steps[num_over - 1 :]
        if len(steps) > _MOST_SEGMENTS:
            raise OptionError(
                f"WeightSchedule has {len(steps)} weights in an epoch, at most {_MOST_SEGMENTS} are possible; use a larger every="
            )
        weights = self.weights if callable(self.weights) else self.weights.__getitem__
        return [(max(0, step * self.step - first), weights(step)) for step in steps]


MixWeights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | WeightSchedule

WeightChanges = Sequence[Sequence[Any]]
"""Weights given in the training, as states have them: pairs of the sample of the training from which they hold, and weights by name."""

_LEAST_SHARE = 0.9  # of the samples of an epoch; a shorter one warns


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRecipe:
    """Parts, weights and stop rule of a mix.

    Args:
        parts: Pipelines by name, each with its own decode and steps.
        weights: Share of each part by name, a function of the epoch that returns the shares, or shares by step; None reads every
            sample of all parts once per epoch.
        stop: An epoch ends before the first sample that would be repeated ("first_exhausted"), or when each sample of
            each part was read ("all_exhausted": smaller parts are repeated).
        samples: Samples of an epoch, instead of ``stop``.
    """

    parts: Mapping[str, Pipeline]
    weights: MixWeights | None
    stop: Stop
    samples: int | None
    _schedule: State = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if callable(self.weights):  # like steps, described before it runs
            self._schedule["schedule"] = function_name(self.weights)
        if isinstance(self.weights, WeightSchedule):
            self._schedule["schedule"] = self.weights.describe()
            for weights in self.weights.table.values():
                MixSchedule(self.in_order(weights), 0)  # validates also those of later epochs
            if self.samples is None:
                raise OptionError(
                    "WeightSchedule needs samples= of the mix, the samples of an epoch: epoch e begins at sample e * samples of the training"
                )
        if not self.parts:
            raise OptionError("a mix needs at least one dataset")
        if self.stop not in ("first_exhausted", "all_exhausted"):
            raise OptionError(f"stop is 'first_exhausted' or 'all_exhausted', not {self.stop!r}")
        if self.samples is not None and (self.samples < 1 or self.weights is None):
            raise OptionError("samples must be at least 1, and needs weights")
        self.segments_of(0)
        self._check_parts()

    def _check_parts(self) -> None:
        for name, part in self.parts.items():
            described = part.source.describe(steps=False)
            if isinstance(described.get("mix", {}).get("schedule"), dict):
                raise OptionError(
                    f"{name!r} is a mix with WeightSchedule inside a mix, where no step of the training is its own: mix all datasets at once"
                )
            if self.weights is not None:
                continue
            if described.get("mix", {}).get("weights"):
                raise OptionError(
                    f"{name!r} is a mix with weights inside a mix without weights: give weights for both, or mix all datasets at once"
                )
            if "weights" in described:
                raise OptionError(
                    f"{name!r} is drawn by weights=, but a mix without weights reads each sample once; give the mix weights"
                )

    def describe(self, *, steps: bool) -> State:
        """Return the values that must equal those of a state."""
        segments = self.segments_of(0)
        return {
            "weights": segments and dict(zip(self.parts, segments[0][1], strict=True)),
            "stop": self.stop,
            "samples": self.samples,
            "parts": {name: part.describe(steps=steps) for name, part in self.parts.items()},
        } | self._schedule

    def segments_of(
        self, epoch: int, changes: WeightChanges = ()
    ) -> list[tuple[int, list[float]]] | None:
        """Return the weights of an epoch in the order of the parts, each with the sample of the epoch from which they hold.

        Args:
            epoch: From 0.
            changes: In the order of the training; only with ``samples``.

        Raises:
            OptionError: If their names are not those of the parts.
        """
        weights, epoch = self.weights, epoch % EPOCHS_PER_PASS
        if weights is None:
            return None
        if isinstance(weights, WeightSchedule):
            length = self.samples or 0
            found = weights.segments(epoch * length, length)
        else:
            found = [(0, weights(epoch) if callable(weights) else weights)]
        begin, end = epoch * (self.samples or 0), (epoch + 1) * (self.samples or 0)
        changed = [(max(0, at - begin), one) for at, one in changes if at < end]
        num_over = sum(first == 0 for first, _ in changed)  # only the last of them holds
        changed = changed[max(0, num_over - 1) :]
        if changed:
            found = [segment for segment in found if segment[0] < changed[0][0]] + changed
        return [(first, self.in_order(one)) for first, one in found]

    def in_order(self, weights: Mapping[str, float]) -> list[float]:
        """Return weights in the order of the parts.

        Raises:
            OptionError: If their names are not those of the parts.
        """
        if set(weights) != set(self.parts):
            raise OptionError(
                f"weights are for {sorted(weights)}, the datasets are {sorted(self.parts)}"
            )
        return [float(weights[name]) for name in self.parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixIndexedSource(IndexedSource):
    """A mix of indexed datasets.

    Args:
        recipe: Parts, weights and stop rule.
        sources: Sources of the parts, in order.
        samples: Samples of all parts.
        seed: Seed of the order.
        options: Options of the order of the mix.
        reading: Options of prefetching.
        balance: Costs of the samples, of ``options.balance``.
        changes: Weights given in the training, by `changed_at`.
    """

    recipe: MixRecipe
    sources: tuple[IndexedSource, ...]
    samples: Concat
    seed: int = 0
    options: OrderOptions
    reading: ReadOptions
    balance: StepBalance | None = None
    changes: WeightChanges = ()
    shuffle: bool = field(init=False, default=True)

    @property
    def may_leave_out(self) -> bool:
        """Whether steps of its parts may leave samples out."""
        return any(part.may_leave_out for part in self.recipe.parts.values())

    def order(self, *, batch: int, lanes: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch for a microbatch; ``options.lanes`` takes precedence over ``lanes``.

        Raises:
            OptionError: If the lanes and whole batches leave no sample of the epoch.
        """
        options, total, total_bytes = self.options, len(self.samples), self.samples.total_bytes
        order = EpochOrder(
            nsamples=total,
            batch=batch,
            shuffle=True,
            seed=self.seed,
            lanes=options.lanes or lanes,
            window=options.window or default_window(total, total_bytes, batch),
            block=1,
        )
        if self.recipe.weights is None:
            return order
        mix_lanes = self._lanes(order, epoch)
        order = replace(order, nsamples=_length(mix_lanes, self.recipe, batch))
        _check_length(order, self.recipe, mix_lanes)
        return order

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""
        if self.recipe.weights is not None:
            plan: EpochPlan = MixEpochPlan(order, epoch, self._lanes(order, epoch))
        elif self.is_new_each_epoch:
            plan = CopyPlan(order, epoch, copy=epoch % EPOCHS_PER_PASS)
        else:
            plan = EpochPlan(order, epoch)
        return plan if self.balance is None else BalancedEpochPlan(plan, self.balance)

    def with_options(self, **changes: Any) -> MixIndexedSource:
        """Return the same mix with other options of the order."""
        return replace(self, options=replace(self.options, **changes))

    def changed_at(
        self, epoch: int, consumed: int, weights: Mapping[str, float]
    ) -> MixIndexedSource:
        """Return the same mix with other weights from a position on; those given for later ones are dropped.

        Raises:
            OptionError: If the weights are not valid for this mix, or it has no weights, no ``samples`` or a balance.
        """
        recipe = self.recipe
        if recipe.weights is None or recipe.samples is None:
            raise OptionError(
                "set_weights needs a mix with weights= and samples=, so that the length of an epoch does not depend on its weights"
            )
        if self.balance is not None:
            raise OptionError(
                "set_weights cannot change a mix with balance=, which has dealt the samples of the next steps already"
            )
        values = recipe.in_order(weights)
        MixSchedule(values, 0)  # validates
        sample, named = epoch * recipe.samples + consumed, dict(zip(recipe.parts, values, strict=True))  # fmt: skip
        kept = [change for change in self.changes if change[0] < sample]
        if sum(epoch * recipe.samples <= at for at, _ in kept) >= _MOST_SEGMENTS:
            raise OptionError(f"set_weights was called {_MOST_SEGMENTS} times in an epoch, which is the most that is possible")  # fmt: skip
        return replace(self, changes=[*kept, [sample, named]])

    def fetch_options(self, num_workers: int = 1) -> FetchOptions:
        """Return the options with which a fetcher of the samples is opened; an epoch may have few samples of a part."""
        options = IndexedSource.fetch_options(self, num_workers)
        is_sparse = options.is_sparse or any(source.is_sparse for source in self.sources)
        return replace(options, is_sparse=is_sparse)

    def number_of(self, number: int) -> None:
        """Return None: the number may count in the mix, or in one of its parts."""

    def open_steps(self, epoch: int, skips: SkipTracker) -> Step | None:
        """Return the steps of the parts, each applied to its own samples."""
        runners = {name: part.open_runner(epoch, skips) for name, part in self.recipe.parts.items()}
        return _PartSteps(self.samples, runners, skips)

    @property
    def is_new_each_epoch(self) -> bool:
        """Whether rows of a part have other samples in each epoch."""
        return any(source.is_new_each_epoch for source in self.sources)

    @property
    def yields_rows(self) -> bool:
        """Whether items of a part are made of parts of samples."""
        return any(source.yields_rows for source in self.sources)

    @property
    def yields_batches(self) -> bool:  # type: ignore[override]  # a constant of other sources
        """Whether an item of each part is a batch."""
        return all(source.yields_batches for source in self.sources)

    def describe(self, *, steps: bool) -> State:
        """Return the values of the mix that must equal those of a state."""
        recipe = self.recipe.describe(steps=steps)
        if self.changes:
            recipe["changes"] = self.changes
        return IndexedSource.describe(self, steps=steps) | {"mix": recipe}

    def counts(self, order: EpochOrder, epoch: int) -> dict[str, int]:
        """Return the number of samples of each part in an epoch."""
        if self.recipe.weights is None:
            return {
                name: len(part)
                for name, part in zip(self.recipe.parts, self.samples.inner, strict=True)
            }
        lanes = self._lanes(order, epoch)
        counts = lanes.counts(lane_lengths(order.num_batches, order.lanes) * order.batch).sum(
            axis=0
        )
        return dict(zip(self.recipe.parts, counts.tolist(), strict=True))

    def _lanes(self, order: EpochOrder, epoch: int) -> MixLanes:
        begin = epoch % EPOCHS_PER_PASS * (self.recipe.samples or 0)
        at_begin = [change for change in self.changes if change[0] <= begin]
        planned = self.recipe.segments_of(epoch, at_begin)
        segments = self.recipe.segments_of(epoch, self.changes)
        assert planned is not None and segments is not None  # noqa: S101, PT018  (checked by the callers)
        return MixLanes(self, planned, segments, order, epoch)


class _PartSteps:
    """The steps of each part, applied to its own samples."""

    def __init__(self, samples: Concat, runners: Mapping[str, Runner], skips: SkipTracker) -> None:
        self._all_samples = samples
        self._names, self._runners = list(runners), list(runners.values())
        self._skips = skips

    @property
    def decode_s(self) -> float:
        return sum(runner.decode_s for runner in self._runners)

    def __call__(self, items: Sequence[Any], numbers: list[int], /) -> Moved:
        parts, part_numbers = self._all_samples.find(np.array(numbers, dtype=np.int64))
        moved: dict[int, Any] = {}  # place in the batch -> item
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part).tolist()
            of_part = part_numbers[places].tolist()
            kept, kept_numbers = self._runners[part]([items[place] for place in places], of_part)
            self._skips.samples_per_dataset[self._names[part]] += len(places)
            asked = zip(of_part, places, strict=True)  # a number may be asked for twice
            for number, item in zip(kept_numbers, kept, strict=True):
                moved[next(place for one, place in asked if one == number)] = item
        order = sorted(moved)
        return [moved[place] for place in order], [numbers[place] for place in order]

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


def _check_length(order: EpochOrder, recipe: MixRecipe, lanes: MixLanes) -> None:
    """Check that lanes and whole batches leave most samples of an epoch, or warn.

    Raises:
        OptionError: If they leave none.
    """
    expected = lanes.whole_length(recipe)
    is_one_lane = (
        order.lanes == order.batch == 1
    )  # its places are drawn at random: nothing to advise
    if order.nsamples and (is_one_lane or order.nsamples >= _LEAST_SHARE * expected):
        return
    # Without the exact count, which differs between epochs: each would warn again.
    share = f"only {order.nsamples / expected:.0%}" if order.nsamples else "none"
    problem = (
        f"an epoch of this mix has {share} of the {expected} samples that its datasets and weights give, because each of "
        f"{plural(order.lanes, 'lane')} has whole batches of {order.batch} only; pass fewer lanes or a smaller microbatch to mix(...), or use smaller batches"
    )
    if not order.nsamples:
        raise OptionError(problem)
    warnings.warn(problem, UserWarning, stacklevel=3)


def _length(lanes: MixLanes, recipe: MixRecipe, batch: int) -> int:
    """Return the samples of an epoch, a multiple of the batch; bisection works because counts grow with the length."""
    if recipe.samples is not None:
        return recipe.samples // batch * batch
    number = len(lanes.sizes)

    def is_within_epoch(batches: int) -> bool:
        counts = lanes.counts(lane_lengths(batches, number) * batch)
        # first_exhausted: no sample was repeated yet; all_exhausted: some sample was not read yet
        if recipe.stop == "first_exhausted":
            return bool((counts <= lanes.sizes).all())
        return bool(((counts < lanes.sizes) & lanes.wanted).any())

    low, high = 0, 1
    while is_within_epoch(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within_epoch(middle) else (low, middle)
    return (low if recipe.stop == "first_exhausted" else high) * batch
