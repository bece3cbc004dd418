"""The writer of a packing job: notes what is finished, so that the same job can go on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from shardstream.errors import StorageError
from shardstream.format.manifest import ShardInfo
from shardstream.write.claim import Claim, claim_or_resume
from shardstream.write.journal import Finished, Journal, NumberedSkip, Task
from shardstream.write.roll import ShardWriter


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
        self._has_sent = False
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

    def forget_journal(self) -> None:
        """Delete the notes: all is published."""
        self._journal.remove()

    def abort(self) -> None:
        """Drop the shard at hand; what is finished stays, with the notes of it."""
        super().abort()
        if self._was_empty and not self._has_sent:  # nothing to go on with
            with suppress(StorageError):  # what went wrong before is what matters
                self._journal.remove()

    def _claim(self, *, overwrite: bool) -> Claim:
        taken = claim_or_resume(
            self._storage, self._names, self._task, overwrite=overwrite, extras=self._extras
        )
        self._was_empty = not taken.files
        self._journal = Journal(
            storage=self._storage,
            folder=self.folder,
            task=self._task,
            stale=taken.stale,
            finished=list(taken.finished),
        )
        # First of all: from here on, whatever is there is known to be of an unfinished pack.
        self._journal.begin(taken.journal_files)
        taken.take()
        return taken

    def _when_sent(self, info: ShardInfo, fields: Mapping[str, int]) -> Callable[[], None]:
        self._has_sent = True
        skipped = tuple(one for one in self._skipped if one.number < self.position)
        self._skipped = self._skipped[len(skipped) :]
        finished = Finished(info=info, fields=dict(fields), position=self.position, skipped=skipped)
        return partial(self._journal.add, finished)
