"""Start ``shardstream view`` as a process with a real port, and talk to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers import in_ci

ROOT = Path(__file__).parent.parent.parent
STARTS_S = 60
_ADDRESS = re.compile(r"http://([^/]+):(\d+)/\?token=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class RunningViewer:
    """A viewer process and the cookie of its page."""

    process: subprocess.Popen[str]
    url: str
    port: int
    token: str
    cookie: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> Answer:
        """Send a request with exactly these headers, Host aside."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = self.cookie if headers is None else dict(headers)
            data = None
            if body is not None:
                data, sent = json.dumps(body), {**sent, "content-type": "application/json"}
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(status=response.status, headers=found, body=response.read())
        finally:
            connection.close()

    def log_in(self) -> Answer:
        """Open the printed address; later requests have its cookie."""
        answer = self.ask(f"/?token={self.token}", headers={})
        self.cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
        return answer

    def get(self, path: str) -> Any:
        """Return the JSON of an answer that must be good."""
        answer = self.ask(path)
        assert answer.status == 200, answer.body
        return answer.json


@contextmanager
def running_viewer(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[RunningViewer]:
    """Run ``shardstream view`` until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardstream", "view", *arguments, "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )
    try:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        line = process.stdout.readline()  # ends with the process, too
        found = _ADDRESS.match(line)
        assert found is not None, line + process.stderr.read()
        viewer = RunningViewer(
            process=process, url=line.strip(), port=int(found[2]), token=found[3]
        )
        viewer.log_in()
        yield viewer
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STARTS_S)
        finally:
            process.kill()


def chromium_or_skip() -> str:
    """Return the path of Chromium; skip the test where it is not installed, except in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        assert not in_ci(), "Chromium is missing: apt-get install chromium"
        pytest.skip("Chromium is not installed (Debian: chromium)")
    return path
