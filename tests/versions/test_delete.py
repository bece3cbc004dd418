"""Samples that are deleted are left out by each way of reading, and earlier versions have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import ChangedError, ManifestError, OptionError
from shardstream.storage import Storage, read_deleted
from shardstream.testing import make_shards
from shardstream.versions import next_version, publish_version
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 100


def numbers(dataset: ss.ShardDataset) -> list[int]:
    return [int(sample["cls"]) for sample in dataset]


def loaded(dataset: Any, workers: int = 0) -> list[int]:
    loader = ss.ShardLoader(dataset.decode(), batch_size=7, num_workers=workers)
    return sorted(int(number) for batch in loader for number in batch["cls"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return numbered(tmp_path / "data", N, 15, columns=["cls"])


def entry(url: str) -> dict[str, Any]:
    text = (Path(url) / "index.json").read_text()
    return dict(json.loads(text)["dataset_version"])


@given(deletions=st.lists(st.sets(st.integers(0, N - 1), min_size=1, max_size=30), max_size=3))
@settings(max_examples=20, deadline=None)
def test_each_version_has_its_samples(
    deletions: list[set[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = numbered(tmp_path_factory.mktemp("data") / "one", N, 15, columns=["cls"])
    left = [np.arange(N)]
    for places in deletions:
        chosen = sorted(place for place in places if place < len(left[-1]))
        if chosen and len(chosen) < len(left[-1]):
            assert ss.delete(url, numbers=chosen, version=len(left)).deleted == len(chosen)
            left.append(np.delete(left[-1], chosen))
    for version, expected in enumerate(left, start=1):
        dataset = ss.ShardDataset(url, version=version)
        assert len(dataset) == len(expected)
        assert numbers(dataset) == expected.tolist()
    shuffled = ss.ShardDataset(url, shuffle=True)
    assert loaded(shuffled) == left[-1].tolist()
    by_number = ss.ShardDataset(url).by_number()
    assert [by_number[i]["cls"] for i in range(len(by_number))] == [b"%d" % i for i in left[-1]]
    assert ss.catalog.read_columns(url)["cls"].to_pylist() == left[-1].tolist()


def test_numbers_of_another_version_are_refused(url: str) -> None:
    ss.delete(url, numbers=[0], version=1)
    with pytest.raises(OptionError, match="in which version numbers= were found: .* current one 2"):
        ss.delete(url, numbers=[5])
    with pytest.raises(ChangedError, match="version 2 meanwhile"):
        ss.delete(url, numbers=[5], version=1)
    assert numbers(ss.ShardDataset(url)) == [*range(1, N)]
    with pytest.raises(OptionError, match="version= is that of numbers="):
        ss.delete(url, keys=["000005"], version=2)


def test_a_version_that_gc_removes_during_a_change_is_read_again(url: str) -> None:
    ss.delete(url, numbers=[0])
    seen: list[int] = []

    def change(manifest: Any) -> Any:
        seen.append(manifest.dataset_version.number)
        if len(seen) == 1:
            ss.delete(url, numbers=[0], version=2)
            ss.versions.gc(url, keep=1, dry_run=False)
        read_deleted(manifest, f"{url}/index.json", Storage())
        return next_version(manifest, "append")

    publish_version(url, Storage(), change)
    assert seen == [2, 3]
    assert numbers(ss.ShardDataset(url)) == [*range(2, N)]


def test_all_ways_of_reading_leave_them_out(url: str) -> None:
    ss.delete(url, numbers=[3, 5, 99])
    assert ss.delete(url, where="cls between 10 and 20").deleted == 11
    assert ss.delete(url, keys=["000050"]).deleted == 1
    expected = sorted({*range(N)} - {3, 5, 50, 99, *range(10, 21)})
    assert loaded(ss.ShardDataset(url, shuffle=True), workers=2) == expected
    assert numbers(ss.ShardDataset(url, where="cls < 22")) == [n for n in expected if n < 22]
    with pytest.warns(UserWarning, match=r"subset= goes by .* are those of version 4; for"):
        assert numbers(ss.ShardDataset(url, subset=[0, 3, 4])) == [0, 4, 6]
    assert numbers(ss.ShardDataset(url, subset=[0, 3, 4], version=4)) == [0, 4, 6]
    pattern = f"{url}/{{000003..000006}}.tar"
    assert numbers(ss.ShardDataset(pattern)) == [n for n in expected if n >= 45]
    assert numbers(ss.ShardDataset(f"{url}/index.json")) == expected
    assert numbers(ss.ShardDataset([f"{url}/000001.tar", f"{url}/000000.tar"])) == [
        *(n for n in expected if 15 <= n < 30),
        *(n for n in expected if n < 15),
    ]
    mixed = ss.mix([ss.ShardDataset(url), ss.ShardDataset(url, version=1)], weights=[1, 1])
    assert loaded(mixed).count(50) < loaded(mixed).count(51)
    assert entry(url)["number"] == 4


def test_values_by_the_numbers_of_samples_warn_after_a_deletion(url: str) -> None:
    ss.delete(url, numbers=[3])
    costs = np.ones(N - 1)
    balanced = ss.OrderOptions(balance=costs)

    def opened(**options: Any) -> ss.ShardDataset:
        return ss.ShardDataset(url, **options)

    makes: list[tuple[str, Callable[..., object]]] = [
        ("weights", partial(ss.ShardDataset, url, weights=ss.Weights(costs))),
        ("balance", partial(ss.ShardDataset, url, shuffle=True, order=balanced)),
        ("costs", lambda **one: opened(**one).batch_by_cost(costs, 4)),
        ("lengths", lambda **one: opened(**one).pack_sequences((), 4, lengths=costs, keep="cls")),
        ("costs", lambda **one: ss.mix([opened(**one)]).batch_by_cost(costs, 4)),
        ("balance", lambda **one: ss.mix([opened(**one)], order=balanced)),
    ]
    for option, make in makes:
        with pytest.warns(UserWarning, match=f"{option}= goes by .* of version 2; for") as warned:
            make()
        assert warned[0].filename == __file__
        make(version=2)
    ss.ShardDataset(url, weights="cls")


def test_reading_from_start_to_end_is_refused(url: str) -> None:
    ss.delete(url, numbers=[3])
    with pytest.raises(OptionError, match="samples were deleted in this dataset"):
        ss.ShardDataset(url, read=ss.ReadOptions(index="ignore"))
    assert (
        len(ss.ShardDataset(url, version=1, read=ss.ReadOptions(index="ignore")).pipeline.steps)
        == 0
    )


@pytest.mark.parametrize("version", [0, 3, -1, "best", True])
def test_missing_versions_are_refused(url: str, version: Any) -> None:
    ss.delete(url, numbers=[3])
    with pytest.raises(OptionError, match="does not exist|the tags are"):
        ss.ShardDataset(url, version=version)
    with pytest.raises(OptionError, match="name its folder"):
        ss.ShardDataset(f"{url}/000000.tar", version=1)


def test_damaged_deletions_are_errors(url: str) -> None:
    ss.delete(url, numbers=[3, 4])
    file = Path(url) / entry(url)["deleted"]
    saved = file.read_bytes()
    file.write_bytes(saved[:-1])
    with pytest.raises(ManifestError, match="numbers of samples is damaged"):
        ss.ShardDataset(url)
    file.write_bytes(saved[:-1] + b"\1")
    with pytest.raises(ManifestError, match="do not match its name"):
        ss.ShardDataset(url)
    file.unlink()
    with pytest.raises(ManifestError, match="is missing, without which deleted"):
        ss.ShardDataset(url)


def test_deleting_nothing_or_all_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="all samples would be deleted"):
        ss.delete(url, numbers=range(N))
    with pytest.raises(OptionError):
        ss.delete(url, keys=["no such key"])
    with pytest.raises(OptionError, match="numbered from 0 to"):
        ss.delete(url, numbers=[N])


def test_another_dataset_with_versions_is_noticed_during_an_epoch() -> None:
    url = make_shards("memory://replaced/data", samples=of_size(0, 20), per_shard=10)
    reading = iter(ss.ShardDataset(url))
    next(reading)
    make_shards(url, samples=of_size(50, 70), per_shard=10, overwrite=True)
    ss.delete(url, numbers=[0])
    with pytest.raises(ChangedError):
        list(reading)
    MemoryFileSystem.store.clear()


def of_size(first: int, last: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:06d}", "cls": n} for n in range(first, last)]
