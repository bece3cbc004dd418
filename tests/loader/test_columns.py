from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import shardstream as ss
from shardstream.errors import (
    IndexMismatchError,
    ManifestError,
    OptionError,
    SampleError,
    UnfinishedError,
)
from shardstream.testing import make_shards
from tests.small_datasets import flat, grouped, labels, take

COUNT = 100
COLUMNS = "cls,json.width,high=json.size.height,name=json.name"


def samples(count: int = COUNT) -> list[dict[str, Any]]:
    """Sample i has ``cls`` i % 10; every fourth has no height."""
    return [
        {
            "__key__": f"k{i:03d}",
            "cls": i % 10,
            "json": {
                "width": 10 * i,
                "size": {"height": i / 2} if i % 4 else {},
                "name": f"n{i % 3}",
            },
            "txt": f"caption {i}",
        }
        for i in range(count)
    ]


def write(folder: Path | str, columns: Any = COLUMNS, count: int = COUNT) -> str:
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar", max_samples=15, columns=columns) as writer:
        for sample in samples(count):
            writer.write(sample)
    return str(folder)


def keys_of(folder: str, **options: Any) -> list[str]:
    return [sample["__key__"] for sample in ss.ShardDataset(folder, **grouped(**options))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("data"))


def test_rows_of_the_columns_are_the_samples_in_order(folder: str) -> None:
    table = ss.catalog.read_columns(folder)
    assert table.column_names == ["__key__", "cls", "width", "high", "name"]
    assert table.to_pylist()[5] == {
        "__key__": "k005",
        "cls": 5,
        "width": 50,
        "high": 2.5,
        "name": "n2",
    }
    assert table["high"].null_count == COUNT // 4
    assert ss.catalog.read_columns(folder, ["cls"])["cls"].to_pylist() == [
        i % 10 for i in range(COUNT)
    ]
    numbers = np.flatnonzero(table["width"].to_numpy() > 900)
    assert keys_of(folder, subset=numbers) == [f"k{i:03d}" for i in range(91, 100)]


WHERE = [
    ("cls in (3, 9) and width >= 512", [i for i in range(52, COUNT) if i % 10 in (3, 9)]),
    ("name = 'n1' or __key__ < 'k002'", [i for i in range(COUNT) if i % 3 == 1 or i < 2]),
    ("high >= 0", [i for i in range(COUNT) if i % 4]),  # no value: not chosen
    ("high is null -- a comment", [i for i in range(COUNT) if not i % 4]),
    ("width = (select max(width) from samples)", [COUNT - 1]),
    (pc.field("cls") == 7, [*range(7, COUNT, 10)]),
]


@pytest.mark.parametrize(("where", "expected"), WHERE, ids=str)
def test_condition_chooses_the_samples(folder: str, where: Any, expected: list[int]) -> None:
    keys = [f"k{i:03d}" for i in expected]
    dataset = ss.ShardDataset(folder, where=where)
    assert len(dataset) == len(keys)
    assert [sample["__key__"] for sample in dataset] == keys
    shuffled = keys_of(folder, where=where, shuffle=True, seed=3)
    assert sorted(shuffled) == keys
    by_number = ss.ShardDataset(folder, where=where).by_number()
    assert by_number[len(keys) - 1]["__key__"] == keys[-1]


def test_class_name_in_a_condition_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name\nstars\nplanets\n")
    ss.pack(tmp_path / "t.csv", tmp_path / "out", fields={"cls": "name"}, columns="cls")
    with pytest.raises(OptionError, match=r"Classes are stored as numbers: 'planets' is 0"):
        ss.ShardDataset(str(tmp_path / "out"), where="cls = 'planets'")


def test_wrong_condition_is_the_error_even_if_the_classes_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name\nstars\nplanets\n")
    ss.pack(tmp_path / "t.csv", tmp_path / "out", fields={"cls": "name"}, columns="cls")
    (tmp_path / "out" / "classes.json").write_text("{")
    for where in ("cls = nonsense(", "cls = 'planets'"):
        with pytest.raises(OptionError, match=r"where=.* is invalid: .* Columns: cls$") as caught:
            ss.ShardDataset(str(tmp_path / "out"), where=where)
        assert caught.value.__cause__ is not caught.value


