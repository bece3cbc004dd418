"""Test that only the requested bytes of one version of a file are accepted, with each client."""

from __future__ import annotations

import pickle
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

import shardstream as ss
from shardstream.errors import ChangedError, OptionError, StorageError
from shardstream.storage import Storage
from shardstream.testing import make_shards
from tests.raw_server import RawServer, Request, file_response, raw_server, response
from tests.static_server import serve_files

DATA = bytes(range(256)) * 40
CLIENTS = ("http", "s3fs", "web")


def open_file(client: str, server: RawServer) -> tuple[Storage, str]:
    """Return a storage that reads with a client, and the URL of the file."""
    options: dict[str, Any] = {"retry_timeout_s": 0.3}
    if client == "web":
        return Storage(options), f"{server.url}/a.bin"
    options |= {"endpoint_url": server.url, "key": "some", "secret": "thing", "s3_client": client}
    return Storage(options), "s3://bucket/a.bin"


def cached(_: Request) -> bytes:
    """Answer as a proxy that keeps one part of the file, and returns it for any request."""
    sent = f"bytes 0-99/{len(DATA)}"
    return response(206, DATA[:100], Content_Range=sent, ETag='"a"')


def shifted(request: Request) -> bytes:
    start, end = request.range or (0, None)
    stop = end or len(DATA) - 1
    sent = f"bytes {start + 1}-{stop}/{len(DATA)}"
    return response(206, DATA[start + 1 : stop + 1], Content_Range=sent, ETag='"a"')


def unnamed(request: Request) -> bytes:
    start, end = request.range or (0, None)
    return response(206, DATA[start:end], ETag='"a"')


@pytest.mark.parametrize("client", ["http", "s3fs"])
@pytest.mark.parametrize("token", ["session", None])
@pytest.mark.parametrize("status", [301, 307])
def test_redirect_of_s3_to_another_host_is_an_error(
    client: str | None, token: str | None, status: int
) -> None:
    options: dict[str, Any] = {"key": "some", "secret": "thing", "retry_timeout_s": 0.3}
    options |= {"s3_client": client} if client else {}
    options |= {"token": token} if token else {}
    with raw_server(lambda request: file_response(request, DATA)) as other:
        elsewhere = other.url.replace("127.0.0.1", "localhost")
        with raw_server(lambda _: response(status, Location=f"{elsewhere}/bucket/a.bin")) as server:
            storage = Storage(options | {"endpoint_url": server.url})
            with pytest.raises((StorageError, OptionError), match="redirects"):
                storage.read("s3://bucket/a.bin", 0, 100)
    assert not other.requests


@pytest.mark.parametrize("client", ["http", "s3fs"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"status": 301, "x_amz_bucket_region": "eu-x"},
        {"status": 307, "x_amz_bucket_region": "eu-x", "Location": "http://127.0.0.1:9/bucket/a.bin"},
        {"status": 400, "body": b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-x</Region></Error>"},
    ],
)  # fmt: skip
def test_bucket_of_another_region_is_requested_from_the_same_server(
    wrong: dict[str, Any], client: str
) -> None:
    def answer(request: Request) -> bytes:
        if "/eu-x/" in request.headers["authorization"]:
            return file_response(request, DATA)
        return response(**wrong)

    with raw_server(answer) as server:
        storage, url = open_file(client, server)
        assert storage.read(url, 0, 100) == DATA[:100]
        assert storage.read(url, 100, 200) == DATA[100:200]
    regions = [request.headers["authorization"].split("/")[2] for request in server.requests]
    assert client == "s3fs" or regions == ["us-east-1", "eu-x", "eu-x"]


@pytest.mark.parametrize("region", ["us-east-1", "eu x", "evil.example/", ""])
def test_region_that_leads_nowhere_is_an_error(region: str) -> None:
    with raw_server(lambda _: response(301, x_amz_bucket_region=region)) as server:
        storage, url = open_file("http", server)
        with pytest.raises(StorageError, match="redirects to another address"):
            storage.read(url, 0, 100)
    assert len(server.requests) == 1


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "ranges"),
    [
        (cached, [(0, None), (0, 200), (200, 300), (50, None)]),
        (shifted, [(0, None), (0, 100), (200, 300)]),
        (unnamed, [(0, None), (0, 100), (200, 300)]),
    ],
)
def test_other_bytes_than_the_requested_ones_are_an_error(
    answer: Callable[[Request], bytes], ranges: list[tuple[int, int | None]], client: str
) -> None:
    with raw_server(answer) as server:
        storage, url = open_file(client, server)
        for start, end in ranges:
            with pytest.raises(StorageError, match="other bytes than the requested"):
                storage.read(url, start, end)


@pytest.mark.parametrize("client", CLIENTS)
def test_right_part_of_a_file_is_read_from_a_proxy_that_keeps_it(client: str) -> None:
    with raw_server(cached) as server:
        storage, url = open_file(client, server)
        assert storage.read(url, 0, 100) == DATA[:100]


