"""Test that a class has the same number in all splits, in all packs, and in datasets that are read together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import shardstream as ss
from shardstream.catalog import read_all_classes
from shardstream.errors import ClassesWarning, ManifestError, OptionError, SourceError, StorageError
from shardstream.packing import sibling_folders
from shardstream.storage import Storage
from tests.limits import set_limits


def images(root: Path, classes: Mapping[str, int]) -> str:
    """Write a folder for each class with this number of images, whose pixels all have the class's first letter."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("L", (2, 2), ord(name[0]))
            image.save(root / name / f"{root.name}-{name}{number}.png")
    return str(root)


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """Folders of two splits: train with ant, bee and cat; val without bee."""
    images(tmp_path / "photos" / "train", {"ant": 3, "bee": 3, "cat": 3})
    images(tmp_path / "photos" / "val", {"ant": 2, "cat": 2})
    return tmp_path / "photos"


def labels(folder: Path | str, **options: Any) -> dict[str, int]:
    """Return class in the pixels -> number; all samples must agree."""
    found: dict[str, set[int]] = {}
    for sample in ss.ShardDataset(str(folder), **options).decode("l8"):
        found.setdefault(chr(sample["png"].flat[0]), set()).add(int(sample["cls"]))
    assert all(len(numbers) == 1 for numbers in found.values()), found
    return {name: numbers.pop() for name, numbers in sorted(found.items())}


