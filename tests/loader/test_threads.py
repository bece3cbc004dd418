"""Test map-style datasets with concurrent threads, as in thread-based loaders, viewers and free-threaded Python."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.storage import Storage, publish_bytes
from tests.pairs import with_slow_rest
from tests.small_datasets import numbered

NSAMPLES, THREADS, READS = 60, 8, 6
pytestmark = pytest.mark.usefixtures("s3_env")


@pytest.fixture
def _switching() -> Iterator[None]:
    """Let Python switch threads every microsecond, so between any two bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def shards(bucket: str, _: Path) -> Any:
    return ss.ShardDataset(numbered(f"{bucket}/set", NSAMPLES, 7)).by_number().decode()


def cached(bucket: str, folder: Path) -> Any:
    url = numbered(f"{bucket}/set", NSAMPLES, 7)
    return (
        ss.ShardDataset(url, read=ss.ReadOptions(cache_dir=folder / "cache")).by_number().decode()
    )


def verified(bucket: str, _: Path) -> Any:
    return (
        ss.ShardDataset(
            numbered(f"{bucket}/set", NSAMPLES, 7), read=ss.ReadOptions(verify="sha256")
        )
        .by_number()
        .decode()
    )


def verified_on_disk(_: str, folder: Path) -> Any:
    url = numbered(folder / "set", NSAMPLES, 7)
    return ss.ShardDataset(url, read=ss.ReadOptions(verify="sha256")).by_number().decode()


def on_disk(_: str, folder: Path) -> Any:
    return ss.ShardDataset(numbered(folder / "set", NSAMPLES, 7)).by_number().decode()


def objects(bucket: str, _: Path) -> Any:
    for number in range(NSAMPLES):
        publish_bytes(Storage(), f"{bucket}/loose/{number:03d}.cls", b"%d" % number)
    return ss.ObjectDataset.from_prefix(f"{bucket}/loose").by_number().decode()


def objects_on_disk(_: str, folder: Path) -> Any:
    (folder / "loose").mkdir()
    for number in range(NSAMPLES):
        (folder / "loose" / f"{number:03d}.cls").write_bytes(b"%d" % number)
    return ss.ObjectDataset.from_prefix(str(folder / "loose")).by_number().decode()


def read(dataset: Any, thread: int) -> list[tuple[list[int], list[int]]]:
    """Read batches of neighbours, distant samples and single ones; return the requested and the received numbers."""
    found = []
    for turn in range(READS):
        first = (thread * 13 + turn * 7) % NSAMPLES
        asked = [(first + step * 11) % NSAMPLES for step in range(turn % 4 + 1)]
        found.append((asked, [int(sample["cls"]) for sample in dataset.__getitems__(asked)]))
    return found


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize(
    "make",
    with_slow_rest(
        [verified, verified_on_disk, on_disk, objects_on_disk],
        [shards, cached, verified, verified_on_disk, on_disk, objects, objects_on_disk],
    ),
)
def test_each_thread_gets_its_requested_samples(
    make: Callable[[str, Path], Any], bucket: str, tmp_path: Path
) -> None:
    dataset = make(bucket, tmp_path)
    with ThreadPoolExecutor(THREADS) as pool:
        ready = threading.Barrier(THREADS)  # the first reads open shared objects

        def begin(thread: int) -> list[tuple[list[int], list[int]]]:
            ready.wait()
            return read(dataset, thread)

        for found in pool.map(begin, range(THREADS)):
            assert [asked for asked, _ in found] == [came for _, came in found]


@pytest.mark.usefixtures("_switching")
def test_steps_with_threads_of_their_own_are_shared(tmp_path: Path) -> None:
    dataset = on_disk("", tmp_path).map(lambda sample: sample, threads=2)
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda thread: read(dataset, thread), range(THREADS)):
            assert [asked for asked, _ in found] == [came for _, came in found]


def test_open_dataset_can_be_pickled_to_another_process(tmp_path: Path) -> None:
    import pickle  # noqa: PLC0415

    dataset = on_disk("", tmp_path).map(abs_label, threads=2)
    assert dataset.__getitems__([3, 4]) == [3, 4]
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301  (our own bytes)
    assert again.__getitems__([3, 4]) == [3, 4]


def abs_label(sample: dict[str, Any]) -> int:
    return abs(int(sample["cls"]))


def test_step_reuses_its_threads(tmp_path: Path) -> None:
    dataset = on_disk("", tmp_path)
    seen: set[threading.Thread] = set()
    both = threading.Barrier(2)

    def look(sample: dict[str, Any]) -> int:
        both.wait(60)  # one per thread
        seen.add(threading.current_thread())
        return int(sample["cls"])

    mapped = dataset.map(look, threads=2)
    for _ in range(5):
        assert mapped.__getitems__([1, 2]) == [1, 2]
    assert len(seen) == 2
    mapped.set_epoch(1)
    assert mapped.__getitems__([1, 2]) == [1, 2]


def test_single_item_starts_no_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    def look(sample: dict[str, Any]) -> int:
        threads.append(threading.current_thread())
        return int(sample["cls"])

    mapped = on_disk("", tmp_path).map(look, threads=4)
    assert [mapped[number] for number in (5, 6)] == [5, 6]
    assert set(threads) == {threading.current_thread()}


def test_rest_of_a_batch_is_not_processed_after_an_error(tmp_path: Path) -> None:
    url = numbered(tmp_path / "set", NSAMPLES, 7)
    seen: list[int] = []

    def use(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(sample["cls"])
        if sample["cls"] == 0:
            raise ValueError("wrong")
        time.sleep(0.1)  # 3 s for all of them
        return sample

    dataset = ss.ShardDataset(url, shuffle=False).decode(threads=2).map(use, threads=2)
    with pytest.raises(ValueError, match="wrong"):
        next(iter(ss.ShardLoader(dataset, batch_size=NSAMPLES)))
    assert len(seen) < NSAMPLES
