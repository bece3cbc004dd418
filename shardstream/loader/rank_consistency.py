"""Compares the order of samples between ranks, which would else read other samples than they agree on."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from shardstream.distributed import Placement
from shardstream.errors import OptionError

WAIT_S = 30.0
_POLL = timedelta(seconds=1)  # a wait in the store cannot be interrupted
_begun: Counter[str] = Counter()  # loaders of each dataset that this process has compared


class KeyValueStore(Protocol):
    """What is used of a ``torch.distributed`` store; unlike a collective it needs no order of calls, and no rank can hang in it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that all ranks share, and return it."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for values; RuntimeError if they do not come."""


def compare_ranks(dataset: str, numbers: Mapping[str, Any], placement: Placement) -> None:
    """Compare what fixes a loader's order with the other ranks of an initialised ``torch.distributed``; do nothing without.

    Args:
        dataset: Its fingerprint: loaders of one dataset are compared, in the order in which they begin.
        numbers: JSON values that must be the same on all ranks.
        placement: Of the loader.

    Raises:
        OptionError: On all ranks that are there within 30 s, if two of them differ.
    """
    # Looked up, not imported: as in distributed.py
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = Placement(distributed.get_rank(), distributed.get_world_size())
    if ranks.world_size == 1 or ranks != placement:
        return
    # PyTorch has no public name for it; where a later version has none at all, nothing is compared.
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    if find is not None:
        _begun[dataset] += 1
        key = f"shardstream/{dataset}/{_begun[dataset]}"
        compare_in_store(find(), key, numbers, placement)


def compare_in_store(
    store: KeyValueStore,
    key: str,
    numbers: Mapping[str, Any],
    placement: Placement,
    wait_s: float = WAIT_S,
) -> None:
    """Compare numbers with those of the next rank, and hear whether all ranks agree with theirs.

    Whichever rank comes late finds the numbers of its neighbours, so a difference is always found by one rank at least; a rank that
    never comes costs the wait and a warning.

    Args:
        store: Shared by all ranks.
        key: Of this comparison.
        numbers: As in `compare_ranks`.
        placement: Of this rank.
        wait_s: Longest wait.

    Raises:
        OptionError: If two ranks differ.
    """
    until = time.monotonic() + wait_s
    rank, size = placement.rank, placement.world_size
    mine = json.dumps(numbers, sort_keys=True)
    store.set(f"{key}/{rank}", mine)
    for other in sorted({(rank - 1) % size, (rank + 1) % size}):
        theirs = _wait_for(store, f"{key}/{other}", until)
        if theirs is None:
            store.set(
                f"{key}/verdict", ""
            )  # who comes later need not wait, and compares with this rank
            _warn(f"rank {other} did not begin to read this dataset", wait_s)
            return
        if theirs != mine:
            found = _difference(json.loads(mine), rank, json.loads(theirs), other)
            store.set(f"{key}/verdict", found)
            raise OptionError(found)
    if store.add(f"{key}/agreed", 1) == size:
        store.set(f"{key}/verdict", "")
    verdict = _wait_for(store, f"{key}/verdict", until)
    if verdict is None:
        _warn("some rank did not begin to read this dataset", wait_s)
    elif verdict:
        raise OptionError(verdict)


def _wait_for(store: KeyValueStore, key: str, until: float) -> str | None:
    while (left := until - time.monotonic()) > 0:
        try:
            store.wait([key], min(_POLL, timedelta(seconds=left)))
            return store.get(key).decode()
        except RuntimeError:  # not there yet; or the store is gone, which fails at once
            time.sleep(min(0.05, left))
    return None


def _difference(mine: Mapping[str, Any], rank: int, theirs: Mapping[str, Any], other: int) -> str:
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    told = [
        ", ".join(f"{name}={numbers.get(name)!r}" for name in names) for numbers in (mine, theirs)
    ]
    return (
        f"ranks read in different orders, so samples would come twice or never: rank {rank} has {told[0]}, rank {other} has {told[1]}; "
        "give all ranks the same num_workers, batch_size and state, or say lanes= and microbatch= in the dataset; a dataset that only "
        "one rank reads needs placement=ss.Placement(0, 1)"
    )


def _warn(what: str, wait_s: float) -> None:
    warnings.warn(
        f"{what} within {wait_s:g} s: whether all ranks read in the same order was not compared. Every rank must read the same data with "
        "the same num_workers and batch_size; a dataset that only one rank reads needs placement=ss.Placement(0, 1)",
        UserWarning,
        stacklevel=5,
    )
