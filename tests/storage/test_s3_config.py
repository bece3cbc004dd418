"""Test that options and variables give both S3 clients the same server and credentials."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import s3fs

from shardstream.errors import AccessDeniedError, OptionError
from shardstream.storage import Storage, complete_s3fs_options, parse_s3_options, publish_bytes
from tests.raw_server import raw_server
from tests.servers import S3Server

KEYS = {"key": "k", "secret": "s"}
VARIABLES = {"AWS_ACCESS_KEY_ID": "vk", "AWS_SECRET_ACCESS_KEY": "vs", "AWS_SESSION_TOKEN": "vt"}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the machine's configuration files and variables; each test adds those of its server."""
    for name in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("options", "variables", "found"),
    [
        ({}, {}, {"region": "us-east-1", "endpoint": None}),
        ({}, {"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, {"region": "a"}),
        ({}, {"AWS_DEFAULT_REGION": "b"}, {"region": "b"}),
        ({"client_kwargs": {"region_name": "c"}}, {"AWS_REGION": "a"}, {"region": "c"}),
        ({}, {"AWS_ENDPOINT_URL": "http://h"}, {"endpoint": "http://h"}),
        ({}, {"AWS_ENDPOINT_URL": "http://h", "AWS_ENDPOINT_URL_S3": "http://i"}, {"endpoint": "http://i"}),
        ({"endpoint_url": "http://o"}, {"AWS_ENDPOINT_URL_S3": "http://i"}, {"endpoint": "http://o"}),
        ({"client_kwargs": {"endpoint_url": "http://o"}}, {}, {"endpoint": "http://o"}),
        (
            {}, {"AWS_ENDPOINT_URL": "http://h", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            {"endpoint": None},
        ),
        ({"anon": True}, {}, {"anonymous": True}),
        ({"requester_pays": True}, {}, {"requester_pays": True}),
        ({}, {}, {"virtual_hosts": True}),
        ({"endpoint_url": "http://o"}, {}, {"virtual_hosts": False}),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, {}, {"virtual_hosts": False}),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {}, {"virtual_hosts": True}),
        ({"config_kwargs": {"connect_timeout": 3}}, {}, {"connect_s": 3.0}),
        ({}, {"AWS_CA_BUNDLE": "/ca.pem"}, {"verify": "/ca.pem"}),
        ({}, {"SSL_CERT_FILE": "/b.pem"}, {"verify": "/b.pem"}),
        ({}, {"AWS_CA_BUNDLE": "/ca.pem", "SSL_CERT_FILE": "/b.pem"}, {"verify": "/ca.pem"}),
        ({"client_kwargs": {"verify": False}}, {"AWS_CA_BUNDLE": "/ca.pem"}, {"verify": False}),
        ({"use_listings_cache": False, "default_block_size": 1}, {}, {"connect_s": 10.0}),
    ],
)  # fmt: skip
def test_options_win_over_variables(
    options: dict[str, Any], variables: dict[str, str], found: dict[str, Any]
) -> None:
    settings = parse_s3_options(options | KEYS, variables, read_timeout_s=20.0)
    assert {name: getattr(settings, name) for name in found} == found


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"s3_additional_kwargs": {"SSECustomerKey": "x"}}, {}),
        ({"session": object()}, {}),
        ({"version_aware": True}, {}),
        ({"client_kwargs": {"aws_account_id": "1"}}, {}),
        ({"config_kwargs": {"signature_version": "s3"}}, {}),
        ({"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, {}),
        ({}, {"AWS_USE_FIPS_ENDPOINT": "true"}),
    ],
)
def test_options_known_only_to_s3fs_use_s3fs(
    options: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_s3_options(options, variables, read_timeout_s=20.0) is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="only s3fs knows one of the storage options"):
        Storage(options | {"s3_client": "http"}).read("s3://b/a.tar", 0, 1)


def credentials(options: dict[str, Any], variables: dict[str, str]) -> tuple[Any, ...]:
    settings = parse_s3_options(options, variables, read_timeout_s=20.0)
    assert settings is not None
    assert settings.credentials is not None
    found = settings.credentials()
    return found["access_key_id"], found["secret_access_key"], found["token"]


def test_credentials_are_never_combined_from_two_sources() -> None:
    assert credentials(KEYS, VARIABLES) == ("k", "s", None)
    assert credentials(KEYS | {"token": "t"}, VARIABLES) == ("k", "s", "t")
    assert credentials({}, VARIABLES) == ("vk", "vs", "vt")


