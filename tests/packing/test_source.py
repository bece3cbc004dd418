"""Records from folders, tables and tars; error messages name the file or row."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import pickle
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import shardstream as ss
from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    OptionError,
    ShardError,
    SourceError,
    StorageError,
)
from shardstream.format import canonical_field
from shardstream.packing import (
    FileRef,
    ImageOptions,
    Record,
    RecordEncoder,
    SamplesSource,
    ShardWriter,
    Source,
    SourceOptions,
    iter_rows,
    open_source,
)
from shardstream.storage import Storage, publish_bytes
from tests.servers import ShapedS3


def png(shade: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("L", (2, 2), shade).save(out, "PNG")
    return out.getvalue()


def two_columns_of_one_name() -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], list("aba"))
    parquet.write_table(table, out)
    return out.getvalue()


def put(folder: Path, files: Mapping[str, bytes]) -> str:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


def opened(source: Any, **options: Any) -> Source:
    return open_source(source, Storage(), SourceOptions(**options))


def records(source: Any, **options: Any) -> list[Record]:
    found = list(opened(source, **options))
    assert pickle.loads(pickle.dumps(found))[0].key == found[0].key  # noqa: S301
    return found


def plain(record: Record) -> dict[str, object]:
    """Return fields, with the last two parts of each file's path instead of the file."""
    return {
        field: "/".join(value.url.split("/")[-2:]) if isinstance(value, FileRef) else value
        for field, value in record.fields.items()
    }


TREE = {
    "dog/b.PNG": png(),
    "dog/deep/a.jpeg": b"jpeg",
    "cat/a.webp": b"webp",
    "cat/.hidden.jpg": b"",
    "cat/notes.txt": b"",
    "README.md": b"",
}


def test_class_folders_give_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = put(tmp_path, {name: data for name, data in TREE.items() if name != "cat/notes.txt"})
    source = opened(root)
    assert source.length == 3
    assert source.shuffled
    assert json.loads(source.extras["classes.json"]) == ["cat", "dog"]
    assert [(r.key, plain(r)) for r in source] == [
        ("cat/a", {"webp": "cat/a.webp", "cls": 0}),
        ("dog/b", {"png": "dog/b.PNG", "cls": 1}),
        ("dog/deep/a", {"jpg": "deep/a.jpeg", "cls": 1}),
    ]
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{root}: files that are not images are skipped: 1 .md (README.md)"
    ]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("{class}/{stem}", ["cat/a", "dog/b", "dog/a"]),
        ("{path}", ["cat/a", "dog/b", "dog/deep/a"]),
        ("{index:03d}", ["000", "001", "002"]),
    ],
)
def test_keys_of_images_are_unique(key: str, keys: list[str], tmp_path: Path) -> None:
    root = put(tmp_path, TREE)
    assert [record.key for record in opened(root, kind="images", key=key)] == keys


def test_dots_in_a_stem_become_underscores(tmp_path: Path) -> None:
    root = put(tmp_path, {"v1.0/a.b.png": b""})
    assert records(root, kind="images", key="{path}")[0].key == "v1.0/a_b"


@pytest.mark.parametrize(
    ("masks", "mask"),
    [("masks", "{}.png"), ("train/seg_labels", "{}_mask.png"), ("depth", "{}.jpg")],
)
def test_folder_of_masks_next_to_photos_is_not_a_class(
    masks: str, mask: str, tmp_path: Path
) -> None:
    photos = masks.rpartition("/")[0] + "/images"
    files = [f"{photos.lstrip('/')}/{n}.jpg" for n in range(3)]
    files += [f"{masks}/{mask.format(n)}" for n in range(2)]
    root = put(tmp_path / "seg", dict.fromkeys(files, b"1"))
    with pytest.raises(
        SourceError, match=r"seems to hold the masks of the images in images.*kind='images'"
    ):
        opened(root)
    assert len(records(root, kind="images")) == 5


@pytest.mark.parametrize("extension", ["jfif", "jpe", "jp2", "j2k", "tga", "dib", "apng", "avif"])
def test_every_format_that_is_decoded_is_a_class_image(extension: str, tmp_path: Path) -> None:
    file_format = {"jfif": "JPEG", "jpe": "JPEG", "apng": "PNG", "dib": "DIB", "avif": "AVIF"}
    image = Image.new("RGB", (16, 16), (0, 128, 255))
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        image.save(
            tmp_path / "in" / name / f"{name}.{extension}",
            file_format.get(extension, {"tga": "TGA"}.get(extension, "JPEG2000")),
        )
    (tmp_path / "in" / "eel").mkdir()
    image.save(tmp_path / "in" / "eel" / "e.png")
    report = ss.pack(tmp_path / "in", tmp_path / "out", shuffle=False)
    field = canonical_field(extension)
    assert report.fields == {"cls": 3, field: 2, "png": 1}
    found = list(ss.ShardDataset(str(tmp_path / "out")).decode("rgb8"))
    assert [int(sample["cls"]) for sample in found] == [0, 1, 2]
    assert all(sample.get(field, sample.get("png")).shape == (16, 16, 3) for sample in found)


def test_splits_whose_names_sort_otherwise_than_their_paths_are_kept_apart(tmp_path: Path) -> None:
    images = {"train/cat/a.png": png(1), "train-2/cat/b.png": png(2), "train-2/cat/c.png": png(3)}
    report = ss.pack(put(tmp_path / "in", images), tmp_path / "out", shuffle=False)
    assert [(one.name, one.samples) for one in report.splits] == [("train", 1), ("train-2", 2)]
    (sample,) = ss.ShardDataset(str(tmp_path / "out" / "train"))
    assert sample["png"] == png(1)


