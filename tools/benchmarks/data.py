"""Data of the benchmark: seeded samples, and the same samples in the format of each contestant.

Formats: "tar" ("tar-200": in 200 shards; with our index; the tars are what webdataset, datasets, DALI, SPDL and the S3 connector read), "litdata", "mds" (MosaicML),
"files", and "grain" (ArrayRecord), "datasets_parquet", "lancedb" and "webshart". Each is made once in the work folder, in its own process.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.loaders import batched

SHARDS = 15  # of every corpus and format, so that shards can be shuffled and partitioned
_WIDTH, _HEIGHT = 640, 480
_NPY_BYTES = 550 - 128  # without the header
_BLOCK_BYTES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Samples of one kind.

    Args:
        kind: Kind of samples: "small", "photo" or "block".
        samples: Number of samples.
    """

    kind: str
    samples: int

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a sample."""
        return _FIELDS[self.kind]

    @property
    def shard_samples(self) -> int:
        """Samples per shard."""
        return -(-self.samples // SHARDS)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.kind}-{self.samples}"

    def __iter__(self) -> Iterator[dict[str, bytes]]:
        return _SAMPLES[self.kind](self.samples)


def small_samples(count: int) -> Iterator[dict[str, bytes]]:
    """Yield an array of 550 bytes and about 30 bytes of JSON."""
    rng = np.random.default_rng(0)
    blank = io.BytesIO()
    np.save(blank, np.zeros(_NPY_BYTES, dtype=np.uint8))
    header = blank.getvalue()[:-_NPY_BYTES]
    for number in range(count):
        about = json.dumps({"id": number, "label": number % 1000})
        yield {"npy": header + rng.bytes(_NPY_BYTES), "json": about.encode()}


def photo(number: int) -> bytes:
    """Return a JPEG of 640 x 480: shapes of all sizes, and sensor noise."""
    rng = np.random.default_rng(number)
    grain = rng.standard_normal((_HEIGHT, _WIDTH, 1), dtype=np.float32)
    pixels = np.repeat(grain * np.float32(rng.uniform(3, 9)) + 128, 3, axis=2)
    part = np.empty_like(pixels)
    for cells, weight in ((4, 90), (16, 50), (64, 25), (160, 14)):
        coarse = rng.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
        np.multiply(np.asarray(smooth), np.float32(weight / 100), out=part)
        pixels += part
        pixels -= 128 * weight / 100
    out = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255, out=part).astype(np.uint8))
    image.save(out, "JPEG", quality=88)
    return out.getvalue()


def photo_samples(count: int) -> Iterator[dict[str, bytes]]:
    """Yield a photo and its class."""
    with ProcessPoolExecutor() as pool:
        for number, data in enumerate(pool.map(photo, range(count), chunksize=16)):
            yield {"jpg": data, "cls": str(number % 1000).encode()}


def block_samples(count: int) -> Iterator[dict[str, bytes]]:
    """Yield 100 kB that cannot be compressed, and a class."""
    rng = np.random.default_rng(0)
    for number in range(count):
        yield {"bin": rng.bytes(_BLOCK_BYTES), "cls": str(number % 1000).encode()}


_FIELDS = {"small": ("npy", "json"), "photo": ("jpg", "cls"), "block": ("bin", "cls")}
_SAMPLES = {"small": small_samples, "photo": photo_samples, "block": block_samples}


def packed_samples(folder: Path) -> Iterator[dict[str, bytes]]:
    """Yield the samples of existing tars."""
    for path in sorted(folder.glob("*.tar")):
        key, sample = "", dict[str, bytes]()
        with tarfile.open(path) as tar:
            for member in tar:
                stem, _, name = member.name.partition(".")
                if stem != key and sample:
                    yield sample
                    sample = {}
                key = stem
                sample[name] = tar.extractfile(member).read()  # type: ignore[union-attr]
        yield sample


def write_tar(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write tars with shardstream's index."""
    import shardstream as ss  # noqa: PLC0415

    with ss.ShardWriter(
        folder, max_samples=shard_samples, max_bytes="1GB", overwrite=True
    ) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:08d}", **sample})


