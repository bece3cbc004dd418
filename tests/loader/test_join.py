from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import shardstream as ss
from shardstream.errors import ChangedError, IndexMismatchError, OptionError, SampleError
from shardstream.format import read_parquet
from shardstream.testing import make_shards
from tests.attack import survived
from tests.limits import set_limits
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, take

COUNT = 60


def write(folder: Path | str, field: str, keys: list[int], columns: Any = "__key__") -> str:
    """Write a dataset whose sample of key k has the field ``field`` with the text k."""
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar", max_samples=7, columns=columns) as writer:
        for key in keys:
            writer.write({"__key__": f"k{key:03d}", field: b"%d" % key})
    return str(folder)


def shuffled(seed: int, count: int = COUNT) -> list[int]:
    keys = [*range(count)]
    random.Random(seed).shuffle(keys)
    return keys


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three datasets with the same keys, in other orders."""
    root = tmp_path_factory.mktemp("join")
    return {
        "images": write(root / "images", "cls", [*range(COUNT)]),
        "captions": write(root / "captions", "txt", shuffled(1)),
        "vectors": write(root / "vectors", "bin", shuffled(2)),
        "same": write(root / "same", "id", [*range(COUNT)]),
        "some": write(root / "some", "txt", [k for k in shuffled(3) if k % 5]),
        "more": write(root / "more", "txt", shuffled(4, 90)),
        "bare": write(root / "bare", "txt", [*range(COUNT)], columns=None),
        "bare shuffled": write(root / "bare2", "txt", shuffled(5), columns=None),
    }


def rows(dataset: Any) -> list[tuple[str, ...]]:
    """Return the fields of the samples, after their key."""
    return [
        (
            sample["__key__"],
            *(
                bytes(sample[field]).decode()
                for field in sorted(sample)
                if not field.startswith("__")
            ),
        )
        for sample in dataset
    ]


def expected(keys: Any, fields: int) -> list[tuple[str, ...]]:
    return [(f"k{k:03d}", *[str(k)] * fields) for k in keys]


def test_samples_get_the_fields_of_the_same_key(parts: dict[str, str]) -> None:
    dataset = ss.join(parts["images"], parts["captions"], parts["vectors"])
    assert len(dataset) == COUNT
    assert rows(dataset) == expected(range(COUNT), 3)
    first = ss.ShardDataset(parts["images"], shuffle=True, seed=3)
    alone = [sample["__key__"] for sample in first]
    joined = rows(ss.join(first, parts["more"]))
    assert [row[0] for row in joined] == alone
    assert sorted(joined) == expected(range(COUNT), 2)


@pytest.mark.parametrize(
    ("where", "order", "kept"),
    with_slow_rest(
        [("local", "same", 1), ("local", "other", 2), ("store", "same", 2)],
        ["local", "store"],
        ["same", "other"],
        [1, 2],
    ),
)
def test_samples_that_are_read_as_columns_are_joined(
    tmp_path: Path, request: pytest.FixtureRequest, where: str, order: str, kept: int
) -> None:
    root = str(tmp_path)
    if where == "store":
        request.getfixturevalue("s3_env")
        root = request.getfixturevalue("bucket")
    count, names = 2000, (f"{root}/first", f"{root}/second")
    keys = [[*range(count)], [*range(0, count, kept)]]
    if order == "other":
        random.Random(1).shuffle(keys[1])
    for name, field, mine in zip(names, ("cls", "txt"), keys, strict=True):
        with ss.ShardWriter(name, max_samples=700, columns="__key__") as writer:
            for key in mine:
                writer.write({"__key__": f"k{key}", field: b"%d" % key})
    for shuffle in (False, True):
        first = ss.ShardDataset(names[0], shuffle=shuffle)
        joined = ss.join(first, names[1], missing={"txt": b"none"}).decode()
        found = {sample["cls"]: sample["txt"] for sample in joined}
        assert found == {k: "none" if k % kept else str(k) for k in range(count)}
        by_batch = ss.ShardLoader(joined.to_tuple("cls", "txt"), 64, num_workers=1)
        pairs = [
            pair for batch in by_batch for pair in zip(batch[0].tolist(), batch[1], strict=True)
        ]
        assert dict(pairs) == found
        dropped = ss.join(first, names[1], missing="drop").decode()
        assert {sample["cls"]: sample["txt"] for sample in dropped} == {
            k: str(k) for k in range(0, count, kept)
        }


@pytest.mark.parametrize("by", ["auto", "position"])
def test_datasets_of_one_order_are_joined_by_position(parts: dict[str, str], by: Any) -> None:
    assert rows(ss.join(parts["images"], parts["same"], by=by)) == expected(range(COUNT), 2)
    assert rows(ss.join(parts["images"], parts["bare"], by=by)) == expected(range(COUNT), 2)


def test_another_order_is_an_error_where_there_are_no_keys_to_join_by(
    parts: dict[str, str],
) -> None:
    for others in ([parts["bare shuffled"]], [parts["same"], parts["bare shuffled"]]):
        with pytest.raises(IndexMismatchError, match="not in the same order"):
            rows(ss.join(parts["images"], *others))
    with pytest.raises(IndexMismatchError, match="not in the same order"):
        rows(ss.join(parts["images"], parts["captions"], by="position"))
    # No error of a sample, which a user could skip.
    tolerant = ss.ShardDataset(parts["images"], on_error="skip")
    with pytest.raises(IndexMismatchError):
        rows(ss.join(tolerant, parts["bare shuffled"]))


def test_keys_of_shards_without_columns_are_read_from_the_shards(
    parts: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    first = ss.ShardDataset(parts["images"], subset=range(5, 50))
    with caplog.at_level(logging.WARNING):
        joined = ss.join(first, parts["bare shuffled"], by="key")
    assert "'shardstream index --columns __key__'" in caplog.text
    assert rows(joined) == expected(range(5, 50), 2)


def mixed(values: Any) -> Any:
    """Return the finaliser of SplitMix64, by which `join` hashes keys."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys_of_one_hash() -> list[str]:
    """Return keys of 16 characters that have one hash: the second half undoes the difference of the first."""
    letters = np.frombuffer(string.ascii_letters.encode() + b"0123456789_-", dtype=np.uint8)
    random = np.random.default_rng(0)
    halves = letters[random.integers(0, len(letters), (1 << 20, 8))].view("<u8")[:, 0]
    begun = mixed(mixed(np.array([16], dtype=np.uint64)) ^ halves)
    others = np.ascontiguousarray(begun ^ begun[:1] ^ halves[:1])
    found = np.flatnonzero(np.isin(others.view(np.uint8).reshape(-1, 8), letters).all(axis=1))
    return [bytes(halves[n : n + 1]).decode() + bytes(others[n : n + 1]).decode() for n in found]


