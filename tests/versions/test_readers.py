"""Each way of reading leaves deleted samples out, before and after a compaction."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream import webdataset as wds
from shardstream.viewer import Choice, Session, ViewOptions
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 100
GONE = [0, 20, 21, 99]
LEFT = [number for number in range(N) if number not in GONE]


@pytest.fixture(params=["deleted", "compacted"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    url = numbered(tmp_path / "data", N, 15, columns=["cls"])
    ss.delete(url, numbers=GONE)
    if request.param == "compacted":
        ss.compact(url)
    return url


def test_the_exact_plan_of_webdataset(url: str) -> None:
    assert (
        sorted(int(s["cls"]) for s in wds.WebDataset(url, exact=True, shardshuffle=False)) == LEFT
    )


def keys_of(page: dict[str, Any]) -> list[int]:
    return [int(one["key"]) for one in page["samples"]]


def fields_of(viewed: Session, number: int) -> list[str]:
    return [one["name"] for one in viewed.details(number)["fields"]]


def session(url: str, **options: Any) -> Session:
    return Session(ViewOptions(urls=(url,), storage_options={}, **options))


def test_the_viewer(url: str, tmp_path: Path) -> None:
    viewed = session(url)
    page = viewed.page(0, 200)
    assert keys_of(page) == LEFT
    assert [one["number"] for one in page["samples"]] == [*range(len(LEFT))]
    assert viewed.dataset()["samples"] == len(LEFT)
    assert keys_of(viewed.page(0, 200, Choice(where="cls < 23"))) == [*range(1, 20), 22]
    assert keys_of(viewed.page(0, 200, Choice(key="00002"))) == [2, *range(22, 30)]
    details = viewed.details(19)
    assert details["key"] == "000022"
    found, name, _ = viewed.part(19, 0)
    assert viewed.samples.read_field(found, name) == b"22"
    dataset = ss.ShardDataset(url)
    numbers = dataset.pipeline.source.samples  # type: ignore[attr-defined]
    assert viewed.samples.numbers_of(numbers, _all(len(LEFT))).tolist() == [*range(len(LEFT))]
    old = ss.ShardDataset(url, version=1).pipeline.source.samples  # type: ignore[attr-defined]
    here = viewed.samples.numbers_of(old, _all(N)).tolist()
    if "compact-" not in details["shard"]:
        assert here == [LEFT.index(n) if n in LEFT else -1 for n in range(N)]
    before = session(url, version=1)
    assert keys_of(before.page(0, 200)) == [*range(N)]
    assert "--version 1" in before.details(3)["cat"]


def test_the_viewer_searches_headers_without_columns(tmp_path: Path) -> None:
    url = numbered(tmp_path / "plain", N, 15)
    ss.delete(url, numbers=GONE)
    page = session(url).page(0, 200, Choice(key="00002"))
    assert keys_of(page) == [2, *range(22, 30)]


@pytest.mark.parametrize("size", [10, 6000])
def test_the_viewer_shows_replaced_fields(url: str, size: int) -> None:
    new = {f"{n:06d}": f"{n} is new".ljust(size) for n in (LEFT[0], LEFT[5], LEFT[-1])}
    ss.replace_fields(url, {"txt": new})
    ss.replace_fields(url, {"npy": [np.full(size // 4, number) for number in LEFT]})
    viewed = session(url)
    assert viewed.dataset()["hint"] == ""
    found: dict[str, str] = {}
    for number in range(len(LEFT)):
        key, names = viewed.details(number)["key"], fields_of(viewed, number)
        values = [viewed.part(number, place) for place in range(len(names))]
        read = {name: viewed.samples.read_field(one, name) for one, name, _ in values}
        assert np.load(io.BytesIO(read["npy"])).tolist() == [LEFT[number]] * (size // 4)
        found |= {key: read["txt"].decode()} if "txt" in read else {}
    assert found == new
    assert fields_of(viewed, 0) == ["cls", "npy", "txt"]
    assert fields_of(session(url, version=1), 1) == ["cls", "npy"]


def _all(count: int) -> Any:
    import numpy as np  # noqa: PLC0415

    return np.arange(count)


def test_a_join_and_a_table(url: str, tmp_path: Path) -> None:
    captions = numbered(tmp_path / "other", N, 40, columns=["cls"])
    joined = ss.join(url, {captions: {"other": "cls"}})
    assert [(int(s["cls"]), int(s["other"])) for s in joined] == [(n, n) for n in LEFT]


def test_tars_that_are_read_one_by_one_warn_of_deleted_samples(url: str) -> None:
    tars = f"{url}/{{000000..000006}}.tar"
    with pytest.warns(UserWarning, match="exact=True") as caught:
        read = [s["__key__"] for s in wds.WebDataset(tars, shardshuffle=False)]
    assert len(read) == N
    [warning] = [str(one.message) for one in caught]
    is_compacted = (Path(url) / "compact-000001").exists()
    reason = "not one of its current version" if is_compacted else "4 samples deleted"
    assert reason in warning


def test_tars_of_the_current_version_and_of_other_datasets_do_not_warn(
    url: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    ss.compact(url)
    listed = [one["url"] for one in json.loads((Path(url) / "index.json").read_text())["shardlist"]]
    tars = [f"{url}/{name}" for name in listed]
    other = numbered(tmp_path / "other", 10, 5)
    tars += [str(path) for path in sorted(Path(other).glob("*.tar"))]
    assert len(list(wds.WebDataset(tars, shardshuffle=False))) == len(LEFT) + 10
    assert not recwarn.list
    changed = numbered(tmp_path / "changed", 10, 5)
    ss.replace_fields(changed, {"txt": {"000001": "new"}})
    tar = wds.SimpleShardList(f"{changed}/000000.tar")
    read = wds.DataPipeline(tar, wds.tarfile_to_samples())
    with pytest.warns(UserWarning, match="fields replaced"):
        list(read)


def test_numbers_are_those_of_samples_not_of_fields_that_are_joined_to_them(tmp_path: Path) -> None:
    url, other = (numbered(tmp_path / name, 10, 4, columns=["cls"]) for name in ("one", "other"))
    ss.delete(url, numbers=[0, 1])
    ss.replace_fields(url, {"txt": {"000004": "new"}})
    ss.delete(url, keys=["000004", "000007"])
    assert ss.versions.diff(url, 3, 4, keys=True).deleted_keys == ["000004", "000007"]
    left = [2, 3, 5, 6, 8, 9]
    assert keys_of(session(url).page(0, 10)) == left
    assert [int(sample["cls"]) for sample in ss.ShardDataset(url)] == left
    joined = ss.join(ss.ShardDataset(url), {other: {"new": "cls"}}, by="key").samples
    assert session(url).samples.numbers_of(joined, _all(6)).tolist() == [*range(6)]
    assert session(other).samples.numbers_of(joined, _all(6)).tolist() == [-1] * 6