def test_splits_with_numbers_or_suffixes_are_read(tmp_path: Path) -> None:
    root = put(
        tmp_path / "in",
        {f"{s}/{c}/{s}{c}.png": png() for s in ("train2017", "val_images") for c in "ab"},
    )
    report = ss.pack(root, tmp_path / "out")
    assert [(one.name, one.samples) for one in report.splits] == [
        ("train2017", 2),
        ("val_images", 2),
    ]


def test_kind_images_makes_classes_of_any_folders(tmp_path: Path) -> None:
    root = put(
        tmp_path, {"train/1.jpg": b"", "images/1.jpg": b"", "masks/1.png": b"", "x/1.txt": b""}
    )
    source = opened(root, kind="images")
    assert json.loads(source.extras["classes.json"]) == ["images", "masks", "train"]


def test_skipped_images_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        "cat/1.jpg": b"",
        "cat/2.heic": b"",
        "cat/3.HEIC": b"",
        "cat/n.jxl": b"",
        "LICENSE": b"",
    }
    assert len(records(put(tmp_path, files))) == 1
    assert (
        "are skipped: 2 .heic (cat/2.heic), 1 without an extension (LICENSE), 1 .jxl (cat/n.jxl)"
        in caplog.text
    )


@pytest.mark.parametrize(
    "names", [("with_mask/0.jpg", "no_mask/0.jpg"), ("cat/0.jpg", "mask/1.jpg")]
)
def test_class_names_that_contain_mask_are_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    root = put(tmp_path / "faces", dict.fromkeys(names, b"1"))
    assert {record.fields["cls"] for record in records(root)} == {0, 1}


def test_duplicate_key_names_both_files(tmp_path: Path) -> None:
    root = put(tmp_path, {"cat/1.png": b"", "dog/1.png": b""})
    with pytest.raises(SourceError, match=r"'1' comes twice, in .*cat/1\.png and in .*dog/1\.png"):
        records(root, key="{stem}")


def test_unknown_field_in_a_key_template_is_refused(tmp_path: Path) -> None:
    root = put(tmp_path, {"cat/1.png": b""})
    with pytest.raises(
        OptionError, match=r"\{name\}.*known here: \{index\}, \{stem\}, \{path\}, \{class\}"
    ):
        records(root, key="{name}")


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.png": b"", "cat/b.png": b"", "cat/c.png": b""}, {}, r"a\.png is directly in this folder.*CLASS/a\.png"),
        ({"a.png": b""}, {"kind": "images"}, r"a\.png is directly in this folder"),
        ({"cat/a.txt": b""}, {"kind": "images"}, "no images in folders of classes"),
        ({"train/a.png": b"", "val/b.png": b""}, {}, "folders train, val look like splits, and hold no folders of classes; pack.*--kind files"),
        ({"train2017/a.png": b"", "val2017/b.png": b"", "annotations/i.json": b""}, {}, "train2017, val2017 look like splits"),
        ({"train/a.png": b""}, {}, "the folders train look like splits"),
        ({"trainA/a.png": b"", "cat/b.png": b""}, {}, "trainA look like splits, cat does not"),
        ({"data/cat/a.png": b"", "data/dog/a.png": b""}, {}, "the folder data seems to hold images of all classes"),
        ({"images/1.jpg": b"", "labels/1.txt": b""}, {}, "the folder images seems to hold images of all classes"),
        ({"train/images/1.jpg": b"", "val/images/1.jpg": b""}, {}, "the folder images seems to hold"),
        ({"JPEGImages/1.jpg": b"", "SegmentationClass/1.png": b""}, {}, "SegmentationClass seems to hold the masks"),
        ({"train/1.png": b"", "train/metadata.csv": b""}, {}, r"train/metadata\.csv seems to describe the files of its folder"),
        ({"masks/1.png": b"", "masks/2.png": b""}, {}, "masks seems to hold masks"),
        ({"a/1.jpg": b"", "b/2.jpg": b"", "xml/1.xml": b"", "xml/2.xml": b""}, {}, r"2 files with the names of images .*\(xml/1\.xml\)"),
        ({"cat/1.jpg": b"", "dog/1.heic": b"", "dog/2.HEIC": b""}, {}, r"class 'dog' has no image .* 2 \.heic \(dog/1\.heic\); convert"),
        ({"cat/1.heic": b"", "dog/1.jxl": b""}, {}, r"only 1 \.heic \(cat/1\.heic\), 1 \.jxl"),
        ({"train/cat/a.png": b"", "val/cat/a.png": b"", "more/a.png": b""}, {}, "folders train, val look like splits, more does not"),
        ({"train/cat/a.png": b"", "test/a.png": b""}, {}, r"test/a\.png is directly in the folder of a split.*test/CLASS/a\.png"),
        ({"README": b""}, {}, "no file here has an extension"),
        ({".hidden": b""}, {}, "no files found"),
        ({"a.jpg": b"", "a.JPEG": b"", "a.json": b""}, {}, "would both be the field 'jpg' of 'a'"),
        ({"cat/a.png": b""}, {"fields": {"jpg": "x"}}, "apply to tables"),
        ({"cat/a.png": b""}, {"kind": "imgs"}, "one of images, files, table, tars"),
        ({"a.txt": b""}, {"kind": "tars"}, r"no index\.json and no \.tar here"),
        ({"a.txt": b""}, {"kind": "table"}, "no table found"),
    ],
)  # fmt: skip
def test_unpackable_folders_are_refused_with_a_reason(
    files: dict[str, bytes], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    root = put(tmp_path, files)
    with pytest.raises((SourceError, OptionError, StorageError), match=message):
        assert opened(root, **options).length is None


@pytest.mark.parametrize("name", ["nothing", "nothing.csv", "nothing.tar"])
def test_missing_source_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        (SourceError, StorageError), match=r"not found|no table|is missing"
    ) as caught:
        opened(str(tmp_path / name))
    assert name in str(caught.value)


