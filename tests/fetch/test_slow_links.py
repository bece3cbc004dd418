"""Test that a slow connection is read from as long as bytes arrive, and that nothing waits for responses that are not needed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.testing import make_shards
from tests.raw_server import RawServer, Request, file_response, raw_server, response

CLIENTS = ("http", "s3fs", "web")
PIECE_BYTES = 16 << 10
Pause = Callable[[int], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a small shard and a large one."""
    samples: list[dict[str, Any]] = [
        {"__key__": f"{number}", "bin": bytes([number]) * size}
        for number, size in enumerate((10, 400_000))
    ]
    return Path(make_shards(tmp_path_factory.mktemp("slow") / "data", samples=samples, per_shard=1))


def slow_link(folder: Path, pause: Pause, request: Request) -> bytes | Iterator[bytes]:
    """Return a file at once, or the large shard piece by piece, with a pause before each."""
    if "list-type=2" in request.target:
        return response(200, listing(folder))
    path = folder.parent / request.target.partition("bucket/")[2].partition("?")[0]
    if not path.is_file():
        return response(404)
    data = file_response(request, path.read_bytes(), ETag=f'"{path.name}"')
    large = path.suffix == ".tar" and len(data) > 100_000
    return data if not large or request.method == "HEAD" else in_pieces(data, pause)


def listing(folder: Path) -> bytes:
    """Return the answer to ListObjectsV2."""
    files = [
        f"<Contents><Key>data/{path.name}</Key><Size>{path.stat().st_size}</Size>"
        f"<ETag>&quot;{path.name}&quot;</ETag></Contents>"
        for path in sorted(folder.iterdir())
    ]
    return f"<ListBucketResult>{''.join(files)}</ListBucketResult>".encode()


def in_pieces(data: bytes, pause: Pause) -> Iterator[bytes]:
    for number, first in enumerate(range(0, len(data), PIECE_BYTES)):
        yield data[first : first + PIECE_BYTES]
        pause(number)


def where(client: str, server: RawServer, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the URL of the dataset for a client, and the options."""
    if client == "web":
        return f"{server.url}/bucket/data/", options
    options |= {"key": "some", "secret": "thing", "endpoint_url": server.url, "s3_client": client}
    return "s3://bucket/data/", options


def open_dataset(client: str, server: RawServer, **options: Any) -> ss.ShardDataset:
    url, options = where(client, server, **options)
    return ss.ShardDataset(url, storage_options=options)


@pytest.mark.parametrize("client", CLIENTS)
def test_slow_response_is_read_while_bytes_arrive(client: str, folder: Path) -> None:
    """It takes longer than all timeouts together; no pause is longer than one."""

    def pause(_: int) -> None:
        time.sleep(0.06)

    with raw_server(functools.partial(slow_link, folder, pause)) as server:
        dataset = open_dataset(client, server, read_timeout_s=0.5, retry_timeout_s=0.1)
        sizes = [len(sample["bin"]) for sample in dataset]
    assert sizes == [10, 400_000]


@pytest.mark.parametrize("client", ["http", "s3fs", "web"])
def test_close_ends_the_connection_of_a_response(client: str, folder: Path) -> None:
    """Its next byte would come in an hour."""
    begun, left = threading.Event(), threading.Event()
    before = threads()

    def answer(request: Request) -> bytes | Iterator[bytes]:
        found = slow_link(folder, lambda _: None, request)
        return found if isinstance(found, bytes) else stall(found)

    def stall(pieces: Iterator[bytes]) -> Iterator[bytes]:
        yield next(pieces)
        begun.set()
        for _ in iter(lambda: left.wait(0.01), True):
            yield b""  # tells when the connection is closed

    with raw_server(answer) as server:
        dataset = open_dataset(client, server, read_timeout_s=3600, retry_timeout_s=3600)
        samples = iter(dataset)
        assert len(next(samples)["bin"]) == 10
        assert begun.wait(300)
        samples.close()
        deadline = time.monotonic() + 300
        while threads() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        left.set()
        assert not threads() - before


def threads() -> set[threading.Thread]:
    """Return the threads that wait for responses."""
    return {one for one in threading.enumerate() if one.name.startswith("shardstream-fetch")}


WAITING = """
import json, sys
import shardstream as ss
datasets = [ss.ShardDataset(url, storage_options=options) for url, options in json.loads(sys.argv[1])]
epochs = [iter(dataset) for dataset in datasets]
try:
    print([len(next(samples)["bin"]) for samples in epochs], flush=True)
    next(epochs[0])
except KeyboardInterrupt:
    url, options = json.loads(sys.argv[1])[0]
    ss.verify(url, storage_options=options)
"""


def test_process_ends_after_an_interrupt(folder: Path) -> None:
    """While each client waits for a response that would take an hour, and ``verify`` does."""
    ended = threading.Event()

    def pause(_: int) -> None:
        ended.wait(3600)

    with raw_server(functools.partial(slow_link, folder, pause)) as server:
        places = [where(client, server, read_timeout_s=3600) for client in CLIENTS]
        command = [sys.executable, "-c", WAITING, json.dumps(places)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"[10, 10, 10]\n"
            process.send_signal(signal.SIGINT)
            while not waits_in_verify(server.requests) and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=300)
            finally:
                process.kill()
                ended.set()
    assert errors.count(b"\nKeyboardInterrupt") == 2
    assert process.returncode == -signal.SIGINT


LOADING = """
import json, sys
import shardstream as ss
url, options, how, method = json.loads(sys.argv[1])
dataset = ss.ShardDataset(url, storage_options=options)
for batch in ss.ShardLoader(dataset, batch_size=1, num_workers=1, multiprocessing_context=method):
    print(len(batch["bin"][0]), flush=True)
    if how == "break":
        break
    if how == "error":
        raise ValueError
"""


@pytest.mark.parametrize(
    ("how", "method", "code"),
    [
        pytest.param("break", "fork", 0, marks=pytest.mark.slow),
        pytest.param("error", "fork", 1, marks=pytest.mark.slow),
        ("SIGINT", "fork", -signal.SIGINT),
        pytest.param("SIGTERM", "fork", -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("SIGKILL", "fork", -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("SIGKILL", "spawn", -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("SIGKILL", "forkserver", -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_loader_whose_worker_waits_for_a_response_ends(
    how: str, method: str, code: int, folder: Path
) -> None:
    """The response would take an hour."""
    ended = threading.Event()

    def pause(_: int) -> None:
        ended.wait(3600)

    with raw_server(functools.partial(slow_link, folder, pause)) as server:
        url, options = where("http", server, read_timeout_s=3600)
        command = [sys.executable, "-c", LOADING, json.dumps([url, options, how, method])]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"10\n"
            if how == "SIGINT":
                os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
            elif how.startswith("SIG"):
                process.send_signal(signal.Signals[how])  # its worker does not get it
            try:
                process.communicate(
                    timeout=300
                )  # waits for the worker, too, which has the same pipes
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                ended.set()
    assert process.returncode == code


def waits_in_verify(requests: list[Request]) -> bool:
    """Return whether the large shard was requested once more than by the clients."""
    return sum(one.target.endswith("1.tar") and one.method == "GET" for one in requests) > len(
        CLIENTS
    )
