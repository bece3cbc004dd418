"""Samples of every kind, and views of views over them, pass one contract suite."""

from __future__ import annotations

import os
import pickle
import re
import tarfile
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest

import shardstream as ss
from shardstream.order import WindowRows
from shardstream.packing import open_joined_table
from shardstream.samples import (
    Concat,
    Join,
    Numbers,
    RowSamples,
    Subset,
    View,
    join_samples,
    leaves_of,
    open_part,
    replace_leaves,
)
from shardstream.storage import Storage, publish_bytes
from shardstream.testing import check_samples, make_shards
from tests.pairs import with_slow_rest
from tests.samples.made import (
    Made,
    Row,
    concat,
    join,
    open_files,
    open_shards,
    subset,
)


def shards(folder: str, count: int = 23, *, field: str = "txt", large: bool = False) -> Made:
    rows: list[Row] = [
        {
            "__key__": f"{n:04d}",
            field: f"{n}".encode() * (40_000 if large else 1),
            f"{field}.cls": b"%d" % (n % 3),
        }
        for n in range(count)
    ]
    with ss.ShardWriter(folder, max_samples=5, columns=f"__key__,{field}.cls") as writer:
        for row in rows:
            writer.write(row)
    return Made(open_shards(folder), rows)


def files(folder: str) -> Made:
    rows: list[Row] = []
    for number in range(7):
        publish_bytes(Storage(), f"{folder}/{number:04d}.png", bytes(number + 1))
        rows.append({"__key__": f"{number:04d}", "png": bytes(number + 1)})
    return Made(open_files(folder), rows)


def table(folder: str) -> Made:
    lines = [f"{number:04d},caption {number}" for number in range(30)]
    publish_bytes(Storage(), f"{folder}/captions.csv", "\n".join(["key,text", *lines]).encode())
    found = open_joined_table([f"{folder}/captions.csv"], {"json.txt": "text"}, Storage())
    rows: list[Row] = [{"__key__": f"{n:04d}", "json.txt": b"caption %d" % n} for n in range(30)]
    return Made(found, rows)


Make = Callable[[str], Made]
SOME, FEW = [22, 3, 4, 5, 0, 11, 12, 20], [6, 1, 2]
KINDS: dict[str, Make] = {
    "shards": lambda at: shards(f"{at}/a"),
    "large samples": lambda at: shards(f"{at}/a", large=True),
    "files": lambda at: files(f"{at}/files"),
    "table": table,
    "subset": lambda at: subset(shards(f"{at}/a"), SOME),
    "subset of one sample": lambda at: subset(shards(f"{at}/a"), [5]),
    "subset of large samples": lambda at: subset(shards(f"{at}/a", large=True), SOME),
    "subset of files": lambda at: subset(files(f"{at}/files"), FEW),
    "subset of a table": lambda at: subset(table(at), SOME),
    "subset of a subset": lambda at: subset(subset(shards(f"{at}/a"), SOME), FEW),
    "concat": lambda at: concat(shards(f"{at}/a"), files(f"{at}/files"), shards(f"{at}/b", 3)),
    "concat of a table": lambda at: concat(table(at), shards(f"{at}/a")),
    "concat of concats": lambda at: concat(
        concat(shards(f"{at}/a"), files(f"{at}/files")), concat(shards(f"{at}/b", 3))
    ),
    "subset of a concat": lambda at: subset(concat(files(f"{at}/files"), shards(f"{at}/a")), SOME),
    "concat of subsets": lambda at: concat(
        subset(shards(f"{at}/a"), SOME), subset(files(f"{at}/files"), FEW)
    ),
    "join": lambda at: join(shards(f"{at}/a"), shards(f"{at}/b", 23, field="wav")),
    "join that keeps": lambda at: join(shards(f"{at}/a"), files(f"{at}/files"), missing="keep"),
    "join that drops": lambda at: join(shards(f"{at}/a"), files(f"{at}/files"), missing="drop"),
    "join of a table": lambda at: join(shards(f"{at}/a"), table(at)),
    "join of subsets": lambda at: join(
        subset(shards(f"{at}/a"), SOME), subset(shards(f"{at}/b", 23, field="wav"), SOME[::-1])
    ),
    "join of a join": lambda at: join(
        join(shards(f"{at}/a"), table(at)), shards(f"{at}/b", 23, field="wav")
    ),
    "join of a concat": lambda at: join(
        subset(shards(f"{at}/a"), SOME),
        concat(subset(shards(f"{at}/b", 23, field="wav"), list(range(23)))),
    ),
    "join of files": lambda at: join(files(f"{at}/files"), shards(f"{at}/a")),
    "subset of a join": lambda at: subset(join(shards(f"{at}/a"), table(at)), SOME),
    "concat of joins": lambda at: concat(
        join(shards(f"{at}/a"), table(at)), files(f"{at}/files"), shards(f"{at}/b", 3)
    ),
    "subset of a concat of joins": lambda at: subset(
        concat(files(f"{at}/files"), join(shards(f"{at}/a"), table(at))), [*SOME, 29]
    ),
}


