"""Fixtures around one real S3 server for each test process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import s3fs
from botocore.loaders import JSONFileLoader
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.servers import (
    S3Server,
    ShapedS3,
    in_ci,
    make_certificate,
    new_bucket,
    nginx_or_skip,
    skip_if_missing,
    start_s3,
)

# No deadline: the machine may be busy. CI, which has the time, draws twice as many examples, in its first run.
settings.register_profile(
    "patient",
    deadline=None,
    max_examples=100 if in_ci() or "PASSED_TO" in os.environ else 50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

# Modules and collected tests are a million objects, and each client of botocore reads megabytes of JSON: the full collections that
# this leads to took half of the CPU time of the tests of S3.
gc.set_threshold(10_000)

# The same JSON for each client is read and parsed once: half of the time that making one takes.
JSONFileLoader.load_file = staticmethod(functools.cache(JSONFileLoader().load_file))

# Freed blocks of 4 MB and more are given back: glibc comes to keep those of up to 32 MB, and each fork would copy their page tables.
with contextlib.suppress(AttributeError):  # another library of C
    ctypes.CDLL(None).mallopt(-3, 1 << 22)  # M_MMAP_THRESHOLD

# All cores have a test to run, and threads of PyTorch spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes are started, and each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Python 3.14 starts processes by forkserver, which cannot send functions of a test; tests of other methods name them.
if "fork" in multiprocessing.get_all_start_methods():
    multiprocessing.set_start_method("fork", force=True)

# Background jobs of a shell ignore SIGINT, and programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each of these would make a client use another server.
_FOREIGN_VARIABLES = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
)

_TOGETHER = ("tests/ray/", "tests/test_architecture.py")


class SomeInOneProcess(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not typed
    """Distribute single tests, but those of `_TOGETHER` in one process: one cluster is started, and each file is parsed once.

    The groups of xdist itself (``--dist=loadgroup``) have no effect with xdist 3.8 and pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((one for one in _TOGETHER if nodeid.startswith(one)), nodeid)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forget a group whose tests are finished: after each test xdist counts those that it keeps."""
        super().mark_test_complete(node, item_index, duration)
        groups = self.assigned_work[node]
        group = self._split_scope(self.registered_collections[node][item_index])
        if all(groups[group].values()):
            del groups[group]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Choose how tests are distributed over processes."""
    return SomeInOneProcess(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and tests out of later garbage collections, and make forks cheap."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        forks = count()

        def before_fork() -> None:
            if next(forks) % 24 == 0:
                _gather_memory()

        os.register_at_fork(before=before_fork)


def _gather_memory() -> None:
    """Move private memory into pages of 2 MB where Linux (6.1 or later) can.

    Thousands of loader processes are forked, and half of their CPU time was page tables of 4 kB pages: 35 ms a fork in place of 15.
    What is written beside a child is in small pages again, half of all after 50 forks; to gather them takes 50 ms.
    """
    madvise, lines = ctypes.CDLL(None).madvise, list[str]()
    with contextlib.suppress(OSError):  # a test may leave no file descriptor
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for line in lines:
        span, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in span.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 25)  # MADV_COLLAPSE


@pytest.fixture(scope="module", autouse=True)
def memory_is_emptied() -> Iterator[None]:
    """Remove what a module's tests left at "memory://"."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def two_processes() -> Iterator[ProcessPoolExecutor]:
    """Two spawned processes, which import the package once for all tests that do not stop or break them."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The S3 server: Ceph, or moto if Ceph is not installed. No global settings change."""
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def ceph(s3: S3Server) -> S3Server:
    """The same server if it is Ceph; else the test is skipped."""
    if s3.kind != "ceph":
        pytest.skip("moto checks no signatures, and refuses requests without one")
    return s3


@pytest.fixture
def shaped_s3(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    """The same server behind an nginx that is started for this test, so that its settings end with the test."""
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of a self-signed certificate of 127.0.0.1, and that of its key."""
    with skip_if_missing():
        return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    """URL of a new, empty bucket, "s3://NAME"; deleted after the test, because objects are in memory."""
    with new_bucket(s3) as url:
        yield url


@pytest.fixture
def moto(s3: S3Server) -> Iterator[S3Server]:
    """A server of its own with a bucket "bucket": it checks no bytes that it receives, and compares also when parts are joined, as AWS and unlike Ceph 16."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  (over a second)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = replace(s3, endpoint=f"http://{host}:{port}", region="us-east-1", kind="moto")
        with contextlib.closing(found.client()) as client:
            client.create_bucket(Bucket="bucket")
        yield found
    finally:
        server.stop()


@pytest.fixture
def s3_env(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set variables so that clients without arguments find the server, also in child processes."""
    for name in _FOREIGN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    # s3fs caches instances by their arguments, with the environment of their creation.
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()
