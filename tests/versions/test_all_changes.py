"""Appends with keys that come again, between other changes, leave the samples of a list with the same changes, also where files list the shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import SourceError
from shardstream.format import decode_manifest, is_records_name
from shardstream.testing import make_shards
from tests.limits import set_limits

pytest.importorskip("pyarrow")
N = 30
CHANGES = ("pack", "writer", "delete", "again", "compact", "gc", "replace")


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{i:06d}", "cls": i, "txt": f"text {i}"} for i in range(first, last)]


class Model:
    """A dataset, and the list of the samples that it should have."""

    def __init__(self, url: str) -> None:
        self.url = make_shards(url, samples=rows(0, N), per_shard=7)
        self.samples, self.end = [(i, f"text {i}") for i in range(N)], N

    def _appended(self, count: int) -> list[dict[str, Any]]:
        first, self.end = self.end, self.end + count
        self.samples += [(i, f"text {i}") for i in range(first, self.end)]
        return rows(first, self.end)

    def pack(self, count: int, _: int) -> None:
        ss.pack(self._appended(count), self.url, append=True, max_samples=4)

    def writer(self, count: int, _: int) -> None:
        with ss.ShardWriter(self.url, append=True, max_samples=4) as writer:
            for number, row in enumerate(self._appended(count)):
                writer.write(row)
                if number % 3 == 2:
                    writer.publish()

    def delete(self, count: int, _: int) -> None:
        if len(self.samples) > count:
            numbers = np.linspace(0, len(self.samples) - 1, count, dtype=int).tolist()
            ss.delete(
                self.url, numbers=sorted({*numbers}), version=ss.ShardDataset(self.url).versions[0]
            )
            self.samples = [one for at, one in enumerate(self.samples) if at not in numbers]

    def again(self, count: int, _: int) -> None:
        """Append a sample whose key may be there, or may have been deleted."""
        number = count * 7 % self.end
        new = rows(number, number + 1)
        if number in [one for one, _ in self.samples]:
            with pytest.raises(SourceError, match=f"'{number:06d}' .* already"):
                ss.pack(new, self.url, append=True)
        else:
            ss.pack(new, self.url, append=True)
            self.samples.append((number, f"text {number}"))

    def compact(self, _: int, __: int) -> None:
        ss.compact(self.url)

    def gc(self, count: int, _: int) -> None:
        ss.versions.gc(self.url, keep=count, dry_run=False)

    def replace(self, count: int, step: int) -> None:
        chosen = {i for i, _ in self.samples[::count]}
        ss.replace_fields(self.url, {"txt": {f"{i:06d}": f"new {step}" for i in chosen}})
        self.samples = [(i, f"new {step}" if i in chosen else text) for i, text in self.samples]


@pytest.mark.parametrize("are_many", [False, True])
@given(changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(1, 9)), max_size=7))
@settings(max_examples=15, deadline=None)
def test_the_samples_are_those_of_a_list(
    are_many: bool, changes: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if are_many:  # for a manifest with files of records
            set_limits(patch, decode_manifest, MAX_LISTED_SHARDS=4)
            set_limits(patch, is_records_name, CHUNK_SHARDS=3)
        model = Model(str(tmp_path_factory.mktemp("data") / "one"))
        for step, (what, count) in enumerate(changes):
            getattr(model, what)(count, step)
            dataset = ss.ShardDataset(model.url).decode()
            assert [(one["cls"], one["txt"]) for one in dataset] == model.samples
