"""Loose files give the same samples, order and state as shards packed from them."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import shardstream as ss
from shardstream.storage import Storage, publish_bytes
from tests.servers import ShapedS3
from tests.small_datasets import FEW_CORES, flat, grouped, take

pytestmark = [
    pytest.mark.filterwarnings(FEW_CORES),
    pytest.mark.filterwarnings("ignore:lanes="),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

CLASSES = ("bird", "cat", "dog")


def unpacked(root: str | Path, nsamples: int = 30) -> str:
    """Write a folder of classes: sample i has a ``bin`` of i + 1 bytes and its number as ``json``."""
    for number in range(nsamples):
        stem = f"{root}/{CLASSES[number % 3]}/{number:03d}"
        publish_bytes(Storage(), f"{stem}.Bin", bytes([number]) * (number + 1))
        publish_bytes(Storage(), f"{stem}.json", json.dumps(number).encode())
    return str(root)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpacked(tmp_path_factory.mktemp("objects"))


def by_key(samples: Any) -> dict[str, dict[str, Any]]:
    """Return the samples by key, without their URL."""
    return {
        sample["__key__"]: {name: value for name, value in sample.items() if name != "__url__"}
        for sample in samples
    }


def numbers(batches: Any) -> list[list[int]]:
    return [batch["json"].tolist() for batch in batches]


# -- samples ---------------------------------------------------------------------------------------------------------


def test_files_with_one_key_form_one_sample(folder: str) -> None:
    dataset = ss.ObjectDataset(folder)
    assert len(dataset) == 30
    assert next(iter(dataset)) == {
        "__key__": "bird/000",
        "__url__": f"{folder}/bird/000.Bin",
        "bin": b"\0",
        "json": b"0",
    }
    mapped = ss.ObjectDataset(folder).by_number().decode()
    assert repr(mapped) == "MapDataset(60 files, 30 samples) > Decode"
    assert repr(dataset.decode()) == "ObjectDataset(60 files, 30 samples) > Decode"


def test_samples_equal_those_of_shards_packed_from_the_same_files(
    folder: str, tmp_path: Path
) -> None:
    ss.pack(folder, str(tmp_path / "packed"), kind="files")
    packed = by_key(ss.ShardDataset(str(tmp_path / "packed")))
    assert by_key(ss.ObjectDataset(folder)) == packed
    assert len(packed) == 30


@pytest.mark.parametrize(
    "name",
    ["a/" + "long" * 60 + ".txt", "straße/ü.txt", "x" * 94 + ".Txt", "a.b/c d.seg.Txt", "1.JPEG"],
)
def test_any_name_gives_the_same_sample_as_in_a_tar(name: str, tmp_path: Path) -> None:
    path = tmp_path / "loose" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"text")
    (loose,) = by_key(ss.ObjectDataset(str(tmp_path / "loose"))).values()
    with ss.ShardWriter(str(tmp_path / "packed")) as writer:
        writer.write(loose)
    assert by_key(ss.ShardDataset(str(tmp_path / "packed"))) == {loose["__key__"]: loose}


def test_folder_of_classes_gives_labels(folder: str) -> None:
    dataset = ss.ObjectDataset(folder, label="folder")
    assert dataset.classes == CLASSES
    assert {sample["json"] % 3 == sample["cls"] for sample in dataset.decode()} == {True}
    assert next(iter(dataset))["cls"] == b"0"  # bytes until it is decoded, as in a tar


def test_label_function_gives_labels(folder: str) -> None:
    names = ss.ObjectDataset(folder, label=lambda path: "odd" if int(path[-7:-4]) % 2 else "even")
    assert names.classes == ("even", "odd")
    assert all(sample["cls"] == sample["json"] % 2 for sample in names.decode())
    whole = ss.ObjectDataset(folder, label=lambda path: -int(path[-7:-4]))
    assert whole.classes is None
    assert all(sample["cls"] == -sample["json"] for sample in whole.decode())


def test_list_of_file_urls_is_accepted(folder: str) -> None:
    names = [f"{folder}/dog/002.json", f"{folder}/cat/001.json"]
    dataset = ss.ObjectDataset(names)
    assert [sample["__key__"] for sample in dataset] == ["cat/001", "dog/002"]
    one = ss.ObjectDataset(names[0])
    assert [sample["__key__"] for sample in one] == ["002"]
    two = ss.ObjectDataset([f"{folder}/dog", f"{folder}/cat/"])
    assert {key.split("/")[0] for key in by_key(two)} == {"cat", "dog"}
    assert len(two) == 20


def test_prefix_may_end_inside_a_name(folder: str, tmp_path: Path) -> None:
    assert len(ss.ObjectDataset.from_prefix(folder)) == 30
    assert len(ss.ObjectDataset.from_prefix(f"{folder}/bi")) == 10
    assert len(ss.ObjectDataset.from_prefix(f"{folder}/cat/00").by_number()) == 3
    with pytest.raises(ss.errors.NotFoundError, match="no file or folder begins with this prefix"):
        ss.ObjectDataset.from_prefix(f"{folder}/mouse")


def test_suffixes_select_files(folder: str) -> None:
    dataset = ss.ObjectDataset(folder, suffixes=".JSON")
    assert {tuple(sample) for sample in dataset} == {("__key__", "__url__", "json")}
    with pytest.raises(ss.errors.NotFoundError, match=r"ends in \.jpg or \.png"):
        ss.ObjectDataset(folder, suffixes=(".jpg", ".png"))


# -- order and state -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_each_sample_is_returned_once_over_ranks_and_after_resume(
    folder: str, data: st.DataObject
) -> None:
    draw = data.draw
    order: dict[str, Any] = {"shuffle": draw(st.booleans()), "microbatch": draw(st.integers(1, 4))}

    def ranks(world_size: int) -> list[ss.ShardLoader]:
        return [
            ss.ShardLoader(
                ss.ObjectDataset(
                    folder, **grouped(placement=ss.Placement(rank, world_size), **order)
                ).decode(),
                batch_size=order["microbatch"],
            )
            for rank in range(world_size)
        ]

    first = ranks(draw(st.integers(1, 4)))
    steps = draw(st.integers(0, len(first[0]) - 1))
    seen = [numbers(take(loader, steps)) for loader in first]
    second = ranks(draw(st.integers(1, 4)))
    for loader in second:
        loader.load_state_dict(first[-1].state_dict())
    counts = Counter(chain(*map(flat, seen), *(flat(numbers(loader)) for loader in second)))
    assert set(counts) == set(range(30))
    assert counts.total() - 30 < len(second)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_workers_share_the_samples(folder: str, method: str, num_workers: int) -> None:
    dataset = ss.ObjectDataset(folder, label="folder", shuffle=True).decode()
    options: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": method}
    shared = ss.ShardLoader(dataset, 4, **options)
    assert sorted(flat(numbers(shared))) == list(range(30))


def test_plain_data_loader_accepts_object_dataset(folder: str) -> None:
    plain = DataLoader(ss.ObjectDataset(folder).decode(), 5, num_workers=2, collate_fn=list)
    assert sorted(sample["json"] for batch in plain for sample in batch) == list(range(30))


def test_shuffle_is_global(folder: str) -> None:
    loader = ss.ShardLoader(ss.ObjectDataset(folder, shuffle=True).decode(), 30)
    epochs = [flat(numbers(loader)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(epoch) == list(range(30)) != epoch for epoch in epochs)
    neighbours = sum(abs(a - b) == 3 for a, b in zip(*[iter(epochs[0])] * 2, strict=True))
    assert neighbours < 8, "samples that lie side by side came side by side"


def test_state_is_refused_for_other_files_and_accepted_for_a_copy(
    folder: str, tmp_path: Path
) -> None:
    loader = ss.ShardLoader(ss.ObjectDataset(folder).decode(), 4)
    first = numbers(take(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    copy = ss.ShardLoader(ss.ObjectDataset(unpacked(tmp_path)).decode(), 4)
    copy.load_state_dict(state)
    assert sorted(flat(first) + flat(numbers(copy))) == list(range(30))
    (tmp_path / "cat" / "001.Bin").write_bytes(b"longer")
    with pytest.raises(ss.errors.StateError, match="fingerprint"):
        ss.ShardLoader(ss.ObjectDataset(str(tmp_path)), 4).load_state_dict(state)


def test_loose_files_can_be_mixed_with_shards(folder: str, tmp_path: Path) -> None:
    ss.pack(folder, str(tmp_path / "packed"), kind="files")
    parts = {
        "loose": ss.ObjectDataset(folder, shuffle=True).decode().map(lambda s: s["json"]),
        "packed": ss.ShardDataset(str(tmp_path / "packed"), shuffle=True).decode().map(lambda s: s["json"] + 100),
    }  # fmt: skip
    loader = ss.ShardLoader(ss.mix(parts, {"loose": 0.5, "packed": 0.5}), 8)
    first = [batch.tolist() for batch in take(loader, 3)]
    again = ss.ShardLoader(ss.mix(parts, {"loose": 0.5, "packed": 0.5}), 8)
    again.load_state_dict(loader.state_dict())
    seen = flat(first) + flat([batch.tolist() for batch in again])
    assert len(seen) == len(set(seen))
    assert 20 < sum(number < 100 for number in seen) <= 30
    assert sorted(
        number for batch in ss.ShardLoader(ss.mix(parts), 8) for number in batch.tolist()
    ) == [*range(30), *range(100, 130)]


def test_object_map_dataset_works_with_samplers(folder: str) -> None:
    dataset = ss.ObjectDataset(folder, label="folder").by_number().decode()
    assert (len(dataset), dataset.classes) == (30, CLASSES)
    assert [dataset[i]["cls"] for i in (0, 10, -1)] == [0, 1, 2]
    assert [sample["json"] for sample in dataset[3:5]] == [9, 12]
    seen = [
        number
        for rank in range(2)
        for batch in DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, rank))
        for number in batch["json"].tolist()
    ]
    assert sorted(seen) == list(range(30))
    torch.utils.data.random_split(dataset, [10, 20])[0][0]


# -- S3 ------------------------------------------------------------------------------------------------------------------------


def test_packed_bucket_has_the_samples_of_the_loose_files(bucket: str, s3_env: None) -> None:
    url = unpacked(f"{bucket}/train", 12)
    loose = ss.ObjectDataset.from_prefix(f"{url}/")
    ss.pack(url, f"{bucket}/packed/", kind="files")
    assert by_key(loose) == by_key(ss.ShardDataset(f"{bucket}/packed/"))
    assert {os.path.dirname(sample["__url__"]) for sample in loose} == {
        f"{url}/{name}" for name in CLASSES
    }
    labelled = ss.ObjectDataset.from_prefix(url, label="folder", shuffle=True).decode()
    (batch,) = ss.ShardLoader(labelled, 12)
    assert (batch["json"] % 3).tolist() == batch["cls"].tolist()
    assert len(ss.ObjectDataset.from_prefix(f"{bucket}/tr")) == 12
    assert ss.ObjectDataset.from_prefix(url).by_number().decode()[4]["json"] == 1
    named = ss.ObjectDataset([f"{url}/cat/001.json", f"{url}/dog/002.json"])
    assert list(by_key(named)) == ["cat/001", "dog/002"]


@pytest.mark.parametrize("data", [b"", b"longer than before"])
def test_changed_object_raises_with_its_url(bucket: str, s3_env: None, data: bytes) -> None:
    dataset = ss.ObjectDataset(unpacked(f"{bucket}/train", 6))
    publish_bytes(Storage(), f"{bucket}/train/cat/004.Bin", data)
    with pytest.raises(ss.errors.ChangedError, match=r"changed after it was listed.*cat/004\.Bin"):
        list(dataset)


def test_state_depends_on_object_md5_and_labels(bucket: str, s3_env: None, tmp_path: Path) -> None:
    def loader(url: str, **options: Any) -> ss.ShardLoader:
        return ss.ShardLoader(ss.ObjectDataset(url, **grouped(**options)), 4)

    url = unpacked(f"{bucket}/train", 6)
    state = loader(url, label="folder").state_dict()
    loader(unpacked(f"{bucket}/copy", 6), label="folder").load_state_dict(state)
    with pytest.raises(ss.errors.StateError, match="fingerprint"):
        loader(url, label=len).load_state_dict(state)
    with pytest.warns(UserWarning, match="the bytes were not compared"):  # a local file has no MD5
        loader(unpacked(tmp_path, 6), label="folder").load_state_dict(state)
    publish_bytes(Storage(), f"{bucket}/train/cat/004.Bin", b"other")
    with pytest.raises(ss.errors.StateError, match="checksums of the dataset"):
        loader(url, label="folder").load_state_dict(state)


@pytest.mark.parametrize("is_by_number", [False, True])
def test_objects_are_cached(is_by_number: bool, bucket: str, s3_env: None, tmp_path: Path) -> None:
    url = unpacked(f"{bucket}/train", 6)
    read = ss.ReadOptions(cache_dir=tmp_path / "cache", cache_bytes="100MB")
    dataset: Any = ss.ObjectDataset(url, read=read)
    dataset = dataset.by_number() if is_by_number else dataset
    first = by_key(dataset)
    fsspec.filesystem("s3").rm(url, recursive=True)
    assert by_key(dataset) == first


@pytest.mark.slow
def test_epoch_completes_on_a_server_with_stalls_cuts_and_errors(
    bucket: str, s3_env: None, shaped_s3: ShapedS3
) -> None:
    url = unpacked(f"{bucket}/train", 20)
    shaped_s3.control(
        "/set?profile=chaos&slow=0.1&reset=0.1&trunc=0.1&short=0.1&stall=0.02&stall_s=0.2&seed=3"
    )
    dataset = ss.ObjectDataset(url, storage_options=shaped_s3.chaos.storage_options)
    found = by_key(dataset)
    assert {int(sample["json"]): sample["bin"] for sample in found.values()} == {
        number: bytes([number]) * (number + 1) for number in range(20)
    }


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_deleted_file_raises_with_its_path(tmp_path: Path, on_error: Any) -> None:
    dataset = ss.ObjectDataset(unpacked(tmp_path), on_error=on_error)
    (tmp_path / "cat" / "004.json").unlink()
    with pytest.raises(ss.errors.NotFoundError, match=r"cat/004\.json"):
        list(ss.ShardLoader(dataset, 4))


@pytest.mark.parametrize("data", [b"", b"longer than before"])
def test_changed_file_raises_with_its_path(tmp_path: Path, data: bytes) -> None:
    dataset = ss.ObjectDataset(unpacked(tmp_path), on_error="skip")
    (tmp_path / "cat" / "004.Bin").write_bytes(data)
    with pytest.raises(ss.errors.ChangedError, match=r"changed after it was listed.*cat/004\.Bin"):
        list(ss.ShardLoader(dataset, 4))


def test_empty_file_is_a_field(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert by_key(ss.ObjectDataset(str(tmp_path))) == {"a": {"__key__": "a", "txt": b""}}


@pytest.mark.parametrize(
    ("names", "options", "kind", "message"),
    [
        (["a.tar", "a.tar.idx", "b.tar"], {}, ss.errors.OptionError, "read them with ss.ShardDataset"),
        (["a.jpg", "a.jpeg"], {}, ss.errors.SourceError, r"a\.jpeg and a\.jpg would both be the field 'jpg'"),
        (["README", ".hidden/a.jpg"], {}, ss.errors.SourceError, "no file here has an extension"),
        (["a.jpg"], {"label": "folder"}, ss.errors.OptionError, r"a\.jpg is not in a folder of a class"),
        (["a.jpg"], {"label": "class"}, ss.errors.OptionError, "label must be 'folder' or a function"),
        (["a.jpg"], {"label": lambda _: 0.5}, ss.errors.OptionError, "names or numbers, not float"),
        (["a.jpg", "a.cls"], {"label": lambda _: 1}, ss.errors.OptionError, "has a file for 'cls'"),
        (["a.jpg"], {"microbatch": 0}, ss.errors.OptionError, "microbatch must be at least 1"),
        (["a.jpg"], {"remainder": "some"}, ss.errors.OptionError, "remainder"),
        (["a.jpg"], {"on_error": "ignore"}, ss.errors.OptionError, "on_error"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_at_construction(
    names: list[str], options: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(kind, match=message):
        ss.ObjectDataset(str(tmp_path), **grouped(**options))


def test_failing_label_function_raises_with_the_file(folder: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        ss.ObjectDataset(folder, label=lambda _: 1 // 0)
    assert "on 'bird/000.Bin'" in caught.value.__notes__[0]


@pytest.mark.parametrize("urls", ["no-such-folder", "no-such-folder/"])
def test_missing_folder_is_an_error(urls: str, tmp_path: Path) -> None:
    with pytest.raises(ss.errors.NotFoundError, match=urls):
        ss.ObjectDataset(f"{tmp_path}/{urls}")
    with pytest.raises(ss.errors.OptionError, match="no folder or file is named"):
        ss.ObjectDataset([])


@pytest.mark.parametrize("folder", ["", "train/"], ids=["the folder itself", "a folder of splits"])
def test_packed_folder_is_refused(folder: str, tmp_path: Path) -> None:
    with ss.ShardWriter(str(tmp_path / folder)) as writer:
        writer.write({"cls": 1})
    (tmp_path / folder / "README.md").write_text("with notes beside")
    (tmp_path / folder / "more.txt").write_text("")
    with pytest.raises(ss.errors.OptionError, match=r"tar shards.*000000\.tar.*ss\.ShardDataset"):
        ss.ObjectDataset(str(tmp_path))
    with pytest.raises(ss.errors.OptionError, match="tar shards"):
        ss.ObjectDataset.from_prefix(f"{tmp_path}/").by_number()
    with pytest.raises(ss.errors.OptionError, match="pack them again as tars"):
        ss.pack(tmp_path, tmp_path / "again", kind="files")
    assert len(ss.ObjectDataset(str(tmp_path), suffixes=(".md", ".txt"))) == 2


def test_dots_in_names_that_make_rare_fields_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(300):
        (tmp_path / f"doc{number}.txt").write_text("x")
    for number in range(9):
        (tmp_path / f"report.v{number}.txt").write_text("x")
    assert len(ss.ObjectDataset(str(tmp_path))) == 301
    assert not caplog.messages
    (tmp_path / "report.v9.txt").write_text("x")
    assert len(ss.ObjectDataset(str(tmp_path))) == 301
    assert "310 files make 301 samples with 11 fields, and 10 of the fields" in caplog.text
    assert "report.v0.txt is the field 'v0.txt' of the sample 'report'" in caplog.text
