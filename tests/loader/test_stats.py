"""Test the timings that a loader reports."""

from __future__ import annotations

import random
import re
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given
from hypothesis.strategies import floats, integers, lists, tuples

import shardstream as ss
from shardstream.loader import warn_of_lanes
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES, loader, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_stats_cover_the_whole_epoch(tmp_path: Path, workers: int) -> None:
    url = numbered(tmp_path, 60, 20)
    dataset = ss.ShardDataset(url).map(slow)
    one = ss.ShardLoader(dataset, batch_size=7, num_workers=workers)
    assert one.stats().batches == 0
    for _ in one:
        time.sleep(0.001)
    stats = one.stats()
    catalog = one._batches.source_dataset.pipeline.indexed_source.samples  # type: ignore[union-attr]
    assert (stats.epoch, stats.batches, stats.workers) == (0, 9, workers)
    assert (stats.timings.samples, stats.timings.read_bytes) == (60, catalog.total_bytes - 3 * 1024)
    assert stats.timings.steps_s >= 60 * 0.002
    assert 0 < stats.loop_wait_s < stats.seconds
    assert stats == one.stats()  # the clock stops at the end of the epoch


def test_remote_requests_are_counted() -> None:
    url = numbered(f"memory://stats-{random.getrandbits(64):x}", 100, 25)
    one = loader(url, batch_size=10)  # no short last batch, which needs a separate read
    list(one)
    timings = one.stats().timings
    assert timings.requests == 4  # one per shard
    assert 0 < timings.wait_s <= timings.read_s


def test_stats_start_at_zero_in_each_epoch(tmp_path: Path) -> None:
    one = loader(numbered(tmp_path, 30, 10))
    list(one)
    list(one)
    stats = one.stats()
    assert (stats.epoch, stats.timings.samples) == (1, 30)


def test_stats_are_available_as_text_and_as_dict(tmp_path: Path) -> None:
    one = loader(numbered(tmp_path, 30, 10), batch_size=10)
    list(one)
    text = str(one.stats())
    assert text.startswith("epoch 0: 3 batches, 30 samples in ")
    assert "the loop waited " in text
    assert "the main process was busy for " in text
    assert all(isinstance(value, int | float) for value in one.stats().as_dict().values())


def test_stats_cover_steps_that_change_counts(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 60, 20)).select(keep_all).shuffle(1)
    one = ss.ShardLoader(dataset, batch_size=7)
    list(one)
    assert one.stats().timings.samples == 60
    assert one.stats().timings.read_s > 0


class SlowStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that takes 50 ms for each request."""

    protocol = "slow"
    cachable = False

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        time.sleep(0.05)
        return bytes(super().cat_file(path, start, end, **options))


def very_slow(value: Any) -> Any:
    time.sleep(0.02)
    return value


def collate_slowly(samples: list[Any]) -> list[Any]:
    time.sleep(0.2)
    return samples


@pytest.mark.parametrize(
    ("bottleneck", "workers", "advice"),
    [
        ("decoding", 0, "num_workers="),
        ("decoding", 1, "max_side="),
        ("transforms", 1, "map()"),
        ("collate", 0, "collate_fn"),
        ("store", 0, "cache_dir="),
        ("training step", 1, None),
    ],
)
def test_verdict_names_the_bottleneck(
    tmp_path: Path, bottleneck: str, workers: int, advice: str | None
) -> None:
    folder, filesystem = numbered(tmp_path, 60, 2), None
    if bottleneck == "store":
        filesystem = SlowStore()
        filesystem.put(f"{folder}/", "/slow-store/", recursive=True)
        folder = "/slow-store"
    dataset = ss.ShardDataset(
        folder,
        read=ss.ReadOptions(filesystem=filesystem, prefetch_bytes=1),
        order=ss.OrderOptions(window=5, block=1),
    )
    if bottleneck == "decoding":
        dataset = dataset.decode(fields={"npy": very_slow})
    elif bottleneck == "transforms":
        dataset = dataset.map(very_slow)
    one = ss.ShardLoader(
        dataset,
        batch_size=5,
        num_workers=workers,
        collate_fn=collate_slowly if bottleneck == "collate" else list,
    )
    for _ in one:
        time.sleep(0.2 if bottleneck == "training step" else 0)
    verdict = one.stats().verdict
    assert verdict is not None
    assert verdict.bottleneck == bottleneck, str(one.stats())
    assert (verdict.speedup > 1.1) == (bottleneck != "training step")
    assert str(verdict) in str(one.stats())
    if advice is not None:
        assert advice in str(verdict)


def test_verdict_on_a_mix_counts_its_decoders(tmp_path: Path) -> None:
    part = ss.ShardDataset(numbered(tmp_path, 60, 20)).decode(fields={"npy": very_slow})
    one = ss.ShardLoader(ss.mix({"a": part, "b": part}), batch_size=5, collate_fn=list)
    take(one, 6)
    timings = one.stats().timings
    assert timings.decode_s >= 0.9 * timings.steps_s > 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", ["shuffle", "batched"])
def test_steps_that_change_counts_are_one_phase_with_reading(
    tmp_path: Path, change: str, workers: int
) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 60, 20)).map(very_slow)
    dataset = dataset.shuffle(10) if change == "shuffle" else dataset.batched(2).unbatched()
    one = ss.ShardLoader(dataset, batch_size=5, num_workers=workers, collate_fn=list)
    list(one)
    stats = one.stats()
    verdict = stats.verdict
    assert verdict is not None
    assert verdict.bottleneck == "reading and steps"
    assert verdict.speedup > 5
    assert "fields=" not in str(verdict)
    assert "steps cheaper" in str(verdict)
    for shown in (str(stats).split("busy", 1)[1], stats._repr_html_()):
        assert re.search(r"reading and steps (100|9\d) %", shown)
        assert "decode 0 %" not in shown
    assert stats.as_dict()["mixed_s"] == stats.timings.read_s


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_verdict_leaves_out_the_first_batches(tmp_path: Path, workers: int) -> None:
    one = loader(numbered(tmp_path, 60, 20), batch_size=5, num_workers=workers)
    list(one)
    stats = one.stats()
    first, readers = stats.warm_up, max(1, workers)
    assert readers <= first.batches < stats.batches
    assert first.timings.samples == 5 * readers
    # The same batches, if the first ones had taken 100 s of 103 s, and each other one a tenth of a training step.
    steps = stats.batches - first.batches
    timings = type(first.timings)(samples=first.timings.samples, steps_s=100.0 * readers)
    stats = replace(
        stats,
        seconds=100.0 + steps,
        loop_wait_s=100.0,
        warm_up=replace(first, seconds=100.0, loop_wait_s=100.0, timings=timings),
        timings=replace(timings, samples=60, steps_s=timings.steps_s + 0.1 * steps),
    )
    verdict = stats.verdict
    assert verdict is not None
    assert verdict.bottleneck == "training step"
    feeds = re.search(r"come ([\d.]+) times as fast", verdict.sentence)
    assert feeds is not None
    assert float(feeds[1]) > 3


@pytest.fixture(scope="module")
def some_stats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = loader(numbered(tmp_path_factory.mktemp("stats"), 30, 10), batch_size=10)
    list(one)
    return one.stats()


@pytest.mark.parametrize("mixes", [False, True])
@given(
    seconds=floats(0, 100),
    shares=tuples(floats(0, 1), floats(0, 1)),
    phases=lists(floats(0, 200), min_size=5, max_size=5),
    workers=integers(0, 8),
)
@example(seconds=100.0, shares=(1.0, 0.0), phases=[0.0, 100.0, 0.0, 0.0, 0.01], workers=1)
@example(seconds=100.0, shares=(0.0, 0.0), phases=[0.0, 0.01, 0.0, 0.0, 0.0], workers=1)
def test_verdicts_promise_only_what_helps(
    some_stats: Any,
    seconds: float,
    shares: tuple[float, float],
    phases: list[float],
    workers: int,
    mixes: bool,
) -> None:
    wait, first = shares
    store, read, decode, steps, collate = phases
    timings = replace(
        some_stats.timings,
        samples=int(sum(phases)),
        wait_s=0.0 if mixes else store,
        read_s=store + read,
        decode_s=0.0 if mixes else decode,
        steps_s=0.0 if mixes else decode + steps,
        collate_s=collate,
        mixed_s=store + read if mixes else 0.0,
    )
    warm_up = replace(
        some_stats.warm_up,
        batches=max(1, workers),
        seconds=first * seconds,
        loop_wait_s=first * wait * seconds,
        timings=replace(
            timings, **{name: first * value for name, value in asdict(timings).items()}
        ),
    )
    times = {"seconds": seconds, "loop_wait_s": wait * seconds}
    counts = {"batches": 100, "workers": workers, "cores": 4}
    stats = replace(some_stats, timings=timings, warm_up=warm_up, **times, **counts)
    verdict = stats.verdict
    if verdict is None:
        return
    assert (
        verdict.speedup == 1.0 if verdict.bottleneck == "training step" else verdict.speedup >= 1.05
    )
    for factor in re.findall(r"([\d.]+) times as fast", str(verdict)):
        assert 1.0 <= float(factor) <= 100
    if verdict.speedup > 100:
        assert "over 100 times as fast" in verdict.sentence
    if rates := re.search(r"up to ([\d.,e-]+) samples/s instead of ([\d.,e-]+)", str(verdict)):
        then, now = (float(rate.replace(",", "")) for rate in rates.groups())
        assert then > now > 0
    if number := re.search(r"num_workers=(\d+)", str(verdict)):
        assert (int(number[1]) < workers) == (verdict.bottleneck == "training step")


def test_few_batches_have_no_verdict(tmp_path: Path) -> None:
    one = loader(numbered(tmp_path, 30, 10), batch_size=10)
    list(one)
    assert one.stats().verdict is None


def keep_all(sample: dict[str, Any]) -> bool:
    return "__key__" in sample


def test_large_window_memory_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    url = numbered(f"memory://lanes-{random.getrandbits(64):x}", 100, 25)
    set_limits(monkeypatch, warn_of_lanes, WARN_WINDOWS_BYTES=60_000)
    with pytest.warns(
        UserWarning, match=r"with lanes=20 each of 1 workers holds .* set a window below"
    ):
        loader(url, shuffle=True, lanes=20, window=8, batch_size=2, microbatch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader(url, shuffle=True, lanes=1, window=8, batch_size=2, microbatch=2)
