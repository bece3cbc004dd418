"""Test that client errors get the right type and retry decision, without secrets."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

import shardstream as ss
from shardstream.errors import (
    AccessDeniedError,
    NotFoundError,
    OptionError,
    SourceError,
    StorageError,
)
from shardstream.storage import ErrorMeaning, Storage, classify_error, translate_errors

URL = "s3://bucket/train/a.tar"
SECRET = "hunter2"  # noqa: S105


def refused(code: str, status: int) -> botocore.exceptions.ClientError:
    """Return the error that botocore raises for a response of S3."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "GetObject")


@pytest.mark.parametrize(
    ("error", "kind", "is_retryable", "is_throttled"),
    [
        (refused("NoSuchKey", 404), NotFoundError, False, False),
        (refused("NoSuchBucket", 404), NotFoundError, False, False),
        (refused("AccessDenied", 403), AccessDeniedError, False, False),
        (refused("ExpiredToken", 400), AccessDeniedError, False, False),
        (refused("RequestTimeTooSkewed", 403), AccessDeniedError, False, False),
        (refused("InvalidObjectState", 403), StorageError, False, False),  # in Glacier
        (refused("PermanentRedirect", 301), StorageError, False, False),
        (refused("InvalidRequest", 400), StorageError, False, False),
        (refused("SlowDown", 503), StorageError, True, True),
        (refused("TooManyRequests", 429), StorageError, True, True),
        (refused("InternalError", 500), StorageError, True, False),
        (refused("RequestTimeout", 400), StorageError, True, False),
        (ConnectionRefusedError("x"), StorageError, True, False),
        (TimeoutError(), StorageError, True, False),
        (IsADirectoryError("x"), StorageError, False, False),
        (OSError(28, "No space left on device"), StorageError, False, False),
        (ValueError("x"), StorageError, False, False),
    ],
)
def test_only_temporary_errors_are_retried(
    error: Exception, kind: type[StorageError], *, is_retryable: bool, is_throttled: bool
) -> None:
    verdict = classify_error(error, URL)
    assert (type(verdict.error), verdict.meaning.is_retryable, verdict.meaning.is_throttled) == (
        kind,
        is_retryable,
        is_throttled,
    )
    assert verdict.error.shard == URL


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), KeyError("x"), OptionError("x")])
def test_errors_of_other_code_keep_their_type(error: Exception) -> None:
    with pytest.raises(type(error)):
        classify_error(error, URL)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("/data/a.tar", "check the permissions of the file"),
        ("file:///data/a.tar", "check the permissions of the file"),
        ("https://host/a.tar", "check the URL: its signature"),
        (URL, "check the credentials"),
    ],
)
def test_denied_access_names_the_credentials_of_the_store(url: str, remedy: str) -> None:
    verdict = classify_error(PermissionError(13, "Permission denied"), url)
    assert isinstance(verdict.error, AccessDeniedError)
    assert f"access refused; {remedy}" in str(verdict.error)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        (URL, "check AWS_ENDPOINT_URL and the network"),
        ("hf://datasets/a/b/c.tar", "check the URL and the network"),
        ("ftp://host/c.tar", "check the URL and the network"),
    ],
)
def test_aws_is_named_only_in_s3_errors(url: str, remedy: str) -> None:
    assert f"cannot be reached; {remedy}" in str(
        classify_error(ConnectionRefusedError("x"), url).error
    )
    refusal = str(classify_error(PermissionError(13, "Permission denied"), url).error)
    assert ("AWS" in refusal) is (url == URL)


def test_read_only_disk_is_reported() -> None:
    verdict = classify_error(OSError(errno.EROFS, os.strerror(errno.EROFS)), "/data/a.tar")
    assert "the disk is read-only; write elsewhere" in str(verdict.error)
    assert not verdict.meaning.is_retryable


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ftp://127.0.0.1:9/a.tar", {}),
        ("ftp://nosuch.invalid/a.tar", {}),
        ("hf://datasets/a/b/c.tar", {"endpoint": "http://127.0.0.1:9"}),
    ],
)
def test_errors_of_all_clients_are_translated(url: str, options: dict[str, Any]) -> None:
    message = "the server cannot be reached; check the URL and the network"
    with pytest.raises(StorageError, match=message):
        Storage({"retry_timeout_s": 0.2, **options}).read(url, 0, 10)


