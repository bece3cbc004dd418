from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.implementations.dirfs import DirFileSystem

from shardstream.errors import AccessDeniedError, NotFoundError, OptionError, StorageError
from shardstream.storage import (
    Clients,
    RangeResponse,
    Storage,
    join_url,
    parent_url,
    publish_bytes,
)
from tests.limits import module_of
from tests.servers import S3Server


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> str:
    """URL of an empty folder on each kind of storage."""
    if request.param == "local":
        return str(request.getfixturevalue("tmp_path"))
    if request.param == "memory":
        return f"memory://test-{uuid.uuid4().hex}"
    request.getfixturevalue("s3_env")
    return f"{request.getfixturevalue('bucket')}/data"


OPERATIONS: dict[str, Callable[[Storage, str], object]] = {
    "read": lambda storage, url: storage.read(url),
    "range": lambda storage, url: storage.read(url, 1, 3),
    "open": lambda storage, url: storage.open(url).__enter__(),
    "info": lambda storage, url: storage.info(url),
    "list": lambda storage, url: storage.list_folder(url),
    "glob": lambda storage, url: storage.glob(f"{url}*"),
    "find": lambda storage, url: storage.find(url),
    "exists": lambda storage, url: storage.exists(url),
    "publish": lambda storage, url: publish_bytes(storage, url, b"1"),
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


# --- on each kind of storage


def test_files_are_listed_and_read(folder: str) -> None:
    storage = Storage()
    for name in ("b.tar", "a.tar", "sub/c.tar", "sub/deeper/d.tar"):
        publish_bytes(storage, f"{folder}/{name}", name.encode())
    files, folders = storage.list_folder(folder)
    assert [(file.url, file.size) for file in files] == [(f"{folder}/{n}.tar", 5) for n in "ab"]
    assert folders == ["sub"]
    assert [file.url for file in storage.find(folder)] == [
        f"{folder}/{name}" for name in ("a.tar", "b.tar", "sub/c.tar", "sub/deeper/d.tar")
    ]
    assert [file.url for file in storage.glob(f"{folder}/*/*.tar")] == [f"{folder}/sub/c.tar"]
    for file in storage.find(folder):
        assert storage.read(file.url).decode() == file.url.removeprefix(f"{folder}/")
        assert storage.info(file.url) == file
        with storage.open(file.url) as stream:
            assert stream.read(1) == file.url.removeprefix(f"{folder}/")[:1].encode()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, None, b"0123456789"), (3, None, b"3456789"), (0, 4, b"0123"), (9, 10, b"9")],
)
def test_range_is_read(folder: str, start: int, end: int | None, expected: bytes) -> None:
    publish_bytes(Storage(), f"{folder}/a", b"0123456789")
    assert Storage().read(f"{folder}/a", start, end) == expected


@pytest.mark.parametrize(("start", "end"), [(5, 11), (0, 11), (10, 12), (500, 600)])
def test_range_past_the_end_is_refused(folder: str, start: int, end: int) -> None:
    publish_bytes(Storage(), f"{folder}/a", b"0123456789")
    with pytest.raises(StorageError, match=r"shorter than its index says|Errno 22") as raised:
        Storage().read(f"{folder}/a", start, end)
    assert raised.value.shard == f"{folder}/a"


def test_empty_file_is_read(folder: str) -> None:
    publish_bytes(Storage(), f"{folder}/empty", b"")
    assert Storage().read(f"{folder}/empty") == b""
    assert Storage().info(f"{folder}/empty").size == 0


@pytest.mark.parametrize("name", ["read", "range", "open", "info", "list"])
def test_missing_file_is_reported(folder: str, name: str) -> None:
    publish_bytes(Storage(), f"{folder}/there", b"1")
    with pytest.raises(NotFoundError, match=r"not found; check the (URL|path) ") as raised:
        OPERATIONS[name](Storage(), f"{folder}/none/a.tar")
    assert raised.value.shard == f"{folder}/none/a.tar"
    assert not Storage().exists(f"{folder}/none/a.tar")


def test_folder_is_not_a_file(folder: str) -> None:
    publish_bytes(Storage(), f"{folder}/sub/a", b"1")
    with pytest.raises(StorageError, match="a folder where a file is expected"):
        Storage().info(f"{folder}/sub")


def test_files_added_by_another_writer_are_listed(folder: str) -> None:
    mine, theirs = Storage(), Storage()
    publish_bytes(theirs, f"{folder}/a", b"1")
    assert len(mine.list_folder(folder)[0]) == 1
    publish_bytes(theirs, f"{folder}/b", b"1")
    publish_bytes(theirs, f"{folder}/a", b"22")
    assert [file.size for file in mine.list_folder(folder)[0]] == [2, 1]
    assert mine.info(f"{folder}/a").size == 2
    assert mine.exists(f"{folder}/b")


# --- S3


