"""Large raw samples that workers read are equal to those that are read without workers, from local shards and from S3."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import OptionError, ShardError
from shardstream.samples import FetchOptions
from shardstream.storage import Storage, locate_shards
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.servers import S3Server, ShapedS3, new_bucket, nginx_or_skip
from tests.small_datasets import FEW_CORES, UNCHECKED, grouped

pytestmark = pytest.mark.filterwarnings(FEW_CORES, UNCHECKED)

SAMPLES, MANY = 90, 400
READERS = pytest.mark.parametrize(
    ("client", "context"),
    [("http", "fork"), pytest.param("http", "spawn", marks=pytest.mark.slow), ("s3fs", "fork")],
)


def samples(count: int = SAMPLES, most: int = 300_000) -> list[dict[str, Any]]:
    """Return samples of 10 to 300 kB, with fields around the size from which they are sent apart."""
    rng = np.random.default_rng(0)
    return [
        {
            "__key__": f"{number:04d}",
            "jpg": rng.bytes(int(rng.integers(10_000, most))),
            "bin": rng.bytes([0, 1, 4095, 4096, 4097][number % 5]),
            "cls": b"%d" % number,
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def proxy(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as started:
        yield started


@pytest.fixture(scope="module")
def remote(proxy: ShapedS3) -> Iterator[str]:
    with new_bucket(proxy.plain) as bucket:
        options = proxy.plain.storage_options
        make_shards(f"{bucket}/raw", samples=samples(), per_shard=25, storage_options=options)
        yield f"{bucket}/raw"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("raw"))
    make_shards(folder, samples=samples(MANY, 40_000), per_shard=100)
    return folder


def epochs(
    url: str | list[str],
    num_workers: int,
    *,
    count: int = 2,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> list[list[dict[str, Any]]]:
    """Read epochs with one loader; return the batches of each."""
    chosen: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True} | (
        loading or {}
    )
    dataset = ss.ShardDataset(url, **grouped(**options))
    loader = ss.ShardLoader(dataset, 8, num_workers=num_workers, **(chosen if num_workers else {}))
    found = [list(loader) for _ in range(count)]
    for batch in (batch for batches in found for batch in batches):
        for name in batch.keys() - {"__key__", "__url__"}:
            assert {type(value) for value in batch[name]} <= {bytes}
    return found


def as_rows(epochs_found: list[list[dict[str, Any]]]) -> list[list[tuple[Any, ...]]]:
    """Return the samples of each epoch without their batches, in order of their keys."""
    return [
        sorted(row for batch in batches for row in zip(*batch.values(), strict=True))
        for batches in epochs_found
    ]


ORDERS = [
    {},
    {"shuffle": True},
    {"shuffle": True, "window": 32, "block": 2, "prefetch_bytes": 1},
    {"verify": "sha256", "shuffle": True},
    {"subset": range(0, SAMPLES, 3)},
    {"fields": ["jpg", "cls"], "shuffle": True},
]


@pytest.mark.parametrize(
    ("is_local", "options"),
    with_slow_rest(
        [(False, one) for one in ORDERS[1::2]] + [(True, ORDERS[2]), (True, ORDERS[-1])],
        [False, True],
        ORDERS,
    ),
    ids=str,
)
def test_batches_equal_those_of_one_process(
    is_local: bool,
    options: dict[str, Any],
    local: str,
    remote: str,
    proxy: ShapedS3,
) -> None:
    url = local if is_local else remote
    if not is_local:
        options = options | {"storage_options": proxy.plain.storage_options}
    alone, shared = epochs(url, 0, **options), epochs(url, 1, **options)
    assert [[list(batch) for batch in batches] for batches in shared] == [
        [list(batch) for batch in batches] for batches in alone
    ]
    assert shared == alone
    together = epochs(url, 2, **options)
    assert as_rows(together) == as_rows(alone)


@READERS
def test_every_client_reads_the_samples_that_were_written(
    client: str, context: str, remote: str, proxy: ShapedS3
) -> None:
    options: dict[str, Any] = {
        "storage_options": proxy.plain.storage_options | {"s3_client": client}
    }
    found = epochs(remote, 2, shuffle=True, loading={"multiprocessing_context": context}, **options)
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for rows in as_rows(found):
        assert [(key, jpg, data, number) for key, _, jpg, data, number in rows] == expected


def test_cached_shards_are_read_by_a_worker(remote: str, proxy: ShapedS3, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "storage_options": proxy.plain.storage_options,
        "cache_dir": tmp_path / "cache",
    }
    found = epochs(remote, 1, shuffle=True, **options)
    assert as_rows(found)[0] == as_rows(found)[1] == as_rows(epochs(remote, 0, **options))[0]


def test_local_and_remote_shards_together(local: str, remote: str, proxy: ShapedS3) -> None:
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options}
    [alone], [shared] = (as_rows(epochs([local, remote], n, count=1, **options)) for n in (0, 2))
    assert shared == alone
    assert len(shared) == SAMPLES + MANY


FAULTS = ("slow", "reset", "trunc", "stall", "short", "flip")


@pytest.mark.parametrize(
    "faults",
    with_slow_rest(
        [{"reset": 0.3, "trunc": 0.2}],
        [{"reset": 0.3, "trunc": 0.2}, {"stall": 0.1, "stall_s": 0.5}, {"slow": 0.3}],
    ),
    ids=str,
)
def test_faults_of_the_server_leave_no_foreign_bytes(
    faults: dict[str, float], remote: str, proxy: ShapedS3
) -> None:
    knobs = dict.fromkeys(FAULTS, 0.0) | {"seed": 3} | faults
    proxy.control("/set?profile=chaos&" + "&".join(f"{k}={v}" for k, v in knobs.items()))
    proxy.control("/clear")
    options = proxy.chaos.storage_options | {"s3_client": "http", "read_timeout_s": 3}
    try:
        found = epochs(
            remote, 2, shuffle=True, block=2, window=16, hedge=True, storage_options=options
        )
        faulty = json.loads(proxy.control("/stats"))["chaos"]
    finally:
        proxy.control("/clear")
    assert all(faulty[name] for name in faults if name in FAULTS), faulty
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for rows in as_rows(found):
        assert [(key, jpg, data, number) for key, _, jpg, data, number in rows] == expected


def test_bad_samples_are_skipped_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    make_shards(folder, samples=samples(MANY, 40_000), per_shard=100)
    tar = folder / "000001.tar"
    data = bytearray(tar.read_bytes())
    data[data.index(b"0130.jpg") + 150] ^= 1  # its checksum
    tar.write_bytes(data)
    for url in (str(folder), f"file://{folder}"):
        alone, shared = (
            as_rows(epochs(url, workers, on_error="skip", shuffle=True)) for workers in (0, 1)
        )
        assert shared == alone
        assert {len(rows) for rows in shared} == {MANY - 1}
        refilled = epochs(url, 1, on_error=ss.SkipBudget(refill=True), shuffle=True)
        assert [len(row) for row in as_rows(refilled)] == [MANY, MANY]


def test_many_small_samples_between_large_ones(proxy: ShapedS3) -> None:
    sizes = [*[100] * 3000, *[1_000_000] * 60]
    many = [
        {"__key__": f"{number:05d}", "bin": bytes([number % 251]) * size}
        for number, size in enumerate(sizes)
    ]
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options}
    with new_bucket(proxy.plain) as bucket:
        make_shards(f"{bucket}/mixed", samples=many, per_shard=len(many), **options)
        [rows] = as_rows(epochs(f"{bucket}/mixed", 1, count=1, **options))
    assert [row[::2] for row in rows] == [(one["__key__"], one["bin"]) for one in many]


@pytest.mark.parametrize(
    ("is_local", "taken"), with_slow_rest([(True, 20), (False, 1)], [True, False], [1, 20])
)
def test_an_iteration_whose_workers_serve_another_is_an_error(
    taken: int, is_local: bool, local: str, remote: str, proxy: ShapedS3
) -> None:
    options: dict[str, Any] = {}
    if not is_local:
        options = {"storage_options": proxy.plain.storage_options}
    dataset = ss.ShardDataset(local if is_local else remote, **grouped(**options))
    loader = ss.ShardLoader(dataset, 4, num_workers=2, persistent_workers=True)
    first = iter(loader)
    for _ in range(taken):
        next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(OptionError, match="another iteration of this loader has taken over"):
        next(first)
    rest = sum(len(batch["__key__"]) for batch in second)
    assert rest == (MANY if is_local else SAMPLES) - 4  # its workers were not ended


class ShortCatalog(ShardCatalog):
    """Returns fewer bytes than asked for, as no store should."""

    def fetch(self, *place: Any) -> bytes | memoryview:
        return super().fetch(*place)[:-700]


def test_samples_whose_bytes_did_not_arrive_are_errors() -> None:
    url = f"memory://{time.time_ns()}"
    make_shards(url, samples=samples(10), per_shard=10)
    storage = Storage()
    catalog = ShortCatalog(locate_shards(url, storage), storage)
    numbers = np.arange(10)
    fetcher = catalog.open_fetcher([numbers], FetchOptions(prefetch_bytes=64 << 20))
    with closing(fetcher):
        [*found] = fetcher.samples(numbers)
    expected = [one["jpg"] for one in samples(9)]
    assert [one["jpg"] for one in found[:9] if isinstance(one, dict)] == expected
    assert isinstance(found[9], ShardError)


def test_an_epoch_that_was_left_early_leaves_no_bytes_to_the_next(
    remote: str, proxy: ShapedS3
) -> None:
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options, "shuffle": True}
    loader = ss.ShardLoader(
        ss.ShardDataset(remote, **grouped(**options)), 8, num_workers=2, persistent_workers=True
    )
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for taken in (1, 3, 7):
        for number, _ in enumerate(loader):
            if number == taken:
                break
        [rows] = as_rows([list(loader)])
        assert [(key, *fields) for key, _, *fields in rows] == expected
