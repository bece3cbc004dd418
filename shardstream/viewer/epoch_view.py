"""Compute what each rank of a training reads at a step of an epoch, from the plan alone: nothing of the data is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardstream.errors import OptionError
from shardstream.order import (
    EpochSteps,
    RankPartition,
    Remainder,
    StepBalance,
    find_even_lane_counts,
    uneven_effect,
)
from shardstream.pipeline import (
    IndexedSource,
    MixIndexedSource,
    OrderOptions,
    parse_state,
    partition_config,
    resumed_source,
)
from shardstream.samples import Numbers, Samples

_ORDER = ("microbatch", "lanes", "window", "block")
_OPTIONS = ("remainder", *_ORDER, "nodes", "exchange")
_MAX_RANKS, _MAX_SAMPLES = 65_536, 1 << 20
_PATH_STEPS, _PATH_SAMPLES = 240, 16
_CLASSES = 24
_COST_STEPS, _COST_RANKS = 64, 64
_WHOLE_NUMBERS = (
    "epoch",
    "seed",
    "ranks",
    "workers",
    "batch_size",
    "step",
    "rank",
    "consumed",
    "nodes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training: the order of its samples, its topology, and a step of it.

    Args:
        epoch: Epoch, from 0.
        seed: Seed of the order.
        shuffle: Whether each epoch has an order of its own.
        ranks: Number of ranks.
        workers: Loader processes of each rank; 0 reads in the main process.
        batch_size: Samples of a batch of one rank.
        remainder: As in ``ShardDataset``.
        drop_last: As in ``ShardLoader``.
        microbatch: As in ``ShardDataset``; None is the batch size.
        lanes: As in ``ShardDataset``; None is the default.
        window: As in ``ShardDataset``; None is the default.
        block: As in ``ShardDataset``; None is the default.
        nodes: As in ``ShardDataset``.
        exchange: As in ``ShardDataset``.
        consumed: Samples of the epoch that all ranks have received before step 0: those of a state.
        step: Step to show, from 0.
        rank: Rank whose path through the data is shown.

    Raises:
        OptionError: If a number is out of range, or they do not fit together.
    """

    epoch: int = 0
    seed: int = 0
    shuffle: bool = True
    ranks: int = 1
    workers: int = 0
    batch_size: int = 32
    remainder: Remainder = "pad"
    drop_last: bool = False
    microbatch: int | None = None
    lanes: int | None = None
    window: int | None = None
    block: int | None = None
    nodes: int = 1
    exchange: float = 0.0
    consumed: int = 0
    step: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epoch", 0), ("ranks", 1), ("workers", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.step < 0 or self.consumed < 0 or not 0 <= self.rank < self.ranks:
            raise OptionError(
                f"step={self.step} and consumed={self.consumed} must be at least 0, and rank={self.rank} below ranks={self.ranks}"
            )
        if self.ranks > _MAX_RANKS or self.ranks * self.batch_size > _MAX_SAMPLES:
            raise OptionError(
                f"{self.ranks} ranks with batch_size={self.batch_size} are too many to show; the limit is {_MAX_RANKS:,} ranks "
                f"and {_MAX_SAMPLES:,} samples in a step"
            )

    @classmethod
    def parse(cls, values: Mapping[str, str], source: IndexedSource) -> Training:
        """Return the training that the form of the page describes.

        Args:
            values: The fields of the form; of the order, an empty one is a default computed from the data.
            source: Has the values of fields that are missing.

        Raises:
            OptionError: If a value is not a number, or a name is unknown.
        """
        found: dict[str, Any] = {name: getattr(source.options, name) for name in _OPTIONS}
        found |= {"seed": source.seed, "shuffle": source.shuffle}
        found["batch_size"] = source.options.microbatch or 32
        for name, text in values.items():
            if name in ("shuffle", "drop_last"):
                found[name] = text in ("true", "on", "1")
            elif name == "remainder":
                found[name] = text
            elif name in _WHOLE_NUMBERS or name in _ORDER:
                if text.strip():
                    found[name] = parse_whole(name, text)
                elif name in _ORDER:
                    found[name] = None
            elif name == "exchange":
                found[name] = _parse_share(name, text)
            else:
                raise OptionError(f"the form of a training has no field {name!r}")
        return cls(**found)

    def plan_arguments(self) -> list[str]:
        """Return the arguments of ``shardstream plan`` for this step; none if the command has no option for a value."""
        others = (*_OPTIONS, "consumed")
        plain = Training()
        if any(getattr(self, name) != getattr(plain, name) for name in others):
            return []
        arguments = ["--shuffle"] if self.shuffle else []
        arguments += ["--drop-last"] if self.drop_last else []
        for name in ("seed", "epoch", "ranks", "workers", "batch_size", "step"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return arguments

    def plan(self, source: IndexedSource, *, is_balanced: bool = True) -> EpochSteps:
        """Return the steps of all ranks, as a ``ShardLoader`` of this training computes them.

        Args:
            source: The samples.
            is_balanced: False leaves out their ``balance=``.
        """
        balance = source.balance if is_balanced and self.shuffle else None
        if source.draw is not None and self.nodes > 1:
            raise OptionError(
                "weights= draw other samples in each epoch, so nodes keep none; leave nodes empty"
            )
        source = source.with_options(**{name: getattr(self, name) for name in _OPTIONS})
        source = replace(_seeded(source, self.seed, shuffle=self.shuffle), balance=balance)
        config = partition_config(
            source, ranks=self.ranks, batch_size=self.batch_size, drop_last=self.drop_last
        )
        order = source.order(
            batch=self.microbatch or self.batch_size,
            lanes=config.batches_per_step * max(1, self.workers),
            epoch=self.epoch,
        )
        return EpochSteps(source.plan(order, self.epoch), config, consumed=self.consumed)


def _seeded(source: IndexedSource, seed: int, *, shuffle: bool) -> IndexedSource:
    """Return a source with another seed, and with or without shuffle."""
    if not isinstance(source, MixIndexedSource):
        return replace(source, seed=seed, shuffle=shuffle)
    if not shuffle:
        raise OptionError("a mix is always shuffled")
    return replace(source, seed=seed)


def parse_whole(name: str, text: str) -> int:
    """Return the whole number that a text of a form is.

    Raises:
        OptionError: If it is none.
    """
    try:
        return int(text)
    except ValueError as error:
        raise OptionError(f"{name} must be a whole number, not {text[:40]!r}") from error


def _parse_share(name: str, text: str) -> float:
    try:
        return float(text or 0)
    except ValueError as error:
        raise OptionError(f"{name} must be a number, not {text[:40]!r}") from error


class Stored(NamedTuple):
    """The dataset that the page shows, in which a training finds its samples."""

    number_of: Callable[[Numbers], Numbers]
    """Numbers of the training's samples -> their numbers in this dataset, -1 for those of other shards; shape (n,); of rows all of their samples."""
    classes: Numbers | None
    """Class of each sample, -1 where it is unknown; None if there are no columns."""
    names: Sequence[str] | None
    """Names of the classes."""


def view_epoch(training: Training, source: IndexedSource, stored: Stored) -> dict[str, Any]:
    """Return what each rank reads at a step, and the path of one rank through the data, as JSON values.

    Args:
        training: Order, topology and step.
        source: The samples that the training reads, and how.
        stored: The dataset that the page shows.

    Raises:
        OptionError: If the training has no such step.
    """
    steps, samples = training.plan(source), source.samples
    if not steps.num_steps:
        raise OptionError(
            "the rest of this epoch has no step; choose a smaller batch or fewer ranks"
        )
    if training.step >= steps.num_steps:
        raise OptionError(
            f"there is no step {training.step}: they are numbered from 0 to {steps.num_steps - 1}"
        )
    first, at_step = steps.of_rank(training.rank), steps.at(training.step)
    ends = np.searchsorted(at_step.ranks, np.arange(1, training.ranks))
    batches = np.split(at_step.numbers, ends)
    shards = samples.shards_of(np.concatenate(batches))
    order = first.plan.order
    found: dict[str, Any] = {
        "step": training.step,
        "steps": first.max_steps,
        "samples": order.nsamples,
        "order": {
            name: getattr(order, name if name != "microbatch" else "batch") for name in _ORDER
        },
        "consumed_after": first.consumed_after(training.step + 1),
        "ranks": _describe_ranks(batches, training, first, samples, stored),
        "path": _path(first, stored),
        "notes": _notes(training, first),
        "shards": {"count": len(shards), "of": samples.num_shards},
    }
    if source.balance is not None and training.shuffle:
        found["costs"] = _costs(training, source, source.balance)
    if stored.classes is not None:
        known = np.append(stored.classes, -1)  # the last is that of samples elsewhere
        whole = known[stored.number_of(np.arange(len(samples)))]
        shown = [known[stored.number_of(one)] for one in batches]
        found["classes"] = _class_shares(shown, whole, stored.names)
        if {"weights", "mix"} & set(source.describe(steps=False)):
            found["notes"].append(
                "The shares of the classes are those of the stored samples; weights give the batches others."
            )
    return found


def open_source(make_dataset: Callable[[], Any]) -> IndexedSource:
    """Return the source of the dataset that the user's function makes.

    Raises:
        OptionError: If it makes none, or one whose order is no plan.
        Exception: Any error of the function.
    """
    dataset = make_dataset()
    source = getattr(getattr(dataset, "pipeline", None), "indexed_source", None)
    if not isinstance(source, IndexedSource):
        raise OptionError(
            f"the function of --dataset returned {type(dataset).__name__}; it must return a ShardDataset, mix or join of shards with an "
            "index, and no step of it may change the number of samples: else no plan says which sample comes when"
        )
    return source


def read_state(text: str, source: IndexedSource) -> tuple[Training, IndexedSource]:
    """Return the training that a saved state of a ``ShardLoader`` continues, and its samples.

    Topology and batch size are not in a state: those of the result are defaults.

    Args:
        text: The state as JSON, as ``json.dumps(loader.state_dict())`` writes it, or an object that contains it.
        source: The samples that the training reads.

    Raises:
        StateError: If it is no state, was edited, or is one of other data or of another kind of loader.
    """
    state = parse_state(text)
    seeded = _seeded(source, state.get("seed", 0), shuffle=state.get("shuffle", True))
    batch_size = state.get("microbatch", 1)
    resumed = resumed_source(seeded, OrderOptions(), state, batch_size)
    # Without shuffle, window and block do not affect the order.
    names = ("epoch", "seed", "shuffle", "consumed", *(_ORDER if state["shuffle"] else _ORDER[:2]))
    return Training(batch_size=batch_size, **{name: state[name] for name in names}), resumed


def continued(training: Training, shown: Training) -> Training:
    """Return the training of a state with the topology that the page shows.

    Raises:
        OptionError: If the batch size is not a multiple of the state's microbatch.
    """
    microbatch = training.microbatch or training.batch_size
    size = max(microbatch, shown.batch_size // microbatch * microbatch)
    return replace(
        training,
        ranks=shown.ranks,
        workers=shown.workers,
        batch_size=size,
        remainder=shown.remainder,
        nodes=shown.nodes,
        exchange=shown.exchange,
        drop_last=shown.drop_last,
        step=shown.step,
        rank=shown.rank,
    )


def _describe_ranks(
    batches: Sequence[Numbers],
    training: Training,
    partition: RankPartition,
    samples: Samples,
    stored: Stored,
) -> list[dict[str, Any]]:
    worker = None
    if training.workers:
        worker, _ = partition.worker_of(training.step, training.workers)
    found = []
    for rank, numbers in enumerate(batches):
        shards, counts = np.unique(samples.find_shards(numbers), return_counts=True)
        found.append(
            {
                "rank": rank,
                "worker": worker,
                "numbers": stored.number_of(numbers).tolist(),
                "shards": dict(zip(map(str, shards.tolist()), counts.tolist(), strict=True)),
            }
        )
    return found


def _path(partition: RankPartition, stored: Stored) -> dict[str, Any]:
    """Return the samples of some steps, spread over the epoch: the path of a rank through the stored data."""
    count = partition.num_steps
    steps = np.unique(np.linspace(0, max(0, count - 1), min(count, _PATH_STEPS)).astype(np.int64))
    points = []
    for numbers in partition.samples(steps):
        spread = np.linspace(0, max(0, len(numbers) - 1), min(len(numbers), _PATH_SAMPLES))
        points.append(stored.number_of(numbers[spread.astype(np.int64)]).tolist())
    return {"steps": steps.tolist(), "numbers": points, "of_steps": count}


def _costs(training: Training, source: IndexedSource, balance: StepBalance) -> dict[str, Any]:
    """Return the costs of the ranks at some steps around the shown one, without and with ``balance=``; 1 is the mean."""
    count = min(_COST_STEPS, _MAX_SAMPLES // (training.ranks * training.batch_size))
    first = training.step // max(1, count) * count
    found: dict[str, Any] = {"first": first, "padded": balance.padded}
    total = np.max if balance.padded else np.sum
    for name in ("before", "after"):
        plan = training.plan(source, is_balanced=name == "after")
        partitions = [plan.of_rank(rank) for rank in range(training.ranks)]
        steps = np.arange(first, min(first + count, partitions[0].full_steps), dtype=np.int64)
        ranks = [
            [float(total(balance.costs[own % len(balance.costs)])) for own in one.samples(steps)]
            for one in partitions
        ]
        costs = np.array(ranks).T  # shape (steps, ranks)
        costs /= max(float(costs.mean()), 1e-300) if costs.size else 1.0
        most = np.maximum(costs.max(axis=1, initial=0.0), 1e-300)
        busy = costs.mean(axis=1) / most if costs.size else costs
        found[name] = {"costs": costs[:, :_COST_RANKS].round(4).tolist(), "busy": busy.tolist()}
    return found


def _notes(training: Training, partition: RankPartition) -> list[str]:
    config, workers = partition.config, max(1, training.workers)
    lanes = partition.plan.order.lanes
    if not training.shuffle or lanes % (config.batches_per_step * workers) == 0:
        return []
    fitting = sorted(set(find_even_lane_counts(config, workers, lanes)))
    note = (
        f"lanes={lanes} is not a multiple of {training.ranks} ranks x {workers} workers x {config.microbatches} microbatches: "
        f"the order stays exact, but {uneven_effect(partition.plan.order, config, workers)}. Lanes that fit: {str(fitting)[1:-1]}."
    )
    return [note]


def _class_shares(
    batches: Sequence[Numbers], classes: Numbers, names: Sequence[str] | None
) -> dict[str, Any]:
    """Return the classes of the batches against their shares of the data.

    The distance of a batch is half of the summed differences of the shares: 0 for equal shares, 1 for none in common. Beside it stands
    the distance that independent draws have in the mean, the ideal of a shuffle.
    """
    known = classes[classes >= 0]
    numbers, counts = np.unique(known, return_counts=True)
    if not len(numbers):
        return {"rows": [], "distances": [], "ideal": 0.0, "classes": 0, "unknown": len(classes)}
    shares = counts / counts.sum()
    got = []
    for batch in batches:
        mine = batch[batch >= 0]
        got.append(np.bincount(np.searchsorted(numbers, mine), minlength=len(numbers)))
    total = np.sum(got, axis=0)
    size = max(1, int(total.sum()))
    top = np.argsort(-shares, kind="stable")[:_CLASSES].tolist()
    rows = [
        {
            "number": int(numbers[n]),
            "name": None if names is None or numbers[n] >= len(names) else names[int(numbers[n])],
            "share": float(shares[n]),
            "expected": float(shares[n] * size),
            "count": int(total[n]),
        }
        for n in top
    ]
    per_rank = max(1, size // max(1, len(batches)))
    ideal = float(np.sqrt(2 * shares * (1 - shares) / (math.pi * per_rank)).sum() / 2)
    distances = [float(np.abs(one / max(1, one.sum()) - shares).sum() / 2) for one in got]
    return {
        "rows": rows,
        "distances": distances,
        "ideal": min(1.0, ideal),
        "classes": len(numbers),
        "unknown": int(len(classes) - len(known)),
    }
