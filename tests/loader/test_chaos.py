"""Whole epochs against a faulty store: every sample exactly once with its own bytes, or an error.

The server is a real one behind a proxy that corrupts responses. Whole epochs are compared: the key of each sample and a digest of
each of its fields, sorted.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import ChangedError, ShardStreamError, WorkerError
from shardstream.fetch import RangeFetcher
from shardstream.samples import FetchOptions
from shardstream.storage import Storage, locate_shards
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.servers import (
    S3Server,
    ShapedS3,
    new_bucket,
    nginx_or_skip,
    restart_nginx,
    restart_rgw,
    signal_server,
    start_s3,
    start_tls,
)
from tests.small_datasets import FEW_CORES, UNCHECKED, grouped

pytestmark = pytest.mark.filterwarnings(FEW_CORES, UNCHECKED)

SAMPLES, PER_SHARD = 2040, 20
FEW = 300  # samples, in 15 shards
ROOT = Path(__file__).parent.parent.parent
READERS = (("s3fs", 2), ("https", 0), ("http", 2))
by_reader = pytest.mark.parametrize(
    ("client", "num_workers"),
    [pytest.param("s3fs", 2, marks=pytest.mark.slow), ("https", 0), ("http", 2)],
)
CALM = dict.fromkeys(("slow", "reset", "trunc", "stall", "short", "flip"), 0.0)
MANY_READS: dict[str, Any] = {"shuffle": True, "window": 64, "block": 4}
SMALL_READS: dict[str, Any] = {"shuffle": True, "window": 16, "block": 4, "prefetch_bytes": 1}


def digest(sample: dict[str, Any]) -> str:
    """Return a digest of a sample's key and bytes."""
    fields = {name: hashlib.sha256(sample[name]).hexdigest() for name in ("bin", "cls")}
    return f"{sample['__key__']} {fields}"


class Shop:
    """A dataset on a server, behind a proxy, and another one that adds TLS: its server, and its certificate."""

    def __init__(
        self, proxy: ShapedS3, tls: tuple[S3Server, Path], url: str, expected: list[str]
    ) -> None:
        self.proxy, self.tls, self.url, self.all = proxy, tls, url, expected

    @property
    def few_url(self) -> str:
        return f"{self.url}/{{000000..{FEW // PER_SHARD - 1:06d}}}.tar"

    @property
    def few(self) -> list[str]:
        return self.all[:FEW]

    def set(self, **knobs: float) -> None:
        """Set the faults of later responses, and reset the counts."""
        every = CALM | {"seed": 1} | knobs
        self.proxy.control("/set?profile=chaos&" + "&".join(f"{k}={v}" for k, v in every.items()))
        self.proxy.control("/clear")

    def count(self, name: str) -> int:
        return int(json.loads(self.proxy.control("/stats"))["chaos"][name])

    @property
    def gets(self) -> int:
        """Number of requests for bytes of shards."""
        return int(json.loads(self.proxy.control("/stats"))["chaos"]["seen"]["GET .tar"])

    def faults_by_range(self, bucket: str) -> list[list[str]]:
        """Return the faults of all responses, for each requested range of a shard of a bucket: "stall:0.3", or "-"."""
        answers: list[tuple[str, str]] = []
        deadline = time.monotonic() + 300
        while len(answers) < self.gets and time.monotonic() < deadline:  # also the late ones
            lines = "\n".join(self._log())
            answers = re.findall(rf"GET (/{bucket}/\S+\.tar range=\S+) .* fault=(\S+)", lines)
        assert len(answers) == self.gets
        found: dict[str, list[str]] = {}
        for asked, fault in answers:
            found.setdefault(asked, []).append(fault)
        return list(found.values())

    def _log(self) -> list[str]:
        signal_server(self.proxy.workdir, "nginx", signal.SIGUSR1)  # flush the log
        time.sleep(0.3)
        return (self.proxy.workdir / "logs" / "access.log").read_text().splitlines()

    def options(self, client: str, **limits: float) -> dict[str, Any]:
        if client != "https":
            return self.proxy.chaos.storage_options | {"s3_client": client, **limits}
        server, certificate = self.tls
        options = server.storage_options | {"s3_client": "http", **limits}
        options["client_kwargs"] |= {"verify": str(certificate)}
        return options

    def loader(self, url: str, client: str = "s3fs", **options: Any) -> ss.ShardLoader:
        limits = {
            name: options.pop(name)
            for name in ("read_timeout_s", "retry_timeout_s")
            if name in options
        }
        loading: dict[str, Any] = {"collate_fn": list}
        loading |= {
            name: options.pop(name)
            for name in ("num_workers", "multiprocessing_context", "collate_fn")
            if name in options
        }
        dataset = ss.ShardDataset(
            url, **grouped(storage_options=self.options(client, **limits), **options)
        )
        return ss.ShardLoader(dataset.map(digest), 8, **loading)


