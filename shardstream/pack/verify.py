"""A dataset against itself: every byte of every shard read again, every problem listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardstream.errors import ShardStreamError
from shardstream.format.index import INDEX_SUFFIX
from shardstream.format.manifest import MANIFEST_NAME, ShardInfo
from shardstream.pack.checks import (
    Found,
    Hashes,
    Problem,
    check_counts,
    check_index,
    hash_keys,
    problem_of,
    repeated_keys,
)
from shardstream.pack.passes import Meter, ProgressFunction, ShardPass, run_all
from shardstream.storage.filesystem import Storage, parent_url
from shardstream.storage.locate import Located, is_compressed, is_tar, locate
from shardstream.storage.publish import is_part
