from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardstream as ss
from shardstream.errors import OptionError, StorageError
from tests.small_datasets import FEW_CORES, flat, grouped, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 50, 8)


def found(dataset: ss.ShardDataset) -> list[int]:
    return [int(sample["cls"]) for sample in dataset]


def plain(dataset: ss.ShardDataset, batch_size: int, **options: Any) -> list[list[int]]:
    """Return the batches of torch's DataLoader."""
    loader: DataLoader[Any] = DataLoader(
        dataset.decode().to_tuple("cls"), batch_size=batch_size, **options
    )
    return [batch[0].tolist() for batch in loader]


# -- sources -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: folder,
        lambda folder: f"{folder}/",
        lambda folder: f"{folder}/index.json",
        lambda folder: f"{folder}/" + "{000000..000006}.tar",
        lambda folder: f"{folder}/*.tar",
        lambda folder: [f"{folder}/00000{i}.tar" for i in range(7)],
        lambda folder: "::".join(f"{folder}/00000{i}.tar" for i in range(7)),
        lambda folder: f"file://{folder}",
    ],
)
def test_dataset_accepts_all_forms_of_urls(form: Any, folder: str) -> None:
    dataset = ss.ShardDataset(form(folder))
    assert len(dataset) == 50
    assert found(dataset) == list(range(50))


def test_subset_of_the_shards_is_a_dataset(folder: str) -> None:
    assert found(ss.ShardDataset(f"{folder}/00000[12].tar")) == list(range(8, 24))


def test_shards_under_a_prefix_of_names_are_read(folder: str) -> None:
    for prefix in (folder, f"{folder}/", f"{folder}/0000*"):
        assert found(ss.ShardDataset(prefix)) == list(range(50))
    with pytest.raises(StorageError, match="no shard matches this pattern"):
        ss.ShardDataset(f"{folder}/none*")


def test_samples_are_bytes_until_they_are_decoded(folder: str) -> None:
    sample = next(iter(ss.ShardDataset(folder)))
    assert type(sample) is dict
    assert sample["__key__"] == "000000"
    assert sample["__url__"] == f"{folder}/000000.tar"
    assert sample["cls"] == b"0"
    assert type(sample["npy"]) is bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": 0}, "lanes must be at least 1, not 0"),
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"block": -3}, "block must be at least 1, not -3"),
        ({"microbatch": 0}, "microbatch must be at least 1, not 0"),
        ({"microbatch": 4, "window": 6}, "window=6 must be a multiple of the microbatch, 4; use 8"),
        ({"remainder": "wrap"}, "remainder is 'pad', 'drop' or 'keep'"),
        ({"on_error": "ignore"}, "on_error is 'raise', 'warn', 'skip'"),
        ({"on_error": "ignore", "index": "ignore"}, "on_error is 'raise', 'warn', 'skip'"),
        ({"index": "always"}, "index must be 'auto', 'require' or 'ignore', not 'always'"),
    ],
)
def test_invalid_options_are_refused_at_construction(
    options: dict[str, Any], message: str, folder: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, **grouped(**options))


def test_missing_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ss.errors.StorageError, match=str(tmp_path)):
        ss.ShardDataset(str(tmp_path / "none"))


# -- order and epochs ----------------------------------------------------------------------------------------------------------


def test_set_epoch_selects_the_order(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True)
    first = found(dataset)
    assert sorted(first) == list(range(50))
    dataset.set_epoch(1)
    assert dataset.epoch == 1
    assert found(dataset) != first
    dataset.set_epoch(0)
    assert found(dataset) == first


def test_plain_iteration_partitions_over_ranks(folder: str) -> None:
    for shuffle in (True, False):
        ranks = [
            ss.ShardDataset(
                folder,
                shuffle=shuffle,
                order=ss.OrderOptions(microbatch=4),
                placement=ss.Placement(rank, 3),
            )
            for rank in range(3)
        ]
        seen = [found(dataset) for dataset in ranks]
        assert [len(part) for part in seen] == [len(dataset) for dataset in ranks] == [17, 17, 17]
        assert set(flat(seen)) == set(range(50))


