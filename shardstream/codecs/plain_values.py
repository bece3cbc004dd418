"""JSON, MessagePack, CBOR, CSV and gzip in bounded memory, and a limit on the depth of nested values."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn

import orjson

from shardstream.codecs.installed import import_extra

DEPTH_LIMIT = 200
"""Levels of nested values; deeper ones cannot be pickled when a worker sends them."""
VALUES_LIMIT = 10_000_000
"""Values of a JSON or CSV field: about 1 GB, since an empty list takes 3 bytes as JSON, 100 in memory."""
BINARY_LIMIT_BYTES = 32 << 20
"""Bytes of a MessagePack or CBOR field: an empty list takes 1 byte, 64 in memory."""
ANY_KEYS_LIMIT_BYTES = 64 << 10
"""Bytes of a MessagePack or CBOR field whose keys may be other than text and bytes: keys chosen to have one hash take quadratic time."""
INFLATED_LIMIT_BYTES = 1 << 30
"""Bytes that a field may unpack to."""
_INFLATED_PIECE_BYTES = 1 << 18
_CELL_CHARS = 128 << 10  # Python's own limit, which packing a table raises for the whole process
_BIG_NUMBER_LIMIT_BYTES = 1 << 10  # conversion to a decimal takes quadratic time

_EXTRA = "formats"
_LONG_NUMBER = re.compile(rb"\d{19}")  # orjson turns integers over 64 bits into floats
_QUOTED = re.compile('"(?:[^"]|"")*"')
_CELL = re.compile(r'(?:^|(?<=\t))(?:"(?:[^"]|"")*"(?=\t|$)|[^\t]*)')
# Tags of CBOR that make values refer to each other, or that compile expressions and parse mails.
_REFUSED_TAGS = (28, 29, 35, 36)


def parse_json(data: bytes) -> Any:
    """Parse JSON to the values of ``json.loads``, 5 times as fast."""
    if _LONG_NUMBER.search(data) is None:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass  # `json` accepts NaN, lone surrogates and other encodings; for invalid JSON it has the better message
    return json.loads(data)


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


def decode_msgpack(data: bytes) -> Any:
    """Decode one MessagePack value; over 32 MiB, over 200 levels, and in fields over 64 KiB keys that are not text or bytes are refused.

    Raises:
        OptionError: If msgpack is not installed.
        ValueError: If it is refused or damaged.
    """
    msgpack = import_extra("msgpack", extra=_EXTRA, purpose="decoding MessagePack")
    _check_binary(data)
    value = msgpack.unpackb(data, strict_map_key=len(data) > ANY_KEYS_LIMIT_BYTES)
    check_depth(value)
    return value


def encode_msgpack(value: object) -> bytes:
    """Encode a value as MessagePack; equal values with keys in one order give equal bytes.

    Raises:
        OptionError: If msgpack is not installed.
        TypeError: If MessagePack cannot hold it, or a key is a tuple, which would be read as a list.
        ValueError: If `decode_msgpack` would refuse its length or a key.
    """
    msgpack = import_extra("msgpack", extra=_EXTRA, purpose="encoding MessagePack")
    encoded: bytes = msgpack.packb(value)
    _check_encoded(encoded, value)
    if len(encoded) <= ANY_KEYS_LIMIT_BYTES:
        msgpack.unpackb(encoded, strict_map_key=False)  # keys that are tuples fail
    return encoded


def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR value; over 32 MiB, over 200 levels, shared values and regular expressions are refused.

    So are whole numbers over 1 KiB and, in fields over 64 KiB, keys that are not text or bytes.

    Raises:
        OptionError: If cbor2 is not installed.
        cbor2.CBORDecodeError: If it is refused or damaged.
        ValueError: If it is too long.
    """
    cbor2 = import_extra("cbor2", extra=_EXTRA, purpose="decoding CBOR")
    _check_binary(data)
    stream = io.BytesIO(data)
    decoder = cbor2.CBORDecoder(
        stream,
        max_depth=DEPTH_LIMIT,
        semantic_decoders={**_BIG_NUMBERS, **dict.fromkeys(_REFUSED_TAGS, _refuse_tag)},
        strict_hashable_types=len(data) > ANY_KEYS_LIMIT_BYTES,
    )
    try:
        value = decoder.decode()
    except cbor2.CBORDecodeError as error:
        if error.__cause__ is None:
            raise
        raise cbor2.CBORDecodeError(f"{error}: {error.__cause__}") from error
    if stream.tell() != len(data):
        raise ValueError(f"{len(data) - stream.tell()} bytes after the value")
    return value


