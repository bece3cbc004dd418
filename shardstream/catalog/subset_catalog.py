"""Some samples of a catalog as a catalog of their own, so that orders, lengths and states are those of the subset."""

from __future__ import annotations

import hashlib
import io
import os
import reprlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.catalog.base import (
    FAR_READ_RATIO,
    Catalog,
    Extents,
    IndexChunk,
    Numbers,
    check_numbers,
)
from shardstream.catalog.sample_columns import Keys, Where, find_keys, find_where
from shardstream.catalog.shard_catalog import ShardCatalog
from shardstream.errors import OptionError, plural
from shardstream.format import Buffer
from shardstream.storage import AdaptiveLimit, ReceiveBuffer, Storage

Subset = Sequence[int] | Sequence[bool] | npt.NDArray[Any] | slice | str | os.PathLike[str]
"""Numbers of samples, a mask of as many bools as there are samples, a slice, or the path or URL of a ``.npy`` file of numbers or bools, or of
a ``.txt`` file with a key on each line."""

_NUMBER_BYTES = 16  # of a number in a .npy file, at most


class SubsetCatalog(Catalog):
    """Some samples of a catalog: sample i is the sample ``numbers[i]`` of the catalog. Shards keep their numbers.

    Args:
        catalog: The catalog.
        numbers: Numbers of samples, each at most once, shape (n,).
    """

    max_read_ratio = FAR_READ_RATIO

    def __init__(self, catalog: Catalog, numbers: Numbers) -> None:
        self._catalog = catalog
        self._length = len(numbers)
        # A sparse catalog (see `restrict_to`) has some places only; they ascend.
        self._places: Numbers | None = None
        small = len(catalog) <= np.iinfo(np.uint32).max  # half the bytes for each spawned worker
        self._numbers = numbers.astype(np.uint32 if small else np.int64)
        self.can_coalesce = catalog.can_coalesce
        self.threads = catalog.threads
        self.max_prefetch_samples = catalog.max_prefetch_samples
        self.is_local = catalog.is_local
        self.timeout_s = catalog.timeout_s

    def __len__(self) -> int:
        return self._length

    @property
    def num_shards(self) -> int:
        """Number of shards of the whole catalog."""
        return self._catalog.num_shards

    @property
    def whole(self) -> Catalog:
        """The whole catalog."""
        return self._catalog

    @property
    def numbers(self) -> Numbers:
        """Numbers of the samples in the whole catalog, shape (n,)."""
        return self._numbers.astype(np.int64)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples, if they are as large as those of the whole catalog in the mean."""
        return self._catalog.total_bytes * self._length // max(1, len(self._catalog))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the subset and its order."""
        digest = hashlib.sha256(f"subset of {self._catalog.fingerprint}\n".encode())
        digest.update(self._numbers.astype("<u8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> list[str | None]:
        """Those of the whole catalog."""
        return self._catalog.checksums

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Those of the whole catalog."""
        return self._catalog.fields

    @property
    def storage(self) -> Storage:
        """The storage of the shards."""
        return self._catalog.storage

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{self._length} of {plural(len(self._catalog), 'sample')} in {plural(self.num_shards, 'shard')}"

    @cached_property
    def _shards(self) -> Numbers:
        """The shard of each sample."""
        return self._catalog.find_shards(self._numbers.astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_shards"}

    def restrict_to(self, shards: Sequence[int]) -> SubsetCatalog:
        """Return a catalog with the samples of some shards under the same numbers (see `Catalog.restrict_to`)."""
        mine = np.flatnonzero(np.isin(self._shards, np.asarray(shards, dtype=np.int64)))
        places = mine if self._places is None else self._places[mine]
        numbers = self._numbers[mine].astype(np.int64)
        part = SubsetCatalog(self._catalog.restrict_to(shards), numbers)
        part._places, part._length = places, self._length
        part.__dict__["total_bytes"] = self.total_bytes
        return part

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        return self._catalog.url_of(shard)

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples, in the order given."""
        return self._catalog.extents(self.whole_numbers(numbers))

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""
        return self._catalog.find_shards(self.whole_numbers(numbers))

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:
        """Return the parts of indexes that `extents` needs for some samples."""
        return self._catalog.index_chunks(self.whole_numbers(numbers))

    def load_index(self, chunk: IndexChunk) -> object:
        """Read a part of an index."""
        return self._catalog.load_index(chunk)

    def map_shard(self, shard: int) -> Buffer:
        """Return a local shard as a buffer."""
        return self._catalog.map_shard(shard)

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Check that local shards are unchanged."""
        self._catalog.check_unchanged(shards)

    def check_manifests(self) -> None:
        """Check that the dataset was not replaced."""
        self._catalog.check_manifests()

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        """Return some bytes of a shard."""
        return self._catalog.fetch(shard, start, end, concurrency)

    def fetch_into(
        self,
        buffer: ReceiveBuffer,
        shard: int,
        start: int,
        end: int,
        concurrency: AdaptiveLimit | None = None,
    ) -> None:
        """Read some bytes of a shard into memory."""
        self._catalog.fetch_into(buffer, shard, start, end, concurrency)

    def whole_numbers(self, numbers: Numbers | Sequence[int]) -> Numbers:
        """Return the numbers of samples in the whole catalog."""
        wanted = np.asarray(numbers, dtype=np.int64)
        check_numbers(wanted, self._length)
        if self._places is None:
            return self._numbers[wanted].astype(np.int64)
        places = np.searchsorted(self._places, wanted)
        if len(places) and (
            places.max() >= len(self._places) or (self._places[places] != wanted).any()
        ):
            raise IndexError(
                "a sample of a shard that this part of the dataset lacks (see restrict_to)"
            )
        return self._numbers[places].astype(np.int64)


def choose_samples(
    catalog: ShardCatalog,
    subset: Subset | None = None,
    keys: Keys | None = None,
    where: Where | None = None,
) -> Catalog:
    """Return a catalog of the samples that a user chose by number, by key, by a condition on columns, or by both.

    Raises:
        OptionError: If an argument is invalid or chooses no sample, or the shards have no columns; see `select_subset`, `find_keys` and
            `find_where`.
        StorageError: If a file cannot be read.
    """
    if isinstance(subset, str | os.PathLike) and os.fspath(subset).lower().endswith(".txt"):
        if keys is not None:
            raise OptionError("give subset= or keys=, not both")
        subset, keys = None, subset
    if subset is not None and keys is not None:
        raise OptionError("give subset= or keys=, not both")
    if subset is None and keys is None and where is None:
        return catalog
    matching = None if where is None else find_where(catalog, where)
    if matching is not None and not len(matching):
        raise OptionError(f"where={str(where)!r} chooses no sample")
    if keys is not None:
        subset = find_keys(catalog, keys)
    if subset is None and matching is not None:
        return SubsetCatalog(catalog, matching)
    chosen = select_subset(catalog, slice(None) if subset is None else subset)
    if matching is None:
        return chosen
    numbers = chosen.numbers[np.isin(chosen.numbers, matching)]
    if not len(numbers):
        raise OptionError(
            f"where={str(where)!r} chooses none of the {plural(len(chosen), 'sample')} of subset= or keys="
        )
    return SubsetCatalog(catalog, numbers)


def select_subset(catalog: Catalog, subset: Subset) -> SubsetCatalog:
    """Return a catalog of the samples that a user chose.

    Raises:
        OptionError: If it chooses none, or a sample that does not exist or twice, or is something else.
        StorageError: If its file cannot be read.
    """
    if isinstance(subset, slice):
        return _checked(catalog, np.arange(len(catalog))[subset])
    if isinstance(subset, str | os.PathLike):
        found = read_array(
            os.fspath(subset), catalog, "subset= takes a .npy file of numbers or bools"
        )
    else:
        try:
            found = np.asarray(subset)
        except ValueError as error:  # nested lists of different lengths
            raise OptionError(f"subset= takes one list of numbers or bools: {error}") from error
    if not found.size:
        raise OptionError("subset= chooses no sample")
    if found.ndim != 1 or not (found.dtype == bool or np.issubdtype(found.dtype, np.integer)):
        raise OptionError(
            "subset= takes the numbers of samples or a mask of bools, in one dimension, "
            f"not {found.dtype} of shape {found.shape}: {reprlib.repr(subset)}"
        )
    if found.dtype != bool:
        return _checked(catalog, found)
    if len(found) != len(catalog):
        raise OptionError(
            f"subset= is a mask of {plural(len(found), 'bool')}, but there are {plural(len(catalog), 'sample')}; "
            "give one for each, or the numbers of the samples"
        )
    return _checked(catalog, np.flatnonzero(found))


def _checked(catalog: Catalog, numbers: npt.NDArray[Any]) -> SubsetCatalog:
    if not len(numbers):
        raise OptionError("subset= chooses no sample")
    nsamples = len(catalog)
    outside = numbers[(numbers < 0) | (numbers >= nsamples)]
    if len(outside):
        raise OptionError(
            f"subset= has the sample {outside[0]}, but the samples are numbered from 0 to {nsamples - 1}"
        )
    found, counts = np.unique(numbers, return_counts=True)
    if len(found) < len(numbers):
        raise OptionError(
            f"subset= has the sample {found[counts > 1][0]} more than once, {len(numbers) - len(found)} numbers are repeated; "
            "name each sample once"
        )
    return SubsetCatalog(catalog, numbers.astype(np.int64))


def read_array(url: str, catalog: Catalog, expected: str) -> npt.NDArray[Any]:
    """Return the array of a ``.npy`` file, with a number for each sample or fewer.

    Args:
        url: Path or URL.
        catalog: The samples; its storage reads the file.
        expected: Beginning of the message, such as "subset= takes a .npy file of numbers".

    Raises:
        OptionError: If it is no such file.
        StorageError: If it cannot be read.
    """
    data = catalog.storage.read_bounded(url, expected_bytes=_NUMBER_BYTES * len(catalog))
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, RecursionError) as error:
        # A header may name more numbers than the memory holds, and the file has none of them.
        raise OptionError(f"{expected} (numpy.save): {error}", shard=url) from error
    if not isinstance(found, np.ndarray):
        raise OptionError(f"{expected}, one array, not a .npz file", shard=url)
    return found