@pytest.mark.parametrize("kind", [set, frozenset, iter])
def test_keys_without_an_order_that_all_processes_know_are_errors(folder: str, kind: Any) -> None:
    with pytest.raises(OptionError, match="takes a list in the order of the samples, not a "):
        ss.ShardDataset(folder, subset=kind(["k001", "k002"]))


def test_keys_choose_samples_in_their_order(folder: str, tmp_path: Path) -> None:
    keys = ["k050", "k003", "k099"]
    assert keys_of(folder, subset=keys) == keys
    (tmp_path / "keys.txt").write_text("k050\r\nk003\n\nk099")
    assert keys_of(folder, subset=tmp_path / "keys.txt") == keys
    assert keys_of(folder, subset=str(tmp_path / "keys.txt")) == keys
    assert keys_of(folder, subset=np.array(keys)) == keys
    assert keys_of(folder, subset=keys, where="cls in (0, 9)") == ["k050", "k099"]
    assert keys_of(folder, subset=[50, 3, 99], where="cls = 3") == ["k003"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": ["k001", "k1", "k2", "k3", "k4"]}, "'k1', 'k2', 'k3' and 1 more"),
        ({"subset": ["k001", "k002", "k001"]}, "'k001' more than once"),
        ({"subset": ["k001", 2]}, "not text and int"),
        ({"subset": [2, "k001"]}, "the numbers or the keys of samples"),
        ({"subset": []}, "chooses no sample"),
        ({"subset": ["k001"], "where": "cls = 2"}, "none of the 1 sample"),
        ({"where": "cls = 77"}, "chooses no sample"),
        ({"where": "klass = 7"}, "Columns: cls, width, high, name"),
        ({"where": "cls = "}, "invalid"),
        ({"where": pc.field("klass") == 7}, "Columns: cls, width, high, name"),
        ({"where": 7}, "not int"),
        ({"where": "random() < 0.5"}, "other samples each time"),
        ({"where": ""}, "empty condition"),
        ({"where": " "}, "empty condition"),
        ({"where": "true) union all (select 7"}, "more than once"),
        ({"where": "true) union all (select 700"}, "others than there are"),
        ({"subset": ["k\udcff"]}, "not UTF-8"),
        ({"where": "cls in (select 1 from read_text('/etc/hostname'))"}, "disabled"),
        ({"where": "cls = 7", "index": "ignore"}, "where= need shards"),
    ],
    ids=str,
)
def test_wrong_choices_are_errors(folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, **grouped(**options))


def test_states_of_a_condition_are_those_of_its_samples(folder: str) -> None:
    def loader(where: str, world_size: int = 1, rank: int = 0) -> ss.ShardLoader:
        dataset = ss.ShardDataset(
            folder,
            where=where,
            shuffle=True,
            order=ss.OrderOptions(lanes=4),
            placement=ss.Placement(rank, world_size),
        )
        return ss.ShardLoader(dataset.decode(), 2)

    first = loader("cls < 5")
    begun = flat(labels(take(first, 5)))
    rest = []
    for rank in range(2):
        other = loader("cls < 5", 2, rank)
        other.load_state_dict(first.state_dict())
        rest += flat(labels(other))
    assert sorted(begun + rest) == sorted(i % 10 for i in range(COUNT) if i % 10 < 5)
    with pytest.raises(ss.errors.StateError):
        loader("cls < 6").load_state_dict(first.state_dict())


