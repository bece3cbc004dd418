"""Name the journal of an unfinished dataset, and refuse to read folders that have one.

A pack or `ShardWriter` creates the journal before it changes anything else, and deletes it after ``index.json`` is published.
A folder with a journal and without ``index.json`` may lack shards, even if it has tars.
"""

from __future__ import annotations

from collections.abc import Collection

from shardstream.errors import UnfinishedError
from shardstream.format import MANIFEST_NAME
from shardstream.storage.atomic_write import final_name

_START, _END = ".shardstream-pack-", ".json"
JOURNAL_NAME = f"{_START}000000{_END}"
"""Name of the journal."""


def part_record_name(number: int) -> str:
    """Return the name of the file that records a finished part of a job.

    >>> part_record_name(7)
    '.shardstream-pack-part-000007.json'
    """
    return f"{_START}part-{number:06d}{_END}"


def is_part_record(name: str) -> bool:
    """Return whether a file records a finished part of a job, by its name.

    >>> is_part_record(part_record_name(7)), is_part_record(JOURNAL_NAME)
    (True, False)
    """
    return name.startswith(f"{_START}part-") and name.endswith(_END)


def is_journal(name: str) -> bool:
    """Return whether a file is part of a journal, by its name.

    >>> is_journal(".shardstream-pack-000000.json")
    True
    """
    return name.startswith(_START) and name.endswith(_END)


def check_finished(folder: str, names: Collection[str]) -> None:
    """Refuse a folder in which a dataset is being written, or whose writer was stopped.

    Args:
        folder: URL of the folder.
        names: Names of the files directly in it.

    Raises:
        UnfinishedError: If there is no ``index.json``, but a journal or a half-written tar.
    """
    if MANIFEST_NAME in names:
        return
    journal = min(filter(is_journal, names), default=None)
    if any(map(is_part_record, names)):
        raise UnfinishedError(
            f"the dataset is not finished: it is written in parts, and there is no {MANIFEST_NAME}; run the parts that are missing or the "
            "same command again, and where parts were used, 'shardstream merge' when all are done",
            shard=folder,
        )
    if journal is not None:
        raise UnfinishedError(
            f"the dataset is not finished: a pack or ShardWriter is writing here or was stopped ({journal} without {MANIFEST_NAME}), "
            "so shards may be missing; wait for it or run the same command again (a ShardWriter with overwrite=True), or, if all shards "
            f"are there, delete {journal} and run 'shardstream index', or name the tars to read one by one",
            shard=folder,
        )
    part = min(filter(_is_half_a_tar, names), default=None)
    if part is not None:
        raise UnfinishedError(
            f"the dataset is not finished: {part} is a half-written tar and there is no {MANIFEST_NAME}, so shards may be missing; "
            "wait for its writer or run it again, or name the tars to read one by one",
            shard=folder,
        )


def _is_half_a_tar(name: str) -> bool:
    return (final_name(name) or "").lower().endswith(".tar")
