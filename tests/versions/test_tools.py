"""Tools that read tars or write manifests know the versions of a dataset: they resurrect no sample, and lose no version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import ManifestError, OptionError
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 100
GONE = [0, 20, 21, 99]


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = numbered(tmp_path / "data", N, 15, columns=["cls"])
    ss.delete(url, numbers=GONE)
    return url


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_index_is_refused(url: str, tmp_path: Path) -> None:
    for compacted in (False, True):
        with pytest.raises(OptionError, match="has versions, or deleted samples"):
            ss.index(url)
        with pytest.raises(OptionError, match="has versions, or deleted samples"):
            ss.index(url, to=tmp_path / "elsewhere")
        with pytest.raises(OptionError, match="has versions, or deleted samples"):
            ss.index(f"{url}/000003.tar")
        if not compacted:
            ss.compact(url)
    shard = next(Path(url).glob("compact-*/*.tar"))
    with pytest.raises(OptionError, match="has versions, or deleted samples"):
        ss.index(str(shard))


@pytest.mark.parametrize("are_removed", [False, True])
@pytest.mark.parametrize("damaged", [b"{", None])
def test_index_is_refused_if_the_manifest_is_damaged(
    url: str, damaged: bytes | None, *, are_removed: bool
) -> None:
    path = Path(url) / "index.json"
    if are_removed:  # earlier versions; the file of the deleted samples stays
        ss.versions.gc(url, 1, dry_run=False)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with pytest.raises(OptionError, match="has versions, or deleted samples"):
        ss.index(url)


def test_index_is_refused_after_an_append_whose_first_version_was_removed(tmp_path: Path) -> None:
    for append in (False, True):
        with ss.ShardWriter(tmp_path, append=append) as writer:
            writer.write({"cls": 1})
    ss.versions.gc(tmp_path, 1, dry_run=False)
    assert not [*tmp_path.glob("versions/*"), *tmp_path.glob("deleted-*")]
    with pytest.raises(OptionError, match="has versions, or deleted samples"):
        ss.index(tmp_path)


def test_overwriting_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="delete its folder first"):
        ss.ShardWriter(url, overwrite=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a")
    with pytest.raises(OptionError, match="delete its folder first"):
        ss.pack(source, url, overwrite=True)
    other = numbered(tmp_path / "other", 3, 3)
    with pytest.raises(OptionError, match="delete its folder first"):
        ss.reshard(other, url, overwrite=True)
    assert len(ss.ShardDataset(url)) == N - 4


def test_cat_and_ls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "key    000001" in out_of(capsys, "cat", url)
    assert "key    000000" in out_of(capsys, "cat", url, "--version", "1")
    assert "key    000098" in out_of(capsys, "cat", url, "--number", "95")
    assert main(["cat", url, "--number", "96"]) == 1
    assert main(["cat", url, "--key", "000020"]) == 1
    assert "no sample has the key '000020'" in capsys.readouterr().err
    assert "key    000022" in out_of(capsys, "cat", url, "--key", "000022")
    out = out_of(capsys, "ls", url)
    assert "96 samples" in out
    assert "fields: cls, npy\nversion: 2, 4 samples of these shards deleted" in out
    assert "version:" not in out_of(capsys, "ls", url, "--version", "1")
    found = json.loads(out_of(capsys, "ls", url, "--json"))
    assert (found["version"], found["deleted"], found["nsamples"]) == (2, 4, 96)
    assert "96 samples" in out_of(capsys, "ls", str(Path(url).parent))
    ss.replace_fields(url, {"txt": {"000001": "a new field"}})
    assert "a new field" in out_of(capsys, "cat", url, "--field", "txt")


def test_verify_finds_missing_files_of_a_version_with_deletions(url: str, tmp_path: Path) -> None:
    ss.replace_fields(url, {"txt": {"000001": "new"}})
    for pattern in ("000000.tar", "fields-*/numbers-*.npy"):
        (path,) = (tmp_path / "data").glob(pattern)
        data = path.read_bytes()
        path.unlink()
        assert str(path) in {one.shard for one in ss.verify(url).errors}
        path.write_bytes(data)
    assert ss.verify(url).problems == ()


def test_verify_knows_the_files_of_versions(url: str) -> None:
    ss.compact(url)
    ss.versions.tag(url, "paper", 2)
    ss.replace_fields(url, {"txt": {"000001": "new"}})
    assert ss.verify(url).problems == ()
    assert ss.verify(url, version="paper").problems == ()
    assert ss.verify(url, version=1).samples == N
    (Path(url) / "append-0123456789abcdef").mkdir()
    for name in ("append-0123456789abcdef/000000.tar", "mine.tar"):
        (Path(url) / name).write_bytes(b"x")
    found = {Path(one.shard).name: one.what for one in ss.verify(url).problems}
    assert "no version lists it" in found["000000.tar"]
    assert "readers of the folder do not see it" in found["mine.tar"]
    shard = next(Path(url).glob("fields-*/*.tar"))
    shard.write_bytes(shard.read_bytes()[:-600] + b"x" * 600)
    assert any("fields-" in one.shard for one in ss.verify(url).errors)


def test_verify_finds_missing_files_of_versions(url: str) -> None:
    ss.delete(url, numbers=[5], version=2)
    min(Path(url).glob("deleted-*.npy"), key=lambda path: path.stat().st_size).unlink()
    assert any("deleted-" in one.shard for one in ss.verify(url).errors)
    with pytest.raises(ManifestError, match="is missing"):
        ss.ShardDataset(url, version=2)
    (Path(url) / "versions" / "000002.json").unlink()
    assert any("versions/000002.json" in one.shard for one in ss.verify(url).errors)


def test_keys_of_deleted_samples_may_be_used_again(url: str) -> None:
    with ss.ShardWriter(url, append=True, columns="cls") as writer:
        writer.write({"__key__": "000020", "cls": 7, "npy": b"x"})
    assert ss.verify(url).problems == ()
    assert [int(s["cls"]) for s in ss.ShardDataset(url, subset=["000020"])] == [7]


def test_class_names_of_earlier_versions_and_new_folders(tmp_path: Path, capsys: Any) -> None:
    url = numbered(tmp_path / "data", 4, 2, columns=["cls"])
    (Path(url) / "classes.json").write_text('["a", "b", "c", "d"]')
    ss.delete(url, numbers=[0])
    ss.compact(url)
    assert ss.ShardDataset(url).classes == ("a", "b", "c", "d")
    assert ss.ShardDataset(url, version=1).classes == ("a", "b", "c", "d")
    assert "(b)" in out_of(capsys, "cat", url)


def test_reshard_leaves_deleted_samples_out(url: str, tmp_path: Path) -> None:
    ss.reshard(url, tmp_path / "new", max_samples=7)
    expected = [n for n in range(N) if n not in GONE]
    assert [int(s["cls"]) for s in ss.ShardDataset(str(tmp_path / "new"))] == expected
    ss.delete(url, numbers=[0], version=2)
    with pytest.raises(OptionError, match="published"):
        ss.reshard(url, tmp_path / "new", max_samples=7)
