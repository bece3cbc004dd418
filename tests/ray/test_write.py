"""Rows of Ray datasets written to shards: order, sizes, bytes, and errors that publish nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.data
from pyarrow import parquet
from ray.data.extensions import ArrowTensorArray
from ray.exceptions import RayError

import shardstream as ss
from shardstream.packing import Progress
from tests.limits import set_limits
from tests.ray.cluster import MARKS
from tests.servers import S3Server

pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore:Use 'expr':UserWarning"),
]

NUM_SAMPLES = 120
KEYS = [f"{n:04d}" for n in range(NUM_SAMPLES)]


def sample(n: int) -> dict[str, Any]:
    return {
        "__key__": f"{n:04d}",
        "bin": bytes([n]) * (n * 7),
        "cls": n % 5,
        "json": {"n": n, "text": f"ä{n}"},
        "npy": np.full((2, n % 3 + 1), n, np.float32),
        "txt": f"number {n}",
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write samples of different sizes in shards of up to 50 kB."""
    folder = tmp_path_factory.mktemp("write") / "source"
    with ss.ShardWriter(folder, max_bytes=50_000, max_samples=30) as writer:
        for n in range(NUM_SAMPLES):
            writer.write(sample(n))
    return str(folder)


def files_of(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def is_published(folder: Path) -> bool:
    return (folder / "index.json").exists()


LIMITS: dict[str, Any] = {"max_bytes": 50_000, "max_samples": 30}


def test_rows_that_were_read_are_written_to_the_same_files(source: str, tmp_path: Path) -> None:
    report = ss.ray.write(ss.ray.read(source), tmp_path / "raw", **LIMITS)
    assert files_of(tmp_path / "raw") == files_of(source)
    tars = [path.stat().st_size for path in Path(source).glob("*.tar")]
    assert (report.samples, report.shards, report.total_bytes) == (120, len(tars), sum(tars))
    assert report.fields == dict.fromkeys(["bin", "cls", "json", "npy", "txt"], 120)
    assert ss.verify(str(tmp_path / "raw")).problems == ()
    decoded = ss.ray.read(ss.ShardDataset(source).decode(), override_num_blocks=5)
    ss.ray.write(decoded, tmp_path / "decoded", concurrency=1, **LIMITS)
    assert files_of(tmp_path / "decoded") == files_of(source)


def test_blocks_of_the_dataset_do_not_change_the_files(source: str, tmp_path: Path) -> None:
    rows = ss.ray.read(source)
    for name, some in (
        ("one", rows.repartition(1)),
        ("many", rows.repartition(13)),
        ("kept", rows.repartition(2).materialize()),
        ("pandas", rows.map_batches(lambda table: table, batch_format="pandas")),
        ("limited", rows.limit(NUM_SAMPLES)),
    ):
        ss.ray.write(some, tmp_path / name, **LIMITS)
        assert files_of(tmp_path / name) == files_of(source), name


def test_a_limit_writes_the_first_rows(source: str, tmp_path: Path) -> None:
    rows = ss.ray.read(source).repartition(3).materialize().limit(50)
    ss.ray.write(rows, tmp_path / "few", max_samples=20)
    found = [one["__key__"] for one in ss.ShardDataset(str(tmp_path / "few"))]
    assert found == KEYS[:50]


def test_shards_are_filled_up_to_a_number_of_samples(tmp_path: Path) -> None:
    rows = ray.data.range(25, override_num_blocks=6).rename_columns({"id": "n.cls"})
    report = ss.ray.write(rows, tmp_path / "data-{shard:03d}.tar", max_samples=10, name="numbers")
    assert (report.samples, report.shards) == (25, 3)
    samples = list(ss.ShardDataset(str(tmp_path)).decode())
    assert [one["__key__"] for one in samples] == [f"{n:08d}" for n in range(25)]
    assert [one["n.cls"] for one in samples] == [*range(25)]
    assert Path(samples[10]["__url__"]).name == "data-001.tar"


def test_values_are_encoded_by_the_names_of_their_columns(tmp_path: Path) -> None:
    rows = [
        {"key": "a", "cls": 1, "x.npy": np.ones((2, 3), np.int16), "m.json": {"l": [1]}, "b": b"1"},
        {"key": "b", "cls": None, "x.npy": np.zeros((1, 3), np.int16), "m.json": None, "b": b""},
        {"key": "c/d", "cls": 3, "x.npy": np.ones((2, 3), np.int16), "m.json": None, "b": b"3"},
    ]
    ss.ray.write(ray.data.from_items(rows), tmp_path / "items")
    first, second, third = ss.ShardDataset(str(tmp_path / "items")).decode()
    assert (first["__key__"], first["cls"], first["m.json"]) == ("a", 1, {"l": [1]})
    assert (first["x.npy"].shape, first["x.npy"].dtype) == ((2, 3), np.int16)
    assert {name for name in second if not name.startswith("__")} == {"x.npy", "b"}
    assert (third["__key__"], third["b"]) == ("c/d", b"3")
    table = pa.table(
        {
            "__key__": pa.array(["k", "l"]).dictionary_encode(),
            "__other__": [1, 2],
            "txt": pa.array(["é", None], pa.large_string()),
            "f.npy": pa.array([[0.5, 1], None], pa.list_(pa.float32())),
            "one.npy": pa.array([1.5, 2], pa.float32()),
            "t.npy": ArrowTensorArray.from_numpy(np.arange(4, dtype=np.uint8).reshape(2, 2)),
            "raw": pa.array([b"ab", b"cd"], pa.binary(2)),
            "none": pa.nulls(2),
        }
    )
    ss.ray.write(ray.data.from_arrow(table), tmp_path / "table")
    first, second = ss.ShardDataset(str(tmp_path / "table")).decode()
    assert (first["__key__"], first["txt"], first["raw"]) == ("k", "é", b"ab")
    assert (first["f.npy"].dtype, first["one.npy"].dtype) == (np.float32, np.float32)
    assert (second["one.npy"], second["t.npy"].tolist()) == (2, [2, 3])
    names = {name for name in second if not name.startswith("__")}
    assert names == {"one.npy", "t.npy", "raw"}


def test_tensors_of_arrow_keep_their_shape(tmp_path: Path) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    )
    parquet.write_table(pa.table({"x.npy": tensors, "x.json": tensors}), tmp_path / "t.parquet")
    for name, rows in [
        ("arrow", ray.data.from_arrow(pa.table({"x.npy": tensors, "x.json": tensors}))),
        ("parquet", ray.data.read_parquet(str(tmp_path / "t.parquet"))),
    ]:
        ss.ray.write(rows, str(tmp_path / name))
        first, _ = ss.ShardDataset(str(tmp_path / name), shuffle=False).decode()
        assert first["x.npy"].dtype == np.float32
        assert first["x.npy"].tolist() == first["x.json"] == [[0, 1, 2], [3, 4, 5]]