def test_unknown_file_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"neither a table .* nor a tar; name its folder"):
        opened(put(tmp_path, {"a.bin": b"x"}) + "/a.bin")


def test_loose_files_are_grouped_by_name(tmp_path: Path) -> None:
    files = {
        "x/1.JPG": b"",
        "x/1.json": b"",
        "x/1-b.jpg": b"",
        "x/1.seg.png": b"",
        "x/2.jpg": b"",
        "LICENSE": b"",
    }
    found = records(put(tmp_path, files))
    assert [(record.key, plain(record)) for record in found] == [
        ("x/1", {"jpg": "x/1.JPG", "json": "x/1.json", "seg.png": "x/1.seg.png"}),
        ("x/1-b", {"jpg": "x/1-b.jpg"}),
        ("x/2", {"jpg": "x/2.jpg"}),
    ]
    assert opened(str(tmp_path)).length == 3
    assert [r.key for r in records(str(tmp_path), key="{index:02d}")] == ["00", "01", "02"]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_filesystems_are_read(scheme: str, tmp_path: Path) -> None:
    folder = f"memory://{uuid.uuid4().hex}" if scheme == "memory" else f"file://{tmp_path}"
    for name in ("cat/a.png", "dog/b.png"):
        publish_bytes(Storage(), f"{folder}/{name}", png())
    encoder = RecordEncoder(storage=Storage(), images=ImageOptions())
    found = encoder.encode(records(folder))
    assert [sample.fields for sample in found] == [
        {"png": png(), "cls": b"0"},
        {"png": png(), "cls": b"1"},
    ]


@pytest.mark.usefixtures("s3_env")
def test_bucket_prefix_is_read(bucket: str) -> None:
    for name in ("cat/a.png", "dog/b.png"):
        publish_bytes(Storage(), f"{bucket}/photos/{name}", png())
    found = RecordEncoder(storage=Storage(), images=ImageOptions()).encode(
        records(f"{bucket}/photos/")
    )
    assert [sample.fields["cls"] for sample in found] == [b"0", b"1"]
    gone = Record("a", {"png": FileRef(f"{bucket}/photos/no.png")}, "rows.csv, row 3")
    (sample,) = RecordEncoder(storage=Storage(), images=ImageOptions()).encode([gone])
    assert "no.png" in str(sample.error)
    assert "rows.csv, row 3" in str(sample.error)


CSV = 'path,label,caption\na.png,3,"a cat, sitting"\nsub/b.png,4,dog\n'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", CSV.encode()),
        ("t.csv", b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode()),
        ("t.TSV", CSV.replace(",", "\t", 2).replace("png,3,", "png\t3\t").replace("png,4,", "png\t4\t").encode()),
        ("t.jsonl", (b'{"path": "a.png", "label": 3, "caption": "a cat, sitting"}\n\n'
                    b'{"path": "sub/b.png", "label": "4", "caption": "dog", "more": 1}\n')),
    ],
)  # fmt: skip
def test_tables_are_read(name: str, data: bytes, tmp_path: Path) -> None:
    url = put(tmp_path, {name: data}) + f"/{name}"
    fields = {"png": "path", "cls": "label", "txt": "caption"}
    found = records(url, fields=fields)
    assert [(r.key, dict(r.fields)) for r in found] == [
        ("00000000", {"png": FileRef(f"{tmp_path}/a.png"), "cls": 3, "txt": "a cat, sitting"}),
        ("00000001", {"png": FileRef(f"{tmp_path}/sub/b.png"), "cls": 4, "txt": "dog"}),
    ]
    assert [record.where for record in found] == [f"{url}, row 1", f"{url}, row 2"]
    moved = records(url, fields=fields, root="s3://b/images/")
    assert moved[1].fields["png"] == FileRef("s3://b/images/sub/b.png")


