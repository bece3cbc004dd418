"""Local files that are overwritten while they are read: noticed by what the file system says of them.

A store tells the version of a file with each answer; a disk does not. A map of a file that is written over in place shows the new
bytes at once, and other shards of the dataset may be old or new: without a look at each file an epoch would mix both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardstream.errors import ChangedError


class FileVersion(NamedTuple):
    """What tells a file from another one at the same path."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    def differs_from(self, before: FileVersion) -> bool:
        """Tell whether the bytes may differ from those of the version before.

        An inode alone proves nothing: some network file systems number their files anew now and then. Nor does the time of the
        last change of the inode: permissions or another link change that.
        """
        if (self.size, self.mtime_ns) != (before.size, before.mtime_ns):
            return True
        return self.inode != before.inode and self.ctime_ns != before.ctime_ns


class FileVersions:
    """The local files of a dataset as they were when it was opened; picklable, so workers compare with the same.

    Args:
        paths: Of each shard; None for one that is not on this machine.
    """

    def __init__(self, paths: Sequence[str | None]) -> None:
        self._paths = tuple(paths)
        # Of a file that is not there yet, or out of reach, nothing is known: to open it tells what is wrong.
        self._known = [_stat_version(path) for path in paths]

    def check(self, shards: Iterable[int]) -> None:
        """Look whether shards are what they were; called after their bytes were read.

        Raises:
            ChangedError: If one is not. One that is gone is fine: what is mapped or open is whole.
        """
        for shard in shards:
            path, before = self._paths[shard], self._known[shard]
            if path is None or before is None:
                continue
            try:
                found = os.stat(path)
            except OSError:
                continue
            # Called for each shard of each batch: no objects are built for a file that is what it was.
            if (
                found.st_mtime_ns == before[1]
                and found.st_size == before[0]
                and found.st_ctime_ns == before[3]
            ):
                continue
            now = _version(found)
            if now.differs_from(before):
                raise ChangedError(_difference(before, now), shard=path)


def _stat_version(path: str | None) -> FileVersion | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _version(found)


def _version(found: os.stat_result) -> FileVersion:
    return FileVersion(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def _difference(before: FileVersion, now: FileVersion) -> str:
    """Say what a file is now and was before; a time alone may be of the same bytes, copied again or touched."""
    if (now.size, now.inode) == (before.size, before.inode):
        return (
            "the file may have been overwritten after the dataset was opened: "
            f"it was changed at {_format_time(before)} then, at {_format_time(now)} now; "
            "open the dataset again, and if the bytes are the same, start the epoch again or load the state"
        )
    return (
        "the file was overwritten after the dataset was opened "
        f"({_format_version(before)} then, {_format_version(now)} now); open the dataset again"
    )


def _format_version(version: FileVersion) -> str:
    return f"{version.size} bytes, changed at {_format_time(version)}, inode {version.inode}"


def _format_time(version: FileVersion) -> str:
    seconds, rest = divmod(version.mtime_ns, 10**9)
    return f"{seconds}.{rest:09d}"
