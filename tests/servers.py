"""Temporary S3 servers on loopback: Ceph, or moto if Ceph is missing, and nginx for faults.

The scripts in `tests/s3` do the work; they also run on their own, for benchmarks. Here they get free
ports and a guard, which stops the daemons within two seconds after this process ends, even if it
is killed. With `CI=true` in the environment a missing server is an error: in CI, a test that
runs against a weaker server, or not at all, would count as passed.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import getpass
import hmac
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

SCRIPTS = Path(__file__).parent / "s3"

_PORTS = range(10_000, 32_000)  # below the ephemeral ports of the kernel
_NOT_INSTALLED = 127
_ATTEMPTS = 5


class ServerError(Exception):
    """A test server did not start; the message ends with the output of its script."""


class ServerMissingError(ServerError):
    """A test server is not installed; the message names the Debian packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """An S3 endpoint, and the user that owns all its buckets.

    `kind` is "ceph" or "moto"; moto checks neither signatures nor checksums.
    """

    endpoint: str
    access_key: str
    secret_key: str
    region: str
    kind: Literal["ceph", "moto"]
    workdir: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any AWS client finds this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """Arguments of `s3fs.S3FileSystem`, for tests that do not change the environment."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": self.region},
        }

    @property
    def boto3_options(self) -> dict[str, Any]:
        """Arguments of `boto3.client` and `boto3.resource`."""
        return {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": self.region,
        }

    def client(self, **options: Any) -> Any:
        """Return a boto3 client, which the caller closes."""
        return boto3.client("s3", **self.boto3_options, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedS3:
    """One S3 server behind nginx, through three ports.

    `plain` passes through; `shaped` gives 30 ms to the first byte and 80 MB/s a connection;
    `chaos` answers 503 SlowDown, resets, cuts and stalls (5, 2, 1 and 1 % of object GETs).
    """

    plain: S3Server
    shaped: S3Server
    chaos: S3Server
    control_endpoint: str
    workdir: Path

    def control(self, path: str) -> str:
        """Configure or query the proxy; return its counts and configuration as JSON text.

        `path` is "/stats", "/clear" (counts and draws, not the configuration) or
        "/set?profile=chaos&slow=0.5&seed=7"; the knobs are listed on top of `chaos.lua`.

        Raises:
            urllib.error.HTTPError: the path or the knob is unknown.
        """
        with urllib.request.urlopen(f"{self.control_endpoint}{path}", timeout=10) as answer:  # noqa: S310
            return str(answer.read(), "utf-8")


def in_ci() -> bool:
    """Return whether a missing server must fail the run."""
    return os.environ.get("CI") == "true"


@contextmanager
def start_s3(workdir: Path) -> Iterator[S3Server]:
    """Run Ceph's S3 gateway, or moto where Ceph is not installed, and stop it on exit.

    Logs stay in `workdir`, data do not. Objects live in memory, in Ceph at twice their size.

    Raises:
        ServerMissingError: Ceph is not installed and this is CI.
        ServerError: the server does not start.
    """
    try:
        kind: Literal["ceph", "moto"] = "ceph"
        try:
            _start("start_ceph.sh", workdir, num_ports=2)
        except ServerMissingError:
            if in_ci():
                raise
            kind = "moto"
            _start("start_moto.sh", workdir, num_ports=1)
        yield _read_server(workdir, kind)
    finally:
        _stop(workdir)
        # pytest keeps the folders of three runs, which would be 40 MB each.
        for data in ("mon", "osd"):
            shutil.rmtree(workdir / data, ignore_errors=True)


@contextmanager
def start_nginx(workdir: Path, s3: S3Server) -> Iterator[ShapedS3]:
    """Run nginx in front of `s3`, and stop it on exit.

    `workdir/logs/access.log` names every request with its range, bytes sent and fault.

    Raises:
        ServerMissingError: nginx or its lua module is not installed.
        ServerError: nginx does not start.
    """
    upstream = workdir / "upstream"
    upstream.mkdir(parents=True, exist_ok=True)
    (upstream / "s3.env").write_text(
        f"S3_ENDPOINT={s3.endpoint}\nS3_ACCESS_KEY={s3.access_key}\n"
        f"S3_SECRET_KEY={s3.secret_key}\nS3_REGION={s3.region}\n"
    )
    try:
        port = _start("start_nginx.sh", workdir, str(upstream), num_ports=4)
        plain, shaped, chaos = (
            replace(s3, endpoint=f"http://127.0.0.1:{port + offset}") for offset in range(3)
        )
        yield ShapedS3(
            plain=plain,
            shaped=shaped,
            chaos=chaos,
            control_endpoint=f"http://127.0.0.1:{port + 3}",
            workdir=workdir,
        )
    finally:
        _stop(workdir)


@contextmanager
def nginx_or_skip(workdir: Path, s3: S3Server) -> Iterator[ShapedS3]:
    """`start_nginx` for a test or fixture: skipped if nginx is not installed, except in CI."""
    with skip_if_missing(), start_nginx(workdir, s3) as proxy:
        yield proxy


@contextmanager
def skip_if_missing() -> Iterator[None]:
    """Skip the test or fixture whose server is not installed, except in CI."""
    try:
        yield
    except ServerMissingError as error:
        if in_ci():
            raise
        import pytest  # noqa: PLC0415  (benchmarks start servers without it)

        pytest.skip(str(error))


def signal_server(workdir: Path, name: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a server that was started here: "nginx", or "rgw" for Ceph."""
    lines = (workdir / "pids").read_text().splitlines()
    leaders = [int(pid) for pid, found, *_ in map(str.split, lines) if found == name]
    for leader in leaders:  # each is the leader of its own session
        os.killpg(leader, number)