def test_rank_and_world_size_come_from_the_environment(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ss.ShardDataset(folder, order=ss.OrderOptions(microbatch=4))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert dataset.placement == ss.Placement(2, 3)
    assert len(found(dataset)) == 17
    explicit = ss.ShardDataset(
        folder, order=ss.OrderOptions(microbatch=4), placement=ss.Placement()
    )
    assert len(found(explicit)) == 50


# -- torch's DataLoader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_plain_data_loader_reads_each_sample_once(
    num_workers: int,
    shuffle: bool,
    folder: str,
) -> None:
    dataset = ss.ShardDataset(folder, shuffle=shuffle, order=ss.OrderOptions(microbatch=8))
    batches = plain(dataset, 8, num_workers=num_workers)
    assert sorted(flat(batches)) == list(range(50))
    assert sorted(map(len, batches)) == [2, 8, 8, 8, 8, 8, 8]


def test_plain_data_loader_gives_the_same_batches_as_shard_loader(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=8, lanes=2))
    ours = [batch["cls"].tolist() for batch in ss.ShardLoader(dataset.decode(), 8)]
    for num_workers in (0, 2):
        assert plain(dataset, 8, num_workers=num_workers) == ours


def test_plain_data_loader_knows_its_length(folder: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        ss.ShardDataset(folder, order=ss.OrderOptions(microbatch=8)), batch_size=8
    )
    assert len(loader) == len(list(loader)) == 7


def test_persistent_workers_of_a_plain_loader_follow_the_epoch(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=8, lanes=2))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=8, num_workers=2, persistent_workers=True, collate_fn=len_and_keys
    )
    first = list(loader)
    dataset.set_epoch(1)
    second = list(loader)
    dataset.set_epoch(0)
    assert first != second
    assert list(loader) == first


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
def test_persistent_workers_follow_the_epoch_of_a_copied_dataset(folder: str, travel: Any) -> None:
    dataset = travel(
        ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=8)).decode()
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=8, num_workers=1, persistent_workers=True, collate_fn=len_and_keys
    )
    first = list(loader)
    dataset.set_epoch(1)
    assert list(loader) != first


def test_datasets_chained_from_a_dataset_follow_its_epoch(folder: str) -> None:
    parent = ss.ShardDataset(folder, shuffle=True)
    chained = parent.decode().with_length(50)  # nothing else holds the one between
    loader = ss.ShardLoader(chained, batch_size=8)
    parent.set_epoch(3)
    assert (chained.epoch, loader.epoch) == (3, 3)
    chained.set_epoch(5)
    assert (parent.epoch, chained.epoch) == (3, 5)
    parent.set_epoch(3)
    assert chained.epoch == 3


@pytest.mark.slow
def test_spawned_persistent_workers_follow_the_epoch(folder: str) -> None:
    others = [ss.ShardDataset(folder) for _ in range(3)]
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=8))
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=8,
        num_workers=1,
        persistent_workers=True,
        collate_fn=len_and_keys,
        multiprocessing_context="spawn",
    )
    first = list(loader)
    dataset.set_epoch(0)
    others[-1].set_epoch(1)
    assert list(loader) == first
    dataset.set_epoch(1)
    assert list(loader) != first


def test_datasets_and_loaders_hold_no_descriptors(folder: str) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, held = count(), list[Any]()
    for _ in range(40):
        dataset = ss.ShardDataset(folder).decode().map(len)
        held += [
            ss.ShardLoader(dataset, batch_size=2),
            ss.ShardDataset(folder).by_number().to_tuple("cls"),
        ]
    assert count() - before < 10


def test_datasets_of_a_forked_process_have_epochs_of_their_own(folder: str) -> None:
    first = ss.ShardDataset(folder)
    child_made, parent_made = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        own = ss.ShardDataset(folder)
        os.write(child_made[1], b".")
        os.read(parent_made[0], 1)
        os._exit(own.epoch or first.epoch != 3)
    os.read(child_made[0], 1)
    ss.ShardDataset(folder).set_epoch(7)
    first.set_epoch(3)
    os.write(parent_made[1], b".")
    assert os.waitpid(pid, 0)[1] == 0
    for handle in (*child_made, *parent_made):
        os.close(handle)