@pytest.mark.parametrize(
    ("headers", "second"),
    [
        ({"ETag": '"a"', "Accept_Ranges": "bytes"}, "bytes=5000-"),
        ({"Accept_Ranges": "bytes"}, None),  # the rest could be of another version
        ({"Accept_Ranges": "bytes", "ETag": 'W/"a"'}, None),  # or has the same weak one
        ({"Accept_Ranges": "bytes", "Last_Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"ETag": '"a"'}, None),  # a server without ranges would send the file from its start
    ],
)
def test_file_of_a_web_server_that_was_cut_is_resumed_where_that_is_safe(
    headers: dict[str, str], second: str | None
) -> None:
    def answer(request: Request) -> bytes:
        found = file_response(request, DATA, **headers)
        return found[: len(found) - len(DATA) + 5000] if not request.number else found

    with raw_server(answer) as server:
        storage, url = open_file("web", server)
        assert storage.read(url) == DATA
    assert [request.headers.get("range") for request in server.requests] == [None, second]


@pytest.mark.parametrize("client", CLIENTS)
def test_empty_and_small_files_are_read_whole(client: str) -> None:
    for data in (b"", b"x", DATA):
        with raw_server(lambda request, data=data: file_response(request, data)) as server:  # type: ignore[misc]
            storage, url = open_file(client, server)
            assert storage.read(url) == data


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "headers",
    [
        [{"ETag": '"1"'}, {"ETag": '"2"'}],
        [{"ETag": '"1"'}, {}],  # of a server of a group, or a proxy
        [{"Last_Modified": "Wed, 25 Nov 2026 10:00:00 GMT"}, {"Last_Modified": "Wed, 25 Nov 2026 10:00:01 GMT"}],
    ],
    ids=["etag", "lost", "time"],
)  # fmt: skip
def test_ranges_of_two_versions_of_a_file_are_an_error(
    headers: list[dict[str, str]], client: str
) -> None:
    with raw_server(lambda request: file_response(request, DATA, **headers[request.number > 0])) as server:  # fmt: skip
        storage, url = open_file(client, server)
        assert storage.read(url, 0, 100) == DATA[:100]
        again = pickle.loads(pickle.dumps(storage))  # noqa: S301  (our own bytes)
        for one in (storage, again):  # a spawned worker, too
            with pytest.raises(ChangedError, match="the file changed while it was read"):
                one.read(url, 100, 200)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_small_file_that_is_replaced_during_the_read_is_read_again(client: str) -> None:
    """As a manifest is, with each version of a dataset: the first response breaks off, the next ones are of another file."""
    other = DATA[::-1] + b"longer"

    def respond(request: Request) -> bytes:
        if request.number == 0:
            return file_response(request, DATA, ETag='"1"')[:-100]
        return file_response(request, other, ETag='"2"')

    with raw_server(respond) as server:
        storage, url = open_file(client, server)
        assert storage.read(url) == other


def test_ranges_of_two_versions_in_any_file_system_are_an_error() -> None:
    url, storage = f"memory://{uuid.uuid4().hex}/a.bin", Storage()
    memory = fsspec.filesystem("memory")
    memory.pipe_file(url, DATA)
    assert storage.read(url, 0, 100) == DATA[:100]
    assert storage.read(url, 100, 200) == DATA[100:200]
    memory.pipe_file(url, DATA[::-1])
    with pytest.raises(ChangedError, match="the file changed while it was read"):
        storage.read(url, 200, 300)


def test_range_of_a_compressed_response_is_an_error() -> None:
    def compress(request: Request) -> bytes:
        return file_response(request, DATA, Content_Encoding="gzip")

    with raw_server(compress) as server:
        storage, url = open_file("web", server)
        with pytest.raises(StorageError, match="the server compresses ranges"):
            storage.read(url, 0, 100)
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("index", ["auto", "ignore"])
def test_tars_of_a_web_server_that_are_replaced_by_equal_sizes_are_an_error(
    index: str, tmp_path: Path
) -> None:
    """Without index.json, in workers that begin after the change."""
    folder = Path(make_shards(tmp_path / "data", samples=12, per_shard=6))
    samples = [{"__key__": f"{number:06d}", "cls": number} for number in range(12)]
    other = Path(make_shards(tmp_path / "other", samples=samples[::-1], per_shard=6))
    (folder / "index.json").unlink()
    with serve_files(tmp_path) as served:
        url = f"{served.url}/data/{{000000..000001}}.tar"
        dataset = ss.ShardDataset(url, read=ss.ReadOptions(index=index))  # type: ignore[arg-type]
        loader = ss.ShardLoader(dataset, batch_size=4, num_workers=2)
        assert sum(len(batch["__key__"]) for batch in loader) == 12
        for tar in other.glob("*.tar"):
            assert tar.stat().st_size == (folder / tar.name).stat().st_size
            shutil.copy(tar, folder / tar.name)
        with pytest.raises(ChangedError, match="the file changed while it was read"):
            list(loader)