# Views call the same samples wherever the bytes are: one of each kind at a store.
AT_STORES = ("shards", "large samples", "files", "table", "subset of a concat of joins")


@pytest.mark.parametrize(
    ("kind", "place"),
    with_slow_rest(
        [*((kind, "local") for kind in KINDS), *((kind, "memory") for kind in AT_STORES)],
        KINDS,
        ["local", "memory"],
    ),
)
def test_samples_pass_the_contract(kind: str, place: str, tmp_path: Path) -> None:
    at = str(tmp_path) if place == "local" else f"memory://test-{uuid.uuid4().hex}"
    made = KINDS[kind](at)
    check_samples(lambda: made.samples, made.rows)
    assert re.fullmatch("[0-9a-f]{16}", made.samples.fingerprint)
    check_stored(made)


def check_stored(made: Made) -> None:
    """Check that all samples, and copies of them, are found by number in the datasets that store them."""
    numbers, found = np.arange(len(made.rows))[::-1], list[int]()
    for one in made.samples.find_stored(numbers + len(numbers)):
        assert one.is_joined or leaves_of(one.samples) == [one.samples]
        found += [] if one.is_joined else one.places.tolist()
        with closing(one.samples.open_fetcher()) as fetcher:
            keys = [row["__key__"] for row in fetcher.samples(one.numbers)]  # type: ignore[index]
        assert keys == [made.rows[number]["__key__"] for number in numbers[one.places]]
    assert sorted(found) == [*range(len(numbers))]


class Shifted(Subset):
    """Samples whose numbers are wrong for copies."""

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:
        return super().numbers_in(place, np.where(numbers < len(self), numbers, numbers + 1))


class Short(Join):
    """Samples without the joined fields of some."""

    def restrict_to(self, numbers: Numbers) -> Self:
        part = super().restrict_to(numbers)
        part.inner, part.parts = part.inner[:1], ()
        return part


def test_the_contract_detects_wrong_samples(tmp_path: Path) -> None:
    made = shards(f"{tmp_path}/a")
    wrong = Shifted(made.samples, np.arange(23))
    with pytest.raises(AssertionError, match="for sample"):
        check_samples(lambda: wrong, made.rows)
    joined = join(made, table(str(tmp_path)))
    assert isinstance(joined.samples, Join)
    short = Short(joined.samples.first, joined.samples.parts)
    with pytest.raises(AssertionError, match="restrict_to|restricted"):
        check_samples(lambda: short, joined.rows)


