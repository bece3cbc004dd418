"""The writer of a packing job: notes what is finished, so that the same job can go on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from shardstream.format.manifest import ShardInfo, encode_manifest
from shardstream.packing.destination import Destination, claim_or_resume_destination
from shardstream.packing.journal import FinishedShard, NumberedSkip, Task
from shardstream.packing.shard_writer import ShardWriter


class PackWriter(ShardWriter):
    """Writes what a job hands it; keeps the finished shards of an earlier run of the same job.

    Args:
        url: As `ShardWriter` takes it.
        task: What the job is.
        extras: Names of small files that the job puts beside the shards.
        options: As `ShardWriter` takes them.
    """

    def __init__(self, url: str, *, task: Task, extras: Iterable[str] = (), **options: Any) -> None:
        self._task = task
        self._extras = frozenset(extras)
        self._skipped: list[NumberedSkip] = []
        super().__init__(url, **options)
        kept = self._journal.finished
        self.kept = tuple(kept)
        """Shards of an earlier run."""
        self.position = kept[-1].position if kept else 0
        """Number of the record behind the last one that was written."""

    def write_numbered(self, number: int, key: str, fields: Mapping[str, bytes]) -> None:
        """Append the sample of a record.

        Raises:
            SampleError: If it would not read back as it is; then nothing of it is written.
            StorageError: If this or an earlier shard cannot be written.
        """
        self.write_encoded(key, fields)
        self.position = number + 1

    def skip(self, skipped: NumberedSkip) -> None:
        """Note a record that is left out."""
        self._skipped.append(skipped)

    def finish(self) -> None:
        """Wait until all shards are there; what is left to do is `publish`.

        Raises:
            StorageError: If one cannot be written, or another pack writes here.
        """
        self._check_usable()
        self._upload_rest()

    def publish(self) -> None:
        """Write ``index.json``.

        Raises:
            StorageError: If that fails, or another pack writes here; then it is not there.
        """
        self._publish_manifest()

    def unpublish(self) -> None:
        """Delete ``index.json`` again, if it was published; the shards stay, and the journal of them.

        Raises:
            StorageError: If that fails.
        """
        if self._manifest is not None:
            self._unpublish(encode_manifest(self._manifest))
            self._manifest = None

    def remove_journal(self) -> None:
        """Delete the journal: all is published."""
        self._remove_journal()

    def _claim_destination(self, *, overwrite: bool) -> tuple[Task, Destination]:
        destination = claim_or_resume_destination(
            self._storage, self._names, self._task, overwrite=overwrite, extras=self._extras
        )
        return self._task, destination

    def _upload_callback(self, info: ShardInfo, fields: Mapping[str, int]) -> Callable[[], None]:
        skipped = tuple(one for one in self._skipped if one.number < self.position)
        self._skipped = self._skipped[len(skipped) :]
        finished = FinishedShard(
            info=info, fields=dict(fields), position=self.position, skipped=skipped
        )
        return partial(self._journal.add, finished)
