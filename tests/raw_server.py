"""Serve responses that the test writes byte by byte, as broken and hostile servers do."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """A request: its method and target, its headers by name in lower case, and its number, from 0."""

    method: str
    target: str
    headers: dict[str, str]
    number: int

    @property
    def range(self) -> tuple[int, int | None] | None:
        """First byte and the byte after the last of the Range header."""
        first, _, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        return (int(first), int(last) + 1 if last else None) if first else None


@dataclass
class RawServer:
    """A running server: its URL, and the requests that it has received."""

    url: str
    requests: list[Request] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


Answer = Callable[[Request], bytes | Iterable[bytes]]


def response(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return a response whose connection ends; a header is named as ``Content_Range``."""
    given = {"Content_Length": str(len(body)), "Connection": "close"} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([f"HTTP/1.1 {status} Some", *lines, "", ""]).encode() + body


def file_response(request: Request, data: bytes, **headers: str) -> bytes:
    """Return the response of a right server to a request of a file."""
    start, end = request.range or (0, None)
    if request.range is None or request.method == "HEAD":
        return response(200, data, **headers)
    end = min(len(data), len(data) if end is None else end)
    if start >= end:
        return response(416, Content_Range=f"bytes */{len(data)}")
    found = {"Content_Range": f"bytes {start}-{end - 1}/{len(data)}"} | headers
    return response(206, data[start:end], **found)


@contextmanager
def raw_server(answer: Answer, certificate: tuple[Path, Path] | None = None) -> Iterator[RawServer]:
    """Run a server that sends the bytes that ``answer`` returns, or yields piece by piece, and closes the connection.

    With the files of a certificate and its key it serves https.
    """
    server, context = RawServer(""), None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
    lock = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first, *lines = self.rfile.readline().decode("latin-1").split("\n")
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                lines.append(line.decode("latin-1"))
            if not first:
                return
            pairs = (line.partition(":") for line in lines if line)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            method, target, *_ = first.split()
            with lock:
                request = Request(method, target, headers, len(server.requests))
                server.requests.append(request)
            pieces = answer(request)
            if method == "HEAD" and isinstance(pieces, bytes):
                pieces = pieces.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            with suppress(OSError):
                for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                    self.wfile.write(piece)
                    if server.ended.is_set():
                        return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

        def get_request(self) -> tuple[socket.socket, object]:
            connection, address = super().get_request()
            if context is not None:
                connection = context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, address

    with Server(("127.0.0.1", 0), Handler) as running:
        server.url = f"http{'s' * (context is not None)}://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            running.shutdown()
            thread.join()