def test_different_keys_of_one_hash_are_not_confused(tmp_path: Path) -> None:
    keys = keys_of_one_hash()
    assert len(keys) > 3
    for name, field, mine in (("a", "cls", keys), ("b", "txt", keys[::-1]), ("c", "md", keys[:1])):
        with ss.ShardWriter(tmp_path / name, columns="__key__") as writer:
            for key in mine:
                writer.write({"__key__": key, field: str(keys.index(key)).encode()})
    joined = rows(ss.join(tmp_path / "a", tmp_path / "b"))
    assert joined == [(key, str(n), str(n)) for n, key in enumerate(keys)]
    kept = rows(ss.join(tmp_path / "a", tmp_path / "c", missing="keep"))
    assert kept == [(keys[0], "0", "0"), *((key, str(n)) for n, key in enumerate(keys) if n)]
    path = str(tmp_path / "twice.parquet")
    pq.write_table(pa.table({"key": [keys[1], keys[2], keys[2]], "text": ["a", "b", "c"]}), path)
    one = ss.ShardDataset(str(tmp_path / "a"), subset=[keys[1]])
    assert [sample["txt"] for sample in ss.join(one, {path: {"txt": "text"}}, by="key")] == [b"a"]
    with pytest.raises(OptionError, match=f"the key '{keys[2]}', in .*row 2 and .*row 3"):
        ss.join(tmp_path / "a", {path: {"txt": "text"}}, missing="keep")


def test_fields_get_other_names(parts: dict[str, str]) -> None:
    joined = ss.join(parts["images"], {parts["captions"]: {"new.cls": "txt", "md": "txt"}})
    assert rows(joined) == expected(range(COUNT), 3)
    assert {"cls", "new.cls", "md"} < next(iter(joined)).keys()
    with pytest.raises(OptionError, match="'TXT' is not a field name"):
        ss.join(parts["images"], {parts["captions"]: {"TXT": "txt"}})
    with pytest.raises(OptionError, match=r"two datasets have the field 'cls'.*'new\.cls'"):
        ss.join(parts["images"], {parts["captions"]: {"cls": "txt"}})