def test_columns_of_a_store_are_read_beside_the_index(
    s3_env: None, bucket: str, tmp_path: Path
) -> None:
    write(f"{bucket}/data", columns=None)
    with pytest.raises(OptionError, match="no columns"):
        ss.ShardDataset(f"{bucket}/data", where="cls = 3")
    report = ss.index(f"{bucket}/data", to=tmp_path / "mine", columns=COLUMNS.split(","))
    assert report.warnings == ("column high (json.size.height): 25 samples of 100 without a value",)
    assert keys_of(str(tmp_path / "mine"), where="cls = 3 and width < 200") == ["k003", "k013"]
    assert not ss.verify(tmp_path / "mine").problems
    ss.index(f"{bucket}/data", columns={"label": "cls"})
    assert ss.catalog.read_columns(f"{bucket}/data").column_names == ["__key__", "label"]
    assert keys_of(f"{bucket}/data", subset=["k077"]) == ["k077"]


@pytest.mark.parametrize("sha256", [True, False])
def test_tars_of_other_tools_get_columns(tmp_path: Path, sha256: bool) -> None:
    write(tmp_path / "data", columns=None)
    for path in (tmp_path / "data").glob("*[!r]"):
        path.unlink()
    ss.index(tmp_path / "data", columns=COLUMNS, sha256=sha256)
    assert keys_of(str(tmp_path / "data"), where="cls = 3 and width < 200") == ["k003", "k013"]


def test_every_way_to_write_makes_the_same_columns(folder: str, tmp_path: Path) -> None:
    def files(path: Path | str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in Path(path).iterdir()}

    options: dict[str, Any] = {"max_samples": 15, "columns": COLUMNS}
    ss.pack(samples(), tmp_path / "pack", **options)
    ss.pack(f"{folder}/*.tar", tmp_path / "tars", **options)
    ss.reshard(folder, tmp_path / "reshard", **options)
    for part in (2, 1):
        ss.pack(f"{folder}/*.tar", tmp_path / "parts", executor=ss.tasks.Parts(part, 2), **options)
    ss.index(tmp_path / "reshard", columns=COLUMNS, executor=ss.tasks.LocalExecutor())
    ss.merge(tmp_path / "parts")
    expected = files(folder)
    assert sum(name.endswith(".tar.cols.parquet") for name in expected) == 7
    for name in ("pack", "tars", "parts", "reshard"):
        assert files(tmp_path / name) == expected, name
        assert not ss.verify(tmp_path / name).problems


def test_another_pack_in_the_same_place_leaves_no_old_columns(tmp_path: Path) -> None:
    folder = write(tmp_path)
    ss.pack(samples(20), tmp_path, max_samples=15, overwrite=True)
    assert not [*tmp_path.glob("*.parquet")]
    ss.index(tmp_path, columns="cls")
    assert keys_of(folder, where="cls = 3") == ["k003", "k013"]


