"""Decode field bytes to values by field name, through a fixed table that never runs code from the data."""

from __future__ import annotations

import gzip
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from shardstream.codecs import (
    DEPTH_LIMIT,
    VALUES_LIMIT,
    Video,
    VideoDecoder,
    check_depth,
    decode_buffer,
    decode_cbor,
    decode_csv,
    decode_msgpack,
    decode_tsv,
)
from shardstream.errors import (
    DecodeError,
    OptionError,
    StorageError,
    describe_error,
    get_logger,
    redact,
)
from shardstream.format import FIELDS_LIMIT, INT_FIELDS, JSON_FIELDS, Columns, Sample, mask_fields
from shardstream.pipeline.fast_decode import parse_json
from shardstream.pipeline.raw_image_decode import LossyDecodeError
from shardstream.pipeline.runner import ItemFunction, ItemStage
from shardstream.pipeline.stage import Context
from shardstream.storage import FieldFile

_log = get_logger(__name__)

Decoder = Callable[[bytes], Any]
"""Bytes of a field -> its value."""

Handler = Callable[[str, bytes], Any]
"""Decoder in WebDataset's style: ``handler(".jpg", data)`` returns a value, or None to try the next decoder."""

Table = Mapping[str, Decoder]
"""Last part of a field (``png`` of ``seg.png``) or a whole field -> decoder."""

_TEXT = ("txt", "text", "transcript")
INFLATED_LIMIT_BYTES = 1 << 30
_PIECE_BYTES = 1 << 18
_LAYOUTS_KEPT = 1000
_NUMBERS, _MAX_NUMBER_BYTES = "biuf", 8  # the types of numbers that torch has, too
_SMALL_BYTES = 1 << 14  # arrays that cost less to copy than to make
_REMEDY = "repack this sample, or skip it with on_error"
_CHOICES_KEPT = 1000
_warned_of: set[str] = set()
"""Fields that this process has named in a warning."""
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the methods that numpy writes


class _Layout(NamedTuple):
    """Header of a ``.npy`` file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    size: int


_layouts: dict[bytes, _Layout] = {}
"""Cache of parsed headers: parsing one takes 20 times as long as the rest of the decoding."""


def decode_npy(data: bytes) -> np.ndarray[Any, Any]:
    """Decode a ``.npy`` file to an array of the stored shape and dtype; object arrays (pickles) are refused.

    Format: NumPy enhancement proposal 1.
    """
    end = 10 + int.from_bytes(data[8:10], "little")
    layout = _layouts.get(data[:end])
    if layout is None:
        layout, end = _read_layout(data)
    if layout.size * layout.dtype.itemsize > len(data) - end:
        raise ValueError(
            f"an array of shape {layout.shape}, {layout.dtype}, does not fit in {len(data) - end} bytes"
        )
    flat = np.ndarray(layout.size, layout.dtype, data, end)
    return flat.reshape(layout.shape, order=layout.order).copy(order="K")


def _read_layout(data: bytes) -> tuple[_Layout, int]:
    """Parse a header; return the layout and the offset of the header's end."""
    stream = io.BytesIO(data)
    version = npy_format.read_magic(stream)
    is_first = version == (1, 0)
    read = npy_format.read_array_header_1_0 if is_first else npy_format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(stream)
    except (MemoryError, RecursionError) as error:  # raised by Python's parser for deep nesting
        raise ValueError("the header of the array is nested too deeply") from error
    if dtype.hasobject:
        raise ValueError("an array of objects is a pickle, which could run code")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} has a negative length")
    layout = _Layout(shape, dtype, "F" if is_fortran else "C", math.prod(shape))
    if layout.size and not dtype.itemsize:
        # The data does not bound the number of items: a field of 128 bytes could request unlimited work.
        raise ValueError(f"an array of shape {shape} with items of 0 bytes ({dtype})")
    end = stream.tell()
    if is_first and len(_layouts) < _LAYOUTS_KEPT:
        _layouts[data[:end]] = layout
    return layout, end


def decode_npy_column(files: list[bytes]) -> list[np.ndarray[Any, Any]] | np.ndarray[Any, Any]:
    """Decode ``.npy`` files as `decode_npy`; small ones of one shape and type of numbers to one array, shape (n, ...).

    That takes a tenth of the time: no array, and no copy, for each file. Large arrays would be copied once more.
    """
    first = files[0]
    end = 10 + int.from_bytes(first[8:10], "little")
    layout = _layouts.get(first[:end])
    if layout is None:
        layout, end = _read_layout(first)
    used = layout.size * layout.dtype.itemsize
    if (
        layout.order != "C"
        or layout.dtype.kind not in _NUMBERS
        or layout.dtype.itemsize > _MAX_NUMBER_BYTES
        or not 0 < used <= min(_SMALL_BYTES, len(first) - end)
        or any(len(file) != len(first) for file in files)
    ):
        return list(map(decode_npy, files))
    rows = np.frombuffer(b"".join(files), np.uint8).reshape(len(files), len(first))
    if (rows[:, :end] != rows[0, :end]).any():
        return list(map(decode_npy, files))
    return rows[:, end : end + used].copy().view(layout.dtype).reshape(len(files), *layout.shape)