def test_mask_whose_photo_is_left_out_stays_a_mask(tmp_path: Path) -> None:
    mask = np.repeat(np.array([[0, 200] * 4], np.uint8).T, 8, axis=1)
    for name, fields in (("images", {"jpg": mask, "png": mask}), ("texts", {"txt": "a"})):
        with ss.ShardWriter(tmp_path / name, columns="__key__") as writer:
            writer.write({"__key__": "a", **fields})
    images, texts = str(tmp_path / "images"), str(tmp_path / "texts")
    joins = (ss.join(texts, {images: ["png"]}), ss.join({images: ["png"]}, texts))
    mixed = ss.mix([ss.ShardDataset(images, fields=["png"])])
    for dataset in (ss.ShardDataset(images), *joins, joins[0].by_number(), mixed):
        (sample,) = dataset.decode("rgb8", max_side=4)
        assert set(sample["png"].ravel().tolist()) <= {0, 200}
    with ss.ShardWriter(tmp_path / "pictures") as writer:
        writer.write({"__key__": "b", "png": mask, "txt": "b"})
    pictures = ss.ShardDataset(str(tmp_path / "pictures"))
    mixed = ss.mix([ss.ShardDataset(images, fields=["jpg"]), pictures])
    found = {one["__key__"]: one for one in mixed.decode("rgb8", max_side=4)}
    assert not set(found["b"]["png"].ravel().tolist()) <= {0, 200}
    assert {*next(iter(joins[1]))} == {"__key__", "__url__", "png", "txt"}


def test_renamed_mask_stays_a_mask(tmp_path: Path) -> None:
    mask = np.repeat(np.array([[0, 200] * 4], np.uint8).T, 8, axis=1)
    for name, fields in (("images", {"jpg": mask, "png": mask}), ("texts", {"txt": "a"})):
        with ss.ShardWriter(tmp_path / name, columns="__key__") as writer:
            writer.write({"__key__": "a", **fields})
    images = ss.ShardDataset(str(tmp_path / "images"))
    to_m: dict[str, Any] = {"m.png": "png"}
    twice: list[dict[str, Any]] = [{"left.png": "png"}, {"m.png": "left.png"}]
    renamed = {
        "join": ss.join(str(tmp_path / "texts"), {str(tmp_path / "images"): to_m}),
        "rename": images.rename(keep=False, **to_m),
        "twice": images.rename(**twice[0]).rename(**twice[1]),
        "photo": images.rename(image="jpg"),
        "alone": images.rename(keep=False, png="png"),
    }
    for name, dataset in renamed.items():
        sample = next(iter(dataset.decode("rgb8", max_side=4, only=["png", "m.png"])))
        found = sample.get("m.png", sample.get("png"))
        assert set(found.ravel().tolist()) <= {0, 200}, name
    photos = images.rename(photo="png").decode("rgb8", max_side=4)
    assert not set(next(iter(photos))["jpg"].ravel().tolist()) <= {0, 200}


def test_mask_whose_photo_a_step_leaves_out_stays_a_mask_where_fields_are_unknown(
    tmp_path: Path,
) -> None:
    mask = np.repeat(np.array([[0, 200] * 4], np.uint8).T, 8, axis=1)
    for name, fields in (("images", {"jpg": mask, "png": mask}), ("texts", {"txt": "a"})):
        with ss.ShardWriter(tmp_path / name) as writer:
            writer.write({"__key__": "a", **fields})
    lazy = shutil.copytree(tmp_path / "images", tmp_path / "lazy")
    ss.index(lazy, members=True)
    (tmp_path / "images/index.json").unlink()

    def without_photo(sample: dict[str, Any]) -> dict[str, Any]:
        del sample["jpg"]
        return sample | {"id": 1}

    def copied(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "png": b"".join([sample["png"]])}

    url, texts = str(tmp_path / "images"), str(tmp_path / "texts")
    images = ss.ShardDataset(url)
    to_m: dict[str, Any] = {"m.png": "png"}
    again: dict[str, Any] = {"m.png": "left_png"}
    datasets = {
        "fields": ss.ShardDataset(url, fields=["png"]),
        "lazy": ss.ShardDataset(lazy, fields=["png"], read=ss.ReadOptions(lazy=["png"])),
        "map": images.map(without_photo),
        "map to a name": images.map(lambda sample: {"__key__": "a", "m.png": sample["png"]}),
        "map twice": images.map(without_photo).map(copied),
        "rename": images.rename(keep=False, **to_m),
        "twice": images.rename(left_png="png").rename(**again),
        "photo": images.rename(image="jpg"),
        "first of a join": ss.join({url: ["png"]}, texts),
        "other of a join": ss.join(texts, {url: to_m}),
    }
    for name, dataset in datasets.items():
        for made in (dataset, dataset.by_number()):
            decoded = made.decode("rgb8", max_side=4, only=["png", "m.png"])
            sample = pickle.loads(pickle.dumps(next(iter(decoded))))  # noqa: S301
            found = sample.get("m.png", sample.get("png"))
            assert set(found.ravel().tolist()) <= {0, 200}, name
        picture = next(iter(dataset.decode("rgb8", max_side=4, masks=[])))
        found = picture.get("m.png", picture.get("png"))
        assert not set(found.ravel().tolist()) <= {0, 200}, name
    (raw,) = ss.ShardLoader(datasets["rename"], 1, num_workers=1)
    assert raw["m.png"] == [next(iter(images))["png"]]


