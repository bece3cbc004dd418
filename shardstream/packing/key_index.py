"""The places of keys in a sorted file, next to the shards of a job: any process finds a key in it without reading the others.

The file has a header of 512 bytes, JSON and spaces, with the job, the number of keys n and the SHA-256 of the rest: n hashes in
ascending order, then n places (little-endian, 8 bytes each). The first process of a job writes it, and `merge` deletes it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from shardstream.errors import NotFoundError, ShardStreamError, StorageError
from shardstream.packing.job.key_hashes import Hashes, KeyHashes, Places
from shardstream.storage import OutputFolder, Storage, join_url

_START, _END = ".shardstream-pack-keys-", ".bin"
_HEADER_BYTES = 512
_COPY_BYTES = 8 << 20
_KEY_BYTES = 16


def key_index_name(number: int) -> str:
    """Return the name of the file.

    >>> key_index_name(0)
    '.shardstream-pack-keys-000000.bin'
    """
    return f"{_START}{number:06d}{_END}"


def is_key_index(name: str) -> bool:
    """Return whether a file is such an index, by its name.

    >>> is_key_index(key_index_name(3)), is_key_index("a.bin")
    (True, False)
    """
    return name.startswith(_START) and name.endswith(_END)


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Hashes of keys in ascending order, and their places; mapped to memory from a file."""

    hashes: Hashes
    places: Places

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """Return where the entries of some hashes begin and end, shape (n,) each; equal if a hash is not there."""
        return (
            np.searchsorted(self.hashes, hashes, side="left"),
            np.searchsorted(self.hashes, hashes, side="right"),
        )


def has_key_index(folder: OutputFolder, storage: Storage, name: str, job: str) -> bool:
    """Return whether the index of a job has been published in its folder."""
    url = join_url(folder.url, name)
    try:
        head = storage.read(url, 0, _HEADER_BYTES)
    except NotFoundError:
        return False
    return _parse_header(head).get("job") == job


def write_key_index(
    folder: OutputFolder,
    name: str,
    job: str,
    keys: KeyHashes,
    on_equal: Callable[[Places], None],
) -> None:
    """Sort keys, and publish them as an index.

    Args:
        folder: Folder of the dataset.
        name: Name of the file.
        job: Identity of the job.
        keys: The keys.
        on_equal: Called with the places of some keys with equal hashes, next to each other; raises if a key is repeated.
    """
    at = 0
    with _scratch_file(name) as file:
        for hashes, places in keys.sorted_blocks():
            file.seek(at * 8)
            file.write(hashes.astype("<u8").tobytes())
            file.seek((keys.count + at) * 8)
            file.write(places.astype("<i8").tobytes())
            at += len(hashes)
            equal = np.flatnonzero(hashes[1:] == hashes[:-1])
            if equal.size:
                on_equal(places[np.unique(np.concatenate((equal, equal + 1)))])
        digest = hashlib.sha256()
        for piece in _pieces(file):
            digest.update(piece)
        header = json.dumps({"job": job, "keys": keys.count, "sha256": digest.hexdigest()})
        pending = folder.open(name)
        try:
            pending.write(header.encode().ljust(_HEADER_BYTES))
            for piece in _pieces(file):
                pending.write(piece)
            pending.commit()
        except BaseException:
            pending.discard()
            raise


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_COPY_BYTES):
        yield piece


def open_key_index(url: str, storage: Storage, job: str) -> KeyIndex:
    """Open the index of a job: mapped if it is a file of this machine, else copied to a temporary file first.

    Raises:
        StorageError: If it is missing, damaged or that of another job.
    """
    path = storage.local_path(url)
    if path is not None:
        with storage.translate_errors(url), open(path, "rb") as file:
            return _map_index(file, url, job)
    with _scratch_file(url) as copy:
        with storage.open(url) as stream:
            while piece := stream.read(_COPY_BYTES):
                copy.write(piece)
        copy.flush()
        return _map_index(copy, url, job)


def _map_index(file: BinaryIO, url: str, job: str) -> KeyIndex:
    data = np.memmap(file, dtype=np.uint8, mode="r")
    header = _parse_header(data[:_HEADER_BYTES].tobytes())
    if header.get("job") != job:
        raise StorageError(
            "the keys of the added fields are those of another job, so this one stops and publishes nothing; write elsewhere",
            shard=url,
        )
    count, body = int(header["keys"]), data[_HEADER_BYTES:]
    if len(body) != count * _KEY_BYTES or hashlib.sha256(body.data).hexdigest() != header["sha256"]:
        raise StorageError(
            "the keys of the added fields are damaged; delete this file and run the same command again",
            shard=url,
        )
    both = body.view("<u8").reshape(2, count)
    return KeyIndex(both[0], both[1].view("<i8"))


def _parse_header(data: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        header = json.loads(data)
        if isinstance(header, dict):
            return header
    return {}


@contextmanager
def _scratch_file(name: str) -> Iterator[Any]:
    """Open a temporary file without a name."""
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        if isinstance(error, ShardStreamError):
            raise
        raise StorageError(
            f"the keys of the added fields do not fit in the temporary folder: {error.strerror}",
            remedy="set TMPDIR to a folder with more space",
            shard=name,
        ) from error
