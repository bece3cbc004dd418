"""Files over plain http: what a server answers, or does not, in words; never the query of a signed URL."""

from __future__ import annotations

import http.server
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.errors import (
    CacheWarning,
    ManifestError,
    MissingError,
    RefusedError,
    SourceError,
    StorageError,
)
from shardstream.storage.cache import open_cache
from shardstream.storage.filesystem import Storage

SECRET = "hunter2"  # noqa: S105


class Answers(http.server.BaseHTTPRequestHandler):
    """The first part of the path is the status; a file called "unsaid" comes without a word of its length."""

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
        """Say nothing."""


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
        (404, MissingError, "nothing is there"),
        (403, RefusedError, "access refused; check the URL: its signature may have expired"),
        (500, StorageError, "the server failed"),
        (503, StorageError, "the server asks for fewer requests"),
        (None, StorageError, "the server cannot be reached; check the URL and the network"),
    ],
)
def test_what_a_server_answers_is_told(
    operation: Callable[[Storage, str], object],
    status: int | None,
    kind: type[StorageError],
    message: str,
    server: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "shardstream")
    storage = Storage({"patience_s": 0.3})
    host = "http://127.0.0.1:9/0" if status is None else f"{server}/{status}"
    if (status, operation) == (404, OPERATIONS[3]):
        assert operation(storage, f"{host}/a.tar?sig={SECRET}") is False
        return
    with pytest.raises(kind, match=message) as raised:
        operation(storage, f"{host}/a.tar?X-Amz-Signature={SECRET}")
    assert type(raised.value) is kind
    assert SECRET not in "".join(traceback.format_exception(raised.value)) + caplog.text


@pytest.mark.parametrize(("start", "end"), [(2, 4), (0, 4), (2, 10)])
def test_a_server_that_sends_all_whatever_is_asked_for_is_told(
    start: int, end: int, server: str
) -> None:
    message = f"10 bytes came where {end - start} were asked for: the server does not know ranges"
    with pytest.raises(StorageError, match=message):
        Storage().read(f"{server}/200/a.tar", start, end)


@pytest.mark.parametrize(
    "operation",
    [
        lambda url, _: ss.ShardDataset(f"{url}/unsaid.tar"),
        lambda url, _: ss.ShardDataset(f"{url}/unsaid.tar", index="ignore"),
        lambda url, _: ss.ObjectDataset.from_objects([f"{url}/unsaid.txt"]),
        lambda url, folder: ss.pack(f"{url}/unsaid.tar", folder),
        lambda url, _: ss.verify(f"{url}/unsaid.tar"),
    ],
)
def test_a_server_that_does_not_tell_lengths_is_told(
    operation: Callable[[str, Path], object], server: str, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="does not tell how long the file is"):
        operation(f"{server}/200", tmp_path / "out")


def test_what_needs_no_length_is_read_without_one(server: str, tmp_path: Path) -> None:
    url = f"{server}/200/unsaid.csv"
    with pytest.raises(SourceError, match="the source is empty"):  # a table without a row
        ss.pack(url, tmp_path / "out")
    with pytest.warns(CacheWarning, match="or no length"):
        assert Storage(cache=open_cache(tmp_path / "cache", "100MB")).read(url) == b"0123456789"
    with pytest.raises(ManifestError):  # ten digits are none
        ss.ShardDataset(f"{server}/200/unsaid.json")


def test_a_signed_url_is_read(server: str) -> None:
    assert Storage().read(f"{server}/200/a.tar?X-Amz-Signature={SECRET}", 0, 10) == b"0123456789"
