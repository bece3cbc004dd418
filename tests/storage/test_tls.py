"""Test self-signed certificates: accepted by every client and in workers if trusted, else an error at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

import shardstream as ss
from shardstream.errors import OptionError, StorageError
from shardstream.storage import PART_BYTES, Storage, publish_bytes
from tests.servers import S3Server, skip_if_missing, start_tls
from tests.small_datasets import numbered


@pytest.fixture(scope="module")
def tls(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Path]]:
    """nginx with a self-signed certificate, and the file of that certificate."""
    with skip_if_missing(), start_tls(tmp_path_factory.mktemp("tls"), s3) as started:
        yield started


@pytest.fixture
def trusted(tls: tuple[S3Server, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Set variables that name the server and trust its certificate."""
    server, certificate = tls
    for name, value in (server.environment | {"AWS_CA_BUNDLE": str(certificate)}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("trusted")
def test_workers_read_the_same_data_as_the_main_process(bucket: str) -> None:
    dataset = ss.ShardDataset(numbered(f"{bucket}/data", nsamples=8))
    loader = ss.ShardLoader(dataset, batch_size=4, num_workers=1)
    assert len(list(loader)) == 2


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_parts_of_an_upload_are_sent(client: str, trusted: S3Server, bucket: str) -> None:
    storage, data = Storage({"s3_client": client}), os.urandom(PART_BYTES + 1)
    publish_bytes(storage, f"{bucket}/a", data)
    assert storage.read(f"{bucket}/a") == data


@pytest.mark.parametrize("client", ["s3fs", "http"])
@pytest.mark.parametrize("way", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "file", "no check"])
def test_certificate_is_trusted_by_a_variable_or_an_option(
    way: str, client: str, trusted: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_bytes(Storage(), f"{bucket}/a", b"0123")
    options: dict[str, Any] = {"s3_client": client}
    if way != "AWS_CA_BUNDLE":
        certificate = os.environ["AWS_CA_BUNDLE"]
        monkeypatch.delenv("AWS_CA_BUNDLE")
        if way == "SSL_CERT_FILE":
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
        else:
            options["client_kwargs"] = {"verify": certificate if way == "file" else False}
    storage = Storage(options)
    assert storage.read(f"{bucket}/a", 0, 2) == b"01"
    assert storage.info(f"{bucket}/a").size == 4


@pytest.mark.parametrize("client", ["s3fs", "http", "https"])
def test_untrusted_certificate_is_reported_at_once(client: str, tls: tuple[S3Server, Path]) -> None:
    server, _ = tls
    options: dict[str, Any] = server.storage_options | {"s3_client": client}
    url, message = "s3://b/a", "AWS_CA_BUNDLE"
    if client == "https":
        options, url, message = {}, f"{server.endpoint}/b/a", "SSL_CERT_FILE"
    message = "certificate is not trusted; set " + message
    begun = time.monotonic()
    with pytest.raises(StorageError, match=message) as raised:
        Storage(options | {"retry_timeout_s": 1000, "read_timeout_s": 1000}).read(url, 0, 2)
    assert time.monotonic() - begun < 500
    assert not hasattr(raised.value, "__notes__")  # no retries


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_host_name_mismatch_is_reported(client: str, trusted: S3Server, bucket: str) -> None:
    options = {"endpoint_url": trusted.endpoint.replace("127.0.0.1", "localhost")}
    with pytest.raises(StorageError, match="server name that is in the certificate.*localhost"):
        Storage(options | {"s3_client": client}).read(f"{bucket}/a", 0, 2)


def test_bundle_that_is_missing_is_reported(
    trusted: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    for client in ("s3fs", "http"):
        with pytest.raises(OptionError, match=r"none\.pem' does not exist; check AWS_CA_BUNDLE"):
            Storage({"s3_client": client}).read(f"{bucket}/a", 0, 2)
