from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import Extents
from shardstream.errors import NotFoundError, OptionError, StateError
from shardstream.fetch import coalesce
from shardstream.storage import Storage
from tests.small_datasets import flat, labels, loader, numbered, take

COUNT = 100
CHOSEN = [*range(5, 40, 3), 99, 60, 61, 62]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 100 samples in shards of 15; ``cls`` is the number of the sample."""
    return numbered(tmp_path_factory.mktemp("numbered"), COUNT, 15)


@pytest.fixture
def s3_folder(s3_env: None, bucket: str) -> str:
    return numbered(f"{bucket}/data", COUNT, 15)


def mask_of(numbers: list[int]) -> np.ndarray:
    mask = np.zeros(COUNT, dtype=bool)
    mask[numbers] = True
    return mask


@pytest.mark.parametrize(
    "subset",
    [CHOSEN, np.array(CHOSEN, dtype=np.uint16), tuple(CHOSEN), mask_of(CHOSEN), [*mask_of(CHOSEN)]],
)
def test_a_subset_has_the_samples_that_are_named(folder: str, subset: Any) -> None:
    expected = CHOSEN if len(subset) < COUNT else sorted(CHOSEN)
    assert flat(labels(loader(folder, subset=subset))) == expected
    by_number = ss.ShardDataset(folder, subset=subset).by_number().decode()
    assert [int(by_number[n]["cls"]) for n in range(len(by_number))] == expected
    shuffled = flat(labels(loader(folder, subset=subset, shuffle=True)))
    assert sorted(shuffled) == sorted(CHOSEN) != shuffled


@pytest.mark.parametrize("subset", [slice(10, 50, 4), range(10, 50, 4)])
def test_slices_and_ranges_are_subsets(folder: str, subset: Any) -> None:
    assert flat(labels(loader(folder, subset=subset))) == list(range(10, 50, 4))


@pytest.mark.parametrize("numbers", [pytest.param(CHOSEN, marks=pytest.mark.slow), mask_of(CHOSEN)])
def test_a_subset_is_read_from_a_file(s3_folder: str, tmp_path: Path, numbers: Any) -> None:
    np.save(tmp_path / "ids.npy", numbers)
    Storage().resolve(s3_folder)[0].put(str(tmp_path / "ids.npy"), f"{s3_folder}/ids.npy")
    for place in (tmp_path / "ids.npy", str(tmp_path / "ids.npy"), f"{s3_folder}/ids.npy"):
        found = flat(labels(loader(s3_folder, subset=place, num_workers=2)))
        assert sorted(found) == sorted(CHOSEN)


@pytest.mark.filterwarnings("ignore:lanes=4 is not a multiple")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ranks_and_resumes_on_other_topologies_read_each_sample_once(
    folder: str, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, COUNT - 1), min_size=8, unique=True))
    ranks, after = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 8]))
    options: dict[str, Any] = {
        "subset": numbers,
        "shuffle": True,
        "lanes": 4,
        "microbatch": 1,
        "remainder": "keep",
    }
    first = [
        loader(folder, 2, placement=ss.Placement(rank, ranks), **options) for rank in range(ranks)
    ]
    steps = data.draw(st.integers(0, len(numbers) // (2 * ranks)))
    seen = [label for one in first for label in flat(labels(take(one, steps)))]
    state = first[0].state_dict()
    rest = []
    for rank in range(after):
        one = loader(folder, 2, placement=ss.Placement(rank, after), **options)
        one.load_state_dict(state)
        if steps * 2 * ranks < len(numbers):
            rest += flat(labels(one))
    assert sorted(seen + rest) == sorted(numbers)


def test_state_of_another_subset_is_refused(folder: str) -> None:
    reader = loader(folder, subset=CHOSEN)
    take(reader, 1)
    state = reader.state_dict()
    for other in (None, CHOSEN[:-1], CHOSEN[::-1]):
        with pytest.raises(StateError, match="fingerprint"):
            loader(folder, subset=other).load_state_dict(state)
    loader(folder, subset=mask_of(CHOSEN))  # opened before: same samples in another order
    loader(folder, subset=np.array(CHOSEN)).load_state_dict(state)


def test_a_subset_is_part_of_a_mix(folder: str) -> None:
    mixed = ss.mix([ss.ShardDataset(folder, subset=[3, 1]), ss.ShardDataset(folder, subset=[50])])
    assert sorted(flat(labels(ss.ShardLoader(mixed.decode(), 2)))) == [1, 3, 50]


def test_repr_says_how_many_samples_were_chosen(folder: str) -> None:
    assert "16 of 100 samples in 7 shards" in repr(ss.ShardDataset(folder, subset=CHOSEN))


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ([], "subset= chooses no sample"),
        (mask_of([]), "chooses no sample"),
        ([1, 100], "has the sample 100, but the samples are numbered from 0 to 99"),
        ([-1], "has the sample -1, but"),
        ([5, 7, 5, 5], "has the sample 5 more than once, 2 numbers are repeated"),
        ([True, False], "a mask of 2 bools, but there are 100 samples"),
        ([0.5], "not float64 of shape"),
        ([[1, 2]], r"not int64 of shape \(1, 2\)"),
        ([2**70], "not object"),
        ([[1, 2], [3]], "takes one list of numbers or bools"),
    ],
)
def test_a_subset_that_is_wrong_is_refused(folder: str, subset: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, subset=subset)


def test_a_file_that_is_no_array_is_refused(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.npy"
    file.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(OptionError, match=r"takes a \.npy file.*ids\.npy"):
        ss.ShardDataset(folder, subset=file)
    np.savez(tmp_path / "ids.npz", a=[1])
    with pytest.raises(OptionError, match=r"not a \.npz file"):
        ss.ShardDataset(folder, subset=tmp_path / "ids.npz")


def test_a_file_that_is_missing_is_a_storage_error(folder: str) -> None:
    with pytest.raises(NotFoundError, match="not found"):
        ss.ShardDataset(folder, subset="no-such-file.npy")


def test_a_subset_needs_indexes(folder: str) -> None:
    with pytest.raises(OptionError, match=r"need shards that are read by number"):
        ss.ShardDataset(folder, subset=[1], read=ss.ReadOptions(index="ignore"))


# --- the catalog


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    gaps=st.lists(st.integers(0, 60), min_size=40, max_size=40),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
)
def test_ranges_have_few_bytes_that_are_not_asked_for(
    sizes: list[int], gaps: list[int], ratio: float
) -> None:
    before = np.array([0, *sizes[:-1]])
    starts: Any = np.cumsum(gaps[: len(sizes)] + before).astype(np.int64) * 512
    ends: Any = starts + np.array(sizes) * 512
    extents = Extents(np.zeros_like(starts), starts, ends)
    ranges = coalesce(extents, ratio)
    places = np.concatenate([span.places for span in ranges])
    assert sorted(places.tolist()) == list(range(len(sizes)))
    for span in ranges:
        used = int((ends[span.places] - starts[span.places]).sum())
        assert span.size <= ratio * used
    assert len(ranges) <= len(sizes)


def test_a_subset_of_a_hundredth_reads_few_bytes(s3_folder: str) -> None:
    with ss.ShardWriter(f"{s3_folder}-many", max_samples=5000) as writer:
        for number in range(10_000):
            writer.write({"__key__": f"{number:05d}", "txt": "x" * 400})
    whole = ss.ShardDataset(f"{s3_folder}-many")
    total = whole.pipeline.indexed_source.samples.total_bytes  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    scattered = np.sort(rng.choice(10_000, 100, replace=False))
    blocks = np.concatenate([np.arange(first, first + 20) for first in (100, 3000, 7000, 9500)])
    for numbers in (scattered, blocks):
        reader = ss.ShardLoader(ss.ShardDataset(f"{s3_folder}-many", subset=numbers), 10)
        keys = [key for batch in reader for key in batch["__key__"]]
        assert keys == [f"{number:05d}" for number in numbers]
        assert reader.stats().as_dict()["read_bytes"] <= 3 * total * len(numbers) / 10_000
