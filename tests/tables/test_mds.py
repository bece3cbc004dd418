"""MDS shards that are read in place; the files are written here by the description of the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import shardstream as ss
from shardstream.errors import ChangedError, ManifestError, OptionError, ShardError
from shardstream.storage import Storage, publish_bytes
from shardstream.tables import open_table
from shardstream.testing import check_samples
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
COUNTS = (9, 1, 14)
ENCODINGS = {"id": "str", "label": "int", "meta": "json", "jpg": "jpeg", "tok": "ndarray:uint16"}
SIZES = [None, 8, None, None, None]


def row_of(number: int) -> dict[str, Any]:
    return {
        "id": f"k{number:02d}",
        "label": number - 3,
        "meta": {"n": [number, None]},
        "jpg": b"j" * number,
    }


def encode(number: int) -> bytes:
    row = row_of(number)
    tokens = np.arange(number % 4 + 1, dtype="<u2")
    values = [
        row["id"].encode(),
        struct.pack("<q", row["label"]),
        json.dumps(row["meta"]).encode(),
        row["jpg"],
        bytes([1 << 2, len(tokens)]) + tokens.tobytes(),  # one dimension of uint8
    ]
    sizes = [len(one) for one, size in zip(values, SIZES, strict=True) if size is None]
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values)


def shard_of(samples: Sequence[bytes]) -> bytes:
    options = b"{}"
    at = 4 * (len(samples) + 2) + len(options)
    offsets = np.cumsum([at, *map(len, samples)])
    head = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets)
    return head + options + b"".join(samples)


def write(folder: str | Path, *, compression: str | None = None, **changes: Any) -> str:
    """Write a dataset; ``changes`` are of the entries in its index."""
    entries, first = [], 0
    for place, count in enumerate(COUNTS):
        data = shard_of([encode(number) for number in range(first, first + count)])
        name, first = f"shard.{place:05d}.mds", first + count
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        packed = None
        if compression is not None:
            data, name = zstandard.compress(data), f"{name}.zstd"
            packed = {"basename": name, "bytes": len(data), "hashes": {}}
        publish_bytes(Storage(), f"{folder}/{name}", data)
        entry = {
            "version": 2, "format": "mds", "samples": count, "compression": compression, "hashes": [],
            "column_names": [*ENCODINGS], "column_encodings": [*ENCODINGS.values()], "column_sizes": SIZES,
            "raw_data": raw, "zip_data": packed, "size_limit": 1 << 26,
        }  # fmt: skip
        entries.append(entry | changes)
    publish_bytes(
        Storage(), f"{folder}/index.json", json.dumps({"version": 2, "shards": entries}).encode()
    )
    return f"{folder}/*.mds" + ("" if compression is None else ".zstd")


FIELDS = {"__key__": "id", "id": "id", "label": "label", "meta": "meta", "jpg": "jpg"}


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_samples_keep_their_promises(tmp_path: Path, compression: str | None) -> None:
    url = write(tmp_path, compression=compression)
    rows = [row_of(number) for number in range(sum(COUNTS))]
    check_samples(
        lambda: open_table(url, Storage(), FIELDS), [{"__key__": row["id"], **row} for row in rows]
    )
    found = list(ss.ShardDataset(url))
    assert [sample["tok"].tolist() for sample in found][:5] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0],
    ]
    assert {sample["tok"].dtype for sample in found} == {np.dtype(np.uint16)}
    assert found[9]["__key__"] == "shard.00001/00000000"
    found[0]["tok"] += 1  # an array of its own


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_epoch_on_s3_has_each_sample_once(bucket: str, s3_env: None, workers: int) -> None:
    dataset = ss.ShardDataset(write(f"{bucket}/mds"), fields=["label"], shuffle=True)
    loader = ss.ShardLoader(dataset, 4, num_workers=workers)
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert sorted(labels) == [number - 3 for number in range(sum(COUNTS))]
    assert labels != sorted(labels)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "json"}, ManifestError, "a shard of format 'json' 2"),
        ({"samples": 3}, ShardError, "lengths are not those of its index"),
        ({"column_sizes": [None, 4, None, None, None]}, ShardError, "damaged: sample 0"),
        ({"column_sizes": [8]}, ManifestError, "no index of MDS"),
        ({"column_encodings": ["str", "pkl", "json", "jpeg", "bytes"]}, OptionError, "'label' has the encoding 'pkl': data never runs as code"),
        ({"column_encodings": ["str", "pil", "json", "jpeg", "bytes"]}, OptionError, "'pil': it is not read"),
        ({"column_encodings": ["str", "int", "int8", "jpeg", "str_int"]}, ShardError, "column 'tok'"),
    ],
)  # fmt: skip
def test_index_that_does_not_fit_is_an_error(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(ss.ShardDataset(write(tmp_path, **changes)))


def test_column_that_is_left_out_may_be_a_pickle(tmp_path: Path) -> None:
    url = write(tmp_path, column_encodings=["str", "pkl", "json", "jpeg", "bytes"])
    assert next(iter(ss.ShardDataset(url, fields=["id"])))["id"] == "k00"


def test_shard_that_is_cut_unlisted_or_replaced_is_an_error(tmp_path: Path) -> None:
    url, path = write(tmp_path), tmp_path / "shard.00002.mds"
    data = path.read_bytes()
    dataset = ss.ShardDataset(url)
    path.write_bytes(data[:-1] + b"x")
    with pytest.raises(ChangedError, match=path.name):
        list(dataset)
    path.write_bytes(data[:-1])
    with pytest.raises(ManifestError, match="not as it says.*shard.00002"):
        ss.ShardDataset(url)
    path.write_bytes(data)
    (tmp_path / "other.mds").write_bytes(data)
    with pytest.raises(ManifestError, match="is not in it.*other.mds"):
        ss.ShardDataset(url)
    with pytest.raises(OptionError, match="use .select"):
        ss.ShardDataset(f"{tmp_path}/shard*.mds", where="label = 2")


def test_shards_that_are_missing_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = write(tmp_path)
    with pytest.raises(ManifestError, match=r"name its shards: FOLDER/\*.mds"):
        ss.ShardDataset(tmp_path)
    (tmp_path / "shard.00001.mds").unlink()
    assert len(ss.ShardDataset(url)) == sum(COUNTS) - 1
    assert "2 of the 3 shards" in caplog.text
