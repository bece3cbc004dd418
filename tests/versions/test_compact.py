"""Compaction writes shards again without deleted samples, and changes nothing else."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import OptionError, ShardError
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 100


def numbers(url: str, **options: Any) -> list[int]:
    return [int(sample["cls"]) for sample in ss.ShardDataset(url, **options)]


def entry(url: str) -> dict[str, Any]:
    return dict(json.loads((Path(url) / "index.json").read_text()))


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = numbered(tmp_path / "data", N, 15, columns=["cls"])
    ss.index(url, columns="cls", members=True)
    return url


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_deleted_samples_are_gone_and_the_others_as_before(url: str, processes: int | None) -> None:
    before = {s["__key__"]: s for s in ss.ShardDataset(url)}
    gone = [0, 3, 4, 14, *range(15, 30), 44, 99]
    ss.delete(url, numbers=gone)
    executor = None if processes is None else ss.tasks.LocalExecutor(processes=processes)
    report = ss.compact(url, executor=executor)
    assert isinstance(report, ss.packing.CompactReport)
    assert (report.version, report.samples, report.shards, report.removed) == (3, 21, 3, 1)
    expected = np.delete(np.arange(N), gone).tolist()
    assert numbers(url) == expected
    assert numbers(url, version=1) == [*range(N)]
    assert numbers(url, version=2) == expected
    assert ss.verify(url).problems == ()
    found = {s["__key__"]: s for s in ss.ShardDataset(url)}
    for key, sample in found.items():
        assert {n: v for n, v in sample.items() if n != "__url__"} == {
            n: v for n, v in before[key].items() if n != "__url__"
        }
    assert ss.catalog.read_columns(url)["cls"].to_pylist() == expected
    assert numbers(url, where="cls < 20") == [n for n in expected if n < 20]
    manifest = entry(url)
    assert manifest["fields"] == {"cls": N - 21, "npy": N - 21}
    assert manifest["dataset_version"]["renumbered"] == [manifest["dataset_version"]["number"]]
    assert "deleted" not in manifest["dataset_version"]
    shards = manifest["shardlist"]
    assert [one["url"].startswith("compact-000001/") for one in shards] == [
        True, True, False, False, False, True,
    ]  # fmt: skip
    for one in shards:
        data = (Path(url) / one["url"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == one["sha256"]
    with tarfile.open(Path(url) / shards[0]["url"]) as tar:
        assert len(tar.getnames()) == 2 * 11
    assert not [*(Path(url) / "compact-000001").glob(".*")]


def test_nothing_deleted_is_nothing_to_do(url: str) -> None:
    assert ss.compact(url) == ss.packing.CompactReport(version=1)
    ss.delete(url, numbers=[5])
    ss.compact(url)
    assert ss.compact(url).version == 3


def test_a_compacted_dataset_is_changed_again(url: str) -> None:
    for round_ in range(3):
        last = len(ss.ShardDataset(url)) - 1
        ss.delete(url, numbers=[0, 20, last], version=2 * round_ + 1)
        ss.compact(url)
        assert len(ss.ShardDataset(url)) == N - 3 * (round_ + 1)
    assert ss.verify(url).problems == ()
    assert numbers(url)[:3] == [3, 4, 5]
    names = [one["url"] for one in entry(url)["shardlist"]]
    assert names[0].startswith("compact-000003/000000-")
    assert names[0].count("-") == 2


def texts(url: str, **options: Any) -> dict[int, str | None]:
    dataset = ss.ShardDataset(url, **options).decode()
    return {int(sample["cls"]): sample.get("txt") for sample in dataset}


def stored(url: str, text: str) -> list[str]:
    return sorted(
        str(file.relative_to(url))
        for file in Path(url).rglob("*.tar")
        if text.encode() in file.read_bytes()
    )


@pytest.mark.slow
def test_replaced_fields_stay_and_those_of_deleted_samples_are_gone(url: str) -> None:
    ss.replace_fields(url, {"txt": [f"all {n:02d}" for n in range(N)]}, max_bytes=20_480)
    ss.replace_fields(url, {"txt": {f"{n:06d}": f"some {n:02d}" for n in range(0, N, 7)}})
    ss.replace_fields(url, {"npy": {"000003": np.zeros(3)}, "txt": {"000003": "gone soon"}})
    expected = texts(url)
    assert (expected[14], expected[15], expected[3]) == ("some 14", "all 15", "gone soon")
    gone = {3, 14, 15, *range(30, 46)}
    report = ss.packing.CompactReport(version=0)
    for some in (gone, {0, 99}):
        ss.delete(url, keys=[f"{n:06d}" for n in some])
        before = [s | {"__url__": ""} for s in ss.ShardDataset(url)]
        report = ss.compact(url, executor=ss.tasks.LocalExecutor(processes=2))
        assert [s | {"__url__": ""} for s in ss.ShardDataset(url)] == before
        expected = {n: text for n, text in expected.items() if n not in some}
        assert texts(url) == expected
    assert len(entry(url)["dataset_version"]["replaced"]) == 2
    assert entry(url)["fields"] == {"cls": N - 21, "npy": N - 21, "txt": N - 21}
    assert report.shards >= 5
    found = ss.versions.diff(url, report.version - 2)
    assert (found.deleted, found.fields) == (2, [])
    assert "txt" in ss.versions.diff(url, 1).fields
    assert stored(url, "all 31")
    assert stored(url, "gone soon")
    kept = stored(url, "all 60")
    ss.versions.gc(url, 1, dry_run=False)
    assert not stored(url, "all 31")
    assert not stored(url, "gone soon")
    assert stored(url, "all 60") == kept
    assert texts(url) == expected
    assert ss.verify(url).problems == ()


def test_fields_that_are_replaced_meanwhile_are_not_lost(url: str) -> None:
    ss.delete(url, numbers=[3])
    others = iter(["first", "second"])

    def replace_more(_: object) -> None:
        for text in others:
            ss.replace_fields(url, {"txt": {"000050": text}})
            break

    assert ss.compact(url, threads=1, progress=replace_more).samples == 1
    assert texts(url)[50] == "second"
    assert len(numbers(url)) == N - 1
    assert ss.verify(url).problems == ()


def test_damaged_shards_are_not_copied(url: str) -> None:
    ss.delete(url, numbers=[3])
    file = Path(url) / "000000.tar"
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardError, match="not those of its sha256"):
        ss.compact(url)
    assert entry(url)["dataset_version"]["number"] == 2


def test_a_deletion_meanwhile_is_not_lost(url: str) -> None:
    ss.delete(url, numbers=[3])
    others = iter([[7, 50], [0]])

    def delete_more(_: object) -> None:
        for chosen in others:
            ss.delete(url, numbers=chosen, version=ss.ShardDataset(url).versions[0])
            break

    report = ss.compact(url, threads=1, progress=delete_more)
    assert report.samples == 4
    assert len(numbers(url)) == N - 4
    assert ss.verify(url).problems == ()


def test_another_compaction_meanwhile(url: str) -> None:
    ss.delete(url, numbers=[3, 90])
    is_first = True

    def compact_too(_: object) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            (Path(url) / "index.json").write_bytes(second)

    copy = Path(url).with_name("copy")
    import shutil  # noqa: PLC0415

    shutil.copytree(url, copy)
    ss.compact(copy)
    second = (copy / "index.json").read_bytes()
    shutil.copytree(copy, url, dirs_exist_ok=True, ignore=lambda *_: ["index.json"])
    assert ss.compact(url, threads=1, progress=compact_too).samples == 0
    assert len(numbers(url)) == N - 2


def test_two_compactions_at_once_write_the_shards_once(url: str) -> None:
    ss.delete(url, numbers=[3, 90])
    others: list[Future[Any]] = []

    def compact_too(_: object) -> None:
        if not others:
            others.append(pool.submit(ss.compact, url))
            time.sleep(0.2)  # so that it has usually read the version, and waits for the lock

    with ThreadPoolExecutor(1) as pool:
        first = ss.compact(url, threads=1, progress=compact_too)
        second = others[0].result()
    assert (first.samples, second.samples) == (2, 0)
    assert first.version == second.version
    assert ss.verify(url).problems == ()


def test_refusals(url: str) -> None:
    with pytest.raises(OptionError, match="cannot be cut into parts"):
        ss.compact(url, executor=ss.tasks.Parts(1, 2))
    with pytest.raises(OptionError, match="name the folder of one dataset"):
        ss.compact(f"{url}/000000.tar")


def test_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delete", url, "--numbers", "3,15-29"]) == 0
    assert main(["compact", url]) == 0
    out = capsys.readouterr().out
    assert "version 3: no shard of it has the 16 deleted samples" in out
    assert main(["compact", url]) == 0
    assert "no samples are deleted in version 3" in capsys.readouterr().out


def test_tars_of_earlier_versions_are_not_read_by_their_names(url: str) -> None:
    ss.delete(url, numbers=[3, 20])
    ss.compact(url)
    for pattern in ("000000.tar", "{000000..000006}.tar", "*.tar", "**/*.tar"):
        with pytest.raises(OptionError, match="version 3 of the dataset does not list this tar"):
            numbers(f"{url}/{pattern}")
    with pytest.raises(OptionError, match="does not list this tar"):
        ss.ShardDataset([f"{url}/000002.tar", f"{url}/000001.tar"], shuffle=True)
    assert numbers(f"{url}/000002.tar") == [*range(30, 45)]
    assert numbers(f"{url}/compact-000001/*.tar") == [n for n in range(30) if n not in (3, 20)]
