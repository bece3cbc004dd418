"""Hardware limits, measured in the same run: reading, fetching, decoding, hashing and writing without a loader."""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import random
import socket
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from benchmarks.case import Case, Result
from benchmarks.objects import drop_pages, list_files, presign
from benchmarks.processes import cpu_s

Range = tuple[str, int, int]
"""A URL, the first byte, and the byte after the last."""

_RANGE_BYTES = 4 << 20
_BLOCKS = 128  # of a shuffled epoch of the photos; each is a range
_TIMEOUT_S = 60


def measure(case: Case) -> Result:
    """Run a limit: one of the functions below."""
    works: dict[str, Callable[[Case], Callable[[], int]]] = {
        "limit-pages": read_pages,
        "limit-bytes": read_bytes,
        "limit-disk": read_disk,
        "limit-sockets": read_sockets,
        "limit-obstore": read_with_obstore,
        "limit-decode": decode_all,
        "limit-hash": hash_all,
        "limit-write": write_all,
        "limit-put": put_all,
    }
    work = works[case.contestant.partition("+")[0]](case)
    if case.min_s:  # to warm up
        work()
    rounds = size = 0
    began_cpu, began = cpu_s(), time.perf_counter()
    while True:
        size += work()
        rounds += 1
        seconds = time.perf_counter() - began
        if seconds >= case.min_s:
            break
    parts = len(case.fields) if case.mode == "index" else 1  # which counts members
    return Result(
        seconds=seconds,
        samples=rounds * case.samples * parts,
        payload_bytes=rounds * case.payload_bytes,
        cpu_s=cpu_s() - began_cpu,
        extra={"bytes_read": size},
    )


def read_pages(case: Case) -> Callable[[], int]:
    """Read all tars from the page cache into one buffer of 1 MiB."""
    paths = [name for name, _ in list_files(case.location) if name.endswith(".tar")]
    buffer = bytearray(1 << 20)

    def work() -> int:
        size = 0
        for path in paths:
            with open(path, "rb", buffering=0) as stream:
                while got := stream.readinto(buffer):
                    size += got
        return size

    return work


def read_bytes(case: Case) -> Callable[[], int]:
    """Copy each field from a memory map to new bytes, a batch at a time, in reused memory, without parsing or checks."""
    bytes(31 << 20)  # from now on malloc keeps freed memory
    tars: list[tuple[mmap.mmap, list[tuple[int, int]]]] = []
    for path in (name for name, _ in list_files(case.location) if name.endswith(".tar")):
        with open(path, "rb") as stream, tarfile.open(path) as tar:
            places = [(one.offset_data, one.offset_data + one.size) for one in tar]
            tars.append((mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), places))
    fields = case.batch_size * len(case.fields)

    def work() -> int:
        size = 0
        for tar, places in tars:
            for first in range(0, len(places), fields):
                batch = [tar[start:end] for start, end in places[first : first + fields]]
                size += sum(map(len, batch))
        return size

    return work


def read_disk(case: Case) -> Callable[[], int]:
    """Read all tars from the disk, not from the page cache, in as many ranges as a shuffled epoch, in random order in 16 threads."""
    tars = [(name, size) for name, size in list_files(case.location) if name.endswith(".tar")]
    step = sum(size for _, size in tars) // _BLOCKS
    ranges = [
        (name, start, min(step, size - start))
        for name, size in tars
        for start in range(0, size, step)
    ]
    random.Random(0).shuffle(ranges)
    opened = {name: os.open(name, os.O_RDONLY) for name, _ in tars}

    def work() -> int:
        drop_pages(case.location)
        with ThreadPoolExecutor(16) as pool:
            return sum(pool.map(lambda one: len(os.pread(opened[one[0]], one[2], one[1])), ranges))

    return work


