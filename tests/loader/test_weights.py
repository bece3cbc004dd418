"""Test ``weights=``: samples drawn by weight, with the lengths, splits and states of other datasets."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import NotFoundError, OptionError, StateError
from shardstream.storage import Storage, locate_shards
from tests.small_datasets import FEW_CORES, flat, grouped, labels, loader, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

COUNT = 100
WEIGHTS = np.arange(COUNT) % 10 * 1.0  # samples 0, 10, 20, ... never come


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 100 samples in shards of 15; ``cls`` is the number of the sample."""
    return numbered(tmp_path_factory.mktemp("numbered"), COUNT, 15)


def check_counts(found: list[int], weights: Any, num_samples: int) -> None:
    """Check that each sample came as often as expected, rounded down or up."""
    expected = np.asarray(weights) / np.sum(weights) * num_samples
    counts = np.bincount(found, minlength=len(expected))
    assert counts.sum() == num_samples
    assert (counts >= np.floor(expected - 1e-6)).all()
    assert (counts <= np.ceil(expected + 1e-6)).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_samples", [None, 37, 250])
def test_samples_come_in_proportion_to_their_weights(
    folder: str, shuffle: bool, num_workers: int, num_samples: int | None
) -> None:
    reader = loader(
        folder, weights=WEIGHTS, num_samples=num_samples, shuffle=shuffle, num_workers=num_workers
    )
    count = num_samples or COUNT
    assert len(reader) == -(-count // 8)
    dataset = ss.ShardDataset(
        folder, weights=ss.Weights(WEIGHTS, num_samples=num_samples), shuffle=shuffle
    )
    assert len(dataset) == count
    batches = labels(reader)
    assert len(batches) == len(reader)
    found = flat(batches)
    check_counts(found, WEIGHTS, count)
    assert (found == sorted(found)) is not shuffle


def test_without_replacement_each_sample_comes_at_most_once(folder: str) -> None:
    reader = loader(folder, weights=WEIGHTS, replacement=False, num_samples=60, shuffle=True)
    epochs = [flat(labels(reader)) for _ in range(2)]
    for found in epochs:
        assert len(set(found)) == len(found) == 60
        assert not [number for number in found if number % 10 == 0]
    assert set(epochs[0]) != set(epochs[1])


def test_torch_tensors_lists_and_files_are_weights(folder: str, tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", WEIGHTS.astype(np.float32))
    expected = flat(labels(loader(folder, weights=WEIGHTS, shuffle=True)))
    for weights in (
        torch.from_numpy(WEIGHTS),
        WEIGHTS.tolist(),
        (2 * WEIGHTS).astype(int),
        tmp_path / "weights.npy",
        str(tmp_path / "weights.npy"),
    ):
        assert flat(labels(loader(folder, weights=weights, shuffle=True))) == expected


@pytest.mark.filterwarnings("ignore:lanes=4 is not a multiple")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ranks_and_resumes_on_other_topologies_read_the_same_draw(
    folder: str, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(0, 9), min_size=COUNT, max_size=COUNT).filter(any))
    num_samples = data.draw(st.integers(8, 200))
    ranks, after = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 8]))
    options: dict[str, Any] = {
        "weights": weights,
        "num_samples": num_samples,
        "shuffle": data.draw(st.booleans()),
        "lanes": 4,
        "microbatch": 1,
        "remainder": "keep",
    }
    whole = flat(labels(loader(folder, 2, **options)))
    check_counts(whole, weights, num_samples)
    first = [
        loader(folder, 2, placement=ss.Placement(rank, ranks), **options) for rank in range(ranks)
    ]
    steps = data.draw(st.integers(0, num_samples // (2 * ranks)))
    seen = [label for one in first for label in flat(labels(take(one, steps)))]
    state = first[0].state_dict()
    rest = []
    for rank in range(after):
        one = loader(folder, 2, placement=ss.Placement(rank, after), **options)
        one.load_state_dict(state)
        if steps * 2 * ranks < num_samples:
            rest += flat(labels(one))
    assert Counter(seen + rest) == Counter(whole)


def test_ranks_and_workers_do_not_change_the_draw(folder: str) -> None:
    options: dict[str, Any] = {"weights": WEIGHTS, "shuffle": True, "remainder": "keep"}
    expected = Counter(flat(labels(loader(folder, **options))))
    for ranks, workers in ((2, 0), (1, 2), (3, 1)):
        found = [
            label
            for rank in range(ranks)
            for label in flat(
                labels(
                    loader(
                        folder, num_workers=workers, placement=ss.Placement(rank, ranks), **options
                    )
                )
            )
        ]
        assert Counter(found) == expected


def test_padded_ranks_take_equally_many_steps(folder: str) -> None:
    readers = [
        loader(
            folder,
            weights=WEIGHTS,
            num_samples=101,
            shuffle=True,
            placement=ss.Placement(rank, 2),
        )
        for rank in range(2)
    ]
    found = [labels(reader) for reader in readers]
    assert [list(map(len, batches)) for batches in found] == [[8] * 6 + [3]] * 2
    assert [len(reader) for reader in readers] == [7, 7]


def test_batches_left_counts_down_in_each_epoch(folder: str) -> None:
    for rank in range(2):
        placement = ss.Placement(rank, 2)
        reader = loader(folder, weights=WEIGHTS, num_samples=101, shuffle=True, placement=placement)
        for _ in range(2):
            assert reader.batches_left == 7
            assert [reader.batches_left for _ in reader] == [6, 5, 4, 3, 2, 1, 0]
        reader.set_epoch(5)
        assert reader.batches_left == 7


def test_skip_passes_over_batches(folder: str) -> None:
    whole = labels(loader(folder, weights=WEIGHTS, shuffle=True))
    reader = loader(folder, weights=WEIGHTS, shuffle=True)
    reader.skip(3)
    assert reader.batches_left == len(whole) - 3
    assert labels(reader) == whole[3:]


def test_states_of_other_weights_are_refused(folder: str) -> None:
    reader = loader(folder, weights=WEIGHTS, shuffle=True)
    take(reader, 2)
    state = reader.state_dict()
    others: list[dict[str, Any]] = [
        {"weights": WEIGHTS + 1},
        {"weights": WEIGHTS, "num_samples": 50},
        {"weights": WEIGHTS, "num_samples": 90, "replacement": False},
        {},
    ]
    for other in others:
        with pytest.raises(StateError, match="weights= of the samples: the state says"):
            loader(folder, shuffle=True, **other).load_state_dict(state)
    with pytest.raises(StateError, match="weights= of the samples: the state says None, here it"):
        reader.load_state_dict(loader(folder, shuffle=True).state_dict())
    loader(folder, shuffle=True, weights=2 * WEIGHTS).load_state_dict(state)  # the same ratios


def test_a_stream_keeps_the_weights_in_its_state(folder: str) -> None:
    def stream(weights: Any) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, weights=weights, shuffle=True).decode().shuffle(16)
        return ss.ShardLoader(dataset, 8)

    whole = labels(stream(WEIGHTS))
    check_counts(flat(whole), WEIGHTS, COUNT)
    reader = stream(WEIGHTS)
    assert labels(take(reader, 3)) == whole[:3]
    resumed = stream(WEIGHTS)
    resumed.load_state_dict(reader.state_dict())
    assert labels(resumed) == whole[3:]
    with pytest.raises(StateError, match="weights= of the samples"):
        stream(None).load_state_dict(reader.state_dict())


def test_copies_have_random_generators_of_their_own(folder: str) -> None:
    def draw(sample: dict[str, Any], generator: np.random.Generator) -> tuple[int, float]:
        return sample["cls"], generator.random()

    weights = np.where(np.arange(COUNT) == 7, 50, 0.5)
    dataset = ss.ShardDataset(folder, weights=weights, shuffle=True).decode().map(draw, rng=True)
    found = list(dataset)
    assert len(set(found)) == len(found) == COUNT
    assert 49 <= [number for number, _ in found].count(7) <= 51
    plain = ss.ShardDataset(folder, shuffle=True).decode().map(draw, rng=True)
    assert len(set(found) & set(plain)) == len({number for number, _ in found})  # the first copies


def test_weights_of_a_subset_are_those_of_its_samples(folder: str) -> None:
    subset = [3, 50, 99, 7]
    reader = loader(folder, subset=subset, weights=[1, 0, 2, 5], num_samples=16)
    assert Counter(flat(labels(reader))) == {3: 2, 99: 4, 7: 10}
    with pytest.raises(
        OptionError, match=r"100 numbers, but there are 4 samples; give one for each \(with subset="
    ):
        loader(folder, subset=subset, weights=WEIGHTS)


def test_parts_of_a_mix_are_drawn_by_weight(folder: str, tmp_path: Path) -> None:
    other = numbered(tmp_path / "other", 30)
    weighted = ss.ShardDataset(
        folder, weights=ss.Weights(WEIGHTS, num_samples=200), shuffle=True
    ).decode()
    plain = ss.ShardDataset(other, shuffle=True).decode()
    named = {"weighted": weighted, "plain": plain.map_dict(cls=lambda label: 1000 + label)}
    mixed = ss.mix(named, [1, 1], samples=400)
    reader = ss.ShardLoader(mixed, 8)
    found = flat(labels(reader))
    assert reader.samples_per_dataset["weighted"] == 200
    check_counts([label for label in found if label < 1000], WEIGHTS, 200)
    nested = ss.mix({"a": mixed, "b": plain}, [1, 1], samples=100)
    assert len(flat(labels(ss.ShardLoader(nested, 4)))) == 100
    with pytest.raises(OptionError, match="'weighted' is drawn by weights=, but a mix without"):
        ss.mix(named)
    state = reader.state_dict()
    heavier = ss.ShardDataset(
        folder, weights=ss.Weights(WEIGHTS + 1, num_samples=200), shuffle=True
    ).decode()
    with pytest.raises(StateError, match="mix"):
        ss.ShardLoader(
            ss.mix(named | {"weighted": heavier}, [1, 1], samples=400), 8
        ).load_state_dict(state)


def test_loose_files_and_other_catalogs_have_weights(folder: str, tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.cls").write_text(str(number))
    dataset = ss.ObjectDataset(str(tmp_path), weights=[0, 1, 0, 2, 0, 3], shuffle=True)
    assert Counter(flat(labels(ss.ShardLoader(dataset.decode(), 4)))) == {1: 1, 3: 2, 5: 3}
    storage = Storage()
    catalog = ShardCatalog(locate_shards(folder, storage), storage)
    other = ss.loader.CatalogDataset(catalog, weights=ss.Weights(np.eye(COUNT)[4], num_samples=5))
    assert flat(labels(ss.ShardLoader(other.decode(), 5))) == [4] * 5


def test_remote_samples_are_drawn_by_weight(s3_env: None, bucket: str) -> None:
    remote = numbered(f"{bucket}/data", COUNT, 15)
    reader = loader(remote, weights=WEIGHTS, num_samples=150, shuffle=True, num_workers=2)
    check_counts(flat(labels(reader)), WEIGHTS, 150)


@pytest.mark.slow
def test_weights_travel_to_spawned_workers_once(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    weighted = ss.ShardDataset(folder, weights=WEIGHTS, shuffle=True).decode()
    reader = ss.ShardLoader(weighted, 8, num_workers=1, multiprocessing_context="spawn")
    check_counts(flat(labels(reader)), WEIGHTS, COUNT)
    assert len(pickle.dumps(weighted)) < len(pickle.dumps(dataset)) + 8 * COUNT + 1000


def test_repr_says_how_many_samples_are_drawn(folder: str) -> None:
    text = repr(
        ss.ShardDataset(folder, weights=ss.Weights(WEIGHTS, num_samples=20, replacement=False))
    )
    assert text == ("ShardDataset(7 shards, 100 samples, 20 drawn by weight, each at most once)")


def test_weights_of_a_column_are_those_of_an_array(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path, max_samples=7, columns=["json.quality"]) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number}", "json": {"quality": number % 3}})
    by_column = ss.ShardDataset(tmp_path, weights="quality")
    by_array = ss.ShardDataset(tmp_path, weights=np.arange(20) % 3)
    keys = [[sample["__key__"] for sample in dataset] for dataset in (by_column, by_array)]
    assert keys[0] == keys[1]
    assert not {f"{number}" for number in range(0, 20, 3)} & {*keys[0]}
    with pytest.raises(OptionError, match="nothing"):
        ss.ShardDataset(tmp_path, weights="nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": [1, 2]},
            "weights= has 2 numbers, but there are 100 samples; give one for each",
        ),
        ({"weights": -WEIGHTS}, "weights= has -1.0 for sample 1"),
        ({"weights": WEIGHTS * np.nan}, "weights= has nan for sample 0, and 100 such weights"),
        ({"weights": WEIGHTS * 0}, "weights= are 0 for all 100 samples"),
        ({"weights": [[1, 2], [3]]}, "weights= takes one list of numbers"),
        ({"weights": ["a"] * 100}, "one number for each sample, in one dimension, not <U1"),
        ({"weights": {"cat": 1.0}}, "weights by class need the column cls"),
        ({"weights": WEIGHTS[None]}, r"not float64 of shape \(1, 100\)"),
        ({"weights": WEIGHTS, "num_samples": 0}, "num_samples must be from 1 to"),
        ({"weights": WEIGHTS, "num_samples": 1.5}, "num_samples"),
        ({"weights": WEIGHTS, "replacement": False}, "replacement=False needs num_samples="),
        (
            {"weights": WEIGHTS, "replacement": False, "num_samples": 91},
            "only 90 samples of 100 have a weight above 0; choose at most 90",
        ),
        ({"weights": WEIGHTS, "index": "ignore"}, "weights= need shards that are read by number"),
    ],
)
def test_impossible_weights_are_refused(folder: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, **grouped(**options))