def test_parquet_is_read(tmp_path: Path) -> None:
    table = pa.table({
        "image": [{"bytes": b"one", "path": "1.png"}, {"bytes": None, "path": "2.png"}],
        "raw": [b"x", b"y"],
        "vector": [[1.0, 2.0], [3.0, 4.0]],
        "label": [1, 2],
        "meta": [{"a": 1}, {"a": 2}],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    fields = {"png": "image", "bin": "raw", "npy": "vector", "cls": "label", "json": "meta"}
    source = opened(str(tmp_path), fields=fields)
    assert source.length == 2
    first, second = source
    assert {name: value for name, value in first.fields.items() if name != "npy"} == {
        "png": b"one", "bin": b"x", "cls": 1, "json": {"a": 1},
    }  # fmt: skip
    assert np.array_equal(first.fields["npy"], [1.0, 2.0])
    assert second.fields["png"] == FileRef(f"{tmp_path}/2.png")
    with pytest.raises(SourceError, match=r"no column 'nope'; there are: 'image', 'raw'.*row 1"):
        list(opened(str(tmp_path / "t.parquet"), fields={"txt": "nope"}))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.float32()), [0.5, 1]),
        (pa.list_(pa.float16()), [0.5, 1]),
        (pa.list_(pa.int8()), [1, 0]),
        (pa.large_list(pa.uint8()), []),
        (pa.list_(pa.uint64()), [1, 2**63 + 1]),  # which NumPy alone makes floats
        (pa.list_(pa.list_(pa.float32(), 2)), [[1, 2], [3, 4]]),
        (pa.float32(), 0.5),
    ],
    ids=str,
)
def test_numbers_of_a_parquet_column_keep_their_dtype(
    kind: pa.DataType, value: Any, tmp_path: Path
) -> None:
    table, numbers = str(tmp_path / "t.parquet"), kind
    while isinstance(numbers, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        numbers = numbers.value_type
    parquet.write_table(pa.table({"key": ["a"], "x": pa.array([value], kind)}), table)
    fields = {"npy": "x", "json": "x"}
    ss.pack(table, tmp_path / "packed", fields=fields)
    with ss.ShardWriter(tmp_path / "keys") as writer:
        writer.write({"__key__": "a", "cls": 1})
    ss.reshard(ss.join(tmp_path / "keys", {table: fields}, by="key"), tmp_path / "added")
    for name in ("packed", "added"):
        (sample,) = ss.ShardDataset(str(tmp_path / name)).decode()
        assert sample["npy"].dtype == pa.array([], numbers).to_numpy(zero_copy_only=False).dtype
        assert sample["npy"].tolist() == sample["json"] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [([[1, 2], [3]], "rows of this list differ in length"), ([[1, None]], "array of objects")],
)
def test_lists_that_are_no_array_are_errors(value: Any, message: str, tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([value], pa.list_(pa.list_(pa.float32())))})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=rf"{message}.*t\.parquet, row 1"):
        ss.pack(tmp_path / "t.parquet", tmp_path / "out", fields={"npy": "x"})


def test_without_a_mapping_all_columns_go_to_json(tmp_path: Path) -> None:
    url = put(tmp_path, {"t.csv": b"a,b\n1,x\n"}) + "/t.csv"
    assert records(url)[0].fields == {"json": {"a": "1", "b": "x"}}


def test_table_that_is_replaced_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    url = put(tmp_path, {"1.csv": b"a\nx\n", "2.csv": b"a\ny\n"})
    found = iter(opened(url))
    next(found)
    put(tmp_path, {"2.csv": b"a\ny\nz\n"})
    with pytest.raises(ChangedError, match=r"2\.csv"):
        list(found)


def test_several_tables_are_read(tmp_path: Path) -> None:
    put(tmp_path, {"1.csv": b"a\nx\n", "2.csv": b"a\ny\n"})
    for source in (str(tmp_path), f"{tmp_path}/*.csv"):
        found = records(source, kind="table", fields={"txt": "a"})
        assert [(r.key, r.fields["txt"]) for r in found] == [("00000000", "x"), ("00000001", "y")]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("id", ["n_1", "n_2"]), ("{id}-{a}", ["n_1-x", "n_2-y"]), ("{index}", ["0", "1"])],
)
def test_keys_of_rows_are_unique(key: str, expected: list[str], tmp_path: Path) -> None:
    url = put(tmp_path, {"t.csv": b"id,a\nn.1,x\nn.2,y\n"}) + "/t.csv"
    assert [record.key for record in records(url, key=key, fields={"txt": "a"})] == expected


def test_row_with_the_key_of_another_of_its_shard_is_named(tmp_path: Path) -> None:
    url = put(tmp_path, {"t.csv": b"id\n1\n2\n1\n"}) + "/t.csv"
    with pytest.raises(SourceError, match=r"key is in the shard already.*sample '1'.*row 3"):
        ss.pack(url, tmp_path / "out", key="id")
    report = ss.pack(url, tmp_path / "out", key="id", on_error="skip", overwrite=True)
    assert (report.samples, [one.where for one in report.skipped]) == (2, [f"{url}, row 3"])


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (
            "path,label\na.png,cat\n",
            {"cls": "label"},
            "'label' holds 'cat', but 'cls' takes a whole number",
        ),
        ("path,label\na.png,1.5\n", {"cls": "label"}, r"'label' holds '1\.5'"),
        (
            "path,label\na.png,1\n",
            {"jpg": "image"},
            r"no column 'image'; there are: 'path', 'label'",
        ),
        (
            "path,label\n,1\n",
            {"jpg": "path"},
            "'path' holds no text, but 'jpg' takes the path of a file",
        ),
    ],
)
def test_invalid_row_becomes_a_record_with_an_error(
    text: str, fields: dict[str, str], message: str, tmp_path: Path
) -> None:
    url = put(tmp_path, {"t.csv": text.encode()}) + "/t.csv"
    (record,) = opened(url, fields=fields)
    with pytest.raises(SourceError, match=message + r".*t\.csv, row 1\]"):
        raise record.error or AssertionError


