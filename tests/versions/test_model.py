"""Random sequences of changes against a model in Python: each version that is kept reads exactly its samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 40

CHANGES = st.one_of(
    st.tuples(st.just("delete"), st.sets(st.integers(0, N - 1), min_size=1, max_size=8)),
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("replace"), st.sets(st.integers(0, N - 1), min_size=1, max_size=30)),
    st.tuples(st.just("compact"), st.none()),
    st.tuples(st.just("tag"), st.integers(0, 9)),
    st.tuples(st.just("gc"), st.integers(1, 4)),
)


class Model:
    """The numbers (``cls``) of the samples of each version, and names; the texts of some samples of each."""

    def __init__(self) -> None:
        self.versions = {1: [*range(N)]}
        self.texts: dict[int, dict[int, str]] = {1: {}}
        self.tags: dict[str, int] = {}
        self.has_deleted = False
        self.next_key = N

    @property
    def current(self) -> list[int]:
        return self.versions[max(self.versions)]

    def publish(self, samples: list[int], texts: dict[int, str] | None = None) -> None:
        number = max(self.versions)
        self.versions[number + 1] = samples
        self.texts[number + 1] = self.texts[number] | (texts or {})


def apply(url: str, model: Model, change: str, value: Any) -> None:
    """Make a change of the dataset and of the model."""
    number = max(model.versions)
    if change == "delete":
        gone = sorted({one % len(model.current) for one in value})
        if len(gone) == len(model.current):
            return
        assert ss.delete(url, numbers=gone, version=number).version == number + 1
        model.publish(np.delete(model.current, gone).tolist())
        model.has_deleted = True
    elif change == "append":
        append(url, model, value)
    elif change == "replace":
        replace(url, model, value)
    elif change == "compact":
        ss.compact(url)
        if model.has_deleted:
            model.publish(model.current)
        model.has_deleted = False
    elif change == "tag":
        names = sorted(model.versions)
        tagged = names[value % len(names)]
        ss.versions.tag(url, f"t{value}", tagged)
        model.tags[f"t{value}"] = tagged
    else:
        report = ss.versions.gc(url, value, dry_run=False)
        latest = sorted(model.versions)[-value:]
        assert {*latest, *model.tags.values()} <= {*report.kept} <= {*model.versions}
        model.versions = {one: model.versions[one] for one in report.kept}


def append(url: str, model: Model, value: int) -> None:
    new = [*range(model.next_key, model.next_key + value)]
    fields = json.loads((Path(url) / "index.json").read_text())["fields"]
    texts = {one: f"new {one}" for one in new if "txt" in fields}
    with ss.ShardWriter(url, append=True, max_samples=4, columns="cls") as writer:
        for one in new:
            sample = {"__key__": f"{one:06d}", "cls": one, "npy": np.full((2, 3), one)}
            writer.write(sample | ({"txt": texts[one]} if texts else {}))
    model.next_key += value
    model.publish([*model.current, *new], texts)


def replace(url: str, model: Model, value: set[int]) -> None:
    number = max(model.versions)
    chosen = sorted({model.current[one % len(model.current)] for one in value})
    is_of_all = len(chosen) > 20
    texts = {one: f"{number} {one}" for one in (model.current if is_of_all else chosen)}
    by_key = {f"{one:06d}": text for one, text in texts.items()}
    ss.replace_fields(url, {"txt": [*texts.values()] if is_of_all else by_key}, max_bytes=9000)
    model.publish(model.current, texts)


def check(url: str, model: Model) -> None:
    records = ss.versions.log(url)
    assert [one.number for one in records] == sorted(model.versions, reverse=True)
    for record in records:
        expected = model.versions[record.number]
        assert record.samples == len(expected)
        dataset = ss.ShardDataset(url, version=record.number)
        samples = list(dataset)
        assert [int(sample["cls"]) for sample in samples] == expected
        texts = {int(s["cls"]): bytes(s["txt"]).decode() for s in samples if "txt" in s}
        all_texts = model.texts[record.number]
        assert texts == {one: all_texts[one] for one in expected if one in all_texts}
    for name, number in model.tags.items():
        assert len(ss.ShardDataset(url, version=name)) == len(model.versions[number])
    expected = model.current
    by_number = ss.ShardDataset(url).by_number()
    assert [int(by_number[i]["cls"]) for i in range(len(by_number))] == expected
    middle = expected[len(expected) // 2]
    chosen = ss.ShardDataset(url, where=f"cls >= {middle}")
    assert [int(sample["cls"]) for sample in chosen] == [one for one in expected if one >= middle]
    first, last = min(model.versions), max(model.versions)
    found = ss.versions.diff(url, first, last)
    assert found.deleted == len({*model.versions[first]} - {*model.versions[last]})
    assert found.added == len({*model.versions[last]} - {*model.versions[first]})
    assert ss.verify(url).problems == ()


@pytest.mark.slow
@given(changes=st.lists(CHANGES, min_size=1, max_size=7))
@settings(max_examples=12, deadline=None)
def test_each_version_reads_its_samples(
    changes: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("model")
    url = numbered(folder / "data", N, 6, columns=["cls"])
    model = Model()
    for change, value in changes:
        apply(url, model, change, value)
    check(url, model)
    shutil.rmtree(folder)
