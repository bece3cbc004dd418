"""Test files over plain HTTP: messages for each response, without the query of a signed URL."""

from __future__ import annotations

import http.server
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import (
    AccessDeniedError,
    CacheWarning,
    ManifestError,
    NotFoundError,
    SourceError,
    StorageError,
    get_logger,
)
from shardstream.storage import Storage, locate_shards, open_cache
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.raw_server import raw_server, response
from tests.static_server import serve_files

SECRET = "hunter2"  # noqa: S105


class Answers(http.server.BaseHTTPRequestHandler):
    """Server whose status is the first part of the path; the file "unsaid" is sent without its length."""

    def do_GET(self) -> None:
        status = int(self.path.split("/")[1])
        body = b"0123456789" if status == 200 else b""
        self.send_response(status)
        if "unsaid" not in self.path:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  (as http.server looks it up)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


OPERATIONS: tuple[Callable[[Storage, str], object], ...] = (
    lambda storage, url: storage.read(url),
    lambda storage, url: storage.read(url, 0, 4),
    lambda storage, url: storage.info(url),
    lambda storage, url: storage.exists(url),
)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (404, NotFoundError, "not found"),
        (403, AccessDeniedError, "access refused; check the URL: its signature may have expired"),
        (500, StorageError, "the server failed"),
        (503, StorageError, "the server throttles requests"),
        (None, StorageError, "the server cannot be reached; check the URL and the network"),
    ],
)
def test_http_errors_are_reported(
    operation: Callable[[Storage, str], object],
    status: int | None,
    kind: type[StorageError],
    message: str,
    server: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "shardstream")
    storage = Storage({"retry_timeout_s": 0.3})
    host = "http://127.0.0.1:9/0" if status is None else f"{server}/{status}"
    if (status, operation) == (404, OPERATIONS[3]):
        assert operation(storage, f"{host}/a.tar?sig={SECRET}") is False
        return
    with pytest.raises(kind, match=message) as raised:
        operation(storage, f"{host}/a.tar?X-Amz-Signature={SECRET}")
    assert type(raised.value) is kind
    assert SECRET not in "".join(traceback.format_exception(raised.value)) + caplog.text


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("status", "kind", "is_retried"),
    [
        *((status, StorageError, False) for status in (400, 405, 407, 421, 451, 501, 505)),
        (401, AccessDeniedError, False),
        (410, NotFoundError, False),
        *((status, StorageError, True) for status in (408, 425, 429, 500, 507, 509, 520)),
    ],
)
def test_only_404_and_410_say_that_a_file_is_missing(
    operation: Callable[[Storage, str], object],
    status: int,
    kind: type[StorageError],
    is_retried: bool,
) -> None:
    with raw_server(lambda _: response(status)) as server:
        storage = Storage({"retry_timeout_s": 0.3})
        if (status, operation) == (410, OPERATIONS[3]):
            assert operation(storage, f"{server.url}/a.tar") is False
            return
        with pytest.raises(StorageError, match=f"{status}") as raised:
            operation(storage, f"{server.url}/a.tar")
    assert type(raised.value) is kind
    requests = [request.method for request in server.requests]
    assert (requests.count("GET") > 1) is is_retried


def while_handling_another_error(
    operation: Callable[[Storage, str], object], storage: Storage, url: str
) -> None:
    try:
        storage.read("/no/such/file")
    except NotFoundError:
        operation(storage, url)


@pytest.mark.parametrize("client", ["http", "s3fs", None])
def test_error_that_is_being_handled_does_not_make_a_file_missing(client: str | None) -> None:
    """A server fails while a caller handles the error of another file."""
    with raw_server(lambda _: response(500)) as server:
        options: dict[str, Any] = {"endpoint_url": server.url, "key": "some", "secret": "thing"}
        options |= {"s3_client": client, "retry_timeout_s": 0.3}
        url = "s3://bucket/a.tar" if client else f"{server.url}/a.tar"
        storage = Storage(options if client else {"retry_timeout_s": 0.3})
        for operation in OPERATIONS:
            with pytest.raises(StorageError, match="the server failed") as raised:
                while_handling_another_error(operation, storage, url)
            assert type(raised.value) is StorageError


def test_server_that_never_answers_is_asked_once() -> None:
    """A table may have links to it in every row."""
    with socket.create_server(("127.0.0.1", 0)) as silent, raw_server(lambda _: response(404)) as s:
        host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        storage = Storage({"read_timeout_s": 0.2, "retry_timeout_s": 0.3})
        with pytest.raises(StorageError, match="did not answer in time"):
            storage.read(f"{host}/0.jpg")
        silent.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
        for operation in OPERATIONS:
            with pytest.raises(StorageError, match=f"{host} did not answer a moment ago"):
                operation(storage, f"{host}/1.jpg")
        with pytest.raises(BlockingIOError):  # no connection
            silent.accept()
        with pytest.raises(NotFoundError):  # other servers are
            storage.read(f"{s.url}/1.jpg")


