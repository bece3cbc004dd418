"""Rows of Parquet files that are read in place, beside what pyarrow writes."""

from __future__ import annotations

import datetime
import decimal
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import (
    ChangedError,
    OptionError,
    ShardError,
    SourceError,
    StateError,
    StorageError,
)
from shardstream.storage import Storage, publish_bytes
from shardstream.tables import open_table
from shardstream.testing import check_samples, make_shards
from tests.servers import in_ci
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
FILES = ((53, 10), (8, 8), (30, 7))  # rows of each file, and of its row groups
ALL = {"__key__": "id", "id": "id", "label": "label", "text": "text", "image": "image"}
COUNT = sum(rows for rows, _ in FILES)


def encode(table: pa.Table, group_rows: int = 10, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=group_rows, **options)
    return stream.getvalue()


def row_of(number: int) -> dict[str, Any]:
    text = None if number % 7 == 0 else f"text {number}" * 9
    image = {"bytes": b"jpeg %d" % number, "path": f"{number}.jpg"}
    return {"id": f"k{number:03d}", "label": number % 3, "text": text, "image": image}


def write(folder: str | Path, files: Sequence[tuple[int, int]] = FILES) -> str:
    """Write files of numbered rows; return a glob of them."""
    first = 0
    for place, (rows, group_rows) in enumerate(files):
        found = [row_of(number) for number in range(first, first + rows)]
        schema = pa.Table.from_pylist([row_of(1)]).schema
        table = pa.Table.from_pylist(found, schema)
        publish_bytes(Storage(), f"{folder}/part-{place}.parquet", encode(table, group_rows))
        first += rows
    return f"{folder}/*.parquet"


def expected_rows(count: int = COUNT) -> list[dict[str, Any]]:
    rows = [row_of(number) for number in range(count)]
    return [{"__key__": row["id"], **row, "image": row["image"]["bytes"]} for row in rows]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("table"))


def dataset_of(url: str, **options: Any) -> ss.ShardDataset:
    fields = {name: name for name in options.pop("fields", ["id", "label", "text", "image"])}
    return ss.ShardDataset(url, fields={"__key__": "id", **fields}, **options)


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


@pytest.mark.slow
@settings(max_examples=12 if in_ci() else 4)
@given(files=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4))
def test_rows_of_any_row_groups_keep_the_promises_of_samples(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[int, int]]
) -> None:
    count = sum(rows for rows, _ in files)
    url = write(tmp_path_factory.mktemp("any"), files)
    if not count:
        with pytest.raises(SourceError, match="no row in"):
            open_table(url, Storage())
        return
    check_samples(lambda: open_table(url, Storage(), ALL), expected_rows(count))


def test_rows_on_s3_keep_the_promises_of_samples(bucket: str, s3_env: None) -> None:
    url = write(f"{bucket}/table")
    check_samples(lambda: open_table(url, Storage(), ALL), expected_rows())


def test_a_file_is_read_of_which_the_key_has_two_slashes(bucket: str, s3_env: None) -> None:
    write(f"{bucket}/table//2026", FILES[:1])
    assert len(list(ss.ShardDataset(f"{bucket}/table//2026/part-0.parquet"))) == FILES[0][0]


def test_without_shuffle_rows_come_in_the_order_of_the_files(table: str) -> None:
    found = list(ss.ShardDataset(table, fields={"cls": "label"}))
    assert [sample["cls"] for sample in found] == [number % 3 for number in range(COUNT)]
    assert found[55]["__key__"] == "part-1/00000002"
    assert found[55]["__url__"].endswith("/part-1.parquet")


