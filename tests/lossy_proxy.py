"""A TCP proxy that cuts connections: while a request is sent, before its response, or in the middle of that."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.servers import S3Server

HOST = "127.0.0.1"
UNSENT, LOST, HALF = 0.05, 0.15, 0.05
"""Shares of the blocks of bytes at which a connection is cut."""


@contextmanager
def lossy_proxy(s3: S3Server, seed: int) -> Iterator[tuple[S3Server, Counter[str]]]:
    """Run a proxy before a server; yield its address, and counts of the cuts."""
    port = int(s3.endpoint.rpartition(":")[2])
    with socket.create_server((HOST, 0), backlog=64) as listener:
        proxy = LossyProxy(listener, port, seed)
        threading.Thread(target=proxy.accept, daemon=True).start()
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        yield replace(s3, endpoint=address), proxy.cuts
        listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`


class LossyProxy:
    """Passes the bytes of each connection on, in two threads."""

    def __init__(self, listener: socket.socket, port: int, seed: int) -> None:
        self.listener, self.port = listener, port
        self.draws, self.cuts = random.Random(seed), Counter[str]()

    def accept(self) -> None:
        """Accept connections until the listener is shut down."""
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection((HOST, self.port))
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for send in (self.send_requests, self.send_responses):
                    threading.Thread(target=send, args=(client, server), daemon=True).start()

    def send_requests(self, client: socket.socket, server: socket.socket) -> None:
        """Send a client's bytes to the server."""
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self.draws.random() < UNSENT:
                    self.cuts["unsent"] += 1
                    end(client, server)
                    return
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def send_responses(self, client: socket.socket, server: socket.socket) -> None:
        """Send the server's bytes to a client."""
        with suppress(OSError):
            while data := server.recv(1 << 16):
                draw = self.draws.random()
                if draw < LOST + HALF:
                    self.cuts["lost" if draw < LOST else "half"] += 1
                    client.sendall(b"" if draw < LOST else data[: len(data) // 2])
                    break
                client.sendall(data)
        end(client, server)
        client.close()
        server.close()


def end(*connections: socket.socket) -> None:
    """Shut connections down in both directions."""
    for one in connections:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