@pytest.mark.parametrize("other", ["shards", "table"])
def test_sample_without_a_named_field_is_an_error_unless_it_is_kept(
    parts: dict[str, str], tmp_path: Path, other: str
) -> None:
    texts = [None if k == 7 else f"text {k}" for k in range(COUNT)]
    if other == "table":
        path = table(tmp_path / "t.parquet", [*range(COUNT)], md=texts)
        some: Any = {path: {"md": "md", "txt": "caption"}}
    else:
        with ss.ShardWriter(tmp_path / "t", columns="__key__") as writer:
            for k, text in enumerate(texts):
                fields = {"txt": "a"} | ({} if text is None else {"md": text})
                writer.write({"__key__": f"k{k:03d}", **fields})
        some = {str(tmp_path / "t"): ["md", "txt"]}
    with pytest.raises(SampleError, match=r"has no such field; .*missing='keep'.*'k007'.*'md'"):
        rows(ss.join(parts["images"], some))
    kept = [*ss.join(parts["images"], some, missing="keep")]
    assert [sample["__key__"] for sample in kept if "md" not in sample] == ["k007"]


def test_rows_of_csv_and_json_lines_are_joined(parts: dict[str, str], tmp_path: Path) -> None:
    lines = [f'k{k:03d},"a ""text"",\nof {k}"' for k in shuffled(11)]
    (tmp_path / "t.csv").write_text("\n".join(["id,text", *lines]))
    (tmp_path / "t.jsonl").write_text(
        "".join(f'{{"key": "k{k:03d}", "box": [{k}, 0.5]}}\n' for k in shuffled(12))
    )
    joined = ss.join(
        parts["images"],
        {str(tmp_path / "t.csv"): {"__key__": "id", "txt": "text"}},
        {str(tmp_path / "t.jsonl"): {"json": "box", "npy": "box"}},
    )
    for k, sample in enumerate(joined.decode()):
        assert sample["txt"] == f'a "text",\nof {k}'
        assert sample["json"] == sample["npy"].tolist() == [k, 0.5]