def restart_nginx(proxy: ShapedS3) -> None:
    """Start a killed proxy again at the same ports, with default settings."""
    _stop(proxy.workdir)  # remaining processes
    port = proxy.plain.endpoint.rpartition(":")[2]
    _run_again("start_nginx.sh", proxy.workdir, str(proxy.workdir / "upstream"), port)


def restart_rgw(workdir: Path) -> None:
    """Start a killed Ceph gateway again, with its data."""
    _run_again("restart_rgw.sh", workdir)


@contextmanager
def new_bucket(s3: S3Server, name: str | None = None) -> Iterator[str]:
    """Make an empty bucket, "s3://NAME", and delete it with its contents at the end.

    A server that does not answer is started again, without its data: a Ceph whose daemons hang would fail each later test of S3.
    """
    name = name or f"test-{uuid.uuid4().hex}"
    try:
        made = _resource(s3).create_bucket(Bucket=name)
    except (ReadTimeoutError, EndpointConnectionError):
        endpoint = _read_server(s3.workdir, s3.kind).endpoint  # `s3` may be a proxy's port
        _stop(s3.workdir)
        _run_again(f"start_{s3.kind}.sh", s3.workdir, endpoint.rpartition(":")[2])
        made = _resource(s3).create_bucket(Bucket=name)
    yield f"s3://{made.name}"
    made.object_versions.delete()
    made.delete()


@functools.cache
def _resource(s3: S3Server) -> Any:
    patience = Config(read_timeout=30, retries={"total_max_attempts": 2})
    # Making one takes longer than making a bucket.
    return boto3.resource("s3", **s3.boto3_options, config=patience)


def _start(script: str, workdir: Path, *arguments: str, num_ports: int) -> int:
    """Start a server on neighbouring free ports; returns the first of them."""
    said = ""
    with _one_start_at_a_time():
        for _ in range(_ATTEMPTS):
            port = _find_free_ports(num_ports)
            done = _script(script, workdir, *arguments, str(port))
            if done.returncode == 0:
                return port
            said = done.stderr.strip()
            if done.returncode == _NOT_INSTALLED:
                raise ServerMissingError(said)
            # The messages if another process took the port.
            if "is taken" not in said and "died" not in said:
                break
    raise ServerError(f"{script} failed, see {workdir}: {said}")


def _run(script: str, workdir: Path, *arguments: str) -> None:
    done = _script(script, workdir, *arguments)
    if done.returncode:
        raise ServerError(f"{script} failed, see {workdir}: {done.stderr.strip()}")


def _run_again(script: str, workdir: Path, *arguments: str) -> None:
    """Run a script that starts a server again; the port of a killed one may be in use for a moment."""
    for _ in range(_ATTEMPTS):
        if _script(script, workdir, *arguments).returncode == 0:
            return
        time.sleep(1)
    _run(script, workdir, *arguments)