def decode_npz(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Decode a ``.npz`` file to its arrays by name; pickles, contents over 1 GiB and over 65,536 arrays are refused."""
    return dict(iter_npz(data, limit_bytes=INFLATED_LIMIT_BYTES))


def iter_npz(data: bytes, *, limit_bytes: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of a ``.npz`` file with their names, one in memory at a time; contents over the limit are refused before."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > FIELDS_LIMIT:
            raise ValueError(f"{len(entries)} arrays, the limit is {FIELDS_LIMIT}")
        _check_inflated(sum(entry.file_size for entry in entries), limit_bytes)
        for entry in entries:
            yield entry.filename.removesuffix(".npy"), decode_npy(_read_entry(archive, entry))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read at most the declared size of an entry; ``archive.read`` would first inflate all of it."""
    if entry.compress_type not in _PACKED:
        raise ValueError(f"{entry.filename!r} has a compression method that numpy does not use")
    with archive.open(entry) as stream:
        return stream.read(entry.file_size)


def decode_gzip(data: bytes) -> bytes:
    """Inflate a ``.gz`` field; contents over 1 GiB are refused."""
    pieces: list[bytes] = []
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while piece := stream.read(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            _check_inflated(size, INFLATED_LIMIT_BYTES)
    return b"".join(pieces)


def _check_inflated(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise ValueError(f"it unpacks to {size} bytes or more, the limit is {limit_bytes}")


def decode_json(data: bytes) -> Any:
    """Decode JSON; nesting over 200 levels is refused, and over 10 million values (commas and brackets in text count)."""
    _check_values(data)
    return _parse_shallow(data)


def decode_jsonl(data: bytes) -> list[Any]:
    """Decode JSON lines to a list of their values, with the limits of `decode_json`; blank lines are left out."""
    _check_values(data)
    lines = data.split(b"\n")
    if len(lines) > VALUES_LIMIT:
        raise ValueError(f"{len(lines)} lines, the limit is {VALUES_LIMIT}")
    return [_parse_shallow(line) for line in lines if line.strip()]


def _check_values(data: bytes) -> None:
    if len(data) > VALUES_LIMIT:
        values = sum(map(data.count, (b",", b"[", b"{")))
        if values > VALUES_LIMIT:
            raise ValueError(
                f"JSON of {values} values, the limit is {VALUES_LIMIT}; store large lists as npy"
            )


def _parse_shallow(data: bytes) -> Any:
    value = parse_json(data)
    if data.count(b"[") + data.count(b"{") > DEPTH_LIMIT:
        check_depth(value)
    return value


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8")


BASIC: dict[str, Decoder] = {
    **dict.fromkeys(_TEXT, _decode_text),
    # Sorted, because the order of a set differs between processes, and parts of a job compare their steps.
    **dict.fromkeys(sorted(INT_FIELDS), int),
    **dict.fromkeys(sorted(JSON_FIELDS), decode_json),
    "jsonl": decode_jsonl,
    "csv": decode_csv,
    "tsv": decode_tsv,
    "npy": decode_npy,
    "npz": decode_npz,
    **dict.fromkeys(("ten", "tb"), decode_buffer),
    **dict.fromkeys(("mp", "msg", "msgpack"), decode_msgpack),
    "cbor": decode_cbor,
}
"""Decoders without torch; ``loader/decoder_tables.py`` adds those of tensors, images, sound and video."""

_BY_COLUMN = frozenset(map(id, (*BASIC.values(), None)))
"""Decoders that may be called in another order, and again, by id, because decoders of users may have no hash; None keeps the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(ItemStage):
    """Decode the fields of each sample.

    Args:
        table: Decoders by field, or by its last part.
        mask_table: Decoders for mask fields; None uses ``table``.
        masks: Mask fields; None selects them by name, see `mask_fields`.
        handlers: Decoders that are tried first, in order.
        only: Fields to decode; None means all. Values that are not bytes stay as they are.
        threads: As in `ItemStage`.
        given: The user's options for both tables, which states compare: default tables may change between versions.
        known: Last parts of fields that some decoder takes; fields with another one are named in a warning. Empty: no warning.
        left_out: Fields that the samples had before ``fields=`` left them out, which count when masks are selected by name.
    """

    table: Table = field(compare=False)
    mask_table: Table | None = field(default=None, compare=False)
    masks: frozenset[str] | None = None
    handlers: tuple[Handler, ...] = ()
    only: frozenset[str] | None = None
    threads: int = 0
    given: Mapping[str, Any] | None = None
    known: frozenset[str] = field(default=frozenset(), compare=False)
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    _chosen: dict[tuple[str, ...], Mapping[str, Decoder | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    is_decoding = True

    def __getstate__(self) -> list[Any]:
        """Return the fields without `_chosen`: jobs compare the pickles of their steps, used or not."""
        return [{} if one.name == "_chosen" else getattr(self, one.name) for one in fields(self)]

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002  (decoding depends on nothing but bytes)
        """Return the function that decodes a sample."""
        return self._decode

    def decodes(self, field: str) -> bool:
        """Return whether the bytes of a field become another value."""
        if self.only is not None and field not in self.only:
            return False
        return bool(self.handlers) or self._choose({field: b""})[field] is not None

    def apply_to_columns(self, columns: Columns) -> Columns | None:
        """Decode text, numbers, JSON and arrays field by field; None if there are other decoders, or a sample is bad."""
        names = tuple(columns.columns)
        decoders = self._chosen.get(names) or self._choose(columns[0])
        fields = [
            name
            for name in names
            if not name.startswith("__") and (self.only is None or name in self.only)
        ]
        if self.handlers or not _BY_COLUMN.issuperset(id(decoders[name]) for name in fields):
            return None
        decoded = dict(columns.columns)
        for name in fields:
            files, decoder = columns.columns[name], decoders[name]
            if name.endswith(".gz") or set(map(type, files)) != {bytes}:
                return None
            assert isinstance(files, list)  # noqa: S101  (of bytes)
            try:
                if decoder is decode_npy:
                    decoded[name] = decode_npy_column(files)
                elif decoder is not None:
                    decoded[name] = list(map(decoder, files))
            except Exception:  # noqa: BLE001  (raised again, with its sample, when they are decoded one by one)
                return None
        return Columns(decoded)

    def _decode(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        if not isinstance(sample, dict):
            raise OptionError(
                f"decode works on samples, not on {type(sample).__name__}: put it before to_tuple and batched"
            )
        decoders = self._chosen.get(tuple(sample)) or self._choose(sample)
        decoded: Sample = {}
        for name, value in sample.items():
            if (
                name.startswith("__")
                or not isinstance(value, bytes | FieldFile)
                or (self.only is not None and name not in self.only)
            ):
                decoded[name] = value
                continue
            try:
                decoded[name] = result = self._decode_field(name, value, decoders[name])
            except MemoryError as error:
                error.add_note(
                    f"while decoding field {name!r} of sample {sample.get('__key__')!r} in {redact(str(sample.get('__url__')))}"
                )
                raise
            except (OptionError, StorageError):  # not of the sample
                raise
            except Exception as error:
                raise DecodeError(
                    f"cannot be decoded: {describe_error(error)}",
                    remedy="" if isinstance(error, LossyDecodeError) else _REMEDY,
                    shard=sample.get("__url__"),
                    key=sample.get("__key__"),
                    field=name,
                ) from error
            if type(result) is Video:  # decoded later; errors then name the sample
                decoded[name] = result.located(sample, name)
        return decoded

    def _decode_field(self, name: str, value: bytes | FieldFile, decoder: Decoder | None) -> Any:
        if isinstance(value, FieldFile):
            if not self.handlers and not name.endswith(".gz"):
                if decoder is None:
                    return value
                if isinstance(decoder, VideoDecoder):
                    return decoder(value)
            value = value.read()
        data = value
        if name.endswith(".gz"):
            name, data = name[:-3], decode_gzip(data)
        for handler in self.handlers:
            value = handler(f".{name}", data)
            if value is not None:
                return value
        return data if decoder is None else decoder(data)

    def _choose(self, sample: Sample) -> Mapping[str, Decoder | None]:
        """Choose and cache the decoders for samples with the fields of this one."""
        plain = {name: name.removesuffix(".gz") for name in sample}
        siblings = (name.removesuffix(".gz") for name in self.left_out)
        masks = mask_fields([*plain.values(), *siblings]) if self.masks is None else self.masks
        chosen: dict[str, Decoder | None] = {}
        for name, field_name in plain.items():
            table = self.mask_table if field_name in masks and self.mask_table else self.table
            chosen[name] = table.get(field_name) or table.get(field_name.rsplit(".", 1)[-1])
            if chosen[name] is None and isinstance(sample[name], bytes | FieldFile):
                self._warn_if_unknown(name, field_name)
        if len(self._chosen) >= _CHOICES_KEPT:  # field names that never repeat
            self._chosen.clear()
        self._chosen[tuple(sample)] = chosen
        return chosen

    def _warn_if_unknown(self, name: str, field_name: str) -> None:
        """Warn once of a field that stays bytes, and would with any option."""
        is_left = name.startswith("__") or (self.only is not None and name not in self.only)
        is_known = not self.known or field_name.rpartition(".")[2] in self.known
        if is_left or is_known or self.handlers or name in _warned_of:
            return
        if len(_warned_of) < _CHOICES_KEPT:
            _warned_of.add(name)
            _log.warning(
                "no decoder is chosen by the name of field %r, so it stays bytes; name one, e.g. decode(fields={%r: 'rgb'}), "
                "or keep the bytes: fields={%r: bytes}",
                name,
                field_name,
                field_name,
            )