def test_key_without_its_closing_brace_is_an_error(tmp_path: Path) -> None:
    url = put(tmp_path, {"t.csv": b"id,txt\n1,a\n"}) + "/t.csv"
    with pytest.raises(OptionError, match=r"the key '\{id' is no template: expected '\}'"):
        opened(url, key="{id")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"a,a\n1,2\n", "two columns are named 'a'"),
        ("t.csv", b"", "the table is empty"),
        ("t.csv", b'a\n"x\n', "line 2"),
        ("t.csv", b"a\nok\n\xff\n", "not UTF-8"),
        ("t.parquet", b"no parquet", r"t\.parquet"),
        ("t.parquet", two_columns_of_one_name(), "two columns are named 'a'; rename one"),
    ],
)
def test_malformed_table_is_an_error(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    url = put(tmp_path, {name: data}) + f"/{name}"
    with pytest.raises((SourceError, StorageError), match=message):
        list(opened(url))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.csv", b"a,b\n1,x\n1\n3,z\n", r"the row has 1 cell, the header 2 \(line 3\).*row 2"),
        ("t.csv", b"a,b\n1,x\n1,2,3\n3,z\n", "the row has 3 cells, the header 2.*row 2"),
        ("t.jsonl", b'{"a": 1}\n{"a"\n{"a": 3}\n', "not JSON.*row 2"),
        ("t.jsonl", b'{"a": 1}\n[1]\n{"a": 3}\n', "a row is a JSON object, not list.*row 2"),
    ],
)
def test_malformed_row_is_skipped_alone(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    url = put(tmp_path, {name: data}) + f"/{name}"
    with pytest.raises(SourceError, match=message):
        ss.pack(url, tmp_path / "out", fields={"txt": "a"})
    report = ss.pack(url, tmp_path / "out", fields={"txt": "a"}, overwrite=True, on_error="skip")
    assert len(report.skipped) == 1
    assert [sample["txt"] for sample in ss.ShardDataset(str(tmp_path / "out"))] == [b"1", b"3"]


@pytest.mark.parametrize("separator", [";", "|", "\t"])
def test_separator_of_a_csv_without_commas_is_found_and_named(
    separator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [separator.join(["text", "label"]), separator.join(["a, b", "3"])]
    url = put(tmp_path, {"t.csv": "\n".join(lines).encode()}) + "/t.csv"
    (record,) = opened(url, fields={"txt": "text", "cls": "label"})
    assert record.fields == {"txt": "a, b", "cls": 3}
    assert f"t.csv: the header has no commas; columns are separated by {separator!r}" in caplog.text


def test_missing_file_of_a_table_has_the_likely_reason(tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to("gone.png")
    for name, message in [
        ("link.png", r"a link to 'gone\.png', which does not exist.*row 1"),
        ("photos\\a.png", r"write paths with / instead of .*row 1"),
        ("a.png", r"relative to its own folder: .*--root.*row 1"),
    ]:
        url = put(tmp_path, {"t.jsonl": json.dumps({"file": name}).encode()}) + "/t.jsonl"
        with pytest.raises(SourceError, match=message):
            ss.pack(url, tmp_path / "out", fields={"png": "file"}, overwrite=True)


def test_field_that_no_decoder_knows_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = put(tmp_path, {"t.csv": b"image\na.png\n", "a.png": b"x"}) + "/t.csv"
    ss.pack(url, tmp_path / "out", fields={"image": "image"})
    assert "knows the field 'image'; name it by the format of its files, e.g. --map png=image" in (
        caplog.text
    )
    caplog.clear()
    dataset = ss.ShardDataset(str(tmp_path / "out"))
    list(dataset.decode("rgb", fields={"image": bytes}))
    list(dataset.decode("rgb", only="cls"))
    list(dataset.map(lambda sample: sample | {"image": 1.5, "area": [1]}).decode("rgb"))
    assert not caplog.messages
    for _ in range(2):  # it is said once
        list(dataset.decode("rgb"))
    assert caplog.text.count("no decoder is chosen by the name of field 'image'") == 1


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_table_on_a_server_that_closes_connections_is_read_or_an_error(
    name: str, shaped_s3: ShapedS3, bucket: str
) -> None:
    out = io.BytesIO()
    parquet.write_table(pa.table({"a": [f"{i:04d}" for i in range(1000)]}), out)
    lines = [f'{{"a": "{i:04d}"}}' if name == "t.jsonl" else f"{i:04d}" for i in range(1000)]
    text = "\n".join(["a"] * (name == "t.csv") + lines).encode()
    url = f"{bucket}/{name}"
    data = out.getvalue() if name == "t.parquet" else text
    publish_bytes(Storage(shaped_s3.plain.storage_options), url, data)

    def found(retry_timeout_s: float) -> list[str]:
        storage = Storage(shaped_s3.chaos.storage_options | {"retry_timeout_s": retry_timeout_s})
        return [row.cells["a"] for row in iter_rows(url, storage, columns=None)]

    shaped_s3.control("/set?profile=chaos&slow=0&stall=0&trunc=0&reset=0.3")
    assert found(60) == [f"{i:04d}" for i in range(1000)]
    shaped_s3.control("/set?profile=chaos&reset=1")
    with pytest.raises(StorageError, match=f"the connection broke off.*{name}"):
        found(0.3)


def make_tars(folder: Path, **options: Any) -> str:
    with ShardWriter(folder, max_samples=3, **options) as writer:
        for i in range(7):
            writer.write({"__key__": f"s{i}", "txt": f"{i}", "cls": i})
    return str(folder)


@pytest.mark.parametrize(
    ("tail", "count"),
    [("", 7), ("/index.json", 7), ("/*.tar", 7), ("/{000001..000002}.tar", 4), ("/000000.tar", 3)],
)
def test_tars_are_read(tail: str, count: int, tmp_path: Path) -> None:
    source = opened(make_tars(tmp_path) + tail)
    found = list(source)
    assert source.length == len(found) == count
    assert found[-1].fields == {
        "txt": found[-1].key[1:].encode(),
        "cls": found[-1].key[1:].encode(),
    }
    assert [r.key for r in opened(str(tmp_path), key="{index:03d}-{key}")][:2] == [
        "000-s0",
        "001-s1",
    ]


def test_compressed_tar_is_read(tmp_path: Path) -> None:
    data = Path(make_tars(tmp_path / "a"), "000000.tar").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(data))
    source = opened(str(tmp_path / "b.tar.gz"))
    assert source.length is None
    assert [record.key for record in source] == ["s0", "s1", "s2"]


def test_reading_begins_at_any_sample_of_an_indexed_tar(tmp_path: Path) -> None:
    folder = make_tars(tmp_path)
    for first in range(9):
        assert [r.key for r in opened(folder).iter_from(first)] == [
            f"s{i}" for i in range(first, 7)
        ]
    (tmp_path / "000000.tar.idx").unlink()
    assert [r.key for r in opened(folder).iter_from(1)] == [f"s{i}" for i in range(1, 7)]
    (tmp_path / "000000.tar").write_bytes(bytes(os.path.getsize(tmp_path / "000000.tar")))
    tar = tmp_path / "000001.tar"
    tar.write_bytes(b"damaged!" * 128 + tar.read_bytes()[1024:])  # the first member of s3
    assert [r.key for r in opened(folder).iter_from(4)] == ["s4", "s5", "s6"]
    with pytest.raises(ShardError):
        list(opened(folder).iter_from(3))
    tar.write_bytes(tar.read_bytes()[:2048] + bytes(8192))
    for first, place in ((0, "000000.tar"), (4, "000001.tar")):
        with pytest.raises(IndexMismatchError, match=rf"tar holds .* manifest says 3.*{place}"):
            list(opened(folder).iter_from(first))


@pytest.mark.parametrize(("at", "offset"), [(1, 1024), (1, 4096), (2, 1 << 20)])
def test_index_that_does_not_fit_its_tar_is_an_error(at: int, offset: int, tmp_path: Path) -> None:
    make_tars(tmp_path)
    offsets = np.fromfile(tmp_path / "000000.tar.idx", dtype="<u8")
    assert offsets.tolist() == [0, 2048, 4096, 6144]
    offsets[at] = offset
    if offset == 4096:  # as if one sample were not there
        offsets = np.unique(offsets)
    offsets.tofile(tmp_path / "000000.tar.idx")
    with pytest.raises(IndexMismatchError):
        ss.pack(tmp_path / "000000.tar", tmp_path / "out", kind="tars")
    assert not (tmp_path / "out" / "index.json").exists()


def test_tar_that_is_replaced_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    source = opened(make_tars(tmp_path / "in"))
    records = iter(source)
    next(records)
    for name in ("000001.tar", "000001.tar.idx"):
        (tmp_path / "in" / name).write_bytes(
            (tmp_path / "in" / name.replace("1", "0")).read_bytes()
        )
    with pytest.raises(ChangedError, match=r"000001\.tar"):
        list(records)


def test_damaged_or_cut_tar_is_an_error(tmp_path: Path) -> None:
    folder = make_tars(tmp_path)
    tar = tmp_path / "000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[:1024] + b"garbage!" * ((len(whole) - 1024) // 8))
    with pytest.raises(ShardError):
        list(opened(folder))
    tar.write_bytes(whole[:2048] + bytes(len(whole) - 2048))  # valid, but samples are missing
    with pytest.raises(
        IndexMismatchError, match="the tar holds 1 sample, its index or manifest says 3"
    ):
        list(opened(folder))


def test_python_samples_are_read() -> None:
    samples = [{"txt": "a", "__url__": "x"}, {"__key__": "k", "txt": "b"}]
    source = opened(samples)
    assert source.length == 2
    assert [(r.key, dict(r.fields)) for r in source] == [
        ("00000000", {"txt": b"a"}),
        ("k", {"txt": b"b"}),
    ]
    mine = SamplesSource(samples=samples, name="mine")
    assert opened(mine) is mine
    with pytest.raises(OptionError, match="samples from Python"):
        opened(samples, kind="table")


def test_one_spelling_for_jpeg() -> None:
    assert [canonical_field(name) for name in ("JPG", "jpeg", "a.JPEG", "pjpeg")] == [
        "jpg",
        "jpg",
        "a.jpg",
        "pjpeg",
    ]
    names = ("a.jfif", "JPE", "tiff", "seg.TIFF")
    assert [canonical_field(name) for name in names] == ["a.jpg", "jpg", "tif", "seg.tif"]


def test_unmapped_table_names_the_options_that_map_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain_bytes = pa.table({"id": [1], "sound": [b"RIFF\0\0\0\0WAVE"]})
    parquet.write_table(plain_bytes, tmp_path / "a.parquet")
    hugging_face = pa.table({"photo": [{"bytes": png(), "path": None}]})
    parquet.write_table(hugging_face, tmp_path / "b.parquet")
    for name, hint in (("a", r"'sound' holds bytes.*--map jpg=sound"), ("b", "--map jpg=photo")):
        (record,) = opened(str(tmp_path / f"{name}.parquet"))
        with pytest.raises(SourceError, match=hint):
            raise record.error or AssertionError
    url = put(tmp_path, {"t.csv": b"n,file\n1,a.JPEG\n2,b.jpeg\n"}) + "/t.csv"
    assert [record.fields["json"]["n"] for record in records(url)] == ["1", "2"]
    assert caplog.messages == [
        f"{url}, row 1: column 'file' names images, but is packed as text; --map jpg=file packs the images"
    ]


def test_loose_files_in_split_folders_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = put(
        tmp_path, {"train/a.jpg": b"", "train/a.txt": b"", "val/b.jpg": b"", "val/b.txt": b""}
    )
    assert [record.key for record in records(root)] == ["train/a", "val/b"]
    assert "the folders train, val look like splits" in caplog.text


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-9007199254740993", -9007199254740993),
        ("+9007199254740993", 9007199254740993),
        ("9007199254740993.0", 9007199254740993),
        (" -3 ", -3),
        ("1e3", 1000),
        ("-0.5", None),
        ("1e999999999", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_whole_numbers_of_a_text_table_are_exact(
    name: str, text: str, number: int | None, tmp_path: Path
) -> None:
    line = json.dumps({"n": text, "a": "x"}) if name == "t.jsonl" else "n,a\n" + text + ",x"
    data = line.replace(",", "\t") if name == "t.tsv" else line
    (record,) = opened(put(tmp_path, {name: data.encode()}) + f"/{name}", fields={"cls": "n"})
    assert dict(record.fields) == ({} if number is None else {"cls": number})
    assert (record.error is None) == (number is not None)


def test_floats_that_have_lost_digits_are_no_whole_numbers(tmp_path: Path) -> None:
    url = put(tmp_path, {"t.jsonl": b'{"n": 9007199254740993.0}\n{"n": 3.0}\n'}) + "/t.jsonl"
    first, second = opened(url, fields={"cls": "n"})
    assert "takes a whole number" in str(first.error)
    assert second.fields == {"cls": 3}


def test_quotes_in_a_tsv_swallow_no_rows(tmp_path: Path) -> None:
    text = 'id\ttext\n1\t"Hello," he said.\n2\t"Open\n3\t5" pipe\n4\tshut"\n5\t"a ""b"""\r\n6\t"a\tb"\n'
    url = put(tmp_path, {"t.tsv": text.encode()}) + "/t.tsv"
    found = {
        record.key: record.fields["txt"]
        for record in records(url, key="id", fields={"txt": "text"})
    }
    assert found == {
        "1": '"Hello," he said.', "2": '"Open', "3": '5" pipe', "4": 'shut"', "5": 'a "b"', "6": "a\tb",
    }  # fmt: skip
    (tmp_path / "t.tsv").write_text('id\ttext\n1\t"two\nlines"\n')
    error = list(opened(url, key="id", fields={"txt": "text"}))[1].error
    assert "1 cell, the header 2 (line 3); a row is one line" in str(error)


@pytest.mark.parametrize("key", ["id", "{id}", "{a}-{id}"])
@pytest.mark.parametrize("row", ['{"id": null, "a": "x"}', '{"id": "", "a": "x"}'])
def test_row_without_a_key_is_an_error(key: str, row: str, tmp_path: Path) -> None:
    url = put(tmp_path, {"t.jsonl": row.encode()}) + "/t.jsonl"
    (record,) = opened(url, key=key, fields={"txt": "a"})
    with pytest.raises(SourceError, match=r"(a key is text, not|'id' is empty).*t\.jsonl, row 1"):
        raise record.error or AssertionError


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("txt", 5, "5"),
        ("txt", ["a", "b"], r"holds \['a', 'b'\], but 'txt' takes text; .*json=x"),
        ("caption.txt", {"a": 1}, "takes text"),
        ("txt", True, "takes text"),
        ("jsonl", ["a", {"b": 1}], ["a", {"b": 1}]),
    ],
)
def test_lists_are_no_text(field: str, value: object, expected: Any, tmp_path: Path) -> None:
    url = put(tmp_path, {"t.jsonl": json.dumps({"x": value}).encode()}) + "/t.jsonl"
    (record,) = opened(url, fields={field: "x"})
    if record.error is None:
        assert record.fields == {field: expected}
    else:
        with pytest.raises(SourceError, match=expected):
            raise record.error


def test_null_is_no_class_name(tmp_path: Path) -> None:
    url = put(tmp_path, {"t.jsonl": b'{"x": null}'}) + "/t.jsonl"
    with pytest.raises(SourceError, match="holds None, which is not in the list"):
        ss.pack(url, tmp_path / "out", fields={"cls": "x"}, classes=["None"])


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("in/a.png", True),
        ("in/../in/a.png", False),
        ("../secret/a.png", False),
        ("%2e%2e/secret/a.png", False),
        ("..\\secret\\a.png", False),
        ("LOCAL/a.png", False),
        ("file://LOCAL/a.png", False),
        ("local://LOCAL/a.png", False),
        ("http://169.254.169.254/latest/meta-data", False),
        ("simplecache::ROOT/in/a.png", False),
        ("ROOT/in/a.png", True),
        ("ROOT@other/in/a.png", False),
        ("ROOT2/a.png", False),
        ("ROOT/../secret/a.png", False),
    ],
)
def test_remote_table_names_files_of_its_folder_only(
    name: str, is_allowed: bool, tmp_path: Path
) -> None:
    store = f"memory://{uuid.uuid4().hex}"
    root = f"{store}/data"
    for url in (f"{root}/in/a.png", f"{store}/secret/a.png", f"{root}2/a.png"):
        publish_bytes(Storage(), url, png())
    put(tmp_path, {"a.png": png(7)})
    named = name.replace("LOCAL", str(tmp_path)).replace("ROOT", root)
    table = f"{root}/t.jsonl"
    publish_bytes(Storage(), table, json.dumps({"p": named}).encode())
    dest = tmp_path / "out"
    if is_allowed:
        assert ss.pack(table, dest, fields={"png": "p"}).samples == 1
        return
    with pytest.raises(SourceError, match=r"which is not under .*root= \(--root\).*row 1"):
        ss.pack(table, dest, fields={"png": "p"})
    assert not (dest / "index.json").exists()
    with pytest.raises(SourceError, match="no sample is left .*: 1 were skipped"):
        ss.pack(table, tmp_path / "skip", fields={"png": "p"}, on_error="skip")