def _script(script: str, workdir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    guarded = {"S3_GUARD_PID": str(os.getpid()), "PYTHON": sys.executable}
    return subprocess.run(
        [SCRIPTS / script, workdir, *arguments],
        env=os.environ | guarded,
        capture_output=True,
        text=True,
        check=False,
    )


def _stop(workdir: Path) -> None:
    subprocess.run([SCRIPTS / "stop.sh", workdir], check=True)


@contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Keep test processes of this user from choosing the same free port.

    A started server holds its port, so the lock is needed until then only.
    """
    path = Path(tempfile.gettempdir()) / f"shardstream-test-servers-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find_free_ports(count: int) -> int:
    source = random.SystemRandom()  # a seeded generator would give all pytest workers the same port
    for _ in range(1000):
        first = source.choice(_PORTS[:-count])
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ServerError(f"no {count} neighbouring free ports among {_PORTS}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _read_server(workdir: Path, kind: Literal["ceph", "moto"]) -> S3Server:
    lines = (workdir / "s3.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines)
    return S3Server(
        endpoint=values["S3_ENDPOINT"],
        access_key=values["S3_ACCESS_KEY"],
        secret_key=values["S3_SECRET_KEY"],
        region=values["S3_REGION"],
        kind=kind,
        workdir=workdir,
    )


@contextmanager
def start_azurite(workdir: Path) -> Iterator[str]:
    """Run Azurite, a server of Azure blobs, with an empty container "test"; yields its connection string.

    Raises:
        ServerMissingError: Azurite is not installed.
    """
    program = shutil.which("azurite-blob")
    if program is None:
        raise ServerMissingError("azurite-blob is missing (npm install -g azurite)")
    workdir.mkdir(parents=True, exist_ok=True)
    command = [program, "--silent", "--inMemoryPersistence", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--blobPort"]
    with _run_on_a_port(
        lambda port: [*command, str(port)], cwd=workdir, stdout=subprocess.DEVNULL
    ) as port:
        endpoint = f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}"
        _create_container(endpoint, "test")
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={_AZURITE_ACCOUNT};"
            f"AccountKey={_AZURITE_KEY};BlobEndpoint={endpoint};"
        )


@contextmanager
def start_gcs_emulator(workdir: Path) -> Iterator[str]:
    """Run gcp-storage-emulator, which has Google's JSON API, with an empty bucket "test"; yields its URL.

    Raises:
        ServerMissingError: The emulator is not installed.
    """
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        raise ServerMissingError(
            "gcp-storage-emulator is missing (pip install gcp-storage-emulator)"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--in-memory"]
    command += ["--host", "127.0.0.1", "--default-bucket", "test", "--port"]
    with (
        (workdir / "log").open("w") as log,
        _run_on_a_port(
            lambda port: [*command, str(port)], cwd=workdir, stdout=log, stderr=log
        ) as port,
    ):
        yield f"http://127.0.0.1:{port}"


# Public default key: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
_AZURITE_ACCOUNT = "devstoreaccount1"
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def _create_container(endpoint: str, name: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    resource = f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + lines + resource
    digest = hmac.digest(base64.b64decode(_AZURITE_KEY), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    headers["Authorization"] = f"SharedKey {_AZURITE_ACCOUNT}:{signature}"
    url = f"{endpoint}/{name}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers)  # noqa: S310
    urllib.request.urlopen(request, timeout=10).close()  # noqa: S310


_TLS_CONF = """
daemon off; user {user}; pid nginx.pid; error_log error.log warn;
events {{ worker_connections 256; }}
http {{
  access_log access.log; client_max_body_size 0;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate cert.pem; ssl_certificate_key key.pem;
    location / {{ proxy_pass {endpoint}; proxy_set_header Host $http_host; proxy_http_version 1.1; proxy_request_buffering off; }}
  }}
}}
"""


@contextmanager
def start_tls(workdir: Path, s3: S3Server) -> Iterator[tuple[S3Server, Path]]:
    """Run nginx with a self-signed certificate in front of `s3`.

    Yields the server, over https, and the file of the certificate.

    Raises:
        ServerMissingError: nginx or openssl is not installed.
    """
    # On Debian it is in a folder that only root's PATH has.
    nginx = shutil.which(
        "nginx", path=f"{os.environ.get('PATH', '')}{os.environ.get('SERVERS_PATH', ':/usr/sbin')}"
    )
    if nginx is None:
        raise ServerMissingError("nginx is missing (nginx-light)")
    certificate, _ = make_certificate(workdir)

    def command(port: int) -> list[str]:
        (workdir / "nginx.conf").write_text(
            _TLS_CONF.format(user=getpass.getuser(), port=port, endpoint=s3.endpoint)
        )
        return [nginx, "-p", str(workdir), "-e", "error.log", "-c", "nginx.conf"]

    with _run_on_a_port(command) as port:
        yield replace(s3, endpoint=f"https://127.0.0.1:{port}"), certificate


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate of 127.0.0.1; return its file, and that of its key.

    Raises:
        ServerMissingError: openssl is not installed.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ServerMissingError("openssl is missing (openssl)")
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return certificate, key


@contextmanager
def _run_on_a_port(command: Callable[[int], list[str]], **options: Any) -> Iterator[int]:
    """Run a program on a free port, and end it on exit; yields the port."""
    with ExitStack() as ended:
        with _one_start_at_a_time():
            port = _find_free_ports(1)
            process = subprocess.Popen(command(port), start_new_session=True, **options)
            ended.callback(process.wait)
            ended.callback(process.terminate)
            _await_port(port, process)
        yield port


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            raise ServerError("the server did not start, see its log")
        time.sleep(0.02)