def len_and_keys(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.slow
def test_plain_loader_spawns_workers_that_know_their_rank(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=5))
    expected = plain(dataset, 5)
    found = plain(dataset, 5, num_workers=1, multiprocessing_context="spawn")
    assert found == expected
    assert len(flat(found)) == 25


# -- steps ---------------------------------------------------------------------------------------------------------------------


def test_step_returns_a_new_dataset(folder: str) -> None:
    dataset = ss.ShardDataset(folder)
    decoded = dataset.decode()
    tuples = decoded.to_tuple("cls __key__")
    assert next(iter(dataset))["cls"] == b"0"
    assert next(iter(decoded))["cls"] == 0
    assert next(iter(tuples)) == (0, "000000")
    assert type(tuples) is ss.ShardDataset
    decoded.set_epoch(3)
    assert dataset.epoch == 0


def odd(sample: Any) -> bool:
    return bool(sample["cls"] % 2)


def tens(samples: Iterator[Any]) -> Iterator[int]:
    for sample in samples:
        if sample["cls"] % 10 == 0:
            yield sample["cls"]


STEPS: list[tuple[Any, list[Any]]] = [
    (lambda ds: ds.map(lambda s: s["cls"] * 2), [i * 2 for i in range(50)]),
    (lambda ds: ds.map_dict(cls=str).map(lambda s: s["cls"]), [str(i) for i in range(50)]),
    (
        lambda ds: ds.to_tuple("cls", "cls").map_tuple(None, float),
        [(i, float(i)) for i in range(50)],
    ),
    (lambda ds: ds.rename(label="cls").map(lambda s: s["label"]), list(range(50))),
    (lambda ds: ds.rename(keep=False, x="cls").map(sorted), [["__key__", "__url__", "x"]] * 50),
    (lambda ds: ds.select(odd).map(lambda s: s["cls"]), list(range(1, 50, 2))),
    (lambda ds: ds.slice(3).map(lambda s: s["cls"]), [0, 1, 2]),
    (lambda ds: ds.slice(10, 20, 5).map(lambda s: s["cls"]), [10, 15]),
    (lambda ds: ds.repeat(2).slice(49, 52).map(lambda s: s["cls"]), [49, 0, 1]),
    (lambda ds: ds.with_epoch(52).slice(49, None).map(lambda s: s["cls"]), [49, 0, 1]),
    (lambda ds: ds.compose(tens), [0, 10, 20, 30, 40]),
    (lambda ds: ds.compose(tens, lambda tens: [sum(tens)]), [100]),
    (lambda ds: ds.batched(20).map(lambda b: b["cls"].shape[0]), [20, 20, 10]),
    (lambda ds: ds.batched(20, drop_last=True).map(lambda b: len(b["__key__"])), [20, 20]),
    (lambda ds: ds.batched(20, collate_fn=len), [20, 20, 10]),
    (lambda ds: ds.batched(7).unbatched().map(lambda s: int(s["cls"])), list(range(50))),
    (lambda ds: ds.map_batches(lambda b: [int(b["cls"].sum())], 25), [300, 925]),
    (lambda ds: ds.group_batched(odd, 25).map(lambda b: int(b["cls"].sum())), [600, 625]),
    (lambda ds: ds.group_batched("cls", 1, collate_fn=len), [1] * 50),
]


@pytest.mark.parametrize(("build", "expected"), STEPS)
def test_steps_match_webdataset(build: Any, expected: list[Any], folder: str) -> None:
    assert list(build(ss.ShardDataset(folder).decode())) == expected


def test_shuffle_reorders_its_items(folder: str) -> None:
    shuffled = found(ss.ShardDataset(folder).shuffle(50))
    assert shuffled != list(range(50))
    assert sorted(shuffled) == list(range(50))


@pytest.mark.parametrize("bounds", [(-1,), (0, 5, 0), (0, 5, -1), (0, -5)])
def test_negative_slice_bounds_are_refused(bounds: tuple[int, ...], folder: str) -> None:
    with pytest.raises(OptionError, match="start and stop of a stream must be at least 0"):
        ss.ShardDataset(folder).slice(*bounds)