@pytest.mark.parametrize(("start", "end"), [(2, 4), (0, 4), (2, 10), (2, 12), (2, None)])
def test_server_that_ignores_ranges_is_reported(start: int, end: int, server: str) -> None:
    message = "the server ignored the requested range and sent more bytes"
    with pytest.raises(StorageError, match=message):
        Storage().read(f"{server}/200/a.tar", start, end)


@pytest.mark.parametrize(
    "operation",
    [
        lambda url, _: ss.ShardDataset(f"{url}/unsaid.tar"),
        lambda url, _: ss.ShardDataset(f"{url}/unsaid.tar", read=ss.ReadOptions(index="ignore")),
        lambda url, _: ss.ObjectDataset([f"{url}/unsaid.txt"]),
        lambda url, folder: ss.pack(f"{url}/unsaid.tar", folder),
        lambda url, _: ss.verify(f"{url}/unsaid.tar"),
    ],
)
def test_server_without_content_length_is_reported(
    operation: Callable[[str, Path], object], server: str, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="the server sends no Content-Length"):
        operation(f"{server}/200", tmp_path / "out")


def test_whole_files_are_read_without_content_length(server: str, tmp_path: Path) -> None:
    url = f"{server}/200/unsaid.csv"
    with pytest.raises(SourceError, match="the source is empty"):  # the CSV has no rows
        ss.pack(url, tmp_path / "out")
    with pytest.warns(CacheWarning, match="does not report its length"):
        assert Storage(cache=open_cache(tmp_path / "cache", "100MB")).read(url) == b"0123456789"
    with pytest.raises(ManifestError):  # ten digits are not a manifest
        ss.ShardDataset(f"{server}/200/unsaid.json")


class Floods(Answers):
    """Server whose HEAD gives ten bytes or no length; the file is endless, or arrives byte by byte."""

    def do_GET(self) -> None:
        self.send_response(206 if "Range" in self.headers and "lies" in self.path else 200)
        if self.command == "HEAD" and "lies" in self.path:
            self.send_header("Content-Length", "10")
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(OSError):
            while "drips" in self.path:
                self.wfile.write(b" ")
                time.sleep(0.01)
            while True:
                self.wfile.write(bytes(1 << 16))
                self.server.sent += 1 << 16  # type: ignore[attr-defined]

    do_HEAD = do_GET  # noqa: N815  (as http.server looks it up)


@pytest.fixture
def flooding() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Floods) as serving:
        serving.sent = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["endless", "lies"])
def test_endless_manifest_is_read_to_its_limit(
    name: str, flooding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, locate_shards, MANIFEST_LIMIT_BYTES=1 << 20)
    with pytest.raises(ManifestError, match="over 1048576 bytes is over the limit of 1048576"):
        ss.ShardDataset(f"http://127.0.0.1:{flooding.server_port}/{name}/index.json")
    assert flooding.sent < 64 << 20


@pytest.mark.parametrize(
    "read",
    [
        lambda url, folder: ss.ShardDataset(str(folder), subset=f"{url}/keys.txt"),
        lambda url, folder: ss.pack(folder / "in", folder / "out", classes=f"{url}/c.json"),
        lambda url, folder: ss.ShardDataset(str(folder), subset=f"{url}/a.npy"),
        lambda url, folder: ss.ShardDataset(str(folder), weights=f"{url}/a.npy"),
        lambda url, folder: ss.join(
            ss.ShardDataset(str(folder)), {f"{url}/a.parquet": {"txt": "a"}}
        ),
    ],
    ids=["keys", "classes", "subset", "weights", "join"],
)
def test_endless_file_beside_the_shards_is_read_to_its_limit(
    read: Callable[[str, Path], object],
    flooding: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, Storage, SIDECAR_LIMIT_BYTES=1 << 20)
    make_shards(tmp_path / "data", samples=4, per_shard=4)
    (tmp_path / "data" / "in" / "a").mkdir(parents=True)
    (tmp_path / "data" / "in" / "a" / "0.png").write_bytes(b"x")
    with pytest.raises(StorageError, match="over 1,048,576 bytes, the limit"):
        read(f"http://127.0.0.1:{flooding.server_port}/endless", tmp_path / "data")
    assert flooding.sent < 64 << 20


def test_endless_range_response_is_read_to_the_requested_size(flooding: Any) -> None:
    with pytest.raises(StorageError, match="the server ignored the requested range"):
        Storage().read(f"http://127.0.0.1:{flooding.server_port}/endless", 0, 1000)
    assert flooding.sent < 64 << 20


def test_server_that_sends_slowly_times_out(flooding: Any) -> None:
    storage = Storage({"read_timeout_s": 0.2, "retry_timeout_s": 0.3})
    with pytest.raises(StorageError, match="did not answer in time"):
        storage.read(f"http://127.0.0.1:{flooding.server_port}/drips/index.json")


