from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import botocore.client
import botocore.config
import botocore.exceptions
import pytest
import s3fs

from tests import servers
from tests.servers import (
    S3Server,
    ServerMissingError,
    ShapedS3,
    new_bucket,
    signal_server,
    start_s3,
)


def make_client(server: S3Server) -> botocore.client.BaseClient:
    """Return a client that never retries, so that it shows each response of the server."""
    return server.client(config=botocore.config.Config(retries={"total_max_attempts": 1}))


def test_objects_are_read_whole_and_by_range(s3: S3Server, bucket: str) -> None:
    filesystem = s3fs.S3FileSystem(**s3.storage_options)
    body = bytes(range(256)) * 4096
    filesystem.pipe_file(f"{bucket}/a/b.bin", body)
    assert filesystem.cat_file(f"{bucket}/a/b.bin") == body
    assert filesystem.cat_file(f"{bucket}/a/b.bin", start=1000, end=3000) == body[1000:3000]
    assert filesystem.ls(f"{bucket}/a") == [f"{bucket.removeprefix('s3://')}/a/b.bin"]


def test_range_response_has_status_206(s3: S3Server, bucket: str) -> None:
    client, name = make_client(s3), bucket.removeprefix("s3://")
    client.put_object(Bucket=name, Key="k", Body=b"0123456789")
    answer = client.get_object(Bucket=name, Key="k", Range="bytes=2-4")
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert answer["ContentRange"] == "bytes 2-4/10"
    assert answer["Body"].read() == b"234"
    client.close()


def test_wrong_secret_is_refused(s3: S3Server, bucket: str) -> None:
    if s3.kind != "ceph":
        pytest.skip("moto takes any secret")
    options = s3.storage_options | {"secret": "wrong"}
    with pytest.raises(PermissionError):
        s3fs.S3FileSystem(**options).ls(bucket)


@pytest.mark.usefixtures("s3_env")
def test_environment_reaches_this_process_and_its_children(bucket: str) -> None:
    s3fs.S3FileSystem().pipe_file(f"{bucket}/k", b"from the parent")
    program = f"import s3fs; print(s3fs.S3FileSystem().cat_file('{bucket}/k').decode())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "from the parent"


def test_chaos_port_injects_the_configured_faults(shaped_s3: ShapedS3, bucket: str) -> None:
    shaped_s3.control("/set?profile=chaos&slow=1")
    name = bucket.removeprefix("s3://")
    plain, chaos = make_client(shaped_s3.plain), make_client(shaped_s3.chaos)
    plain.put_object(Bucket=name, Key="k", Body=b"0123456789")
    assert plain.get_object(Bucket=name, Key="k")["Body"].read() == b"0123456789"
    with pytest.raises(botocore.exceptions.ClientError, match="SlowDown") as caught:
        chaos.get_object(Bucket=name, Key="k")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert json.loads(shaped_s3.control("/stats"))["chaos"]["slow"] == 1
    plain.close()
    chaos.close()


@pytest.fixture
def without_ceph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without Ceph."""
    for script in servers.SCRIPTS.iterdir():
        (tmp_path / script.name).symlink_to(script)
    (tmp_path / "start_ceph.sh").unlink()
    (tmp_path / "start_ceph.sh").write_text("#!/bin/sh\necho 'radosgw missing' >&2\nexit 127\n")
    (tmp_path / "start_ceph.sh").chmod(0o755)
    monkeypatch.setattr(servers, "SCRIPTS", tmp_path)


@pytest.mark.usefixtures("without_ceph")
def test_missing_ceph_is_an_error_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(ServerMissingError, match="radosgw missing"), start_s3(tmp_path / "s3"):
        pytest.fail("a server started")


@pytest.mark.usefixtures("without_ceph")
def test_missing_ceph_is_replaced_by_moto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with start_s3(tmp_path / "s3") as server:
        assert server.kind == "moto"
        client = make_client(server)
        client.create_bucket(Bucket="bucket")
        assert [made["Name"] for made in client.list_buckets()["Buckets"]] == ["bucket"]
        client.close()


def test_a_server_that_does_not_answer_is_started_again(tmp_path: Path) -> None:
    with start_s3(tmp_path / "s3") as server:
        signal_server(server.workdir, "rgw" if server.kind == "ceph" else "moto", signal.SIGKILL)
        with new_bucket(server, "bucket"):
            client = make_client(server)
            assert [made["Name"] for made in client.list_buckets()["Buckets"]] == ["bucket"]
            client.close()


def test_servers_end_with_a_killed_test_run(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal; from tests.servers import start_s3\n"
        f"with start_s3(pathlib.Path({str(tmp_path)!r})) as server:\n"
        "    print(server.endpoint, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True, check=False
    )
    port = int(done.stdout.strip().rpartition(":")[2])
    deadline = time.monotonic() + 20
    # The guard removes this file after it has killed every daemon named in it.
    while (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    while (
        is_open(port) and time.monotonic() < deadline
    ):  # a killed thread may hold the socket for a moment
        time.sleep(0.05)
    assert not is_open(port)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
