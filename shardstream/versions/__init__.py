"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.format import OpenWriter
from shardstream.versions.delete import DeleteReport, delete
from shardstream.versions.gc import GcReport, files_of_versions, gc
from shardstream.versions.history import (
    VersionDiff,
    VersionRecord,
    diff,
    log,
    read_current,
    tag,
    untag,
)
from shardstream.versions.publish_version import (
    AnyManifest,
    all_shards,
    close_writer,
    close_writers,
    dataset_folder,
    next_version,
    open_writer,
    publish_version,
    this_writer,
)

__all__ = [
    "AnyManifest",
    "DeleteReport",
    "GcReport",
    "OpenWriter",
    "VersionDiff",
    "VersionRecord",
    "all_shards",
    "close_writer",
    "close_writers",
    "dataset_folder",
    "delete",
    "diff",
    "files_of_versions",
    "gc",
    "log",
    "next_version",
    "open_writer",
    "publish_version",
    "read_current",
    "tag",
    "this_writer",
    "untag",
]