def write_litdata(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write litdata's chunks."""
    from litdata.streaming.writer import BinaryWriter  # noqa: PLC0415

    writer = BinaryWriter(str(folder), chunk_size=shard_samples)
    for number, sample in enumerate(samples):
        writer[number] = dict(sample)
    writer.done()
    writer.merge()


def write_mds(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write MosaicML's shards, whose limit is in bytes, computed from the size of the first sample."""
    from benchmarks.peers.mosaicml import import_streaming  # noqa: PLC0415

    waiting = iter(samples)
    first = dict(next(waiting))
    with import_streaming().MDSWriter(
        out=str(folder),
        columns=dict.fromkeys(first, "bytes"),
        size_limit=shard_samples * (sum(map(len, first.values())) + 20),
    ) as writer:
        for sample in chain([first], waiting):
            writer.write(dict(sample))


def write_files(samples: Iterable[Mapping[str, bytes]], folder: Path, _: int) -> None:
    """Write one file per field, and one folder per 1,000 samples."""
    for number, sample in enumerate(samples):
        part = folder / f"{number // 1000:04d}"
        if number % 1000 == 0:
            part.mkdir(parents=True, exist_ok=True)
        for name, data in sample.items():
            (part / f"{number:08d}.{name}").write_bytes(data)


def write_grain(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write ArrayRecord files of pickled samples, which are read one by one."""
    from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415

    for number, shard in enumerate(batched(samples, shard_samples)):
        writer = ArrayRecordWriter(f"{folder}/{number:05d}.array_record", "group_size:1")
        for sample in shard:
            writer.write(pickle.dumps(dict(sample)))
        writer.close()


def write_parquet(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write Parquet files without compression."""
    import pyarrow  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    for number, shard in enumerate(batched(samples, shard_samples)):
        table = pyarrow.Table.from_pylist(shard)
        parquet.write_table(table, folder / f"{number:05d}.parquet", compression="none")


def write_lancedb(samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int) -> None:
    """Write a table of LanceDB, a fragment for each shard."""
    import lancedb  # noqa: PLC0415
    import pyarrow  # noqa: PLC0415

    tables = map(pyarrow.Table.from_pylist, batched(samples, shard_samples))
    written = lancedb.connect(folder).create_table("samples", next(tables))
    for table in tables:
        written.add(table)


def write_webshart(
    samples: Iterable[Mapping[str, bytes]], folder: Path, shard_samples: int
) -> None:
    """Write tars with webshart's index."""
    import webshart  # noqa: PLC0415

    write_tar(samples, folder, shard_samples)
    webshart.MetadataExtractor().extract_metadata(str(folder), str(folder))


WRITERS = {
    "tar": write_tar,
    "litdata": write_litdata,
    "mds": write_mds,
    "files": write_files,
    "grain": write_grain,
    "datasets_parquet": write_parquet,
    "lancedb": write_lancedb,
    "webshart": write_webshart,
}


def main() -> None:
    """Write a corpus: ``python -m benchmarks.data KIND SAMPLES FORMAT FOLDER [FOLDER OF THE TARS]``; print the bytes of all fields."""
    kind, samples, form, folder, *packed = sys.argv[1:]
    corpus = Corpus(kind=kind, samples=int(samples))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    again = packed and kind == "photo"  # small samples are generated as fast as they are read
    source = packed_samples(Path(packed[0])) if again else corpus
    name, _, shards = form.partition("-")
    shard_samples = corpus.samples // int(shards) if shards else corpus.shard_samples
    payload_bytes = 0

    def counted() -> Iterator[dict[str, bytes]]:
        nonlocal payload_bytes
        for sample in source:
            payload_bytes += sum(map(len, sample.values()))
            yield sample

    WRITERS[name](counted(), target, shard_samples)
    print(payload_bytes)


if __name__ == "__main__":
    main()
