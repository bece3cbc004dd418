from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from PIL import Image
from pyarrow import parquet as pq

from shardstream import ShardDataset
from shardstream.errors import ManifestError, OptionError, ShardError, StorageError
from shardstream.packing import (
    VerifyReport,
    index,
    pack,
    verify,
)
from shardstream.pipeline import ReadOptions
from shardstream.storage import Storage
from shardstream.tasks import LocalExecutor
from tests.small_tars import flip, make_dataset, samples, tar_bytes


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "ds")
    index(str(tmp_path / "ds"))
    return tmp_path / "ds"


def problem_texts(report: VerifyReport) -> list[str]:
    return [f"{problem.severity} {problem}" for problem in report.problems]


def only(report: VerifyReport) -> str:
    (what,) = problem_texts(report)
    return what


def test_valid_dataset_has_no_problems(dataset: Path) -> None:
    report = verify(str(dataset))
    assert problem_texts(report) == []
    assert (report.shards, report.samples, report.bytes) == (
        3,
        12,
        sum(path.stat().st_size for path in dataset.glob("*.tar")),
    )


def test_bit_flip_in_a_body_is_detected_by_the_checksum(dataset: Path) -> None:
    flip(dataset / "train-000001.tar", 600)
    what = only(verify(str(dataset)))
    assert what.startswith(f"error {dataset}/train-000001.tar: sha256 is ")


def test_all_bad_shards_are_listed_and_valid_ones_counted(dataset: Path) -> None:
    cut = dataset / "train-000000.tar"
    cut.write_bytes(cut.read_bytes()[:3200])
    (dataset / "train-000001.tar").unlink()
    report = verify(str(dataset))
    text = "\n".join(problem_texts(report))
    assert report.samples == 4
    assert "train-000000.tar, byte 2560: the tar is cut: 0001.bin" in text
    assert "train-000000.tar: 3200 bytes, the manifest says" in text
    assert "train-000001.tar: not found" in text
    assert "train-000002.tar" not in text


def test_index_of_another_tar_is_reported_with_the_sample(dataset: Path) -> None:
    other = tar_bytes(samples(0, 4, size=2000))
    (dataset / "x").mkdir()
    (dataset / "x" / "a.tar").write_bytes(other)
    index(str(dataset / "x"))
    (dataset / "train-000001.tar.idx").write_bytes((dataset / "x" / "a.tar.idx").read_bytes())
    what = only(verify(str(dataset)))
    assert "train-000001.tar.idx: the index is not that of its tar" in what
    assert "(sample 1 of the shard)" in what
    assert "run 'shardstream index' again" in what


def test_index_that_lacks_the_last_sample_is_an_error(dataset: Path) -> None:
    path = dataset / "train-000001.tar.idx"
    path.write_bytes(path.read_bytes()[:-8])
    what = only(verify(str(dataset)))
    assert "it says 3 samples where a scan finds 4 (sample 3 of the shard)" in what


@pytest.mark.parametrize("data", [b"123", b"\x01" * 16])
def test_damaged_index_is_an_error(dataset: Path, data: bytes) -> None:
    (dataset / "train-000001.tar.idx").write_bytes(data)
    assert only(verify(str(dataset))).startswith(f"error {dataset}/train-000001.tar.idx: an index")


def test_missing_index_is_a_warning(dataset: Path) -> None:
    (dataset / "train-000001.tar.idx").unlink()
    report = verify(str(dataset))
    assert "train-000001.tar.idx, is missing" in only(report)
    assert report.errors == ()


