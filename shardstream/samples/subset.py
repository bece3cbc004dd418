"""Some samples of others as samples of their own, so that orders, lengths and states are those of the subset."""

from __future__ import annotations

import hashlib
import io
import os
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.samples.base import Fetcher, FetchOptions, Numbers, Samples, places_in
from shardstream.samples.view import ViewOfOne

if TYPE_CHECKING:
    import pyarrow as pa

Choice = Sequence[int] | Sequence[bool] | npt.NDArray[Any] | slice | str | os.PathLike[str]
"""Numbers of samples, a mask of as many bools as there are samples, a slice, or the path or URL of a ``.npy`` file of numbers or bools, or of
a ``.txt`` file with a key on each line."""

_NUMBER_BYTES = 16  # of a number in a .npy file, at most


class Subset(ViewOfOne):
    """Some samples of others: sample i is the sample ``numbers[i]`` of the whole. Shards keep their numbers.

    Args:
        whole: The whole.
        numbers: Numbers of samples, each at most once, shape (n,).
    """

    def __init__(self, whole: Samples, numbers: Numbers) -> None:
        super().__init__(whole)
        self._length = len(numbers)
        self._kept: Numbers | None = None  # numbers of these samples, after `restrict_to`
        small = len(whole) <= np.iinfo(np.uint32).max  # half the bytes for each spawned worker
        self._numbers = numbers.astype(np.uint32 if small else np.int64)

    def __len__(self) -> int:
        return self._length

    @property
    def numbers(self) -> Numbers:
        """Numbers of the samples in the whole, shape (n,)."""
        return self._numbers.astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the subset and its order."""
        digest = hashlib.sha256(f"subset of {self.whole.fingerprint}\n".encode())
        digest.update(self._numbers.astype("<u8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{self._length:,} of {plural(len(self.whole), 'sample')} in {plural(self.num_shards, 'shard')}"

    def restrict_to(self, numbers: Numbers) -> Self:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        part = super().restrict_to(numbers)
        part._kept = np.unique(numbers % self._length)
        part._numbers = self._numbers[places_in(self._kept, part._kept)]
        return part

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of samples in the whole, shape (n,)."""
        return self.whole_numbers(numbers)

    def whole_numbers(self, numbers: Numbers) -> Numbers:
        """Return the numbers of samples in the whole; a copy is a copy there, too."""
        copies, wanted = np.divmod(numbers, max(1, self._length))
        found = self._numbers[places_in(self._kept, wanted)]
        numbers_there: Numbers = found.astype(np.int64) + copies * len(self.whole)
        return numbers_there

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples; row i is sample i."""
        return self.whole.read_columns(names, scans=scans).take(self.numbers)

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher of the whole, which reads these samples only."""
        return super().open_fetcher(upcoming, replace(options or FetchOptions(), is_sparse=True))


def select_subset(samples: Samples, subset: Choice) -> Subset:
    """Return the samples that a user chose.

    Raises:
        OptionError: If it chooses none, or a sample that does not exist or twice, or is something else.
        StorageError: If its file cannot be read.
    """
    if isinstance(subset, slice):
        return _checked(samples, np.arange(len(samples))[subset])
    if isinstance(subset, str | os.PathLike):
        found = read_array(
            os.fspath(subset), samples, "subset= takes a .npy file of numbers or bools"
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
            "subset= takes the numbers or the keys of samples, or a mask of bools, in one dimension, "
            f"not {found.dtype} of shape {found.shape}: {reprlib.repr(subset)}"
        )
    if found.dtype != bool:
        return _checked(samples, found)
    if len(found) != len(samples):
        raise OptionError(
            f"subset= is a mask of {plural(len(found), 'bool')}, but there are {plural(len(samples), 'sample')}; "
            "give one for each, or the numbers of the samples"
        )
    return _checked(samples, np.flatnonzero(found))


def _checked(samples: Samples, numbers: npt.NDArray[Any]) -> Subset:
    if not len(numbers):
        raise OptionError("subset= chooses no sample")
    nsamples = len(samples)
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
    return Subset(samples, numbers.astype(np.int64))


def read_array(url: str, samples: Samples, expected: str) -> npt.NDArray[Any]:
    """Return the array of a ``.npy`` file, with a number for each sample or fewer.

    Args:
        url: Path or URL.
        samples: The samples; their storage reads the file.
        expected: Beginning of the message, such as "subset= takes a .npy file of numbers".

    Raises:
        OptionError: If it is no such file.
        StorageError: If it cannot be read.
    """
    data = samples.storage.read_bounded(url, expected_bytes=_NUMBER_BYTES * len(samples))
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, RecursionError) as error:
        # A header may name more numbers than the memory holds, and the file has none of them.
        raise OptionError(f"{expected} (numpy.save): {error}", shard=url) from error
    if not isinstance(found, np.ndarray):
        raise OptionError(f"{expected}, one array, not a .npz file", shard=url)
    return found
