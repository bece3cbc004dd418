from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.errors import OptionError, StateError, StorageError
from shardstream.testing import make_shards
from tests.limits import module_of
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, all_ranks, flat, grouped, labels, loader, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("hundred"), 100, 15)


# -- each sample once ----------------------------------------------------------------------------------------------------------


TOPOLOGIES = [
    (1, 1, 0, 1),
    (1, 4, 2, 1),
    (1, 4, 0, 3),
    (7, 3, 2, 2),
    (61, 8, 3, 1),
    (61, 8, 2, 3),
    (61, 5, 0, 4),
    (61, 100, 2, 1),
    (16, 4, 2, 2),
    (10, 1, 3, 3),
]
ALWAYS = [
    *((True, TOPOLOGIES[place]) for place in (0, 2, 3, 4, 5, 6, 8, 9)),
    *((False, TOPOLOGIES[place]) for place in (1, 3, 5, 6, 7)),
]


@pytest.mark.parametrize(("shuffle", "topology"), with_slow_rest(ALWAYS, [True, False], TOPOLOGIES))
def test_each_sample_is_returned_once(
    shuffle: bool, topology: tuple[int, int, int, int], tmp_path: Path
) -> None:
    nsamples, batch_size, num_workers, world_size = topology
    folder = numbered(tmp_path, nsamples, 9)
    ranks = []
    for one in all_ranks(
        world_size, folder, batch_size=batch_size, num_workers=num_workers, shuffle=shuffle
    ):
        length = len(one)
        batches = labels(one)
        assert len(batches) == length
        ranks.append(batches)
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    counts = Counter(label for batches in ranks for label in flat(batches))
    assert set(counts) == set(range(nsamples))
    assert counts.total() - nsamples == -nsamples % world_size