@pytest.mark.parametrize(
    ("suffix", "processes"),
    [(".tar", None), pytest.param(".tar", 2, marks=pytest.mark.slow), (".tar.gz", None)],
)
def test_images_that_cannot_be_decoded_are_listed_by_key(
    suffix: str, processes: int | None, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG")
    whole = stream.getvalue()
    files = {
        "a.jpg": whole,
        "a.json": b"{}",
        "b.jpg": whole[: len(whole) // 2],
        "c.seg.PNG": b"no image",
        "d.jpg": whole,
        "d.txt": b"",
    }
    data = tar_bytes([*files.items()])
    url = str(tmp_path / f"a{suffix}")
    Path(url).write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    executor = None if processes is None else LocalExecutor(processes=processes)
    assert not verify(url, executor=executor).errors
    report = verify(url, decode=True, executor=executor)
    assert [(one.key, one.offset) for one in report.errors] == [
        (key, data.find(name)) for key, name in [("b", b"b.jpg"), ("c", b"c.seg")]
    ]
    cut, unknown = report.errors
    assert "the image in the field 'jpg' cannot be decoded (image file is truncated" in cut.what
    assert "the field 'seg.png' cannot be decoded (unknown format)" in unknown.what
    assert report.samples == 4


def test_stray_files_are_warnings(dataset: Path) -> None:
    (dataset / "new.tar").write_bytes(tar_bytes(samples(50, 1)))
    (dataset / "train-000009.tar.part-0123456789ab").write_bytes(b"x")
    report = verify(str(dataset))
    assert [problem.shard.rsplit("/", 1)[-1] for problem in report.problems] == [
        "new.tar",
        "train-000009.tar.part-0123456789ab",
    ]
    assert report.errors == ()


def test_wrong_count_in_the_manifest_is_an_error(dataset: Path) -> None:
    path = dataset / "index.json"
    path.write_text(path.read_text().replace('"nsamples": 4', '"nsamples": 5', 1))
    assert "4 samples, the manifest or the index says 5" in only(verify(str(dataset)))


def test_key_in_two_shards_is_reported_with_both(dataset: Path) -> None:
    path = dataset / "train-000002.tar"
    path.write_bytes(tar_bytes([*samples(20, 1), *samples(1, 1)]))
    index(str(dataset))
    (problem,) = verify(str(dataset)).problems
    assert (problem.shard, problem.key) == (str(path), "0001")
    assert (
        problem.what == f"the key '0001' comes twice, in {dataset}/train-000000.tar and in {path}"
    )


def test_shard_copied_under_another_name_is_not_listed_key_by_key(tmp_path: Path) -> None:
    data = tar_bytes(samples(0, 50, size=10))
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(data)
    index(str(tmp_path))
    report = verify(str(tmp_path))
    assert len(report.problems) == 21
    assert report.problems[-1].what == "30 more keys in two shards"


def test_keys_of_bare_and_compressed_shards_are_compared_too(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(samples(0, 3)))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(tar_bytes(samples(2, 3))))
    (problem,) = verify(str(tmp_path)).errors
    assert (problem.shard, problem.key) == (str(tmp_path / "b.tar.gz"), "0002")
    assert f"the key '0002' comes twice, in {tmp_path}/a.tar and in " in problem.what


def test_concatenated_tars_are_an_error(tmp_path: Path) -> None:
    tar = tar_bytes(samples(0, 2))
    (tmp_path / "a.tar").write_bytes(tar + tar_bytes(samples(2, 2)))
    (problem,) = verify(str(tmp_path)).errors
    assert "after the end of the archive" in problem.what
    assert problem.offset == len(tar)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.zst"])
def test_compressed_tars_are_verified(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == ".tar.gz" else zstandard.compress
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compress(tar_bytes(samples(0, 3))))
    report = verify(str(tmp_path))
    assert (report.samples, report.bytes, problem_texts(report)) == (3, path.stat().st_size, [])
    path.write_bytes(compress(tar_bytes(samples(0, 3))[:-2000]))
    assert "cut" in only(verify(str(tmp_path)))


def test_inputs_that_cannot_be_verified_are_refused(dataset: Path) -> None:
    with pytest.raises(StorageError, match="not found"):
        verify(str(dataset / "missing"))
    text = (dataset / "index.json").read_text()
    (dataset / "index.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ManifestError, match="version is 2, this shardstream reads 1; upgrade"):
        verify(str(dataset))


@pytest.mark.usefixtures("s3_env")
def test_verify_on_s3(bucket: str, dataset: Path) -> None:
    flip(dataset / "train-000001.tar", 600)
    filesystem, target = Storage().resolve(f"{bucket}/ds/")
    for path in dataset.iterdir():
        filesystem.put_file(str(path), f"{target.rstrip('/')}/{path.name}")
    what = only(verify(f"{bucket}/ds/"))
    assert what.startswith(f"error {bucket}/ds/train-000001.tar: sha256")


def test_problem_has_the_parts_of_its_error_for_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        member = tarfile.TarInfo("a; b [in c].txt")
        member.size = 5000
        tar.addfile(member, io.BytesIO(bytes(5000)))
    path.write_bytes(path.read_bytes()[:2048])
    (problem,) = verify(str(path)).errors
    assert problem.what.startswith("the tar is cut: ")
    assert "a; b [in c].txt" in problem.what
    assert problem.remedy == "fetch or write the shard again"
    assert problem.shard == str(path)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "index.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.fixture
def with_extras(tmp_path: Path) -> Path:
    folder = tmp_path / "extras"
    make_dataset(folder)
    index(str(folder), members=True, columns="cls")
    assert problem_texts(verify(str(folder))) == []
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(nsamples=13), "nsamples is 13, the tars have 12"),
        (lambda document: document.update(total_bytes=1), "total_bytes is 1, the tars have"),
        (lambda document: document["fields"].update(jpg=3), r"fields['jpg'] is 3, the tars have 0"),
        (lambda document: document["fields"].pop("cls"), r"fields['cls'] is 0, the tars have 12"),
    ],
)
def test_wrong_totals_of_the_manifest_are_errors(
    dataset: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change_manifest(dataset, change)
    assert message in only(verify(str(dataset)))


def test_index_of_members_of_another_tar_is_an_error(with_extras: Path) -> None:
    path = with_extras / "train-000001.idx"
    path.write_text(path.read_text().replace(" 512 ", " 513 "))
    assert "sample 0 of the shard has bin at byte 512" in only(verify(str(with_extras)))


def test_wrong_values_of_columns_are_errors(with_extras: Path) -> None:
    path = with_extras / "train-000001.tar.cols.parquet"
    table = pq.read_table(path)
    values = pa.array([4, 5, 0, 7])
    pq.write_table(table.set_column(1, "cls", values), path)
    (problem,) = verify(str(with_extras)).errors
    assert (problem.key, problem.what) == ("0006", "the column cls says 0, the sample has 6")


def test_columns_that_some_shards_lack_are_errors(with_extras: Path) -> None:
    (with_extras / "train-000001.tar.cols.parquet").unlink()
    assert "train-000001.tar: no columns, but " in only(verify(str(with_extras)))


def test_shard_that_is_listed_twice_is_refused(dataset: Path) -> None:
    tar = str(dataset / "train-000000.tar")
    with pytest.raises(OptionError, match="a file is named twice"):
        verify([tar, tar])
    change_manifest(
        dataset,
        lambda document: document["shardlist"].append(
            document["shardlist"][0] | {"url": "./train-000000.tar"}
        ),
    )
    for read in (verify, ShardDataset):
        with pytest.raises(ManifestError, match="the shard train-000000.tar is listed twice"):
            read(str(dataset))


@pytest.mark.parametrize("count", [2, 50])
@pytest.mark.parametrize(
    ("compress", "message"),
    [
        (gzip.compress, r"compressed with gzip, but is not named so; rename it to NAME\.tar\.gz"),
        (zstandard.compress, r"compressed with zstd.*NAME\.tar\.zst"),
        (bz2.compress, "compressed with bzip2.*unpack it"),
        (lzma.compress, "compressed with xz.*unpack it"),
    ],
)
def test_compressed_tar_with_a_plain_name_is_told_so_by_every_door(
    tmp_path: Path, count: int, compress: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "a.tar"
    noise = np.random.default_rng(0).bytes(count * 200)
    path.write_bytes(compress(tar_bytes([("a.bin", noise)])))
    assert re.search(message, only(verify(str(path))))
    ignoring = partial(ShardDataset, read=ReadOptions(index="ignore"))
    readers: tuple[Callable[[str], Any], ...] = (index, ShardDataset, ignoring)
    for read in readers:
        with pytest.raises(ShardError, match=message):
            list(read(str(path)))
    with pytest.raises(ShardError, match=message):
        pack(str(path), tmp_path / "out")


def test_cut_zstd_is_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    path.write_bytes(zstandard.compress(tar_bytes(samples(0, 3)))[:20])
    assert "the compressed bytes are damaged or cut" in only(verify(str(path)))


@pytest.mark.parametrize("text", ['["a", "a"]', '["a"', "{}"])
def test_class_names_that_cannot_be_read_are_an_error(dataset: Path, text: str) -> None:
    (dataset / "classes.json").write_text('["a", "b"]')
    assert problem_texts(verify(str(dataset))) == []
    (dataset / "classes.json").write_text(text)
    (problem,) = verify(str(dataset)).errors
    assert problem.shard == f"{dataset}/classes.json"
