"""Options of a dataset that few jobs need, of the order of its samples and of reading them: one object each, from the door to its use."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from shardstream.catalog import Verify
from shardstream.errors import OptionError
from shardstream.order import EpochOrder, PartitionConfig, Remainder
from shardstream.pipeline.balance import Balance
from shardstream.pipeline.fields import check_fields
from shardstream.pipeline.stage import check_at_least, whole_number
from shardstream.samples import Lengths
from shardstream.storage import Storage, check_cache, open_cache

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
        for name in ("lanes", "microbatch", "window", "block", "nodes"):
            value = getattr(self, name)
            if value is not None:  # states hold them as JSON
                object.__setattr__(self, name, whole_number(name, value))
        if self.balance is not None and not isinstance(self.balance, Balance):
            object.__setattr__(self, "balance", Balance(self.balance))
        PartitionConfig(remainder=self.remainder)  # validates remainder
        check_at_least(
            1,
            lanes=self.lanes,
            microbatch=self.microbatch,
            window=self.window,
            block=self.block,
            nodes=self.nodes,
        )
        if self.balance is not None and self.nodes != 1:
            raise OptionError(
                "balance= deals samples to the ranks of all nodes, but nodes= keeps them on one; leave one of them out"
            )
        if self.nodes != 1 or self.exchange != 0:
            self._check_nodes()

    def __repr__(self) -> str:
        return _describe(self)

    def _check_nodes(self) -> None:
        exchange: object = self.exchange
        if not isinstance(exchange, int | float):
            raise OptionError(f"exchange must be a number, not {exchange!r}")
        object.__setattr__(self, "exchange", float(exchange))
        EpochOrder(  # validates
            nsamples=0,
            batch=1,
            shuffle=True,
            seed=0,
            lanes=self.lanes or self.nodes,
            window=1,
            block=1,
            nodes=self.nodes,
            exchange=self.exchange,
        )


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

    def __post_init__(self) -> None:
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


def options_or_default(options: object, kind: type[_OPTIONS]) -> _OPTIONS:
    """Return the value of ``order=`` or ``read=``, or the defaults if it is None.

    Raises:
        OptionError: If it is something else.
    """
    if options is None:
        return kind()
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
