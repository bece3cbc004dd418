"""``WebDataset(exact=True)``: the samples of an epoch, each once, on any ranks and workers."""

from __future__ import annotations

import gzip
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
import shardstream.webdataset as wds
from tests.pairs import with_slow_rest

SHARDS, SAMPLES = 3, 17


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("indexed")
    for shard in range(SHARDS):
        samples = ({"__key__": f"{shard}-{n}", "cls": shard * SAMPLES + n} for n in range(SAMPLES))
        ss.packing.write_shard(folder / f"{shard}.tar", samples)
    return f"{folder}/{{0..{SHARDS - 1}}}.tar"


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def dataset(urls: str, **options: Any) -> Any:
    return wds.WebDataset(
        urls, **{"shardshuffle": 9, "nodesplitter": wds.split_by_node, "exact": True, **options}
    ).decode()


def numbers(samples: Any) -> list[int]:
    return [sample["cls"] for sample in samples]


def identity(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize(
    ("topology", "shuffle"),
    with_slow_rest(
        [((1, 0), False), ((1, 4), 9), ((3, 2), 9)], [(1, 0), (1, 4), (3, 2), (2, 5)], [False, 9]
    ),
)
def test_readers_take_each_sample_once(
    topology: tuple[int, int], shuffle: int, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size, workers = topology
    found, sizes = [], []
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        one = dataset(shards, shardshuffle=shuffle, empty_check=False)
        loader = wds.WebLoader(one, batch_size=4, num_workers=workers, collate_fn=identity)
        read = [number for batch in loader for number in numbers(batch)]
        found += read
        sizes.append(len(read))
    assert sorted(found) == list(range(SHARDS * SAMPLES))
    assert max(sizes) - min(sizes) <= max(workers, 1)


def test_without_shuffling_the_samples_are_those_of_the_compatible_way(shards: str) -> None:
    exact, compatible = (
        list(dataset(shards, shardshuffle=False, exact=one)) for one in (True, False)
    )
    assert exact == compatible


def test_each_pass_has_an_order_of_its_own_and_the_epoch_can_be_set(shards: str) -> None:
    one = dataset(shards)
    size = SHARDS * SAMPLES
    twice = numbers(itertools.islice(one.repeat(2), 2 * size))
    assert sorted(twice[:size]) == sorted(twice[size:]) == list(range(size))
    assert twice[:size] != twice[size:]
    assert numbers(dataset(shards)) == twice[:size]
    later = dataset(shards)
    later.set_epoch(1)
    assert numbers(later) == twice[size:]
    assert len(numbers(dataset(shards).with_epoch(70))) == 70


@pytest.mark.parametrize("workers", [0, 2])
def test_each_iteration_begins_with_the_next_epoch(workers: int, shards: str) -> None:
    one = dataset(shards)
    loader = wds.WebLoader(one, batch_size=4, num_workers=workers, collate_fn=numbers)
    found = [list(loader) for _ in range(3)]
    for epoch, batches in enumerate(found):
        assert sorted(itertools.chain(*batches)) == list(range(SHARDS * SAMPLES))
        one.set_epoch(epoch)
        assert list(loader) == batches
    assert found[0] != found[1] != found[2]


def test_several_ranks_need_a_node_splitter(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="explicit nodesplitter"):
        next(iter(dataset(shards, nodesplitter=wds.single_node_only)))


def test_what_a_plan_cannot_follow_is_refused(shards: str, tmp_path: Path) -> None:
    for name, value in {
        "resampled": True,
        "nodesplitter": None,
        "workersplitter": None,
        "select_files": bool,
        "rename_files": str,
        "handler": bool,
    }.items():
        with pytest.raises(ss.errors.OptionError, match=f"does not go with.*{name}"):
            dataset(shards, **{"shardshuffle": False, name: value})
    with pytest.raises(ss.errors.OptionError, match="set_epoch needs"):
        dataset(shards, exact=False).set_epoch(1)
    ss.packing.write_shard(tmp_path / "a.tar", [{"__key__": "a", "cls": 1}])
    packed = tmp_path / "a.tgz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(ss.errors.OptionError, match="shardstream index"):
        dataset(str(packed))


def test_log_says_that_there_is_a_plan(shards: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardstream")
    list(dataset(shards))
    assert any("WebDataset runs an exact plan" in one.getMessage() for one in caplog.records)
