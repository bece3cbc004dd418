"""Samples of MosaicML's MDS shards by number; a shard is a block.

Format (https://docs.mosaicml.com/projects/streaming, version 2): ``index.json`` lists the shards of its folder. A shard is the number of samples
and the offset of each and of the end, uint32, then its options as JSON, then the samples. A sample is the length of each column of variable size,
uint32, and then the values.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from shardstream.codecs import decode_json, import_extra
from shardstream.errors import ManifestError, OptionError, ShardError, describe_error, get_logger
from shardstream.samples import Numbers
from shardstream.storage import FileInfo, FileVersions, Storage, join_url, parent_url
from shardstream.tables.block_samples import (
    Block,
    BlockSamples,
    Fields,
    choose_columns,
    keys_of,
    names_below,
)

_log = get_logger(__name__)
_INDEX_NAME = "index.json"
_OF_COLUMNS = ("column_names", "column_encodings", "column_sizes")
_PLAIN = {"compression": None, "zip_data": None}
_SHAPE_DTYPES = ("u1", "u2", "u4", "u8")
_DTYPES = {
    8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2",
    32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8",
}  # fmt: skip
_DTYPE_NAMES = {np.dtype(code).name for code in _DTYPES.values()}


class MdsSamples(BlockSamples):
    """The samples of MDS shards by number, in the order of the files.

    Args:
        files: The shards, plain or compressed, at least one; each folder has an ``index.json`` that lists them.
        storage: Their storage.
        fields: See `Fields`.

    Raises:
        OptionError: If there is no such column, or a column has an encoding that is not read, such as a pickle.
        ManifestError: If an index is invalid, or does not list a shard with its length.
        StorageError: If an index cannot be read.
    """

    def __init__(self, files: Sequence[FileInfo], storage: Storage, fields: Fields = None) -> None:
        folders = dict.fromkeys(parent_url(file.url) for file in files)
        listed = {url: one for folder in folders for url, one in _listed(folder, storage).items()}
        count = len({(parent_url(url), one["raw_data"]["basename"]) for url, one in listed.items()})
        self._urls = [file.url for file in files]
        if len(files) < count:
            _log.warning("%s: %d of the %d shards are read", self._urls[0], len(files), count)
        self._entries = [_entry_of(file, listed) for file in files]
        full = [n for n, entry in enumerate(self._entries) if entry["samples"]]
        if not full:
            raise ManifestError("no shard has a sample", shard=self._urls[0])
        self._urls, self._entries = [self._urls[n] for n in full], [self._entries[n] for n in full]
        for file in files:
            storage.pin_listed(file)
        self._versions = FileVersions([storage.local_path(url) for url in self._urls])
        self._stems = names_below(self._urls, ".mds")
        first = self._entries[0]
        self._columns, self._key = choose_columns(first["column_names"], fields, self._urls[0])
        for url, entry in zip(self._urls, self._entries, strict=True):
            if any(entry[name] != first[name] for name in _OF_COLUMNS):
                raise ManifestError(f"other columns than {self._urls[0]}; mix them", shard=url)
        encodings = dict(zip(first["column_names"], first["column_encodings"], strict=True))
        names = {*self._columns.values(), *([self._key] if self._key else [])}
        self._decoders = {name: _decoder(name, encodings[name]) for name in names}
        counts = np.array([entry["samples"] for entry in self._entries], dtype=np.int64)
        sizes = np.array([entry["raw_data"]["bytes"] for entry in self._entries], dtype=np.int64)
        super().__init__(counts, sizes, storage)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards, not compressed."""
        return int(self.block_bytes.sum())

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the names of the shards and their entries in the index: counts, lengths, and hashes, if there are any."""
        found = json.dumps([self._stems, self._entries], sort_keys=True)
        return hashlib.sha256(f"mds\n{found}".encode()).hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the samples."""
        return tuple(self._columns)

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        return self._urls[shard]

    def read_block(self, block: int) -> Block:
        """Read a shard.

        Raises:
            StorageError: If it cannot be read.
            ChangedError: If it was replaced.
            ShardError: If it is damaged.
        """
        entry, url = self._entries[block], self._urls[block]
        data = self._storage.read(url, 0, _stored(entry)["bytes"], size=_stored(entry)["bytes"])
        self._versions.check([block])
        raw_bytes, count = entry["raw_data"]["bytes"], entry["samples"]
        try:
            data = _decompressed(data, entry["compression"], raw_bytes)
            offsets = np.frombuffer(data, "<u4", count + 2)
        except (ValueError, OSError, EOFError) as error:
            raise _damaged(describe_error(error), url) from error
        is_sound = offsets[0] == count and offsets[-1] == len(data) == raw_bytes
        if not is_sound or (np.diff(offsets[1:].astype(np.int64)) < 0).any():
            raise _damaged("its lengths are not those of its index", url)
        names = self._columns, self._key, (url, self._stems[block])
        return _Shard(data, offsets[1:].astype(np.int64), entry, self._decoders, names)


