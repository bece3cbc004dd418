"""Test that globs find each file once, on each kind of store, and that names with signs of a glob are names."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.errors import NotFoundError, OptionError
from shardstream.storage import Storage, publish_bytes
from shardstream.testing import make_shards
from tests.servers import S3Server
from tests.small_datasets import numbered

NAMES = ("a.tar", "b.tar", "ab.txt", "s/a.tar", "s/t/b1.tar", "u/c.tar")
PATTERNS = {
    "*.tar": {"a.tar", "b.tar"},
    "?.tar": {"a.tar", "b.tar"},
    "[!a].*": {"b.tar"},
    "*/*.tar": {"s/a.tar", "u/c.tar"},
    "[s]/a.tar": {"s/a.tar"},
    "s/*.tar": {"s/a.tar"},
    "**/*.tar": {"a.tar", "b.tar", "s/a.tar", "s/t/b1.tar", "u/c.tar"},
    "s/**": {"s/a.tar", "s/t/b1.tar"},
    "s/*/b?.tar": {"s/t/b1.tar"},
    "*/z/*.tar": set(),
}


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_globs_match_as_in_a_shell(tmp_path: Path, scheme: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if scheme == "memory://" else f"{scheme}{tmp_path}"
    storage = Storage()
    for name in NAMES:
        publish_bytes(storage, f"{root}/{name}", b"x")
    for pattern, wanted in PATTERNS.items():
        found = [file.url for file in storage.glob(f"{root}/{pattern}")]
        assert found == [f"{root}/{name}" for name in sorted(wanted)], pattern
    with pytest.raises(OptionError, match="can only be an entire path component"):
        storage.glob(f"{root}/a**.tar")
    with pytest.raises(NotFoundError, match="not found"):
        storage.glob(f"{root}/z/*.tar")


@pytest.mark.parametrize("client", ["http", "s3fs"])
def test_glob_finds_a_shard_beside_a_folder_of_its_name(
    s3: S3Server, bucket: str, client: str
) -> None:
    options = s3.storage_options | {"s3_client": client}
    numbered(f"{bucket}/m", 12, 4, storage_options=options)
    storage = Storage(s3.storage_options)
    for below in ("000001.tar/x.txt", "000002.tar/"):  # an unpacked copy; the mark of a folder
        storage.resolve(bucket)[0].pipe_file(f"{bucket}/m/{below}", b"")
    for pattern in ("m/*.tar", "m/00000?.tar", "**/*.tar", "*/*.tar", "m"):
        data = ss.ShardDataset(f"{bucket}/{pattern}", storage_options=options).by_number()
        assert len(data) == 12, pattern


@pytest.mark.parametrize("name", ["out[v1]", "out?", "a[1]b*"])
@pytest.mark.parametrize("pattern", ["", "/", "/*.tar", "/00000[01].tar", "/{000000..000001}.tar"])
def test_folder_with_signs_of_a_glob_is_opened_by_its_name(
    tmp_path: Path, name: str, pattern: str
) -> None:
    make_shards(tmp_path / "outv", samples=3)
    make_shards(tmp_path / name, samples=4, per_shard=2)
    assert len(ss.ShardDataset(f"{tmp_path}/{name}{pattern}").by_number()) == 4


def test_files_with_signs_of_a_glob_are_packed_and_indexed_by_their_names(tmp_path: Path) -> None:
    make_shards(tmp_path / "in", samples=4)
    tar = (tmp_path / "in" / "000000.tar").rename(tmp_path / "in" / "x[1].tar")
    ss.index(tar, to=tmp_path / "mine")
    assert len(ss.ShardDataset(tmp_path / "mine").by_number()) == 4
    table = tmp_path / "t[1].csv"
    table.write_text("cls\n1\n2\n")
    ss.pack(table, tmp_path / "out")
    assert len(ss.ShardDataset(tmp_path / "out").by_number()) == 2
    with pytest.raises(NotFoundError, match="no shard matches this pattern"):
        ss.ShardDataset(tmp_path / "x[2].tar")


@pytest.mark.parametrize("url", ["", " ", ["", "a.tar"]])
def test_empty_url_is_refused(url: str | list[str]) -> None:
    with pytest.raises(OptionError, match="the URL is empty"):
        ss.ShardDataset(url)


def test_url_of_the_local_protocol_is_absolute(tmp_path: Path) -> None:
    make_shards(tmp_path / "data", samples=4)
    assert len(ss.ShardDataset(f"local://{tmp_path}/data").by_number()) == 4
    assert len(ss.ShardDataset(f"local://{tmp_path}/data/*.tar").by_number()) == 4


def test_home_folder_is_expanded_by_every_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_shards(tmp_path / "data", samples=4)
    ss.reshard("~/data", "~/again")
    ss.index("~/data", to="~/mine")
    assert ss.verify("~/again", executor=ss.tasks.LocalExecutor(processes=1)).samples == 4
    for folder in ("~/data", "~/mine"):
        assert len(ss.ShardDataset(folder).by_number()) == 4


@pytest.mark.parametrize("job", ["index", "verify", "reshard", "pack"])
def test_text_is_no_executor(tmp_path: Path, job: str) -> None:
    folder = make_shards(tmp_path / "data", samples=4)
    dest = [] if job in ("index", "verify") else [tmp_path / "out"]
    with pytest.raises(OptionError, match="takes an executor such as .* not 'ray'"):
        getattr(ss, job)(folder, *dest, executor="ray")
    assert not (tmp_path / "out").exists()
