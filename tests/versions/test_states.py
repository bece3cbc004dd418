"""A state of an earlier version finishes its epoch with the samples of that version, and goes on with the present one."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count as counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.samples import deleted_since
from shardstream.storage import Storage
from shardstream.versions import next_version, publish_version
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, numbered

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings(
    FEW_CORES, "ignore:lanes=", "ignore:(subset=|weights=) goes by"
)
N = 72
Make = Callable[[str, ss.Placement | None], Any]


REFUSING = ss.ReadOptions(on_new_version="error")


def plain(url: str, placement: ss.Placement | None = None, **options: Any) -> Any:
    return ss.ShardDataset(url, shuffle=True, seed=3, placement=placement, **options).decode()


def loader(
    make: Make, url: str, rank: int = 0, ranks: int = 1, workers: int = 0, **options: Any
) -> Any:
    return ss.ShardLoader(make(url, ss.Placement(rank, ranks)), 4, num_workers=workers, **options)


def taken(batches: Any, count: int | None = None) -> list[int]:
    return [int(one) for batch in islice(batches, count) for one in batch["cls"]]


@dataclass
class Read:
    """Samples that all ranks together have read in an epoch, of which some replace those of a step that was left out."""

    samples: list[int]
    refilled: int
    state: dict[str, Any]


def read(make: Make, url: str, state: Any, topology: tuple[int, int], count: int | None) -> Read:
    """Read some steps of all ranks after a state."""
    ranks, workers = topology
    found, refilled, states = list[int](), 0, []
    for rank in range(ranks):
        one = loader(make, url, rank, ranks, workers)
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
        found += taken(iter(one), count)
        refilled += one.refilled
        states.append(one.state_dict())
    assert all(other == states[0] for other in states)
    return Read(found, refilled, states[0])


def check_once(samples: Sequence[int], expected: set[int], refilled: int = 0) -> None:
    counts = Counter(samples)
    assert set(counts) == expected
    assert sum(counts.values()) - len(expected) <= refilled


def delete_some(url: str, places: set[int]) -> set[int]:
    """Delete samples by number; return their values."""
    present = [int(one["cls"]) for one in ss.ShardDataset(url)]
    chosen = sorted(place for place in places if place < len(present) - 8)
    if chosen:
        ss.delete(url, numbers=chosen, version=ss.ShardDataset(url).versions[0])
    return {present[place] for place in chosen}


def append(url: str, numbers: Sequence[int], columns: Sequence[str] | None = ("cls",)) -> None:
    with ss.ShardWriter(url, append=True, max_samples=5, columns=columns) as writer:
        for i in numbers:
            writer.write({"__key__": f"{i:06d}", "cls": i, "npy": np.full((2, 3), i, np.int32)})


def values(url: str, **options: Any) -> list[int]:
    return [int(one["cls"]) for one in ss.ShardDataset(url, **options)]


OPERATIONS = st.lists(
    st.sampled_from(["append", "compact"]) | st.sets(st.integers(0, N - 1), max_size=6), max_size=3
)


def apply(url: str, operations: Sequence[str | set[int]]) -> set[int]:
    """Change a dataset: sets are numbers to delete; return the values of deleted samples."""
    gone = set[int]()
    for operation in operations:
        if operation == "compact":
            ss.compact(url)
        elif operation == "append":
            first = max(values(url)) + N
            append(url, range(first, first + 3))
        elif not isinstance(operation, str):
            gone |= delete_some(url, operation)
    return gone


@given(
    operations=st.lists(OPERATIONS, min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 2), min_size=2, max_size=2),
    ranks=st.lists(st.sampled_from([1, 2, 3]), min_size=3, max_size=3),
)
@settings(max_examples=15, deadline=None)
def test_each_sample_that_is_left_comes_once(
    operations: list[Any],
    steps: list[int],
    ranks: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    url = numbered(tmp_path_factory.mktemp("data") / "one", N, 7, columns=["cls"])

    def make(place: str, placement: ss.Placement | None) -> Any:
        order = ss.OrderOptions(lanes=6, microbatch=4, remainder="keep")
        return plain(place, placement, order=order)

    apply(url, operations[0])
    begun = {*values(url)}
    first = read(make, url, None, (ranks[0], 0), steps[0])
    gone = apply(url, operations[1])
    second = read(make, url, first.state, (ranks[1], 0), steps[1])
    assert gone.isdisjoint(second.samples)
    gone |= apply(url, operations[2])
    last = read(make, url, second.state, (ranks[2], 0), None)
    assert gone.isdisjoint(last.samples)
    everything = [*first.samples, *second.samples, *last.samples]
    expected = begun - (gone - {*everything})
    check_once(everything, expected, second.refilled + last.refilled)
    following = read(make, url, last.state, (ranks[2], 0), None)
    assert sorted(following.samples) == sorted(values(url))
    present = ss.ShardLoader(make(url, ss.Placement(0, 1)), 4)
    assert last.state["fingerprint"] == present.state_dict()["fingerprint"]
    assert last.state["epoch"] == 1


@given(
    history=st.lists(
        st.tuples(
            st.sampled_from(["delete", "compact", "append"]),
            st.sets(st.integers(0, 29), max_size=9),
        ),
        max_size=8,
    )
)
def test_deletions_are_carried_over_compactions(
    history: list[tuple[str, set[int]]],
) -> None:
    samples, names = list(range(20)), counter(20)  # names in the shards, by number
    deleted, everything, removed = set[int](), set[int](), list[Any]()
    for operation, places in history:
        if operation == "delete":
            deleted |= {place for place in places if place < len(samples)}
        elif operation == "append":
            samples += [next(names), next(names)]
        else:
            removed.append(np.array(sorted(deleted), dtype=np.int64))
            everything |= {samples[place] for place in deleted}
            samples = [one for place, one in enumerate(samples) if place not in deleted]
            deleted = set()
    everything |= {samples[place] for place in deleted}
    found = deleted_since(np.array(sorted(deleted), dtype=np.int64), removed, 20)
    assert found.tolist() == sorted(one for one in everything if one < 20)


VIEWS: dict[str, Make] = {
    "all": plain,
    "subset": lambda url, placement: plain(url, placement, subset=range(3, 50)),
    "where": lambda url, placement: plain(url, placement, where="cls >= 12"),
    "fields": lambda url, placement: plain(url, placement, fields=("cls",)),
    "steps": lambda url, placement: plain(url, placement).select(is_any).map(with_more),
    "mix": lambda url, placement: ss.mix(
        {"one": plain(url, placement), "two": plain(f"{url}-other", placement)}, seed=5
    ),
    "join": lambda url, placement: ss.join(
        ss.ShardDataset(url, shuffle=True, placement=placement), {f"{url}-twin": ["json"]}
    ).decode(),
    "batches": lambda url, placement: plain(url, placement).batch_by_cost("cls", 300, padded=False),
}


def is_any(sample: Any) -> bool:
    return bool(sample)


def with_more(sample: Any) -> Any:
    return sample | {"more": sample["cls"] + 1}


def view_data(folder: Path) -> str:
    """Write the datasets of all views; return the URL of the first."""
    url = numbered(folder / "data", N, 7, columns=["cls", "__key__"])
    numbered(f"{url}-other", 30, 7, columns=["cls"])
    twins = [{"__key__": f"{i:06d}", "json": i} for i in range(200)]
    ss.testing.make_shards(f"{url}-twin", samples=twins, per_shard=50, columns=["__key__"])
    ss.delete(url, numbers=[1, 5])
    return url


def change_much(url: str) -> set[int]:
    """Publish four versions; return the values of deleted samples."""
    gone = delete_some(url, {0, 4, 20, 21, 22, 23, 40, 64})
    append(url, range(100, 108))
    ss.compact(url)
    return gone | delete_some(url, {10, 11, 30})


@pytest.mark.parametrize(
    ("view", "workers"),
    with_slow_rest([("where", 2), ("mix", 0), ("join", 0), ("batches", 2)], VIEWS, [0, 2]),
)
def test_views_are_made_of_the_version_of_the_state(
    view: str, workers: int, tmp_path: Path
) -> None:
    url = view_data(tmp_path)
    make, size = VIEWS[view], None if view == "batches" else 4

    def open_loader(num_workers: int = 0) -> Any:
        return ss.ShardLoader(make(url, None), size, num_workers=num_workers)

    before = open_loader()
    planned = Counter(taken(iter(open_loader())))
    begun = taken(iter(before), 3)
    state = before.state_dict()
    gone = change_much(url)
    resumed = open_loader(workers)
    resumed.load_state_dict(state)
    rest = taken(iter(resumed), 2)
    again = open_loader()
    again.load_state_dict(resumed.state_dict())
    rest += taken(iter(again))
    other = {*range(30)} if view == "mix" else set()
    assert gone.isdisjoint({*rest} - other)
    lost = planned - Counter(begun) - Counter(rest)
    assert {*lost} <= gone
    assert not Counter(begun) + Counter(rest) - planned
    following = open_loader()
    following.load_state_dict(again.state_dict())
    found = taken(iter(again))
    assert found == taken(iter(following))
    assert sorted(found) == sorted(taken(iter(open_loader())))
    versions = [6, 1] if view in ("mix", "join") else [6]
    assert again.state_dict()["versions"] == versions


@pytest.fixture
def url(tmp_path: Path) -> str:
    return numbered(tmp_path / "data", N, 7, columns=["cls"])


def saved(url: str, count: int = 3, **options: Any) -> dict[str, Any]:
    """Return a state in the middle of an epoch."""
    one = ss.ShardLoader(plain(url, **options), 4)
    taken(iter(one), count)
    return one.state_dict()


def test_on_new_version_error_refuses_states_of_earlier_versions(url: str) -> None:
    state = saved(url)
    ss.versions.tag(url, "same")
    one = ss.ShardLoader(plain(url, read=REFUSING), 4)
    one.load_state_dict(state)  # the data are the same
    ss.delete(url, numbers=[3])
    one = ss.ShardLoader(plain(url, read=REFUSING), 4)
    with pytest.raises(StateError, match="saved with version 1, here it is 2"):
        one.load_state_dict(state)
    mixed = ss.mix({"one": plain(url, read=REFUSING, version=1), "two": plain(url)})
    both = ss.ShardLoader(mixed, 4)
    both.load_state_dict(ss.ShardLoader(mixed, 4).state_dict())
    with pytest.raises(OptionError, match="'continue' or 'error'"):
        ss.ReadOptions(on_new_version="stop")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on_new_version= has no effect in a mix"):
        ss.mix({"one": plain(url)}, read=REFUSING)


def test_a_newer_state_on_older_data_is_refused(url: str) -> None:
    ss.delete(url, numbers=[3])
    state = saved(url)
    with pytest.raises(StateError, match="version 2, which is newer than version 1 here"):
        ss.ShardLoader(plain(url, version=1), 4).load_state_dict(state)


def test_states_of_versions_that_are_gone_are_refused(url: str, tmp_path: Path) -> None:
    state = saved(url)
    ss.delete(url, numbers=[3])
    ss.delete(url, numbers=[3], version=2)

    def forget(manifest: Any) -> Any:
        after = next_version(manifest, "gc")
        return replace(after, dataset_version=replace(after.dataset_version, kept=((2, 3),)))

    publish_version(url, Storage(), forget)
    Path(url, "versions", "000001.json").unlink()
    with pytest.raises(StateError, match=r"version 1 was removed \(gc\)"):
        ss.ShardLoader(plain(url), 4).load_state_dict(state)
    other = numbered(tmp_path / "other", 40, 7, columns=["cls"])
    ss.delete(other, numbers=[3])
    with pytest.raises(StateError, match="fingerprint of the dataset"):
        ss.ShardLoader(plain(other), 4).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint of the dataset"):
        ss.ShardLoader(plain(other, version=1), 4).load_state_dict(state)


@pytest.mark.parametrize("option", ["subset", "weights"])
def test_arrays_that_do_not_fit_the_earlier_version_are_refused(url: str, option: str) -> None:
    given: Any = {"subset": np.ones(N, dtype=bool), "weights": np.ones(N)}[option]
    before, after = {option: given}, {option: given[1:]}
    state = saved(url, **before)
    ss.delete(url, numbers=[3])
    one = ss.ShardLoader(plain(url, **after), 4)
    with pytest.raises(StateError, match="cannot be made of the earlier one to finish the epoch"):
        one.load_state_dict(state)


def test_positions_of_workers_and_plain_loaders_are_refused(url: str) -> None:
    def streamed() -> Any:
        return ss.ShardLoader(plain(url).batched(4), None)

    one = streamed()
    next(iter(one))
    state, plain_state = one.state_dict(), iter(plain(url)).state_dict()
    ss.delete(url, numbers=[3])
    for load in (streamed().load_state_dict, iter(plain(url)).load_state_dict):
        with pytest.raises(StateError, match=r"the state says \[1\], here it is \[2\]"):
            load(state if load.__self__.__class__ is ss.ShardLoader else plain_state)
    iter(plain(url, version=1)).load_state_dict(plain_state)


def test_versions_are_shown(url: str, tmp_path: Path) -> None:
    assert "version" not in repr(plain(url))
    ss.delete(url, numbers=[3])
    assert "version 2)" in repr(plain(url))
    assert "version" not in repr(plain(url, version=1))
    mixed = ss.mix({"new": plain(url), "old": plain(url, version=1)})
    assert mixed.versions == (2, 1)
    assert "versions 2, 1" in repr(mixed)
    tars = ss.ShardDataset(f"{url}/{{000000..000001}}.tar")
    assert tars.versions == (None,)
    assert ss.ShardLoader(tars, 4).state_dict()["versions"] == [None]


def test_the_rest_of_an_epoch_ends_where_another_position_is_chosen(url: str) -> None:
    state = saved(url)
    ss.delete(url, numbers=range(20, 40))
    whole, left = N // 4, (N - 20) // 4

    def resumed(workers: int = 0) -> Any:
        found = ss.ShardLoader(plain(url), 4, num_workers=workers)
        found.load_state_dict(state)
        return found

    one = resumed()
    assert len(one) == whole
    assert one.batches_left == whole - 3
    one.set_epoch(0)  # keeps the position
    assert one.batches_left == whole - 3
    assert len(taken(iter(one))) < N - 12
    assert len(one) == one.batches_left == left
    assert sorted(taken(iter(one))) == sorted(values(url))

    one = ss.ShardLoader(plain(url), 4, num_workers=1, persistent_workers=True)
    one.load_state_dict(state)
    taken(iter(one), 2)
    one.set_epoch(0)  # from its start
    assert sorted(taken(iter(one))) == sorted(values(url))
    one.set_epoch(0)
    one.skip(4)
    assert one.state_dict()["fingerprint"] != state["fingerprint"]
    assert len(taken(iter(one))) == (left - 4) * 4

    one = resumed()
    one.skip(2)
    assert one.state_dict()["fingerprint"] == state["fingerprint"]
    one.skip(whole - 5)
    assert one.state_dict()["fingerprint"] != state["fingerprint"]
    assert one.epoch == 1


def test_a_state_at_the_begin_of_an_epoch_is_one_of_the_present_version(url: str) -> None:
    state = saved(url, 0)
    ss.delete(url, numbers=[3])
    one = ss.ShardLoader(plain(url), 4)
    one.load_state_dict(state)
    assert sorted(taken(iter(one))) == sorted(values(url))


def test_digests_differ_from_those_of_trainings_on_one_version(url: str) -> None:
    state = saved(url)
    append(url, range(100, 108))
    one = ss.ShardLoader(plain(url), 4)
    one.load_state_dict(state)
    taken(iter(one), 1)
    assert one.state_dict()["digest"] == state["digest"]  # nothing was deleted
    ss.delete(url, numbers=[3])
    two = ss.ShardLoader(plain(url), 4)
    two.load_state_dict(one.state_dict())
    rest = two.state_dict()
    assert rest["deletions"] == [3]
    assert rest["past"] == one.state_dict()["state_checksum"]
    assert ss.compare_states(state, rest)["deletions"] == (None, [3])
    taken(iter(two))
    later = two.state_dict()
    assert later["past"] == one.state_dict()["state_checksum"]
    assert later["digest"] != ss.ShardLoader(plain(url), 4).state_dict()["digest"]


def test_weights_that_are_set_in_the_rest_hold_on(url: str, tmp_path: Path) -> None:
    other = numbered(tmp_path / "other", N, 7, columns=["cls"])

    def mixed() -> Any:
        parts = {"one": plain(url), "two": plain(other)}
        return ss.ShardLoader(ss.mix(parts, {"one": 1, "two": 1}, samples=64), 4)

    before = mixed()
    taken(iter(before), 3)
    state = before.state_dict()
    ss.delete(url, numbers=[1, 2])
    one = mixed()
    one.load_state_dict(state)
    batches = iter(one)
    next(batches)
    one.set_weights({"one": 1, "two": 0})
    for batch in batches:
        assert {place.rsplit("/", 2)[1] for place in batch["__url__"]} == {"data"}
    assert {place.rsplit("/", 2)[1] for batch in one for place in batch["__url__"]} == {"data"}


def test_first_use_needs_the_version_of_the_run(url: str) -> None:
    state = saved(url)
    ss.delete(url, numbers=[3])
    with pytest.raises(StateError, match=r"other data \(version \[1\]"):
        ss.first_use(ss.ShardLoader(plain(url), 4), state, numbers=[5])
    ss.first_use(ss.ShardLoader(plain(url, version=1), 4), state, numbers=[5])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        {"worker_method": "thread"},
    ],
)
def test_other_workers_read_the_rest_and_the_next_epoch(url: str, options: Any) -> None:
    state = saved(url)
    ss.delete(url, numbers=range(20, 40))
    one = ss.ShardLoader(plain(url), 4, num_workers=2, persistent_workers=True, **options)
    alone = ss.ShardLoader(plain(url), 4)
    one.load_state_dict(state)
    alone.load_state_dict(state)
    for _ in range(2):
        assert taken(iter(one)) == taken(iter(alone))


def test_a_state_that_is_refused_leaves_the_loader_as_it_is(url: str) -> None:
    state = saved(url)
    ss.delete(url, numbers=range(20, 40))
    one = ss.ShardLoader(plain(url), 4)
    one.load_state_dict(state)
    batches = iter(one)
    next(batches)
    before = one.state_dict()
    with pytest.raises(StateError):
        one.load_state_dict({**state, "seed": 9})
    assert one.state_dict() == before


def test_a_dataset_of_another_process_is_not_made_of_earlier_versions(url: str) -> None:
    state = saved(url)
    ss.delete(url, numbers=[3])
    one = ss.ShardLoader(copy.copy(plain(url)), 4)
    with pytest.raises(StateError, match="make it in this process"):
        one.load_state_dict(state)


def test_replaced_fields_are_those_of_the_version(tmp_path: Path) -> None:
    url = numbered(tmp_path / "bare", N, 7)
    state = saved(url)
    ss.replace_fields(url, {"cls": {f"{i:06d}": str(i + 1000).encode() for i in range(N)}})
    ss.delete(url, numbers=range(10))
    append(url, [500], None)
    one = ss.ShardLoader(plain(url), 4)
    one.load_state_dict(state)
    rest = taken(iter(one))
    assert {*rest} <= {*range(10, N)}
    assert sorted(taken(iter(one))) == [500, *range(1010, 1000 + N)]


def test_a_field_that_was_replaced_by_values_of_equal_length_is_that_of_the_version(
    tmp_path: Path,
) -> None:
    url = numbered(tmp_path / "bare", N, 7)
    values = [{f"{i:06d}": b"%d" % (i + more) for i in range(N)} for more in (1000, 2000)]
    ss.replace_fields(url, {"cls": values[0]})
    state = saved(url)
    ss.replace_fields(url, {"cls": values[1]})
    loader = ss.ShardLoader(plain(url), 4)
    loader.load_state_dict(state)
    assert {*taken(iter(loader))} <= {*range(1000, 1000 + N)}
    assert sorted(taken(iter(loader))) == [*range(2000, 2000 + N)]
