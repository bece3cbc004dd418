"""Collate batches of a Ray dataset to tensors and lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.data.collate_fn import NumpyBatchCollateFn

from shardstream.errors import OptionError

_NUMBERS = "biufc"


class Collate(NumpyBatchCollateFn):  # type: ignore[misc]  # Ray is not typed here
    """Collate a batch for ``iter_torch_batches``: numbers become tensors, all else lists.

    Columns of numbers, and tensors of one shape, become a tensor of shape (B, ...) with the dtype of the column. Tensors of different
    shapes become a list of tensors. Text, bytes, structs and columns with null become lists, where Ray's own function fails
    (``can't convert np.ndarray of type numpy.str_``). Picklable and thread-safe.

    Ray moves a batch to the ``device`` of ``iter_torch_batches`` only if it has nothing but tensors; pass the device here for batches with
    text.

    Args:
        dtypes: dtype of all floating-point and integer tensors, or of single columns by name; None keeps those of the columns.
        device: Device of the tensors, e.g. "cuda"; None leaves them on the CPU.

    Raises:
        OptionError: When it is called, if ``dtypes`` names a column that the batch lacks, or that is not numeric.
    """

    def __init__(
        self,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dtypes = dict(dtypes) if isinstance(dtypes, Mapping) else dtypes
        self.device = device

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Return the columns of a batch as tensors or lists."""
        collated = {name: self._column(name, column) for name, column in batch.items()}
        if isinstance(self.dtypes, dict):
            for name in self.dtypes:
                if name not in collated:
                    raise OptionError(
                        f"dtypes names {name!r}, but the columns are {', '.join(collated)}"
                    )
                if isinstance(collated[name], list) and not _are_tensors(collated[name]):
                    raise OptionError(f"dtypes names {name!r}, which is not a column of numbers")
        return collated

    def _column(self, name: str, column: np.ndarray[Any, Any]) -> Any:
        dtype = self.dtypes.get(name) if isinstance(self.dtypes, dict) else self.dtypes
        if column.dtype.kind in _NUMBERS:
            return self._tensor(column, dtype)
        values = column.tolist() if column.dtype.kind != "O" else list(column)
        if values and all(isinstance(v, np.ndarray) and v.dtype.kind in _NUMBERS for v in values):
            return [self._tensor(value, dtype) for value in values]
        return values

    def _tensor(self, array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
        if not array.flags.writeable:  # a view of a block, which torch must not write to
            array = array.copy()
        tensor = torch.as_tensor(array)
        if isinstance(self.dtypes, torch.dtype) and tensor.dtype == torch.bool:
            dtype = None
        return tensor.to(device=self.device, dtype=dtype or tensor.dtype)


def _are_tensors(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)