def test_silent_server_is_not_a_missing_file() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        for operation in OPERATIONS:
            with pytest.raises(StorageError, match="did not answer in time") as raised:
                operation(Storage({"read_timeout_s": 0.2, "retry_timeout_s": 0.3}), url)
            assert type(raised.value) is StorageError


def test_signed_url_is_read(server: str) -> None:
    assert Storage().read(f"{server}/200/a.tar?X-Amz-Signature={SECRET}", 0, 10) == b"0123456789"


@pytest.mark.parametrize("name", ["data", "data/*.tar"])
def test_warnings_show_no_password_of_a_url(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=12, per_shard=5))
    (folder / "index.json").unlink()
    with serve_files(tmp_path) as served:
        host = served.url.removeprefix("http://")
        with suppress(StorageError):  # this server gives relative links
            ss.ShardDataset(f"http://me:{SECRET}@x@{host}/{name}")
    get_logger("shardstream.some").warning("%s: odd", f"http://me:{SECRET}@x@{host}/a?sig={SECRET}")
    assert f"http://{host}/a?…" in caplog.text
    assert SECRET not in caplog.text


# --- folders of a static server


def read_labels(url: str) -> list[int]:
    dataset = ss.ShardDataset(url, shuffle=True)
    assert len(dataset) == 12
    return sorted(int(sample["cls"]) for sample in dataset.decode())


@pytest.fixture(params=[True, False])
def served_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with shards and indexes, with or without a manifest."""
    folder = Path(make_shards(tmp_path / "served" / "data", samples=12, per_shard=5))
    if not request.param:
        (folder / "index.json").unlink()
    return folder


@pytest.mark.parametrize("name", ["data", "data/", "data/index.json"])
def test_folder_with_a_manifest_needs_no_listing(name: str, tmp_path: Path) -> None:
    make_shards(tmp_path / "data", samples=12, per_shard=5)
    with serve_files(tmp_path, lists_folders=False) as served:
        assert read_labels(f"{served.url}/{name}") == list(range(12))
        assert not [path for _, path, _ in served.requests if path in ("/data", "/data/")]


@pytest.mark.parametrize("lists_folders", [True, False])
def test_shards_named_by_a_pattern_need_no_listing(
    lists_folders: bool, served_folder: Path
) -> None:
    with serve_files(served_folder.parent, lists_folders=lists_folders) as served:
        assert read_labels(f"{served.url}/data/{{000000..000002}}.tar") == list(range(12))


@pytest.mark.parametrize("name", ["data", "data/", "data/*.tar"])
def test_shards_that_a_page_links_to_are_read_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=12, per_shard=5))
    (folder / "index.json").unlink()
    with serve_files(tmp_path) as served:
        assert read_labels(f"{served.url}/{name}") == list(range(12))
    assert "the tars are the 3 that this page links to" in caplog.text


@pytest.mark.parametrize("name", ["data/", "data/*.tar"])
def test_links_of_a_page_are_taken_once_and_only_those_of_the_folder(
    name: str, tmp_path: Path
) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=12, per_shard=5))
    (folder / "index.json").unlink()
    make_shards(tmp_path / "data" / "sub", samples=3)
    make_shards(tmp_path, samples=3)
    tars = sorted(path.name for path in folder.glob("*.tar"))
    links = [tars[0], f"/data/{tars[0]}", f"{tars[0]}?dl=1", f"./{tars[1]}", tars[2]]
    links += ["sub/000000.tar", "../000000.tar"]
    page = "".join(f'<a href="{link}">x</a>\n' for link in links)
    (folder / "index.html").write_text(f"<html>{page}</html>")
    with serve_files(tmp_path) as served:
        assert read_labels(f"{served.url}/{name}") == list(range(12))


@pytest.mark.parametrize("name", ["data/", "data/*.tar"])
def test_folder_without_manifest_and_listing_says_what_to_do(name: str, tmp_path: Path) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=12, per_shard=5))
    (folder / "index.json").unlink()
    message = r"no index.json, and the web server does not list it.*\{000000..000099\}.tar"
    with (
        serve_files(tmp_path, lists_folders=False) as served,
        pytest.raises(AccessDeniedError, match=message),
    ):
        ss.ShardDataset(f"{served.url}/{name}")


@pytest.mark.parametrize("name", ["data/{000000..000002}.tar", "data/"])
def test_shards_of_a_web_server_are_indexed_here(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(make_shards(tmp_path / "served" / "data", samples=12, per_shard=5))
    for path in folder.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    with serve_files(folder.parent, lists_folders=name == "data/") as served:
        ss.index(f"{served.url}/{name}", to=tmp_path / "mine")
        assert ("that this page links to" in caplog.text) is (name == "data/")
        assert read_labels(str(tmp_path / "mine")) == list(range(12))