def test_timeouts_reach_s3fs_unless_the_user_sets_them() -> None:
    config = complete_s3fs_options({"config_kwargs": {"read_timeout": 7}}, {}, read_timeout_s=5)[
        "config_kwargs"
    ]
    assert (config["connect_timeout"], config["read_timeout"]) == (5, 7)
    assert config["request_checksum_calculation"] == "when_required"
    assert "read_timeout" not in complete_s3fs_options({}, {}, read_timeout_s=None)["config_kwargs"]
    for given, expected in ((7, 7), (None, 20)):
        storage = Storage({"config_kwargs": {"read_timeout": given}})
        assert storage.timeouts.read_timeout_s == expected


def test_aws_region_is_passed_to_s3fs() -> None:
    completed = complete_s3fs_options(
        {"client_kwargs": {"verify": False}}, {"AWS_REGION": "a"}, read_timeout_s=None
    )
    assert completed["client_kwargs"] == {"verify": False, "region_name": "a"}


@pytest.mark.parametrize("client", ["s3fs", "http"])
@pytest.mark.parametrize("way", ["variables", "variable", "option", "options"])
def test_server_is_found_by_variables_a_profile_or_options(
    way: str,
    client: str,
    s3: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    url = f"{bucket}/a.tar"
    publish_bytes(Storage(s3.storage_options), url, b"1234")
    options: dict[str, Any] = {"s3_client": client}
    if way == "variables":
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
    elif way == "options":
        options |= s3.storage_options
    else:
        (tmp_path / "credentials").write_text(
            f"[lab]\naws_access_key_id = {s3.access_key}\naws_secret_access_key = {s3.secret_key}\n"
        )
        (tmp_path / "config").write_text(
            f"[profile lab]\nregion = eu-x\nendpoint_url = {s3.endpoint}\n"
        )
        if way == "variable":
            monkeypatch.setenv("AWS_PROFILE", "lab")
        else:
            options["profile"] = "lab"
    storage = Storage(options)
    assert storage.read(url, 1, 3) == b"23"
    assert storage.info(url).size == 4


def test_user_without_a_home_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> object:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    settings = parse_s3_options(KEYS, {}, 20.0)
    assert settings is not None
    assert settings.region == "us-east-1"


def test_profile_files_are_located_as_in_botocore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default]\nregion = eu-x\n")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    out_of_reach = "/" + "x" * 300  # as for a file in another user's home
    for place, region in (("$PLACE/config", "eu-x"), (out_of_reach, "us-east-1")):
        monkeypatch.setenv("AWS_CONFIG_FILE", place)
        settings = parse_s3_options(KEYS, {"AWS_CONFIG_FILE": place}, 20.0)
        assert settings is not None
        assert settings.region == region


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_missing_credentials_are_reported_at_once(client: str, s3: S3Server) -> None:
    storage = Storage({"endpoint_url": s3.endpoint, "s3_client": client})
    with pytest.raises(
        AccessDeniedError, match="no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET"
    ):
        storage.read(f"s3://{uuid.uuid4().hex}/a.tar", 0, 1)


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_profile_that_does_not_exist_is_reported(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AccessDeniedError, match=r"no credentials; .*nobody"):
        Storage({"s3_client": client}).read("s3://b/a.tar", 0, 1)


@pytest.mark.parametrize("client", ["s3fs", "http"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ACCESS_KEY_ID", "some\n"),
        ("AWS_SECRET_ACCESS_KEY", "thing\r"),
        ("AWS_SESSION_TOKEN", "session\r\nx-other: 1"),
        ("AWS_REGION", "eu-x\n"),
    ],
)
def test_control_character_in_a_credential_is_refused_before_a_request(
    client: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "some")
    monkeypatch.setenv(name, value)
    with raw_server(lambda _: b"") as server:
        storage = Storage({"endpoint_url": server.url} | {"s3_client": client})
        with pytest.raises(OptionError, match="has a control character") as caught:
            storage.read("s3://b/a.tar", 0, 1)
    assert not server.requests
    assert value.strip() not in str(caught.value)


@pytest.mark.parametrize("client", ["s3fs", "http"])
def test_endpoint_without_its_protocol_is_refused_at_once(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    storage = Storage(KEYS | {"s3_client": client})
    for call in (storage.read, storage.info, storage.exists):
        with pytest.raises(OptionError, match=r"not '127.0.0.1:9000'; begin AWS_ENDPOINT_URL"):
            call("s3://b/a.tar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s3_client": "boto3"}, "s3_client is 's3fs' or 'http', not 'boto3'"),
        ({"read_timeout_s": 0}, "read_timeout_s is a number of seconds over 0, not 0"),
        ({"retry_timeout_s": "long"}, "retry_timeout_s is a number of seconds over 0, not 'long'"),
    ],
)
def test_invalid_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Storage(options)