def test_files_outside_the_folder_of_a_remote_table_are_allowed_by_name(tmp_path: Path) -> None:
    store = f"memory://{uuid.uuid4().hex}"
    publish_bytes(Storage(), f"{store}/images/a.png", png())
    put(tmp_path / "local", {"b.png": png()})
    rows = [{"p": f"{store}/images/a.png"}, {"p": f"{tmp_path}/local/b.png"}]
    table = f"{store}/meta/t.jsonl"
    publish_bytes(Storage(), table, "\n".join(map(json.dumps, rows)).encode())

    def packed(name: str, **options: Any) -> int:
        found = ss.pack(table, tmp_path / name, fields={"png": "p"}, on_error="skip", **options)
        return found.samples

    assert packed("root", root=store) == 1
    assert packed("one", allow=f"{tmp_path}/local") == 1
    assert packed("other", allow=["memory://", f"file://{tmp_path}"]) == 2
    assert (
        packed("parts", allow=["memory://", str(tmp_path)], executor=ss.tasks.LocalExecutor()) == 2
    )
    with pytest.raises(SourceError, match="no sample is left"):
        packed("none", allow=f"{tmp_path}/loc")
    with pytest.raises(OptionError, match=r"--allow, --header\) apply to tables"):
        ss.pack(tmp_path / "local", tmp_path / "no", allow="s3://")