def test_nested_lists_of_numbers_keep_their_dtype(tmp_path: Path) -> None:
    pairs = pa.list_(pa.list_(pa.float32()))
    grid = pa.list_(pa.list_(pa.list_(pa.uint8(), 2)))
    arrays = pa.struct({"a": pa.list_(pa.int16()), "b": pairs})
    table = pa.table(
        {
            "f.npy": pa.array([[[0.5, 1], [2, 3]], [], [[], []]], pairs),
            "u.npy": pa.array([[[[1, 2], [3, 4]]], [[[5, 6]], [[7, 8]]], None], grid),
            "b.npy": pa.array([[True], [], [False, True]], pa.list_(pa.bool_())),
            "s.npz": pa.array([{"a": [1], "b": [[2]]}] * 3, arrays),
        }
    )
    ss.ray.write(ray.data.from_arrow(table), tmp_path / "set")
    first, second, third = ss.ShardDataset(str(tmp_path / "set")).decode()
    assert (first["f.npy"].dtype, first["f.npy"].tolist()) == (np.float32, [[0.5, 1], [2, 3]])
    assert (second["f.npy"].dtype, third["f.npy"].shape) == (np.float32, (2, 0))
    assert (first["u.npy"].dtype, first["u.npy"].tolist()) == (np.uint8, [[[1, 2], [3, 4]]])
    assert second["u.npy"].tolist() == [[[5, 6]], [[7, 8]]]
    assert (second["b.npy"].dtype, third["b.npy"].tolist()) == (np.bool_, [False, True])
    assert (first["s.npz"]["a"].dtype, first["s.npz"]["b"].dtype) == (np.int16, np.float32)


