"""Options of a dataset that few jobs need, of the order of its samples and of reading them: one object each, from the door to its use."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from shardstream.catalog import Verify
from shardstream.errors import OptionError, plural
from shardstream.order import (
    PartitionConfig,
    Remainder,
    StepBalance,
    WeightedDraw,
    check_nodes,
    draw_by_weight,
)
from shardstream.pipeline.sample_steps import KeepFields, OpenFields, check_fields, keep_fields
from shardstream.pipeline.stage import Stage, State, check_at_least, set_whole_numbers, whole_number
from shardstream.pipeline.step_signatures import function_name
from shardstream.samples import CostFunction, Lengths, Samples, row_costs, values_of
from shardstream.storage import FieldPlaces, Storage, check_cache, open_cache


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Costs of samples, for ``balance=`` of `OrderOptions`: at each step all ranks get batches of about equal cost.

        ss.OrderOptions(balance=ss.Balance("n", cost=lambda n: n + n**2 / 8192))

    A round is one batch of each lane. The samples of `steps` rounds stay the same, and are dealt to their batches: large and small ones
    together, so that sums are equal. Only samples that cost more than a mean batch come in rounds of their own.

    Args:
        costs: Cost of each sample: the name of a column (``shardstream index URL --columns n=npy.len``), the path or URL of a ``.npy`` file, or
            one number for each (of ``subset`` and ``where``; in a mix those of all datasets, one after the other). A packed row, or a window, costs as
            much as its parts together, each of which has its share of the number of its sample.
        cost: Function of all these numbers, of rows those of all parts, shape (n,), float64, to the costs, of the same shape: attention within the
            documents of packed rows is ``lambda n: n**2``. It must return the same in each process that opens the dataset.
        steps: Rounds whose samples are dealt together. More of them balance better; fewer keep samples nearer to their place.
        group_size: Batches that wait for each other: ranks of a group x microbatches of a step, if only the ranks of one group work on a
            step together. By default all lanes, so that any number of ranks that divides the lanes is balanced.
        padded: A batch costs as its largest sample, as batches that are padded do: samples of similar cost make a batch.

    Raises:
        OptionError: If an option is out of range.
    """

    costs: Lengths
    _: KW_ONLY
    cost: CostFunction | None = None
    steps: int = 64
    group_size: int | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        set_whole_numbers(self, 1, "steps", "group_size")


def balance_of(options: object, samples: Samples, *, shuffle: bool) -> StepBalance:
    """Return the costs of samples for the value of ``balance=`` of `OrderOptions`.

    Raises:
        OptionError: If there is no shuffle, a column is missing, or a cost is not a finite number of at least 0.
        StorageError: If columns or a file cannot be read.
    """
    if not shuffle:
        raise OptionError(
            "balance= deals samples to other batches, but shuffle=False keeps the stored order; pass shuffle=True, or leave balance= out"
        )
    assert isinstance(options, Balance)  # noqa: S101  (made by `OrderOptions`)
    costs = row_costs(samples, options.costs, "balance=", options.cost)
    most = max(float(costs.max(initial=0)), 1e-300)
    return StepBalance(
        # Relative to the largest one, so that neither a cost nor a sum of them is too large for float32.
        costs=np.divide(costs, most, out=np.empty(len(costs), np.float32), casting="same_kind"),
        steps=options.steps,
        group_size=options.group_size,
        padded=options.padded,
    )


_BALANCED, _CLASS_COLUMN = "balanced", "cls"
MOST_SEGMENTS = 1024  # of an epoch: each takes 8 bytes for each lane and dataset, and about 0.3 ms when the epoch begins
DEFAULT_PREFETCH_BYTES = 64 << 20
"""Prefetch buffer of each worker for remote data: one window of the default size."""