def test_local_table_names_any_file(tmp_path: Path) -> None:
    put(tmp_path, {"elsewhere/a.png": png()})
    remote = f"memory://{uuid.uuid4().hex}/b.png"
    publish_bytes(Storage(), remote, png())
    names = [f"{tmp_path}/elsewhere/a.png", "../elsewhere/a.png", remote]
    put(tmp_path / "meta", {"t.csv": "\n".join(["p", *names]).encode()})
    assert ss.pack(tmp_path / "meta/t.csv", tmp_path / "out", fields={"png": "p"}).samples == 3


@pytest.mark.usefixtures("s3_env")
def test_table_on_s3_cannot_read_files_of_this_machine(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    publish_bytes(Storage(), f"{bucket}/t.csv", f"p\n{tmp_path}/secret\n".encode())
    with pytest.raises(SourceError, match=f"names {tmp_path}/secret, which is not under {bucket}"):
        ss.pack(f"{bucket}/t.csv", tmp_path / "out", fields={"bin": "p"})


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_metadata_of_hugging_face_is_read_as_a_table(name: str, tmp_path: Path) -> None:
    rows = [{"file_name": "x/1.png", "text": "a cat"}, {"file_name": "2.PNG", "text": "a dog"}]
    text = "\n".join(map(json.dumps, rows))
    if name.endswith(".csv"):
        text = "file_name,text\nx/1.png,a cat\n2.PNG,a dog\n"
    root = put(tmp_path / "in", {"x/1.png": png(1), "2.PNG": png(2), name: text.encode()})
    ss.pack(root, tmp_path / "out")
    found = [
        (one["png"], json.loads(one["json"])) for one in ss.ShardDataset(str(tmp_path / "out"))
    ]
    assert found == [(png(1), {"text": "a cat"}), (png(2), {"text": "a dog"})]
    ss.pack(root, tmp_path / "txt", fields={"png": "file_name", "txt": "text"})
    assert [one["txt"] for one in ss.ShardDataset(str(tmp_path / "txt"))] == [b"a cat", b"a dog"]


def test_tables_and_system_files_beside_images_are_no_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"1.png": png(), "2.png": png(), "2.csv": b"a\n", "labels.csv": b"id\n1\n"}
    system = dict.fromkeys(("Thumbs.db", "desktop.ini", "__MACOSX/1.png", "@eaDir/1.png"), b"")
    root = put(tmp_path, files | system)
    assert [(r.key, sorted(r.fields)) for r in records(root)] == [
        ("1", ["png"]),
        ("2", ["csv", "png"]),
    ]
    assert "tables beside images are left out: labels.csv; to pack their rows" in caplog.text
    assert len(ss.ObjectDataset(root)) == 2
    tables = put(tmp_path / "t", {"1.csv": b"a\n", "2.csv": b"a\n", "2.png": png()})
    assert len(records(tables)) == 2


