"""Each way of reading leaves deleted samples out, before and after a compaction."""

from __future__ import annotations

import io
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
