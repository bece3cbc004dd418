"""Examine this machine and a dataset for what makes reading fail or slow, and name the cure of each finding."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from importlib import metadata
from importlib.util import find_spec
from itertools import cycle
from statistics import median
from typing import Any, Literal

from shardstream.catalog.inspect import Listing, list_shards, read_one
from shardstream.errors import ShardStreamError, how_to_install, human_bytes, plural
from shardstream.format import ShardInfo
from shardstream.process import num_cores
from shardstream.storage import Storage, find_endpoint, protocol_of

Level = Literal["ok", "warning", "error"]

_PACKAGES = {  # distribution -> module and extra; those without an extra are dependencies
    "torch": ("torch", ""),
    "numpy": ("numpy", ""),
    "fsspec": ("fsspec", ""),
    "s3fs": ("s3fs", "s3"),
    "gcsfs": ("gcsfs", "gcs"),
    "adlfs": ("adlfs", "azure"),
    "huggingface-hub": ("huggingface_hub", "hf"),
    "duckdb": ("duckdb", "columns"),
    "pyarrow": ("pyarrow", "parquet"),
    "av": ("av", "video"),
    "torchcodec": ("torchcodec", "video"),
    "soundfile": ("soundfile", "audio"),
    "zstandard": ("zstandard", "zstd"),
    "webdataset": ("webdataset", "webdataset"),
    "ray": ("ray", "ray"),
    "starlette": ("starlette", "view"),
}
_NEEDED_BY = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface-hub"}
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
_PLACES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
_FEW_FILES = 4096
_SMALL_SHM_BYTES = 1 << 30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (only its size is read)
_SKEW_S = 60.0  # S3 refuses 15 minutes
_RANGE_BYTES = 8 << 20
_SMALL_BYTES = 4 << 10
_LATENCY_READS = 9
_CONNECTIONS = 8
_SLOW_LATENCY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was examined.

    Args:
        level: "ok", "warning" (it works, but slowly or not everywhere) or "error" (it does not work).
        subject: What was examined, in one or two words.
        text: What was observed.
        cure: What to do; empty if nothing is to be done.
    """

    level: Level
    subject: str
    text: str
    cure: str = ""