@pytest.mark.parametrize(("remainder", "total"), [("pad", 102), ("drop", 99), ("keep", 100)])
def test_remainder_is_padded_dropped_or_kept(remainder: Any, total: int, folder: str) -> None:
    ranks = [
        flat(labels(one))
        for one in all_ranks(3, folder, shuffle=True, remainder=remainder, num_workers=0)
    ]
    assert sum(map(len, ranks)) == total
    assert len({label for rank in ranks for label in rank}) == min(total, 100)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_shows_batch_size_and_samples_as_torch_does(num_workers: int, folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    found = ss.ShardLoader(dataset, batch_size=8, drop_last=True, num_workers=num_workers)
    assert (found.batch_size, found.drop_last, len(found.dataset)) == (8, True, 100)  # type: ignore[arg-type]
    assert [len(batch["cls"]) for batch in found] == [8] * 12
    streamed = ss.ShardLoader(dataset.shuffle(9).with_length(7), batch_size=None)
    assert (streamed.batch_size, streamed.drop_last, len(streamed.dataset)) == (None, False, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drop_last_keeps_full_batches_unchanged(num_workers: int, folder: str) -> None:
    for one in all_ranks(3, folder, drop_last=True, num_workers=num_workers, batch_size=7):
        length = len(one)
        assert [len(batch) for batch in labels(one)] == [7] * length == [7] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_empty_and_unequal_shards_are_read(
    num_workers: int,
    shuffle: bool,
    tmp_path: Path,
) -> None:
    sizes = (1, 0, 30, 0, 2, 9)
    urls, first = [], 0
    for place, size in enumerate(sizes):
        tar = tmp_path / f"{place}.tar"
        if size:
            samples = [{"__key__": f"{i:03d}", "cls": i} for i in range(first, first + size)]
            made = make_shards(tmp_path / str(place), samples=samples, per_shard=100)
            (Path(made) / "000000.tar").rename(tar)
        else:
            tar.write_bytes(bytes(1024))
        urls.append(str(tar))
        first += size
    dataset = ss.ShardDataset(urls, shuffle=shuffle).decode()
    one = ss.ShardLoader(dataset, batch_size=4, num_workers=num_workers)
    assert len(one) == 11
    assert sorted(flat(labels(one))) == list(range(42))


def test_samples_are_plain_dicts_and_batches_are_stacked(folder: str) -> None:
    batch = next(iter(loader(folder, 3)))
    assert sorted(batch) == ["__key__", "__url__", "cls", "npy"]
    assert batch["__key__"] == ["000000", "000001", "000002"]
    assert all(url.endswith("000000.tar") for url in batch["__url__"])
    assert batch["cls"].dtype == torch.int64
    assert batch["npy"].shape == (3, 2, 3)
    assert batch["npy"].dtype == torch.int32


# -- epochs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_epochs_differ_and_set_epoch_selects_one(options: dict[str, Any], folder: str) -> None:
    def make() -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(lanes=2)).decode()
        return ss.ShardLoader(dataset, 8, **options)

    one = make()
    epochs = [(one.epoch, labels(one)) for _ in range(3)]
    assert [epoch for epoch, _ in epochs] == [0, 1, 2]
    assert all(sorted(flat(batches)) == list(range(100)) for _, batches in epochs)
    assert len({tuple(flat(batches)) for _, batches in epochs}) == 3
    one.set_epoch(1)
    assert labels(one) == epochs[1][1]
    assert one.epoch == 2
    other = make()
    other.set_epoch(2)
    assert labels(other) == epochs[2][1]


def test_seeds_give_different_orders(folder: str) -> None:
    orders = {tuple(flat(labels(loader(folder, shuffle=True, seed=seed)))) for seed in (0, 1, -1)}
    assert len(orders) == 3


def test_without_shuffle_samples_have_stored_order(folder: str) -> None:
    for num_workers in (0, 3):
        assert flat(labels(loader(folder, num_workers=num_workers))) == list(range(100))


# -- topology ------------------------------------------------------------------------------------------------------------------


def global_batches(folder: str, world_size: int, num_workers: int) -> list[list[int]]:
    ranks = [
        labels(one)
        for one in all_ranks(
            world_size,
            folder,
            batch_size=16 // world_size,
            num_workers=num_workers,
            shuffle=True,
            lanes=16,
            microbatch=2,
            window=4,
            block=3,
        )
    ]
    return [sorted(flat(list(step))) for step in zip(*ranks, strict=True)]


def test_global_batches_are_equal_on_every_topology(folder: str) -> None:
    expected = global_batches(folder, 1, 0)
    assert len(expected) == 7
    for world_size, num_workers in ((1, 2), (2, 0), (2, 2), (8, 0), (8, 2)):
        found = global_batches(folder, world_size, num_workers)
        assert found[:-1] == expected[:-1]
        assert set(found[-1]) == set(expected[-1])


@pytest.mark.parametrize(
    ("lanes", "num_workers", "message"),
    [
        (4, 3, "lanes=4 is not a multiple of 1 ranks x 3 workers x 1 .*Lanes that fit: 3, 6"),
        (1, 2, "Lanes that fit: 2$"),
    ],
)
def test_uneven_lanes_cause_a_warning(
    lanes: int, num_workers: int, message: str, folder: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        one = loader(folder, num_workers=num_workers, lanes=lanes, shuffle=True)
    assert sorted(flat(labels(one))) == list(range(100))  # still exact


@pytest.mark.usefixtures("s3_env")
@pytest.mark.parametrize(
    ("lanes", "num_workers", "cuts", "effect"),
    [
        pytest.param(
            8,
            3,
            (1, 130, 249),
            "some workers read one lane more than others",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            5, 4, (130,), "workers read parts of the same windows", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:lanes=")
def test_workers_of_remote_data_read_whole_lanes(
    lanes: int, num_workers: int, cuts: tuple[int, ...], effect: str, bucket: str
) -> None:
    url = numbered(f"{bucket}/set", 2000, 500)
    options: dict[str, Any] = {"shuffle": True, "lanes": lanes, "window": 64, "block": 16}
    with pytest.warns(UserWarning, match=effect):
        one = loader(url, num_workers=num_workers, **options)
    alone = loader(url, **options)
    expected = labels(alone)
    assert labels(one) == expected
    ratio = one.stats().timings.read_bytes / alone.stats().timings.read_bytes
    assert ratio < 1.1 if num_workers < 4 else ratio > 1.5
    for cut in cuts:
        one = loader(url, num_workers=num_workers, **options)
        seen = labels(take(one, cut))
        rest = loader(url, num_workers=num_workers, **options)
        rest.load_state_dict(one.state_dict())
        assert seen + labels(rest) == expected


def test_ranks_with_a_local_and_a_remote_copy_have_the_same_order(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, compared = f"memory://copy-{time.time_ns()}", list[Any]()
    for path in Path(folder).iterdir():
        fsspec.filesystem("memory").put_file(str(path), f"{remote}/{path.name}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        module_of(ss.ShardLoader), "compare_ranks", lambda *found, **_: compared.append(found[:2])
    )
    for rank, url in enumerate((folder, remote)):
        monkeypatch.setenv("RANK", f"{rank}")
        labels(loader(url, shuffle=True))
    assert compared[0] == compared[1]


def test_rank_and_world_size_come_from_torchruns_variables(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    explicit = labels(loader(folder, placement=ss.Placement(1, 3)))
    assert labels(loader(folder)) == explicit
    assert labels(loader(folder, num_workers=2)) == explicit
    assert flat(labels(loader(folder, placement=ss.Placement()))) == list(range(100))


# -- state ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), with_slow_rest([(0, 3), (2, 0)], [0, 2], [0, 3]))
def test_resume_continues_at_the_saved_position(before: int, after: int, folder: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "lanes": 6, "seed": 4}
    full = labels(loader(folder, **options))
    for cut in (0, 1, 7, 12):
        one = loader(folder, num_workers=before, **options)
        seen = labels(take(one, cut))
        state = json.loads(json.dumps(one.state_dict()))
        assert state == one.state_dict()
        assert state["consumed"] == 8 * cut  # prefetched batches do not count
        other = loader(folder, num_workers=after, **options)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert (len(other), other.batches_left) == (13, 13 - cut)
        assert seen + labels(other) == full
        assert other.batches_left == 13  # the next epoch is complete


def test_state_after_the_last_batch_is_the_start_of_the_next_epoch(folder: str) -> None:
    one = loader(folder, shuffle=True)
    state = [one.state_dict() for _ in one][-1]
    assert (state["epoch"], state["consumed"]) == (1, 0)
    assert one.state_dict() == state
    other = loader(folder, shuffle=True)
    other.load_state_dict(state)
    assert other.epoch == 1
    assert labels(other) == labels(one)


def test_resumed_loader_has_the_states_of_an_uninterrupted_one(folder: str) -> None:
    one = loader(folder, shuffle=True)
    states = [one.state_dict(), *(one.state_dict() for _ in one)]
    other = loader(folder, shuffle=True)
    other.load_state_dict(states[4])
    assert [other.state_dict() for _ in other] == states[5:]
    third = loader(folder, shuffle=True)
    third.load_state_dict(states[4])
    take(third, 2)
    assert third.state_dict() == states[6]
    other.load_state_dict(third.state_dict())  # into a loader that was used before
    assert [other.state_dict() for _ in other] == states[7:]


def test_prefetched_batches_are_not_counted_as_consumed(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    one = ss.ShardLoader(dataset, 8, num_workers=2, prefetch_factor=4)
    batches = iter(one)
    next(batches)
    time.sleep(0.3)
    assert one.state_dict()["consumed"] == 8


def selects(sample: dict[str, Any]) -> bool:
    return True


@pytest.mark.parametrize(
    ("steps", "num_workers"),
    with_slow_rest([("plan", 2), ("parts", 0)], ["plan", "parts"], [0, 2]),
)
def test_loaded_states_reach_persistent_workers_and_end_open_iterators(
    steps: str, num_workers: int, folder: str
) -> None:
    def open_loader(**options: Any) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, **grouped(shuffle=True, seed=2, **options)).decode()
        if steps == "parts":
            dataset = dataset.select(selects).shuffle(1)
        return ss.ShardLoader(
            dataset, 8, num_workers=num_workers, persistent_workers=num_workers > 0
        )

    # With an index, the order does not depend on the workers.
    order = {"lanes": 4, "block": 2} if steps == "plan" else {}
    rest = labels(open_loader(**order))[3:]
    saved = open_loader(**order)
    take(saved, 3)
    state = saved.state_dict()

    loader = open_loader()
    labels(loader)  # its workers stay alive
    old = iter(loader)
    next(old)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="its position set, while this iteration goes on"):
        next(old)
    assert loader.state_dict() == state
    assert labels(old)  # to its end
    assert loader.state_dict() == state
    assert labels(loader) == rest


def test_open_iterator_stops_counting_after_set_epoch(folder: str) -> None:
    loader = open_in_order(folder)
    old = iter(loader)
    next(old)
    loader.set_epoch(4)
    state = loader.state_dict()
    with pytest.warns(UserWarning, match="its position set, while this iteration goes on"):
        next(old)
    assert (loader.epoch, loader.state_dict()) == (4, state)
    assert labels(old)
    assert (loader.epoch, loader.state_dict()) == (4, state)


def open_in_order(folder: str) -> ss.ShardLoader:
    return ss.ShardLoader(
        ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(lanes=2)).decode(), 8
    )


def epoch_of(folder: str, epoch: int) -> list[list[int]]:
    loader = open_in_order(folder)
    loader.set_epoch(epoch)
    return labels(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_follows_its_dataset_to_an_epoch(num_workers: int, folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(lanes=2)).decode()
    loader = ss.ShardLoader(dataset, 8, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert labels(loader) == epoch_of(folder, 0)
    dataset.set_epoch(5)
    assert loader.epoch == loader.state_dict()["epoch"] == 5
    assert labels(loader) == epoch_of(folder, 5)
    assert labels(loader) == epoch_of(folder, 6)
    dataset.set_epoch(5)  # set again
    take(loader, 2)
    state = loader.state_dict()
    dataset.set_epoch(7)
    loader.load_state_dict(state)
    dataset.set_epoch(5)  # the epoch of the loaded position
    assert labels(loader) == epoch_of(folder, 5)[2:]


def test_with_length_sets_the_length_of_the_loader(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    for changed in (dataset, dataset.select(selects), dataset.shuffle(9)):
        given = changed.with_length(20)
        assert (len(given), len(ss.ShardLoader(given, 8))) == (20, 3)
        assert len(ss.ShardLoader(given, 8, drop_last=True)) == 2
        assert len(ss.ShardLoader(given, None)) == 20
    for length in (-1, 2.5):
        with pytest.raises(OptionError, match="length must be"):
            dataset.with_length(length)  # type: ignore[arg-type]


def test_repr_shows_dataset_and_options(folder: str) -> None:
    dataset = ss.ShardDataset(folder, placement=ss.Placement(1, 2)).decode()
    assert repr(ss.ShardLoader(dataset, 8)) == (
        f"ShardLoader({dataset!r}, batch_size=8, num_workers=0, rank 1 of 2)"
    )
    assert "batch_size=None" in repr(ss.ShardLoader(dataset.select(selects), None))
    shown = repr(ss.ShardDataset(folder).by_number().decode())
    assert shown == repr(ss.ShardDataset(folder).decode()).replace("Shard", "Map", 1)
    assert "samples, 5 chosen)" in repr(ss.ShardDataset(folder).by_number()[:5])


@pytest.mark.parametrize("persistent", [False, True])
def test_state_is_loaded_into_a_loader_that_has_workers(persistent: bool, folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    one = ss.ShardLoader(dataset, 8, num_workers=2, persistent_workers=persistent)
    full = labels(one)
    assert labels(one) != full
    one.set_epoch(0)
    take(one, 5)
    state = one.state_dict()
    one.load_state_dict(state)
    assert labels(one) == full[5:]
    assert one.epoch == 1


@pytest.mark.parametrize("remainder", ["pad", "drop", "keep"])
def test_resume_with_more_ranks(remainder: Any, folder: str) -> None:
    options = {"shuffle": True, "lanes": 8, "microbatch": 2, "remainder": remainder}
    seen: list[int] = []
    states = []
    for one in all_ranks(2, folder, batch_size=4, **options):
        seen += flat(labels(take(one, 6)))
        states.append(one.state_dict())
    assert states[0] == states[1]
    for one in all_ranks(4, folder, batch_size=2, **options):
        one.load_state_dict(states[0])
        seen += flat(labels(one))
    assert Counter(seen) == Counter(range(100))


def test_set_epoch_to_the_loaded_epoch_keeps_the_position(folder: str) -> None:
    one = loader(folder, shuffle=True)
    one.set_epoch(3)
    full = labels(one)
    one.set_epoch(3)
    take(one, 4)
    other = loader(folder, shuffle=True)
    other.load_state_dict(one.state_dict())
    other.set_epoch(other.epoch)  # as in every training loop
    assert labels(other) == full[4:]


# -- arguments -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, r"pass shuffle=True to ShardDataset\("),
        ({"sampler": [1]}, "a ShardLoader takes no sampler"),
        ({"batch_sampler": [[1]]}, "a ShardLoader takes no sampler"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"in_order": False, "num_workers": 2}, "in_order"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str, folder: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardLoader(ss.ShardDataset(folder), **({"batch_size": 2} | options))


def test_matching_shuffle_argument_is_accepted(folder: str) -> None:
    assert len(ss.ShardLoader(ss.ShardDataset(folder, shuffle=True), 8, True)) == 13
    assert len(ss.ShardLoader(ss.ShardDataset(folder), 8, shuffle=False)) == 13


def test_batch_size_must_be_a_multiple_of_the_microbatch(folder: str) -> None:
    with pytest.raises(OptionError, match="batch_size=9 must be a multiple .* microbatch=4"):
        loader(folder, 9, microbatch=4)


def test_foreign_datasets_are_refused() -> None:
    with pytest.raises(OptionError, match="reads a ShardDataset, not list; use torch's DataLoader"):
        ss.ShardLoader([1, 2])  # type: ignore[arg-type]


def test_batch_size_none_yields_items(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().to_tuple("cls")
    for num_workers in (0, 2):
        found = list(ss.ShardLoader(dataset, None, num_workers=num_workers))
        assert sorted(found) == [(i,) for i in range(100)]


def test_collate_fn_is_applied(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().to_tuple("cls")
    one = ss.ShardLoader(dataset, 40, collate_fn=len, num_workers=2)
    assert list(one) == [40, 40, 20]


# -- randomness ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_generators_are_not_used(num_workers: int, folder: str) -> None:
    def states() -> list[Any]:
        kind, keys, *rest = np.random.get_state()
        return [random.getstate(), torch.get_rng_state().tolist(), kind, list(keys), rest]

    before = states()
    dataset = ss.ShardDataset(folder, shuffle=True).decode().map(noisy, rng=True).shuffle(10)
    take(ss.ShardLoader(dataset, 8, num_workers=num_workers), 3)
    list(loader(folder, num_workers=num_workers, shuffle=True))
    assert states() == before


def noisy(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"cls": sample["cls"], "noise": generator.normal(size=(2, 2)).astype(np.float32)}


def noise_of(batches: Any) -> dict[int, bytes]:
    return {
        int(label): noise.numpy().tobytes()
        for batch in batches
        for label, noise in zip(batch["cls"], batch["noise"], strict=True)
    }


def test_random_maps_are_bitwise_equal_on_any_topology(folder: str) -> None:
    def make(num_workers: int, threads: int = 0, **options: Any) -> ss.ShardLoader:
        dataset = ss.ShardDataset(
            folder, **grouped(shuffle=True, lanes=6, seed=9, **options)
        ).decode()
        random_map = dataset.map(noisy, rng=True, threads=threads)
        return ss.ShardLoader(random_map, 8, num_workers=num_workers)

    one = make(0)
    expected = noise_of(one)
    assert len(set(expected.values())) == 100
    assert noise_of(make(1)) == noise_of(make(3)) == noise_of(make(2, threads=2)) == expected
    assert noise_of(one) != expected  # the next epoch
    ranks = [noise_of(make(0, placement=ss.Placement(rank, 3))) for rank in range(3)]
    assert ranks[0] | ranks[1] | ranks[2] == expected
    left = make(2)
    seen = noise_of(take(left, 6))
    other = make(0)
    other.load_state_dict(left.state_dict())
    assert seen | noise_of(other) == expected


# -- stores --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> str:
    name = f"memory://loader-{random.getrandbits(64):x}"
    return numbered(name, 100, 15)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_fsspec_filesystem_can_be_read(num_workers: int, memory: str, folder: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "lanes": 2, "window": 16, "block": 3}
    options["num_workers"] = num_workers
    assert labels(loader(memory, **options)) == labels(loader(folder, **options))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_s3_can_be_read(
    num_workers: int,
    bucket: str,
    s3_env: None,
    folder: str,
) -> None:
    url = numbered(f"{bucket}/train", 100, 15)
    options: dict[str, Any] = {"shuffle": True, "lanes": 2, "num_workers": num_workers}
    one = loader(url, **options)
    full = labels(one)
    assert full == labels(loader(folder, **options))
    resumed = loader(url, **options)
    one.set_epoch(0)
    take(one, 4)
    resumed.load_state_dict(one.state_dict())
    assert labels(resumed) == full[4:]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_can_be_forked_or_spawned(method: str, memory: str, folder: str) -> None:
    source = memory if method == "fork" else folder
    dataset = ss.ShardDataset(source, shuffle=True).decode()
    one = ss.ShardLoader(dataset, 8, num_workers=1, multiprocessing_context=method)
    assert labels(one) == labels(loader(folder, shuffle=True))


def test_spawned_workers_know_their_rank_and_their_store(
    bucket: str,
    s3_env: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = numbered(f"{bucket}/train", 40, 9)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = ss.ShardDataset(url, shuffle=True).decode().map(noisy, rng=True)
    expected = noise_of(ss.ShardLoader(dataset, 5, num_workers=0))
    one = ss.ShardLoader(dataset, 5, num_workers=1, multiprocessing_context="spawn")
    assert noise_of(one) == expected
    assert len(expected) == 20


# -- errors --------------------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """An exception class of the user."""


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 42:
        raise OddError("no luck")
    return sample


def stops(sample: dict[str, Any]) -> dict[str, Any]:
    return next(iter(())) if sample["cls"] == 42 else sample


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("exact", [True, False])
def test_user_error_keeps_its_type_and_gets_a_note(
    exact: bool,
    num_workers: int,
    threads: int,
    folder: str,
) -> None:
    dataset = ss.ShardDataset(folder).decode().map(fails, threads=threads)
    one = ss.ShardLoader(dataset if exact else dataset.shuffle(3), 8, num_workers=num_workers)
    with pytest.raises(OddError, match="no luck") as caught:
        list(one)
    error_text = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert "in map(fails) on sample '000042' of" in error_text
    assert "000002.tar" in error_text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("exact", [True, False])
def test_stop_iteration_in_a_function_is_an_error(
    exact: bool,
    num_workers: int,
    folder: str,
) -> None:
    dataset = ss.ShardDataset(folder).decode().map(stops)
    one = ss.ShardLoader(dataset if exact else dataset.shuffle(3), 8, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(one)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_deleted_shard_ends_the_epoch(num_workers: int, memory: str) -> None:
    one = loader(memory, num_workers=num_workers, prefetch_bytes=1, window=8)
    fsspec.filesystem("memory").rm(f"{memory}/000004.tar")
    with pytest.raises(StorageError, match=r"not found.*000004\.tar"):
        list(one)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_can_be_used_again_after_an_error(persistent: bool, folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().map(fails)
    one = ss.ShardLoader(dataset, 8, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        batches = iter(one)
        assert len(take(batches, 5)) == 5
        with pytest.raises(OddError):
            next(batches)
        assert one.state_dict()["consumed"] == 40


def test_damaged_state_is_refused(folder: str) -> None:
    state = loader(folder).state_dict()
    for name in state:
        damaged = {key: value for key, value in state.items() if key != name}
        with pytest.raises(StateError):
            loader(folder).load_state_dict(damaged)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_loader_over_the_internal_dataset_is_refused(folder: str, num_workers: int) -> None:
    own = loader(folder, num_workers=num_workers)
    list(own)
    other = DataLoader(own.dataset, batch_size=None, num_workers=num_workers)
    with pytest.raises(ss.errors.OptionError, match="only its ShardLoader can read this dataset"):
        list(other)
    assert len(list(own)) == len(own)


def test_refused_iteration_changes_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OptionError("other ranks read in another order")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    whole, left = labels(loader(folder)), loader(folder)
    take(left, 3)
    resumed = loader(folder)
    resumed.load_state_dict(left.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(module_of(ss.ShardLoader), "compare_ranks", refuse)
        for _ in range(2):  # compared again: ranks that differ must never read
            with pytest.raises(OptionError, match="other ranks"):
                iter(resumed)
    assert resumed.state_dict() == left.state_dict()
    assert labels(resumed) == whole[3:]


def _batches_of(loader: ss.ShardLoader) -> int:
    return len(list(loader))


def test_loader_that_is_passed_to_a_spawned_process_is_one_clear_error(tmp_path: Path) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(numbered(tmp_path, 10)).decode(), 2)
    process = multiprocessing.get_context("spawn").Process(target=_batches_of, args=(loader,))
    with pytest.raises(OptionError, match="pass its dataset, and make the loader there"):
        process.start()
    assert _batches_of(loader) == 5
