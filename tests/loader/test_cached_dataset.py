"""Datasets with a cache, read from a real server: requests of later epochs and other processes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

import shardstream as ss
from shardstream.errors import CacheWarning, OptionError
from shardstream.testing import make_shards
from tests.servers import S3Server, ShapedS3, new_bucket, nginx_or_skip
from tests.small_datasets import FEW_CORES, flat, grouped, labels, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

SAMPLES, PER_SHARD = 60, 15
SHARDS = SAMPLES // PER_SHARD
ROOM: dict[str, Any] = {"cache_bytes": "100MB"}  # also if less than a tenth of the disk is free


class Server:
    """A bucket behind a proxy that counts requests."""

    def __init__(self, proxy: ShapedS3, bucket: str) -> None:
        self.options = proxy.chaos.storage_options
        self.url = f"{bucket}/data"
        self._proxy = proxy

    def requests(self) -> dict[str, int]:
        """Requests for shards and indexes since the last call: "GET .tar", "HEAD .idx", ..."""
        seen: dict[str, int] = json.loads(self._proxy.control("/stats"))["chaos"].get("seen", {})
        self._proxy.control("/clear")
        return {what: n for what, n in seen.items() if what.endswith((".tar", ".idx"))}

    def loader(self, cache_dir: Path | None, **options: Any) -> ss.ShardLoader:
        num_workers = options.pop("num_workers", 0)
        context = options.pop("multiprocessing_context", None)
        if cache_dir is not None:
            options = ROOM | options
        dataset = ss.ShardDataset(
            options.pop("url", self.url),
            **grouped(storage_options=self.options, cache_dir=cache_dir, **options),
        )
        return ss.ShardLoader(
            dataset.decode(), 8, num_workers=num_workers, multiprocessing_context=context
        )


@pytest.fixture(scope="module")
def proxy(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    """A proxy for all tests that only counts requests."""
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as started:
        started.control("/set?profile=chaos&slow=0&reset=0&trunc=0&stall=0")
        yield started


@pytest.fixture(scope="module")
def server(proxy: ShapedS3) -> Iterator[Server]:
    """A server with a dataset that no test changes."""
    with new_bucket(proxy.plain) as bucket:
        one = Server(proxy, bucket)
        numbered(one.url, SAMPLES, PER_SHARD, storage_options=one.options)
        yield one
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def nothing_asked_yet(server: Server) -> None:
    server.requests()


def epoch(loader: ss.ShardLoader) -> list[int]:
    return sorted(flat(labels(loader)))


EVERYTHING = list(range(SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_second_run_sends_no_data_or_version_requests(
    num_workers: int, server: Server, tmp_path: Path
) -> None:
    options = {"num_workers": num_workers, "shuffle": True}
    assert epoch(server.loader(tmp_path, **options)) == EVERYTHING
    first = server.requests()
    assert sorted(first) == ["GET .idx", "GET .tar"]  # no HEAD: the listing has the versions
    assert first["GET .tar"] >= SHARDS
    assert epoch(server.loader(tmp_path, **options)) == EVERYTHING
    assert server.requests() == {}


def test_later_epochs_of_one_loader_send_no_requests(server: Server, tmp_path: Path) -> None:
    loader = server.loader(tmp_path, shuffle=True, cache_bytes="10MB")
    assert epoch(loader) == EVERYTHING
    server.requests()
    for _ in range(3):
        assert epoch(loader) == EVERYTHING
    assert server.requests() == {}


@pytest.mark.parametrize("urls", ["/index.json", "/{000000..000003}.tar", "/*.tar", "/"])
def test_one_cache_serves_shards_named_in_different_ways(
    urls: str, server: Server, tmp_path: Path
) -> None:
    epoch(server.loader(tmp_path))
    server.requests()
    assert epoch(server.loader(tmp_path, url=server.url + urls)) == EVERYTHING
    # A file or folder that is called "*.tar" would be meant.
    assert server.requests() == ({"HEAD .tar": 1} if "*" in urls else {})


@pytest.mark.slow
def test_spawned_workers_find_the_cache(server: Server, tmp_path: Path) -> None:
    epoch(server.loader(tmp_path))
    server.requests()
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert epoch(server.loader(tmp_path, **options)) == EVERYTHING
    assert server.requests() == {}


def test_map_dataset_uses_the_cache(server: Server, tmp_path: Path) -> None:
    def open_one() -> Any:
        return (
            ss.ShardDataset(
                server.url,
                storage_options=server.options,
                read=ss.ReadOptions(cache_dir=tmp_path, cache_bytes="1GB"),
            )
            .by_number()
            .decode()
        )

    assert [sample["cls"] for sample in open_one().__getitems__(EVERYTHING)] == EVERYTHING
    server.requests()
    assert [sample["cls"] for sample in open_one()] == EVERYTHING
    assert server.requests() == {}


def run_nodes(server: Server, folder: Path, number: int, **options: Any) -> list[int]:
    """Read an epoch in one process for each of four nodes, with a cache each; return its samples."""
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        jobs = [
            pool.apply_async(read_node, (server, folder, rank, number, options))
            for rank in range(4)
        ]
        return sorted(label for job in jobs for label in job.get(60))


def read_node(
    server: Server, folder: Path, rank: int, number: int, options: dict[str, Any]
) -> list[int]:
    loader = server.loader(
        folder / str(rank), shuffle=True, placement=ss.Placement(rank, 4), **options
    )
    loader.set_epoch(number)
    return flat(labels(loader))


@pytest.mark.slow
def test_nodes_that_keep_their_blocks_read_each_byte_once(server: Server, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, (1024, 16_384), dtype=np.uint8)
    samples = [{"__key__": f"{i:06d}", "cls": i, "npy": one} for i, one in enumerate(data)]
    url = f"{server.url}-large"
    make_shards(url, samples=samples, per_shard=128, storage_options=server.options)
    options: dict[str, Any] = {"url": url, "block": 32}
    for kept, order in (("kept", {"nodes": 4}), ("", {})):
        requests = []
        for number in range(3):
            found = run_nodes(server, tmp_path / kept, number, **options, **order)
            assert found == list(range(1024))
            requests.append(server.requests().get("GET .tar", 0))
        assert requests[0] > 0
        assert (requests[1:] == [0, 0]) == bool(kept)


def test_mix_reads_through_the_caches_of_its_parts(server: Server, tmp_path: Path) -> None:
    def mixed() -> ss.ShardLoader:
        part = ss.ShardDataset(
            server.url, **grouped(storage_options=server.options, cache_dir=tmp_path, **ROOM)
        )
        return ss.ShardLoader(ss.mix({"a": part.decode(), "b": part.decode()}), 8)

    assert epoch(mixed()) == sorted(EVERYTHING * 2)
    server.requests()
    assert epoch(mixed()) == sorted(EVERYTHING * 2)
    assert server.requests() == {}


def test_sequential_reads_use_the_cache(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        server.requests()
        assert epoch(server.loader(tmp_path, index="ignore")) == EVERYTHING
    assert server.requests() == {}


def test_replaced_shards_are_read_again(server: Server, tmp_path: Path) -> None:
    url = f"{server.url}-2"
    for first in (0, 1000):
        samples = [{"__key__": f"{i:06d}", "cls": first + i} for i in range(SAMPLES)]
        make_shards(url, samples=samples, storage_options=server.options, overwrite=True)
        for _ in range(2):
            assert epoch(server.loader(tmp_path, url=url)) == [first + i for i in range(SAMPLES)]


def test_shard_replaced_after_the_listing_is_an_error_and_not_cached(
    server: Server, tmp_path: Path
) -> None:
    url = f"{server.url}-3"

    def write(first: int) -> None:
        samples = [{"__key__": f"{i:06d}", "cls": first + i} for i in range(SAMPLES)]
        make_shards(url, samples=samples, storage_options=server.options, overwrite=True)

    write(0)
    listed = server.loader(tmp_path, url=url)
    write(1000)
    with pytest.raises(ss.errors.ChangedError, match="the file changed while it was read"):
        epoch(listed)
    kept = [path.stat().st_size for path in tmp_path.glob("*/??/*")]
    assert max(kept) < 5000  # indexes and manifest, but no shard


def test_workers_killed_while_writing_the_cache_leave_it_valid(
    server: Server, tmp_path: Path
) -> None:
    loader = server.loader(tmp_path, num_workers=2, shuffle=True)
    batches = iter(loader)
    next(batches)
    for worker in multiprocessing.active_children():
        worker.kill()
    # Torch's error depends on whether a batch of the killed workers was in transit.
    with pytest.raises((RuntimeError, OSError, EOFError)):
        list(batches)
    del batches
    assert epoch(server.loader(tmp_path, num_workers=2, shuffle=True)) == EVERYTHING
    assert epoch(server.loader(tmp_path)) == EVERYTHING


def test_without_options_nothing_is_cached(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        assert epoch(server.loader(None)) == EVERYTHING
        assert server.requests()["GET .tar"] >= SHARDS
    with pytest.raises(OptionError, match="cache_bytes is set without cache_dir"):
        server.loader(None, cache_bytes="1GB")


def test_local_shards_are_not_cached(tmp_path: Path) -> None:
    url = numbered(tmp_path / "data", 20, 10)
    loader = ss.ShardLoader(
        ss.ShardDataset(url, **grouped(cache_dir=tmp_path / "cache", **ROOM)).decode(), 4
    )
    assert epoch(loader) == list(range(20))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_unwritable_cache_disk_causes_a_warning(server: Server) -> None:
    with pytest.warns(CacheWarning, match="reads continue without it"):
        loader = server.loader(Path("/proc/no-such-place"))
    assert epoch(loader) == EVERYTHING