def epoch(
    loader: ss.ShardLoader, then: Callable[[], None] = lambda: None, *, after: int = 3
) -> list[str]:
    """Read an epoch; call ``then`` after some batches."""
    found: list[str] = []
    for number, batch in enumerate(loader):
        if number == after:
            then()
        found += batch
    return sorted(found)


@pytest.fixture(scope="module")
def proxy(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as started:
        yield started


def write(url: str, nsamples: int, server: S3Server) -> list[str]:
    """Write a dataset; return the digests of its samples."""
    rng = np.random.default_rng(0)
    samples = [
        {"__key__": f"{i:06d}", "cls": b"%d" % i, "bin": rng.bytes(1000 + 7 * (i % 500))}
        for i in range(nsamples)
    ]
    make_shards(url, samples=samples, per_shard=PER_SHARD, storage_options=server.storage_options)
    return [digest(sample) for sample in samples]


@pytest.fixture(scope="module")
def written(proxy: ShapedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with (
        new_bucket(proxy.plain) as bucket,
        start_tls(tmp_path_factory.mktemp("tls"), proxy.chaos) as tls,
    ):
        yield Shop(proxy, tls, f"{bucket}/data", write(f"{bucket}/data", SAMPLES, proxy.plain))


@pytest.fixture
def shop(written: Shop) -> Shop:
    """A dataset behind a proxy without faults until the test sets some."""
    written.set()
    return written


# --- temporary faults


FAULTS = {"slow": 0.05, "reset": 0.02, "trunc": 0.01, "stall": 0.01, "stall_s": 4}

PROGRAM = """
    import json, sys
    import shardstream as ss
    from tests.loader import test_chaos

    if __name__ == "__main__":
        arguments = json.loads(sys.argv[1])
        dataset = ss.ShardDataset(arguments["url"], shuffle=True, storage_options=arguments["options"]).map(test_chaos.digest)
        loader = ss.ShardLoader(
            dataset, 8, num_workers=2, collate_fn=list, multiprocessing_context=arguments["method"]
        )
        print(json.dumps(sorted(one for batch in loader for one in batch)))
"""


def run(program: str, folder: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a program for at most 90 s, and check that it leaves no process."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    process = subprocess.Popen(
        [sys.executable, folder / "program.py", json.dumps(arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=300)
        assert is_gone(process.pid)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler prints where it hangs
        output, errors = process.communicate()
        pytest.fail(f"it hangs: {errors}")
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def is_gone(group: int) -> bool:
    """Return whether all processes of a group end within minutes."""
    for _ in range(6000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)  # multiprocessing's helper process ends a moment later
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "method"), [("http", "fork"), ("https", "fork"), ("https", "spawn")]
)
def test_epoch_under_faults_has_each_sample_once(
    client: str, method: str, shop: Shop, tmp_path: Path
) -> None:
    shop.set(**FAULTS)
    options = shop.options(client, read_timeout_s=1)
    done = run(PROGRAM, tmp_path, url=shop.url, options=options, method=method)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == shop.all
    assert sum(shop.count(fault) for fault in CALM) > 5


@pytest.mark.slow
def test_epoch_in_forked_workers_under_faults_has_each_sample_once(shop: Shop) -> None:
    loader = shop.loader(shop.url, "s3fs", shuffle=True, num_workers=2, read_timeout_s=1)
    shop.set(**FAULTS)
    assert epoch(loader) == shop.all
    assert sum(shop.count(fault) for fault in CALM) > 5


@by_reader
def test_epoch_with_every_third_response_broken_has_each_sample_once(
    client: str, num_workers: int, shop: Shop
) -> None:
    loader = shop.loader(
        shop.few_url, client, num_workers=num_workers, read_timeout_s=1, **MANY_READS
    )
    shop.set(reset=0.3, trunc=0.05, slow=0.02, stall=0.01, stall_s=4)
    assert epoch(loader) == shop.few
    assert shop.count("reset") > 5


@by_reader
def test_silently_truncated_bodies_are_retried(client: str, num_workers: int, shop: Shop) -> None:
    loader = shop.loader(shop.few_url, client, num_workers=num_workers, **MANY_READS)
    shop.set(short=0.2)
    assert epoch(loader) == shop.few
    assert shop.count("short") > 0


def until_flipped(shop: Shop, read: Callable[[int], None]) -> None:
    """Read, with new random draws, until bits of a response were flipped: few requests may all be unchanged."""
    for seed in range(20):
        read(seed)
        if shop.count("flip"):
            return
    pytest.fail("no bits were flipped")


@by_reader
def test_bit_flips_are_corrected_only_with_checksums(
    client: str, num_workers: int, shop: Shop
) -> None:
    def outcome(flip: float, seed: int, **options: Any) -> list[str] | str:
        shop.set()
        loader = shop.loader(shop.few_url, client, num_workers=num_workers, **MANY_READS, **options)
        shop.set(flip=flip, seed=seed)
        try:
            return epoch(loader)
        except ShardStreamError as error:
            return str(error)

    def corrected(seed: int) -> None:
        assert outcome(0.05, seed, verify="sha256") == shop.few

    until_flipped(shop, corrected)
    assert outcome(0.3, 0) != shop.few  # so bits were flipped in fields


def test_flipped_bits_do_not_stay_in_the_cache(shop: Shop, tmp_path: Path) -> None:
    def loader(cache: int, **options: Any) -> ss.ShardLoader:
        shop.set()
        folder = tmp_path / str(cache)
        options |= {"cache_dir": folder, "cache_bytes": "100MB", "verify": "sha256"}
        return shop.loader(shop.few_url, **MANY_READS, **options)

    def corrected(seed: int) -> None:
        one = loader(seed, num_workers=2)
        shop.set(flip=0.05, seed=seed)
        assert epoch(one) == shop.few
        filled.append(seed)

    filled: list[int] = []
    until_flipped(shop, corrected)
    one = loader(filled[-1], retry_timeout_s=0.1)
    shop.set(slow=1)  # all requests fail from now on
    with pytest.warns(UserWarning, match="cannot check whether the dataset was replaced"):
        assert epoch(one) == shop.few


# --- a store that throttles, and one that stalls


def test_throttling_reduces_the_number_of_requests(shop: Shop) -> None:
    storage = Storage(shop.options("http"))
    catalog = ShardCatalog(locate_shards(shop.few_url, storage), storage)
    catalog.extents(np.arange(FEW))  # reads the indexes
    fetcher = RangeFetcher(catalog, iter([np.arange(FEW)]), FetchOptions(prefetch_bytes=1 << 20))
    shop.set(slow=0.4)
    found = fetcher.samples(np.arange(FEW))
    stats, limit = fetcher.stats(), fetcher._requests.concurrency.limit
    fetcher.close()
    assert [digest(sample) for sample in found if isinstance(sample, dict)] == shop.few
    assert stats["throttled"] == shop.count("slow") > 0
    assert limit < catalog.threads


def test_throttled_epoch_has_each_sample_once(shop: Shop) -> None:
    url = f"{shop.url}/{{000000..000004}}.tar"
    loader = shop.loader(url, num_workers=2, shuffle=True)
    shop.set(slow=0.4)
    assert epoch(loader) == shop.all[: 5 * PER_SHARD]
    assert shop.count("slow") > 0


@pytest.mark.slow
def test_stalled_responses_are_hedged_with_hedge(shop: Shop) -> None:
    waited_for: dict[bool, float] = {}
    for hedge, stall_s in ((False, 0.5), (True, 3)):
        with new_bucket(shop.proxy.plain) as bucket:  # the log may still get lines of other tests
            expected = write(f"{bucket}/data", FEW, shop.proxy.plain)
            loader = shop.loader(f"{bucket}/data", hedge=hedge, **MANY_READS)
            shop.set(stall=0.2, stall_s=stall_s)
            assert epoch(loader) == expected
            found = shop.faults_by_range(bucket.removeprefix("s3://"))
        stalled = [faults for faults in found if "stall" in str(faults)]
        waited_for[hedge] = sum(len(faults) == 1 for faults in stalled) / len(stalled)
    assert waited_for[False] == 1  # every stall is waited for
    assert waited_for[True] < 0.5


# --- a store that is killed


class Outage:
    """Kills a server during an epoch, and restarts it later."""

    def __init__(self, down: Callable[[], None], up: Callable[[], None]) -> None:
        self._down, self._up = down, up
        self._later: threading.Thread | None = None

    def __call__(self) -> None:
        self._down()
        self._later = threading.Thread(target=self._come_back)
        self._later.start()

    def _come_back(self) -> None:
        time.sleep(1.5)
        self._up()

    def is_over(self) -> bool:
        assert self._later is not None, "the epoch was over before"
        self._later.join(60)
        return not self._later.is_alive()


@pytest.fixture
def mortal(s3: S3Server, shop: Shop, tmp_path: Path) -> Iterator[Shop]:
    """The same data behind a proxy that is started for this test."""
    with (
        nginx_or_skip(tmp_path / "nginx", s3) as proxy,
        start_tls(tmp_path / "tls", proxy.chaos) as tls,
    ):
        mine = Shop(proxy, tls, shop.url, shop.all)
        mine.set()
        yield mine


@by_reader
def test_epoch_survives_a_server_restart(client: str, num_workers: int, mortal: Shop) -> None:
    def up() -> None:
        restart_nginx(mortal.proxy)
        mortal.set()

    outage = Outage(lambda: signal_server(mortal.proxy.workdir, "nginx", signal.SIGKILL), up)
    loader = mortal.loader(mortal.few_url, client, num_workers=num_workers, **SMALL_READS)
    assert epoch(loader, outage) == mortal.few
    assert outage.is_over()


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, S3Server]]:
    """A store for this module, which tests kill."""
    folder = tmp_path_factory.mktemp("ceph")
    with start_s3(folder) as server:
        if server.kind != "ceph":
            pytest.skip("moto's data end with it")
        yield folder, server