def test_missing_keys_are_an_error_or_a_default(
    parts: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    names = (parts["images"], parts["vectors"], parts["some"])
    with pytest.raises(
        OptionError, match="12 keys of 60 missing in this dataset, the first 'k000'"
    ):
        ss.join(*names)
    with caplog.at_level(logging.WARNING):
        dropped = ss.join(*names, missing="drop")
    assert "12 samples" in caplog.text
    assert rows(dropped) == expected([k for k in range(COUNT) if k % 5], 3)
    foreign = ss.ShardDataset(parts["more"], subset=["k070"])
    with pytest.raises(OptionError, match="no sample of .* has a key of this dataset"):
        ss.join(parts["images"], foreign, missing="keep")
    kept = rows(ss.join(*names, missing="keep"))
    assert kept == [row for k in range(COUNT) for row in expected([k], 3 if k % 5 else 2)]
    filled = [sample["txt"] for sample in ss.join(*names, missing={"txt": b"none"}).decode()]
    assert filled == [str(k) if k % 5 else "none" for k in range(COUNT)]


def joined_three(parts: dict[str, str], ranks: int = 1, rank: int = 0) -> ss.ShardLoader:
    first = ss.ShardDataset(
        parts["images"],
        shuffle=True,
        order=ss.OrderOptions(lanes=8, block=2),
        placement=ss.Placement(rank, ranks),
    )
    joined = ss.join(first, parts["vectors"], parts["some"], missing={"txt": b"none"})
    return ss.ShardLoader(joined.decode().to_tuple("__key__", "cls", "bin", "txt"), 2)


def triples(batches: Any) -> list[tuple[Any, ...]]:
    return [
        (key, int(number), int(data), text)
        for keys, numbers, vectors, texts in batches
        for key, number, data, text in zip(keys, numbers, vectors, texts, strict=True)
    ]


def test_state_is_resumed_on_other_ranks(parts: dict[str, str]) -> None:
    begun = joined_three(parts)
    found = triples(take(begun, 11))
    for rank in range(4):
        other = joined_three(parts, 4, rank)
        other.load_state_dict(begun.state_dict())
        found += triples(other)
    wanted = [(f"k{k:03d}", k, k, str(k) if k % 5 else "none") for k in range(COUNT)]
    assert sorted(set(found)) == wanted
    first = ss.ShardDataset(parts["images"], shuffle=True, order=ss.OrderOptions(lanes=8, block=2))
    other = ss.ShardLoader(ss.join(first, parts["vectors"]).decode(), 2)
    with pytest.raises(ss.errors.StateError):
        other.load_state_dict(begun.state_dict())


@pytest.mark.filterwarnings(FEW_CORES)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_on_a_store_read_ranges_of_each_dataset(
    s3_env: None, bucket: str, method: str
) -> None:
    images = write(f"{bucket}/images", "cls", [*range(COUNT)])
    texts = write(f"{bucket}/texts", "txt", shuffled(6))
    dataset = ss.join(ss.ShardDataset(images, shuffle=True), texts).decode()
    loader = ss.ShardLoader(dataset, 8, num_workers=2, multiprocessing_context=method)
    found = [
        (int(number), text)
        for batch in loader
        for number, text in zip(batch["cls"], batch["txt"], strict=True)
    ]
    assert sorted(found) == [(k, str(k)) for k in range(COUNT)]
    assert loader.stats().as_dict()["requests"] > 0


def test_fields_are_chosen_by_dataset(parts: dict[str, str], tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "{shard}.tar", columns="__key__") as writer:
        for k in shuffled(7):
            writer.write({"__key__": f"k{k:03d}", "cls": 7, "txt": str(k), "id": k})
    folder = str(tmp_path)
    with pytest.raises(OptionError, match="two datasets have the field 'cls'"):
        ss.join(parts["images"], folder)
    assert rows(ss.join(parts["images"], {folder: ["txt"]})) == expected(range(COUNT), 2)
    with pytest.raises(OptionError, match="no sample has the field 'jpg', but cls, id, txt"):
        ss.join(parts["images"], {folder: ["jpg"]})
    (tmp_path / "index.json").unlink()  # fields are not known before samples are read
    with pytest.raises(IndexMismatchError, match="no checksum of the shard is known"):
        ss.join(parts["images"], folder)
    (tmp_path / "0.tar.cols.parquet").unlink()
    ordered = ss.ShardDataset(parts["images"], subset=shuffled(7))
    with pytest.raises(SampleError, match="two of the joined datasets have the field 'cls'"):
        rows(ss.join(ordered, folder))
    assert rows(ss.join({folder: ["cls"]}, parts["same"], by="key"))[0][1] == "7"
    with pytest.raises(SampleError, match="was to be kept; the sample has cls, id, txt"):
        rows(ss.join({folder: ["jpg"]}, parts["same"], by="key"))


def test_class_names_are_those_of_the_dataset_whose_cls_is_taken(
    parts: dict[str, str], tmp_path: Path
) -> None:
    for name, field in (("a", "cls"), ("b", "cls"), ("c", "txt")):
        write(tmp_path / name, field, [*range(COUNT)])
        (tmp_path / name / "classes.json").write_text(json.dumps([f"{name}{n}" for n in range(3)]))
    a, b, c = (str(tmp_path / name) for name in "abc")
    for first, other, expected in (
        (parts["bare"], b, "b0"),
        (parts["bare"], {b: ["cls"]}, "b0"),
        (a, {b: {"new.cls": "cls"}}, "a0"),
        (c, a, "a0"),
        (a, c, "a0"),
        (parts["bare"], {b: {"number": "cls"}}, None),
        (parts["bare"], {c: {"cls": "txt"}}, None),  # other numbers than those that it names
    ):
        found = ss.join(first, other).classes
        assert (found and found[0]) == expected


def table(path: Path, keys: list[int], **columns: Any) -> str:
    values = {"caption": [f"text {k}" for k in keys], "score": [k / 2 for k in keys]}
    values |= {"vector": pa.array([[k, 0.5] for k in keys], pa.list_(pa.float32()))}
    pq.write_table(pa.table({"key": [f"k{k:03d}" for k in keys], **values, **columns}), path)
    return str(path)


def test_step_changes_one_of_two_fields_that_are_taken_from_one(tmp_path: Path) -> None:
    url = table(tmp_path / "t.parquet", [*range(COUNT)])
    first = ss.ShardDataset(url, fields={"__key__": "key", "cls": "score"})
    other = ss.ShardDataset(url, fields={"__key__": "key", "npy": "vector"})
    joined = ss.join(first, {other: {"npy": "npy", "x.npy": "npy"}}, by="position")
    for batch in ss.ShardLoader(joined.map(with_more), 4):
        assert (batch["npy"] - batch["x.npy"]).eq(1).all()


def with_more(sample: dict[str, Any]) -> dict[str, Any]:
    sample["npy"] += 1
    return sample


def test_a_table_is_joined(parts: dict[str, str], tmp_path: Path) -> None:
    scores = table(tmp_path / "scores.parquet", shuffled(9))
    fields = {"txt": "caption", "score.json": "score", "npy": "vector"}
    first = ss.ShardDataset(parts["images"], shuffle=True)
    dataset = ss.join(first, {scores: fields}, parts["vectors"]).decode()
    loader = ss.ShardLoader(dataset, 8, num_workers=2)
    for batch in loader:
        for place, number in enumerate(batch["cls"].tolist()):
            assert batch["txt"][place] == f"text {number}"
            assert batch["score.json"][place] == number / 2
            assert batch["npy"][place].tolist() == [number, 0.5]
            assert batch["npy"].dtype == torch.float32
    state = loader.state_dict()
    other = table(tmp_path / "other.parquet", shuffled(10))
    with pytest.raises(ss.errors.StateError):
        ss.ShardLoader(
            ss.join(first, {other: fields}, parts["vectors"]).decode(), 8, num_workers=2
        ).load_state_dict(state)


def test_missing_values_of_a_table_are_missing_fields(
    parts: dict[str, str], tmp_path: Path
) -> None:
    some = table(
        tmp_path / "some.parquet",
        [*range(0, COUNT, 2)],
        txt=["" if k % 4 else None for k in range(0, COUNT, 2)],
    )
    with pytest.raises(OptionError, match="30 keys of 60 missing"):
        ss.join(parts["images"], {some: ["txt"]})
    kept = [*ss.join(parts["images"], {some: ["txt"]}, missing={"txt": b"none"})]
    assert [sample.get("txt") for sample in kept[:5]] == [None, b"none", b"", b"none", None]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("npy", pa.array([[3, None]], pa.list_(pa.int64())), "array of objects"),
        ("x.json", pa.array([{"a": float("nan")}]), "JSON cannot hold this value"),
    ],
)
def test_values_that_would_change_are_errors(
    parts: dict[str, str], tmp_path: Path, field: str, values: Any, message: str
) -> None:
    path = str(tmp_path / "t.parquet")
    pq.write_table(pa.table({"key": ["k000"], "value": values}), path)
    one = ss.ShardDataset(parts["images"], subset=[0])
    with pytest.raises(SampleError, match=message):
        rows(ss.join(one, {path: {field: "value"}}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "name the columns"),
        (["breadth"], "no column 'breadth'; there are: 'key', 'caption', 'score', 'vector'"),
        ({"txt": "caption", "__key__": "score"}, "are double, not text"),
        ({"txt": "vector"}, "but 'txt' takes text"),
        ({"npy": "caption"}, "holds text, but 'npy' takes bytes"),
        ({"cls": "caption"}, "two datasets have the field 'cls'"),
    ],
    ids=str,
)
def test_tables_that_do_not_fit_are_errors(
    parts: dict[str, str], tmp_path: Path, fields: Any, message: str
) -> None:
    scores = table(tmp_path / "scores.parquet", [*range(COUNT)])
    with pytest.raises(ss.ShardStreamError, match=message):
        rows(ss.join(parts["images"], {scores: fields}))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(OptionError, match="not a Parquet file"):
        ss.join(parts["images"], {str(tmp_path / "bad.parquet"): ["txt"]})


