"""Test one contract for all clients (s3fs, plain requests, any fsspec file system), on a real server with injected faults."""

from __future__ import annotations

import http.server
import json
import select
import socket
import socketserver
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import (
    AccessDeniedError,
    ChangedError,
    NotFoundError,
    OptionError,
    StorageError,
)
from shardstream.storage import Cancellation, Storage, publish_bytes
from tests.servers import S3Server, ShapedS3, nginx_or_skip
from tests.small_datasets import numbered

BODY = bytes(range(256)) * (3 << 12)  # 3 MiB
CLIENTS = ("s3fs", "http")
NAMES = (
    "a b.tar", "a%20b.tar", "a+b.tar", "a?b.tar", "a#b.tar", "ä/日本.tar", "a&b=c;d,e:@$!'().tar", "x//y.tar", "a/./b.tar",
    "a~{b}[c].tar",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A client and a location."""

    storage: Storage
    folder: str

    def url(self, name: str, data: bytes = BODY) -> str:
        """Write a file at the location."""
        publish_bytes(self.storage, f"{self.folder}/{name}", data)
        return f"{self.folder}/{name}"


@pytest.fixture(params=[*CLIENTS, "filesystem", "memory", "local"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "memory":
        return Place(Storage(), f"memory://test-{uuid.uuid4().hex}")
    if request.param == "local":
        return Place(Storage(), str(request.getfixturevalue("tmp_path")))
    server: S3Server = request.getfixturevalue("s3")
    folder = f"{request.getfixturevalue('bucket')}/data"
    if request.param == "filesystem":
        import s3fs  # noqa: PLC0415

        return Place(Storage(filesystem=s3fs.S3FileSystem(**server.storage_options)), folder)
    return Place(Storage(server.storage_options | {"s3_client": request.param}), folder)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Faults:
    """The chaos port: its injected faults, and its requests."""

    def __init__(self, shaped: ShapedS3, bucket: str) -> None:
        self.server = shaped
        self.url = f"{bucket}/data.bin"
        publish_bytes(Storage(shaped.plain.storage_options), self.url, BODY)
        self.set()

    def set(self, **rates: float) -> None:
        every = dict.fromkeys(("slow", "reset", "trunc", "stall", "short", "flip"), 0.0)
        every |= {"stall_s": 5} | rates
        knobs = "&".join(f"{name}={value}" for name, value in every.items())
        self.server.control(f"/set?profile=chaos&{knobs}")
        self.server.control("/clear")

    def count(self, name: str) -> int:
        return int(json.loads(self.server.control("/stats"))["chaos"].get(name, 0))

    def storage(self, client: str, **options: Any) -> Storage:
        return Storage(self.server.chaos.storage_options | {"s3_client": client, **options})


@pytest.fixture(scope="module")
def shaped(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    """One proxy for all tests of this module; each test sets all its options."""
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as proxy:
        yield proxy


@pytest.fixture
def faults(shaped: ShapedS3, bucket: str) -> Faults:
    return Faults(shaped, bucket)


# --- reads; test_store_contract.py tests the contract of stores


def test_file_of_the_expected_length_is_read(place: Place) -> None:
    url = place.url("a.tar")
    assert place.storage.read(url, 0, 10, size=len(BODY)) == BODY[:10]
    assert place.storage.read(url, size=len(BODY)) == BODY


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_read(client: str, s3: S3Server, bucket: str, name: str) -> None:
    writing = s3.client()
    writing.put_object(Bucket=bucket.removeprefix("s3://"), Key=name, Body=name.encode())
    writing.close()
    storage = Storage(s3.storage_options | {"s3_client": client})
    url, wanted = f"{bucket}/{name}", name.encode()
    if client != "s3fs" and ("//" in name or "/./" in name):
        with pytest.raises(OptionError, match="servers disagree about a key of that name"):
            storage.read(url, 1, 3)
        storage = Storage(s3.storage_options)  # s3fs reads it unless the other client is required
    assert storage.read(url) == wanted
    assert storage.read(url, 1, 3) == wanted[1:3]


def test_threads_share_a_client(place: Place) -> None:
    url = place.url("a.tar")
    starts = [i * 65_536 for i in range(48)]
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: place.storage.read(url, at, at + 65_536), starts))
    assert b"".join(parts) == BODY


# --- permanent errors


@pytest.mark.parametrize(("start", "end"), [(5, 11), (10, 12), (500, 600), (500, None)])
def test_range_past_the_end_is_an_error(place: Place, start: int, end: int | None) -> None:
    url = place.url("a.tar", b"0123456789")
    if end is None and "://" not in url:
        assert place.storage.read(url, start, end) == b""
        return
    with pytest.raises(
        ChangedError, match=r"shorter than its index says: it has 10 bytes.*shardstream index"
    ) as raised:
        place.storage.read(url, start, end)
    assert (raised.value.shard, raised.value.offset) == (url, start)


def test_length_that_differs_from_the_manifest_is_an_error(
    client: str, s3: S3Server, bucket: str
) -> None:
    place = Place(Storage(s3.storage_options | {"s3_client": client}), bucket)
    url = place.url("a.tar", b"0123456789")
    with pytest.raises(
        ChangedError, match=r"has 10 bytes, the manifest .* 12; run 'shardstream index'"
    ):
        place.storage.read(url, 0, 5, size=12)
    with pytest.raises(ChangedError, match="has 10 bytes, the manifest"):
        place.storage.read(url, 0, 12, size=12)


def test_missing_file_is_reported_at_once(place: Place) -> None:
    place.url("there.tar")
    begun = time.monotonic()
    with pytest.raises(NotFoundError, match=r"not found; check the (URL|path)"):
        place.storage.read(f"{place.folder}/none.tar", 0, 10)
    assert time.monotonic() - begun < 60  # its retry timeout


def test_missing_bucket_is_reported(client: str, s3: S3Server) -> None:
    storage = Storage(s3.storage_options | {"s3_client": client})
    name = f"none-{uuid.uuid4().hex}"
    with pytest.raises(NotFoundError, match=f"the bucket '{name}' does not exist; create it"):
        storage.read(f"s3://{name}/a.tar", 0, 10)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"secret": "hunter2-hunter2"}, "SignatureDoesNotMatch"),
        ({"key": "hunter2-hunter2"}, "InvalidAccessKeyId"),
        ({"anon": True, "key": None, "secret": None}, "AccessDenied"),
    ],
    ids=["secret", "key", "anonymous"],
)
def test_denied_access_is_reported_without_secrets(
    client: str,
    wrong: dict[str, Any],
    code: str,
    s3: S3Server,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if s3.kind == "moto":
        pytest.skip("moto checks no signatures")
    url = Place(Storage(s3.storage_options), bucket).url("a.tar")
    storage = Storage(s3.storage_options | wrong | {"s3_client": client})
    caplog.set_level("DEBUG", "shardstream")
    for read in (lambda: storage.read(url, 0, 10), lambda: storage.info(url)):
        with pytest.raises(
            AccessDeniedError, match="access refused; check the credentials"
        ) as raised:
            read()
        assert code in str(raised.value)  # the server's error code
        shown_text = "".join(traceback.format_exception(raised.value)) + repr(storage) + caplog.text
        assert "hunter2" not in shown_text
        assert s3.secret_key not in shown_text


def test_repr_of_a_dataset_shows_no_secret(
    client: str, s3: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "shardstream")
    url = numbered(f"{bucket}/data", nsamples=8, storage_options=s3.storage_options)
    options = s3.storage_options | {"s3_client": client}
    dataset = ss.ShardDataset(url, storage_options=options)
    batches = ss.ShardLoader(dataset, batch_size=4)
    next(iter(batches))
    shown_text = repr((dataset, batches, vars(dataset), batches.state_dict())) + caplog.text
    assert s3.secret_key not in shown_text
    assert s3.access_key not in shown_text


def test_unreachable_endpoint_is_reported(client: str, s3: S3Server) -> None:
    options = s3.storage_options | {"endpoint_url": "http://127.0.0.1:9", "retry_timeout_s": 0.5}
    storage = Storage(options | {"s3_client": client})
    with pytest.raises(
        StorageError, match="the server cannot be reached; check AWS_ENDPOINT_URL"
    ) as raised:
        storage.read("s3://b/a.tar", 0, 10)
    assert "tried" in raised.value.__notes__[0]


# --- retries


@pytest.mark.parametrize("fault", ["slow", "reset", "trunc", "short"])
def test_bytes_are_correct_despite_faults(client: str, fault: str, faults: Faults) -> None:
    faults.set(**{fault: 0.3})
    storage = faults.storage(client)
    starts = range(0, len(BODY), 1 << 18)
    with ThreadPoolExecutor(8) as pool:
        while not faults.count(fault):  # the bucket's name decides which requests fail
            parts = pool.map(lambda at: storage.read(faults.url, at, at + (1 << 18)), starts)
            assert b"".join(parts) == storage.read(faults.url) == BODY


def test_truncated_response_is_continued_at_its_end(client: str, faults: Faults) -> None:
    faults.set(trunc=1)
    storage = faults.storage(client)
    positions: list[int] = []
    really_read = storage.read_once

    def read_once(url: str, start: int = 0, end: int | None = None, **options: Any) -> Any:
        positions.append(start)
        if len(positions) == 6:
            faults.set()
        return really_read(url, start, end, **options)

    storage.read_once = read_once  # type: ignore[method-assign]
    assert storage.read(faults.url, 0, len(BODY)) == BODY
    assert len(positions) == 6
    assert positions == sorted(positions)
    assert positions[-1] > len(BODY) // 10  # five cuts, each at a random offset of the rest


def test_stalled_request_is_retried(client: str, faults: Faults) -> None:
    faults.set(stall=1, stall_s=300)
    storage = faults.storage(client, read_timeout_s=0.5)
    threading.Timer(1.0, faults.set).start()
    begun = time.monotonic()
    assert storage.read(faults.url, 0, 1 << 20) == BODY[: 1 << 20]
    assert time.monotonic() - begun < 200  # less than one stall


def test_server_that_always_fails_is_an_error_after_the_timeout(
    client: str, faults: Faults
) -> None:
    faults.set(slow=1)
    throttled: list[int] = []
    storage = faults.storage(client, retry_timeout_s=3)
    with pytest.raises(StorageError, match="the server throttles requests") as raised:
        storage.read(faults.url, 0, 10, on_throttle=lambda: throttled.append(1))
    assert len(throttled) == faults.count("slow") >= 2
    assert raised.value.__notes__[0].startswith(f"tried {len(throttled)} times")


class Drips(http.server.BaseHTTPRequestHandler):
    """Sends a byte at a time, with pauses."""

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Length", "1000000")
        self.send_header("Content-Range", "bytes 0-999999/1000000")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"x")
                time.sleep(0.01)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_response_of_a_few_bytes_per_second_times_out() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drips) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "s3_client": "s3fs"}
        options |= {"key": "some", "secret": "thing"}
        storage = Storage(options | {"read_timeout_s": 0.2, "retry_timeout_s": 0.3})
        with pytest.raises(StorageError, match="did not answer in time"):
            storage.read("s3://b/a", 0, 1_000_000)
        storage.resolve("s3://b/a")[0].clear_instance_cache()
        server.shutdown()
        thread.join()


@contextmanager
def forwarded(port: int, target: str) -> Iterator[None]:
    """Forward a local port to a server; close all its connections at the end."""
    ended = threading.Event()

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            host, _, number = target.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(number))) as there:
                ends = {self.request: there, there: self.request}
                while not ended.is_set():
                    for end in select.select([*ends], [], [], 0.05)[0]:
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        ends[end].sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Forward) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        ended.set()
        thread.join()


def test_read_survives_a_server_restart(client: str, s3: S3Server, bucket: str) -> None:
    url = Place(Storage(s3.storage_options), bucket).url("a.tar")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = s3.storage_options | {"endpoint_url": f"http://127.0.0.1:{port}", "s3_client": client}
    storage = Storage(options)
    with forwarded(port, s3.endpoint):
        assert storage.read(url, 0, 4) == BODY[:4]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(storage.read, url, 4, 8)
        time.sleep(1)
        assert not reading.done()
        with forwarded(port, s3.endpoint):
            assert reading.result(timeout=300) == BODY[4:8]


def test_cancelled_read_ends_soon(client: str, faults: Faults) -> None:
    faults.set(slow=1)
    storage, cancelled = faults.storage(client), Cancellation()
    threading.Timer(0.5, cancelled.set).start()
    # whether it comes within a pause or a request
    with pytest.raises(StorageError, match="the server throttles requests|was cancelled"):
        storage.read(faults.url, 0, 10, cancelled=cancelled)


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a local port; yield the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses of `retry`, and skip them."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


@pytest.mark.parametrize("operation", ["read", "info"])
def test_server_that_throttles_from_the_first_request_gets_the_full_retry_timeout(
    client: str,
    operation: str,
    faults: Faults,
    paused: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many readers that start together may get only 503 at first, which does not mean a wrong address."""
    faults.set(slow=1)
    storage = Storage(faults.server.chaos.storage_options | {"s3_client": client})

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if sum(paused) > 30:
            faults.set(slow=0)

    monkeypatch.setattr("time.sleep", pause)
    if operation == "read":
        assert storage.read(faults.url, 0, 10) == BODY[:10]
    else:
        assert storage.info(faults.url).size == len(BODY)
    assert 30 < sum(paused) < 60


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("way", [*CLIENTS, "http"])
def test_any_http_error_counts_as_a_response(way: str, status: int, paused: list[float]) -> None:
    class Fails(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with serving(Fails) as endpoint:
        if way == "http":
            storage, url = Storage(), f"{endpoint}/b/k"
        else:
            options = {
                "endpoint_url": endpoint,
                "key": "key12",
                "secret": "secret",
                "s3_client": way,
            }
            storage, url = Storage(options), "s3://b/k"
        with pytest.raises(StorageError, match=r"\[in ") as raised:
            storage.read(url, 0, 10)
    assert 50 < sum(paused) < 60
    assert raised.value.__notes__[0].startswith(f"tried {len(paused) + 1} times in ")


@pytest.mark.parametrize("way", [*CLIENTS, "http"])
def test_address_without_a_server_has_a_shorter_retry_timeout(
    way: str, paused: list[float]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = {"endpoint_url": endpoint, "key": "key12", "secret": "secret", "s3_client": way}
    storage, url = (Storage(), f"{endpoint}/k") if way == "http" else (Storage(options), "s3://b/k")
    with pytest.raises(StorageError, match="the server cannot be reached"):
        storage.read(url, 0, 10)
    assert 1 < sum(paused) < 10


def test_retry_timeout_restarts_with_each_received_byte(
    client: str, faults: Faults, paused: list[float]
) -> None:
    """A server that cuts each response after a few bytes still makes progress."""
    storage = faults.storage(client, retry_timeout_s=20)
    really_read, cut = storage.read_once, [0]

    def read_once(url: str, start: int = 0, end: int | None = None, **options: Any) -> Any:
        cut[0] += 1
        if cut[0] % 4:
            raise ConnectionResetError("cut")
        assert end is not None
        return really_read(url, start, min(end, start + 5), **options)

    storage.read_once = read_once  # type: ignore[method-assign]
    assert storage.read(faults.url, 0, 200) == BODY[:200]
    assert sum(paused) > 20


@pytest.mark.parametrize("name", ["nothing.tar", "no-bucket"])
def test_missing_file_is_requested_once(
    client: str, name: str, faults: Faults, paused: list[float]
) -> None:
    url = "s3://shardstream-no-such-bucket/a.tar" if name == "no-bucket" else f"{faults.url}.{name}"
    with pytest.raises(NotFoundError):
        faults.storage(client).read(url, 0, 10)
    assert paused == []
    assert faults.count("requests") == 1


def test_listings_are_retried(faults: Faults) -> None:
    faults.set(slow=0.6)
    storage = faults.storage("s3fs")
    while not faults.count("slow"):
        assert storage.info(faults.url).size == len(BODY)
        assert len(storage.list_folder(faults.url.rpartition("/")[0])[0]) == 1


# --- replaced files


def test_file_replaced_during_a_read_is_an_error(client: str, faults: Faults) -> None:
    storage = faults.storage(client)
    other = bytes(reversed(BODY))
    faults.set(trunc=1)
    really_read = storage.read_once

    def read_once(*arguments: Any, **options: Any) -> Any:
        response = really_read(*arguments, **options)
        if response.data and response.error is not None:
            publish_bytes(Storage(faults.server.plain.storage_options), faults.url, other)
        return response

    storage.read_once = read_once  # type: ignore[method-assign]
    with pytest.raises(ChangedError, match="the file changed while it was read: its version was"):
        storage.read(faults.url, 0, len(BODY))


def test_epoch_never_mixes_two_versions(client: str, s3: S3Server, bucket: str) -> None:
    place = Place(Storage(s3.storage_options | {"s3_client": client}), bucket)
    url = place.url("a.tar", b"old old old")
    assert place.storage.read(url, 0, 3) == b"old"
    publish_bytes(Storage(s3.storage_options), url, b"new new new")
    with pytest.raises(ChangedError, match="shardstream index"):
        place.storage.read(url, 4, 7)
    assert Storage(s3.storage_options).read(url, 4, 7) == b"new"


def test_files_written_by_this_storage_may_change(client: str, s3: S3Server, bucket: str) -> None:
    place = Place(Storage(s3.storage_options | {"s3_client": client}), bucket)
    for text in (b"old", b"new"):
        assert place.storage.read(place.url("a.tar", text), 0, 3) == text
