"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.versions.delete import DeleteReport, delete
from shardstream.versions.gc import GcReport, files_of_versions, gc
from shardstream.versions.history import VersionDiff, VersionRecord, diff, log, tag, untag
from shardstream.versions.publish_version import (
    AnyManifest,
    all_shards,
    dataset_folder,
    next_version,
    publish_version,
)

__all__ = [
    "AnyManifest",
    "DeleteReport",
    "GcReport",
    "VersionDiff",
    "VersionRecord",
    "all_shards",
    "dataset_folder",
    "delete",
    "diff",
    "files_of_versions",
    "gc",
    "log",
    "next_version",
    "publish_version",
    "tag",
    "untag",
]
