"""Test Google Cloud Storage and Azure where gcsfs and adlfs are installed; .ci/run has an environment with them."""

from __future__ import annotations

import importlib.util
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import requests

import shardstream as ss
from shardstream.errors import AccessDeniedError, ChangedError, NotFoundError, OptionError
from shardstream.storage import (
    Storage,
    is_conditional,
    publish_bytes,
    read_with_version,
    replace_if,
    update_file,
)
from shardstream.testing import check_store
from tests.servers import ServerMissingError, skip_if_missing, start_azurite, start_gcs_emulator


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The connection string of an Azure server, with a container "test"."""
    pytest.importorskip("adlfs")
    try:
        with start_azurite(tmp_path_factory.mktemp("azurite")) as connection_string:
            yield connection_string
    except (
        ServerMissingError
    ) as error:  # in CI, too: it is installed by npm, which not every machine has
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["azure", "google", "google-variable"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Any]]]:
    """An empty folder of a store, and the storage options for it."""
    if request.param == "azure":
        yield "az://test", {"connection_string": request.getfixturevalue("azure")}
        return
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed")
    with (
        pytest.MonkeyPatch.context() as patch,
        skip_if_missing(),
        start_gcs_emulator(tmp_path_factory.mktemp("gcs")) as endpoint,
    ):
        # gcsfs reads this when it is imported; it would ask the emulator by gRPC for a minute.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        if request.param == "google":
            yield "gs://test", {"token": "anon", "endpoint_url": endpoint}
        else:
            patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
            yield "gs://test", {"token": "anon"}


@pytest.fixture
def place(folder: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return f"{folder[0]}/{uuid.uuid4().hex}", folder[1]


def test_store_passes_the_contract(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    check_store(Storage(options), url)


@pytest.mark.slow
def test_dataset_is_packed_verified_and_read_by_workers(
    place: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = place
    with ss.ShardWriter(url, max_samples=5, storage_options=options) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    report = ss.verify(url, storage_options=options)
    assert (report.samples, report.problems) == (12, ())
    for cache in (None, tmp_path, tmp_path):
        dataset = ss.ShardDataset(
            url, storage_options=options, read=ss.ReadOptions(cache_dir=cache), shuffle=True
        )
        loader = ss.ShardLoader(
            dataset.decode().to_tuple("cls"),
            batch_size=4,
            num_workers=1,
            multiprocessing_context="spawn",
        )
        found = [int(label) for batch in loader for label in batch[0]]
        assert sorted(found) == list(range(12))


# --- errors


def test_denied_access_to_azure_shows_no_secret(azure: str) -> None:
    wrong = "d3Jvbmcta2V5LXdyb25nLWtleQ=="
    parts = azure.split(";")
    parts[2] = f"AccountKey={wrong}"
    signature = "c2lnbmF0dXJl%3D"
    shared = f"sv=1&sig={signature}"
    for text in (
        ";".join(parts),
        f"BlobEndpoint={parts[3].partition('=')[2]};SharedAccessSignature={shared}",
    ):
        with pytest.raises(AccessDeniedError) as raised:
            Storage({"connection_string": text}).read("az://test/none", 0, 5)
        shown = f"{raised.value!r} {raised.value.__cause__!r}"
        assert wrong not in shown
        assert signature not in shown


def test_missing_account_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(OptionError, match="account_name") as raised:
        Storage({"sas_token": "sv=1&sig=x"}).read("az://test/none", 0, 5)
    assert not hasattr(raised.value, "__notes__")


def test_missing_container_is_named(azure: str) -> None:
    with pytest.raises(NotFoundError, match="the bucket 'nowhere' does not exist"):
        Storage({"connection_string": azure}).read("az://nowhere/a", 0, 5)


def test_file_is_read_up_to_a_limit(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    storage = Storage(options)
    for data in (b"", b"0123456789"):
        publish_bytes(storage, f"{url}/{len(data)}", data)
        assert storage.read(f"{url}/{len(data)}", max_bytes=4) == data[:4]
        assert storage.read_bounded(f"{url}/{len(data)}", 10) == data


def test_replaced_file_is_an_error(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    storage = Storage(options)
    publish_bytes(storage, f"{url}/a.tar", b"old old old")
    assert storage.read(f"{url}/a.tar", 0, 3) == b"old"
    publish_bytes(Storage(options), f"{url}/a.tar", b"new new new")
    with pytest.raises(ChangedError, match="shardstream index"):
        storage.read(f"{url}/a.tar", 4, 7)


# --- writers at the same time


def test_only_the_blob_that_was_read_is_replaced(azure: str) -> None:
    storage, url = Storage({"connection_string": azure}), f"az://test/{uuid.uuid4().hex}"
    assert is_conditional(storage, url)
    check_replacement(storage, url)


def test_an_emulator_that_ignores_conditions_is_named(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    storage, file = Storage(options), f"{place[0]}/file"
    expected = nullcontext() if url.startswith("az") else pytest.warns(match="only one process")
    with expected:
        update_file(storage, file, lambda _: b"1")
    assert [found.url for found in storage.list_folder(url)[0]] == [file]


class Generations(ThreadingHTTPServer):
    """A proxy that compares generations before uploads, as Google does and its emulator does not; one request at a time."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.lock = endpoint, threading.Lock()
        self.lost_uploads = 0
        super().__init__(("127.0.0.1", 0), GenerationsHandler)


class GenerationsHandler(BaseHTTPRequestHandler):
    server: Generations

    def do_GET(self) -> None:
        """Compare, and pass the request on."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = parse_qs(urlsplit(self.path).query)
        with self.server.lock:
            wanted = query.get("ifGenerationMatch")
            if wanted is not None:
                name = quote(query["name"][0], safe="")
                found = self.ask("GET", f"/storage/v1/b/test/o/{name}")
                generation = json.loads(found.content).get("generation", "0") if found.ok else "0"
                if wanted != [generation]:
                    self.send_error(412)
                    return
            answer = self.ask(self.command, self.path, data=body, headers=dict(self.headers))
        if wanted is not None and self.server.lost_uploads:
            self.server.lost_uploads -= 1
            self.send_error(503)
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_POST = do_DELETE = do_PUT = do_GET  # noqa: N815

    def ask(self, method: str, path: str, **options: Any) -> requests.Response:
        return requests.request(method, self.server.endpoint + path, timeout=20, **options)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_only_the_google_object_that_was_read_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("gcsfs")
    with (
        skip_if_missing(),
        start_gcs_emulator(tmp_path) as endpoint,
        Generations(endpoint) as proxy,
    ):
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        storage = Storage({"token": "anon", "endpoint_url": address})
        assert is_conditional(storage, "gs://test/a")
        check_replacement(storage, "gs://test/a")
        proxy.lost_uploads = 1
        replace_if(storage, "gs://test/a", b"4", None)
        proxy.lost_uploads = 2
        update_file(storage, "gs://test/a", lambda data: (data or b"") + b"5")
        assert storage.read("gs://test/a") == b"45"
        proxy.shutdown()


def check_replacement(storage: Storage, url: str) -> None:
    first = replace_if(storage, url, b"1", None)
    assert read_with_version(storage, url) == (b"1", first)
    second = replace_if(storage, url, b"2", first)
    for old in (first, None):
        with pytest.raises(ChangedError, match="replaced"):
            replace_if(storage, url, b"3", old)
    assert read_with_version(storage, url) == (b"2", second)
    filesystem, path = storage.resolve(url)
    filesystem.rm_file(path)
    with pytest.raises(ChangedError, match="replaced"):
        replace_if(storage, url, b"3", second)
    assert not storage.exists(url)