def read_sockets(case: Case) -> Callable[[], int]:
    """Fetch all tars in ranges of 4 MiB over plain sockets."""
    ranges = [
        (presign(name), start, min(start + _RANGE_BYTES, size))
        for name, size in list_files(case.location)
        if name.endswith(".tar")
        for start in range(0, size, _RANGE_BYTES)
    ]
    return lambda: fetch(ranges, case.connections)


def read_with_obstore(case: Case) -> Callable[[], int]:
    """Fetch all tars of an Azure container or an S3 bucket with obstore, in ranges as shardstream asks for them.

    They have 4 MiB, or the size of a block if it shuffles: each request costs Azurite some milliseconds, whatever its size.
    """
    import obstore  # noqa: PLC0415  (the other limits do without)
    from obstore.store import AzureStore, S3Store  # noqa: PLC0415

    protocol, _, path = case.location.partition("://")
    container, _, prefix = path.partition("/")
    client: Any = {"allow_http": True, "allow_invalid_certificates": True}
    store: Any
    if protocol == "s3":
        names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
        names |= {
            "access_key_id": "AWS_ACCESS_KEY_ID",
            "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        }
        config: Any = {name: os.environ[variable] for name, variable in names.items()}
        store = S3Store(container, config=config, client_options=client)
    else:
        parts = os.environ["AZURE_STORAGE_CONNECTION_STRING"].split(";")
        given = {name: value for name, _, value in (part.partition("=") for part in parts)}
        config = {
            "account_name": given["AccountName"],
            "account_key": given["AccountKey"],
            "endpoint": given["BlobEndpoint"],
        }
        store = AzureStore(container, config=config, client_options=client)
    found = [meta for metas in obstore.list(store, prefix) for meta in metas]
    tars = [(meta["path"], meta["size"]) for meta in found if meta["path"].endswith(".tar")]
    step = sum(size for _, size in tars) // _BLOCKS if case.shuffle else _RANGE_BYTES
    ranges = [
        (path, start, min(start + step, size))
        for path, size in tars
        for start in range(0, size, step)
    ]

    def get(piece: Range) -> int:
        path, start, end = piece
        return len(obstore.get_range(store, path, start=start, end=end))

    def work() -> int:
        with ThreadPoolExecutor(case.connections) as pool:
            got = sum(pool.map(get, ranges))
        assert got == sum(end - start for _, start, end in ranges)
        return got

    return work


def fetch(ranges: Sequence[Range], connections: int) -> int:
    """Fetch ranges of presigned URLs over plain sockets, into one buffer for each; return their bytes."""

    def get(connection: HTTPConnection, buffer: memoryview, piece: Range) -> int:
        url, start, end = piece
        answer = _send_request(
            connection, "GET", url, headers={"Range": f"bytes={start}-{end - 1}"}
        )
        got = 0
        while got < end - start and (more := answer.readinto(buffer[got : end - start])):
            got += more
        answer.read()
        return got

    got = _map_over_connections(get, ranges, connections)
    assert got == sum(end - start for _, start, end in ranges)
    return got


def _send_request(
    connection: HTTPConnection, method: str, url: str, **options: Any
) -> HTTPResponse:
    parts = urlsplit(url)
    connection.request(method, f"{parts.path}?{parts.query}", **options)
    answer = connection.getresponse()
    assert answer.status in (200, 206), answer.status
    return answer


def _map_over_connections(
    work: Callable[[HTTPConnection, memoryview, Any], int],
    items: Sequence[tuple[Any, ...]],
    connections: int,
) -> int:
    """Process items, whose first value is a URL, with one thread per connection; return the sum of the results."""
    waiting: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    for item in items:
        waiting.put(item)
    parts = urlsplit(items[0][0])

    def go() -> int:
        buffer = memoryview(bytearray(_RANGE_BYTES))
        connection = HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        done = 0
        with suppress(Empty), closing(connection):
            while True:
                done += work(connection, buffer, waiting.get_nowait())
        return done

    with ThreadPoolExecutor(connections) as pool:
        return sum(one.result() for one in [pool.submit(go) for _ in range(connections)])


def _read_photos(location: str) -> list[bytes]:
    photos = []
    for name, _ in list_files(location):
        if name.endswith(".tar"):
            with tarfile.open(name) as tar:
                photos += [
                    tar.extractfile(member).read()  # type: ignore[union-attr]
                    for member in tar.getmembers()
                    if Path(member.name).suffix == ".jpg"
                ]
    return photos


def decode_all(case: Case) -> Callable[[], int]:
    """Decode and crop all photos of the tars from memory, with one process per worker, or with threads; or scale and encode them."""
    import multiprocessing  # noqa: PLC0415

    import torch  # noqa: PLC0415  (the other limits do without)

    from benchmarks import images  # noqa: PLC0415

    photos = _read_photos(case.location)
    random.seed(0)
    torch.set_num_threads(1)  # as in loader workers
    bytes(31 << 20)  # from now on malloc keeps the memory of freed images, as in a training

    make: Callable[[bytes], Any] = images.example_fast
    if case.max_side:
        make = partial(images.scale_down, max_side=case.max_side)
    elif case.decoder != "fast":
        make = images.example_pillow

    def part(worker: int, of: int) -> None:
        for data in photos[worker::of]:
            make(data)

    def work() -> int:
        context = multiprocessing.get_context("fork")
        count = max(case.workers, case.threads)
        processes = [context.Process(target=part, args=(one, count)) for one in range(count)]
        for process in processes:
            process.start()
        if not processes:
            part(0, 1)
        for process in processes:
            process.join()
        return sum(map(len, photos))

    return work


def hash_all(case: Case) -> Callable[[], int]:
    """Read all tars from the page cache and compute their sha256, with one thread per core."""
    paths = [name for name, _ in list_files(case.location) if name.endswith(".tar")]

    def digest(path: str) -> int:
        with open(path, "rb") as stream:
            hashlib.file_digest(stream, "sha256")
            return stream.tell()

    def work() -> int:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return sum(pool.map(digest, paths))

    return work


def write_all(case: Case) -> Callable[[], int]:
    """Write tars from memory to files with fsync, 4 MiB at a time; another thread computes their sha256."""
    tars = [
        Path(name).read_bytes() for name, _ in list_files(case.location) if name.endswith(".tar")
    ]
    folder = Path(case.cache)

    def write(number: int, tar: bytes) -> None:
        with open(folder / f"{number}", "wb", buffering=0) as stream:
            stream.writelines(
                memoryview(tar)[start : start + _RANGE_BYTES]
                for start in range(0, len(tar), _RANGE_BYTES)
            )
            os.fsync(stream.fileno())

    def work() -> int:
        with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(4) as writing:
            done: list[Future[Any]] = [hashing.submit(hashlib.sha256, tar) for tar in tars]
            for number, tar in enumerate(tars):
                done.append(writing.submit(write, number, tar))
            for one in done:
                one.result()
        for number in range(len(tars)):
            (folder / f"{number}").unlink()
        return sum(map(len, tars))

    return work


def put_all(case: Case) -> Callable[[], int]:
    """Send tars from memory over plain sockets, each in one request, with the checksums of a dataset: SHA-256, and MD5 for the server."""
    tars = []
    for name in (name for name, _ in list_files(case.location) if name.endswith(".tar")):
        data = Path(name).read_bytes()
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        tars.append(
            (presign(f"{case.target}/{Path(name).name}", "put_object", ContentMD5=md5), data)
        )

    def put(connection: HTTPConnection, _: memoryview, item: tuple[str, bytes]) -> int:
        url, data = item
        hashlib.sha256(data)
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        _send_request(connection, "PUT", url, body=data, headers={"Content-MD5": md5}).read()
        return len(data)

    return lambda: _map_over_connections(put, tars, case.connections)
