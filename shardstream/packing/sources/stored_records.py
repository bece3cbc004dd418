"""Keep the records of a source in a temporary file, to read them in another order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardstream.errors import SampleError, SourceError
from shardstream.packing.encode import encode_field
from shardstream.packing.sources.source import FileRef, Record, named
from shardstream.storage import RowFile, TemporaryFile

_CONTENT = "the rows to shuffle"


class StoredRecords:
    """Records by number; memory holds half a byte for each.

    Args:
        records: The records; their values are encoded, and files that they name stay where they are.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._data = TemporaryFile(_CONTENT)
        self._rows: RowFile[Any] = RowFile(map(self._store, records))
        self.length = len(self._rows)
        """Number of records."""

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        return (self._load(*self._rows[number]) for number in numbers)

    def _store(self, record: Record) -> tuple[Any, ...]:
        """Return a record as a row: key, origin, error, start of its data in the file, and its fields with URLs or lengths."""
        fields: list[tuple[Any, ...]] = []
        error, start = record.error, self._data.size
        data = bytearray()
        try:
            for field, value in record.fields.items():
                if isinstance(value, FileRef):
                    fields.append((field, *value))
                else:
                    encoded = encode_field(field, value)
                    fields.append((field, len(encoded)))
                    data += encoded
        except SampleError as unfit:
            error, fields = named(unfit, record.where), []
        else:
            self._data.append(data)
        return record.key, record.where, None if error is None else str(error), start, fields

    def _load(
        self, key: str, where: str, error: str | None, start: int, stored: list[list[Any]]
    ) -> Record:
        if error is not None:
            return Record(key, {}, where, SourceError(error))
        sizes = [0 if len(rest) > 1 else rest[0] for _, *rest in stored]
        data = self._data.read(start, start + sum(sizes)) if any(sizes) else b""
        fields: dict[str, Any] = {}
        end = 0
        for (field, *rest), size in zip(stored, sizes, strict=True):
            fields[field] = FileRef(*rest) if len(rest) > 1 else data[end : end + size]
            end += size
        return Record(key, fields, where)
