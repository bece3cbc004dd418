"""Mix indexed datasets lane by lane with a computed schedule, so that a position stays one number.

The schedule says which dataset fills a place of a lane, and the plan of that dataset which sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from shardstream.errors import OptionError, plural
from shardstream.order import (
    BalancedEpochPlan,
    CopyPlan,
    EpochOrder,
    EpochPlan,
    Ints,
    MixSchedule,
    NodeEpochPlan,
    Places,
    SteppedMixSchedule,
    default_block,
    default_window,
    derive_key,
)
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.indexed_source import IndexedSource
from shardstream.pipeline.options import MOST_SEGMENTS, MixWeights, WeightSchedule
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.stage import Moved, Runner, State, Step
from shardstream.pipeline.step_signatures import function_name
from shardstream.samples import Concat, FetchOptions

Stop = Literal["first_exhausted", "all_exhausted"]
WeightChanges = Sequence[Sequence[Any]]
"""Weights given in the training, as states have them: pairs of the sample of the training from which they hold, and weights by name."""

_LEAST_SHARE = 0.9  # of the samples of an epoch; a shorter one warns
EPOCHS_PER_PASS = 1 << 32
"""Pass p of a part in epoch e of its mix is epoch ``e + p * EPOCHS_PER_PASS`` of its own."""
_MIX = 5  # purpose of the random key


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
        seed: As in `IndexedSource`, like the next five.
        options: As above.
        reading: As above.
        balance: As above.
        yields_batches: As above.
        is_new_each_epoch: As above.
        changes: Weights given in the training, by `changed_at`.
    """

    recipe: MixRecipe
    sources: tuple[IndexedSource, ...]
    samples: Concat
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
            lanes=options.lanes or math.lcm(lanes, options.nodes),
            nodes=options.nodes,
            exchange=options.exchange,
            window=options.window or default_window(total, total_bytes, batch),
            # A node keeps neighbours, as its cache does.
            block=options.block or default_block(total, total_bytes) if options.nodes > 1 else 1,
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
            plan = (NodeEpochPlan if order.nodes > 1 else EpochPlan)(order, epoch)
        return plan if self.balance is None else BalancedEpochPlan(plan, self.balance)

    def restrict_to(self, numbers: Ints) -> Self:  # noqa: ARG002
        """Return the mix: parts have samples of their own, too."""
        return self

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
        if sum(epoch * recipe.samples <= at for at, _ in kept) >= MOST_SEGMENTS:
            raise OptionError(f"set_weights was called {MOST_SEGMENTS} times in an epoch, which is the most that is possible")  # fmt: skip
        return replace(self, changes=[*kept, [sample, named]])

    def fetch_options(self, num_workers: int = 1) -> FetchOptions:
        """Return the options with which a fetcher of the samples is opened; an epoch may have few samples of a part."""
        options = IndexedSource.fetch_options(self, num_workers)
        is_sparse = any(source.fetch_options().is_sparse for source in self.sources)
        return replace(options, is_sparse=options.is_sparse or is_sparse)

    def number_of(self, number: int) -> None:
        """Return None: the number may count in the mix, or in one of its parts."""

    def open_steps(self, epoch: int, skips: SkipTracker) -> Step | None:
        """Return the steps of the parts, each applied to its own samples."""
        runners = {name: part.open_runner(epoch, skips) for name, part in self.recipe.parts.items()}
        return _PartSteps(self.samples, runners, skips)

    @property
    def draws(self) -> bool:
        """Whether samples are drawn by weight."""
        return self.recipe.weights is not None

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


