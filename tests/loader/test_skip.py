from __future__ import annotations

import pytest

import shardstream as ss
from shardstream.errors import OptionError
from tests.small_datasets import labels, loader, numbered, take


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 100, 15)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_batches_are_passed_over_and_the_rest_is_as_before(
    folder: str, num_workers: int
) -> None:
    whole = labels(loader(folder, shuffle=True, num_workers=num_workers))
    reader = loader(folder, shuffle=True, num_workers=num_workers)
    reader.skip(3)
    assert reader.batches_left == len(whole) - 3
    assert labels(reader) == whole[3:]
    assert reader.epoch == 1


def test_after_a_spike_training_goes_on_behind_the_bad_batches(folder: str) -> None:
    whole = labels(loader(folder, shuffle=True))
    reader = loader(folder, shuffle=True)
    seen = labels(take(reader, 4))
    state = reader.state_dict()
    reader.skip(2)
    assert seen + labels(reader) == whole[:4] + whole[6:]
    resumed = loader(folder, shuffle=True)
    resumed.load_state_dict(state)
    resumed.skip(2)
    again = loader(folder, shuffle=True)
    again.load_state_dict(resumed.state_dict())  # the state counts them as read
    assert labels(resumed) == labels(again) == whole[6:]


def test_all_ranks_skip_the_same_steps(folder: str) -> None:
    for rank in range(2):
        placement = ss.Placement(rank, 2)
        whole = labels(loader(folder, placement=placement))
        reader = loader(folder, placement=placement)
        reader.skip(2)
        assert labels(reader) == whole[2:]


@pytest.mark.parametrize("count", [6, 7])
def test_ranks_with_a_batch_less_stay_in_the_same_epoch(
    tmp_path_factory: pytest.TempPathFactory, count: int
) -> None:
    folder = numbered(tmp_path_factory.mktemp("uneven"), 97, 15)
    states, left = [], []
    for rank in range(2):  # of 7 and 6 batches
        placement = ss.Placement(rank, 2)
        reader = loader(folder, placement=placement, remainder="keep")
        reader.skip(count)
        states.append(reader.state_dict())
        left.append(labels(reader))
        assert reader.epoch == (1 if count == 6 else 2)
    assert states[0] == states[1]
    assert [len(batches) for batches in left] == ([1, 0] if count == 6 else [7, 6])


def test_skipping_the_rest_begins_the_next_epoch(folder: str) -> None:
    reader = loader(folder, shuffle=True)
    reader.skip(len(reader))
    assert (reader.epoch, reader.state_dict()["consumed"]) == (1, 0)
    other = loader(folder, shuffle=True)
    other.set_epoch(1)
    assert labels(reader) == labels(other)


def test_persistent_workers_skip(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    reader = ss.ShardLoader(dataset, 8, num_workers=1, persistent_workers=True)
    first = labels(reader)
    reader.skip(5)
    assert labels(reader) == first[5:]


def test_skips_that_are_impossible_are_refused(folder: str) -> None:
    reader = loader(folder)
    for count in (-1, 14, 1.5):
        with pytest.raises(OptionError, match="batches"):
            reader.skip(count)  # type: ignore[arg-type]
    assert len(labels(reader)) == 13
    filtered = ss.ShardLoader(ss.ShardDataset(folder).shuffle(9), 8)
    with pytest.raises(OptionError, match="steps change counts"):
        filtered.skip(1)