class _Shard:
    """A shard in memory.

    Args:
        data: Its bytes.
        offsets: Where each sample begins, and the last ends, shape (n + 1,).
        entry: Its entry in the index.
        decoders: Column -> function, of those that are read.
        names: Field -> column, the column of keys, and URL and name of the shard.
    """

    def __init__(
        self,
        data: bytes,
        offsets: Numbers,
        entry: Mapping[str, Any],
        decoders: Mapping[str, Callable[[bytes], Any]],
        names: tuple[Mapping[str, str], str | None, tuple[str, str]],
    ) -> None:
        self._data, self._offsets, self._entry = data, offsets, entry
        self._decoders, self._names = decoders, names

    def columns(self, places: Numbers) -> dict[str, list[Any]]:
        """Return keys, URLs and fields of some samples."""
        fields, key, file = self._names
        values: dict[str, list[Any]] = {name: [] for name in self._decoders}
        for place in places.tolist():
            name, (start, end) = "", self._offsets[place : place + 2].tolist()
            try:
                for name, value in _cells(self._data[start:end], self._entry):
                    if name in values:
                        values[name].append(self._decoders[name](value))
            except (ValueError, ArithmeticError, LookupError, RecursionError) as error:
                problem = f"sample {place}, column {name!r}: {describe_error(error)}"
                raise _damaged(problem, file[0]) from error
        keys = keys_of(values[key] if key else None, places, file)
        found: dict[str, list[Any]] = {"__key__": keys, "__url__": [file[0]] * len(places)}
        return found | {field: values[column] for field, column in fields.items()}


def _listed(folder: str, storage: Storage) -> dict[str, dict[str, Any]]:
    """Return URL -> entry of the shards in the index of a folder: of the plain one and of the compressed one, as far as they are listed.

    Raises:
        ManifestError: If it is no index of MDS.
    """
    url, found = join_url(folder, _INDEX_NAME), {}
    try:
        for entry in json.loads(storage.read_bounded(url))["shards"]:
            kept = {name: entry[name] for name in (*_OF_COLUMNS, "compression", "samples")}
            kept |= {"raw_data": entry["raw_data"], "zip_data": entry["zip_data"]}
            numbers = {len(kept[name]) for name in _OF_COLUMNS}
            if (entry["format"], entry["version"], len(numbers)) != ("mds", 2, 1):
                raise _not_mds(f"a shard of format {entry['format']!r} {entry['version']!r}", url)
            found[join_url(folder, kept["raw_data"]["basename"])] = kept | _PLAIN
            if kept["zip_data"]:
                found[join_url(folder, kept["zip_data"]["basename"])] = kept
    except (ValueError, TypeError, LookupError) as error:
        raise _not_mds(describe_error(error), url) from error
    return found


def _not_mds(problem: str, url: str) -> ManifestError:
    remedy = "restore it, or write the shards again"
    return ManifestError(f"no index of MDS, version 2: {problem}", remedy=remedy, shard=url)