def test_keys_and_text_of_other_columns_and_layouts_are_read(
    parts: dict[str, str], tmp_path: Path
) -> None:
    one = ss.ShardDataset(parts["images"], subset=[0])
    names = pa.table({"__key__": ["x"], "id": ["k000"], "text": ["a"]})
    views = pa.table({name: names[name].cast(pa.string_view()) for name in names.column_names})
    path = str(tmp_path / "views.parquet")
    pq.write_table(views, path)
    (found,) = ss.join(one, {path: {"md": "text", "__key__": "id"}})
    assert found["md"] == b"a"
    with pytest.raises(OptionError, match="'__key__' cannot be a field where the keys are in 'id'"):
        ss.join(one, {path: {"md": "__key__", "__key__": "id"}})


def rows_of_one_text(path: Path, *, count: int = 20_000, metadata: Any = None) -> str:
    """Write rows that refer to one text of 1 MiB: 55 kB, or 20 GB in memory."""
    keys = pa.array([f"k{number:03d}" for number in range(count)])
    text = pa.array(["x" * (1 << 20)])
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), text)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), texts)
    found = pa.table({"__key__": keys, "text": texts, "list": lists}, metadata=metadata)
    options: Any = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(found, path, store_schema=metadata is not None, **options)
    return str(path)


