"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.versions.delete import DeleteReport, delete
from shardstream.versions.history import VersionRecord, log, tag, untag
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
    "VersionRecord",
    "all_shards",
    "dataset_folder",
    "delete",
    "log",
    "next_version",
    "publish_version",
    "tag",
    "untag",
]