class MixLanes:
    """Compute the sample at each place of a mix; lane l of the mix takes its samples from lane l of each part.

    Args:
        mix: The mix.
        planned: Segments of the epoch as they were known at its begin.
        segments: Segments of the epoch, with weights that were given since.
        order: Order of the epoch.
        epoch: From 0.
    """

    def __init__(
        self,
        mix: MixIndexedSource,
        planned: list[tuple[int, list[float]]],
        segments: list[tuple[int, list[float]]],
        order: EpochOrder,
        epoch: int,
    ) -> None:
        self._mix, self.nsamples = mix, len(mix.samples)
        self._lanes, self._order = order.lanes, order
        self._epoch = epoch
        self._schedule = _schedule_of(segments, order, epoch)
        shares = np.array([np.array(weights) / sum(weights) for _, weights in segments])
        self._shares: Any = shares.max(axis=0)
        self._windows = _windows_of(planned, segments, order.window)
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        numbers = np.arange(order.lanes, dtype=np.int64)
        part_sizes = [self._plan(part, 0).order.nsamples for part in range(len(self._shares))]
        self.sizes = np.stack([-((numbers - size) // order.lanes) for size in part_sizes], axis=1)
        self.wanted = self._shares > 0
        small = (self.sizes == 0).any(axis=0) & self.wanted
        if small.any():
            name = list(mix.recipe.parts)[int(np.flatnonzero(small)[0])]
            raise OptionError(
                f"dataset {name!r} has fewer samples than the mix has lanes, {order.lanes}; use fewer lanes"
            )

    def whole_length(self, recipe: MixRecipe) -> int:
        """Return the samples that an epoch would have in one lane, with batches of one sample."""
        if recipe.samples is not None:
            return recipe.samples
        lengths = self.sizes.sum(axis=0)[self.wanted] / self._shares[self.wanted]
        return int(lengths.min() if recipe.stop == "first_exhausted" else lengths.max())

    def counts(self, lengths: Ints) -> Ints:
        """Return the number of samples of each part in the first places of every lane, shape (L, parts)."""
        return self._schedule.counts(lengths, np.arange(self._lanes, dtype=np.int64))

    def samples(self, lanes: Ints, places: Ints) -> Ints:
        """Return the sample numbers, in all samples, at places of lanes; shape (n,) each."""
        part, turn = self._schedule.assign_sources(places, lanes)
        passes, turn = np.divmod(turn, self.sizes[lanes, part])
        numbers = np.empty_like(places)
        for kind in np.unique(part).tolist():
            for pass_number in np.unique(passes[part == kind]).tolist():
                is_in_pass = (part == kind) & (passes == pass_number)
                batches = turn[is_in_pass] * self._lanes + lanes[is_in_pass]
                plan = self._plan(kind, pass_number)
                numbers[is_in_pass] = self._number(kind, pass_number, plan.batches(batches)[:, 0])
        return numbers

    def find(self, samples: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the lanes and places at which samples come: the inverse of `samples`.

        Args:
            samples: Numbers in all samples, without copies; shape (n,).
            counts: How often each part is taken in each lane, shape (L, parts).

        Returns:
            Numbers with copies, lanes and places, shape (m,) each.
        """
        found = [np.empty((3, 0), dtype=np.int64)]
        kinds, own = self._mix.samples.find(samples)
        for kind in np.unique(kinds).tolist():
            sizes = self.sizes[:, kind]
            for pass_number in range(int((-(-counts[:, kind] // np.maximum(sizes, 1))).max())):
                numbers, batches, _ = self._plan(kind, pass_number).find(own[kinds == kind])
                turns, lanes = np.divmod(batches, self._lanes)
                turns += pass_number * sizes[lanes]
                is_taken = turns < counts[lanes, kind]
                lanes = lanes[is_taken]
                places = self._schedule.find_places(
                    np.full_like(lanes, kind), turns[is_taken], lanes
                )
                numbers = self._number(kind, pass_number, numbers[is_taken])
                found.append(np.stack((numbers, lanes, places)))
        numbers, lanes, places = np.concatenate(found, axis=1)
        return numbers, lanes, places

    def _number(self, kind: int, pass_number: int, numbers: Ints) -> Ints:
        """Return the numbers in all samples of those of a part in one of its passes, with copies."""
        samples = self._mix.samples
        inner_pass, inner = np.divmod(numbers, len(samples.inner[kind]))
        # A repeated sample gets a new number: it is fetched again, and its random augmentation differs.
        turns = inner_pass + pass_number * self._plan(kind, 0).passes
        found: Ints = samples.firsts[kind] + inner + turns * len(samples)
        return found

    def passes(self, counts: Ints) -> int:
        """Return an upper bound for the pass numbers of an epoch, so that those of nested mixes do not collide.

        Args:
            counts: As in `find`.
        """
        turns = int((counts / np.maximum(self.sizes, 1)).max()) + 1
        inner = max(self._plan(part, 0).passes for part in range(counts.shape[1]))
        # Doubled for nested mixes whose weights differ between passes.
        return 2 * turns * inner

    def _plan(self, part: int, pass_number: int) -> EpochPlan:
        plan = self._plans.get((part, pass_number))
        if plan is None:
            source = self._mix.sources[part]
            epoch = self._epoch + pass_number * EPOCHS_PER_PASS
            mixed = self._order
            order = source.order(batch=1, lanes=mixed.lanes, epoch=epoch)
            order = replace(
                order,
                lanes=mixed.lanes,
                nodes=mixed.nodes,
                exchange=mixed.exchange,
                window=source.options.window or self._windows[part],
            )
            if pass_number:  # those of a nested mix differ in length, but lanes take as much of each as of the first
                order = replace(order, nsamples=self._plan(part, 0).order.nsamples)
            plan = self._plans[part, pass_number] = source.plan(order, epoch)
        return plan


def _windows_of(
    planned: Sequence[tuple[int, list[float]]],
    segments: Sequence[tuple[int, list[float]]],
    window: int,
) -> list[int]:
    """Return the window of each part: the largest that was planned.

    Weights given within the epoch may not alter the order of a part that has samples already, so they count only for parts that have none
    until then.
    """
    sizes = [
        [one and max(1, round(window * one / sum(weights))) for one in weights]
        for _, weights in (*planned, *segments)
    ]
    of_parts = zip(*sizes, strict=True)
    number = len(planned)
    return [int(max(one[:number]) or next(filter(None, one[number:]), 1)) for one in of_parts]


def _schedule_of(
    segments: Sequence[tuple[int, list[float]]], order: EpochOrder, epoch: int
) -> MixSchedule | SteppedMixSchedule:
    """Return the schedule of an epoch; weights hold from the first whole batch on."""
    by_batch = {-(-first // order.batch): weights for first, weights in segments}
    schedules = [
        (batch, MixSchedule(weights, derive_key(order.seed, epoch, _MIX, *[batch] * (batch > 0))))
        for batch, weights in by_batch.items()
    ]
    if len(schedules) == 1:
        return schedules[0][1]
    return SteppedMixSchedule(schedules, lanes=order.lanes, batch=order.batch)


class MixEpochPlan(EpochPlan):
    """The batches of one epoch of a mix."""

    def __init__(self, order: EpochOrder, epoch: int, lanes: MixLanes) -> None:
        super().__init__(order, epoch)
        self._lanes = lanes
        self._counts = lanes.counts(lane_lengths(order.num_batches, order.lanes) * order.batch)
        self.passes, self.nsamples = lanes.passes(self._counts), lanes.nsamples

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        order = self.order
        slots = np.arange(order.batch, dtype=np.int64)
        places = (numbers // order.lanes * order.batch)[:, None] + slots
        lanes = np.repeat(numbers % order.lanes, order.batch)
        return self._lanes.samples(lanes, places.ravel()).reshape(places.shape)

    def find(self, samples: Ints) -> Places:
        """Return the batches in which samples come, and where: those of each copy."""
        order = self.order
        numbers, lanes, places = self._lanes.find(samples, self._counts)
        turns, slots = np.divmod(places, order.batch)
        return Places(numbers, turns * order.lanes + lanes, slots)

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, sorted by node; a mix ends with a full batch."""
        numbers = np.arange(start, self.order.num_batches, dtype=np.int64)
        by_node = numbers[np.argsort(numbers % self.order.nodes, kind="stable")]
        return self.batches(by_node).ravel()


def lane_lengths(batches: int, lanes: int) -> Ints:
    """Return the number of batches of each lane."""
    return -((np.arange(lanes, dtype=np.int64) - batches) // lanes)
