"""Decode field bytes to values by field name, through a fixed table that never runs code from the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardstream.codecs import (
    LossyDecodeError,
    Video,
    VideoDecoder,
    decode_buffer,
    decode_cbor,
    decode_csv,
    decode_gzip,
    decode_json,
    decode_jsonl,
    decode_msgpack,
    decode_npy,
    decode_npy_column,
    decode_npz,
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
from shardstream.format import INT_FIELDS, JSON_FIELDS, Columns, Sample, mask_fields
from shardstream.pipeline.stage import ItemStage
from shardstream.storage import FieldFile, is_mask

_log = get_logger(__name__)

Decoder = Callable[[bytes], Any]
"""Bytes of a field -> its value."""

Handler = Callable[[str, bytes], Any]
"""Decoder in WebDataset's style: ``handler(".jpg", data)`` returns a value, or None to try the next decoder."""

Table = Mapping[str, Decoder]
"""Last part of a field (``png`` of ``seg.png``) or a whole field -> decoder."""

_TEXT = ("txt", "text", "transcript")
_REMEDY = "repack this sample, or skip it with on_error"
_CHOICES_KEPT = 1000
_warned_of: set[str] = set()
"""Fields that this process has named in a warning."""


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
"""Decoders without torch; ``loader/decoding.py`` adds those of tensors, images, sound and video."""

_BY_COLUMN = frozenset(map(id, (*BASIC.values(), None)))
"""Decoders that may be called in another order, and again, by id, because decoders of users may have no hash; None keeps the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(ItemStage):
    """Decode the fields of each sample.

    Args:
        table: Decoders by field, or by its last part.
        mask_table: Decoders for mask fields; None uses ``table``.
        masks: Mask fields; None selects them by name, see `mask_fields`, and those that were masks before (`keep_masks`).
        handlers: Decoders that are tried first, in order.
        only: Fields to decode; None means all. Values that are not bytes stay as they are.
        threads: As in `ItemStage`.
        given: The user's options for both tables, which states compare: default tables may change between versions.
        known: Last parts of fields that some decoder takes; fields with another one are named in a warning. Empty: no warning.
    """

    table: Table = field(compare=False)
    mask_table: Table | None = field(default=None, compare=False)
    masks: frozenset[str] | None = None
    handlers: tuple[Handler, ...] = ()
    only: frozenset[str] | None = None
    threads: int = 0
    given: Mapping[str, Any] | None = None
    known: frozenset[str] = field(default=frozenset(), compare=False)
    _chosen: dict[tuple[str, ...], Mapping[str, Decoder | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    is_decoding = True

    def __getstate__(self) -> list[Any]:
        """Return the fields without `_chosen`: jobs compare the pickles of their steps, used or not."""
        return [{} if one.name == "_chosen" else getattr(self, one.name) for one in fields(self)]

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

    def apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        """Return the sample with decoded fields."""
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
                decoder = decoders[name]
                if self.masks is None and is_mask(value):
                    decoder = self._find(name.removesuffix(".gz"), is_mask=True)
                decoded[name] = result = self._decode_field(name, value, decoder)
            except MemoryError as error:
                error.add_note(
                    f"while decoding field {name!r} of sample {sample.get('__key__')!r} in {redact(str(sample.get('__url__')))}"
                )
                raise
            except (OptionError, StorageError):  # not of the sample
                raise
            except Exception as error:
                raise DecodeError.of(
                    sample,
                    f"cannot be decoded: {describe_error(error)}",
                    remedy="" if isinstance(error, LossyDecodeError) else _REMEDY,
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
        masks = mask_fields(plain.values()) if self.masks is None else self.masks
        chosen: dict[str, Decoder | None] = {}
        for name, field_name in plain.items():
            chosen[name] = self._find(field_name, is_mask=field_name in masks)
            if chosen[name] is None and isinstance(sample[name], bytes | FieldFile):
                self._warn_if_unknown(name, field_name)
        if len(self._chosen) >= _CHOICES_KEPT:  # field names that never repeat
            self._chosen.clear()
        self._chosen[tuple(sample)] = chosen
        return chosen

    def _find(self, field_name: str, *, is_mask: bool) -> Decoder | None:
        """Return the decoder of a field; ``is_mask`` says whether it is a mask."""
        table = self.mask_table if is_mask and self.mask_table else self.table
        return table.get(field_name) or table.get(field_name.rsplit(".", 1)[-1])

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
