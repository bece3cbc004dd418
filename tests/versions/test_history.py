"""Versions are listed, named and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import ManifestError, OptionError
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return numbered(tmp_path / "data", 100, 15, columns=["cls"])


def rows(url: str) -> list[Any]:
    return [(one.number, one.operation, one.samples, one.deleted) for one in ss.versions.log(url)]


def test_log_lists_the_versions_with_their_names(url: str) -> None:
    assert rows(url) == [(1, "pack", 100, 0)]
    ss.delete(url, numbers=[3])
    ss.delete(url, numbers=[3], version=2)
    assert ss.versions.tag(url, "paper", 2) == 2
    assert ss.versions.tag(url, "best") == 3
    assert ss.versions.tag(url, "last", "best") == 3
    ss.versions.untag(url, "best")
    assert rows(url) == [(3, "delete", 98, 2), (2, "delete", 99, 1), (1, "pack", 100, 0)]
    assert [one.tags for one in ss.versions.log(url)] == [["last"], ["paper"], []]
    assert [one.number for one in ss.versions.log(url, limit=2)] == [3, 2]
    assert len(ss.ShardDataset(url, version="paper")) == 99
    ss.versions.tag(url, "paper", 1)
    assert len(ss.ShardDataset(url, version="paper")) == 100


def test_wrong_names_are_refused(url: str) -> None:
    with pytest.raises(OptionError, match="letters, digits"):
        ss.versions.tag(url, "1st")
    with pytest.raises(OptionError, match="does not exist"):
        ss.versions.tag(url, "paper", 2)
    with pytest.raises(OptionError, match="no version has the tag 'paper'; the tags are: none"):
        ss.versions.untag(url, "paper")


def test_a_missing_or_wrong_manifest_of_a_version_is_an_error(url: str) -> None:
    ss.delete(url, numbers=[3])
    ss.delete(url, numbers=[3], version=2)
    file = Path(url) / "versions" / "000002.json"
    (Path(url) / "versions" / "000001.json").write_bytes(file.read_bytes())
    with pytest.raises(ManifestError, match="that of version 2, not 1"):
        ss.versions.log(url)
    file.unlink()
    with pytest.raises(ManifestError, match="the manifest of version 2 is missing"):
        ss.versions.log(url, limit=2)


def test_unknown_keys_are_an_error_or_counted(url: str, tmp_path: Path) -> None:
    file = tmp_path / "takedown.txt"
    file.write_text("\n".join(f"{number:06d}" for number in [7, 7, *range(95, 200)]))
    with pytest.raises(OptionError, match=r"no sample has 100 keys of the list: '000100'.*95 more"):
        ss.delete(url, keys=file)
    found = ss.delete(url, keys=file, missing="ignore", dry_run=True)
    assert (found.deleted, found.version, len(found.unknown)) == (6, 1, 100)
    assert len(ss.ShardDataset(url)) == 100
    found = ss.delete(url, keys=file, missing="ignore")
    assert (found.deleted, found.version, found.unknown[0]) == (6, 2, "000100")
    again = ss.delete(url, keys=file, missing="ignore")
    assert (again.deleted, again.version, len(again.unknown)) == (0, 2, 106)


def test_keys_are_read_from_shards_without_columns(tmp_path: Path) -> None:
    url = numbered(tmp_path / "data", 100, 15)
    assert ss.delete(url, keys=["000004"]).deleted == 1
    assert len(ss.ShardDataset(url)) == 99


def test_shards_without_an_index_are_refused(url: str) -> None:
    next(Path(url).glob("*.idx")).unlink()
    with pytest.raises(OptionError, match="no index, which versions of a dataset need"):
        ss.delete(url, numbers=[3])


@pytest.mark.slow
def test_deletions_of_many_shards_are_left_out(tmp_path: Path) -> None:
    url = numbered(tmp_path / "data", 4200, 1, columns=["cls"])  # a manifest with records
    ss.delete(url, numbers=[0, 4100])
    assert ss.delete(url, keys=["000005"]).version == 3
    expected = np.delete(np.arange(4200), [0, 5, 4100]).tolist()
    found = [int(sample["cls"]) for sample in ss.ShardDataset(url)]
    assert found == expected
    assert [one.samples for one in ss.versions.log(url)] == [4197, 4198, 4200]


def test_commands(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "takedown.txt"
    file.write_text("000003\nnone\n", encoding="utf-8-sig")
    assert main(["delete", url, "--keys", str(file), "--missing", "ignore", "--dry-run"]) == 0
    assert (
        "would delete 1 sample of version 1\nno sample has 1 key: none" in capsys.readouterr().out
    )
    assert main(["delete", url, "--keys", str(file), "--keys", str(file)]) == 2
    assert "give one file, or keys" in capsys.readouterr().err
    assert main(["delete", url, "--keys", "000003", "--keys", "000004"]) == 0
    out = capsys.readouterr().out
    assert "deleted 2 samples: version 2" in out
    assert "their bytes stay in the tars" in out
    assert main(["delete", url, "--numbers", "3,5-7", "--version", "2"]) == 0
    assert main(["delete", url, "--where", "cls > 90"]) == 0
    assert main(["tag", url, "paper", "2"]) == 0
    capsys.readouterr()
    assert main(["log", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["samples"], one["tags"]) for one in found][:3] == [
        (85, []),
        (94, []),
        (98, ["paper"]),
    ]
    assert main(["log", url]) == 0
    assert "paper" in capsys.readouterr().out
    assert main(["tag", url, "paper", "--remove"]) == 0
    assert main(["delete", url, "--keys", "none"]) == 1
    assert main(["delete", url, "--numbers", "x"]) == 2
    assert "no sample has 1 key of the list: 'none'" in capsys.readouterr().err