def _stored(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return name and length of the file of a shard."""
    stored: Mapping[str, Any] = entry["zip_data"] or entry["raw_data"]
    return stored


def _entry_of(file: FileInfo, listed: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    entry = listed.get(file.url)
    if entry is None or file.size != _stored(entry)["bytes"]:
        found = "is not in it" if entry is None else f"has {file.size} bytes, not as it says"
        raise ManifestError(f"the shard {found}", remedy="name whole datasets", shard=file.url)
    return entry


def _decompressed(data: bytes, compression: str | None, raw_bytes: int) -> bytes:
    """Return the bytes of a shard.

    Raises:
        OptionError: If it is compressed by an algorithm that is not read.
        ValueError, OSError, EOFError: If it is damaged.
    """
    name = (compression or "").partition(":")[0]
    if not name:
        return data
    if name == "zstd":
        zstandard = import_extra("zstandard", extra="zstd", purpose="reading MDS in zstd")
        try:
            with zstandard.ZstdDecompressor().stream_reader(data) as stream:
                return bytes(stream.read(raw_bytes + 1))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    if name not in ("gz", "bz2"):
        raise OptionError(f"compression {name!r} is not read, but zstd, gz and bz2")
    with (gzip if name == "gz" else bz2).open(io.BytesIO(data)) as opened:
        return bytes(opened.read(raw_bytes + 1))


def _cells(sample: bytes, entry: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return column and bytes of each value of a sample.

    Raises:
        ValueError: If its lengths are not that of the sample.
    """
    sizes = entry["column_sizes"]
    lengths = np.frombuffer(sample, "<u4", sum(not size for size in sizes)).tolist()
    at, variable = 4 * len(lengths), iter(lengths)
    found = []
    for name, size in zip(entry["column_names"], sizes, strict=True):
        end = at + (size or next(variable))
        found.append((name, sample[at:end]))
        at = end
    if at != len(sample):
        raise ValueError(f"{at} bytes by its columns, not {len(sample)}")
    return found


def _decoder(column: str, encoding: str) -> Callable[[bytes], Any]:
    """Return the function that decodes the values of a column.

    Raises:
        OptionError: If its encoding is not read.
    """
    name, _, options = encoding.partition(":")
    if name == "ndarray":
        dtype, _, shape = options.partition(":")
        dims = [int(size) for size in shape.split(",")] if shape else None
        if dtype in (*_DTYPE_NAMES, ""):
            return partial(_array, dtype=dtype, shape=dims)
    if name in _DTYPE_NAMES:
        return partial(_number, dtype=name)
    if name not in _DECODERS:
        reason = "data never runs as code" if name == "pkl" else "it is not read"
        raise OptionError(
            f"column {column!r} has the encoding {encoding!r}: {reason}; leave it out with fields=, or convert the dataset (docs/from-mds.md)"
        )
    return _DECODERS[name]


def _number(data: bytes, *, dtype: str) -> int | float:
    value: int | float = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), 1)[0].item()
    return value


def _decimal(data: bytes) -> Decimal:
    return Decimal(data.decode())


def _array(data: bytes, *, dtype: str, shape: Sequence[int] | None) -> np.ndarray[Any, Any]:
    """Return an array of its own, whose dtype and shape are before its numbers where the column has none."""
    at = 0
    if not dtype:
        dtype, at = _DTYPES[data[0]], 1
    if shape is None:
        ndim, code = divmod(data[at], 4)
        numbers = np.frombuffer(data, f"<{_SHAPE_DTYPES[code]}", ndim, at + 1)
        shape, at = numbers.tolist(), at + 1 + numbers.nbytes
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape).copy()


def _files(data: bytes, *, at: int) -> list[bytes]:
    """Return the files of a list: their number, which is at an offset, their lengths, and their bytes.

    Raises:
        ValueError: If these are not as long as the value.
    """
    count = int(np.frombuffer(data, "<u4", 1, at)[0])
    ends = np.cumsum([at + 4 + 4 * count, *np.frombuffer(data, "<u4", count, at + 4).tolist()])
    if ends[-1] != len(data):
        raise ValueError(f"{ends[-1]} bytes by its lengths, not {len(data)}")
    return [data[start:end] for start, end in pairwise(ends.tolist())]


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    "str": bytes.decode,
    "int": partial(_number, dtype="int64"),
    "str_int": int,
    "str_float": float,
    "str_decimal": _decimal,
    "json": decode_json,
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_files, at=4)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(_files, at=0)),
}


def _damaged(problem: str, url: str) -> ShardError:
    return ShardError(f"damaged: {problem}", remedy="fetch or write the shard again", shard=url)
