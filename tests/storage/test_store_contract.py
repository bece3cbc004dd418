"""Test that every store passes the contract suite: fsspec stores, and S3, Google Cloud Storage and Azure through obstore.

Ceph stands in for Google (same requests for objects and listings, without Google's credentials), Azurite for Azure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from shardstream.errors import AccessDeniedError, NotFoundError, OptionError, StorageError
from shardstream.storage import Storage, parse_azure_options, parse_gcs_options
from shardstream.testing import check_reader, check_store
from tests.servers import S3Server, ServerMissingError, start_azurite

DATA = bytes(range(256)) * 20


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options of an Azure server, with a container "test"; skipped if Azurite is missing, also in CI."""
    try:
        with start_azurite(tmp_path_factory.mktemp("azurite")) as connection_string:
            yield {"connection_string": connection_string}
    except ServerMissingError as error:
        pytest.skip(str(error))


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


@pytest.mark.parametrize("client", ["obstore", "s3fs", "http"])
def test_s3_passes_the_contract(client: str, s3: S3Server, bucket: str) -> None:
    check_store(Storage(s3.storage_options | {"s3_client": client}), f"{bucket}/folder")


def test_http_passes_the_reader_contract(public: str, s3: S3Server) -> None:
    check_reader(Storage(), f"{s3.endpoint}/{public}/data.bin", DATA)


@pytest.mark.parametrize("protocol", ["gs", "gcs"])
def test_google_store_passes_the_contract(protocol: str, public: str, s3: S3Server) -> None:
    storage = Storage({"token": "anon", "endpoint_url": s3.endpoint})
    check_reader(storage, f"{protocol}://{public}/data.bin", DATA)
    assert [file.size for file in storage.list_folder(f"{protocol}://{public}")[0]] == [
        len(DATA)
    ] * 2
    with pytest.raises(AccessDeniedError, match="access refused; check the credentials"):
        storage.read(f"{protocol}://{public}/private.bin", 0, 5)


@pytest.mark.parametrize("protocol", ["az", "abfs"])
def test_azure_store_passes_the_contract(protocol: str, azure: dict[str, Any]) -> None:
    check_store(Storage(azure), f"{protocol}://test/{uuid.uuid4().hex}")


def test_dataset_on_azure_is_packed_and_read(azure: dict[str, Any], tmp_path: Path) -> None:
    url = f"az://test/{uuid.uuid4().hex}"
    with ss.ShardWriter(url, max_samples=5, storage_options=azure) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    for _ in range(2):  # the second read is from the cache
        dataset = ss.ShardDataset(url, storage_options=azure, cache_dir=tmp_path).decode()
        assert [sample["cls"] for sample in dataset] == list(range(12))
    assert list(tmp_path.rglob("shardstream-cache-*/??/*"))


def test_denied_access_to_azure_shows_no_secret(azure: dict[str, Any]) -> None:
    wrong = "d3Jvbmcta2V5LXdyb25nLWtleQ=="
    parts = azure["connection_string"].split(";")
    parts[2] = f"AccountKey={wrong}"
    storage = Storage({"connection_string": ";".join(parts)})
    with pytest.raises(AccessDeniedError) as raised:
        storage.read("az://test/none", 0, 5)
    assert wrong not in f"{raised.value!r} {raised.value.__cause__!r}"
    signature = "c2lnbmF0dXJl%3D"
    options = {
        "account_name": "devstoreaccount1",
        "sas_token": f"?sv=2021-08-06&sig={signature}",
        "connection_string": f"BlobEndpoint={parts[3].partition('=')[2]};SharedAccessSignature=sv=1&sig={signature}",
    }
    with pytest.raises(AccessDeniedError) as raised:
        Storage(options).read("az://test/none", 0, 5)
    assert signature not in f"{raised.value!r} {raised.value.__cause__!r}"


def test_missing_account_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(
        StorageError, match="no storage account is named; set AZURE_STORAGE_ACC"
    ) as raised:
        Storage({"sas_token": "sv=1&sig=x"}).read("az://test/none", 0, 5)
    assert not hasattr(raised.value, "__notes__")


def test_missing_container_is_named(azure: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError, match="the bucket 'nowhere' does not exist"):
        Storage(azure).read("az://nowhere/a", 0, 5)


