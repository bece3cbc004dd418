"""Limit of the first batch without a loader: fork a worker, read the bytes of a batch, and send them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from benchmarks.case import Case, Result
from benchmarks.limits import Range, fetch
from benchmarks.objects import list_files, presign
from benchmarks.processes import cpu_s


def measure(case: Case) -> Result:
    """Time from the start of the process to the bytes of a batch; for a resume, from where torch is imported."""
    asked = time.time()
    ranges = list(first_ranges(case))
    asked = time.time() - asked  # import and first use of the S3 client are not part of the limit
    import torch.utils.data  # noqa: F401, PLC0415  (as every loader does)

    began = time.time() if case.mode == "resume" else case.began + asked
    if case.workers:
        context = get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_send, args=(ranges, theirs))
        worker.start()
        theirs.close()
        got = len(mine.recv_bytes())
    else:
        got = _read(ranges)
    return Result(
        seconds=time.time() - began, samples=case.batch_size, payload_bytes=got, cpu_s=cpu_s()
    )


def first_ranges(case: Case) -> Iterator[Range]:
    """Yield the first bytes of the data, as many as a batch has, in one range per connection."""
    left = case.payload_bytes * case.batch_size // case.samples
    step = -(-left // case.connections)
    for name, size in list_files(case.location):
        if not name.endswith(".tar"):
            continue
        if not left:
            return
        url = presign(name) if name.startswith("s3://") else name
        end = min(size, left)
        yield from ((url, start, min(start + step, end)) for start in range(0, end, step))
        left -= end


def _send(ranges: Sequence[Range], to: Connection) -> None:
    to.send_bytes(bytes(_read(ranges)))


def _read(ranges: Sequence[Range]) -> int:
    """Read ranges, from S3 concurrently; return the number of bytes."""
    if ranges[0][0].startswith("http"):
        return fetch(ranges, len(ranges))
    size = 0
    for path, start, end in ranges:
        with open(path, "rb") as stream:
            stream.seek(start)
            size += len(stream.read(end - start))
    return size
