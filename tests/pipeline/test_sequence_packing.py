from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import OptionError, SampleError
from shardstream.pipeline import Context, Packing, PackSequences, Run, SkipTracker
from shardstream.testing import ListRun, assert_resumes_exactly

LENGTHS = [3, 9, 1, 0, 4, 4, 8, 2, 7, 10, 5]


def sequences(lengths: list[int]) -> list[dict[str, Any]]:
    """Return tokens that encode sequence and position: 100 * sequence + position + 1."""
    return [
        {"__key__": str(n), "ids": np.arange(size) + 100 * n + 1} for n, size in enumerate(lengths)
    ]


def packed(lengths: list[int], **options: Any) -> Run:
    return PackSequences(field="ids", **options).open(ListRun(sequences(lengths)), Context())


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("open_rows", [1, 3])
def test_sequence_packing_resumes_exactly(packing: Packing, open_rows: int) -> None:
    assert_resumes_exactly(lambda: packed(LENGTHS, length=10, packing=packing, open_rows=open_rows))


@settings(deadline=None, max_examples=150)
@given(lengths=st.lists(st.integers(0, 12), max_size=30), length=st.integers(12, 20))
def test_every_token_is_returned_once_with_its_position(lengths: list[int], length: int) -> None:
    expected = sorted(token for sample in sequences(lengths) for token in sample["ids"].tolist())
    for packing in ("concat", "first_fit"):
        rows = list(packed(lengths, length=length, packing=packing, open_rows=4, pad=-1))
        tokens = np.concatenate([row["ids"] for row in rows]) if rows else np.empty(0, int)
        assert sorted(tokens[tokens >= 0].tolist()) == expected
        for row in rows:
            assert row["ids"].shape == row["segments"].shape == row["positions"].shape == (length,)
            real = row["segments"] > 0
            for segment in range(1, row["segments"].max() + 1):
                mine = np.flatnonzero(row["segments"] == segment)
                assert (row["positions"][mine] == mine - mine[0]).all()
                assert (np.diff(row["ids"][mine]) == 1).all()
            assert (row["ids"][~real] == -1).all()
            for segment in range(1, row["segments"].max() + 1):
                assert len(set((row["ids"][row["segments"] == segment] // 100).tolist())) == 1


def test_concat_cuts_the_token_stream() -> None:
    rows = list(packed([3, 4, 2], length=5, packing="concat"))
    assert [row["ids"].tolist() for row in rows] == [[1, 2, 3, 101, 102], [103, 104, 201, 202, 0]]
    assert rows[1]["segments"].tolist() == [1, 1, 2, 2, 0]
    assert rows[1]["positions"].tolist() == [0, 1, 0, 1, 0]
    assert len(list(packed([3, 4, 2], length=5, packing="concat", drop_last=True))) == 1


def test_first_fit_keeps_sequences_whole() -> None:
    rows = list(packed([6, 5, 4, 3], length=10, packing="first_fit"))
    assert [sorted(set((row["ids"][row["segments"] > 0] // 100).tolist())) for row in rows] == [
        [0, 2],
        [1, 3],
    ]


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        ({"__key__": "k", "ids": np.arange(11)}, "11 tokens does not fit a row of 10.*'k'"),
        ({"__key__": "k", "ids": np.zeros((2, 2), int)}, "whole numbers of shape"),
        ({"__key__": "k", "ids": b"123"}, "decode them first"),
        ({"__key__": "k", "txt": "x"}, "no field 'ids'; the sample has: txt"),
    ],
)
def test_unpackable_sequences_are_raised_or_skipped(sample: dict[str, Any], match: str) -> None:
    stage = PackSequences(field="ids", length=10, packing="first_fit")
    with pytest.raises(SampleError, match=match):
        list(stage.open(ListRun([sample]), Context()))
    skips = SkipTracker("skip")
    good = sequences([3])
    assert len(list(stage.open(ListRun([sample, *good]), Context(skips=skips)))) == 1
    assert skips.counts.total() == 1


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("item", [None, {}, (), 0], ids=repr)
def test_item_other_than_a_sample_does_not_end_the_epoch(packing: Packing, item: Any) -> None:
    stage = PackSequences(field="ids", length=4, packing=packing)
    items = [*sequences([4, 4]), item, *sequences([4, 4, 4])]
    with pytest.raises(SampleError, match="pack_sequences"):
        list(stage.open(ListRun(items), Context()))
    skips = SkipTracker("skip")
    assert len(list(stage.open(ListRun(items), Context(skips=skips)))) == 5
    assert skips.counts == {"SampleError": 1}


@pytest.mark.parametrize(
    "options", [{"length": 0}, {"length": 5, "packing": "best"}, {"length": 5, "open_rows": 0}]
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        PackSequences(field="ids", **options)