@pytest.mark.parametrize("option", ["weights", "subset"])
def test_array_of_more_numbers_than_memory_is_a_wrong_file(
    folder: str, tmp_path: Path, option: str
) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}"
    file = tmp_path / "numbers.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    options: dict[str, Any] = {option: file}
    with pytest.raises(OptionError, match=rf"{option}= takes a \.npy file"):
        ss.ShardDataset(folder, **grouped(**options))


def test_a_file_that_is_no_array_is_refused(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.npy"
    file.write_bytes(pickle.dumps([1.0] * COUNT))
    with pytest.raises(OptionError, match=r"weights= takes a \.npy file of numbers.*weights\.npy"):
        ss.ShardDataset(folder, weights=file)
    with pytest.raises(NotFoundError, match="not found"):
        ss.ShardDataset(folder, weights="no-such-file.npy")


def test_a_loader_takes_no_weights(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True)
    with pytest.raises(OptionError, match=r"weights: options of the dataset; pass"):
        ss.ShardLoader(dataset, 8, weights=WEIGHTS)
    sampler = WeightedRandomSampler(WEIGHTS.tolist(), 5)
    with pytest.raises(OptionError, match=r"draw by weight with ShardDataset\(weights=\)"):
        ss.ShardLoader(dataset, 8, sampler=sampler)


def not_seven(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 7:
        raise ss.errors.SampleError("bad")
    return sample


@pytest.mark.parametrize("refill", [False, True])
def test_each_copy_of_a_bad_sample_is_skipped_or_replaced(folder: str, refill: bool) -> None:
    weights = np.where(np.arange(COUNT) == 7, 10, 1)
    dataset = ss.ShardDataset(
        folder,
        weights=ss.Weights(weights, num_samples=109),
        on_error=ss.SkipBudget(samples=50, refill=refill),
    )
    reader = ss.ShardLoader(dataset.decode().map(not_seven), 8)
    found = flat(labels(reader))
    assert set(found) == set(range(COUNT)) - {7}
    assert len(found) == (109 if refill else 99)
    assert reader.skipped["SampleError"] >= 10


def test_samples_drawn_by_weights_have_no_numbers(folder: str) -> None:
    with pytest.raises(
        OptionError, match=r"leave weights out, and give torch's DataLoader a WeightedRandomSampler"
    ):
        ss.ShardDataset(folder, weights=WEIGHTS).by_number()
