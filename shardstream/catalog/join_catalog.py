"""Samples of several catalogs joined to one sample each, by position or by key."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shardstream.catalog.base import Catalog, Extents, IndexChunk, Numbers
from shardstream.errors import plural
from shardstream.format import Buffer
from shardstream.storage import AdaptiveLimit, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """Samples that are added to those of the first catalog.

    Args:
        catalog: Their catalog.
        numbers: For each sample of the join its number in this catalog, -1 if it has none; None if all numbers are equal.
        fields: Field -> its name in this catalog; None for all fields, under their names.
        defaults: Fields, as bytes, of the samples that have none here.
        is_strict: Whether a sample here without one of ``fields`` is an error.
        num_unused: Number of samples here whose key no sample has.
    """

    catalog: Catalog
    numbers: npt.NDArray[np.signedinteger[Any]] | None = None
    fields: Mapping[str, str] | None = None
    defaults: Mapping[str, bytes]
    is_strict: bool = False
    num_unused: int = 0

    @property
    def known_fields(self) -> tuple[str, ...] | None:
        """Fields that it adds; None if they are unknown."""
        return self.catalog.fields if self.fields is None else tuple(self.fields)

    @property
    def has_classes(self) -> bool:
        """Whether the field ``cls`` of the joined samples is that of this catalog, whose class names count then."""
        is_own = self.fields is None or self.fields.get("cls") == "cls"
        return is_own and "cls" in (self.known_fields or ())

    def numbers_of(self, numbers: Numbers) -> Numbers:
        """Return the number of each sample in this catalog; -1 for none."""
        return numbers if self.numbers is None else self.numbers[numbers].astype(np.int64)


class JoinCatalog(Catalog):
    """Samples of a first catalog, in its order, each with the fields of one sample of other catalogs.

    Plans, lengths and byte ranges are those of the first catalog. `fetch` is refused: `shardstream.fetch` reads each catalog by itself,
    and joins the samples.

    Args:
        first: The first catalog.
        parts: The others.
        left_out: Fields of the first catalog that are left out.
    """

    def __init__(
        self, first: Catalog, parts: Sequence[JoinPart], left_out: Collection[str] = ()
    ) -> None:
        self.first, self.parts, self.left_out = first, tuple(parts), frozenset(left_out)
        self.can_coalesce = first.can_coalesce
        self.threads = first.threads
        self.max_prefetch_samples = first.max_prefetch_samples
        self.max_read_ratio = first.max_read_ratio
        self.timeout_s = first.timeout_s
        self.is_local = all(catalog.is_local for catalog in self.catalogs)

    @property
    def catalogs(self) -> list[Catalog]:
        """All catalogs, the first one first."""
        return [self.first, *(part.catalog for part in self.parts)]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_shards(self) -> int:
        """Number of shards of the first catalog."""
        return self.first.num_shards

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples; the mean size of those of each catalog, times the number of samples."""
        means = (one.total_bytes / max(1, len(one)) for one in self.catalogs)
        return int(sum(means) * len(self.first))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the datasets, with which of their samples are joined, and with the chosen fields."""
        digest = hashlib.sha256(f"join {self.first.fingerprint}\n".encode())
        digest.update(f"{sorted(self.left_out)}\n".encode() if self.left_out else b"")
        for part in self.parts:
            fields = None if part.fields is None else sorted(part.fields.items())
            defaults = sorted(part.defaults.items())
            digest.update(f"{part.catalog.fingerprint} {fields} {defaults}\n".encode())
            if part.numbers is not None:
                digest.update(part.numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> list[str | None]:
        """Checksums of each dataset."""
        return [one for catalog in self.catalogs for one in catalog.checksums]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields of all catalogs; None if those of one are unknown."""
        found = [self.first.fields, *(part.known_fields for part in self.parts)]
        if None in found:
            return None
        added = {name for names in found[1:] for name in names or ()}
        return tuple(sorted({*(found[0] or ())}.difference(self.left_out) | added))

    @property
    def storage(self) -> Storage:
        """The storage of the first catalog."""
        return self.first.storage

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(len(self), 'sample')} of {len(self.catalogs)} datasets"

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard of the first catalog."""
        return self.first.url_of(shard)

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges in the first catalog, in the order given."""
        return self.first.extents(numbers)

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample in the first catalog, shape (n,)."""
        return self.first.find_shards(numbers)

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:
        """Return the parts of indexes of the first catalog that `extents` needs for some samples."""
        return self.first.index_chunks(numbers)

    def load_index(self, chunk: IndexChunk) -> object:
        """Read a part of an index of the first catalog."""
        return self.first.load_index(chunk)

    def check_manifests(self) -> None:
        """Check that no dataset was replaced."""
        for catalog in self.catalogs:
            catalog.check_manifests()

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Check that local shards of the first catalog are unchanged."""
        self.first.check_unchanged(shards)

    def map_shard(self, shard: int) -> Buffer:
        """Refuse: a shard has the fields of the first catalog only."""
        self._refuse(shard)

    def fetch(
        self,
        shard: int,
        start: int,  # noqa: ARG002
        end: int,  # noqa: ARG002
        concurrency: AdaptiveLimit | None = None,  # noqa: ARG002
    ) -> bytes | memoryview:
        """Refuse: a shard has the fields of the first catalog only."""
        self._refuse(shard)

    def _refuse(self, shard: int) -> NoReturn:
        raise NotImplementedError(
            f"{self.url_of(shard)} has the fields of the first of {len(self.catalogs)} joined datasets only; read the samples of "
            "a JoinCatalog with shardstream.fetch"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "total_bytes"}