def examine_machine() -> Iterator[Finding]:
    """Yield findings about Python, packages, cores, memory, /dev/shm, open files and variables of the environment."""
    yield Finding(
        level="ok",
        subject="Python",
        text=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    yield _packages()
    yield Finding(level="ok", subject="CPU cores", text=f"{num_cores()} for this process")
    yield from _shared_memory()
    yield from _open_files()
    yield _environment(os.environ)


def examine_dataset(
    url: str,
    *,
    seconds: float = 5.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Yield findings about a dataset: its store, manifest, indexes, first sample, latency and bandwidth.

    Nothing is written. Later findings are left out where an earlier one is an error.

    Args:
        url: A folder, a manifest, a pattern or a tar.
        seconds: Time for measuring the bandwidth.
        storage_options: ``storage_options`` of fsspec.
    """
    package = _NEEDED_BY.get(protocol_of(url), "")
    if package and find_spec(_PACKAGES[package][0]) is None:
        yield Finding(
            level="error",
            subject="store",
            text=f"{package} is not installed, which reads {protocol_of(url)}:// URLs",
            cure=how_to_install(_PACKAGES[package][1]),
        )
        return
    yield from _clock(url, storage_options or {})
    storage = Storage(storage_options)
    try:
        began = time.perf_counter()
        listing = list_shards(url, storage_options=storage_options)
        yield _manifest(listing, time.perf_counter() - began)
        yield from _indexes(listing)
        began = time.perf_counter()
        sample = read_one(url, number=0, storage_options=storage_options)
        yield Finding(
            level="ok",
            subject="first sample",
            text=f"{sample['__key__']!r} with {', '.join(name for name in sample if name[0] != '_')}, "
            f"read in {time.perf_counter() - began:.2f} s",
        )
        shards = listing.shards[:_CONNECTIONS]
        yield _latency(shards[0], storage)
        yield _bandwidth(shards, storage, seconds)
    except (ShardStreamError, OSError) as error:
        yield Finding(level="error", subject="dataset", text=str(error))  # says what to do


def _packages() -> Finding:
    installed, missing = [], []
    for name, (module, extra) in _PACKAGES.items():
        if find_spec(module) is not None:
            installed.append(f"{name} {_version(name)}")
        else:
            missing.append(f"{name} [{extra}]")
    without = f"; not installed: {', '.join(missing)}" if missing else ""
    return Finding(
        level="ok",
        subject="packages",
        text=f"shardstream {_version('shardstream')}, {', '.join(installed)}{without}",
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _shared_memory() -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:  # not on this system
        return
    small = usage.total < _SMALL_SHM_BYTES
    yield Finding(
        level="warning" if small else "ok",
        subject=_SHARED_MEMORY,
        text=f"{human_bytes(usage.free)} of {human_bytes(usage.total)} are free",
        cure="docker run --shm-size=8g, or batches over 1 MB may fail with workers"
        if small
        else "",
    )


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _FEW_FILES
    most = "no limit" if hard < 0 else f"{hard:,}"
    yield Finding(
        level="warning" if few else "ok",
        subject="open files",
        text=f"{'no limit' if soft < 0 else f'{soft:,}'} in a process (at most {most})",
        cure=f"ulimit -n {_FEW_FILES if hard < 0 else min(hard, 65_536)}" if few else "",
    )


def _environment(variables: Mapping[str, str]) -> Finding:
    """Name which variables are set; values only of those that are no secrets."""
    shown = [f"{name} is set" for name in _SECRETS if name in variables]
    shown += [f"{name}={_without_user(variables[name])}" for name in _PLACES if name in variables]
    half = ("AWS_ACCESS_KEY_ID" in variables) != ("AWS_SECRET_ACCESS_KEY" in variables)
    return Finding(
        level="warning" if half else "ok",
        subject="environment",
        text=", ".join(shown) or "no AWS_ variables are set",
        cure="set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if half else "",
    )


def _without_user(url: str) -> str:
    scheme, found, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else url


def _clock(url: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare this machine's clock with the Date header of the server, whatever else it responds."""
    server = _server(url, options)
    if server is None:
        return
    request = urllib.request.Request(server, method="HEAD")  # noqa: S310  (http or https: see _server)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
            headers = response.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, ValueError, HTTPException):
        return  # what follows says why the server cannot be reached
    try:
        behind_s = parsedate_to_datetime(headers.get("Date") or "").timestamp() - time.time()
    except ValueError:  # none, or not a date
        return
    wrong = abs(behind_s) > _SKEW_S
    yield Finding(
        level="warning" if wrong else "ok",
        subject="clock",
        text=f"{abs(behind_s):.0f} s {'behind' if behind_s > 0 else 'ahead of'} the server's",
        cure="set the clock (timedatectl set-ntp true): S3 refuses 15 minutes" if wrong else "",
    )


def _server(url: str, options: Mapping[str, Any]) -> str | None:
    if url.startswith(("http://", "https://")):
        return url
    if protocol_of(url) != "s3":
        return None
    server = find_endpoint(options, os.environ) or "https://s3.amazonaws.com"
    return server if server.startswith(("http://", "https://")) else None


def _manifest(listing: Listing, seconds: float) -> Finding:
    shards = plural(len(listing.shards), "shard")
    samples = "" if listing.nsamples is None else f", {plural(listing.nsamples, 'sample')}"
    size = "" if listing.total_bytes is None else f", {human_bytes(listing.total_bytes)}"
    version = "" if listing.version is None else f", version {listing.version}"
    has = listing.manifest_url is not None
    return Finding(
        level="ok" if has else "warning",
        subject="manifest" if has else "shards",
        text=f"{shards}{samples}{size}{version}, found in {seconds:.2f} s",
        cure="" if has else "shardstream index URL writes index.json, so that nothing is listed",
    )


def _indexes(listing: Listing) -> Iterator[Finding]:
    missing = sum(shard.url not in listing.indexed for shard in listing.shards)
    if missing:
        yield Finding(
            level="warning",
            subject="index",
            text=f"{missing:,} of {plural(len(listing.shards), 'shard')} have none: they are read from start to end",
            cure="shardstream index URL",
        )


def _latency(shard: ShardInfo, storage: Storage) -> Finding:
    times = []
    for _ in range(_LATENCY_READS):
        began = time.perf_counter()
        storage.read(shard.url, 0, _SMALL_BYTES)
        times.append(time.perf_counter() - began)
    seconds = median(times)
    slow = seconds > _SLOW_LATENCY_S
    return Finding(
        level="warning" if slow else "ok",
        subject="latency",
        text=f"{seconds * 1000:,.1f} ms for 4 KiB (median of {_LATENCY_READS})",
        cure="read from the region of the bucket, or with cache_dir=" if slow else "",
    )


def _bandwidth(shards: Sequence[ShardInfo], storage: Storage, seconds: float) -> Finding:
    single = _rate(shards[:1], storage, seconds / 3)
    several = _rate(shards, storage, seconds * 2 / 3, connections=_CONNECTIONS)
    is_local = storage.local_path(shards[0].url) is not None
    return Finding(
        level="ok",
        subject="bandwidth",
        text=f"{single / 1e6:,.0f} MB/s with 1 request at a time, {several / 1e6:,.0f} MB/s with {_CONNECTIONS}"
        + (" (from memory, if the files were read before)" if is_local else ""),
    )


def _rate(
    shards: Sequence[ShardInfo], storage: Storage, seconds: float, connections: int = 1
) -> float:
    """Return the bytes per second of ranges that are read one after the other on each connection."""
    began = time.perf_counter()
    ranges = [
        (shard.url, start, min(start + _RANGE_BYTES, size))
        for shard in shards
        for size in [shard.filesize or storage.info(shard.url).size]
        for start in range(0, max(size, 1), _RANGE_BYTES)
    ]

    def read(first: int) -> int:
        received = 0
        for url, start, end in cycle(ranges[first:] + ranges[:first]):
            received += len(storage.read_view(url, start, end))
            if time.perf_counter() - began >= seconds:
                break
        return received

    with ThreadPoolExecutor(connections) as pool:
        total = sum(pool.map(read, [number % len(ranges) for number in range(connections)]))
    return total / (time.perf_counter() - began)
