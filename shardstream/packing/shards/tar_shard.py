"""Write samples to one tar; equal input gives equal bytes."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

import numpy as np

from shardstream.errors import SampleError
from shardstream.format import (
    END_OF_ARCHIVE,
    Column,
    Offsets,
    ShardInfo,
    encode_members,
    member_name,
)
from shardstream.packing.shards.column_builder import ColumnBuilder

_BUFFER_BYTES = 1 << 20
_MAX_UNHASHED_BUFFERS = 4

Pieces = list[bytes | memoryview]
"""Headers, bodies and paddings of a sample, in the order of the tar."""


class Writable(Protocol):
    """A stream that takes the bytes of a tar."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append bytes, all of them."""


_plain_fields: set[str] = set()
_is_plain_key = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*").fullmatch


def sample_pieces(key: str, fields: Mapping[str, bytes | memoryview]) -> Pieces:
    """Return the bytes of one sample: for each field, in the order given, header, body and padding.

    >>> sum(map(len, sample_pieces("0001", {"cls": b"7"})))
    1024

    Raises:
        SampleError: If the sample has no field, or would read back under another key or field.
    """
    if not fields:
        raise SampleError("a sample without fields would be lost; give it one", key=key)
    # Whether a name is fine depends on the key alone for fields that were, and have no "__".
    is_checked = _is_plain_key(key) is not None
    for field in fields:
        if is_checked and field in _plain_fields:
            continue
        member_name(key, field)
        if "__" not in field and len(_plain_fields) < 1024:  # fields may come from a hostile source
            _plain_fields.add(field)
            is_checked = True
    return encode_members(key, fields)


class TarShard:
    """A tar that is being written.

    Args:
        stream: Stream for the tar, from its current position.
        url: URL of the shard, for messages and for the manifest.
        hashing: A pool of one thread that hashes during writing; None hashes in the calling thread.
        columns: Columns of the samples to collect.
    """

    def __init__(
        self,
        stream: Writable,
        *,
        url: str,
        hashing: Executor | None = None,
        columns: Sequence[Column] | None = None,
    ) -> None:
        self._stream = stream
        self._url = url
        self._digest = hashlib.sha256()
        self._hashing = hashing
        self._hashed: deque[Future[None]] = deque()
        self._buffer: Pieces = []
        self._buffered_bytes = 0
        self._starts: list[int] = []
        self._keys: dict[str, None] = {}  # in order
        self.columns = None if columns is None else ColumnBuilder(columns, url)
        """The values of its columns so far; None without columns."""
        self.fields: dict[str, int] = {}
        """Number of samples that have each field."""
        self.nsamples = 0
        """Samples so far."""
        self.size_bytes = 0
        """Bytes so far, without the end of the archive."""

    @property
    def offsets(self) -> Offsets:
        """The index, shape (n + 1,)."""
        return np.array([*self._starts, self.size_bytes], dtype=np.int64)

    def add(self, key: str, fields: Mapping[str, bytes | memoryview], pieces: Pieces) -> None:
        """Append one sample, whose bytes `sample_pieces` has returned; its fields stay in the order given.

        Raises:
            SampleError: If its key is in the shard, or a value does not fit its column; then nothing of it is written.
        """
        if key in self._keys:
            raise SampleError(
                "this key is in the shard already; give each sample its own",
                shard=self._url,
                key=key,
            )
        if self.columns is not None:
            self.columns.add(key, fields)
        self._keys[key] = None
        self._starts.append(self.size_bytes)
        self.nsamples += 1
        for field in fields:
            self.fields[field] = self.fields.get(field, 0) + 1
        size = sum(map(len, pieces))
        self.size_bytes += size
        self._buffered_bytes += size
        self._buffer += pieces
        if self._buffered_bytes >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> ShardInfo:
        """Write the end of the archive, and return the shard's entry for the manifest."""
        data = b"".join([*self._buffer, END_OF_ARCHIVE])
        self._stream.write(data)
        # Hashed here, so that no thread is started for a small shard.
        self._wait_for_hashes(0)
        self._digest.update(data)
        return ShardInfo(
            url=self._url,
            nsamples=self.nsamples,
            filesize=self.size_bytes + len(END_OF_ARCHIVE),
            sha256=self._digest.hexdigest(),
        )

    @property
    def keys(self) -> list[str]:
        """The keys, in order."""
        return [*self._keys]

    def _flush(self) -> None:
        # Joined: the hashing thread then takes the GIL once per buffer, which saves more than the copy costs.
        data = b"".join(self._buffer)
        self._buffer, self._buffered_bytes = [], 0
        if self._hashing is None:
            self._digest.update(data)
        else:
            self._wait_for_hashes(_MAX_UNHASHED_BUFFERS - 1)
            self._hashed.append(self._hashing.submit(self._digest.update, data))
        self._stream.write(data)

    def _wait_for_hashes(self, most: int) -> None:
        """Wait until at most ``most`` buffers are not hashed yet."""
        while len(self._hashed) > most:
            self._hashed.popleft().result()
