"""Compare the order of samples between ranks before the first batch, and their epochs in each iteration."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from shardstream.distributed import Placement
from shardstream.errors import OptionError

WAIT_S = 30.0
_ARRIVAL_S = 0.05  # between two looks for other ranks
_POLL = timedelta(seconds=1)  # a wait in the store cannot be interrupted
_OPENED = "shardstream/opened"  # and the rank: fingerprint, name and versions of the dataset that it began to read last
_CALL = "call it on all ranks after the same batch, with the same values"
_begun: Counter[str] = Counter()  # comparisons of this process, by fingerprint of the dataset
_opened = set[str]()  # fingerprints of the datasets whose versions are compared


class OpenedVersions(NamedTuple):
    """The versions of a dataset that a rank has opened."""

    name: str
    """Of the folder of the dataset, the same for all versions and all choices of its samples."""
    versions: Sequence[int | None]


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

    def check(self, keys: list[str], /) -> bool:
        """Return whether the keys exist."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a value if the key has the expected one, or is missing and that is empty; return the value then."""


def compare_ranks(
    dataset: str,
    numbers: Mapping[str, Any],
    placement: Placement,
    *,
    call: str | None = None,
    opened: OpenedVersions | None = None,
) -> EpochAgreement | None:
    """Compare a loader's order options with the other ranks, if ``torch.distributed`` is initialised.

    Args:
        dataset: Fingerprint of the dataset: its loaders are compared in the order in which they start.
        numbers: JSON values that must be the same on all ranks.
        placement: Of the loader.
        call: As in `compare_in_store`.
        opened: Versions of the dataset: a rank that has opened others, or chosen other samples, has another fingerprint, and waits in vain.

    Returns:
        Comparison of the iterations that follow; None if there is nothing to compare with.

    Raises:
        OptionError: On all ranks that arrive within 30 s, if two of them differ.
    """
    # Looked up, not imported: as in distributed.py
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    ranks = Placement(distributed.get_rank(), distributed.get_world_size())
    if ranks.world_size == 1 or ranks != placement:
        return None
    # PyTorch has no public accessor for the default store; if a later version removes this one, nothing is compared.
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    if find is None:
        return None
    _begun[dataset] += 1
    key = f"shardstream/{dataset}/{_begun[dataset]}"
    store = find()
    if opened is not None:
        _opened.add(dataset)
        store.set(f"{_OPENED}/{placement.rank}", json.dumps([dataset, *opened]))
    if not compare_in_store(store, key, numbers, placement, call=call) and opened is not None:
        _check_opened(store, opened, placement)
    return EpochAgreement(store, key, placement.rank)


def _check_opened(store: KeyValueStore, own: OpenedVersions, placement: Placement) -> None:
    """Check that the neighbours have not begun a dataset that this rank does not read: another one, another version of it (published meanwhile), or other samples of it.

    Raises:
        OptionError: If one has.
    """
    rank, size = placement.rank, placement.world_size
    for other in sorted({(rank - 1) % size, (rank + 1) % size}):
        found = _wait_for(store, f"{_OPENED}/{other}", time.monotonic() + _ARRIVAL_S)
        dataset, name, versions = json.loads(found) if found else (None, None, None)
        if dataset is None or dataset in _opened:
            continue
        if name == own.name and versions != [*own.versions]:
            raise OptionError(
                f"ranks read different versions of the dataset: rank {rank} has {[*own.versions]}, rank {other} has {versions}; open the same one on all, such "
                "as version= of rank 0 (its dataset.versions), sent by torch.distributed.broadcast_object_list"
            )
        what = (
            f"samples of {own.name!r}"
            if name == own.name
            else f"datasets, {own.name!r} and {name!r}"
        )
        raise OptionError(
            f"ranks {rank} and {other} read different {what}, and each would read a part of its own only; give all ranks the same "
            "shards, subset= and where=, which the dataset distributes over them, or placement=ss.Placement() to a dataset that one rank reads alone"
        )


