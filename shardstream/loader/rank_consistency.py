"""Compare the order of samples between ranks before the first batch."""

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
_begun: Counter[str] = Counter()  # comparisons of this process, by fingerprint of the dataset


class KeyValueStore(Protocol):
    """The part of a ``torch.distributed`` store used here; unlike collectives it cannot deadlock ranks."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return an existing value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number shared by all ranks, and return it."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until the keys exist; RuntimeError on timeout."""


def compare_ranks(dataset: str, numbers: Mapping[str, Any], placement: Placement) -> None:
    """Compare a loader's order options with the other ranks, if ``torch.distributed`` is initialised.

    Args:
        dataset: Fingerprint of the dataset: its loaders are compared in the order in which they start.
        numbers: JSON values that must be the same on all ranks.
        placement: Of the loader.

    Raises:
        OptionError: On all ranks that arrive within 30 s, if two of them differ.
    """
    # Looked up, not imported: as in distributed.py
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = Placement(distributed.get_rank(), distributed.get_world_size())
    if ranks.world_size == 1 or ranks != placement:
        return
    # PyTorch has no public accessor for the default store; if a later version removes this one, nothing is compared.
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
    """Compare numbers with both neighbour ranks, and wait for the verdict of all ranks.

    A late rank finds the numbers of its neighbours in the store, so at least one rank detects each difference; a rank that never
    arrives costs the timeout and a warning.

    Args:
        store: Shared by all ranks.
        key: Prefix of this comparison's keys.
        numbers: As in `compare_ranks`.
        placement: Of this rank.
        wait_s: Timeout, in seconds.

    Raises:
        OptionError: If two ranks differ.
    """
    deadline = time.monotonic() + wait_s
    rank, size = placement.rank, placement.world_size
    own_numbers = json.dumps(numbers, sort_keys=True)
    store.set(f"{key}/{rank}", own_numbers)
    for other in sorted({(rank - 1) % size, (rank + 1) % size}):
        other_numbers = _wait_for(store, f"{key}/{other}", deadline)
        if other_numbers is None:
            store.set(
                f"{key}/verdict", ""
            )  # later ranks need not wait for a verdict; they still compare with this rank's numbers
            _warn(f"rank {other} did not start to read this dataset", wait_s)
            return
        if other_numbers != own_numbers:
            difference = _difference(
                json.loads(own_numbers), rank, json.loads(other_numbers), other
            )
            store.set(f"{key}/verdict", difference)
            raise OptionError(difference)
    if store.add(f"{key}/agreed", 1) == size:
        store.set(f"{key}/verdict", "")
    verdict = _wait_for(store, f"{key}/verdict", deadline)
    if verdict is None:
        _warn("a rank did not start to read this dataset", wait_s)
    elif verdict:
        raise OptionError(verdict)


def _wait_for(store: KeyValueStore, key: str, deadline: float) -> str | None:
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], min(_POLL, timedelta(seconds=left_s)))
            return store.get(key).decode()
        except RuntimeError:  # timeout; or the store is gone, which fails without waiting
            time.sleep(min(0.05, left_s))
    return None


def _difference(
    own_numbers: Mapping[str, Any], rank: int, other_numbers: Mapping[str, Any], other: int
) -> str:
    names = [
        name
        for name in sorted({*own_numbers, *other_numbers})
        if own_numbers.get(name) != other_numbers.get(name)
    ]
    descriptions = [
        ", ".join(f"{name}={numbers.get(name)!r}" for name in names)
        for numbers in (own_numbers, other_numbers)
    ]
    return (
        f"ranks read in different orders, so samples would be repeated or missed: rank {rank} has {descriptions[0]}, rank {other} has "
        f"{descriptions[1]}; give all ranks the same num_workers, batch_size and state, or set lanes= and microbatch= in the dataset; a "
        "dataset that only one rank reads needs placement=ss.Placement(0, 1)"
    )


def _warn(reason: str, wait_s: float) -> None:
    warnings.warn(
        f"{reason} within {wait_s:g} s: the order of samples was not compared between ranks. Every rank must read the same data with "
        "the same num_workers and batch_size; a dataset that only one rank reads needs placement=ss.Placement(0, 1)",
        UserWarning,
        stacklevel=5,
    )
