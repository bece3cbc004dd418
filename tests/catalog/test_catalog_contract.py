"""Every catalog passes the contract suite."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardstream.catalog import ObjectCatalog, ShardCatalog
from shardstream.storage import Storage, list_files, locate_shards, publish_bytes
from shardstream.testing import check_catalog, make_shards


def open_shards(folder: str) -> Callable[[], ShardCatalog]:
    storage = Storage()
    make_shards(folder, samples=23, per_shard=5)
    return lambda: ShardCatalog(locate_shards(folder, storage), storage)


def open_objects(folder: str) -> Callable[[], ObjectCatalog]:
    storage = Storage()
    for number in range(7):
        publish_bytes(storage, f"{folder}/{number}.txt", bytes(number + 1))
        publish_bytes(storage, f"{folder}/{number}.cls", b"1")
    return lambda: ObjectCatalog(folder, list_files(folder, storage), storage)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://test-{uuid.uuid4().hex}"


def test_shard_catalog_passes_the_contract(folder: str) -> None:
    check_catalog(open_shards(folder), samples=23)


def test_object_catalog_passes_the_contract(folder: str) -> None:
    check_catalog(open_objects(folder), samples=7)


def test_fields_are_known_from_the_manifest_or_the_names(folder: str) -> None:
    assert open_shards(f"{folder}/one")().fields == ("cls",)
    objects = open_objects(f"{folder}/objects")()
    assert objects.fields == ("cls", "txt")
    assert objects.restrict_to(np.array([2, 4])).fields == ("cls", "txt")


class Broken(ShardCatalog):
    """A catalog whose ranges depend on the order of the request."""

    def extents(self, numbers: Any) -> Any:
        return super().extents(np.sort(numbers))


def test_contract_suite_detects_a_broken_catalog(tmp_path: Path) -> None:
    storage, folder = Storage(), make_shards(tmp_path, samples=23, per_shard=5)
    with pytest.raises(AssertionError, match="depend on the order"):
        check_catalog(lambda: Broken(locate_shards(folder, storage), storage), samples=23)
