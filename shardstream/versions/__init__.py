"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.versions.delete import DeleteReport, delete
from shardstream.versions.history import VersionRecord, log, tag, untag
from shardstream.versions.publish_version import (
    AnyManifest,
    dataset_folder,
    next_version,
    publish_version,
)

__all__ = [
    "AnyManifest",
    "DeleteReport",
    "VersionRecord",
    "dataset_folder",
    "delete",
    "log",
    "next_version",
    "publish_version",
    "tag",
    "untag",
]