def test_unknown_length_requires_with_length(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode()
    assert len(dataset.map(len)) == 50
    with pytest.raises(TypeError, match=r"set it with \.with_length\(n\)"):
        len(dataset.shuffle(9))
    assert len(dataset.shuffle(9).with_length(25)) == 25
    with pytest.raises(TypeError):
        len(dataset.with_length(25).shuffle(9))
    assert len(dataset.select(odd)) == 50  # an upper bound


# -- copies and pickles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy])
def test_dataset_can_be_copied(travel: Any, folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True, seed=3).decode("rgb8").select(odd)
    assert found(travel(dataset)) == found(dataset)


def test_dataset_can_be_pickled(folder: str) -> None:
    url = numbered(f"memory://dataset-{random.getrandbits(64):x}", 20, 6)
    for source in (folder, url):
        dataset = ss.ShardDataset(source, shuffle=True, seed=3).decode("rgb8").select(odd)
        assert found(pickle.loads(pickle.dumps(dataset))) == found(dataset)  # noqa: S301


def test_two_iterators_are_independent(folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    pairs = [(one["cls"], other["cls"]) for one, other in zip(dataset, dataset, strict=True)]
    for epoch, numbers in enumerate(zip(*pairs, strict=True)):
        dataset.set_epoch(epoch)
        assert list(numbers) == found(dataset)
        assert type(numbers[0]) is int


def test_indexing_names_the_samples_by_number(folder: str) -> None:
    dataset = ss.ShardDataset(folder)
    for one in (dataset, ss.mix([dataset, dataset], weights=[1, 1])):
        with pytest.raises(OptionError, match=r"for number 0 use dataset.by_number\(\)\[0\]"):
            one[0]


class Numbered(ss.ShardDataset):
    """A dataset as users write it, with a loop of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (sample["cls"] for sample in super().__iter__())


@pytest.mark.parametrize(
    "use",
    [
        lambda one: ss.ShardLoader(one, 4),
        lambda one: ss.mix([one, one]),
        lambda one: ss.join(one, one),
        lambda one: one.by_number(),
        lambda one: one.records(),
    ],
    ids=["loader", "mix", "join", "by_number", "records"],
)
def test_an_iter_that_would_not_be_called_is_refused(use: Any, folder: str) -> None:
    dataset = Numbered(folder)
    with pytest.raises(OptionError, match=r"Numbered.__iter__ would not be called here, .*map"):
        use(dataset)
    assert next(iter(DataLoader(dataset, batch_size=2))) == [b"0", b"1"]


# -- datasets read in workers of others --------------------------------------------------------------------------------------------


def read(served: Any) -> list[list[Any]]:
    return list(DataLoader(served, batch_size=1, num_workers=2, collate_fn=list))


def read_whole(dataset: ss.ShardDataset, through: str) -> int:
    if through == "dataset":
        return sum(1 for _ in dataset)
    return sum(len(batch) for batch in ss.ShardLoader(dataset, batch_size=8, collate_fn=list))


class ReadsInItems(Dataset[int]):
    def __init__(self, dataset: ss.ShardDataset, through: str) -> None:
        self.dataset, self.through = dataset, through

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> int:
        return read_whole(self.dataset, self.through)


class Wraps(IterableDataset[Any]):
    def __init__(self, dataset: ss.ShardDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


@pytest.mark.parametrize("through", ["dataset", "loader"])
def test_dataset_that_is_read_in_workers_of_another_is_not_split(folder: str, through: str) -> None:
    side = ss.ShardDataset(folder)
    outer = ss.ShardDataset(folder, subset=slice(4)).map(lambda _: read_whole(side, through))
    for served in (ReadsInItems(side, through), outer):
        assert set(flat(read(served))) == {50}
    loader = ss.ShardLoader(outer, batch_size=1, num_workers=2, collate_fn=list)
    assert set(flat(loader)) == {50}


def test_dataset_inside_an_iterable_dataset_is_split(folder: str) -> None:
    assert (
        len(flat(read(Wraps(ss.ShardDataset(folder, order=ss.OrderOptions(remainder="keep"))))))
        == 50
    )