@operations
def test_missing_bucket_is_reported(
    operation: Callable[[Storage, str], object], s3: S3Server
) -> None:
    storage = Storage(s3.storage_options)
    url = "s3://no-such-bucket-anywhere/train/a.tar"
    if operation is OPERATIONS["exists"]:
        assert operation(storage, url) is False
        return
    with pytest.raises(
        NotFoundError, match="the bucket 'no-such-bucket-anywhere' does not exist"
    ) as raised:
        operation(storage, url)
    assert (raised.value.shard or "").startswith("s3://no-such-bucket-anywhere/")


@operations
def test_wrong_secret_is_reported_but_not_shown(
    operation: Callable[[Storage, str], object], s3: S3Server, bucket: str
) -> None:
    if s3.kind == "moto":
        pytest.skip("moto checks no signatures")
    publish_bytes(Storage(s3.storage_options), f"{bucket}/a.tar", b"1234")
    storage = Storage(s3.storage_options | {"secret": "hunter2-hunter2"})
    with pytest.raises(
        AccessDeniedError, match=r"access refused; .*AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
    ) as raised:
        operation(storage, f"{bucket}/a.tar")
    assert "SignatureDoesNotMatch" in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert s3.access_key not in str(raised.value)


def test_missing_credentials_are_reported(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    storage = Storage({"endpoint_url": s3.endpoint})
    with pytest.raises(
        AccessDeniedError, match="no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET"
    ):
        storage.read(f"{bucket}/a.tar")


def test_unreachable_endpoint_is_reported(s3: S3Server) -> None:
    options = s3.storage_options | {"endpoint_url": "http://127.0.0.1:9", "retry_timeout_s": 0.1}
    with pytest.raises(StorageError, match="the server cannot be reached; check AWS_ENDPOINT_URL"):
        Storage(options).read("s3://b/a.tar")


@pytest.mark.usefixtures("s3_env")
def test_endpoint_is_taken_from_the_environment(bucket: str) -> None:
    publish_bytes(Storage(), f"{bucket}/a.tar", b"1234")
    assert Storage().read(f"{bucket}/a.tar", 1, 3) == b"23"


# --- across processes


@pytest.mark.parametrize(
    ("given", "start_method"),
    [
        ("options", "fork"),
        pytest.param("options", "spawn", marks=pytest.mark.slow),
        ("filesystem", "fork"),
        ("folder of a filesystem", "fork"),
        pytest.param("folder of a filesystem", "spawn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_storage_reads_in_a_child_process(
    s3: S3Server, bucket: str, given: str, start_method: str
) -> None:
    storage, url = Storage(s3.storage_options), f"{bucket}/a.tar"
    publish_bytes(storage, url, b"1234")
    if given != "options":
        filesystem: Any = s3fs.S3FileSystem(**s3.storage_options, skip_instance_cache=True)
        if given != "filesystem":
            filesystem, url = (
                DirFileSystem(path=bucket.removeprefix("s3://"), fs=filesystem),
                "a.tar",
            )
        storage = Storage(filesystem=filesystem)
    assert storage.read(url) == b"1234"  # the parent has an open connection now
    context = multiprocessing.get_context(start_method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(storage.read, url, 1, 3).result(timeout=30) == b"23"
    assert storage.read(url, 2, 4) == b"34"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_does_not_use_the_parents_connections(s3: S3Server, bucket: str) -> None:
    # Only fsspec's cache holds this instance, and a child empties that cache: freeing it there would
    # remove its sockets from the epoll that both share, and the parent would hang.
    url = f"{bucket}/a.tar"
    publish_bytes(Storage(s3.storage_options), url, b"1234")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        child = Storage(s3.storage_options | {"version_aware": False})
        assert pool.submit(child.read, url).result(timeout=30) == b"1234"
    assert Storage(s3.storage_options).read(url) == b"1234"


def test_pickled_storage_holds_no_open_filesystem(s3: S3Server, bucket: str) -> None:
    storage = Storage(s3.storage_options)
    publish_bytes(storage, f"{bucket}/a.tar", b"1234")
    again = pickle.loads(pickle.dumps(storage))  # noqa: S301  (our own bytes)
    assert vars(vars(again)["_clients"])["_opened"] == {}
    assert again.read(f"{bucket}/a.tar") == b"1234"


# --- without a server


def test_user_filesystem_is_used_for_every_url() -> None:
    inner = fsspec.filesystem("memory")
    root = f"/test-{uuid.uuid4().hex}"
    storage = Storage(filesystem=DirFileSystem(path=root, fs=inner))
    publish_bytes(storage, "train/a.tar", b"1234")
    assert storage.read("train/a.tar") == b"1234"
    assert [file.url for file in storage.list_folder("train")[0]] == ["train/a.tar"]
    assert inner.cat_file(f"{root}/train/a.tar") == b"1234"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pipe:cat a.tar", "a URL must not start a command"),
        ("nosuch://b/a.tar", "Protocol not known: nosuch"),
    ],
)
@operations
def test_url_that_cannot_be_opened_is_refused(
    operation: Callable[[Storage, str], object], url: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        operation(Storage(), url)


def test_storage_option_that_is_missing_is_named() -> None:
    with pytest.raises(OptionError, match=r"cannot open this URL: .*'fo'.*reference://a"):
        Storage().read("reference://a")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(module_of(Clients), "url_to_fs", missing)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(OptionError, match=r"Install s3fs.*pip install \"\.\[s3\]\""):
        Storage().read("s3://b/a.tar")


def test_short_response_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://test-{uuid.uuid4().hex}/a"
    publish_bytes(Storage(), url, b"0123456789")
    memory = fsspec.get_filesystem_class("memory")
    monkeypatch.setattr(memory, "cat_file", lambda *_, **__: b"")
    with pytest.raises(StorageError, match=r"the connection broke off.*got 0 of 5 bytes") as raised:
        Storage({"retry_timeout_s": 0.1}).read(url, 0, 5)
    assert raised.value.shard == url


@pytest.mark.parametrize(
    ("received", "asked"), [(b"0123", [(0, None, 5), (4, None, 1)]), (b"01234", [(0, None, 5)])]
)
def test_a_read_that_is_resumed_asks_only_for_the_bytes_that_the_caller_accepts(
    received: bytes, asked: list[tuple[int, int | None, int]]
) -> None:
    url, storage = f"memory://test-{uuid.uuid4().hex}/a", Storage()
    publish_bytes(storage, url, b"0123456789")
    really_read, requests = storage.read_once, []

    def read_once(url: str, start: int, end: int | None, **options: Any) -> RangeResponse:
        requests.append((start, end, options["max_bytes"]))
        if start == 0:
            return RangeResponse(data=received, error=ConnectionResetError("cut"))
        return really_read(url, start, end, **options)

    storage.read_once = read_once  # type: ignore[method-assign,assignment]
    assert storage.read(url, max_bytes=5) == b"01234"
    assert requests == asked


def test_an_empty_range_needs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://test-{uuid.uuid4().hex}/a"
    publish_bytes(Storage(), url, b"0123456789")
    monkeypatch.setattr(Storage, "read_once", None)
    assert Storage().read(url, 5, 5) == b""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FileNotFoundError("x"), NotFoundError, "not found"),
        (PermissionError("x"), AccessDeniedError, "access refused"),
        (TimeoutError("x"), StorageError, "did not answer in time"),
        (ConnectionResetError("x"), StorageError, "the connection broke off"),
        (ConnectionRefusedError("x"), StorageError, "cannot be reached"),
        (OSError("GET https://u:hunter2@h/a?X-Amz-Signature=hunter2"), StorageError, "OSError"),
        (ValueError("x"), StorageError, "ValueError: x"),
    ],
)
def test_filesystem_errors_are_translated(
    error: Exception, kind: type[StorageError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fail)
    with pytest.raises(StorageError, match=message) as raised:
        Storage({"retry_timeout_s": 0.1}).read("memory://b/a")
    assert type(raised.value) is kind
    shown_text = "".join(traceback.format_exception(raised.value))
    assert "hunter2" not in shown_text
    assert (raised.value.__cause__ is error) is ("hunter2" not in str(error))


def test_bug_in_a_filesystem_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fail)
    with pytest.raises(ZeroDivisionError):
        Storage().read("memory://b/a")


