"""Environment of a run: data folder, servers and child processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from benchmarks.case import Case, Result
from benchmarks.data import Corpus
from shardstream.storage import Storage, publish_bytes
from tests.servers import S3Server, ShapedS3, start_azurite, start_nginx, start_s3, start_tls

Store = Literal["local", "s3-slow", "s3-fast", "s3-https", "azure"]
"""Location of the data of a setting."""

TOOLS = Path(__file__).parent.parent
_CASE_TIMEOUT_S = 240
_DATA_TIMEOUT_S = 900
_BUCKET = "bench"
_CONTAINER = "test"  # as start_azurite creates it
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


@dataclass
class Work:
    """A folder of data, and servers that start when first needed; close it with `close`.

    Args:
        folder: Kept between runs if given by the user.
        latency_ms: Latency to the first byte of `s3-slow`.
        rate: Bytes per second and connection of `s3-slow`.
        interpreters: Python interpreters of contestants with their own environment.
    """

    folder: Path
    latency_ms: int = 30
    rate: int = 80_000_000
    interpreters: Mapping[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _s3: S3Server | None = None
    _shaped: ShapedS3 | None = None
    _https: tuple[S3Server, Path] | None = None
    _azurite: str | None = None
    _uploaded: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Stop the servers."""
        self._stack.close()

    def server(self, *, slow: bool, rate: int | None = None) -> S3Server:
        """Return the server, with or without the slow proxy.

        Args:
            slow: Behind the slow proxy.
            rate: Bytes per second and connection of the proxy, if not the default.
        """
        if self._s3 is None:
            place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-s3-")))
            self._s3 = self._stack.enter_context(start_s3(place / "s3"))
            self._s3.client().create_bucket(Bucket=_BUCKET)
        if not slow:
            return self._s3
        if self._shaped is None:
            place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-ng-")))
            self._shaped = self._stack.enter_context(start_nginx(place, self._s3))
        brake = f"latency_ms={self.latency_ms}&rate={rate or self.rate}"
        self._shaped.control(f"/set?profile=shaped&{brake}")
        return self._shaped.shaped

    def https(self) -> tuple[S3Server, Path]:
        """Return the server over TLS, and its certificate."""
        if self._https is None:
            place = Path(
                self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tls-"))
            )
            self._https = self._stack.enter_context(start_tls(place, self.server(slow=False)))
        return self._https

    def azurite(self) -> str:
        """Return the connection string of the Azure server."""
        if self._azurite is None:
            place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-az-")))
            self._azurite = self._stack.enter_context(start_azurite(place))
        return self._azurite

    def environment(self, store: Store, rate: int | None = None) -> dict[str, str]:
        """Return the variables by which clients find a store; its server is started.

        Args:
            store: Location of the data.
            rate: Bytes per second and connection of `s3-slow`, if not the default.
        """
        if store == "local":
            return {}
        if store == "azure":
            return {"AZURE_STORAGE_CONNECTION_STRING": self.azurite()}
        if store == "s3-https":
            server, certificate = self.https()
            names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
            return server.environment | dict.fromkeys(names, str(certificate))
        server = self.server(slow=store == "s3-slow", rate=rate)
        # for litdata, mosaicml and the AWS command line
        return server.environment | {"S3_ENDPOINT_URL": server.endpoint}

    def prepare(self, corpus: Corpus, form: str) -> Path:
        """Return the folder of a corpus in a format; make it if it is missing."""
        place = self.folder / corpus.name / form
        done = place.with_suffix(".done")
        if done.exists():
            return place
        shutil.rmtree(place, ignore_errors=True)
        packed = [] if form == "tar" else [str(self.prepare(corpus, "tar"))]
        arguments = [corpus.kind, str(corpus.samples), form, str(place), *packed]
        said = self._run(
            "benchmarks.data",
            arguments,
            {},
            self._python({"mds": "mosaicml"}.get(form, form)),
            _DATA_TIMEOUT_S,
        )
        if form == "tar":
            (self.folder / corpus.name / "payload.json").write_text(said)
        done.touch()
        return place

    def payload_bytes(self, corpus: Corpus) -> int:
        """Return the bytes of all fields of a corpus."""
        self.prepare(corpus, "tar")
        return int(json.loads((self.folder / corpus.name / "payload.json").read_text()))

    def upload(self, corpus: Corpus, form: str, store: Store) -> str:
        """Return the URL of a corpus in a format on the server of a store; upload it if it is missing."""
        key = f"{corpus.name}/{form}"
        url = f"az://{_CONTAINER}/{key}/" if store == "azure" else f"s3://{_BUCKET}/{key}/"
        if url not in self._uploaded:
            place = self.prepare(corpus, form)
            for path in sorted(place.rglob("*")):
                if path.is_file():
                    self._send(path, f"{key}/{path.relative_to(place).as_posix()}", store)
            self._uploaded.add(url)
        return url

    def _send(self, path: Path, key: str, store: Store) -> None:
        if store == "azure":
            options = {"connection_string": self.azurite()}
            publish_bytes(Storage(options), f"az://{_CONTAINER}/{key}", path.read_bytes())
        else:
            self.server(slow=False).client().upload_file(str(path), _BUCKET, key)

    def measure(self, case: Case, environment: Mapping[str, str]) -> Result:
        """Run a case in its own process.

        A failure is a result as well, with its message in `wrong`.
        """
        target = case.target and f"{case.target}-{time.time_ns()}"
        with tempfile.TemporaryDirectory(prefix="bench-cache-", dir=self.folder) as cache:
            case = replace(case, cache=cache, target=target, began=time.time())
            variables = {**environment, "HF_HOME": cache, "TMPDIR": cache}
            try:
                out = self._run(
                    "benchmarks.child",
                    [case.to_json()],
                    variables,
                    self._python(case.contestant),
                    _CASE_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return Result(seconds=0.0, wrong=f"no end in {_CASE_TIMEOUT_S} s")
            except subprocess.CalledProcessError as error:
                return Result(
                    seconds=0.0, wrong=last_line(error.stderr).replace(str(self.folder), "…")
                )
        line = next(line for line in out.splitlines() if line.startswith("RESULT "))
        return Result(**json.loads(line.removeprefix("RESULT ")))

    def _python(self, contestant: str) -> str:
        return self.interpreters.get(contestant.partition("+")[0], sys.executable)

    def _run(
        self,
        module: str,
        arguments: list[str],
        environment: Mapping[str, str],
        python: str,
        timeout_s: float,
    ) -> str:
        given = os.environ.get(
            "PYTHONPATH", ""
        )  # first, because it may name another version of shardstream
        # Keep compiled modules: compiling a peer's modules in each process takes seconds of its first batch.
        kept = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = os.pathsep.join(filter(None, (given, str(TOOLS), str(TOOLS.parent))))
        # Files, because a pipe would stay open as long as a worker that outlives its loader.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(  # noqa: S603  (our own modules)
                [
                    python,
                    "-P",
                    "-m",
                    module,
                    *arguments,
                ],  # -P: do not import from the current folder
                env={**kept, **_OFFLINE, "PYTHONPATH": paths, **environment},
                stdout=out,
                stderr=said,
                start_new_session=True,
            )
            try:
                code = child.wait(timeout_s)
            finally:
                with suppress(ProcessLookupError):  # its whole process group
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0)
            said.seek(0)
            if code:
                raise subprocess.CalledProcessError(code, module, stderr=said.read())
            return out.read()


def last_line(text: str) -> str:
    r"""Return the error line of a traceback.

    >>> last_line("Traceback …\n  File …\nValueError: {\n  no\n}\n")
    'ValueError: {'
    """
    lines = [line for line in text.splitlines() if line.strip() and line[0] not in " })]"]
    return lines[-1] if lines else "no message"
