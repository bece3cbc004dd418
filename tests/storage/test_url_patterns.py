"""Test that brace patterns expand as in bash, or are refused at once."""

from __future__ import annotations

from pathlib import Path

import braceexpand
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError
from shardstream.storage import Storage, expand_braces
from shardstream.testing import make_shards

numbers = st.integers(-3, 12).map(str) | st.sampled_from(["00", "007", "-02", "b", "Y", "f"])
ranges = st.tuples(numbers, numbers, st.sampled_from(["", "..2", "..0", "..-3"]))
leaves = ranges.map(lambda r: f"{{{r[0]}..{r[1]}{r[2]}}}") | st.sampled_from(
    ["a", ".tar", "\\{", "\\,", "", ","]
)
texts = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, max_size=3).map(lambda parts: f"{{{','.join(parts)}}}")
    ),
    max_leaves=6,
)


@given(texts)
def test_counted_urls_equal_expanded_urls(pattern: str) -> None:
    wanted = list(braceexpand.braceexpand(pattern)) if "{" in pattern else [pattern]
    assert expand_braces(pattern) == wanted
    assert len(expand_braces(pattern, limit=len(wanted))) == len(wanted)
    if len(wanted) > 1:
        with pytest.raises(OptionError, match=f"stands for {len(wanted):,} URLs"):
            expand_braces(pattern, limit=len(wanted) - 1)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{0..999999999999}.tar", "stands for 1,000,000,000,000 URLs, the limit is 1,000,000"),
        ("{0..9}" * 12 + ".tar", "stands for 1,000,000,000,000 URLs"),
        ("{a..z}" * 12 + ".tar", "the limit"),
        ("{x,{" + "{0..9}" * 12 + ",y}}.tar", r"stands for 1,000,000,000,002 URLs"),
        ("{0.." + "9" * 30 + "}.tar", "stands for over 1,000,000,000,000,000,000 URLs"),
        ("{0..9999999}::b.tar", "stands for 10,000,000 URLs"),
        ("{" * 5000 + "}" * 5000, "over 20 deep"),
        ("{a," * 5000 + "b" + "}" * 5000, "over 20 deep"),
        ("{" + "," * 20_000_000 + "}", "20000002 characters, the limit is 65536"),
        ("a-{00..", r"braces of 'a-\{00..' are not closed"),
    ],
    ids=str.__len__,
)
def test_huge_patterns_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        ss.ShardDataset(pattern)
    assert len(str(raised.value)) < 300


def test_limit_applies_to_all_patterns_together() -> None:
    with pytest.raises(OptionError, match="stands for 6 URLs, the limit is 10 in all"):
        expand_braces(*["{0..5}.tar"] * 2, limit=10)
    with pytest.raises(OptionError, match="stands for 600,000 URLs, the limit is 1,000,000 in all"):
        ss.ShardDataset("::".join(["{0..599999}.tar"] * 2))


def test_repeated_double_stars_are_simplified(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefghijkl")
    make_shards(deep, samples=2)
    assert len(Storage().glob(f"{tmp_path}/{'**/' * 12}*.tar")) == 1
    assert len(Storage().glob(f"{tmp_path}/****/*.tar")) == 1
    with pytest.raises(OptionError, match=r"has 12 times '\*\*', the limit is 4"):
        ss.ShardDataset(f"{tmp_path}/{'**/x*/' * 12}*.tar")


@pytest.mark.parametrize(
    "url", ["s3://b//train", "s3://b/train//", "s3://b/train//*.tar", "gs://b//"]
)
def test_folders_of_buckets_with_an_empty_part_are_refused(url: str) -> None:
    readers = ss.ShardDataset, ss.ObjectDataset.from_prefix, ss.compact
    for use in (*readers, lambda url: ss.pack([{"txt": "a"}], url), ss.ShardWriter):
        with pytest.raises(OptionError, match="the URL has an empty part"):
            use(url)
