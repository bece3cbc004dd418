"""Serve files over HTTP as static web servers and the Hugging Face Hub do: ranges, listings, redirects, tokens."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_REVISION = "main"


@dataclass
class Served:
    """A running server.

    Args:
        url: Of the server, without a slash at its end.
        requests: Method, path and Range header of each request, in order; may be cleared.
    """

    url: str
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)


class _Files(http.server.SimpleHTTPRequestHandler):
    """Files of a folder with ranges and ETags; a listing of a folder, unless the server was told otherwise."""

    lists_folders = has_etags = True
    served: Served

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def parse_request(self) -> bool:
        done = super().parse_request()
        if done:
            self.served.requests.append((self.command, self.path, self.headers.get("Range")))
        return done

    def list_directory(self, path: str | os.PathLike[str]) -> io.BytesIO | None:
        if self.lists_folders:
            return super().list_directory(path)
        self.send_error(403)
        return None

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        return self.send_file(path) if path.is_file() else super().send_head()

    def send_file(self, path: Path) -> io.BytesIO | None:
        data = path.read_bytes()
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, end = 0, len(data)
        if found:
            start, end = int(found[1]), min(int(found[2] or end), end - 1) + 1
            if start >= len(data):
                self.send_error(416)
                return None
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        if self.has_etags:
            self.send_header("ETag", f'"{hash(data)}"')
        else:
            self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.end_headers()
        return io.BytesIO(data[start:end])


class _Hub(_Files):
    """The Hub's API of one dataset repository "org/name" with one revision; its files come from another host.

    Without the token "hf_secret" the repository does not exist.
    """

    def send_head(self) -> Any:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/cdn/"):
            assert "Authorization" not in self.headers, "a token was sent to another host"
            return self.send_file(Path(self.directory) / path.removeprefix("/cdn/"))
        if self.headers.get("Authorization") != "Bearer hf_secret":
            return self.send_problem(401, "RepoNotFound")
        for prefix, answer in (
            (r"/api/datasets/org/name(?:/revision/([^/]+))?", self.send_repository),
            (r"/api/datasets/org/name/tree/([^/]+)/?(.*)", self.send_tree),
            (r"/datasets/org/name/resolve/([^/]+)/(.*)", self.send_redirect),
        ):
            if found := re.fullmatch(prefix, path):
                if (found[1] or _REVISION) != _REVISION:
                    return self.send_problem(404, "RevisionNotFound")
                return answer(*found.groups()[1:])
        return self.send_problem(404, "RepoNotFound")

    def send_problem(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value: object) -> io.BytesIO:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return io.BytesIO(data)

    def send_repository(self) -> io.BytesIO:
        about = {"id": "org/name", "sha": "0" * 40, "private": True, "tags": [], "siblings": []}
        return self.send_json(about)

    def send_tree(self, folder: str) -> io.BytesIO | None:
        root = Path(self.directory)
        if not (root / folder).is_dir():
            self.send_problem(404, "EntryNotFound")
            return None
        return self.send_json(
            [
                {
                    "type": "file" if path.is_file() else "directory",
                    "path": path.relative_to(root).as_posix(),
                    "size": path.stat().st_size if path.is_file() else 0,
                    "oid": "0" * 40,
                }
                for path in sorted((root / folder).iterdir())
            ]
        )

    def send_redirect(self, name: str) -> None:
        if not (Path(self.directory) / name).is_file():
            self.send_problem(404, "EntryNotFound")
            return
        self.send_response(302)
        self.send_header(
            "Location", f"{self.served.url.replace('127.0.0.1', 'localhost')}/cdn/{name}"
        )
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve_files(
    folder: Path, *, lists_folders: bool = True, has_etags: bool = True
) -> Iterator[Served]:
    """Serve a folder as a static web server does; without ETags all files are of one second."""
    with _serve(_Files, folder, lists_folders=lists_folders, has_etags=has_etags) as served:
        yield served


@contextmanager
def serve_hub(folder: Path) -> Iterator[Served]:
    """Serve a folder as the dataset repository "org/name" of the Hugging Face Hub; its token is "hf_secret"."""
    with _serve(_Hub, folder) as served:
        yield served


@contextmanager
def _serve(base: type[_Files], folder: Path, **attributes: Any) -> Iterator[Served]:
    served = Served("")
    handler = type("Handler", (base,), {"served": served, **attributes})

    handle: Any = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handle) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
