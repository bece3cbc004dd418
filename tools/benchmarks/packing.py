"""Row `pack`: samples per second written to shards, from memory or from loose files."""

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
        ("shardstream", False): pack_shardstream,
        ("shardstream", True): pack_files,
        ("webdataset", False): pack_webdataset,
        ("webdataset", True): pack_webdataset,
        ("litdata", False): pack_litdata,
        ("mosaicml", False): pack_mosaicml,
    }[case.contestant, loose]
    if loose:  # fill the page cache, so that the first contestant is not slower
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
    """Import the writer and its client before the measurement."""
    contestant = case.contestant
    if case.target:
        importlib.import_module("s3fs" if contestant == "shardstream" else "boto3")
    if contestant == "shardstream":
        import shardstream as ss  # noqa: PLC0415

        _ = ss.pack, ss.ShardWriter  # imported on first use
    elif contestant == "mosaicml":
        import_streaming()
    else:
        importlib.import_module(
            "litdata.streaming.writer" if contestant == "litdata" else contestant
        )


def check(case: Case, target: str) -> str:
    """Compare tars on disk with the expected samples."""
    if case.target or case.contestant not in ("shardstream", "webdataset"):
        return ""
    samples = payload = 0
    for sample in packed_samples(Path(target)):
        samples += 1
        payload += sum(map(len, sample.values()))
    is_equal = payload == case.payload_bytes or case.max_side  # which takes fewer bytes
    if samples != case.samples or not is_equal:
        return f"wrote {samples} samples, {payload} bytes"
    return ""


def shard_samples(case: Case) -> int:
    """Return the number of samples per shard."""
    return Corpus(kind="", samples=case.samples).shard_samples


def pack_shardstream(case: Case, samples: Samples, target: str) -> None:
    """Write with shardstream: indexes, sha256 and manifest."""
    import shardstream as ss  # noqa: PLC0415

    with ss.ShardWriter(target, max_samples=shard_samples(case), max_bytes="1GB") as writer:
        for sample in samples:
            writer.write(sample)


def pack_files(case: Case, _: Samples, target: str) -> None:
    """Pack a folder of loose files with shardstream."""
    import shardstream as ss  # noqa: PLC0415

    ss.pack(
        case.location,
        target,
        kind="files",
        max_samples=shard_samples(case),
        max_bytes="1GB",
        processes=max(1, case.workers),
        max_side=case.max_side or None,
    )


def pack_webdataset(case: Case, samples: Samples, target: str) -> None:
    """Write with webdataset's ShardWriter; to S3 through a folder, with an upload of each finished shard in its ``post`` hook."""
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


def pack_litdata(case: Case, samples: Samples, target: str) -> None:
    """Write with the writer that litdata's `optimize` uses, in one process."""
    write_litdata(map(without_key, samples), Path(target), shard_samples(case))


def pack_mosaicml(case: Case, samples: Samples, target: str) -> None:
    """Write with MosaicML's MDSWriter."""
    write_mds(map(without_key, samples), Path(target), shard_samples(case))


def without_key(sample: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the fields of a sample without its key."""
    return {name: data for name, data in sample.items() if name != "__key__"}


def loose_samples(folder: Path, fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the samples of loose files, read in a plain loop."""
    for first in sorted(folder.rglob(f"*.{fields[0]}")):
        key = first.relative_to(folder).with_suffix("").as_posix()
        yield {
            "__key__": key,
            **{name: first.with_suffix(f".{name}").read_bytes() for name in fields},
        }
