from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from shardstream.cli import describe, main
from shardstream.packing import index
from shardstream.storage import JOURNAL_NAME, Storage
from tests.small_tars import make_dataset, npy_bytes, png_bytes, samples, tar_bytes

FIELDS = [
    ("0000.png", png_bytes()),
    ("0000.txt", "héllo\n\x1b[31m [bold]".encode()),
    ("0000.json", b'{"a": 1}'),
    ("0000.npy", npy_bytes(np.zeros((3, 4), np.float32))),
    ("0000.bin", bytes(range(20))),
    ("0000.pyd", b"\x80\x04N."),
]


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.tar").write_bytes(tar_bytes(FIELDS))
    return str(tmp_path / "mixed")


def test_ls_without_a_manifest_reads_one_sample(
    mixed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", mixed]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["shard", "samples", "size", "index"]
    assert lines[1].split() == [f"{mixed}/a.tar", "?", "7.2", "kB", "no"]
    assert lines[2:] == [
        "total: 1 shard, ? samples, 7.2 kB",
        "fields: png, txt, json, npy, bin, pyd",
    ]


def test_ls_with_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path)
    (tmp_path / "train-000003.tar").write_bytes(tar_bytes([("0099.cls", b"1")]))
    index(str(tmp_path), name="tiny")
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[1:] == ["4", "11.3", "kB", "yes"]
    assert lines[-2:] == ["total: 4 shards, 13 samples, 35.8 kB (tiny)", "fields: bin (12), cls"]


def test_ls_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path)
    index(str(tmp_path))
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert (listing["nsamples"], listing["fields"]) == (12, {"bin": 12, "cls": 12})
    assert [shard["indexed"] for shard in listing["shards"]] == [True] * 3


@pytest.mark.parametrize("has_tar", [False, True])
def test_ls_names_an_unfinished_split_and_lists_the_others(
    has_tar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path / "train", shards=1, count=2)
    index(str(tmp_path / "train"))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / JOURNAL_NAME).write_text("{}")
    if has_tar:
        (tmp_path / "val" / "000000.tar").write_bytes(tar_bytes(samples(0, 1)))
    assert main(["ls", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("train/\n")
    assert said.out.endswith("val/: not finished\n")
    assert main(["ls", str(tmp_path), "--json"]) == 1
    expected = json.loads(capsys.readouterr().out)["splits"]
    assert (expected["train"]["nsamples"], expected["val"]) == (2, None)


def test_ls_of_a_damaged_first_shard_still_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tar").write_text("no tar")
    assert main(["ls", str(tmp_path)]) == 0
    assert "fields: none" in capsys.readouterr().out


def test_cat_shows_each_kind_of_field(mixed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", mixed]) == 0
    assert [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()] == [
        ["key", "0000"],
        ["shard", f"{mixed}/a.tar"],
        ["field", "size", "content"],
        ["png", "69", "B", "PNG 8x8 RGB"],
        ["txt", "19", "B", "héllo\\n\\x1b[31m [bold]"],
        ["json", "8", "B", '{"a": 1}'],
        ["npy", "176", "B", "array float32 3x4"],
        ["bin", "20", "B", "bytes 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f …"],
        ["pyd", "4", "B", "bytes 80 04 4e 2e (may hold a pickle: not opened)"],
    ]


def test_cat_one_field_in_full(mixed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", mixed, "--key", "0000", "--field", "txt"]) == 0
    assert capsys.readouterr().out == "héllo\n\\x1b[31m [bold]\n"


def test_cat_extracts_to_a_file_or_stdout(
    mixed: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    target = tmp_path / "out.png"
    assert main(["cat", mixed, "--number", "0", "--field", "png", "--output", str(target)]) == 0
    assert target.read_bytes() == png_bytes()
    assert main(["cat", mixed, "--field", "png", "--output", "-"]) == 0
    assert capfdbinary.readouterr().out == png_bytes()


def test_cat_to_an_unwritable_path_is_an_error(
    mixed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "missing" / "out.png"
    assert main(["cat", mixed, "--field", "png", "--output", str(target)]) == 1
    assert capsys.readouterr().err.startswith("error: [Errno 2] No such file")


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("where", [["--number", "9"], ["--key", "0009"]])
def test_cat_finds_a_sample_in_any_shard(
    tmp_path: Path,
    where: list[str],
    suffix: str,
    indexed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = make_dataset(tmp_path)
    if indexed:
        index(str(tmp_path))
    if suffix == ".tar.gz":
        (tmp_path / "index.json").unlink(missing_ok=True)
        for path in paths:
            path.with_suffix(suffix).write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert main(["cat", str(tmp_path), *where, "--field", "cls"]) == 0
    assert capsys.readouterr().out == "9\n"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["--number", "12"], "there is no sample 12: they are numbered from 0 to 11"),
        (["--key", "nope"], "no sample has the key 'nope' in 3 shards"),
        (["--field", "jpg"], "no field 'jpg'; choose from bin, cls [sample '0000']"),
        (["--field", "__key__"], "no field '__key__'"),
    ],
)
def test_cat_of_a_missing_sample_or_field_is_an_error(
    tmp_path: Path, where: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path)
    assert main(["cat", str(tmp_path), *where]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "data", "expected"),
    [
        ("png", b"no image", "bytes 6e 6f 20 69 6d 61 67 65"),
        ("npy", b"\x93NUMPY\x01\x00v\x00{broken", "bytes 93 4e"),
        ("npy", npy_bytes(np.array([{}])), "array Python objects: not opened 1"),
        ("txt", b"\xff\xfe", "bytes ff fe"),
        ("txt", "é".encode() * 300, "é" * 99 + "…"),
        ("seg.png", png_bytes(), "PNG 8x8 RGB"),
        ("txt", b"", "(empty)"),
    ],
)
def test_describe_previews_fields(field: str, data: bytes, expected: str) -> None:
    assert describe(field, data).startswith(expected)


@pytest.mark.usefixtures("s3_env")
def test_ls_and_cat_on_s3_without_an_index(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filesystem, target = Storage().resolve(f"{bucket}/ds/")
    for path in make_dataset(tmp_path):
        filesystem.put_file(str(path), f"{target.rstrip('/')}/{path.name}")
    assert main(["ls", f"{bucket}/ds/"]) == 0
    assert "fields: bin, cls" in capsys.readouterr().out
    for where in (["--number", "9"], ["--key", "0009"]):
        assert main(["cat", f"{bucket}/ds/", *where, "--field", "cls"]) == 0
        assert capsys.readouterr().out == "9\n"