@pytest.mark.slow
def test_epoch_survives_a_frozen_and_a_killed_gateway(
    ceph: tuple[Path, S3Server],
) -> None:
    folder, server = ceph
    # Not deleted, because the store would wait half a minute for the killed gateway.
    client = server.client()
    client.create_bucket(Bucket="kept")
    client.close()
    expected = write("s3://kept/data", FEW, server)
    options = server.storage_options | {"s3_client": "s3fs", "read_timeout_s": 0.5}
    dataset = ss.ShardDataset(
        "s3://kept/data", **grouped(storage_options=options, **SMALL_READS)
    ).map(digest)
    loader = ss.ShardLoader(dataset, 8, num_workers=2, collate_fn=list)
    for down, up in (
        (signal.SIGSTOP, lambda: signal_server(folder, "rgw", signal.SIGCONT)),
        (signal.SIGKILL, lambda: restart_rgw(folder)),
    ):
        outage = Outage(lambda down=down: signal_server(folder, "rgw", down), up)  # type: ignore[misc]
        assert epoch(loader, outage) == expected
        assert outage.is_over()


# Reads some batches, prints a line, waits until the server has stopped, and continues.
GOING = """
    import json, multiprocessing, os, sys, threading
    import shardstream as ss

    if __name__ == "__main__":
        arguments = json.loads(sys.argv[1])
        dataset = ss.ShardDataset(
            arguments["url"], shuffle=True, order=ss.OrderOptions(window=16, block=4), read=ss.ReadOptions(prefetch_bytes=1),
            storage_options=arguments["options"],
        )
        loader = ss.ShardLoader(dataset, 8, num_workers=arguments["num_workers"], collate_fn=len)
        seen = 0
        try:
            for seen, batch in enumerate(loader, 1):
                if seen == 3:
                    os.kill(arguments["pid"], arguments["signal"])
        except ss.errors.StorageError as error:
            children = len(multiprocessing.active_children())
            text = "; ".join([str(error), *getattr(error, "__notes__", ())])
            print(json.dumps([type(error).__name__, text, seen, children]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_server_that_stays_down_is_an_error_within_the_retry_timeout(
    num_workers: int, mortal: Shop, tmp_path: Path
) -> None:
    master = int((mortal.proxy.workdir / "pids").read_text().split()[0])
    done = run(
        GOING, tmp_path, url=mortal.url, options=mortal.options("s3fs", retry_timeout_s=2, read_timeout_s=1),
        num_workers=num_workers, pid=master, signal=int(signal.SIGTERM),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kind, text, seen, children = json.loads(done.stdout)
    assert kind == "StorageError"
    assert re.search(rf"in {mortal.url}/\d+\.tar", text)
    assert re.search(r"tried \d+ times in \d+ s", text)
    assert 3 <= seen < SAMPLES // 8
    assert children == 0


# --- a store whose objects change


def as_large_batch(digests: list[str]) -> list[str]:
    """Return a batch of 2 MiB: workers make few of them ahead, so most are made after the third one is used."""
    return [*digests, " " * (2 << 20)]


@pytest.mark.parametrize("grows", with_slow_rest([True], [False, True]))
def test_shards_replaced_during_an_epoch_are_an_error(
    grows: bool, proxy: ShapedS3, shop: Shop
) -> None:
    with new_bucket(proxy.plain) as bucket:
        url = f"{bucket}/data"
        write(url, FEW, proxy.plain)
        client = proxy.plain.client()

        def replace() -> None:
            for number in range(FEW // PER_SHARD):
                where = {"Bucket": bucket.removeprefix("s3://"), "Key": f"data/{number:06d}.tar"}
                body = client.get_object(**where)["Body"].read()
                client.put_object(**where, Body=body[::-1] + b"\0" * 512 * grows)
            client.close()

        loader = shop.loader(
            url, num_workers=2, collate_fn=as_large_batch, on_error="skip", **SMALL_READS
        )
        with pytest.raises(ChangedError, match=r"the file changed.*shardstream index.*\d\.tar"):
            epoch(loader, replace)
        assert multiprocessing.active_children() == []


# --- killed workers


def test_worker_killed_during_a_stall_is_reported_at_once(shop: Shop) -> None:
    # Without an error, no batch would arrive for two minutes, longer than a test may take.
    loader = shop.loader(shop.few_url, num_workers=2, read_timeout_s=100, retry_timeout_s=100)
    shop.set(stall=1, stall_s=120)

    def kill() -> None:
        while not shop.count("stall"):
            time.sleep(0.05)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match="was killed by SIGKILL while it made batch"):
        epoch(loader)
    killer.join(60)
    assert multiprocessing.active_children() == []