class EpochAgreement:
    """Compares the iterations of a loader with those of the other ranks, without waiting for any.

    The first rank that begins an iteration writes down its epoch, and how many batches it took from the iteration before; the
    others compare theirs. A rank that still reads looks for that entry after its batches 1, 2, 4, 8, …: so if one rank alone
    looked at a batch and reads the next epoch now, the others find out before their second batch.

    Args:
        store: Shared by all ranks.
        key: Prefix of the keys.
        rank: This rank.
    """

    def __init__(self, store: KeyValueStore, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._number = self._taken = 0
        self._is_complete = True

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def tell(self, name: str, value: str) -> None:
        """Tell the other ranks a value."""
        self._store.set(f"{self._key}/{name}", value)

    def told(self, name: str) -> str | None:
        """Return the value that another rank has told last; None before."""
        key = f"{self._key}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def end_together(self, name: str, ranks: int) -> None:
        """Let rank 0 wait up to 30 s for the others: its process may serve the store that says to them where the end is."""
        key, until = f"{self._key}/{name}/end", time.monotonic() + WAIT_S
        with suppress(RuntimeError):  # the store has ended
            arrived = self._store.add(key, 1)
            while self.is_first and arrived < ranks and time.monotonic() < until:
                time.sleep(_ARRIVAL_S)
                arrived = self._store.add(key, 0)

    def add_batch(self, epoch: int, *, is_first: bool, is_last: bool) -> None:
        """Count a batch that is handed out; compare the begin of the iteration before the first one.

        Raises:
            OptionError: If another rank reads another epoch, or took another number of batches from the last iteration.
        """
        if is_first:
            self._compare_begin(epoch)
            self._taken = 0
        self._taken += 1
        self._is_complete = is_last

    def end(self) -> None:
        """End an iteration after its last batch."""
        self._is_complete = True

    def check(self) -> None:
        """Check that no rank has left this iteration earlier; called before a further batch.

        Raises:
            OptionError: If one has.
        """
        if self._taken & (self._taken - 1):
            return
        key = self._begin_of(self._number + 1)
        try:
            if not self._store.check([key]):
                return
            other = json.loads(self._store.get(key))
        except RuntimeError:
            return
        # Not yet complete, but this rank may still take as many as the other has.
        self._compare_taken(other, self._taken + 1, is_complete=True)

    def _compare_begin(self, epoch: int) -> None:
        self._number += 1
        own = {"rank": self._rank, "epoch": epoch, "taken": self._taken}
        own["is_complete"] = self._is_complete
        try:
            entry = self._store.compare_set(self._begin_of(self._number), "", json.dumps(own))
        except RuntimeError:  # the rank that serves the store has ended
            return
        other = json.loads(entry)
        self._compare_taken(other, self._taken, is_complete=self._is_complete)
        if other["epoch"] != epoch:
            raise OptionError(
                f"ranks read different epochs, so samples would be repeated or missed: rank {other['rank']} begins epoch "
                f"{other['epoch']}, rank {self._rank} epoch {epoch}; call set_epoch with the same epoch on all ranks"
            )

    def _begin_of(self, number: int) -> str:
        return f"{self._key}/begin/{number}"

    def _compare_taken(self, other: Mapping[str, Any], taken: int, *, is_complete: bool) -> None:
        """Compare numbers of batches; they may differ if the iteration had no more for the rank that took fewer."""
        is_other_short = other["taken"] < taken and not other["is_complete"]
        is_short = taken < other["taken"] and not is_complete
        if is_other_short or is_short:
            raise OptionError(
                f"ranks took different numbers of batches from an iteration, so they would read different epochs: rank {other['rank']} "
                f"took {other['taken']} and began the next one, rank {self._rank} takes {taken}; if one rank alone looks at a batch, give "
                "it a dataset of its own with placement=ss.Placement(0, 1), or call set_epoch on all ranks"
            )


def compare_in_store(
    store: KeyValueStore,
    key: str,
    numbers: Mapping[str, Any],
    placement: Placement,
    wait_s: float = WAIT_S,
    *,
    call: str | None = None,
) -> bool:
    """Compare numbers with both neighbour ranks, and wait for the verdict of all ranks.

    A late rank finds the numbers of its neighbours in the store, so at least one rank detects each difference; a rank that never
    arrives costs the timeout and a warning. Returns whether all have arrived.

    Args:
        store: Shared by all ranks.
        key: Prefix of this comparison's keys.
        numbers: As in `compare_ranks`.
        placement: Of this rank.
        wait_s: Timeout, in seconds.
        call: Method whose arguments are compared; a rank that does not call it is an error.

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
            # Later ranks need not wait for a verdict; they still compare with this rank's numbers.
            missing = f"rank {other} did not call {call} within {wait_s:g} s; {_CALL}"
            store.set(f"{key}/verdict", missing if call else "")
            if call:
                raise OptionError(missing)
            _warn(f"rank {other} did not start to read this dataset", wait_s)
            return False
        if other_numbers != own_numbers:
            difference = _difference(
                json.loads(own_numbers), rank, json.loads(other_numbers), other, call
            )
            store.set(f"{key}/verdict", difference)
            raise OptionError(difference)
    if store.add(f"{key}/agreed", 1) == size:
        store.set(f"{key}/verdict", "")
    verdict = _wait_for(store, f"{key}/verdict", deadline)
    if verdict is None and call:
        raise OptionError(f"a rank did not call {call} within {wait_s:g} s; {_CALL}")
    if verdict is None:
        _warn("a rank did not start to read this dataset", wait_s)
    elif verdict:
        raise OptionError(verdict)
    return verdict is not None


def _wait_for(store: KeyValueStore, key: str, deadline: float) -> str | None:
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], min(_POLL, timedelta(seconds=left_s)))
            return store.get(key).decode()
        except RuntimeError:  # timeout; or the store is gone, which fails without waiting
            time.sleep(min(_ARRIVAL_S, left_s))
    return None


def _difference(
    own_numbers: Mapping[str, Any],
    rank: int,
    other_numbers: Mapping[str, Any],
    other: int,
    call: str | None,
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
    if call:
        return f"ranks differ in {call}: rank {rank} has {descriptions[0]}, rank {other} has {descriptions[1]}; {_CALL}"
    return (
        f"ranks read in different orders, so samples would be repeated or missed: rank {rank} has {descriptions[0]}, rank {other} has "
        f"{descriptions[1]}; give all ranks the same num_workers, batch_size and state, or set lanes= and microbatch= with order=ss.OrderOptions in the dataset; a "
        "dataset that only one rank reads needs placement=ss.Placement(0, 1)"
    )


def _warn(reason: str, wait_s: float) -> None:
    warnings.warn(
        f"{reason} within {wait_s:g} s: the order of samples was not compared between ranks. Every rank must read the same data with "
        "the same num_workers and batch_size; a dataset that only one rank reads needs placement=ss.Placement(0, 1)",
        UserWarning,
        stacklevel=5,
    )
