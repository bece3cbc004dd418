"""Row `pack`: samples a second written to shards, from memory or from loose files."""

from __future__ import annotations

import importlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Result
from benchmarks.data import Corpus, packed_samples, write_litdata, write_mds
from benchmarks.objects import s3_client, split_url
from benchmarks.peers.mosaicml import import_streaming
from benchmarks.processes import cpu_s, peak_rss_bytes

Samples = list[dict[str, Any]]


def measure(case: Case) -> Result:
    """Write the corpus until ``min_s`` is reached; from memory if ``location`` has tars, else from the loose files there."""
    loose = case.location.endswith("files")
    samples: Samples = []
    if not loose:
        packed = packed_samples(Path(case.location))
        samples = [{"__key__": f"{n:08d}", **sample} for n, sample in enumerate(packed)]
    work: Callable[[Case, Samples, str], None] = {
        ("shardstream", False): ours,
        ("shardstream", True): ours_files,
        ("webdataset", False): webdataset,
        ("webdataset", True): webdataset,
        ("litdata", False): litdata,
        ("mosaicml", False): mosaicml,
    }[case.contestant, loose]
    if loose:  # to the page cache: as fast for who is first
        deque(loose_samples(Path(case.location), case.fields), maxlen=0)
    import_writer(case)
    rounds = 0
    began_cpu, began = cpu_s(), time.perf_counter()
    while True:
        target = f"{case.target or case.cache}/{case.contestant}-{rounds}"
        work(case, samples, target)
        rounds += 1
        seconds = time.perf_counter() - began
        if seconds >= case.min_s:
            break
        if not case.target:
            shutil.rmtree(target)
    return Result(
        seconds=seconds,
        samples=rounds * case.samples,
        payload_bytes=rounds * case.payload_bytes,
        cpu_s=cpu_s() - began_cpu,
        peak_rss_bytes=peak_rss_bytes(),
        wrong=check(case, target),
    )


def import_writer(case: Case) -> None:
    """Import what writes, and what it sends by: not part of the time."""
    contestant = case.contestant
    if case.target:
        importlib.import_module("s3fs" if contestant == "shardstream" else "boto3")
    if contestant == "shardstream":
        import shardstream as ss  # noqa: PLC0415

        _ = ss.pack, ss.ShardWriter  # looked up when first used
    elif contestant == "mosaicml":
        import_streaming()
    else:
        importlib.import_module(
            "litdata.streaming.writer" if contestant == "litdata" else contestant
        )


def check(case: Case, target: str) -> str:
    """Compare tars on disk with what was to be written."""
    if case.target or case.contestant not in ("shardstream", "webdataset"):
        return ""
    samples = payload = 0
    for sample in packed_samples(Path(target)):
        samples += 1
        payload += sum(map(len, sample.values()))
    if (samples, payload) != (case.samples, case.payload_bytes):
        return f"wrote {samples} samples, {payload} bytes"
    return ""


def shard_samples(case: Case) -> int:
    """Return the limit of a shard."""
    return Corpus(kind="", samples=case.samples).shard_samples


def ours(case: Case, samples: Samples, target: str) -> None:
    """Write with indexes, sha256 and manifest, as always."""
    import shardstream as ss  # noqa: PLC0415

    with ss.ShardWriter(target, max_samples=shard_samples(case), max_bytes="1GB") as writer:
        for sample in samples:
            writer.write(sample)


def ours_files(case: Case, _: Samples, target: str) -> None:
    """Pack a folder of loose files."""
    import shardstream as ss  # noqa: PLC0415

    ss.pack(
        case.location,
        target,
        kind="files",
        max_samples=shard_samples(case),
        max_bytes="1GB",
        processes=max(1, case.workers),
    )


def webdataset(case: Case, samples: Samples, target: str) -> None:
    """Write with its ShardWriter; to S3 by a folder, from where each finished shard is uploaded in its ``post`` hook."""
    import webdataset as wds  # noqa: PLC0415

    options: dict[str, Any] = {"maxcount": shard_samples(case), "verbose": 0}
    source: Any = samples or loose_samples(Path(case.location), case.fields)
    folder = target
    if target.startswith("s3://"):
        folder = f"{case.cache}/shards"
        bucket, key = split_url(target)

        def send(path: str) -> None:
            s3_client().upload_file(path, bucket, f"{key}/{Path(path).name}")

        options["post"] = send
    Path(folder).mkdir(parents=True)
    with wds.ShardWriter(f"{folder}/%06d.tar", **options) as writer:
        for sample in source:
            writer.write(sample)


def litdata(case: Case, samples: Samples, target: str) -> None:
    """Write with the writer beneath its `optimize`, in one process."""
    write_litdata(map(without_key, samples), Path(target), shard_samples(case))


def mosaicml(case: Case, samples: Samples, target: str) -> None:
    """Write with its MDSWriter."""
    write_mds(map(without_key, samples), Path(target), shard_samples(case))


def without_key(sample: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the fields."""
    return {name: data for name, data in sample.items() if name != "__key__"}


def loose_samples(folder: Path, fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the samples of loose files, as a loop of one's own would read them."""
    for first in sorted(folder.rglob(f"*.{fields[0]}")):
        key = first.relative_to(folder).with_suffix("").as_posix()
        yield {
            "__key__": key,
            **{name: first.with_suffix(f".{name}").read_bytes() for name in fields},
        }