def test_stopped_pack_is_resumed_with_the_same_columns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(list[Any]):
        fingerprint = "1"

        def __iter__(self) -> Any:
            for number, sample in enumerate(list.__iter__(self)):
                if number == 50 and not (tmp_path / "go").exists():
                    raise KeyboardInterrupt
                yield sample

    options: dict[str, Any] = {"max_samples": 15, "columns": COLUMNS}
    with pytest.raises(KeyboardInterrupt):
        ss.pack(Stopping(samples()), tmp_path / "data", **options)
    with pytest.raises(UnfinishedError):
        ss.catalog.read_columns(tmp_path / "data")
    (tmp_path / "go").touch()
    with pytest.raises(OptionError, match="columns"):
        ss.pack(Stopping(samples()), tmp_path / "data", max_samples=15, columns="cls")
    ss.pack(Stopping(samples()), tmp_path / "data", **options)
    assert ss.catalog.read_columns(tmp_path / "data").num_rows == COUNT


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"json": {"width": [1, 2]}}, "is a list"),
        ({"json": {"width": "wide"}}, "is text, but that of k000 is numbers"),
        ({"json": {"width": 1 << 63}}, "64 bits"),
        ({"json": b'{"width": 18446744073709551617}'}, "64 bits"),
        ({"json": b"{"}, "cannot be read"),
        ({"cls": b"one"}, "cannot be read"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_errors_that_name_the_sample(
    tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    good = {"__key__": "k000", "cls": 1, "json": {"width": 3}}
    with ss.ShardWriter(tmp_path / "data", columns="cls,json.width") as writer:
        writer.write(good)
        with pytest.raises(SampleError, match=message) as caught:
            writer.write(good | {"__key__": "k001"} | bad)
        assert caught.value.key == "k001"
    assert ss.catalog.read_columns(tmp_path / "data").num_rows == 1
    with ss.ShardWriter(tmp_path / "plain") as writer:
        writer.write(good)
        writer.write(good | {"__key__": "k001"} | bad)
    with pytest.raises(SampleError, match=message) as caught:
        ss.index(tmp_path / "plain", columns="cls,json.width")
    assert caught.value.key == "k001"


def test_keys_that_are_not_utf8_are_errors(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "{shard}.tar") as writer:
        writer.write({"__key__": "k\udcff", "cls": 1})
    with pytest.raises(SampleError, match=r"not UTF-8.*k.udcff"):
        ss.index(tmp_path, columns="cls")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("", "takes fields"),
        ("cls,,json.width", "takes fields"),
        ("json.width,txt.width", "two columns are named 'width'"),
        ("__key__=cls", "named '__key__'"),
        ("klass", r"no sample has a value for the column klass \(klass\)"),
        ("json.breadth", "no sample has a value for the column breadth"),
    ],
)
def test_columns_that_cannot_be_made_are_errors(tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        write(tmp_path / "written", columns)
    assert not (tmp_path / "written" / "index.json").exists()
    write(tmp_path / "data", None)
    with pytest.raises(OptionError, match=message):
        ss.index(tmp_path / "data", columns=columns)


def test_a_refused_sample_leaves_no_value(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "{shard}.tar", columns="cls,json.q") as writer:
        with pytest.raises(SampleError):
            writer.write({"__key__": "x", "cls": 7, "json": {"q": [1]}})
        writer.write({"__key__": "x", "json": {"q": 5}})
        writer.write({"__key__": "y", "cls": 1, "json": {"q": 6}})
    assert ss.catalog.read_columns(tmp_path).to_pylist() == [
        {"__key__": "x", "cls": None, "q": 5},
        {"__key__": "y", "cls": 1, "q": 6},
    ]
    with pytest.raises(OptionError, match="chooses no sample"):
        ss.ShardDataset(tmp_path, where="cls = 7")


def test_the_type_of_a_refused_sample_is_not_that_of_the_column(tmp_path: Path) -> None:
    rows = [{"__key__": "a", "json": {"w": "12", "h": [1]}}]
    rows += [{"__key__": f"b{n}", "json": {"w": n, "h": n}} for n in range(6)]
    with ss.ShardWriter(tmp_path / "{shard}.tar", columns="json.w,json.h") as writer:
        for row in rows:
            if row["__key__"] == "a":
                with pytest.raises(SampleError):
                    writer.write(row)
            else:
                writer.write(row)
    assert ss.catalog.read_columns(tmp_path)["w"].to_pylist() == [*range(6)]


@pytest.mark.parametrize("way", ["parts", "executor", "reshard", "index"])
def test_columns_without_values_are_errors_in_parts_too(
    folder: str, tmp_path: Path, way: str
) -> None:
    options: dict[str, Any] = {"max_samples": 15, "columns": "klass"}

    def write_and_publish() -> None:
        if way == "parts":
            ss.pack(f"{folder}/*.tar", tmp_path / "new", executor=ss.tasks.Parts(1, 1), **options)
            ss.merge(tmp_path / "new")
        elif way == "executor":
            ss.pack(
                f"{folder}/*.tar", tmp_path / "new", executor=ss.tasks.LocalExecutor(), **options
            )
        elif way == "reshard":
            ss.reshard(folder, tmp_path / "new", **options)
        else:
            shutil.copytree(folder, tmp_path / "new")
            (tmp_path / "new" / "index.json").unlink()
            ss.index(tmp_path / "new", columns="klass", executor=ss.tasks.LocalExecutor())

    with pytest.raises(OptionError, match="no sample has a value for the column klass"):
        write_and_publish()
    assert not (tmp_path / "new" / "index.json").exists()


def test_types_that_differ_between_shards_are_refused_when_they_are_written(tmp_path: Path) -> None:
    writer = ss.ShardWriter(tmp_path, max_samples=1, columns="json.w")
    writer.write({"json": {"w": 1}})
    writer.write({"json": {"w": "n/a"}})
    with pytest.raises(OptionError, match="numbers in some shards and text in others"):
        writer.close()
    assert not (tmp_path / "index.json").exists()


def test_resharded_over_another_dataset_has_no_old_columns(folder: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    ss.reshard(folder, copy, max_samples=15, overwrite=True)
    assert not [*Path(copy).glob("*.parquet")]


def test_fields_that_begin_alike_have_columns(tmp_path: Path) -> None:
    with ss.ShardWriter(
        tmp_path / "{shard}.tar", columns="txt.json.w,txt,n=txt.json.m.n"
    ) as writer:
        writer.write({"txt": "a", "txt.json": {"w": 3, "m": {"n": 4}}})
    assert ss.catalog.read_columns(tmp_path).to_pylist() == [
        {"__key__": "00000000", "w": 3, "txt": "a", "n": 4}
    ]


def test_columns_need_the_checksums_of_a_manifest(folder: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (Path(copy) / "index.json").unlink()
    with pytest.raises(IndexMismatchError, match="no checksum of the shard is known"):
        ss.ShardDataset(copy, where="cls = 3")


def test_text_and_keys_alone_are_columns(tmp_path: Path) -> None:
    folder = write(tmp_path, "txt,__key__")
    assert ss.catalog.read_columns(folder).column_names == ["__key__", "txt"]
    assert keys_of(folder, where="txt like '%tion 7'") == ["k007"]
    ss.index(folder, columns="__key__")
    assert keys_of(folder, subset=["k007"]) == ["k007"]
    with pytest.raises(OptionError, match="column of keys only"):
        ss.ShardDataset(folder, where="cls = 7")


def test_types_of_two_shards_are_united_or_refused(tmp_path: Path) -> None:
    def dataset(name: str, second: Any) -> str:
        path = tmp_path / name / "{shard:06d}.tar"
        with ss.ShardWriter(path, max_samples=1, columns="json.size") as writer:
            for size in (1, second):
                writer.write({"json": {"size": size}})
        return str(tmp_path / name)

    assert ss.catalog.read_columns(dataset("float", 0.5))["size"].to_pylist() == [1.0, 0.5]
    assert ss.catalog.read_columns(dataset("none", None))["size"].to_pylist() == [1, None]
    for part in ("float", "text"):
        with ss.ShardWriter(tmp_path / "two" / part, columns="json.size") as writer:
            writer.write({"json": {"size": 1 if part == "float" else "wide"}})
    with pytest.raises(OptionError, match="do not fit together"):
        ss.ShardDataset([tmp_path / "two" / "float", tmp_path / "two" / "text"], where="size = 1")


def test_repeated_keys_of_a_dataset_cannot_be_chosen(tmp_path: Path) -> None:
    for number, key in enumerate(("other", "same", "same")):
        ss.packing.write_shard(tmp_path / f"{number}.tar", [{"__key__": key, "cls": number}])
    (warning,) = ss.index(tmp_path, columns="cls").warnings
    assert "the key 'same' comes twice, in 1.tar and in 2.tar; keys must differ" in warning
    assert keys_of(str(tmp_path), subset=["other"]) == ["other"]
    with pytest.raises(OptionError, match="2 samples have the key 'same'"):
        ss.ShardDataset(tmp_path, subset=["same"])


def damage(folder: str, tmp_path: Path, change: Any) -> str:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "000000.tar.cols.parquet"
    data = change(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    return str(copy)


def without_metadata(data: bytes) -> bytes:
    table = pq.read_table(pa.BufferReader(data))
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({}), sink)
    return bytes(sink.getvalue())


def one_row_less(data: bytes) -> bytes:
    table = pq.read_table(pa.BufferReader(data))
    sink = pa.BufferOutputStream()
    pq.write_table(table.slice(1), sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda _: None, OptionError, "no columns"),
        (lambda _: b"", ManifestError, "not a file of columns"),
        (lambda data: data[:-5], ManifestError, "not a file of columns"),
        (lambda _: b"PAR1" + bytes(100) + b"PAR1", ManifestError, "not a file of columns"),
        (without_metadata, ManifestError, "not a file of columns"),
        (one_row_less, IndexMismatchError, "another shard, with 14 samples"),
    ],
)
def test_damaged_columns_are_errors_that_name_the_file(
    folder: str, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        ss.ShardDataset(damage(folder, tmp_path, change), where="cls = 3")
    assert "000000.tar" in str(caught.value)


def test_columns_of_a_changed_shard_are_refused(folder: str, tmp_path: Path) -> None:
    copy = damage(folder, tmp_path, lambda data: data)
    other = tmp_path / "other"
    # As many samples, and as large: only the checksum differs.
    with ss.ShardWriter(f"{other}/{{shard:06d}}.tar", max_samples=15) as writer:
        for sample in samples():
            writer.write(sample | {"cls": 9 - sample["cls"]})
    for path in other.iterdir():
        shutil.copy(path, copy)
    with pytest.raises(IndexMismatchError, match="run 'shardstream index --columns' again"):
        ss.ShardDataset(copy, where="cls = 3")
    assert len(ss.verify(copy).errors) == 7


def test_columns_of_a_shard_that_was_written_again_with_as_many_bytes_are_refused(
    folder: str, tmp_path: Path
) -> None:
    """By another program: nothing beside the tars has changed."""
    copy, other = Path(shutil.copytree(folder, tmp_path / "copy")), tmp_path / "other"
    rows = samples()
    keys = [str(row["__key__"]) for row in rows]
    with ss.ShardWriter(f"{other}/{{shard:06d}}.tar", max_samples=15) as writer:
        for key, row in zip(keys[1:] + keys[:1], rows, strict=True):
            writer.write(row | {"__key__": key})
    names = sorted(path.name for path in copy.glob("*.tar"))
    for name in (names[0], names[-1]):
        assert (other / name).stat().st_size == (copy / name).stat().st_size
        shutil.copy(other / name, copy)
        for choice in ({"where": "cls = 3"}, {"subset": [keys[3]]}):
            with pytest.raises(IndexMismatchError, match=r"sample 'k\d+', the shard with 'k\d+'"):
                ss.ShardDataset(copy, **choice)
        shutil.copy(Path(folder) / name, copy)
    assert len(ss.ShardDataset(copy, where="cls = 3")) == len(rows) // 10


def test_one_shard_of_many_that_was_written_again_is_refused(tmp_path: Path) -> None:
    def make(name: str, first: int) -> Path:
        new = ({"__key__": f"{first + n:04d}", "cls": n % 10} for n in range(40))
        return Path(make_shards(tmp_path / name, samples=new, per_shard=1, columns=["cls"]))

    old, new = make("old", 0), make("new", 5000)
    shutil.copy(new / "000021.tar", old)
    with pytest.raises(IndexMismatchError, match="'0021', the shard with '5021'"):
        ss.ShardDataset(old, where="cls = 3")


def test_columns_are_part_of_the_commands(folder: str, tmp_path: Path, capsys: Any) -> None:
    from shardstream.cli import main  # noqa: PLC0415

    shutil.copytree(folder, tmp_path / "copy")
    assert main(["index", str(tmp_path / "copy"), "--columns", "cls,json.width"]) == 0
    assert ss.catalog.read_columns(tmp_path / "copy").column_names == ["__key__", "cls", "width"]
    target = str(tmp_path / "new")
    assert main(["reshard", folder, target, "--columns", "cls"]) == 0
    assert ss.catalog.read_columns(target).num_rows == COUNT
    assert main(["pack", f"{folder}/000000.tar", target + "2", "--columns", "cls"]) == 0
    assert ss.catalog.read_columns(target + "2").num_rows == 15


def counts_of(folder: str, epochs: int = 1, **options: Any) -> np.ndarray[Any, Any]:
    dataset = ss.ShardDataset(folder, **grouped(**options)).decode()
    found = np.zeros(10, dtype=np.int64)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        found += np.bincount([sample["cls"] for sample in dataset], minlength=10)
    return found


def test_classes_are_weighted_by_their_column(folder: str, tmp_path: Path) -> None:
    few = ss.catalog.read_columns(folder)["cls"].to_numpy()
    numbers = np.flatnonzero((few != 3) | (np.arange(COUNT) < 20))  # class 3 has 2 samples
    assert counts_of(folder, subset=numbers)[3] == 2
    balanced = counts_of(folder, 5, subset=numbers, weights="balanced")
    assert set(np.abs(balanced - 5 * len(numbers) / 10) <= 10) == {True}
    assert balanced.sum() == 5 * len(numbers)
    weights = {number: 9.0 if number == 3 else 1.0 for number in range(10)}
    drawn = counts_of(folder, weights=weights, num_samples=180)
    assert drawn.tolist() == [90 if number == 3 else 10 for number in range(10)]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({0: 1.0}, "no weight of the class 1"),
        (dict.fromkeys(range(11), 1.0), "the class 10, which no sample has"),
        (dict.fromkeys(range(10), -1.0), "weight"),
        (dict.fromkeys(range(10)), "takes a number for each class"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_the_classes_are_errors(
    folder: str, tmp_path: Path, weights: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, weights=weights)
    bare = write(tmp_path, columns=None)
    with pytest.raises(OptionError, match="need the column cls"):
        ss.ShardDataset(bare, weights="balanced")


def test_columns_that_differ_only_in_case_are_refused_in_sql(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ss.ShardWriter(folder, columns="k=json.a,K=json.b") as writer:
        for i in range(4):
            writer.write({"__key__": f"k{i}", "json": {"a": i, "b": 3 - i}})
    with pytest.raises(OptionError, match="k and K differ only in case"):
        ss.ShardDataset(folder, where="K = 0")
    assert keys_of(str(folder), where=pc.field("K") == 0) == ["k3"]


@pytest.mark.parametrize("where", ["score > 0.4", pc.field("score") > 0.4], ids=str)
def test_nan_fulfils_no_condition(tmp_path: Path, where: Any) -> None:
    with ss.ShardWriter(tmp_path, columns="json.score") as writer:
        for key, score in (("a", b"0.5"), ("b", b"NaN"), ("c", b"0.1")):
            writer.write({"__key__": key, "json": b'{"score": %s}' % score})
    assert keys_of(str(tmp_path), where=where) == ["a"]


@pytest.mark.parametrize("name", ["__number__", "__NUMBER__", "__other__"])
def test_reserved_names_of_columns_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="reserved"):
        write(tmp_path / "new", {name: "cls"})
    folder = write(tmp_path / "data", "number=cls", count=10)
    path = Path(folder) / "000000.tar.cols.parquet"
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["__key__", name]), path)
    with pytest.raises((OptionError, ManifestError), match=f"{name}|not a file of columns"):
        ss.ShardDataset(folder, where=f"{name} = 7")


def test_column_of_numbers_cannot_choose_the_samples(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "number=cls", count=10)
    path = Path(folder) / "000000.tar.cols.parquet"
    table = pq.read_table(path)
    metadata = {
        b"shardstream": table.schema.metadata[b"shardstream"].replace(b"number", b"__number__")
    }
    forged = table.rename_columns(["__key__", "__number__"]).replace_schema_metadata(metadata)
    pq.write_table(forged, path)
    with pytest.raises(OptionError, match="__number__ has a reserved name"):
        ss.ShardDataset(folder, where="true")