# --- options


KEY = {"type": "service_account", "client_email": "a@b", "private_key": "secret"}


@pytest.mark.parametrize(
    ("options", "variables", "config"),
    [
        ({}, {}, {}),
        ({"token": "google_default", "project": "p", "access": "read_only"}, {}, {}),
        ({"token": "anon"}, {}, {"skip_signature": True}),
        ({"endpoint_url": "http://h:1/"}, {}, {"base_url": "http://h:1"}),
        (
            {},
            {"STORAGE_EMULATOR_HOST": "h:1"},
            {"base_url": "http://h:1", "skip_signature": True},
        ),
        ({"token": KEY}, {}, {"service_account_key": json.dumps(KEY)}),
        ({"token": KEY}, {"GOOGLE_BEARER_TOKEN": "x"}, None),  # obstore would combine the two
        ({"token": "browser"}, {}, None),
        ({"token": {"type": "external_account"}}, {}, None),
        ({"requester_pays": True}, {}, None),
    ],
)
def test_gcsfs_options_are_translated(
    options: dict[str, Any], variables: dict[str, str], config: dict[str, Any] | None
) -> None:
    found = parse_gcs_options(options, variables, 20.0)
    assert (None if found is None else found.config) == config


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("service_account", "service_account"),
        ("authorized_user", "application_credentials"),
        ("external_account", None),
    ],
)
def test_google_credential_files_are_read(kind: str, name: str | None, tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": kind}))
    found = parse_gcs_options({"token": str(path)}, {}, 20.0)
    assert (None if found is None else found.config) == (
        None if name is None else {name: str(path)}
    )


@pytest.mark.parametrize(
    ("options", "variables", "config"),
    [
        ({}, {}, {}),
        (
            {"account_name": "a", "account_key": "k", "blocksize": 1},
            {},
            {"account_name": "a", "account_key": "k"},
        ),
        (
            {"account_name": "a", "sas_token": "?sv=1&sig=x"},
            {},
            {"account_name": "a", "sas_key": "sv=1&sig=x"},
        ),
        (
            {"account_name": "a", "anon": True},
            {},
            {"account_name": "a", "skip_signature": True},
        ),
        (
            {"account_name": "a", "tenant_id": "t", "client_id": "c", "client_secret": "s"},
            {},
            {"account_name": "a", "tenant_id": "t", "client_id": "c", "client_secret": "s"},
        ),
        (
            {"account_name": "a", "account_host": "a.blob.example"},
            {},
            {"account_name": "a", "endpoint": "https://a.blob.example"},
        ),
        (
            {},
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=k"},
            {
                "account_name": "a",
                "account_key": "k",
                "endpoint": "https://a.blob.core.windows.net",
            },
        ),
        ({"connection_string": "nonsense"}, {}, None),
        ({"account_name": "a", "account_key": "k"}, {"AZURE_STORAGE_SAS_TOKEN": "s"}, None),
        ({"credential": object()}, {}, None),
        ({"version_aware": True}, {}, None),
    ],
)
def test_adlfs_options_are_translated(
    options: dict[str, Any], variables: dict[str, str], config: dict[str, Any] | None
) -> None:
    found = parse_azure_options(options, variables, 20.0)
    assert (None if found is None else found.config) == config


@pytest.mark.parametrize(
    ("url", "options", "package"),
    [
        ("gs://b/a.tar", {"requester_pays": True}, "gcsfs"),
        ("az://b/a.tar", {"version_aware": True}, "adlfs"),
    ],
)
def test_option_that_obstore_does_not_know_needs_the_package(
    url: str, options: dict[str, Any], package: str
) -> None:
    with pytest.raises(OptionError, match=f"only {package} knows one of the .*install {package}"):
        Storage(options).read(url, 0, 1)


SMALL = """
import sys
from shardstream.storage import Storage
print(Storage({"token": "anon", "endpoint_url": sys.argv[1]}).read(sys.argv[2], 0, 4))
print("s3fs" in sys.modules, "botocore" in sys.modules)
"""


def test_google_needs_no_client_of_s3(public: str, s3: S3Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL, s3.endpoint, f"gs://{public}/data.bin"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.splitlines() == [str(DATA[:4]), "False False"], done.stderr
