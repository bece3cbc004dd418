"""Datasets on a real local cluster: Ray's own methods on the rows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data

import shardstream as ss
from shardstream.testing import make_shards
from tests.ray.cluster import MARKS, keys
from tests.small_datasets import grouped, numbered

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("read") / "data", 107)


def keys_of(rows: Any) -> list[str]:
    return [row["__key__"] for row in rows.take_all()]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "window": 8, "block": 2, "microbatch": 4}]
)
def test_rows_have_the_order_of_the_dataset(
    folder: str, options: dict[str, Any], in_order: None
) -> None:
    rows = ss.ray.read(folder, override_num_blocks=9, **grouped(**options))
    assert keys_of(rows) == keys(folder, **grouped(**options))
    assert keys_of(ss.ray.read(folder)) == keys(folder)


def test_counts_and_schema_read_no_shard(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", 40)
    rows = ss.ray.read(folder)
    for tar in Path(folder).glob("*.tar"):
        tar.unlink()
    assert rows.count() == 40
    schema = rows.schema()
    assert schema.names == ["__key__", "cls", "npy"]
    assert [str(kind) for kind in schema.types] == ["string", "binary", "binary"]
    assert rows.select_columns(["cls"]).schema().names == ["cls"]


def test_a_limit_reads_few_rows(folder: str) -> None:
    rows = ss.ray.read(folder, override_num_blocks=20)
    assert len(rows.take(3)) == 3
    assert rows.limit(5).count() == 5
    assert len(rows.limit(30).take_all()) == 30


def test_columns_are_selected_before_they_are_decoded(tmp_path: Path, in_order: None) -> None:
    given = [{"json": b"{", "cls": n, "txt": "a"} for n in range(50)]
    folder = make_shards(tmp_path / "bad", samples=given)
    rows = ss.ray.read(ss.ShardDataset(folder).decode())
    assert rows.select_columns(["cls", "txt"]).take(2) == [
        {"cls": 0, "txt": "a"},
        {"cls": 1, "txt": "a"},
    ]
    assert rows.select_columns([]).count() == 50
    skipping = ss.ray.read(ss.ShardDataset(folder, on_error="skip").decode())
    assert skipping.count() == 0


def test_decoded_rows_are_arrow_columns(folder: str, in_order: None) -> None:
    rows = ss.ray.read(ss.ShardDataset(folder).decode(), fields=["npy", "cls"])
    first = rows.take(1)[0]
    assert (first["__key__"], first["cls"]) == ("000000", 0)
    assert np.array_equal(first["npy"], np.zeros((2, 3), np.int32))
    assert rows.schema().names == ["__key__", "npy", "cls"]
    assert rows.sum("cls") == sum(range(107))


def test_samples_with_other_fields_and_shapes_are_joined(tmp_path: Path, in_order: None) -> None:
    given: list[dict[str, Any]] = [
        {"npy": np.ones((1 + n // 10, 2))} | ({"json": {"a": n}} if n < 10 else {"json": {"b": "x"}} if n < 20 else {})
        for n in range(30)
    ]  # fmt: skip
    folder = make_shards(tmp_path / "mixed", samples=given, per_shard=10)
    rows = ss.ray.read(ss.ShardDataset(folder).decode(), override_num_blocks=3)
    found = rows.take_all()
    assert [row["npy"].shape for row in found] == [sample["npy"].shape for sample in given]
    assert found[3]["json"]["a"] == 3
    assert found[13]["json"]["b"] == "x"
    assert found[23].get("json") is None
    batch = next(iter(rows.iter_batches(batch_size=30)))
    assert [array.shape for array in batch["npy"]] == [sample["npy"].shape for sample in given]


def test_show_prints_rows(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    ss.ray.read(folder, fields=["cls"]).show(2)
    assert "'cls': b'" in capsys.readouterr().out


def test_shuffle_split_and_repartition_keep_each_row(folder: str) -> None:
    rows = ss.ray.read(folder)
    assert sorted(keys_of(rows.random_shuffle(seed=1))) == keys(folder)
    parts = rows.split(3)
    assert sorted(key for part in parts for key in keys_of(part)) == keys(folder)
    train, test = rows.train_test_split(0.25)
    assert sorted(keys_of(train) + keys_of(test)) == keys(folder)
    streams = rows.streaming_split(2, equal=False)
    with ThreadPoolExecutor() as pool:
        taken = list(pool.map(lambda stream: list(stream.iter_rows()), streams))
    assert sorted(row["__key__"] for one in taken for row in one) == keys(folder)


def test_tables_are_written(folder: str, tmp_path: Path) -> None:
    rows = ss.ray.read(ss.ShardDataset(folder).decode())
    rows.write_parquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out", columns=["__key__", "cls"])
    assert sorted(table["__key__"].to_pylist()) == keys(folder)
    rows.write_numpy(str(tmp_path / "npy"), column="npy")
    arrays = [np.load(path) for path in sorted((tmp_path / "npy").glob("*.npy"))]
    assert sorted(np.concatenate(arrays)[:, 0, 0].tolist()) == [*range(107)]


def test_loose_files_are_rows(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number:02d}.txt").write_text(str(number))
    dataset = ss.ObjectDataset(str(tmp_path), label="folder").decode()
    rows = ss.ray.read(dataset)
    assert rows.count() == 20
    assert sorted(row["txt"] for row in rows.take_all()) == sorted(map(str, range(20)))


def test_rows_of_a_table_have_the_types_of_its_columns(tmp_path: Path) -> None:
    rows = {"number": list(range(30)), "text": [f"t{number}" for number in range(30)]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=10)
    found = ss.ray.read(ss.ShardDataset(str(tmp_path / "*.parquet"), subset=range(5, 30)))
    assert sorted((row["number"], row["text"]) for row in found.take_all()) == [
        (number, f"t{number}") for number in range(5, 30)
    ]


def test_an_error_in_a_task_keeps_its_type_and_names_the_sample(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "bad", samples=[{"cls": b"x"}])
    with pytest.raises(ss.errors.DecodeError, match=r"000000\.tar, sample '00000000', field 'cls'"):
        ss.ray.read(ss.ShardDataset(folder).decode()).take_all()

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError(sample["cls"])

    with pytest.raises(ZeroDivisionError, match=r"sample '00000000' of .*000000\.tar"):
        ss.ray.read(ss.ShardDataset(folder).map(fail)).take_all()

    def strange(sample: dict[str, Any]) -> dict[str, Any]:
        return {"__key__": sample["__key__"], "thing": Exception}

    with pytest.raises(ss.errors.SampleError, match="a column of type does not fit one Arrow type"):
        ss.ray.read(ss.ShardDataset(folder).map(strange)).take_all()


def test_large_functions_travel_with_the_tasks(folder: str) -> None:
    blob = bytes(3 << 20)

    def measure(sample: dict[str, Any]) -> dict[str, Any]:
        return {"size": len(blob)}

    rows = ss.ray.read(ss.ShardDataset(folder).map(measure), override_num_blocks=2)
    assert rows.take(1) == [{"size": 3 << 20}]


class Repeated(ss.ShardDataset):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()
        yield from super().__iter__()


def test_arguments_are_checked_before_anything_is_read(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ss.errors.StorageError, match="nowhere"):
        ss.ray.read(str(tmp_path / "nowhere"))
    with pytest.raises(ss.errors.OptionError, match=r"has no field 'jpg'; its fields are cls, npy"):
        ss.ray.read(folder, fields=["jpg"])
    dataset = ss.ShardDataset(folder)
    with pytest.raises(
        ss.errors.OptionError, match=r"shuffle must be given to ShardDataset\(...\)"
    ):
        ss.ray.read(dataset, shuffle=True)
    with pytest.raises(
        ss.errors.OptionError, match="storage_options must be given to ShardDataset"
    ):
        ss.ray.read(dataset, storage_options={})
    with pytest.raises(ss.errors.OptionError, match=r"streaming_split\(\)"):
        ss.ray.read(ss.ShardDataset(folder, placement=ss.Placement(0, 2)))
    with pytest.raises(ss.errors.OptionError, match=r"Repeated.__iter__ would not be called here"):
        ss.ray.read(Repeated(folder))
    with pytest.raises(ss.errors.OptionError, match="MapDataset reads single samples by number"):
        ss.ray.read(ss.ShardDataset(folder).by_number())  # type: ignore[arg-type]
    with pytest.raises(ss.errors.OptionError, match="'many' is not a size"):
        ss.ray.read(folder, task_bytes="many")
    with pytest.raises(TypeError, match="nonsense"):
        ss.ray.read(folder, nonsense=1)


def test_without_ray_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["ray"] = None
import shardstream as ss
ss.ray
try:
    ss.ray.read("x")
except ss.errors.OptionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        'ss.ray.read needs Ray, and ray is not installed; pip install ".[ray]" in a clone of shardstream\n'
    )


def test_names_are_listed_and_unknown_ones_are_attribute_errors() -> None:
    assert {"Collate", "read"} <= set(dir(ss.ray))
    for name in [*dir(ss.ray), *dir(ss.ray)]:  # a module of the same name would replace a function
        assert callable(getattr(ss.ray, name)), name
    with pytest.raises(AttributeError, match=r"module 'shardstream\.ray' has no attribute 'load'"):
        ss.ray.load  # noqa: B018
    assert ss.ray.__name__ == "shardstream.ray" != ray.__name__


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parent.parent.parent / "docs" / "ray.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 5
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})  # noqa: S102  (our own page)
    assert list((tmp_path / "predictions").glob("*.parquet"))