@pytest.mark.parametrize("fields", [{"txt": "text"}, {"x.json": "list"}], ids=str)
def test_table_that_is_large_in_memory_only_is_an_error(
    parts: dict[str, str], tmp_path: Path, fields: dict[str, str]
) -> None:
    path = rows_of_one_text(tmp_path / "t.parquet")
    outcome = survived(lambda: ss.join(parts["images"], {path: fields}), memory_bytes=2 << 30)
    assert "OptionError" in outcome
    assert "the rows take 20000 MiB or more in memory, the limit is" in outcome


def test_columns_that_are_large_in_memory_only_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "txt", [*range(7)])
    file = tmp_path / "000000.tar.cols.parquet"
    rows_of_one_text(file, count=7, metadata=pq.read_schema(file).metadata)
    set_limits(monkeypatch, read_parquet, PARQUET_BASE_BYTES=1 << 20)
    with pytest.raises(OptionError, match=r"the rows take \d+ MiB or more in memory, the limit is"):
        ss.catalog.read_columns(tmp_path)


def test_subsets_are_joined(parts: dict[str, str]) -> None:
    first = ss.ShardDataset(parts["images"], subset=range(0, 60, 4))
    assert rows(ss.join(first, parts["captions"])) == expected(range(0, 60, 4), 2)
    second = ss.ShardDataset(parts["captions"], subset=[f"k{k:03d}" for k in range(0, 60, 8)])
    dropped = ss.join(first, second, missing="drop")
    assert rows(dropped) == expected(range(0, 60, 8), 2)
    with pytest.raises(OptionError, match="no key is in all"):
        ss.join(ss.ShardDataset(parts["images"], subset=[1]), second, missing="drop")


def test_damaged_sample_of_a_dataset_is_an_error_of_that_sample(
    parts: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(write(tmp_path / "texts", "txt", shuffled(8)))
    path = folder / "000003.tar"
    data = bytearray(path.read_bytes())
    data[1024] ^= 0xFF  # the header of its second sample
    path.write_bytes(data)
    with pytest.raises(ss.errors.ShardError, match=r"000003\.tar"):
        rows(ss.join(parts["images"], str(folder)))
    tolerant = ss.join(ss.ShardDataset(parts["images"], on_error="skip"), str(folder))
    assert len(rows(tolerant)) == COUNT - 1


def test_replaced_dataset_is_noticed(parts: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", "txt", shuffled(8))
    dataset = ss.join(parts["images"], folder)
    rows(dataset)
    for path in Path(folder).glob("*.tar"):
        path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises((ChangedError, IndexMismatchError)):
        rows(dataset)


def test_join_begins_with_the_epoch_of_the_first_dataset(parts: dict[str, str]) -> None:
    first = ss.ShardDataset(parts["images"], shuffle=True)
    first.set_epoch(4)
    joined = ss.join(first, parts["captions"])
    assert joined.epoch == 4
    assert [row[0] for row in rows(joined)] == [sample["__key__"] for sample in first]


def test_pickled_join_reads_the_same(parts: dict[str, str]) -> None:
    dataset = ss.join(parts["images"], parts["captions"])
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert rows(copy) == rows(dataset)
    assert "60 samples of 2 datasets" in repr(dataset)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "two datasets or more"),
        (["captions"], {"by": "name"}, "by must be"),
        (["captions"], {"missing": "ignore"}, "missing must be"),
        (["some"], {"missing": {"text": b""}}, "the field 'text', which no joined dataset has"),
        (["some"], {"by": "position"}, "60 samples cannot be joined by position with 48 samples"),
    ],
)
def test_wrong_arguments_are_errors(
    parts: dict[str, str], arguments: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ss.join(parts["images"], *(parts[name] for name in arguments), **options)


def test_loose_files_and_joins_are_joined(parts: dict[str, str], tmp_path: Path) -> None:
    for key in range(COUNT):
        (tmp_path / f"k{key:03d}.html").write_text(str(key))
    files = ss.ObjectDataset(str(tmp_path), shuffle=True, seed=3)
    captions = ss.join(parts["images"], parts["captions"])
    for dataset in (
        ss.join(files, captions),
        ss.join(captions, {files: ["html"]}, parts["vectors"]),
    ):
        found = list(dataset)
        assert sorted(sample["__key__"] for sample in found) == [f"k{n:03d}" for n in range(COUNT)]
        assert {"cls", "txt", "html"} <= found[0].keys()
        assert all(len({sample[name] for name in ("cls", "txt", "html")}) == 1 for sample in found)
    assert len(dataset.by_number()[5:9]) == 4
    assert dataset.by_number()[5]["bin"] == b"5"
    by_file = ss.join(files, parts["captions"])
    assert [one["__key__"] for one in by_file] == [one["__key__"] for one in files]
    assert type(by_file.with_length(3).decode()) is ss.ObjectDataset


def test_what_cannot_be_joined_is_an_error(parts: dict[str, str], tmp_path: Path) -> None:
    images = ss.ShardDataset(parts["images"])
    with pytest.raises(OptionError, match="join first, then add the steps"):
        ss.join(images.decode(), parts["captions"])
    with pytest.raises(
        OptionError, match="read without an index, so their samples have no numbers"
    ):
        ss.join(
            ss.ShardDataset(parts["images"], read=ss.ReadOptions(index="ignore")), parts["captions"]
        )
    captions = ss.ShardDataset(parts["captions"], fields=["txt"])
    for first, second in ((images, captions), (captions, images)):
        with pytest.raises(OptionError, match=r"with fields= or lazy= cannot be joined.*\{url: "):
            ss.join(first, second)
    weighted = ss.ShardDataset(parts["images"], weights=[1] * COUNT)
    with pytest.raises(OptionError, match="give them to the first"):
        ss.join(parts["captions"], weighted)
    with pytest.raises(OptionError, match="leaves out 12 samples that weights= counts"):
        ss.join(weighted, parts["some"], missing="drop")
    with pytest.raises(OptionError, match="a mix or rows cannot be joined"):
        ss.join(images, ss.mix([images]))
    with pytest.raises(OptionError, match=r"not a MapDataset; ss.join\(a, b, c\)"):
        ss.join(images, images.by_number())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="url: "):
        ss.join(images, {parts["captions"]: "txt"})
    both = [write(tmp_path / name, name, [0]) for name in ("one", "two")]
    with pytest.raises(
        OptionError, match=r"several samples have the key 'k000', in .*one.* and .*two"
    ):
        ss.join(images, ss.ShardDataset(both), missing="keep")