def test_fifos_and_sockets_are_skipped_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = put(tmp_path / "in", {"cat/1.png": png(), "dog/1.png": png()})
    os.mkfifo(f"{root}/cat/2.png")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{root}/dog/2.png")
    assert ss.pack(root, tmp_path / "out").samples == 2
    assert "cat/2.png: skipped: a FIFO, socket or device" in caplog.text
    assert len(ss.ObjectDataset(root)) == 2
    os.mkfifo(tmp_path / "t.csv")
    for number, name in enumerate((f"{root}/cat/2.png", "/dev/zero", f"{root}/dog/2.png")):
        (tmp_path / "names.csv").write_text(f"p\n{name}\n")
        with pytest.raises(SourceError, match="a FIFO, a socket or a device; .*row 1"):
            ss.pack(tmp_path / "names.csv", tmp_path / f"{number}", fields={"bin": "p"})
    for read in (
        lambda: ss.pack(tmp_path / "t.csv", tmp_path / "no"),
        lambda: Storage().read(f"{root}/cat/2.png"),
    ):
        with pytest.raises(StorageError, match="a FIFO, a socket or a device"):
            read()


@pytest.mark.parametrize(
    "url", ["s3:/bucket/x", "s3:bucket/x", "S3:/b", "https:/host/x", "gs:/b/x"]
)
@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()])
def test_url_that_lacks_a_slash_is_no_folder(
    url: str, executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "in", {"a.txt": b"a"})
    for source, dest in (("in", url), (url, "out")):
        with pytest.raises(OptionError, match=r"not a URL: a URL begins with .*://"):
            ss.pack(source, dest, executor=executor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert ss.pack("in", f"./{url}").samples == 1