def encode_cbor(value: object) -> bytes:
    """Encode a value as CBOR.

    Raises:
        OptionError: If cbor2 is not installed.
        cbor2.CBOREncodeError: If CBOR cannot hold it.
        ValueError: If `decode_cbor` would refuse its length or a key.
    """
    cbor2 = import_extra("cbor2", extra=_EXTRA, purpose="encoding CBOR")
    encoded: bytes = cbor2.dumps(value)
    _check_encoded(encoded, value)
    return encoded


def decode_csv(data: bytes) -> list[list[str]]:
    """Decode CSV, as UTF-8, to its rows of text; a first row with names is a row like others.

    Raises:
        ValueError: If a quote is not closed, a cell has over 128 KiB, or it has over 10 million values.
    """
    try:
        rows = list(csv.reader(_lines_of_cells(data, b","), strict=True))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from error
    is_raised = csv.field_size_limit() > _CELL_CHARS
    if is_raised and any(len(cell) > _CELL_CHARS for cell in chain.from_iterable(rows)):
        raise ValueError(f"not CSV: field larger than field limit ({_CELL_CHARS})")
    return rows


def decode_tsv(data: bytes) -> list[list[str]]:
    """Decode tab-separated values as `decode_csv`; for quotes see `iter_tsv`."""
    return list(iter_tsv(_lines_of_cells(data, b"\t")))


def _lines_of_cells(data: bytes, separator: bytes) -> Iterable[str]:
    count = data.count(separator) + data.count(b"\n") + data.count(b"\r")
    if count > VALUES_LIMIT:
        raise ValueError(f"{count} values, the limit is {VALUES_LIMIT}; store large tables as npy")
    return io.StringIO(data.decode("utf-8-sig"), newline="")


def iter_tsv(lines: Iterable[str]) -> Iterator[list[str]]:
    r"""Yield the cells of each line of tab-separated text.

    Many writers of TSV quote nothing, so a quote is text: read as in CSV, one that opens a cell swallows the rows up to the
    next one. Quotes around a whole cell, which spreadsheets and pandas write, are removed.

    >>> list(iter_tsv(["a\tb\n", '"Hi," he said\t"x"\n', '"tab\tin it"\t"\n']))
    [['a', 'b'], ['"Hi," he said', 'x'], ['tab\tin it', '"']]
    """
    width = 0
    for line in lines:
        text = line.rstrip("\r\n")
        cells = text.split("\t") if text else []
        if width and len(cells) > width:  # a quoted cell may hold tabs
            cells = _CELL.findall(text)
        width = width or len(cells)
        yield [one[1:-1].replace('""', '"') if _QUOTED.fullmatch(one) else one for one in cells]


def check_depth(value: Any) -> None:
    """Check that lists and dicts are nested in at most `DEPTH_LIMIT` levels.

    Raises:
        ValueError: If they are deeper.
    """
    level = [value]
    for _ in range(DEPTH_LIMIT + 1):
        if not level:
            return
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    raise ValueError(f"nested over {DEPTH_LIMIT} levels")


def _check_binary(data: bytes) -> None:
    if len(data) > BINARY_LIMIT_BYTES:
        raise ValueError(
            f"{len(data)} bytes, the limit is {BINARY_LIMIT_BYTES}, because they may take 64 times as much memory; "
            "store arrays as npy or safetensors"
        )


def _check_encoded(data: bytes, value: object) -> None:
    _check_binary(data)
    left = [value] if len(data) > ANY_KEYS_LIMIT_BYTES else []
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            other = next((key for key in one if not isinstance(key, str | bytes)), None)
            if other is not None:
                raise ValueError(
                    f"the key {other!r} is no text, which keys must be in a field over {ANY_KEYS_LIMIT_BYTES} bytes (this has {len(data)})"
                )
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one


def _big_number(value: bytes, _is_key: bool) -> int:
    if len(value) > _BIG_NUMBER_LIMIT_BYTES:
        raise ValueError(
            f"a whole number of {len(value)} bytes, the limit is {_BIG_NUMBER_LIMIT_BYTES}"
        )
    return int.from_bytes(value, "big")


_BIG_NUMBERS = {2: _big_number, 3: lambda value, is_key: -1 - _big_number(value, is_key)}
"""Tags of CBOR; 4, 5 and 30 make decimals and fractions of such numbers."""


def _refuse_tag(*_: object) -> NoReturn:
    raise ValueError("shared values, regular expressions and mails are refused")


def decode_gzip(data: bytes) -> bytes:
    """Inflate a ``.gz`` field; contents over 1 GiB are refused."""
    pieces: list[bytes] = []
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while piece := stream.read(_INFLATED_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            check_inflated(size)
    return b"".join(pieces)


def check_inflated(size: int, limit_bytes: int | None = None) -> None:
    """Raise ValueError if contents are over a limit, by default 1 GiB."""
    limit = INFLATED_LIMIT_BYTES if limit_bytes is None else limit_bytes
    if size > limit:
        raise ValueError(f"it unpacks to {size} bytes or more, the limit is {limit}")