def test_joins_are_mixed_and_the_first_of_a_join_is_weighted(parts: dict[str, str]) -> None:
    joined = ss.join(parts["images"], parts["captions"])
    other = ss.ShardDataset(parts["same"], subset=range(10))
    mixed = ss.mix({"joined": joined, "other": other})
    assert sorted(rows(mixed)) == sorted(expected(range(COUNT), 2) + expected(range(10), 1))
    weights = [0, 2, 1] * (COUNT // 3)
    weighted = ss.ShardDataset(parts["images"], weights=weights, shuffle=True)
    found = rows(ss.join(weighted, parts["captions"]))
    assert [row[0] for row in found] == [sample["__key__"] for sample in weighted]
    assert sorted(found) == sorted(
        row for k in range(COUNT) for row in expected([k], 2) * weights[k]
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_of_a_join_are_replaced(tmp_path: Path, num_workers: int) -> None:
    bad = {3, 4, 5, 17}
    keys = [f"{i:03d}" for i in range(32)]
    make_shards(
        tmp_path / "a",
        samples=[{"__key__": k, "json": b"{" if i in bad else b"1"} for i, k in enumerate(keys)],
    )
    make_shards(tmp_path / "b", samples=[{"__key__": k, "cls": i} for i, k in enumerate(keys)])
    first = ss.ShardDataset(str(tmp_path / "a"), on_error=ss.SkipBudget(refill=True))
    loader = ss.ShardLoader(
        ss.join(first, str(tmp_path / "b")).decode(), 4, num_workers=num_workers
    )
    labels = [batch["cls"].tolist() for batch in loader]
    assert [len(batch) for batch in labels] == [4] * 8
    assert loader.refilled == 4
    assert set(loader.skipped) == {"DecodeError"}
    assert {label for batch in labels for label in batch} == set(range(32)) - bad


def test_step_of_bad_samples_of_a_join_is_replaced_on_several_ranks(tmp_path: Path) -> None:
    keys = [f"{i:03d}" for i in range(32)]
    for name, field in (("a", "json"), ("b", "cls")):
        values = [b"{" if name == "a" and i < 4 else b"1" for i in range(32)]
        samples = [{"__key__": k, field: value} for k, value in zip(keys, values, strict=True)]
        make_shards(tmp_path / name, samples=samples)
    for rank in range(2):
        first = ss.ShardDataset(
            str(tmp_path / "a"), on_error="skip", placement=ss.Placement(rank, 2)
        )
        loader = ss.ShardLoader(ss.join(first, str(tmp_path / "b")).decode(), 2)
        assert len([*loader]) == len(loader) == 8
        assert set(loader.skipped) == {"DecodeError"}
