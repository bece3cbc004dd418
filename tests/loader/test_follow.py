"""A dataset is followed while writers publish: each sample once, in the order of publication, on any ranks and workers."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import (
    ChangedError,
    OptionError,
    SkipBudgetError,
    StateError,
    UnfinishedError,
)
from shardstream.format import decode_manifest
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.servers import ShapedS3
from tests.small_datasets import FEW_CORES
from tests.static_server import serve_files

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
QUICK = ss.loader.Follow(poll_s=0.01, timeout_s=60)


def sample(number: int) -> dict[str, object]:
    return {"__key__": f"{number:06d}", "cls": number}


def follow(
    url: str,
    batch_size: int = 4,
    *,
    rank: int = 0,
    ranks: int = 1,
    num_workers: int = 0,
    **options: Any,
) -> ss.ShardLoader:
    placement = ss.Placement(rank, ranks)
    dataset = ss.ShardDataset(url, version=QUICK, placement=placement).decode()
    return ss.ShardLoader(
        dataset, batch_size, num_workers=num_workers, drop_last=ranks > 1, **options
    )


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["cls"].tolist()
    return found


def append(url: str, first: int, last: int, **options: Any) -> None:
    with ss.ShardWriter(url, append=True, **options) as writer:
        for number in range(first, last):
            writer.write(sample(number))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_shards(tmp_path / "data", samples=map(sample, range(10)), per_shard=5)


class Publisher:
    """Changes a dataset at random, and knows the order of all samples that were published, and which may be deleted."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self._random = url, random.Random(seed)
        self.order, self.deleted, self._next = [*range(10)], set[int](), 10
        self._writers = [ss.ShardWriter(url, append=True, publish_s=3600) for _ in range(2)]

    def change(self) -> None:
        """Publish with one of two writers, delete, or compact."""
        kind = self._random.choice(["publish"] * 4 + ["delete", "compact"])
        if kind == "publish":
            writer, count = self._random.choice(self._writers), self._random.randint(1, 12)
            new = [*range(self._next, self._next + count)]
            for number in new:
                writer.write(sample(number))
            writer.publish()
            self.order += new
            self._next += count
        elif kind == "delete":
            left = [number for number in self.order if number not in self.deleted]
            gone = self._random.sample(left, min(4, len(left) - 1))
            self.deleted.update(gone)
            ss.delete(self.url, keys=[f"{number:06d}" for number in gone])
        else:
            ss.compact(self.url)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def run_ranks(read: Callable[[int], None], ranks: int, publisher: Publisher, changes: int) -> None:
    """Read on several ranks, in threads, while a dataset is changed."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            read(rank)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for _ in range(changes):
        publisher.change()
    publisher.close()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize(
    ("seed", "ranks", "batch_size", "num_workers"),
    [(0, 1, 4, 0), (1, 3, 2, 0), (2, 2, 3, 2), (3, 1, 1, 2)],
)
def test_all_samples_come_once_in_order_while_the_dataset_changes(
    url: str, seed: int, ranks: int, batch_size: int, num_workers: int
) -> None:
    publisher = Publisher(url, seed)
    loaders = [
        follow(url, batch_size, rank=rank, ranks=ranks, num_workers=num_workers)
        for rank in range(ranks)
    ]
    got: list[list[tuple[int, list[int]]]] = [[] for _ in range(ranks)]

    def read(rank: int) -> None:
        for batch in loaders[rank]:
            got[rank].append((loaders[rank].state_dict()["consumed"], numbers(batch)))

    run_ranks(read, ranks, publisher, changes=14)
    step = ranks * batch_size
    total = len(publisher.order)
    whole = total if ranks == 1 else total // step * step
    found: list[int] = []
    for rank in range(ranks):
        for consumed, batch in got[rank]:
            first = (consumed - 1) // step * step + rank * batch_size
            wanted = publisher.order[first : first + batch_size]
            assert batch == [number for number in wanted if number in batch]  # the order
            assert {*wanted} - {*batch} <= publisher.deleted
            found += batch
        assert loaders[rank].state_dict()["consumed"] == whole
    assert len(found) == len({*found})
    assert {*publisher.order[:whole]} - {*found} <= publisher.deleted


def test_manifests_with_a_file_of_records_are_followed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=1)
    test_all_samples_come_once_in_order_while_the_dataset_changes(url, 2, 2, 3, 2)


def test_a_state_continues_on_other_ranks_workers_and_batches(url: str) -> None:
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    for number in range(10, 40):
        writer.write(sample(number))
    writer.publish()
    found: list[int] = []
    state: Any = None
    for ranks, batch_size, num_workers, steps in [(2, 3, 0, 2), (1, 5, 2, 1), (3, 2, 0, 1)]:
        states = []
        for rank in range(ranks):
            loader = follow(url, batch_size, rank=rank, ranks=ranks, num_workers=num_workers)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(loader)
            found += [number for _ in range(steps) for number in numbers(next(batches))]
            states.append(loader.state_dict())
            del batches
        assert all(one == states[0] for one in states)
        state = states[0]
        if ranks == 1:
            ss.delete(url, numbers=[0, 1, 30])
            ss.compact(url)
    assert (sorted(found), state["consumed"]) == ([*range(23)], 23)
    loader = follow(url)
    loader.load_state_dict(state)
    writer.close()
    rest = [number for batch in loader for number in numbers(batch)]
    assert rest == [number for number in range(23, 40) if number != 30]


def test_ranks_may_begin_before_and_after_a_compaction(url: str) -> None:
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    early = follow(url, 2, rank=0, ranks=2)
    assert numbers(next(iter(early))) == [0, 1]
    ss.delete(url, numbers=[2])
    ss.compact(url)
    late = follow(url, 2, rank=1, ranks=2)
    writer.close()
    assert [*map(numbers, late)] == [[3], [6, 7]]
    assert [*map(numbers, early)] == [[4, 5]]
    ss.versions.gc(url, keep=1, dry_run=False)
    with pytest.raises(OptionError, match="load the same state on all ranks"):
        next(iter(follow(url, 2, rank=1, ranks=2)))
    assert [*map(numbers, follow(url))] == [[0, 1, 3, 4], [5, 6, 7, 8], [9]]


def test_an_end_without_a_writer_is_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with ss.ShardWriter(url, append=True, publish_s=3600):
        loader = follow(url)
    assert len([*loader]) == 3
    assert not caplog.records
    loader = follow(url)
    assert len([*loader]) == 3
    assert "no writer was open, so the reading ends after 10 samples" in caplog.text


def test_a_new_iteration_continues(url: str) -> None:
    loader = follow(url, 4)
    for batch in loader:
        assert numbers(batch) == [0, 1, 2, 3]
        break
    loader.set_epoch(7)  # as trainers do
    assert [numbers(batch) for batch in loader] == [[4, 5, 6, 7], [8, 9]]
    assert [*loader] == []
    append(url, 10, 13)
    assert [numbers(batch) for batch in loader] == [[10, 11, 12]]
    with pytest.raises(TypeError, match="grows while it is read"):
        len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_are_verified_and_a_step_of_deleted_samples_is_left_out(
    url: str, num_workers: int
) -> None:
    ss.delete(url, numbers=range(9))
    append(url, 10, 13)
    read = ss.ReadOptions(verify="sha256")
    dataset = ss.ShardDataset(url, version=QUICK, read=read, fields=("cls",)).decode()
    loader = ss.ShardLoader(dataset, 4, num_workers=num_workers)
    assert [*map(numbers, loader)] == [[9, 10, 11], [12]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_break_after_the_last_batch_is_no_end(url: str, num_workers: int) -> None:
    loader = follow(url, 5, num_workers=num_workers)
    for batch in loader:
        if numbers(batch)[-1] == 9:
            break
    append(url, 10, 13)
    assert [numbers(batch) for batch in loader] == [[10, 11, 12]]
    assert [*loader] == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_count_over_all_publications(url: str, num_workers: int) -> None:
    dataset = ss.ShardDataset(url, version=QUICK, on_error=ss.SkipBudget(samples=5))
    loader = ss.ShardLoader(dataset.decode().map(refuse_100), 20, num_workers=num_workers)
    writer, found = ss.ShardWriter(url, append=True, publish_s=3600), list[int]()
    batches = iter(loader)
    for first, last in ((10, 17), (17, 34), (34, 51)):  # each fills a batch with 3 bad ones
        for number in [*range(first, last), 100, 100, 100]:
            writer.write({"cls": number})
        writer.publish()
        if first < 34:
            found += numbers(next(batches))
    with pytest.raises(SkipBudgetError, match=r"limit 5 \(\{'ValueError': 6"):
        next(batches)
    assert found == [*range(34)]
    writer.close()


def refuse_100(one: dict[str, Any]) -> dict[str, Any]:
    if one["cls"] == 100:
        raise ValueError("a bad sample")
    return one


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_get_another_sample_where_all_that_was_published_is_deleted(
    url: str, num_workers: int
) -> None:
    ss.delete(url, numbers=range(8))  # all that the first round has
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    loaders = [follow(url, rank=rank, ranks=2, num_workers=num_workers) for rank in range(2)]
    batches = [*map(iter, loaders)]
    assert [numbers(next(one)) for one in batches] == [[9], [9]]
    assert [loader.refilled for loader in loaders] == [1, 1]
    for number in range(10, 16):
        writer.write(sample(number))
    writer.close()
    assert [[*map(numbers, one)] for one in batches] == [[[8, 9, 10, 11]], [[12, 13, 14, 15]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stats_cover_all_publications(url: str, num_workers: int) -> None:
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    loader = follow(url, 5, num_workers=num_workers)
    batches = iter(loader)
    assert len([next(batches) for _ in range(2)]) == 2
    for number in range(10, 18):
        writer.write(sample(number))
    writer.close()
    assert len([*batches]) == 2
    stats = loader.stats()
    assert (stats.batches, stats.timings.samples) == (4, 18)


def test_ranks_get_another_sample_where_nearly_all_is_deleted(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=map(sample, range(20_000)), per_shard=20_000)
    ss.delete(url, numbers=np.delete(np.arange(20_000), 9_999))
    for rank in range(2):  # hundreds of draws find only deleted ones
        assert numbers(next(iter(follow(url, rank=rank, ranks=2)))) == [9_999]


def test_publications_of_one_second_are_seen_on_s3_without_etags(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "bucket/data", samples=map(sample, range(10)))
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    with serve_files(tmp_path, has_etags=False) as served:
        options = {"anon": True, "endpoint_url": served.url}
        dataset = ss.ShardDataset("s3://bucket/data", version=QUICK, storage_options=options)
        batches = iter(ss.ShardLoader(dataset.decode(), 5))
        assert [numbers(next(batches)) for _ in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        for first in (10, 15):
            for number in range(first, first + 5):
                writer.write(sample(number))
            writer.publish()
            assert numbers(next(batches)) == [*range(first, first + 5)]
        writer.close()
        assert [*batches] == []


def test_a_look_without_news_reads_no_manifest_on_s3(shaped_s3: ShapedS3, bucket: str) -> None:
    options = shaped_s3.shaped.storage_options
    url = make_shards(f"{bucket}/follow", samples=map(sample, range(10)), storage_options=options)
    writer = ss.ShardWriter(url, append=True, publish_s=3600, storage_options=options)
    for number in range(10, 18):
        writer.write(sample(number))
    writer.publish()
    dataset = ss.ShardDataset(url, version=QUICK, storage_options=options).decode()
    batches = iter(ss.ShardLoader(dataset, 6))
    assert [number for _ in range(3) for number in numbers(next(batches))] == [*range(18)]

    def seen(kind: str) -> int:
        return int(json.loads(shaped_s3.control("/stats"))["shaped"]["seen"].get(kind, 0))

    def close() -> None:
        begin, gets = seen("HEAD .json"), seen("GET .json")
        while seen("HEAD .json") < begin + 5:
            time.sleep(0.05)
        found.append(seen("GET .json") - gets)
        writer.close()

    found: list[int] = []
    closing = threading.Thread(target=close)
    closing.start()
    assert [*batches] == []
    closing.join()
    assert found[0] <= 1


def test_a_writer_without_samples_leaves_no_file(url: str) -> None:
    before = sorted(map(str, Path(url).rglob("*.*")))
    append(url, 0, 0, publish_s=3600)
    assert sorted(map(str, Path(url).rglob("*.*"))) == before
    assert not ss.versions.log(url)[0].writers


def test_a_reader_may_begin_before_the_dataset_is_there(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.extend(map(numbers, follow(url))))
    thread.start()
    make_shards(url, samples=map(sample, range(10)), per_shard=5)
    thread.join()
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    late = ss.loader.Follow(poll_s=0.01, timeout_s=0.05)
    with pytest.raises(
        FileNotFoundError, match=r"in the 0\.05 s that version=Follow\(\) has waited"
    ):
        ss.ShardDataset(str(tmp_path / "none"), version=late)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_writer_that_does_not_go_on_is_named(url: str, num_workers: int) -> None:
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    (listed,) = ss.versions.log(url)[0].writers
    late = ss.loader.Follow(poll_s=0.01, timeout_s=0.2)
    loader = ss.ShardLoader(ss.ShardDataset(url, version=late).decode(), 4, num_workers=num_workers)
    batches = iter(loader)
    assert [numbers(next(batches)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UnfinishedError, match=f"{listed.token}.*shardstream close"):
        next(batches)
    ss.versions.close_writers(url)
    assert [numbers(batch) for batch in loader] == [[8, 9]]
    writer.abort()


def test_the_end_of_several_ranks_needs_an_agreement(url: str) -> None:
    dataset = ss.ShardDataset(url, version=QUICK, placement=ss.Placement(0, 2))
    with pytest.raises(OptionError, match="init_process_group, or pass drop_last=True"):
        next(iter(ss.ShardLoader(dataset, 4)))


def test_states_of_other_datasets_are_refused(url: str, tmp_path: Path) -> None:
    loader = follow(url)
    next(iter(loader))
    state = loader.state_dict()
    other = make_shards(tmp_path / "other", samples=map(sample, range(20, 30)), per_shard=5)
    with pytest.raises(StateError, match="not the dataset of the state"):
        follow(other).load_state_dict(state)
    plain = ss.ShardLoader(ss.ShardDataset(url).decode(), 4)
    with pytest.raises(StateError, match=r"'follow' is of a dataset with version=Follow\(\)"):
        plain.load_state_dict(state)
    with pytest.raises(StateError, match=r"'follow' is of a dataset with version=Follow\(\)"):
        loader.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="damaged"):
        loader.load_state_dict(state | {"consumed": 8})


def test_another_dataset_in_its_place_is_an_error(url: str) -> None:
    loader = follow(url)
    writer = ss.ShardWriter(url, append=True, publish_s=3600)
    batches = iter(loader)
    next(batches)
    next(batches)
    writer.abort()
    shutil.rmtree(url)
    make_shards(url, samples=map(sample, range(50, 70)), per_shard=5)
    with pytest.raises(ChangedError, match="another dataset has replaced"):
        next(batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle="),
        ({"subset": [1]}, "subset="),
        ({"where": "cls = 1"}, "where="),
        ({"weights": [1.0]}, "weights="),
        ({"order": ss.OrderOptions(microbatch=2)}, "microbatch= has no effect with version=Follow"),
        ({"read": ss.ReadOptions(on_new_version="error")}, "on_new_version= has no effect with"),
    ],
)
def test_options_of_an_order_are_refused(url: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(url, version=ss.loader.Follow(), **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda dataset: next(iter(dataset)),
        lambda dataset: dataset.by_number(),
        lambda dataset: dataset.samples,
        lambda dataset: dataset.records(),
        lambda dataset: ss.mix({"a": dataset}),
        lambda dataset: ss.plan(dataset, batch_size=4),
        lambda dataset: ss.ShardLoader(dataset, 4).plan(),
        lambda dataset: ss.ShardLoader(dataset, 4).skip(1),
        lambda dataset: ss.replay(ss.ShardLoader(dataset, 4), 0),
        lambda dataset: ss.ShardLoader(dataset, 4).batches_left,
        lambda dataset: ss.ShardLoader(dataset, None),
        lambda dataset: ss.ShardLoader(dataset.shuffle(10), 4),
        lambda dataset: ss.ShardLoader(dataset.batched(4), None),
        lambda dataset: dataset.pack_sequences("cls", 8, lengths="cls"),
        lambda dataset: ss.join(dataset, dataset),
    ],
)
def test_what_needs_a_whole_dataset_is_refused(url: str, use: Callable[[Any], Any]) -> None:
    with pytest.raises(OptionError, match=r"version=Follow\(\)"):
        use(ss.ShardDataset(url, version=ss.loader.Follow()))


@pytest.mark.filterwarnings("ignore:the loader was iterated again")
@pytest.mark.parametrize(
    ("num_workers", "said"),
    [
        (0, "a newer iteration of this loader reads on"),
        (1, "has taken over its persistent workers"),
    ],
)
def test_an_older_iteration_ends_with_an_error_where_a_newer_one_reads_on(
    url: str, num_workers: int, said: str
) -> None:
    loader = follow(url, 2, num_workers=num_workers)
    older = iter(loader)
    first = numbers(next(older))
    newer = [number for batch in loader for number in numbers(batch)]
    assert first + newer == [*range(10)]
    with pytest.raises(OptionError, match=said):
        list(older)
