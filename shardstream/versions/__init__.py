"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.versions.delete import delete
from shardstream.versions.publish_version import (
    AnyManifest,
    dataset_folder,
    next_version,
    publish_version,
)

__all__ = ["AnyManifest", "dataset_folder", "delete", "next_version", "publish_version"]