def test_split_takes_the_class_numbers_of_a_packed_split(
    splits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ss.pack(splits / "train", tmp_path / "out" / "train")
    assert not caplog.messages
    ss.pack(splits / "val", tmp_path / "out" / "val")
    assert labels(tmp_path / "out" / "val") == {"a": 0, "c": 2}
    assert "as in " + str(tmp_path / "out" / "train" / "classes.json") in caplog.text
    assert ss.ShardDataset(str(tmp_path / "out" / "val")).classes == ("ant", "bee", "cat")


def test_class_missing_from_a_packed_split_is_an_error(splits: Path, tmp_path: Path) -> None:
    ss.pack(splits / "val", tmp_path / "out" / "val")
    with pytest.raises(SourceError, match=r"the class 'bee' \(bee/.*2 classes of .*val; pack all"):
        ss.pack(splits / "train", tmp_path / "out" / "train")
    assert not (tmp_path / "out" / "train").exists()


def test_conflicting_packed_splits_require_a_choice(splits: Path, tmp_path: Path) -> None:
    ss.pack(splits / "train", tmp_path / "a")
    ss.pack(splits / "val", tmp_path / "b")
    (tmp_path / "out").mkdir()
    (tmp_path / "a").rename(tmp_path / "out" / "train")
    (tmp_path / "b").rename(tmp_path / "out" / "val")
    with pytest.raises(OptionError, match=r"differently: 'bee' is class 1 in .*train, where .*val"):
        ss.pack(splits / "val", tmp_path / "out" / "test")


def test_split_packed_concurrently_causes_a_warning(
    splits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meanwhile(_: object) -> None:
        if not (tmp_path / "out" / "val").exists():
            ss.pack(splits / "val", tmp_path / "out" / "val")

    ss.pack(splits / "train", tmp_path / "out" / "train", progress=meanwhile)
    assert "differ among splits: 'bee' is class 1" in caplog.text


def test_splits_are_packed_in_one_run_with_one_numbering(splits: Path, tmp_path: Path) -> None:
    report = ss.pack(splits, tmp_path / "out", max_samples=2)
    assert [(one.name, one.samples) for one in report.splits] == [("train", 9), ("val", 4)]
    assert labels(tmp_path / "out" / "train") == {"a": 0, "b": 1, "c": 2}
    assert labels(tmp_path / "out" / "val") == {"a": 0, "c": 2}
    for name in ("train", "val"):
        keys = {sample["__key__"] for sample in ss.ShardDataset(str(tmp_path / "out" / name))}
        assert keys == {path.stem for path in (splits / name).rglob("*.png")}
        written = json.loads((tmp_path / "out" / name / "classes.json").read_bytes())
        assert written == ["ant", "bee", "cat"]
    ss.pack(splits, tmp_path / "sorted", shuffle=False)
    numbers = [int(s["cls"]) for s in ss.ShardDataset(str(tmp_path / "sorted" / "val"))]
    assert numbers == [0, 0, 2, 2]
    with pytest.raises(OptionError, match="has splits already: train, val; leave split"):
        ss.pack(splits, tmp_path / "no", split={"train": 0.5, "val": 0.5})


def test_classes_may_be_a_list_a_file_or_a_packed_dataset(splits: Path, tmp_path: Path) -> None:
    ss.pack(splits / "train", tmp_path / "first")
    (tmp_path / "names.json").write_text('["dog", "cat", "bee", "ant"]')
    given: Sequence[tuple[Any, dict[str, int]]] = [
        (["cat", "ant"], {"a": 1, "c": 0}),
        (tmp_path / "names.json", {"a": 3, "c": 1}),
        (tmp_path / "first", {"a": 0, "c": 2}),
        (f"{tmp_path}/first/index.json", {"a": 0, "c": 2}),
        (f"file://{tmp_path}/first/", {"a": 0, "c": 2}),
    ]
    for number, (classes, expected) in enumerate(given):
        ss.pack(splits / "val", tmp_path / f"{number}", classes=classes)
        assert labels(tmp_path / f"{number}") == expected


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            ["ant"],
            r"the class 'cat' \(cat/val-cat0\.png\) is not in the list of 1 class of classes",
        ),
        (["ant", "ant"], "distinct names"),
        ([], "distinct names"),
        ("empty", "no class names found; name a classes.json"),
        ("table.json", r"not a list of class names: \{'ant': 0\}"),
        ("twice.json", "the class 'ant' is listed twice"),
        ("gone.json", "not found"),
    ],
)
def test_unsuitable_class_names_are_an_error(
    classes: Any, message: str, splits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.json").write_text('{"ant": 0}')
    (tmp_path / "twice.json").write_text('["ant", "ant"]')
    with pytest.raises((SourceError, OptionError, ManifestError, StorageError), match=message):
        ss.pack(splits / "val", tmp_path / "out", classes=classes)
    assert not (tmp_path / "out").exists()


def test_class_names_that_are_too_long_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, read_all_classes, CLASSES_LIMIT_BYTES=6)
    for name, names in (("short", ["a"]), ("long", ["ant"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "classes.json").write_text(json.dumps(names))
    folders = [str(tmp_path / name) for name in ("short", "long", "none")]
    assert read_all_classes(folders, Storage(None)) == {folders[0]: ("a",)}
    assert "over 6 bytes of class names" in caplog.text


def test_class_names_in_a_column_become_numbers(splits: Path, tmp_path: Path) -> None:
    table = splits / "t.jsonl"
    rows = [("train/ant/train-ant0.png", "ant"), ("train/bee/train-bee1.png", "bee")]
    table.write_text("\n".join(json.dumps({"file": file, "kind": kind}) for file, kind in rows))
    fields = {"png": "file", "cls": "kind"}
    with pytest.raises(
        SourceError, match=r"'kind' holds 'bee', which is not in the list of 2 classes.*row 2"
    ):
        ss.pack(table, tmp_path / "out", fields=fields, classes=["cat", "ant"])
    with pytest.raises(OptionError, match="--map cls=COLUMN"):
        ss.pack(table, tmp_path / "out", fields={"png": "file"}, classes=["ant"])
    ss.pack(table, tmp_path / "out", fields=fields, classes=["bee", "ant"])
    assert labels(tmp_path / "out") == {"a": 1, "b": 0}
    assert ss.ShardDataset(str(tmp_path / "out")).by_number().classes == ("bee", "ant")


def test_class_names_in_a_column_are_numbered_as_folders_are(splits: Path, tmp_path: Path) -> None:
    table = splits / "t.csv"
    table.write_text("file,kind\ntrain/cat/train-cat0.png,cat\nval/ant/val-ant1.png,ant\n")
    fields = {"png": "file", "cls": "kind"}
    ss.pack(table, tmp_path / "alone", fields=fields)
    assert labels(tmp_path / "alone") == {"a": 0, "c": 1}
    assert ss.ShardDataset(str(tmp_path / "alone")).classes == ("ant", "cat")
    ss.pack(splits / "train", tmp_path / "out" / "train")
    ss.pack(table, tmp_path / "out" / "val", fields=fields)
    assert labels(tmp_path / "out" / "val") == {"a": 0, "c": 2}
    for number in ("7", "0.25", "nan"):
        table.write_text(
            f"file,kind\ntrain/cat/train-cat0.png,cat\nval/ant/val-ant0.png,{number}\n"
        )
        with pytest.raises(SourceError, match=r"'cat', but 'cls' takes a whole number.*--classes"):
            ss.pack(table, tmp_path / "mixed", fields=fields)


def test_digits_with_underscores_are_names_of_classes(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("kind\n2_1\n1_0\n")
    ss.pack(table, tmp_path / "out", fields={"cls": "kind"})
    assert ss.ShardDataset(str(tmp_path / "out")).classes == ("1_0", "2_1")


def test_fractions_in_a_column_are_no_names_of_classes(splits: Path, tmp_path: Path) -> None:
    table = splits / "t.csv"
    table.write_text("file,score\ntrain/cat/train-cat0.png,0.25\nval/ant/val-ant1.png,0.5\n")
    with pytest.raises(SourceError, match=r"'0\.25', but 'cls' takes a whole number"):
        ss.pack(table, tmp_path / "out", fields={"png": "file", "cls": "score"})


def test_other_sources_keep_their_class_numbers(splits: Path, tmp_path: Path) -> None:
    ss.pack(splits / "val", tmp_path / "val")
    for source in (tmp_path / "val", [{"cls": 1}]):
        with pytest.raises(OptionError, match="stay as they are"):
            ss.pack(source, tmp_path / "out", classes=["ant", "cat"])
    ss.pack(tmp_path / "val", tmp_path / "again")
    assert ss.ShardDataset(str(tmp_path / "again")).classes == ("ant", "cat")


def test_tars_with_conflicting_class_numbers_are_refused(splits: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        ss.pack(splits / name, tmp_path / name[0], max_samples=100)
    with pytest.raises(OptionError, match="differ among these shards: 'bee' is class 1"):
        ss.pack(f"{tmp_path}/t::{tmp_path}/v", tmp_path / "out")


def test_datasets_read_together_need_equal_class_numbers(splits: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        ss.pack(splits / name, tmp_path / name[0])
    folders = [f"{tmp_path}/t", f"{tmp_path}/v"]
    with pytest.warns(ClassesWarning, match="'bee' is class 1 in .*/t, where .*/v has 'cat'"):
        both = ss.ShardDataset(folders)
    assert both.classes is both.by_number().classes is None
    with pytest.warns(ClassesWarning, match="in dataset '0', where dataset '1' has 'cat'"):
        assert ss.mix([ss.ShardDataset(one) for one in folders]).classes is None
    ss.pack(splits / "val", tmp_path / "v", classes=tmp_path / "t", overwrite=True)
    assert ss.ShardDataset(folders).decode("l8").classes == ("ant", "bee", "cat")
    mixed = ss.mix([ss.ShardDataset(one) for one in folders])
    assert mixed.to_tuple("cls").classes == ("ant", "bee", "cat")


def test_classes_are_read_on_demand(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "out") as writer:
        writer.write({"cls": 0})
    assert ss.ShardDataset(str(tmp_path / "out")).classes is None
    (tmp_path / "out" / "classes.json").write_text('["a\\ud800"]')
    by_shards = ss.ShardDataset(str(tmp_path / "out"), read=ss.ReadOptions(index="ignore"))
    assert by_shards.classes == ("a\ud800",)
    (tmp_path / "out" / "classes.json").unlink()
    assert by_shards.decode().classes == ("a\ud800",)


@pytest.mark.usefixtures("s3_env")
def test_class_numbers_are_taken_from_splits_on_s3(
    splits: Path, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    ss.pack(splits / "train", f"{bucket}/out/train/")
    ss.pack(splits / "val", f"{bucket}/out/val/")
    assert f"{bucket}/out/val: classes are numbered as in {bucket}/out/train" in caplog.text
    assert labels(f"{bucket}/out/val/") == {"a": 0, "c": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = ss.ShardDataset([f"{bucket}/out/train/", f"{bucket}/out/val/"])
    assert both.classes == ("ant", "bee", "cat")


def test_replaced_class_list_causes_a_warning(
    splits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ss.pack(splits / "val", tmp_path / "out")
    ss.pack(splits / "train", tmp_path / "out", overwrite=True)
    assert [one.partition(";")[0] for one in caplog.messages] == [
        f"class numbers change: 'bee' is class 1 in this pack, where {tmp_path}/out has 'cat'"
    ]
    with ss.ShardWriter(tmp_path / "out", overwrite=True) as writer:
        writer.write({"cls": 0})
    assert "classes.json belongs to the replaced dataset and is kept" in caplog.text


def test_resumed_pack_keeps_its_class_numbers(splits: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(done: Any) -> None:
        if done.samples > 4:
            raise StopError

    options: dict[str, Any] = {"max_samples": 1, "progress": stop}
    with pytest.raises(StopError):
        ss.pack(splits / "train", tmp_path / "out" / "train", **options)
    ss.pack(splits / "val", tmp_path / "out" / "val")
    with pytest.raises((SourceError, OptionError), match="the class 'bee'"):
        ss.pack(splits / "train", tmp_path / "out" / "train", max_samples=1)
    with pytest.raises(OptionError, match="another source or options is here: class_numbers was"):
        ss.pack(
            splits / "train",
            tmp_path / "out" / "train",
            max_samples=1,
            classes=["cat", "bee", "ant"],
        )


def test_loose_files_take_class_numbers_from_a_list(splits: Path) -> None:
    train = ss.ObjectDataset(f"{splits}/train", label="folder")
    val = ss.ObjectDataset(f"{splits}/val", label="folder", classes=train.classes)
    assert val.classes == ("ant", "bee", "cat")
    assert {int(sample["cls"]) for sample in val} == {0, 2}
    assert (
        int(
            ss.ObjectDataset(f"{splits}/val", label="folder", classes=val.classes).by_number()[3][
                "cls"
            ]
        )
        == 2
    )
    refused: Sequence[tuple[dict[str, Any], str]] = [
        ({"label": "folder", "classes": ["ant"]}, "lacks 'cat'"),
        ({"label": "folder", "classes": ["ant", "cat", "ant"]}, "a name twice"),
        ({"label": len, "classes": ["ant"]}, "label= returns numbers, but classes= needs names"),
        ({"classes": ["ant"]}, "classes= needs label="),
    ]
    for options, message in refused:
        with pytest.raises(OptionError, match=message):
            ss.ObjectDataset(f"{splits}/val", **options)


@pytest.mark.parametrize(
    ("folder", "sibling"),
    [
        ("out/val", "out/train"),
        ("out/Valid", "out/Train"),
        ("s3://b/imagenet-VAL-256", "s3://b/imagenet-TRAIN-256"),
        ("test2017", "train2017"),
        ("s3://val", None),
        ("out/trainer", None),
        ("val/out", None),
    ],
)
def test_sibling_folders_of_splits(folder: str, sibling: str | None) -> None:
    found = sibling_folders([folder])
    assert folder not in found
    assert found == [] if sibling is None else sibling in found


def test_pack_to_the_current_folder_finds_sibling_splits(
    splits: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    ss.pack(splits / "train", tmp_path / "out" / "train")
    (tmp_path / "out" / "val").mkdir()
    monkeypatch.chdir(tmp_path / "out" / "val")
    ss.pack(splits / "val", ".")
    assert labels(tmp_path / "out" / "val") == {"a": 0, "c": 2}
    assert Storage().exists("classes.json")


@pytest.mark.parametrize("folder", ["", "train/"])
def test_folder_of_a_class_without_images_is_named(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images(tmp_path / "data" / folder, {"ant": 1, "cow": 1})
    if folder:
        images(tmp_path / "data" / "val", {"ant": 1})
    (tmp_path / "data" / folder / "bee").mkdir()
    ss.pack(tmp_path / "data", tmp_path / "out")
    assert "no image in bee/, so classes have no number for it" in caplog.text
    caplog.clear()
    ss.pack(tmp_path / "data", tmp_path / "named", classes=["ant", "bee", "cow"])
    assert not caplog.text


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("cat", "Cat"), "'Cat' and 'cat'"),
        (("cat", "cat "), "'cat' and 'cat '"),
        (("caf\u00e9", "cafe\u0301"), r"'cafe\u0301' and 'caf\xe9'"),  # as macOS names files
    ],
)
def test_classes_that_differ_in_their_spelling_alone_cause_a_warning(
    names: tuple[str, str],
    shown: str,
    append: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = names[:1] if append else names
    ss.pack(images(tmp_path / "one", dict.fromkeys(["ant", *first], 1)), tmp_path / "out")
    if append:
        assert not caplog.text
        second = images(tmp_path / "two", {"ant": 1, names[1]: 1})
        ss.pack(second, tmp_path / "out", append=True)
        shown = " and ".join(map(ascii, names))
    assert f"{shown} are 2 classes; if they are one, correct the labels" in caplog.text