@pytest.mark.parametrize("workers", [0, 2])
def test_state_continues_on_other_ranks_and_workers(table: str, workers: int) -> None:
    order = ss.OrderOptions(lanes=4, microbatch=2, window=8)

    def loader(rank: int, ranks: int, batch: int, num_workers: int) -> ss.ShardLoader:
        placement = ss.Placement(rank, ranks)
        dataset = dataset_of(table, shuffle=True, order=order, placement=placement)
        return ss.ShardLoader(dataset, batch, num_workers=num_workers)

    one = loader(0, 1, 4, 0)
    epoch = keys(one)
    assert sorted(epoch) == [row["__key__"] for row in expected_rows()]
    begin = iter(one)
    first = keys([next(begin) for _ in range(5)])
    assert first != epoch[:20]  # the next epoch
    state = one.state_dict()
    rest = keys(begin)
    parts = [loader(rank, 2, 2, workers) for rank in range(2)]
    found = []
    for part in parts:
        part.load_state_dict(state)
        found.append(keys(part))
    assert len(found[0]) == len(found[1])
    steps = [
        [one[at : at + 2], other[at : at + 2]]
        for one, other in [found]
        for at in range(0, len(one), 2)
    ]
    merged = [key for step in steps for both in step for key in both]
    assert merged[: len(rest) // 4 * 4] == rest[: len(rest) // 4 * 4]
    assert {*merged} == {*rest}


def test_each_row_group_is_read_once_by_a_lane(table: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(table, shuffle=True), 4, num_workers=0)
    for _ in range(2):
        assert len(keys(loader)) == COUNT
        assert loader.stats().timings.requests == 12


def test_state_of_other_row_groups_is_refused(table: str, tmp_path: Path) -> None:
    loader = ss.ShardLoader(dataset_of(table, shuffle=True), 4)
    next(iter(loader))
    state = loader.state_dict()
    shutil.copytree(Path(table).parent, tmp_path / "copy")
    ss.ShardLoader(dataset_of(f"{tmp_path}/copy/*.parquet", shuffle=True), 4).load_state_dict(state)
    other = write(tmp_path / "other", [(53, 11), *FILES[1:]])
    with pytest.raises(StateError, match="fingerprint"):
        ss.ShardLoader(dataset_of(other, shuffle=True), 4).load_state_dict(state)


def test_rows_are_chosen_by_columns_that_are_no_fields(table: str) -> None:
    some = dataset_of(table, where="label = 2", fields=["text"], shuffle=True)
    wanted = [row["__key__"] for row in expected_rows() if row["label"] == 2]
    assert sorted(sample["__key__"] for sample in some) == wanted
    assert [*next(iter(some))] == ["__key__", "__url__", "text"]
    by_place = dataset_of(table, where="#2 = 2 AND id > ''", fields=["text"])  # of id, label, text
    assert [sample["__key__"] for sample in by_place] == wanted
    named = dataset_of(table, subset=["k050", "k003"])
    assert [sample["__key__"] for sample in named] == ["k050", "k003"]
    balanced = dataset_of(table, fields=["label"], weights=np.arange(COUNT))
    assert len(list(balanced)) == COUNT


def test_files_may_differ_in_columns_that_are_not_read(tmp_path: Path) -> None:
    for place, columns in enumerate(
        ({"a": ["x"], "b": [1], "c": [1]}, {"a": ["y"], "b": ["z"], "c": [None]}, {})
    ):
        pq.write_table(pa.table(columns), tmp_path / f"{place}.parquet")
    url = f"{tmp_path}/*.parquet"
    assert [(one["a"], one["c"]) for one in ss.ShardDataset(url, fields=["a", "c"])] == [
        ("x", 1),
        ("y", None),
    ]
    assert [one["a"] for one in ss.ShardDataset(url, fields=["a"], where="c = 1")] == ["x"]
    with pytest.raises(SourceError, match="column 'b' is string, but int64"):
        ss.ShardDataset(url, fields=["a"], where="b = 1")
    with pytest.raises(SourceError, match="column 'b' is string, but int64"):
        ss.ShardDataset(url)


def test_values_of_columns(tmp_path: Path) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "tokens": pa.array([[1, 2], None, []], pa.list_(pa.uint16())),
        "boxes": pa.array([[[1.0, 2.0], []], [], [None]], pa.list_(pa.list_(pa.float32()))),
        "pair": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2)),
        "names": pa.array([["a", None], [], None]),
        "kind": pa.array(["x", "y", None]).dictionary_encode(),
        "time": pa.array([now] * 3, pa.timestamp("ns")),
        "price": pa.array([decimal.Decimal("1.10")] * 3),
        "meta": pa.array([{"n": [1]}, None, {"n": []}]),
        "view": pa.array(["a", None, "b"], pa.string_view()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    first, second, third = ss.ShardDataset(f"{tmp_path}/a.parquet")
    assert [first["tokens"].tolist(), first["tokens"].dtype] == [[1, 2], np.uint16]
    assert (second["tokens"], third["tokens"].shape) == (None, (0,))
    first["tokens"] += 1  # an array of its own
    assert [one.tolist() for one in first["boxes"]] == [[1.0, 2.0], []]
    assert (second["boxes"], third["boxes"]) == ([], [None])
    assert (second["pair"].tolist(), third["pair"]) == ([3, 4], None)
    assert (first["names"], third["names"], third["kind"]) == (["a", None], None, None)
    assert (first["kind"], first["price"]) == ("x", decimal.Decimal("1.10"))
    assert (first["time"], type(first["time"])) == (now, datetime.datetime)
    assert [row["view"] for row in (first, second, third)] == ["a", None, "b"]
    assert (first["meta"], second["meta"]) == ({"n": [1]}, None)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1, None]]), "column 'x' .*null among its numbers"),
        (pa.array([{"bytes": None, "path": "a.jpg"}]), "column 'x' .*bytes of 'a.jpg' are not"),
        (pa.array([1], pa.timestamp("ns")), "column 'x' .*would lose data"),
    ],
)
def test_value_without_a_form_is_an_error_with_its_column(
    tmp_path: Path, column: pa.Array, message: str
) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=message):
        list(ss.ShardDataset(f"{tmp_path}/a.parquet"))