def test_long_and_foreign_names_keep_the_sizes_exact(tmp_path: Path) -> None:
    keys = [f"{'ä' * 30}{n}" if n % 2 else f"{'x' * 120}{n}" for n in range(40)]
    rows = [{"key": key, "bin": bytes(n * 50)} for n, key in enumerate(keys)]
    with ss.ShardWriter(tmp_path / "writer", max_bytes=20_000) as writer:
        for row in rows:
            writer.write({"__key__": row["key"], "bin": row["bin"]})
    written = ray.data.from_items(rows, override_num_blocks=3)
    ss.ray.write(written, tmp_path / "ray", max_bytes=20_000)
    assert files_of(tmp_path / "writer") == files_of(tmp_path / "ray")


class KillsOneWorker:
    """Kills the first worker that unpickles it; the file remembers it."""

    def __init__(self, seen: Path, driver: int) -> None:
        self.seen, self.driver = seen, driver

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if os.getpid() != self.driver and not self.seen.exists():
            self.seen.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_tasks_do_not_change_the_files(source: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def kill_once(row: dict[str, Any]) -> dict[str, Any]:
        if row["__key__"] == "0060" and not seen.exists():
            seen.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    ss.ray.write(ss.ray.read(source).map(kill_once), tmp_path / "map", **LIMITS)
    assert files_of(tmp_path / "map") == files_of(source)
    options = {"auto_mkdir": KillsOneWorker(tmp_path / "killed", os.getpid())}
    ss.ray.write(ss.ray.read(source), tmp_path / "write", storage_options=options, **LIMITS)
    assert (tmp_path / "killed").exists()
    assert files_of(tmp_path / "write") == files_of(source)


class Scores:
    """A model that each actor loads once."""

    def __init__(self) -> None:
        self.weights = np.array([[0.5, 1.0]], np.float32)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        numbers = batch["cls"].astype(np.float32)[:, None]
        return {"__key__": batch["__key__"], "score.npy": numbers @ self.weights}


def test_predictions_of_a_pool_are_written_with_the_keys_of_their_samples(
    source: str, tmp_path: Path
) -> None:
    rows = ss.ray.read(ss.ShardDataset(source).decode(), fields=["cls"], num_cpus=0.25)
    pool = ray.data.ActorPoolStrategy(size=2)
    for name, predictions in (
        ("actors", rows.map_batches(Scores, batch_size=16, num_cpus=0.75, compute=pool)),
        ("tasks", rows.map_batches(Scores(), batch_size=16)),
    ):
        report = ss.ray.write(predictions, tmp_path / name, max_samples=50)
        assert report.fields == {"score.npy": NUM_SAMPLES}
    assert files_of(tmp_path / "actors") == files_of(tmp_path / "tasks")
    found = list(ss.ShardDataset(str(tmp_path / "actors")).decode())
    assert [one["__key__"] for one in found] == KEYS
    assert found[3]["score.npy"].tolist() == [1.5, 3.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"label": 3}], r"does not say how to write int64; rename it, for example to 'label.cls'.* field 'label'"),
        ([{"key": "a", "cls": 1}, {"key": "b", "cls": 1.5}], r"takes a whole number .*\[in row 1, sample 'b', field 'cls'"),
        ([{"key": "a", "cls": 1}, {"key": None, "cls": 2}], r"the row has no key.*\[in row 1\]"),
        ([{"key": 7, "cls": 1}], r"the key is text, but the column holds int64; use str\(key\)"),
        ([{"key": "a", "x.json": 1j}], r"JSON cannot hold this value.*sample 'a', field 'x.json'"),
        ([{"key": "a", "Cls": b""}], r"field 'Cls'"),
        ([{"key": "a.b", "cls": 1}], r"a key ends at its first dot.*\[in row 0"),
        ([{"key": "a", "cls": 1}, {"key": "b", "cls": None}], r"a sample without fields .*\[in row 1"),
        ([{"key": "a", "cls": 1}] * 2, r"in the shard already.*\[in row 1, sample 'a'"),
    ],
    ids=range(9),
)  # fmt: skip
def test_rows_that_cannot_be_written_are_named(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.errors.SampleError, match=message):
        ss.ray.write(ray.data.from_items(rows), tmp_path / "new")
    assert not is_published(tmp_path / "new")


