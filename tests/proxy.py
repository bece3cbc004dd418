"""Proxy before an S3 server that corrupts requests in transit, unlike the nginx proxy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO
from urllib.parse import urlsplit

Spoil = Callable[[str, int], str]
"""``spoil("PUT /bucket/key?…", number of such a request, from 0)`` -> "", "flip" a bit, or "lose" the response."""


class SpoilingProxy:
    """Relays connections, and changes requests as the test requires.

    Args:
        endpoint: The server.
        spoil: Called for each request.
    """

    def __init__(self, endpoint: str, spoil: Spoil) -> None:
        self._host, self._port = urlsplit(endpoint).hostname or "", urlsplit(endpoint).port or 80
        self._spoil = spoil
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.requests: list[str] = []
        """Method and path of each request."""
        self._accepting()

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Refuse connections from now on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def reopen(self) -> None:
        """Accept connections again, at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._accepting()

    def _accepting(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        server = socket.create_connection((self._host, self._port))
        losing = threading.Event()
        threading.Thread(target=self._answer, args=(server, client, losing), daemon=True).start()
        stream = client.makefile("rb")
        try:
            while head := b"".join(_lines(stream)):
                if losing.is_set():
                    return
                self._pass_on(head + b"\r\n", stream.read, server, losing)
        except OSError:
            return
        finally:
            for end in (server, client):
                end.close()

    def _pass_on(
        self,
        head: bytes,
        read: Callable[[int], bytes],
        server: socket.socket,
        losing: threading.Event,
    ) -> None:
        line, *fields = head.decode("latin-1").split("\r\n")
        lengths = [int(f.split(":")[1]) for f in fields if f.lower().startswith("content-length:")]
        what = self._decide(line.rpartition(" ")[0])
        if what == "lose":
            losing.set()
        server.sendall(head)
        left = sum(lengths)
        while left:
            body = bytearray(read(min(left, 1 << 16)))
            if not body:
                return
            if what == "flip":
                body[0] ^= 1
                what = ""
            server.sendall(body)
            left -= len(body)

    def _decide(self, request: str) -> str:
        with self._lock:
            self.requests.append(request)
            number = self._seen.get(request, 0)
            self._seen[request] = number + 1
        return self._spoil(request, number)

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket, losing: threading.Event) -> None:
        try:
            while data := server.recv(1 << 16):
                if losing.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    time.sleep(0.2)  # the server has closed the connection
                    return
                client.sendall(data)
        except OSError:
            return
        finally:
            for end in (server, client):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a request's head; none once the client is gone, when `readline` returns an empty line without end."""
    while (line := stream.readline()) not in (b"\r\n", b""):
        yield line


@contextmanager
def spoiling(endpoint: str, spoil: Spoil) -> Iterator[SpoilingProxy]:
    """Run a proxy before a server."""
    proxy = SpoilingProxy(endpoint, spoil)
    try:
        yield proxy
    finally:
        with suppress(OSError):  # closed by the test
            proxy.close()