def cut(data: bytes) -> bytes:
    return data[:-20]


def flip(data: bytes) -> bytes:
    """Damage the first page."""
    return data[:4] + bytes(byte ^ 255 for byte in data[4:60]) + data[60:]


def with_column(data: bytes, name: str) -> bytes:
    table = pq.read_table(io.BytesIO(data))
    return encode(table.append_column(name, pa.array(range(len(table)))))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut, ShardError, "end without a footer.*part-1"),
        (lambda _: b"", ShardError, "its 0 bytes end without a footer.*part-1"),
        (flip, StorageError, "part-1"),
        (
            lambda _: encode(
                pa.table({"id": ["a"], "label": ["b"], "text": ["c"], "image": ["d"]})
            ),
            SourceError,
            r"column '(label|image)' is string, but .*part-0.*part-1",
        ),
        (
            lambda _: encode(pa.table({"id": ["a"]})),
            SourceError,
            "column .(id|label|text|image). is missing, but .*part-1",
        ),
        (lambda data: with_column(data, "z"), SourceError, "'z' is not in .*part-0.*part-1"),
    ],
)
def test_bad_file_is_an_error_that_names_it(
    tmp_path: Path, damage: Any, error: type[Exception], message: str
) -> None:
    url = write(tmp_path)
    path = tmp_path / "part-1.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(error, match=message):
        list(ss.ShardDataset(url))


@pytest.mark.parametrize("store", ["local", "s3"])
def test_file_that_is_replaced_is_an_error(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = str(tmp_path)
    if store == "s3":
        request.getfixturevalue("s3_env")
        folder = request.getfixturevalue("bucket")
    dataset = dataset_of(write(folder))
    other = pa.Table.from_pylist([row_of(number) for number in range(100, 153)])
    publish_bytes(Storage(), f"{folder}/part-0.parquet", encode(other))
    with pytest.raises(ChangedError, match="part-0"):
        list(dataset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["label", "nothing"]}, "no column 'nothing'; there are: id, label, text"),
        ({"fields": "label"}, "must be a list of names"),
        ({"fields": {"__url__": "id"}}, "'__url__' is no name of a field"),
        ({"fields": {"__key__": "id"}}, "fields= names none"),
        ({"fields": {"__key__": "nothing"}}, "no column 'nothing'"),
        ({"read": ss.ReadOptions(index="ignore")}, "index= has no effect on tables"),
        ({"version": 0}, "is for shards"),
        ({"version": ss.loader.Follow()}, "is for shards"),
    ],
)
def test_option_without_effect_is_refused(table: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(table, **options)


def test_urls_are_of_one_kind_and_named_once(table: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="read as one: mix them"):
        ss.ShardDataset([table, f"{tmp_path}/shards/"])
    with pytest.raises(OptionError, match="read twice"):
        ss.ShardDataset([table, table])
    with pytest.raises(FileNotFoundError):
        ss.ShardDataset(f"{tmp_path}/*.parquet")
    with pytest.raises(OptionError, match="fields= must be a list of names"):
        ss.ShardDataset(make_shards(f"{tmp_path}/shards", samples=2), fields={"cls": "label"})
    with pytest.raises(SourceError, match="row 0 has the key None"):
        list(ss.ShardDataset(table, fields={"__key__": "text", "cls": "label"}))
    folder = table.removesuffix("*.parquet")
    for other in (
        f"{folder}../{Path(folder).name}/part-1.parquet",
        f"file://{folder}part-1.parquet",
    ):
        with pytest.raises(OptionError, match="read twice"):
            ss.ShardDataset([table, other])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("part-3.parquet/part-0.parquet", "a folder of files.*part-3"),  # as Spark writes
        ("_part-0.parquet", "begins with _ or a dot.*_part-0"),
        ("_temporary/0/part-0.parquet", "begins with _ or a dot.*_temporary/0/part-0"),
    ],
)
@pytest.mark.parametrize("store", ["local", "s3"])
def test_glob_that_leaves_rows_out_or_adds_unfinished_ones_is_refused(
    store: str, name: str, message: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = str(tmp_path)
    if store == "s3":
        request.getfixturevalue("s3_env")
        folder = request.getfixturevalue("bucket")
    glob = write(folder).replace("*", "**/*" if "temporary" in name else "*")
    publish_bytes(Storage(), f"{folder}/{name}", encode(pa.Table.from_pylist([row_of(0)])))
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(glob)
