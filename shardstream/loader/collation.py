"""Collate samples to batches of tensors; decoders that need torch."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from shardstream.codecs import Audio, import_extra
from shardstream.errors import SampleError
from shardstream.format import Columns, TupleColumns, Values
from shardstream.loader.batch_transfer import MAX_TENSOR_BYTES, unsendable_error
from shardstream.pipeline import like_tuple

_REPEATED_LIMIT_BYTES = 1 << 30
_WEIGHTS_ONLY = re.compile(r"WeightsUnpickler error: (.*?)(?: was not an allowed|\. |\n|$)")
_BYTEARRAY = b"\nbytearray\n"  # its name in a pickle; under `weights_only` 300 bytes can allocate one of 8 GiB


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Wrap an array as a tensor that shares its memory."""
    return torch.from_numpy(array)


def cu_seqlens(segments: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the ends of the sequences in packed rows, for attention of variable length (``flash_attn_varlen_func``).

    >>> cu_seqlens(torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]]))
    (tensor([0, 2, 3, 4, 8], dtype=torch.int32), 4)

    Args:
        segments: Sequence of each token in its row, as `pack_sequences` gives it: shape (B, L) or (L,), on any device; 0 is padding.

    Returns:
        Ends of the sequences in the rows one after the other, shape (sequences + 1,), int32, from 0 to B * L, where the padding of a row is a
        sequence of its own; and the length of the longest.
    """
    rows = segments.reshape(-1, segments.shape[-1])
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    ends = torch.cat(
        [is_first.flatten().nonzero().flatten(), torch.tensor([rows.numel()], device=rows.device)]
    )
    return ends.to(torch.int32), int(ends.diff().max())


def load_tensors(data: bytes) -> Any:
    """Decode a file of ``torch.save`` to CPU tensors and plain containers (``weights_only``).

    Raises:
        ValueError: If it would expand: compressed entries, tensors over 1 GiB that are larger than their storage, or a
            ``bytearray``.
        pickle.UnpicklingError: If it holds anything but tensors and plain values.
    """
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > len(data):  # torch never compresses, so this is a zip bomb
            raise ValueError(f"entries expand to {size} bytes from {len(data)}")
    if _BYTEARRAY in data:
        raise ValueError(
            "a bytearray is refused, it could allocate any amount of memory; store a tensor or bytes"
        )
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = _WEIGHTS_ONLY.search(str(error))
        if reason is None:
            raise
        # torch's text has escape codes, and tells how to run the code of the data.
        message = f"it holds more than tensors, containers and numbers: {reason[1]}"
        raise type(error)(message) from error
    _check_extent(loaded)
    return loaded


def load_safetensors(data: bytes) -> dict[str, torch.Tensor]:
    """Decode a ``.safetensors`` file to its tensors by name, on the CPU.

    Raises:
        OptionError: If safetensors is not installed.
        safetensors.SafetensorError: If its header does not fit its bytes.
    """
    library = import_extra("safetensors.torch", extra="formats", purpose="decoding safetensors")
    tensors: dict[str, torch.Tensor] = library.load(data)
    return tensors


def _check_extent(loaded: Any) -> None:
    """Refuse tensors that repeat their storage and would take far more memory once stacked."""
    waiting, seen = [loaded], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            if value.layout == torch.strided and size > max(
                _REPEATED_LIMIT_BYTES, value.untyped_storage().nbytes()
            ):
                raise ValueError(f"a tensor of shape {tuple(value.shape)} repeats its memory")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def collate(items: Sequence[Any]) -> Any:
    """Collate samples (dicts), tuples (named tuples keep their type) or values to a batch.

    Arrays and tensors of one shape are stacked, shape (B, …), same dtype; numbers become a tensor of shape (B,): int64 for
    int, float64 for float (as in torch's own collate), bool for bool. All else (text, bytes, PIL images, nested JSON, ``None``)
    becomes a list. `Audio` of one length and rate becomes an `Audio` with samples of shape (B, C, T) and rates of shape (B,).

    Raises:
        SampleError: If arrays of one field differ in shape or dtype, samples in their fields, or only some items are samples or tuples.
    """
    if isinstance(items, Columns):
        return {name: _column(values, name, items) for name, values in items.columns.items()}
    if isinstance(items, TupleColumns):
        return tuple(
            _column(values, f"element {place}", items) for place, values in enumerate(items.columns)
        )
    first = items[0]
    if len(kinds := set(map(type, items))) > 1:
        _check_kinds(kinds)
    if isinstance(first, Mapping):
        return _collate_mappings(first, items)
    if isinstance(first, tuple):
        sizes = {len(item) for item in items}
        if len(sizes) > 1:
            raise SampleError(f"tuples of different lengths, {sorted(sizes)}, cannot be one batch")
        return like_tuple(
            first,
            [
                _column(list(column), f"element {place}", items)
                for place, column in enumerate(zip(*items, strict=True))
            ],
        )
    return _column(list(items), "items", items)


def _check_kinds(kinds: set[type]) -> None:
    """Check that all items are samples, all are tuples, or none is either; ``len`` and iteration do not tell them apart."""
    if len({(issubclass(kind, Mapping), issubclass(kind, tuple)) for kind in kinds}) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise SampleError(
            f"items of the types {names} cannot be one batch; return one type from each step, and leave samples out with select() "
            "instead of None"
        )


def _collate_mappings(
    first: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    # Equal counts, and all names of the first sample present: the names are equal. 10 times faster than comparing sets.
    if list(map(len, items)).count(len(first)) < len(items):
        raise _field_error(first, items)
    batch: dict[str, Any] = {}
    for name in first:
        try:
            values = list(map(itemgetter(name), items))
        except KeyError:
            raise _field_error(first, items) from None
        batch[name] = _column(values, name, items)
    return batch


def _field_error(first: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> SampleError:
    names, other = first.keys(), next(item for item in items if item.keys() != first.keys())
    return SampleError(
        f"samples with different fields cannot be one batch: {sorted(other.keys() ^ names)} of {first.get('__key__')!r} and "
        f"{other.get('__key__')!r}; choose fields that all have, with to_tuple or rename(..., keep=False)"
    )


def _column(values: Values, name: str, items: Sequence[Any]) -> Any:
    if isinstance(values, np.ndarray):
        return to_tensor(values.astype(values.dtype.newbyteorder("="), copy=False))
    kind = type(values[0])
    if kind is str or kind is bytes or not all(type(value) is kind for value in values):
        return values
    if issubclass(kind, torch.Tensor):
        return _stack(values, name, items)
    if issubclass(kind, np.ndarray):
        if values[0].dtype.kind not in "biufc":
            return values
        return _stack_arrays(values, name, items)
    if issubclass(kind, np.generic):
        column = np.array(values)
        return torch.as_tensor(column, device="cpu") if column.dtype.kind in "biufc" else values
    if kind is Audio:
        return _audio_column(values, name, items)
    return _number_column(values) if kind is float or kind is int or kind is bool else values


def _audio_column(values: list[Audio], name: str, items: Sequence[Any]) -> Audio:
    samples, rates = zip(*values, strict=True)
    if len(set(rates)) > 1:
        raise SampleError(
            f"{name}: sound of {min(rates)} Hz and {max(rates)} Hz cannot be one batch; resample it with "
            "decode(ss.codecs.AudioDecoder(rate=16000)), or pass collate_fn",
            field=name,
        )
    return Audio(_column(list(samples), name, items), _column(list(rates), name, items))


def _number_column(values: list[Any]) -> torch.Tensor | list[Any]:
    if type(values[0]) is float:
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    return torch.tensor(values, device="cpu") if max(map(abs, values)) < 1 << 63 else values


def _stack(values: list[torch.Tensor], name: str, items: Sequence[Any]) -> torch.Tensor:
    _check_alike(values, name, items)
    if get_worker_info() is None:
        return torch.stack(values)
    return torch.stack(values, out=_new_batch(values[0], len(values)))


def _stack_arrays(
    values: list[np.ndarray[Any, Any]], name: str, items: Sequence[Any]
) -> torch.Tensor:
    first = torch.from_numpy(np.empty_like(values[0], dtype=values[0].dtype.newbyteorder("=")))
    _check_alike(values, name, items)
    batch = _new_batch(first, len(values))
    # Copied by NumPy: torch would start its thread pool for a few copies, and wait for it where the cores are busy.
    rows = batch.numpy()
    for place, value in enumerate(values):
        rows[place] = value
    return batch


def _check_alike(values: Sequence[Any], name: str, items: Sequence[Any]) -> None:
    shape, dtype = values[0].shape, values[0].dtype
    for item, value in zip(items, values, strict=True):
        if value.shape != shape or value.dtype != dtype:
            key = f" (sample {item.get('__key__')!r})" if isinstance(item, Mapping) else ""
            raise SampleError(
                f"{name}: {tuple(shape)} {dtype} and {tuple(value.shape)} {value.dtype}{key} cannot be stacked to one batch; "
                "give them one shape and dtype in a map (crop, resize, pad), or pass collate_fn (docs/troubleshooting.md)",
                field=name,
            )


def _new_batch(like: torch.Tensor, count: int) -> torch.Tensor:
    """Allocate a batch, shape (count, …); in a worker, in torch's shared memory if it is too large for a ring."""
    if get_worker_info() is None or count * like.nbytes <= MAX_TENSOR_BYTES:
        return like.new_empty((count, *like.shape))
    typed: Any = like._typed_storage()  # type: ignore[no-untyped-call]
    try:  # as torch's default_collate
        storage = typed._new_shared(count * like.numel(), device=like.device)
    except RuntimeError as error:
        raise unsendable_error(error) from error
    return like.new(storage).resize_(count, *like.shape)
