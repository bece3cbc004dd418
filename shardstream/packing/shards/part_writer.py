"""Write the shards of one part of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from shardstream.format import END_OF_ARCHIVE, INDEX_SUFFIX, ShardInfo, encode_index
from shardstream.packing.job.destination import ShardNames
from shardstream.packing.shards.column_builder import ColumnSummary
from shardstream.packing.shards.shard_upload import ShardFiles
from shardstream.packing.shards.shard_writer import WriterOptions
from shardstream.packing.shards.tar_shard import Pieces, TarShard, sample_pieces
from shardstream.process_memory import keep_freed_memory
from shardstream.storage import OutputFolder, PendingFile


class PartWriter:
    """Writes the shards of one part: the first under the number of the part, further ones with a suffix (see `ShardNames.name`).

    Args:
        folder: Folder of the dataset.
        names: Names of its shards.
        number: Number of the part.
        limits: Maximum samples and bytes of a shard, and its columns.
        check_owner: Called before each shard is published; raises if another job has taken the folder over.
    """

    def __init__(
        self,
        folder: OutputFolder,
        names: ShardNames,
        number: int,
        limits: WriterOptions,
        check_owner: Callable[[], None],
    ) -> None:
        self.shards: list[ShardInfo] = []
        """Published shards, in order."""
        self.fields: dict[str, int] = {}
        """Number of samples that have each field, in the published shards."""
        self.columns: list[ColumnSummary] = []
        """Number and type of the values of columns, for each published shard."""
        self._folder, self._names, self._number = folder, names, number
        self._limits, self._check_owner = limits, check_owner
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shardstream-hash")
        self._shard: TarShard | None = None
        self._pending: PendingFile | None = None
        keep_freed_memory()

    def write(self, key: str, fields: Mapping[str, bytes | memoryview]) -> None:
        """Append a sample; begin another shard where it exceeds a limit.

        Raises:
            SampleError: If it would not read back equal, or its key is in the shard; then nothing of it is written.
            StorageError: If the shard cannot be written.
        """
        pieces: Pieces = sample_pieces(key, fields)
        size = sum(map(len, pieces)) + len(END_OF_ARCHIVE)
        shard = self._shard
        if shard is not None and (
            shard.nsamples >= self._limits.max_samples
            or shard.size_bytes + size > self._limits.max_bytes
        ):
            self.finish()
        if self._shard is None:
            name = self._names.name(self._number, len(self.shards))
            self._pending = self._folder.open(name)
            self._shard = TarShard(
                self._pending, url=name, hashing=self._hashing, columns=self._limits.columns
            )
        self._shard.add_pieces(key, fields, pieces)

    def finish(self) -> None:
        """Publish the shard that is being written, if there is one.

        Raises:
            StorageError: If it cannot be published.
        """
        shard, pending = self._shard, self._pending
        if shard is None or pending is None:
            return
        info = shard.finish()
        columns = shard.column_file(info)
        others = {info.url + INDEX_SUFFIX: encode_index(shard.offsets)}
        if columns is not None:
            others[info.columns_url] = columns
            self.columns.append(shard.column_summary)
        files = ShardFiles(self._folder, pending, others)
        try:
            files.end()
            self._check_owner()
            files.commit()
        finally:
            files.discard()
        for field, count in shard.fields.items():
            self.fields[field] = self.fields.get(field, 0) + count
        self.shards.append(info)
        self._shard = self._pending = None

    def close(self) -> None:
        """Drop an unfinished shard, and end the thread."""
        if self._pending is not None:
            self._pending.discard()
        self._hashing.shutdown(wait=True, cancel_futures=True)
