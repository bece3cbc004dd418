"""Detect that a local file was overwritten."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from shardstream.errors import ChangedError
from shardstream.storage import FileVersion, FileVersions

BEFORE = FileVersion(size=10, mtime_ns=5, inode=7, ctime_ns=6)


@pytest.mark.parametrize(
    ("now", "other"),
    [
        ({}, False),
        ({"size": 11}, True),
        ({"mtime_ns": 4}, True),
        ({"ctime_ns": 9}, False),  # chmod, a hard link
        ({"inode": 8}, False),  # a network file system that renumbers its files
        ({"inode": 8, "ctime_ns": 9}, True),  # a copy that took over the time of change
    ],
)
def test_version_differs_if_the_bytes_may_differ(now: dict[str, int], other: bool) -> None:
    assert BEFORE._replace(**now).differs_from(BEFORE) is other


def test_files_are_compared_with_their_recorded_versions(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    files[0].write_bytes(b"1234")
    files[1].write_bytes(b"1234")
    versions = FileVersions([str(files[0]), None, str(files[1]), str(files[2])])
    again: FileVersions = pickle.loads(pickle.dumps(versions))  # noqa: S301  (our own bytes)
    files[1].write_bytes(b"12345")
    files[2].write_bytes(b"was not there")
    for one in (versions, again):
        one.check([0, 1, 3])
        with pytest.raises(
            ChangedError, match=r"\(4 bytes, .* then, 5 bytes, .* now\); open"
        ) as raised:
            one.check([2])
        assert raised.value.shard == str(files[1])
    files[1].unlink()
    versions.check([2])


def test_changed_time_alone_is_named_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"1234")
    os.utime(file, ns=(0, 5 * 10**9))
    versions = FileVersions([str(file)])
    os.utime(file, ns=(0, 6 * 10**9))
    with pytest.raises(
        ChangedError,
        match=r"may have been overwritten .* at 5\.0* then, at 6\.0* now; open .*state",
    ):
        versions.check([0])
