"""Fields that are replaced are read in place of the old ones, and the old shards stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    ManifestError,
    OptionError,
    SampleError,
)
from shardstream.testing import make_shards

pa = pytest.importorskip("pyarrow")
N = 60


def samples(first: int = 0, count: int = N) -> list[dict[str, Any]]:
    return [
        {"__key__": f"{i:06d}", "cls": i, "txt": f"old {i}"} for i in range(first, first + count)
    ]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_shards(tmp_path / "data", samples=samples(), per_shard=13, columns=["cls"])


def texts(url: str, **options: Any) -> dict[int, str]:
    dataset = ss.ShardDataset(url, **options).decode()
    return {sample["cls"]: sample["txt"] for sample in dataset}


def test_all_samples_get_new_values_in_their_order(url: str) -> None:
    before = {path.name: path.read_bytes() for path in Path(url).glob("*.tar*")}
    assert ss.replace_fields(url, {"txt": (f"new {i}" for i in range(N))}) == N
    assert texts(url) == {i: f"new {i}" for i in range(N)}
    assert texts(url, version=1) == {i: f"old {i}" for i in range(N)}
    assert {path.name: path.read_bytes() for path in Path(url).glob("*.tar*")} == before
    loader = ss.ShardLoader(
        ss.ShardDataset(url, shuffle=True).decode(), batch_size=7, num_workers=2
    )
    pairs = [pair for b in loader for pair in zip(b["cls"].tolist(), b["txt"], strict=True)]
    assert sorted(pairs) == [(i, f"new {i}") for i in range(N)]


@pytest.mark.slow
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("rdn"), st.sets(st.integers(0, N - 1), min_size=1, max_size=20)),
        max_size=5,
    )
)
@settings(max_examples=15, deadline=None)
def test_some_samples_get_new_values(
    changes: list[tuple[str, set[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("data") / "one"
    url = make_shards(folder, samples=samples(), per_shard=13, columns=["cls"])
    models = [{i: f"old {i}" for i in range(N)}]
    for number, (kind, chosen) in enumerate(changes):
        model = dict(models[-1])
        some = sorted(chosen & model.keys())
        if kind == "d" and 0 < len(some) < len(model):
            ss.delete(url, keys=[f"{i:06d}" for i in some])
            model = {i: text for i, text in model.items() if i not in some}
        elif kind == "r" and some:
            new = {i: f"{number} {i}" for i in some}
            ss.replace_fields(url, {"txt": {f"{i:06d}": text for i, text in new.items()}})
            model |= new
        elif kind == "n":
            model = {i: f"all {number} {i}" for i in model}
            ss.replace_fields(url, {"txt": list(model.values())})
        else:
            continue
        models.append(model)
    for version, model in enumerate(models, start=1):
        assert texts(url, version=version) == model
    some = sorted(models[-1])[::3]
    assert texts(url, where=f"cls in ({', '.join(map(str, some))})") == {
        i: models[-1][i] for i in some
    }


def test_values_in_the_order_of_an_earlier_version_are_refused(url: str) -> None:
    ss.delete(url, numbers=[3])
    with pytest.raises(ChangedError, match="order of version 1, but version 2 is the current one"):
        ss.replace_fields(url, {"txt": ["new"] * (N - 1)}, version=1)
    assert ss.replace_fields(url, {"txt": ["new"] * (N - 1)}, version=2) == N - 1


def test_a_new_field_of_some_samples(url: str) -> None:
    vectors = {f"{i:06d}": np.full(3, i, dtype=np.float32) for i in range(0, N, 2)}
    ss.replace_fields(url, {"npy": vectors})
    found = {s["cls"]: s.get("npy") for s in ss.ShardDataset(url).decode()}
    assert [i for i, value in found.items() if value is not None] == list(range(0, N, 2))
    assert found[8].tolist() == [8.0, 8.0, 8.0]
    by_number = ss.ShardDataset(url, fields=("npy", "cls"), on_error="skip")
    assert len(list(by_number)) == N // 2


def test_values_of_a_table_and_of_shards(url: str, tmp_path: Path) -> None:
    table = tmp_path / "captions.jsonl"
    rows = [{"key": f"{i:06d}", "caption": f"table {i}"} for i in reversed(range(10))]
    table.write_text("\n".join(map(json.dumps, [*rows, {"key": "unknown", "caption": "x"}])))
    assert ss.replace_fields(url, add={str(table): {"txt": "caption"}}) == 10
    other = make_shards(
        tmp_path / "other", samples=[s | {"txt": f"shard {s['cls']}"} for s in samples(50, 10)]
    )
    assert ss.replace_fields(url, add={other: ["txt"]}) == 10
    expected = {
        i: f"table {i}" if i < 10 else f"old {i}" if i < 50 else f"shard {i}" for i in range(N)
    }
    assert texts(url) == expected


def test_values_of_shards_of_many_samples(tmp_path: Path) -> None:
    url, captions = str(tmp_path / "data"), str(tmp_path / "captions")
    for folder, numbers in ((url, range(600)), (captions, reversed(range(600)))):
        with ss.ShardWriter(folder) as writer:
            for n in numbers:
                writer.write({"__key__": f"{n:06d}", "txt": f"caption {n}"})
    assert ss.replace_fields(url, add={captions: ["txt"]}) == 600
    found = [sample["txt"] for sample in ss.ShardDataset(url)]
    assert found == [f"caption {n}".encode() for n in range(600)]


def test_bytes_of_replaced_fields_are_compared_with_their_checksums(url: str) -> None:
    ss.replace_fields(url, {"txt": ["new text"] * N})
    tar = next(Path(url).glob("fields-*/000000.tar"))
    tar.write_bytes(tar.read_bytes().replace(b"new text", b"bad text", 1))
    assert "bad text" in texts(url).values()
    with pytest.raises(IndexMismatchError, match="sha256"):
        texts(url, read=ss.ReadOptions(verify="sha256"))


def test_a_reader_compares_the_keys(url: str) -> None:
    ss.replace_fields(url, {"txt": ["new"] * N})
    manifest = json.loads((Path(url) / "index.json").read_text())
    side = Path(url) / manifest["dataset_version"]["replaced"][0]["url"]
    swapped = [{"__key__": f"{i ^ 1:06d}", "txt": "new"} for i in range(N)]
    make_shards(side.parent, samples=swapped, per_shard=N, overwrite=True)
    with pytest.raises(IndexMismatchError, match="not in the same order"):
        texts(url)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, OptionError, "give values"),
        ({"txt": ["one"]}, OptionError, "one value for each of the 60 samples"),
        ({"txt": ["one"] * (N + 1)}, OptionError, "one value for each of the 60 samples"),
        (
            {"txt": {"no": "x", "000001": "y"}},
            OptionError,
            "1 key of 2 are of no sample, the first 'no'",
        ),
        ({"txt": {"000001": "y"}, "npy": {}}, OptionError, "different keys"),
        ({"txt": {"000001": "y"}, "npy": []}, OptionError, "for all fields by key"),
        ({"cls": [0] * N}, OptionError, "the column cls=cls is made of this field"),
        ({"txt": {"000001": 7}}, SampleError, "text"),
    ],
)
def test_wrong_values_publish_nothing(
    url: str, fields: Any, error: type[Exception], message: str
) -> None:
    before = (Path(url) / "index.json").read_bytes()
    with pytest.raises(error, match=message):
        ss.replace_fields(url, fields)
    assert (Path(url) / "index.json").read_bytes() == before
    assert not list(Path(url).glob("fields-*"))
    assert texts(url) == {i: f"old {i}" for i in range(N)}


def test_missing_parts_are_errors(url: str) -> None:
    ss.replace_fields(url, {"txt": {"000001": "x"}})
    entry = json.loads((Path(url) / "index.json").read_text())["dataset_version"]["replaced"][0]
    numbers = Path(url) / entry["numbers"]
    saved = numbers.read_bytes()
    numbers.unlink()
    with pytest.raises(ManifestError, match="is missing, without which"):
        ss.ShardDataset(url)
    numbers.write_bytes(saved)
    (Path(url) / entry["url"]).unlink()
    with pytest.raises(ss.ShardStreamError):
        ss.ShardDataset(url)


def test_ways_that_would_read_old_values_are_refused(url: str) -> None:
    ss.replace_fields(url, {"txt": {"000001": "x"}})
    ways: list[Callable[[], object]] = [
        lambda: ss.ShardDataset(f"{url}/{{000000..000001}}.tar"),
        lambda: ss.ShardDataset(url, read=ss.ReadOptions(index="ignore")),
        lambda: ss.ShardDataset([url, f"{url}/000000.tar"]),
    ]
    for way in ways:
        with pytest.raises(OptionError, match="replaced"):
            way()


def test_fields_of_samples_that_are_appended_meanwhile_stay(url: str) -> None:
    def values() -> Iterator[str]:
        ss.pack(samples(N, 2), url, append=True)
        ss.replace_fields(url, {"txt": {f"{N:06d}": "theirs"}})
        yield from (f"mine {n}" for n in range(N))

    ss.replace_fields(url, {"txt": values()})
    expected = {n: f"mine {n}" for n in range(N)} | {N: "theirs"}
    found = texts(url)
    assert {n: found[n] for n in expected} == expected


def test_a_field_that_only_some_tars_have_is_sound(url: str) -> None:
    ss.replace_fields(url, {"json": {"000003": {"n": 1}}})
    ss.pack([{**one, "json": {"n": 2}} for one in samples(N, 2)], url, append=True)
    assert ss.verify(url).errors == ()
