"""Test that every store passes the contract suite: S3 through each client, and fsspec stores; test_cloud_packages.py tests Google and Azure."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

from shardstream.errors import OptionError
from shardstream.storage import Storage
from shardstream.testing import check_reader, check_store
from tests.servers import S3Server

DATA = bytes(range(256)) * 20


@pytest.fixture
def public(ceph: S3Server) -> Iterator[str]:
    """Name of a public bucket with "data.bin", and the private object "private.bin"."""
    client, name = ceph.client(), f"public-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name, ACL="public-read")
    client.put_object(Bucket=name, Key="data.bin", Body=DATA, ACL="public-read")
    client.put_object(Bucket=name, Key="private.bin", Body=DATA)
    yield name
    for key in ("data.bin", "private.bin"):
        client.delete_object(Bucket=name, Key=key)
    client.delete_bucket(Bucket=name)
    client.close()


def test_local_store_passes_the_contract(tmp_path: Path) -> None:
    check_store(Storage(), str(tmp_path))


def test_memory_store_passes_the_contract() -> None:
    check_store(Storage(), f"memory://test-{uuid.uuid4().hex}")


def test_user_filesystem_passes_the_contract() -> None:
    check_store(Storage(filesystem=MemoryFileSystem()), f"memory://test-{uuid.uuid4().hex}")


def test_s3fs_as_a_user_filesystem(s3: S3Server, bucket: str) -> None:
    check_store(Storage(filesystem=s3fs.S3FileSystem(**s3.storage_options)), f"{bucket}/folder")


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_s3_passes_the_contract(client: str, s3: S3Server, bucket: str) -> None:
    check_store(Storage(s3.storage_options | {"s3_client": client}), f"{bucket}/folder")


def test_http_passes_the_reader_contract(public: str, s3: S3Server) -> None:
    check_reader(Storage(), f"{s3.endpoint}/{public}/data.bin", DATA)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("gs://b/a.tar", "gcsfs", "gcs"), ("abfs://b/a.tar", "adlfs", "azure")],
)
def test_store_whose_package_is_missing_names_the_extra(url: str, package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(OptionError, match=f"needs one more package .*{extra}"):
        Storage().read(url, 0, 1)