@pytest.mark.parametrize(
    ("url", "path"), [("a.tar", True), ("file:///d/a.tar", True), ("memory://a.tar", False)]
)
def test_only_local_files_have_a_path(url: str, *, path: bool) -> None:
    found = Storage().local_path(url)
    assert (found is not None) is path
    assert found is None or Path(found).is_absolute()


@pytest.mark.parametrize(
    ("folder_url", "name", "joined"),
    [
        ("s3://b/train", "a.tar", "s3://b/train/a.tar"),
        ("s3://b/train/", "sub/a.tar", "s3://b/train/sub/a.tar"),
        ("s3://b", "/abs/a.tar", "/abs/a.tar"),
        (".", "a.tar", "./a.tar"),
    ],
)
def test_urls_are_joined_and_split(folder_url: str, name: str, joined: str) -> None:
    assert join_url(folder_url, name) == joined
    if name == "a.tar":
        assert parent_url(joined) == folder_url.rstrip("/")


def test_error_of_a_store_keeps_its_cause() -> None:
    with pytest.raises(NotFoundError) as caught:
        Storage().read("memory://no-such-folder/a.tar")
    assert type(caught.value.__cause__) is FileNotFoundError


def test_a_seek_before_the_start_of_a_remote_file_is_an_error() -> None:
    fsspec.filesystem("memory").pipe("/sought/file", b"0123456789")
    with Storage().open("memory://sought/file") as file:
        assert file.seek(-4, os.SEEK_END) == 6
        with pytest.raises(OSError, match="before the start"):
            file.seek(-11, os.SEEK_END)
        assert file.read() == b"6789"
