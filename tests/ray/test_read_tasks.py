"""Read tasks return the samples of a dataset as rows: each once, in its order. They run here without a cluster."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.format import ShardInfo
from shardstream.ray import rows_table
from shardstream.storage import LocatedShards, Storage
from shardstream.testing import make_shards
from tests.ray.cluster import MARKS, rows, samples, tables
from tests.small_datasets import grouped, numbered

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("read") / "data", 107)


@pytest.mark.parametrize("num_tasks", [1, 2, 7, 200])
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3, "window": 64, "block": 5}])
@pytest.mark.parametrize("is_decoded", [False, True])
def test_rows_are_the_samples_in_the_order_of_the_dataset(
    folder: str, num_tasks: int, options: dict[str, Any], is_decoded: bool
) -> None:
    dataset = ss.ShardDataset(folder, **grouped(**options))
    dataset = dataset.decode().rename(label="cls") if is_decoded else dataset
    dataset.set_epoch(2)
    expected = samples(dataset)
    found = rows(dataset, num_tasks=num_tasks, epoch=2)
    assert len(found) == 107
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@given(
    nsamples=st.integers(1, 60),
    num_tasks=st.integers(1, 70),
    shuffle=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "lanes": st.integers(1, 3),
            "microbatch": st.integers(1, 5),
            "remainder": st.sampled_from(["pad", "drop", "keep"]),
        }
    ),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_sample_comes_once_whatever_the_options(
    tmp_path: Path, nsamples: int, num_tasks: int, shuffle: bool, options: dict[str, Any]
) -> None:
    folder = tmp_path / f"{nsamples}"
    if not folder.exists():
        make_shards(folder, samples=nsamples, per_shard=7)
    dataset = ss.ShardDataset(str(folder), **grouped(shuffle=shuffle, **options))
    found = rows(dataset, num_tasks=num_tasks)
    assert [row["__key__"] for row in found] == [sample["__key__"] for sample in dataset]
    assert len({row["__key__"] for row in found}) == nsamples


def test_a_task_has_the_shards_of_its_rows_only_and_is_small(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "many", samples=4000, per_shard=4)
    for shuffle in (False, True):
        dataset = ss.ShardDataset(
            folder, shuffle=shuffle, order=ss.OrderOptions(window=64, block=4)
        )
        sizes = [
            len(pickle.dumps(task)) for task, _ in ss.ray.plan_read(dataset, num_tasks=100).tasks()
        ]
        assert len(sizes) == 100
        assert max(sizes) < 16_000


@pytest.mark.slow
def test_a_shuffled_task_of_large_shards_is_small(tmp_path: Path) -> None:
    shards = []
    for number in range(100):
        path = tmp_path / f"{number:06d}.tar"
        with path.open("wb") as tar:
            tar.truncate(1 << 30)  # sparse
        sha256 = f"{number:064x}"
        shards.append(ShardInfo(url=str(path), nsamples=10_000, filesize=1 << 30, sha256=sha256))
    located = LocatedShards(shards=tuple(shards), indexed=frozenset(one.url for one in shards))
    catalog = ShardCatalog(located, Storage())
    dataset = ss.loader.CatalogDataset(catalog, shuffle=True).decode()
    job = ss.ray.plan_read(dataset)
    assert max(len(pickle.dumps(task)) for task, _ in job.tasks()) < 16_000


def test_counts_come_from_the_index_and_blocks_are_bounded(tmp_path: Path) -> None:
    blob = random.Random(0).randbytes(1 << 18)
    given = [{"a": blob, "b": b"1"} for _ in range(120)]
    dataset = ss.ShardDataset(make_shards(tmp_path / "big", samples=given, per_shard=200))
    job = ss.ray.plan_read(dataset, task_bytes=16 << 20)
    counts = [(meta.num_rows, meta.size_bytes) for _, meta in job.tasks()]
    assert [count for count, _ in counts] == [60, 60]
    assert sum(size for _, size in counts) == pytest.approx(30 << 20, rel=0.01)
    for one in (dataset, dataset.decode()):
        found = tables(one, task_bytes=16 << 20)
        assert all(table.nbytes <= 9 << 20 for table in found)
        assert 4 <= len(found) <= 6
        assert [len(table) for table in tables(one, fields=["b"])] == [120]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_fields_are_projected_and_missing_ones_are_null(tmp_path: Path, has_manifest: bool) -> None:
    given: list[dict[str, Any]] = [{"a": b"1", "c": b"3"}, {"a": b"1"}, {"b": b"2", "a": b"4"}]
    folder = make_shards(tmp_path / "some", samples=given, per_shard=2)
    if not has_manifest:
        (tmp_path / "some" / "index.json").unlink()
    dataset = ss.ShardDataset(folder)
    assert rows(dataset, fields=["c", "a"]) == [
        {"__key__": "00000000", "c": b"3", "a": b"1"},
        {"__key__": "00000001", "c": None, "a": b"1"},
        {"__key__": "00000002", "c": None, "a": b"4"},
    ]
    (schema,) = {table.schema for table in tables(dataset, fields=["c", "a"], num_tasks=3)}
    assert schema == pa.schema([("__key__", pa.string()), ("c", pa.binary()), ("a", pa.binary())])
    if has_manifest:
        assert rows(dataset)[0] == {"__key__": "00000000", "a": b"1", "b": None, "c": b"3"}


def test_keys_of_different_lengths_and_urls_are_read(tmp_path: Path) -> None:
    given = [{"__key__": str(n), "txt": "ä" * n} for n in range(120)]
    folder = make_shards(tmp_path / "keys", samples=given, per_shard=50)
    found = rows(ss.ShardDataset(folder).decode(), fields=["txt", "__url__"], num_tasks=3)
    assert [(row["__key__"], row["txt"]) for row in found] == [
        (s["__key__"], s["txt"]) for s in given
    ]
    assert found[119]["__url__"].endswith("000002.tar")
    assert [row["__key__"] for row in rows(ss.ShardDataset(folder))] == [
        s["__key__"] for s in given
    ]


def test_only_wanted_fields_are_decoded(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "bad", samples=[{"json": b"{", "cls": 4}])
    assert rows(ss.ShardDataset(folder).decode(), fields=["cls"]) == [
        {"__key__": "00000000", "cls": 4}
    ]


def test_values_get_the_types_of_their_kind() -> None:
    picture = PIL.Image.new("RGB", (3, 2))
    table = rows_table(
        [
            {"__key__": "0", "__url__": "u", "i": 1, "f": 1, "b": True, "t": "x", "r": b"1", "n": None,
             "a": np.ones((2, 3), np.uint8), "v": np.ones((1, 2)), "g": torch.ones(2, requires_grad=True), "p": picture,
             "j": {"k": [1]}, "s": np.float32(1), "z": torch.tensor(3)},
            {"__key__": "1", "__url__": "u", "i": 2, "f": 1.5, "b": False, "t": None, "r": None, "n": None,
             "a": None, "v": np.ones((2, 2)), "g": torch.ones(2), "p": picture, "j": {"l": "m"}, "s": np.float32(2),
             "z": torch.tensor(4)},
        ],
        None,
    )  # fmt: skip
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert types["a"] == "ArrowTensorTypeV2(shape=(2, 3), dtype=uint8)" or "uint8" in types["a"]
    assert {name: types[name] for name in "ifbtrnjsz"} == {
        "i": "int64", "f": "double", "b": "bool", "t": "string", "r": "binary", "n": "null",
        "j": "struct<k: list<item: int64>, l: string>", "s": "float", "z": "int64",
    }  # fmt: skip
    assert "__url__" not in types
    assert table["v"].to_pylist()[1].shape == (2, 2)
    assert table["a"].to_pylist()[1] is None
    assert table["p"].to_pylist()[0].shape == (2, 3, 3)


@pytest.mark.parametrize(
    "values", [[1, "a"], [{"a": 1}, {"a": "b"}], [object(), 1], [np.ones(2), np.ones((2, 2))], [1 << 70, 1]]
)  # fmt: skip
def test_a_column_without_one_type_is_an_error_that_names_it(values: list[Any]) -> None:
    with pytest.raises(
        ss.errors.SampleError, match=r"fit one Arrow type.*in a\.tar, sample '5', field 'x'"
    ):
        rows_table([{"__key__": "5", "__url__": "a.tar", "x": value} for value in values], None)


def test_a_key_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    table = [{"__key__": "\udcff", "__url__": "a.tar", "x": b"1"}]
    with pytest.raises(ss.errors.SampleError, match=r"not valid UTF-8 .* field '__key__'"):
        rows_table(table, None)


def test_loose_files_give_the_rows_of_their_dataset(tmp_path: Path) -> None:
    for number in range(30):
        place = tmp_path / ("cat" if number % 3 else "dog") / f"{number:02d}.txt"
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"text {number}")
    for shuffle in (False, True):
        dataset = ss.ObjectDataset(str(tmp_path), label="folder", shuffle=shuffle).decode()
        assert rows(dataset, num_tasks=4) == samples(dataset)
        job = ss.ray.plan_read(dataset, num_tasks=10)
        assert sum(meta.num_rows or 0 for _, meta in job.tasks()) == 30
        assert max(len(pickle.dumps(task)) for task, _ in job.tasks()) < 16_000


def test_a_mix_gives_its_order_and_the_steps_of_its_parts(folder: str, tmp_path: Path) -> None:
    other = make_shards(tmp_path / "other", samples=40)
    parts = [ss.ShardDataset(folder).decode(), ss.ShardDataset(other).decode().map_dict(cls=str)]
    mix = ss.mix([part.rename(cls="cls", keep=False) for part in parts], weights=[1, 1])
    assert [row["cls"] for row in rows(mix.map_dict(cls=str), num_tasks=5)] == [
        str(sample["cls"]) for sample in mix
    ]


def test_maps_with_a_generator_give_the_values_of_the_dataset(folder: str) -> None:
    def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"__key__": sample["__key__"], "noise": rng.random()}

    dataset = ss.ShardDataset(folder, shuffle=True).map(noise, rng=True)
    assert rows(dataset, num_tasks=6) == samples(dataset)


def test_bad_samples_are_skipped_by_the_policy_and_then_not_counted_in_advance(
    tmp_path: Path,
) -> None:
    given = [{"cls": b"x" if n in (3, 7) else b"1"} for n in range(10)]
    folder = make_shards(tmp_path / "bad", samples=given)
    with pytest.raises(ss.errors.DecodeError, match=r"000000\.tar, sample '00000003', field 'cls'"):
        rows(ss.ShardDataset(folder).decode())
    tolerant = ss.ShardDataset(folder, on_error="skip").decode()
    assert len(rows(tolerant, num_tasks=2)) == 8
    assert [meta.num_rows for _, meta in ss.ray.plan_read(tolerant).tasks()] == [None]
    with pytest.raises(ss.errors.SkipBudgetError):
        rows(ss.ShardDataset(folder, on_error=ss.SkipBudget(samples=1)).decode())


def test_a_damaged_tar_is_an_error_or_skipped(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "torn", samples=100, per_shard=100)
    with (tmp_path / "torn" / "000000.tar").open("r+b") as tar:
        tar.seek(1024 * 5)
        tar.write(b"\xff" * 512)
    with pytest.raises(ss.errors.ShardError, match=r"000000\.tar"):
        rows(ss.ShardDataset(folder))
    assert len(rows(ss.ShardDataset(folder, on_error="skip"))) == 99


def test_data_that_change_between_planning_and_reading_are_an_error(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "data", samples=10)
    tasks = [task for task, _ in ss.ray.plan_read(ss.ShardDataset(folder)).tasks()]
    path = tmp_path / "data" / "000000.tar"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))
    with pytest.raises(ss.errors.ChangedError, match="overwritten after the dataset was opened"):
        list(tasks[0].read())


def test_shards_without_an_index_are_read_whole(tmp_path: Path) -> None:
    folder = Path(make_shards(tmp_path / "plain", samples=25, per_shard=10))
    for extra in (*folder.glob("*.idx"), folder / "index.json"):
        extra.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scanned = ss.ShardDataset(str(folder))  # local tars are scanned
        assert len(rows(scanned, num_tasks=4)) == 25
    dataset = ss.ShardDataset(str(folder), read=ss.ReadOptions(index="ignore")).decode()
    assert rows(dataset, num_tasks=2) == samples(dataset)
    assert rows(dataset, fields=["cls"], num_tasks=2) == samples(dataset)
    with pytest.raises(ss.errors.OptionError, match="has no field 'nope'; its fields are cls"):
        rows(dataset, fields=["nope"])
    shuffled = ss.ShardDataset(str(folder), read=ss.ReadOptions(index="ignore"), shuffle=True)
    with pytest.raises(ss.errors.OptionError, match=r"run 'shardstream index' on them"):
        rows(shuffled)


def test_verified_data_are_verified_in_the_tasks(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "data", samples=30, per_shard=10)
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256"))
    assert rows(dataset, num_tasks=4) == samples(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.batched(4), r"the step Batched changes the number or the order .* map_batches\(\)"),
        (lambda d: d.shuffle(10), r"the step Shuffle changes .* random_shuffle\(\)"),
        (lambda d: d.to_tuple("cls"), r"the step ToTuple returns tuples"),
        (lambda d: d.map(str), r"a row of Ray is a dict of columns by name, but a step returns str"),
    ],
)  # fmt: skip
def test_steps_that_rows_cannot_have_are_refused(folder: str, change: Any, message: str) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        rows(change(ss.ShardDataset(folder)))


def test_wrong_arguments_are_refused(folder: str) -> None:
    dataset = ss.ShardDataset(folder)
    with pytest.raises(ss.errors.OptionError, match="has no field 'jpg'; its fields are cls, npy"):
        rows(dataset, fields=["jpg"])
    with pytest.raises(ss.errors.OptionError, match="must be a list of names"):
        rows(dataset, fields="cls")
    with pytest.raises(ss.errors.OptionError, match=r"none of the 107 rows .* has a column 'jpg'"):
        rows(dataset.map(dict), fields=["jpg"])
    with pytest.raises(ss.errors.OptionError, match="epoch must be"):
        rows(dataset, epoch=-1)
    with pytest.raises(ss.errors.OptionError, match="override_num_blocks must be at least 1"):
        rows(dataset, num_tasks=0)
    with pytest.raises(ss.errors.OptionError, match=r"version=Follow\(\) grows while it is read"):
        rows(ss.ShardDataset(folder, version=ss.loader.Follow()))


def test_rows_of_a_store_are_those_of_a_disk(folder: str, bucket: str, s3_env: None) -> None:
    given = [{"__key__": f"{n:03d}", "cls": n, "txt": f"{n}"} for n in range(60)]
    url = make_shards(f"{bucket}/data", samples=given, per_shard=16)
    both: list[dict[str, Any]] = [{}, {"shuffle": True, "window": 8, "microbatch": 4}]
    for options in both:
        dataset = ss.ShardDataset(f"{url}/", **grouped(**options))
        for decoded in (dataset, dataset.decode()):
            assert rows(decoded, num_tasks=3) == samples(decoded)
    tasks = [task for task, _ in ss.ray.plan_read(ss.ShardDataset(f"{url}/")).tasks()]
    make_shards(f"{bucket}/data", samples=given[::-1], per_shard=16, overwrite=True)
    with pytest.raises(ss.errors.ChangedError):
        [list(task.read()) for task in tasks]


@pytest.mark.parametrize("num_tasks", [1, 5, 200])
def test_rows_are_drawn_by_weight(folder: str, num_tasks: int) -> None:
    weights = np.arange(107) % 5
    raw = ss.ShardDataset(
        folder, weights=ss.Weights(weights, num_samples=300), shuffle=True, fields=("cls",)
    )
    for dataset in (raw, raw.decode()):
        found = rows(dataset, num_tasks=num_tasks)
        assert found == samples(dataset)
        assert len(found) == 300


def test_rows_have_the_fields_that_the_dataset_keeps(folder: str) -> None:
    for index in ("auto", "ignore"):
        kept = ss.ShardDataset(folder, fields=("cls;jpg",), read=ss.ReadOptions(index=index))
        for dataset in (kept, kept.decode()):
            assert rows(dataset, num_tasks=3) == samples(dataset)
            assert rows(dataset, fields=["cls"]) == samples(dataset)
            with pytest.raises(
                ss.errors.OptionError, match="has no field 'npy'; its fields are cls, jpg"
            ):
                rows(dataset, fields=["npy"])
    with pytest.raises(
        ss.errors.OptionError, match="has no field 'npy;jpg'; its fields are cls, npy"
    ):
        rows(ss.ShardDataset(folder), fields=["npy;jpg"])


def test_rows_that_select_refuses_are_left_out(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode().select(is_even)
    job = ss.ray.plan_read(dataset, num_tasks=3)
    assert [row["cls"] for row in rows(dataset, num_tasks=3)] == list(range(0, 107, 2))
    for planned in (job, ss.ray.plan_read(ss.mix([dataset]), num_tasks=3)):
        # Ray must not take the planned rows for the number of rows, nor read fewer for a limit.
        assert {metadata.num_rows for _, metadata in planned.tasks(2)} == {None}
        assert sum(task.stop - task.start for task, _ in planned.tasks(2)) == 107  # type: ignore[misc, union-attr]


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)
