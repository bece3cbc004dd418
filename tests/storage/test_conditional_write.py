"""Test that writers that change one file at the same time lose no change: on a disk, in memory, on S3, behind a bad network."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import s3fs
from botocore.exceptions import ClientError

from shardstream.errors import AccessDeniedError, ChangedError, StorageError
from shardstream.storage import (
    LocalFolder,
    LostResponseError,
    Storage,
    is_conditional,
    publish_bytes,
    read_with_version,
    replace_if,
    update_file,
)
from tests.lossy_proxy import lossy_proxy
from tests.servers import S3Server

Place = tuple[str, dict[str, Any]]


@pytest.fixture(params=["disk", "file-url", "memory", "s3", "s3fs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """URL of a file that does not exist, and the storage options for it."""
    if request.param == "disk":
        return f"{tmp_path}/new/file.json", {}
    if request.param == "file-url":
        return f"file://{tmp_path}/new/file.json", {}
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/file.json", {}
    s3: S3Server = request.getfixturevalue("s3")
    options = s3.storage_options | ({"s3_client": "s3fs"} if request.param == "s3fs" else {})
    return f"{request.getfixturevalue('bucket')}/file.json", options


def add(identity: str) -> Callable[[bytes | None], bytes]:
    """Return a change that appends an identity to a list."""
    return lambda data: json.dumps([*json.loads(data or b"[]"), identity]).encode()


def appended(storage: Storage, url: str, identity: str) -> None:
    def is_done(data: bytes) -> bool:
        return identity in json.loads(data)

    update_file(storage, url, add(identity), is_done=is_done, timeout_s=240)


def identities(storage: Storage, url: str) -> list[str]:
    return list(json.loads(storage.read(url)))


# --- one file, one writer


def test_only_the_file_that_was_read_is_replaced(place: Place) -> None:
    url, options = place
    storage = Storage(options)
    assert is_conditional(storage, url)
    assert read_with_version(storage, url) == (None, None)
    first = replace_if(storage, url, b"1", None)
    assert read_with_version(storage, url) == (b"1", first)
    with pytest.raises(ChangedError, match="replaced"):
        replace_if(storage, url, b"2", None)
    second = replace_if(storage, url, b"2", first)
    for old in (first, None, "other"):
        with pytest.raises(ChangedError, match="replaced"):
            replace_if(storage, url, b"3", old)
    assert read_with_version(storage, url) == (b"2", second)
    filesystem, path = storage.resolve(url)
    filesystem.rm_file(path)
    with pytest.raises(ChangedError, match="replaced"):
        replace_if(storage, url, b"3", second)
    assert not storage.exists(url)


def test_no_other_file_is_left_in_the_folder(place: Place) -> None:
    url, options = place
    storage = Storage(options)
    update_file(storage, url, lambda _: b"1")
    folder, _, name = url.rpartition("/")
    files, folders = storage.list_folder(folder)
    assert ([file.url.rpartition("/")[2] for file in files], folders) == ([name], [])


def test_a_change_to_none_writes_nothing(place: Place) -> None:
    url, options = place
    storage = Storage(options)
    assert update_file(storage, url, lambda _: None) is None
    assert not storage.exists(url)
    assert update_file(storage, url, add("a")) == b'["a"]'
    assert update_file(storage, url, lambda _: None) is None
    assert identities(storage, url) == ["a"]


def test_a_file_replaced_by_another_writer_is_read_and_changed_again(place: Place) -> None:
    url, options = place
    storage, seen = Storage(options), []

    def change(data: bytes | None) -> bytes:
        seen.append(data)
        if len(seen) < 3:
            publish_bytes(Storage(options), url, json.dumps([f"other {len(seen)}"]).encode())
        return add("mine")(data)

    update_file(storage, url, change, is_done=lambda data: b"mine" in data)
    assert seen == [None, b'["other 1"]', b'["other 2"]']
    assert identities(storage, url) == ["other 2", "mine"]


def test_a_file_that_changes_each_time_is_a_clear_error(place: Place) -> None:
    url, options = place
    storage = Storage(options)

    def change(_: bytes | None) -> bytes:
        publish_bytes(Storage(options), url, uuid.uuid4().bytes)
        return uuid.uuid4().bytes

    with pytest.raises(ChangedError, match=r"other writers replaced the file each time, \d+ times"):
        update_file(storage, url, change, is_done=lambda _: False, timeout_s=0.2)


def test_an_error_of_the_change_leaves_the_file(place: Place) -> None:
    url, options = place
    storage = Storage(options)
    update_file(storage, url, add("a"))

    def change(_: bytes | None) -> bytes:
        raise KeyError("b")

    with pytest.raises(KeyError):
        update_file(storage, url, change)
    assert identities(storage, url) == ["a"]


def test_a_large_file_is_replaced(place: Place) -> None:
    url, options = place
    storage, data = Storage(options), os.urandom(9 << 20)
    publish_bytes(storage, url, data)  # on S3 in two parts, whose ETag is no MD5 of the bytes
    assert update_file(storage, url, lambda old: (old or b"") + b"1") == data + b"1"
    assert storage.read(url) == data + b"1"


# --- a server without conditions, or with faults


class FaultyS3(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs is not typed
    """A server that does not know conditions, or whose responses to writes are lost."""

    fault = ""
    num_lost = 0
    before_retry: Callable[[], None] | None = None

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        is_conditional = "IfMatch" in options or "IfNoneMatch" in options
        if self.fault == "ignores":
            options = {key: options[key] for key in options.keys() - {"IfMatch", "IfNoneMatch"}}
        elif self.fault.startswith("quotes") and not options.get("IfMatch", '"').startswith('"'):
            raise OSError(22, "no") from client_error("PreconditionFailed")
        elif is_conditional and self.fault in ("NotImplemented", "AccessDenied"):
            raise OSError(38, "no") from client_error(self.fault)
        if "IfMatch" in options:  # Ceph takes no others
            options["IfMatch"] = options["IfMatch"].strip('"')
        response = await super()._call_s3(method, *arguments, **options)
        if is_conditional and self.num_lost:
            self.num_lost -= 1
            raise ConnectionResetError("lost")
        return response


def client_error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "PutObject")


@pytest.mark.parametrize("fault", ["ignores", "NotImplemented"])
def test_a_store_without_conditions_is_detected_and_named(
    fault: str, bucket: str, s3: S3Server
) -> None:
    filesystem = FaultyS3(skip_instance_cache=True, **s3.storage_options)
    filesystem.fault = fault
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    assert not is_conditional(storage, url)
    with pytest.warns(UserWarning, match=rf"{bucket}/?: this store has no conditional writes"):
        update_file(storage, url, add("a"))
    with pytest.warns(UserWarning, match="only one process at a time may change a dataset"):
        update_file(storage, url, add("b"))
    assert identities(storage, url) == ["a", "b"]
    _, token = read_with_version(storage, url)
    with pytest.raises(ChangedError):  # a writer that came earlier is seen
        replace_if(storage, url, b"c", None)
    for data in (b"c", b"d"):
        token = replace_if(storage, url, data, token)
    assert read_with_version(storage, url) == (b"d", token)
    assert [file.url for file in storage.list_folder(bucket)[0]] == [url]


def test_a_refused_write_is_not_sent_without_its_condition(bucket: str, s3: S3Server) -> None:
    filesystem = FaultyS3(skip_instance_cache=True, **s3.storage_options)
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    update_file(storage, url, add("a"))
    filesystem.fault = "AccessDenied"
    with pytest.raises(AccessDeniedError):
        update_file(storage, url, add("b"))
    assert identities(storage, url) == ["a"]


def test_etags_are_sent_with_quotes_where_the_server_wants_them(bucket: str, s3: S3Server) -> None:
    filesystem = FaultyS3(skip_instance_cache=True, **s3.storage_options)
    filesystem.fault = "quotes"
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_file(storage, url, add("a"))
        update_file(storage, url, add("b"))
    assert identities(storage, url) == ["a", "b"]


def test_a_lost_response_is_recognised_by_the_bytes(bucket: str, s3: S3Server) -> None:
    filesystem = FaultyS3(skip_instance_cache=True, **s3.storage_options)
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    assert is_conditional(storage, url)
    for number, name in enumerate("abc"):
        filesystem.num_lost = number
        update_file(storage, url, add(name))
    assert identities(storage, url) == ["a", "b", "c"]


def test_a_file_that_is_locked_for_long_is_an_error_that_names_the_writer(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    context = multiprocessing.get_context("fork")
    locked, done = context.Event(), context.Event()

    def hold() -> None:
        folder = LocalFolder(str(tmp_path), str(tmp_path))
        folder.lock()
        locked.set()
        done.wait(60)
        folder.unlock()

    process = context.Process(target=hold)
    process.start()
    locked.wait()
    with pytest.raises(StorageError, match="another pack or ShardWriter writes here; wait"):
        update_file(Storage(), url, add("a"), timeout_s=0.1)
    done.set()
    process.join()
    update_file(Storage(), url, add("b"))
    assert identities(Storage(), url) == ["b"]


def test_a_writer_that_has_locked_the_folder_changes_files_in_it(tmp_path: Path) -> None:
    url, folder = str(tmp_path / "x"), LocalFolder(str(tmp_path), str(tmp_path))
    folder.lock()
    run_writers("threads", url, {}, writers=3, count=4)
    folder.unlock()
    update_file(Storage(), url, add("b"))
    assert len(identities(Storage(), url)) == 13
    folder.lock()
    folder.unlock()


@pytest.mark.parametrize("is_contained", [True, False])
def test_a_lost_response_before_another_write_is_an_error_unless_the_change_can_be_found(
    is_contained: bool, bucket: str, s3: S3Server
) -> None:
    class Overtaken(FaultyS3):
        async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
            try:
                return await super()._call_s3(method, *arguments, **options)
            except ConnectionResetError:
                other = add("other")(options["Body"] if is_contained else b"[]")
                await s3fs.S3FileSystem._call_s3(
                    self, method, Bucket=options["Bucket"], Key=options["Key"], Body=other
                )
                raise

    def is_done(data: bytes) -> bool:
        return "mine" in json.loads(data)

    filesystem = Overtaken(skip_instance_cache=True, **s3.storage_options)
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    assert is_conditional(storage, url)
    filesystem.num_lost = 1
    with pytest.raises(LostResponseError, match="look whether the change is in it"):
        update_file(storage, url, add("mine"))
    before = identities(storage, url)
    assert before == (["mine", "other"] if is_contained else ["other"])
    filesystem.num_lost = 1
    publish_bytes(storage, url, b"[]")
    update_file(storage, url, add("mine"), is_done=is_done)
    assert sorted(identities(storage, url)) == ["mine", "other"]


# --- many writers


def write_all(url: str, options: dict[str, Any], name: str, count: int, log: str | None) -> None:
    """Append identities; note each in a log before and after it is written."""
    storage = Storage(options)
    for number in range(count):
        identity = f"{name}-{number}"
        note(log, f"begin {identity}")
        appended(storage, url, identity)
        note(log, f"end {identity}")


def note(log: str | None, line: str) -> None:
    if log is not None:
        with Path(log).open("a") as file:
            file.write(f"{line}\n")


def run_writers(method: str, url: str, options: dict[str, Any], writers: int, count: int) -> None:
    """Let processes or threads change a file at the same time; check that every change is there once."""
    jobs = [(url, options, str(writer), count, None) for writer in range(writers)]
    if method == "threads":
        started: list[Any] = [threading.Thread(target=write_all, args=job) for job in jobs]
    else:
        context: Any = multiprocessing.get_context(method)
        started = [context.Process(target=write_all, args=job) for job in jobs]
    for one in started:
        one.start()
    for one in started:
        one.join()
        assert getattr(one, "exitcode", 0) == 0
    found = identities(Storage(options), url)
    assert len(found) == writers * count
    for writer in range(writers):  # in the order in which each wrote
        mine = [name for name in found if name.startswith(f"{writer}-")]
        assert mine == [f"{writer}-{number}" for number in range(count)]


@pytest.mark.parametrize(
    "method", ["threads", "fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_writers_at_the_same_time_lose_no_change(method: str, place: Place) -> None:
    if place[0].startswith("memory") and method != "threads":
        pytest.skip("each process has a memory of its own")
    run_writers(method, *place, writers=3, count=4)


@pytest.mark.slow
def test_ten_writers_lose_no_change(place: Place) -> None:
    method = "threads" if place[0].startswith("memory") else "fork"
    run_writers(method, *place, writers=10, count=20)


@pytest.mark.parametrize("client", ["http", "s3fs"])
@pytest.mark.parametrize(
    ("writers", "count"), [(3, 4), pytest.param(10, 20, marks=pytest.mark.slow)]
)
def test_a_network_that_breaks_off_loses_and_doubles_no_change(
    client: str, writers: int, count: int, bucket: str, s3: S3Server
) -> None:
    with lossy_proxy(s3, seed=writers) as (proxy, counts):
        options = proxy.storage_options | {"s3_client": client, "read_timeout_s": 5}
        run_writers("threads", f"{bucket}/x", options, writers, count)
    assert counts["lost"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "s3", "lossy"])
def test_killed_writers_lose_and_double_no_change(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draws, context = random.Random(kind), multiprocessing.get_context("fork")
    with ExitStack() as stack:
        url, options = str(tmp_path / "data" / "x"), dict[str, Any]()
        if kind != "disk":
            s3: S3Server = request.getfixturevalue("s3")
            url = f"{request.getfixturevalue('bucket')}/x"
            if kind == "lossy":
                s3, _ = stack.enter_context(lossy_proxy(s3, seed=0))
            options = s3.storage_options | {"read_timeout_s": 5}
        logs = [str(tmp_path / f"{number}.log") for number in range(30)]
        waiting = [(url, options, str(number), 40, log) for number, log in enumerate(logs)]
        running: list[Any] = []
        for job in waiting:
            running.append(context.Process(target=write_all, args=job))
            running[-1].start()
            if len(running) == 5:
                draws.shuffle(running)
                time.sleep(draws.uniform(0, 0.5))
                killed = running.pop()
                killed.kill()
                killed.join()
        for one in running:
            one.join()
            assert one.exitcode == 0
        texts = [Path(log).read_text() for log in logs if os.path.exists(log)]
        lines = "".join(texts).splitlines()
        begun, ended = (
            {line.split()[1] for line in lines if line.startswith(word)}
            for word in ("begin", "end")
        )
        found = identities(Storage(options), url)
    assert len(found) == len(set(found))
    assert ended <= set(found) <= begun
    assert len(begun - ended) <= 30 - 4  # those of killed writers
