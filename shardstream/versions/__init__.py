"""Change datasets that are there: each change is a new version, and earlier ones stay readable."""

from shardstream.versions.delete import delete

__all__ = ["delete"]