def test_a_concat_is_resharded_but_not_over_its_datasets(tmp_path: Path) -> None:
    one, other = shards(f"{tmp_path}/a", 7), shards(f"{tmp_path}/b", 3, field="wav")
    both = subset(concat(one, subset(other, [2, 0])), [8, 1, 3, 7])
    dataset = ss.loader.CatalogDataset(both.samples)
    for folder in ("a", "b"):
        with pytest.raises(ss.errors.OptionError, match="overwritten while they are read"):
            ss.reshard(dataset, f"{tmp_path}/{folder}")
    ss.reshard(dataset, f"{tmp_path}/new", seed=None)
    found = [dict(sample) for sample in ss.ShardDataset(f"{tmp_path}/new")]
    assert [{k: v for k, v in row.items() if k != "__url__"} for row in found] == both.rows


def test_loose_files_and_rows_are_chosen_by_key_without_columns(tmp_path: Path) -> None:
    both = concat(files(f"{tmp_path}/files"), table(str(tmp_path)))
    with pytest.raises(ss.errors.OptionError, match=r"2 samples have the key '0003'"):
        ss.loader.CatalogDataset(both.samples, subset=["0003"])
    dataset = ss.loader.CatalogDataset(both.samples, subset=["0021", "0009"])
    assert [sample["json.txt"] for sample in dataset] == [b"caption 21", b"caption 9"]
    one = ss.loader.CatalogDataset(open_files(f"{tmp_path}/files"), subset=["0004", "0001"])
    assert [sample["__key__"] for sample in one] == ["0004", "0001"]
    with pytest.raises(ss.errors.OptionError, match="there is a column of keys only"):
        ss.loader.CatalogDataset(both.samples, where="cls = 3")