def test_a_bad_row_late_publishes_nothing_and_is_overwritten(tmp_path: Path) -> None:
    items = [
        {"key": f"{n}", "x.cls": n if n != 77 else None, "y": b"" if n == 77 else None}
        for n in range(100)
    ]
    good = [{"key": f"{n}", "x.cls": n} for n in range(100)]
    bad = ray.data.from_items(
        [*good[:77], {"key": "77", "x.cls": 1.5}, *good[78:]], override_num_blocks=10
    )
    with pytest.raises(ss.errors.SampleError, match=r"row 7\d, "):
        ss.ray.write(bad, tmp_path / "new", max_samples=10)
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(str(tmp_path / "new"))
    with pytest.raises(ss.errors.OptionError, match="overwrite=True"):
        ss.ray.write(ray.data.from_items(items), tmp_path / "new")
    ss.ray.write(ray.data.from_items(items), tmp_path / "new", max_samples=60, overwrite=True)
    assert len(list(ss.ShardDataset(str(tmp_path / "new")))) == 100
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "index.json"
    ]  # fmt: skip


def test_keys_that_shards_share_are_refused(tmp_path: Path) -> None:
    items = [{"key": f"{n % 25}", "cls": n} for n in range(30)]
    rows = ray.data.from_items(items, override_num_blocks=4)
    first = r"the key '0' comes twice, in 000000\.tar and in 000002\.tar, and so do 4 other keys"
    with pytest.raises(ss.errors.SourceError, match=first):
        ss.ray.write(rows, tmp_path / "new", max_samples=10)
    assert not is_published(tmp_path / "new")


def test_a_key_that_is_the_number_of_a_row_without_a_key_is_refused(tmp_path: Path) -> None:
    first = ray.data.from_arrow(pa.table({"txt": ["a"] * 6}))
    second = ray.data.from_arrow(pa.table({"key": [f"{n:08d}" for n in range(6)], "txt": ["b"] * 6}))  # fmt: skip
    with pytest.raises(ss.errors.SourceError, match="the key '00000000' comes twice"):
        ss.ray.write(first.union(second), tmp_path / "new", max_samples=4)
    assert not is_published(tmp_path / "new")


def test_progress_is_logged_at_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_limits(monkeypatch, Progress, LINE_EVERY_S=0)
    caplog.set_level("INFO", logger="shardstream")
    rows = ray.data.from_items([{"cls": n} for n in range(30)], override_num_blocks=2)
    ss.ray.write(rows, tmp_path / "new", max_samples=10)
    lines = [line for line in caplog.messages if line.startswith(f"ray.write {tmp_path}/new: ")]
    assert "3 shards  30 samples" in lines[-1]


def test_an_error_upstream_is_passed_on_and_leaves_the_old_dataset(
    source: str, tmp_path: Path
) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"no model for {row['__key__']}")

    ss.ray.write(ss.ray.read(source), tmp_path / "data")
    before = files_of(tmp_path / "data")
    with pytest.raises((RayError, ValueError), match="no model for 0"):
        ss.ray.write(ss.ray.read(source).map(fails), tmp_path / "data", overwrite=True)
    assert files_of(tmp_path / "data") == before
    with pytest.raises(ss.errors.OptionError, match="a dataset is published here"):
        ss.ray.write(ss.ray.read(source), tmp_path / "data")


def test_wrong_arguments_are_refused(source: str, tmp_path: Path) -> None:
    rows = ss.ray.read(source)
    with pytest.raises(ss.errors.OptionError, match="the dataset has no rows"):
        ss.ray.write(rows.limit(0), tmp_path / "new")
    with pytest.raises(ss.errors.OptionError, match="takes a Ray dataset, not ShardDataset"):
        ss.ray.write(ss.ShardDataset(source), tmp_path / "new")
    with pytest.raises(ss.errors.OptionError, match="concurrency must be at least 1"):
        ss.ray.write(rows, tmp_path / "new", concurrency=0)
    with pytest.raises(ss.errors.OptionError, match="max_samples must be 1 or more"):
        ss.ray.write(rows, tmp_path / "new", max_samples=0)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_rows_are_written_to_a_store(source: str, bucket: str, s3: S3Server, s3_env: None) -> None:
    options = s3.storage_options
    ss.ray.write(ss.ray.read(source), f"{bucket}/data", storage_options=options, **LIMITS)
    url = f"{bucket}/data/"
    assert ss.verify(url).problems == ()
    written = list(ss.ShardDataset(url).decode())
    assert [one["cls"] for one in written] == [n % 5 for n in range(NUM_SAMPLES)]
    assert written[5]["txt"] == "number 5"