def test_offline_mode_of_a_client_is_an_error() -> None:
    verdict = classify_error(OfflineModeIsEnabled("offline mode is enabled"), "hf://datasets/a/b")
    assert "unset HF_HUB_OFFLINE" in str(verdict.error)
    assert not verdict.meaning.is_retryable


def test_words_of_a_message_decide_nothing() -> None:
    url = "s3://bucket/SlowDown.tar"
    for text in ("cannot read bucket/SlowDown.tar", "ConnectionResetError", "Timeout"):
        assert classify_error(OSError(text), url).meaning == ErrorMeaning(
            f"OSError: {text}", is_retryable=True
        )


def fail(text: str) -> None:
    """Raise an error with another one as its cause."""
    cause = KeyError(text)
    raise OSError(text) from cause


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("GET https://host/a.tar?X-Amz-Signature=hunter2", ()),
        ("https://me:hunter2@host/a.tar", ()),
        ("<Code>InvalidAccessKeyId</Code><AWSAccessKeyId>hunter2</AWSAccessKeyId>", ()),
        ("<StringToSign>AWS4-HMAC-SHA256\n2026 hunter2</StringToSign>", ()),
        ("<SignatureProvided>hunter2</SignatureProvided>", ()),
        ("X-Amz-Security-Token: hunter2", ()),
        ("AWSAccessKeyId=hunter2&Signature=hunter2", ()),
        ("Authorization: Bearer hunter2", ()),
        ("invalid header b'hunter2'", ("hunter2",)),
    ],
)
def test_no_secret_is_in_a_message_or_its_causes(text: str, secrets: tuple[str, ...]) -> None:
    with pytest.raises(StorageError) as raised, translate_errors(URL, lambda: secrets):
        fail(text)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"password": "hunter2\n"}, repr(b"hunter2\n")),  # read from a file, with a line feed
        ({"connection_string": "Name=me;Value=hunter2"}, "Name=me;Value=hunter2"),
        ({"client_kwargs": {"headers": {"Authorization": "Bearer hunter2"}}}, "Bearer hunter2"),
        ({"key": "some", "secret": "some-hunter2"}, "some-hunter2"),  # one is a part of the other
    ],
)
def test_no_secret_of_the_options_is_in_a_message(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StorageError) as raised, Storage(options).translate_errors(URL):
        fail(text)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_short_option_values_are_not_redacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "o")
    with (
        pytest.raises(StorageError, match="OSError: no such colour"),
        Storage().translate_errors(URL),
    ):
        fail("no such colour")


def test_url_that_cannot_be_opened_shows_no_secret() -> None:
    storage = Storage({"password": SECRET, "target_protocol": SECRET})
    with pytest.raises(OptionError, match="cannot open this URL: .*…") as raised:
        storage.info("dir://a")
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_cause_without_secrets_is_kept() -> None:
    cause = OSError("plain")
    with pytest.raises(StorageError) as raised, translate_errors(URL, lambda: (SECRET,)):
        raise cause
    assert raised.value.__cause__ is cause


def test_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "1.jpg").symlink_to("/gone/1.jpg")
    message = rf"{tmp_path}/data is a link to 'gone', which does not exist; correct the link"
    for url in ("data", "data/0.tar", "data/index.json"):
        with pytest.raises(NotFoundError, match=message):
            ss.ShardDataset(f"{tmp_path}/{url}")
    with pytest.raises(SourceError, match=message):
        ss.pack(tmp_path / "data", tmp_path / "out")
    with pytest.raises(StorageError, match="loop.*leads back to itself|leads back to itself.*loop"):
        ss.ShardDataset(tmp_path / "loop")
    with pytest.raises(NotFoundError, match=r"1\.jpg is a link to '/gone/1\.jpg'"):
        list(ss.ObjectDataset(photos))
    with pytest.raises(NotFoundError, match=message):
        ss.ShardWriter(tmp_path / "data" / "out").__enter__()