def test_a_key_that_is_not_text_is_named_where_keys_are_compared(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_bytes(b"x")
    with tarfile.open(tmp_path / "000000.tar", "w") as tar:
        tar.add(tmp_path / "files" / name, name)
    loose, shard = open_files(f"{tmp_path}/files"), open_shards(str(tmp_path))
    for first, second in ((loose, shard), (shard, loose)):
        with pytest.raises(ss.errors.SampleError, match=r"not UTF-8.*caf"):
            join_samples(first, [open_part(second, {"other": "txt"})], "key")


def test_restricted_joins_are_small_when_they_are_pickled(tmp_path: Path) -> None:
    count = 400
    lines = [f"{number:04d},{number:0999d}" for number in reversed(range(count))]
    publish_bytes(Storage(), f"{tmp_path}/long.csv", "\n".join(["key,text", *lines]).encode())
    rows = open_joined_table([f"{tmp_path}/long.csv"], {"long.txt": "text"}, Storage())
    whole = subset(shards(f"{tmp_path}/a", count), [*range(1, count)])
    joined = join_samples(whole.samples, [open_part(rows, None)], "key")
    few = np.array([7, 300, count + 6])
    part = pickle.dumps(joined.restrict_to(few))
    assert len(part) < len(pickle.dumps(joined)) / 20
    again = pickle.loads(part)  # noqa: S301  (made three lines above)
    with closing(again.open_fetcher()) as fetcher:
        found = [row["long.txt"] for row in fetcher.samples(few)]
    assert found == [b"%0999d" % number for number in (8, 301, 8)]
    smaller = again.restrict_to(few[:1])
    with closing(smaller.open_fetcher()) as fetcher:
        assert [row["__key__"] for row in fetcher.samples(few[:1])] == ["0008"]
        with pytest.raises(IndexError, match="lacks"):
            fetcher.samples(few)


def test_a_subset_has_the_fields_and_its_share_of_the_bytes(tmp_path: Path) -> None:
    whole = shards(f"{tmp_path}/a", 20).samples
    some = Subset(whole, np.array([3, 1, 2, 7, 19]))
    assert (some.fields, whole.fields) == (("txt", "txt.cls"),) * 2
    assert some.total_bytes == whole.total_bytes // 4
    one = Subset(some, np.array([2]))
    assert Subset(one, np.array([0])).total_bytes == one.total_bytes == whole.total_bytes // 20


def test_samples_that_views_are_made_of_are_replaced_in_their_order(tmp_path: Path) -> None:
    a, b, c = (shards(f"{tmp_path}/{name}", 4, field=name) for name in "abc")
    nested = concat(subset(concat(a, b), [7, 0]), c)
    assert leaves_of(nested.samples) == [a.samples, b.samples, c.samples]
    replaced = replace_leaves(nested.samples, iter([b.samples, c.samples, a.samples]))
    check_samples(lambda: replaced, concat(subset(concat(b, c), [7, 0]), a).rows)


def test_samples_of_one_form_are_found_in_maps_but_not_over_several_datasets(
    tmp_path: Path,
) -> None:
    for name in "ab":
        make_shards(f"{tmp_path}/{name}", samples=500, per_shard=500)
    one, other = open_shards(f"{tmp_path}/a"), open_shards(f"{tmp_path}/b")
    numbers = np.arange(400)[::-1]
    with closing(Subset(one, numbers).open_fetcher()) as fetcher:
        mapped = fetcher.find(np.arange(100, 300))
        assert mapped is not None
        found = mapped[0:200].columns["__key__"]
    assert list(found) == [f"{n:06d}" for n in numbers[100:300]]
    with closing(Concat([one, other]).open_fetcher()) as fetcher:
        assert fetcher.find(numbers) is None


class Recorded(Subset):
    """Samples that record the numbers that are looked up."""

    read: ClassVar[list[int]] = []

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:
        self.read.extend(numbers.tolist())
        return super().numbers_in(place, numbers)


RUNS = np.array([9, 17])
WINDOWS = WindowRows(RUNS, size=4, stride=4, drop_last=False, of_runs=True)
MEMBERS = [
    [0, 1, 2, 3],
    [4, 5, 6, 7],
    [8],
    *([n, n + 1, n + 2, n + 3] for n in (9, 13, 17, 21)),
    [25],
]
ASKED = np.array([6, 0, 7 + 8, 2, 6])  # one is a copy


def test_rows_have_their_samples_which_are_read_once_each(tmp_path: Path) -> None:
    made = concat(shards(f"{tmp_path}/a"), shards(f"{tmp_path}/b", 3, field="wav"))
    expected = [MEMBERS[number % 8] for number in ASKED.tolist()]
    whole = Recorded(made.samples, np.arange(26))
    rows = RowSamples(whole, WINDOWS)
    assert rows.numbers_in(0, ASKED).tolist() == sorted({*sum(expected, list[int]())})
    part = pickle.loads(pickle.dumps(rows.restrict_to(ASKED)))  # noqa: S301  (made in the same line)
    for some, upcoming in ((rows, None), (rows, [ASKED]), (part, None)):
        whole.read.clear()
        with closing(some.open_fetcher(upcoming)) as fetcher:
            items: list[Any] = list(fetcher.samples(ASKED))
            assert not len(fetcher.samples(ASKED[:0]))
        assert some is part or len(whole.read) == len({*whole.read})
        assert [item.numbers for item in items] == expected
        for item in items:
            keys = [made.rows[number]["__key__"] for number in item.numbers]
            assert [row["__key__"] for row in item.samples] == keys
            assert item.starts == [0] * len(keys)
            assert item.stops == [-1] * len(keys)


def test_rows_have_the_places_and_sizes_of_their_samples(tmp_path: Path) -> None:
    made = concat(shards(f"{tmp_path}/a"), shards(f"{tmp_path}/b", 3, field="wav"))
    whole, rows = made.samples, RowSamples(made.samples, WINDOWS)
    expected = [np.array(MEMBERS[number % 8]) for number in ASKED.tolist()]
    assert rows.sizes(ASKED).tolist() == [whole.sizes(some).sum() for some in expected]
    assert rows.sizes(ASKED[:0]).tolist() == []
    firsts = np.array([some[0] for some in expected])
    assert rows.find_shards(ASKED).tolist() == whole.find_shards(firsts).tolist()
    assert rows.place_of(7) == whole.place_of(25)
    assert rows.total_bytes == int(whole.mean_bytes * WINDOWS.num_parts)
    assert rows.summary == "8 windows of 4, from 2 runs in 6 shards"
    assert (len(rows), rows.fields, rows.column_names()) == (8, None, [])
    with pytest.raises(ss.errors.OptionError, match="no columns"):
        rows.read_columns(None)
    other = WindowRows(RUNS, size=4, stride=3, drop_last=False, of_runs=True)
    alike = [rows, RowSamples(whole, other), RowSamples(subset(made, range(26)).samples, WINDOWS)]
    assert len({one.fingerprint for one in alike}) == 3


def test_shards_of_a_concat_are_those_of_its_datasets_in_turn(tmp_path: Path) -> None:
    made = [shards(f"{tmp_path}/a"), shards(f"{tmp_path}/b", 3, field="wav")]
    one, other = (each.samples for each in made)
    both = concat(*made).samples
    assert both.fields == ("txt", "txt.cls", "wav", "wav.cls")
    assert Concat([one, Many([other])]).fields is None
    assert [both.url_of(shard) for shard in range(both.num_shards)] == [
        each.url_of(shard) for each in (one, other) for shard in range(each.num_shards)
    ]
    numbers = np.array([24, 3, 22, 25, 23, 0])
    assert both.find_shards(numbers).tolist() == [5, 0, 4, 5, 5, 0]
    assert both.place_of(25) == other.place_of(2) != other.place_of(1)
    assert both.sizes(numbers).tolist() == [
        *other.sizes(np.array([1])), *one.sizes(np.array([3, 22])),
        *other.sizes(np.array([2, 0])), *one.sizes(np.array([0])),
    ]  # fmt: skip
    assert both.checksums == [*one.checksums, *other.checksums]
    assert both.total_bytes == one.total_bytes + other.total_bytes
    assert (both.is_local, both.can_coalesce) == (True, True)
    assert both.storage is one.storage
    mixed = concat(*made, files(f"{tmp_path}/files")).samples
    assert (mixed.is_local, mixed.can_coalesce) == (False, False)


class Many(View):
    """Samples of which there are more than 32 bits number."""

    def __len__(self) -> int:
        return 1 << 33

    fingerprint, total_bytes = "0123456789abcdef", 1 << 42

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        return np.zeros_like(numbers), numbers % 20


def test_numbers_over_32_bits_are_kept(tmp_path: Path) -> None:
    numbers = np.array([(1 << 33) - 1, 3, 1 << 32])
    some = Subset(Many([shards(f"{tmp_path}/a", 20).samples]), numbers)
    assert some.numbers_in(0, np.array([0, 2, 1, 4])).tolist() == [
        (1 << 33) - 1, 1 << 32, 3, (1 << 33) + 3,
    ]  # fmt: skip


def test_keys_of_shards_without_columns_are_read_on_demand_only(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "a") as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "txt": "a"})
    made = Made(open_shards(f"{tmp_path}/a"), [{"__key__": f"{n}"} for n in range(4)])
    for samples in (made.samples, subset(made, [2, 1]).samples, concat(made, made).samples):
        assert samples.column_names() == []
        with pytest.raises(ss.errors.OptionError, match="no columns"):
            samples.read_columns(["__key__"])
    keys = subset(made, [2, 1]).samples.read_columns(["__key__"], scans=True)
    assert keys["__key__"].to_pylist() == ["2", "1"]


def test_a_file_of_python_objects_is_no_subset(tmp_path: Path) -> None:
    whole = shards(f"{tmp_path}/a", 3)
    np.save(tmp_path / "objects.npy", np.array([0, None], dtype=object), allow_pickle=True)
    with pytest.raises(ss.errors.OptionError, match=r"subset= takes a \.npy file"):
        ss.loader.CatalogDataset(whole.samples, subset=str(tmp_path / "objects.npy"))
