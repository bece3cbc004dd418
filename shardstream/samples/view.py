"""Samples that are made of other samples: some of them, several after each other, or several joined to one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardstream.samples.base import Samples
from shardstream.samples.mapped import Numbers
from shardstream.storage import Storage


class View(Samples):
    """Samples that are made of other samples, of any kind: views of views, too.

    Args:
        inner: The samples that it is made of, at least one.
    """

    def __init__(self, inner: Sequence[Samples]) -> None:
        self.inner = tuple(inner)
        self.can_coalesce = all(one.can_coalesce for one in inner)
        self.is_local = all(one.is_local for one in inner)

    @abstractmethod
    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the inner samples to which each sample belongs, by their place, and its number there; shape (n,) each.

        Raises:
            IndexError: If there is no such sample.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first_shards"}

    @property
    def num_shards(self) -> int:
        """Number of shards of all inner samples."""
        return int(self._first_shards[-1])

    @cached_property
    def _first_shards(self) -> Numbers:
        return np.cumsum([0, *(one.num_shards for one in self.inner)])

    @property
    def storage(self) -> Storage:
        """The storage of the first inner samples."""
        return self.inner[0].storage

    @property
    def checksums(self) -> list[str | None]:
        """Those of all inner samples."""
        return [checksum for one in self.inner for checksum in one.checksums]

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        place = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.inner[place].url_of(shard - int(self._first_shards[place]))

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""
        return self._ask(
            numbers,
            lambda place, own: self.inner[place].find_shards(own) + self._first_shards[place],
        )

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the URL of a sample's shard, and its offset there."""
        places, own = self.find(np.array([number]))
        return self.inner[int(places[0])].place_of(int(own[0]))

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample, shape (n,)."""
        return self._ask(numbers, lambda place, own: self.inner[place].sizes(own))

    @property
    def has_columns(self) -> bool:
        """Whether all inner samples have columns."""
        return all(one.has_columns for one in self.inner)

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first inner samples."""
        return self.inner[0].column_names()

    def check_manifests(self) -> None:
        """Check that no dataset was replaced."""
        for one in self.inner:
            one.check_manifests()

    def _ask(self, numbers: Numbers, ask: Callable[[int, Numbers], Numbers]) -> Numbers:
        """Return a number for each sample, which its inner samples give for theirs."""
        places, own = self.find(numbers)
        found = np.empty_like(own)
        for place in np.unique(places).tolist():
            is_mine = places == place
            found[is_mine] = ask(place, own[is_mine])
        return found