_OPTIONS = TypeVar("_OPTIONS", "OrderOptions", "ReadOptions")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OrderOptions:
    """Options of the order of an epoch, for ``order=``; None is a default computed from the data.

        ss.ShardDataset(url, shuffle=True, order=ss.OrderOptions(window=10_000))

    Args:
        lanes: Canonical streams that an epoch is cut into; the same number gives the same global batches on every topology.
            By default the number of readers (ranks x workers x microbatches per step), so every rank needs the same
            ``num_workers`` and ``batch_size``.
        microbatch: Samples that always stay together; by default the loader's batch size.
        window: Samples shuffled together, a multiple of the microbatch; by default 64 MiB of them.
        block: Consecutive samples that are fetched together; by default 2 MiB of them. A mix takes it from each of its datasets.
        remainder: "pad", "drop" or "keep" the samples that do not fill a last step of all ranks (see `PartitionConfig`).
        nodes: Machines with a ``cache_dir`` each: a node reads the same blocks in every epoch, in another order, so that its cache
            serves them. The ranks of a node must have consecutive numbers, equally many on each node. Lanes are a multiple of it.
        exchange: Share of the blocks that all nodes exchange at random in each epoch, 0 to 1. With 1 all blocks are shuffled over all nodes.
        balance: Costs of samples, such as the column ``"n"``: at each step all ranks get batches of equal cost. `Balance` has its options.

    Raises:
        OptionError: If an option is out of range.
    """

    lanes: int | None = None
    microbatch: int | None = None
    window: int | None = None
    block: int | None = None
    remainder: Remainder = "pad"
    nodes: int = 1
    exchange: float = 0.0
    balance: Balance | Lengths | None = None

    def __post_init__(self) -> None:
        set_whole_numbers(self, 1, "lanes", "microbatch", "window", "block", "nodes")
        if self.balance is not None and not isinstance(self.balance, Balance):
            object.__setattr__(self, "balance", Balance(self.balance))
        PartitionConfig(remainder=self.remainder)  # validates remainder
        if self.balance is not None and self.nodes != 1:
            raise OptionError(
                "balance= deals samples to the ranks of all nodes, but nodes= keeps them on one; leave one of them out"
            )
        if self.nodes != 1 or self.exchange != 0:
            exchange: object = self.exchange
            if not isinstance(exchange, int | float):
                raise OptionError(f"exchange must be a number, not {exchange!r}")
            object.__setattr__(self, "exchange", float(exchange))
            check_nodes(self.nodes, self.lanes or self.nodes, self.exchange)

    def __repr__(self) -> str:
        return _describe(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReadOptions:
    """Options of reading samples, for ``read=``.

        ss.ShardDataset(url, read=ss.ReadOptions(cache_dir="/scratch/cache", cache_bytes="200GB"))

    Args:
        index: "auto" reads by number where there is an index, else by whole shards; "require" refuses shards without an
            index; "ignore" always reads whole shards.
        lazy: Fields whose bytes are not read, e.g. ``("mp4",)``: their value is a `FieldFile`, which reads parts of them where they are
            used. ``decode("video")`` makes a `Video` of it that fetches only what its frames need (of MP4 and QuickTime files);
            other decoders read it whole. Needs ``shardstream index URL --members``, and not ``verify``. Fields of under 256 KiB are read at once.
        filesystem: An fsspec file system to use instead of the one that ``storage_options`` describe.
        cache_dir: A local folder that caches remote bytes, for later epochs and other processes.
        cache_bytes: Limit of the cache, e.g. "200GB"; by default a tenth of the disk stays free.
        prefetch_bytes: Prefetch buffer of each worker for remote data, in bytes; raise it for stores with a long latency. The
            rest of the open windows (one per lane) plus a fifth of a window may be held even above this limit: with many
            lanes per worker, choose a smaller window.
        hedge: Send a second request when the first takes three times as long as usual (0.2 s or more), and use the first
            response: for stores that stall at times. Both are read and billed. A mix hedges if one of its parts does.
        verify: "sha256" compares all bytes with the manifest's checksums, which `pack` and `index` write, to detect bits flipped
            in the store or in transit. A wrong response is retried; if it stays wrong, the epoch ends with an
            `IndexMismatchError` whatever ``on_error`` is, because it is unknown which samples are sound.
            At its first use a shard is read whole, so the first epoch reads everything once more, in windows of whole MiB. Forked
            workers share the results, and later epochs reuse them; spawned workers verify again each time. ``cache_dir``
            keeps those bytes on local disk. Local shards are read once when they are opened.
        on_new_version: What a `ShardLoader` does with a state that was saved with an earlier version of the dataset: "continue" reads the rest of its epoch in
            that version, without the samples that were deleted since, and later epochs in this one; "error" refuses it.

    Raises:
        OptionError: If an option is invalid, or two exclude each other.
    """

    index: Literal["auto", "require", "ignore"] = "auto"
    lazy: Sequence[str] = ()
    filesystem: Any = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | str | None = None
    prefetch_bytes: int = DEFAULT_PREFETCH_BYTES
    hedge: bool = False
    verify: Verify | None = None
    on_new_version: Literal["continue", "error"] = "continue"

    def __post_init__(self) -> None:
        if self.on_new_version not in ("continue", "error"):
            raise OptionError(
                f"on_new_version is 'continue' or 'error', not {self.on_new_version!r}"
            )
        if self.index not in ("auto", "require", "ignore"):
            raise OptionError(f"index must be 'auto', 'require' or 'ignore', not {self.index!r}")
        if self.verify not in (None, "sha256"):
            raise OptionError(f"verify is 'sha256' or None, not {self.verify!r}")
        if self.lazy:
            check_fields(self.lazy, None, "the dataset", alternatives=False, option="lazy")
            object.__setattr__(self, "lazy", tuple(dict.fromkeys(self.lazy)))
        if self.lazy and self.verify is not None:
            raise OptionError(
                "verify= compares all bytes of the shards, which lazy= does not read; give one of them"
            )
        check_at_least(0, prefetch_bytes=self.prefetch_bytes)
        if self.cache_dir is not None or self.cache_bytes is not None:
            check_cache(self.cache_dir, self.cache_bytes)

    def __repr__(self) -> str:
        return _describe(self)

    def open_storage(self, storage_options: Mapping[str, Any] | None) -> Storage:
        """Return a storage with the file system and the cache of these options."""
        cache = None if self.cache_dir is None else open_cache(self.cache_dir, self.cache_bytes)
        return Storage(storage_options, self.filesystem, cache)


def first_stages(
    fields: Collection[str] | None,
    lazy: Sequence[str],
    known: Sequence[str] | None,
    storage: Storage,
) -> tuple[list[Stage], tuple[str, ...], FieldPlaces | None]:
    """Return the stages for ``fields=`` and ``lazy=`` of a dataset, all names of ``fields=``, and the places of lazy fields; None if there are none.

    Args:
        fields: Names of fields; None for all.
        lazy: Names of fields that are not read.
        known: The fields that the dataset has; None if they are unknown.
        storage: Storage of the shards.

    Raises:
        OptionError: If one is no list of names, or there is no such field.
    """
    stages: list[Stage] = [] if fields is None else [keep_fields(fields, known)]
    kept = () if fields is None else KeepFields(names=tuple(fields)).possible
    if not lazy:
        return stages, kept, None
    check_fields(lazy, known, "the dataset", alternatives=False, option="lazy")
    if left_out := [name for name in lazy if kept and name not in kept]:
        raise OptionError(f"lazy= names {left_out[0]!r}, which fields= leaves out")
    places = FieldPlaces(lazy)
    opens = OpenFields(names=tuple(lazy), places=places, storage=storage)
    return [*stages, opens], kept, places


_DEFAULTS = {kind: kind() for kind in (OrderOptions, ReadOptions)}


def options_or_default(options: object, kind: type[_OPTIONS]) -> _OPTIONS:
    """Return the value of ``order=`` or ``read=``, or the defaults if it is None.

    Raises:
        OptionError: If it is something else.
    """
    if options is None:
        options = _DEFAULTS[kind]
    if isinstance(options, kind):
        return options
    name = kind.__name__.removesuffix("Options").lower()
    raise OptionError(f"{name}= takes ss.{kind.__name__}(...), not {options!r}")


def refuse_options(
    options: OrderOptions | ReadOptions, names: Collection[str], reason: str
) -> None:
    """Refuse options that would have no effect.

    Args:
        options: The options of a user.
        names: Names of the fields without effect.
        reason: Where they have none, such as "in a mix".

    Raises:
        OptionError: If one of them is not its default.
    """
    given = [name for name in _changed(options) if name in names]
    if given:
        raise OptionError(f"{given[0]}= has no effect {reason}; leave it out")


def _changed(options: OrderOptions | ReadOptions) -> dict[str, Any]:
    """Return name -> value of the options that differ from their defaults."""
    values = {one.name: (getattr(options, one.name), one.default) for one in fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _describe(options: OrderOptions | ReadOptions) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in _changed(options).items())
    return f"{type(options).__name__}({given})"


SampleWeights = Sequence[float] | npt.NDArray[Any] | str | os.PathLike[str] | Mapping[int, float]
"""One weight for each sample, the path or URL of a ``.npy`` file of them, or the name of a column; class (number in ``cls``) -> weight; or "balanced"."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of samples with their options, for ``weights=`` of a dataset.

        ss.ShardDataset(url, weights=ss.Weights("balanced", num_samples=100_000))

    Args:
        values: One for each sample, or by class, as ``weights=`` takes them.
        replacement: False draws each sample at most once an epoch, with a probability in proportion to its weight (up to 1).
        num_samples: Samples of an epoch, over all ranks; by default as many as there are. Needed for ``replacement=False``.
    """

    values: SampleWeights
    _: KW_ONLY
    replacement: bool = True
    num_samples: int | None = None


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
        if len(steps) > MOST_SEGMENTS:
            raise OptionError(
                f"WeightSchedule has {len(steps)} weights in an epoch, at most {MOST_SEGMENTS} are possible; use a larger every="
            )
        weights = self.weights if callable(self.weights) else self.weights.__getitem__
        return [(max(0, step * self.step - first), weights(step)) for step in steps]


MixWeights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | WeightSchedule


def are_by_number(weights: SampleWeights | Weights | Lengths | None) -> bool:
    """Return whether weights or costs are given in the order of the samples, not by class or column."""
    values = weights.values if isinstance(weights, Weights) else weights
    if isinstance(values, str | os.PathLike):
        return os.fspath(values).endswith(".npy")
    return values is not None and not isinstance(values, Mapping)


def draw_of(samples: Samples, weights: SampleWeights | Weights) -> WeightedDraw:
    """Return how often each sample is expected in an epoch, for the value of ``weights=``.

    Raises:
        OptionError: If the weights are not possible.
        StorageError: If the file of the weights cannot be read.
    """
    if not isinstance(weights, Weights):
        weights = Weights(weights)
    values, count = weights.values, weights.num_samples
    if isinstance(values, Mapping):
        found = _class_weights(samples, values)
    elif isinstance(values, str) and values == _BALANCED:
        found = _class_weights(samples, None)
    else:
        found = values_of(samples, values, "weights=").astype(np.float64)
    return draw_by_weight(
        found,
        num_samples=None if count is None else whole_number("num_samples", count),
        replacement=weights.replacement,
    )


def _class_weights(
    samples: Samples, weights: Mapping[int, float] | None
) -> npt.NDArray[np.float64]:
    """Return the weight of each sample by its class, from the column ``cls``.

    Args:
        samples: The samples.
        weights: Number of the class -> weight of each of its samples; None gives all classes equal shares.

    Returns:
        Weights, shape (n,).

    Raises:
        OptionError: If the shards have no such column, a sample has no class, a class has no weight, or a weight no sample.
        StorageError: If the columns cannot be read.
    """
    if _CLASS_COLUMN not in samples.column_names():
        raise OptionError(
            "weights by class need the column cls; run 'shardstream index --columns cls' on the folder, or give one weight for each sample",
            shard=samples.url_of(0),
        )
    column = samples.read_columns([_CLASS_COLUMN])[_CLASS_COLUMN]
    if column.null_count:
        raise OptionError(
            f"{plural(column.null_count, 'sample')} without a class (cls), so without a weight; give one weight for each sample",
            shard=samples.url_of(0),
        )
    classes, inverse, counts = np.unique(
        column.to_numpy(zero_copy_only=False), return_inverse=True, return_counts=True
    )
    if weights is None:
        return (1.0 / counts)[inverse]
    present = set(classes.tolist())
    if present != weights.keys():
        missing, unknown = (
            sorted(present - weights.keys()),
            sorted(weights.keys() - present, key=str),
        )
        raise OptionError(
            f"weights= has no weight of the class {missing[0]}"
            if missing
            else f"weights= has the class {unknown[0]!r}, which no sample has; classes are the numbers of the field cls"
        )
    try:
        by_class = np.array([float(weights[one]) for one in classes.tolist()])
    except (TypeError, ValueError) as error:
        raise OptionError(f"weights= takes a number for each class: {error}") from error
    return by_class[inverse]
