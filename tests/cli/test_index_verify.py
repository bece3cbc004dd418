from __future__ import annotations

from pathlib import Path

import pytest

from shardstream.cli import main
from tests.small_tars import flip, make_dataset, samples, tar_bytes


def test_index_then_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path)
    assert main(["index", str(tmp_path), "--name", "tiny", "--members", "--threads", "2"]) == 0
    assert capsys.readouterr().out == (
        f"indexed 3 shards, 12 samples, 33.8 kB: wrote {tmp_path}/index.json\n"
    )
    assert (tmp_path / "train-000000.idx").exists()
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("3 shards, 12 samples, 33.8 kB: sound\n", "")


def test_index_names_the_bad_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path)
    (tmp_path / "train-000001.tar").write_text("not a tar")
    assert main(["index", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: not a tar file, or cut inside a header (9 of 512")
    assert f"[in {tmp_path}/train-000001.tar, at byte 0]" in captured.err


def test_index_prints_warnings_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(samples(0, 1), end=b""))
    assert main(["index", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"warning: {tmp_path}/a.tar: the blocks that end an archive")
    assert captured.out.startswith("indexed 1 shard, 1 sample, ")


def test_verify_lists_problems_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path)
    main(["index", str(tmp_path)])
    capsys.readouterr()
    flip(tmp_path / "train-000002.tar", 600)
    (tmp_path / "evil\x1b[2J.tar").write_bytes(b"")
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"error: {tmp_path}/train-000002.tar: sha256 is ")
    assert lines[1].startswith(f"warning: {tmp_path}/evil\\x1b[2J.tar: not in index.json")
    assert lines[2].endswith(": 1 error, 1 warning")


def test_verify_with_only_warnings_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path, shards=1)
    assert main(["verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning: ")
    assert out.endswith(": sound, 1 warning\n")
