"""Temporary S3 server on this machine, for the examples; not an example itself.

The server is moto's, in its own process: real HTTP, real S3 requests, data in memory, no check of passwords. It ends
with the program that started it, also if that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)  # 0: any free port
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the program that started it closes the pipe, or dies
"""
# Each of these would make a client use another server.
_FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE")


@contextmanager
def embedded_s3(bucket: str = "example") -> Iterator[str]:
    """Start a server with one empty bucket; inside the block the AWS_* variables of this process point to it.

    Yields:
        The URL of the bucket: ``s3://example``.

    Raises:
        RuntimeError: If the server does not start.
    """
    with _start() as endpoint:
        variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "example",
            "AWS_SECRET_ACCESS_KEY": "example-secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")  # noqa: S310  (our own)
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
        with mock.patch.dict(os.environ, variables):
            for name in _FOREIGN:
                os.environ.pop(name, None)
            yield f"s3://{bucket}"


@contextmanager
def _start() -> Iterator[str]:
    server = subprocess.Popen(  # noqa: S603  (ourselves)
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # one line per request
        text=True,
        start_new_session=True,  # Ctrl-C goes to this process, which stops the server
    )
    with server:  # closes its pipes and waits for it
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError(
                    "the embedded S3 server did not start; pip install '.[examples]' -c constraints.txt"
                )
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
