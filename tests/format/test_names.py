from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from shardstream.errors import SampleError
from shardstream.format import is_meta_name, member_name, split_member_name
from tests.strategies import fields, keys, member_names


@given(key=keys(), field=fields())
def test_written_name_reads_back_as_its_key_and_field(key: str, field: str) -> None:
    assert split_member_name(member_name(key, field)) == (key, field)


@given(name=member_names())
def test_names_split_as_in_webdataset_except_dot_files(name: str) -> None:
    key, field = base_plus_ext(name)
    expected = None if key is None or name.rsplit("/", 1)[-1].startswith(".") else (key, field)
    assert split_member_name(name) == (expected and (expected[0], expected[1].lower()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("0001.Seg.PNG", ("0001", "seg.png")),
        ("v1.0/0001.jpg", ("v1.0/0001", "jpg")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("/0001.jpg", ("/0001", "jpg")),
        ("0001.", ("0001", "")),
        ("0001..jpg", ("0001", ".jpg")),
        ("README", None),
        ("v1.0/README", None),
        (".hidden", None),
        ("a/._0001.jpg", None),
        ("a/..jpg", None),
        ("a/", None),
        ("", None),
    ],
)
def test_split_member_name(name: str, expected: tuple[str, str] | None) -> None:
    assert split_member_name(name) == expected


@pytest.mark.parametrize(
    ("key", "field", "message"),
    [
        ("a.b", "jpg", "use 'a_b'"),
        ("v1.0/a.b", "jpg", "use 'v1.0/a_b'"),
        ("a/", "jpg", "needs a name after its last slash"),
        ("", "jpg", "needs a name"),
        ("a", "JPG", "write 'jpg'"),
        ("a", "", "a field"),
        ("a", "x/y", "a field must have no slash"),
        ("a", "x\0", "NUL"),
        ("a\0b", "x", "NUL"),
        ("../a", "jpg", "'..' parts"),
        ("x/../a", "jpg", "'..' parts"),
        ("/etc/a", "jpg", "relative path"),
        ("x//a", "jpg", "empty"),
        ("a", "__key__", "choose another field"),
        ("a", "__url__", "choose another field"),
        ("__a__/x", "jpg", "choose another key"),
        ("\ud800", "jpg", "UTF-8; rename it"),
        ("\udcc3\udca9", "jpg", "UTF-8; rename it"),  # two halves of one letter
    ],
)
def test_name_that_does_not_round_trip_is_refused(key: str, field: str, message: str) -> None:
    with pytest.raises(SampleError, match=re.escape(message)) as raised:
        member_name(key, field)
    assert raised.value.key == key


@pytest.mark.parametrize("key", ["v1.0/0001", "été", "a b", "__a", "x/__y__/z", "\udcff", "./a"])
def test_unusual_keys_are_accepted(key: str) -> None:
    assert split_member_name(member_name(key, "jpg")) == (key, "jpg")


@given(name=st.text("_ax/.", max_size=10))
def test_meta_names_match_those_skipped_by_webdataset(name: str) -> None:
    skipped = re.match(r"__[^/]*__($|/)", name) is not None  # tar_file_iterator, skip_meta
    assert is_meta_name(name) == skipped
