"""The cursor of a loader: where its next iteration begins, and which position is saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from shardstream.errors import OptionError
from shardstream.loader import Cursor
from shardstream.order import EpochOrder, EpochPlan, PartitionConfig, RankPartition
from shardstream.pipeline import LoaderPosition

ORDER = EpochOrder(nsamples=42, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)


def at(epoch: int, consumed: int = 0) -> LoaderPosition:
    return LoaderPosition(epoch=epoch, consumed=consumed)


def of_epoch(epoch: int) -> Cursor:
    return Cursor().at(at(epoch))


def rest(epoch: int = 0, consumed: int = 0, rank: int = 0, ranks: int = 1) -> RankPartition:
    config = PartitionConfig(world_size=ranks, remainder="keep")
    return RankPartition(EpochPlan(ORDER, epoch), config, rank=rank, consumed=consumed)


def begun(cursor: Cursor, epochs_ahead: int = 1) -> Cursor:
    """Begin an iteration, as `ShardLoader` does."""
    begun = cursor.at(cursor.next_position)
    return replace(begun, partition=rest(begun.position.epoch), epochs_ahead=epochs_ahead)


def read(cursor: Cursor, *consumed: int, epochs_ahead: int = 1) -> Cursor:
    """Begin an iteration, and take batches."""
    cursor = begun(cursor, epochs_ahead)
    for one in consumed:
        position = replace(cursor.position, consumed=one)
        cursor = cursor.after_batch(position, is_handed_out=True)
    return cursor


def test_a_new_cursor_begins_at_its_epoch() -> None:
    cursor = of_epoch(3)
    assert (cursor.position, cursor.before, cursor.next_position) == (at(3), at(3), at(3))
    assert not cursor.is_left
    assert cursor.partition is None
    assert begun(cursor).position == at(3)


def test_an_iteration_with_a_batch_makes_the_next_one_an_epoch_of_its_own() -> None:
    cursor = read(of_epoch(3), 4, 8)
    assert (cursor.position, cursor.before, cursor.next_position) == (at(3, 8), at(3, 4), at(4))
    assert cursor.is_left
    assert read(cursor).position == at(4)
    repeating = read(of_epoch(3), 4, epochs_ahead=0)
    assert repeating.next_position == at(3)
    assert repeating.at_end().next_position == at(3)


def test_an_iteration_without_a_batch_does_not_count() -> None:
    loaded = of_epoch(0).at(at(2, 8))
    for cursor in (begun(loaded), begun(begun(loaded))):
        assert cursor.next_position == cursor.position == at(2, 8)
    bad = begun(loaded).after_batch(at(2, 12), is_handed_out=False)
    assert (bad.position, bad.before, bad.next_position) == (at(2, 12), at(2, 8), at(2, 8))
    assert not bad.is_left


def test_the_end_of_an_iteration_is_the_begin_of_the_next_epoch() -> None:
    for cursor in (begun(of_epoch(3)), read(of_epoch(3), 4, 8)):
        ended = cursor.at_end()
        assert ended.position == ended.next_position == at(4)
        assert not ended.is_left
        assert ended.partition is None
        assert ended.iteration == cursor.iteration
        assert ended.before == cursor.before  # of the last batch, which a trainer may still hold


def test_an_epoch_that_is_set_restarts_what_was_left_and_keeps_what_was_loaded() -> None:
    loaded, left = of_epoch(0).at(at(2, 8)), read(of_epoch(0).at(at(2, 8)), 12)
    assert loaded.in_epoch(2) == loaded
    again = left.in_epoch(2)
    assert (again.position, again.next_position) == (at(2, 12), at(2))
    assert again.iteration == left.iteration  # which may go on
    further = again.after_batch(at(2, 16), is_handed_out=True)
    assert (further.next_position, further.before) == (at(2), at(2, 12))
    for cursor in (loaded, left):
        other = cursor.in_epoch(5)
        assert other.position == other.next_position == other.before == at(5)
        assert other.iteration == cursor.iteration + 1
        assert not other.is_left
        assert other.partition is None


@given(
    lists(tuples(sampled_from(["read", "skip", "load", "set"]), integers(0, 3)), max_size=8),
)
def test_whatever_sets_the_position_ends_the_iteration(steps: list[tuple[str, int]]) -> None:
    cursor, seen = of_epoch(0), {1}
    for step, number in steps:
        if step == "read":
            cursor = read(cursor, *range(4, 4 * number + 4, 4))
        elif step == "skip":
            cursor = cursor.past(number, rest(cursor.position.epoch))
        elif step == "load":
            cursor = cursor.at(at(number, 4))
        else:
            cursor = cursor.in_epoch(cursor.position.epoch + number + 1)
        assert cursor.iteration not in seen
        seen.add(cursor.iteration)


@pytest.mark.parametrize(
    ("batches", "consumed", "found"),
    [
        (0, 0, at(1, 0)),
        (3, 0, at(1, 12)),
        (3, 8, at(1, 20)),
        (10, 0, at(1, 40)),
        (11, 0, at(2)),
        (1, 40, at(2)),
    ],
)
def test_batches_that_are_skipped_count_as_read(
    batches: int, consumed: int, found: LoaderPosition
) -> None:
    cursor = of_epoch(1).past(batches, rest(1, consumed))
    assert cursor.position == cursor.next_position == cursor.before == found


def test_ranks_skip_to_the_same_position() -> None:
    for batches, found in ((5, at(1, 40)), (6, at(2))):  # 2 samples are left for a sixth step
        cursors = [of_epoch(1).past(batches, rest(1, 0, rank, 2)) for rank in range(2)]
        assert [cursor.position for cursor in cursors] == [found] * 2
    with pytest.raises(OptionError, match="cannot skip 12 batches: 11 are left of epoch 1"):
        of_epoch(1).past(12, rest(1))


def test_workers_take_turns_in_a_position_with_parts() -> None:
    position = LoaderPosition(epoch=2)
    for part in (0, 1, 2, 0):
        position = position.after_part(part, {"taken": part}, 3)
    assert position == LoaderPosition(
        epoch=2, parts={part: {"taken": part} for part in range(3)}, next_part=1
    )
