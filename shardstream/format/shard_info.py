"""Describe a shard, and identify a list of shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from shardstream.errors import redact

INDEX_SUFFIX = ".idx"
TAR_SUFFIX = ".tar"
COLUMNS_SUFFIX = ".cols.parquet"
COUNT_LIMIT = 1 << 60  # of samples and bytes of a dataset: sums stay below 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Entry of one shard in the manifest.

    Args:
        url: URL, relative to the manifest or absolute.
        nsamples: Number of samples; None if unknown.
        filesize: Bytes of the tar; None if unknown.
        sha256: Hex digest of the tar; None if unknown.
        index: URL of its index, relative to the manifest or absolute; None if that is next to the tar.
    """

    url: str
    nsamples: int | None = None
    filesize: int | None = None
    sha256: str | None = None
    index: str | None = None

    @property
    def index_url(self) -> str:
        """URL of the index; relative if the shard's is."""
        return self.url + INDEX_SUFFIX if self.index is None else self.index

    @property
    def members_url(self) -> str:
        """URL of its index of members, next to the index; relative if the shard's is."""
        return self.index_url.removesuffix(TAR_SUFFIX + INDEX_SUFFIX) + INDEX_SUFFIX

    @property
    def columns_url(self) -> str:
        """URL of its file of columns, next to the index; relative if the shard's is."""
        return self.index_url.removesuffix(INDEX_SUFFIX) + COLUMNS_SUFFIX


def fingerprint(shards: Iterable[ShardInfo]) -> str:
    """Return 16 hex digits that change with the shards' names (without their folder), counts, order and sizes.

    The folder is not included, so that a copy of a dataset can resume the states of its original.
    """
    digest = hashlib.sha256()
    for shard in shards:
        name = redact(shard.url).rsplit("/", 1)[-1]  # without the signature, which may be renewed
        digest.update(
            f"{name}\0{shard.nsamples}\0{shard.filesize}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()[:16]


def checksum(shards: Iterable[ShardInfo]) -> str | None:
    """Return 16 hex digits that change with the bytes of the shards; None if the sha256 of one is unknown."""
    digest = hashlib.sha256()
    for shard in shards:
        if shard.sha256 is None:
            return None
        digest.update(shard.sha256.encode())
    return digest.hexdigest()[:16]
