from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import ManifestError
from shardstream.format import (
    KIND,
    Manifest,
    ShardInfo,
    decode_manifest,
    encode_manifest,
    fingerprint,
    is_name,
)

URL = "s3://b/train/index.json"

texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.none() | st.integers(0, 1 << 50)
shard_infos = st.builds(
    ShardInfo,
    url=texts.filter(is_name),
    nsamples=counts,
    filesize=counts,
    sha256=st.none() | texts.filter(is_name),
)
manifests = st.builds(
    Manifest,
    shards=st.lists(
        shard_infos, max_size=5, unique_by=lambda shard: shard.url.removeprefix("./")
    ).map(tuple),
    name=texts,
    fields=st.dictionaries(texts, st.integers(0, 1 << 50), max_size=3),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
TINY = Manifest(
    shards=(
        ShardInfo(url="train-000000.tar", nsamples=2, filesize=4096, sha256="ab" * 32),
        ShardInfo(url="train-000001.tar", nsamples=0, filesize=1024),
        ShardInfo(url="été.tar"),
    ),
    name="tiny",
    fields={"jpg": 2, "cls": 1},
)


def decode_listed(data: bytes) -> Manifest:
    manifest = decode_manifest(data, url=URL)
    assert isinstance(manifest, Manifest)
    return manifest


@given(manifest=manifests)
def test_manifest_reads_back_as_written(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    found = decode_listed(data)
    assert found == manifest
    assert encode_manifest(found) == data


def test_bytes_of_a_manifest_are_pinned() -> None:
    data = encode_manifest(TINY)
    assert (
        hashlib.sha256(data).hexdigest()
        == "2a9c09aae93b117c31eb24a05efca995622b1446f181620c23c5e051685cd9b0"
    )
    assert list(json.loads(data)["fields"]) == ["cls", "jpg"]


def test_wids_finds_its_own_keys() -> None:
    document = json.loads(encode_manifest(TINY))
    assert (document["__kind__"], document["wids_version"]) == ("wids-shard-index-v1", 1)
    assert document["shardlist"][0]["url"] == "train-000000.tar"
    assert document["shardlist"][0]["nsamples"] == 2


def test_manifest_of_wids_is_read() -> None:
    document = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": "imagenet",
        "shardlist": [{"url": "s3://b/a.tar", "nsamples": 7, "md5sum": "x", "filesize": 1024}],
    }
    manifest = decode_listed(json.dumps(document).encode())
    assert manifest.shards == (ShardInfo(url="s3://b/a.tar", nsamples=7, filesize=1024),)
    assert (manifest.nsamples, manifest.total_bytes) == (7, 1024)


def test_totals_are_omitted_when_counts_are_unknown() -> None:
    assert (TINY.nsamples, TINY.total_bytes) == (2, 5120)


def document(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode_manifest(TINY)) | changes).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "__kind__ is 'list'"),
        (b"null", "__kind__ is 'NoneType'"),
        (b"{}", "__kind__ is None.*name the tars themselves"),
        (document(__kind__="other"), f"__kind__ is 'other', not '{KIND}'"),
        (document(wids_version=2), "wids_version is 2, this shardstream reads 1; upgrade"),
        (document(version=2), "version is 2, this shardstream reads 1; upgrade"),
        (document(version=None), "version is None"),
        (document(shardlist=None), "'shardlist' must be a list"),
        (document(shardlist={}), "'shardlist' must be a list"),
        (document(fields=[]), "'fields' must be a mapping"),
        (document(shardlist=["a.tar"]), "a shard without a 'url': 'a.tar'"),
        (document(shardlist=[{}]), "a shard without a 'url'"),
        (document(shardlist=[{"url": 1}]), "a shard without a 'url'"),
        (document(shardlist=[{"url": "a.tar", "nsamples": -1}]), "nsamples of a.tar is -1"),
        (document(shardlist=[{"url": "a.tar", "nsamples": True}]), "nsamples of a.tar is True"),
        (document(shardlist=[{"url": "a.tar", "nsamples": 1.5}]), "nsamples of a.tar is 1.5"),
        (document(shardlist=[{"url": "a.tar", "nsamples": 1 << 63}]), "nsamples of a.tar is 9"),
        (document(shardlist=[{"url": "a.tar", "filesize": "9"}]), "filesize of a.tar is '9'"),
        (document(shardlist=[{"url": "a.tar", "sha256": 1}]), "sha256 of a.tar is 1"),
    ],
    ids=range(23),
)
def test_invalid_values_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=f"{message}.*in {URL}"):
        decode_manifest(data, url=URL)


@given(data=st.binary(max_size=100))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data, url=URL)


@given(
    changes=st.dictionaries(
        st.sampled_from(["wids_version", "version", "name", "shardlist", "fields"]), json_values
    )
    | st.fixed_dictionaries(
        {
            "shardlist": st.lists(
                st.dictionaries(
                    st.sampled_from(["url", "nsamples", "filesize", "sha256"]), json_values
                )
                | json_values,
                max_size=3,
            )
        }
    )
)
def test_any_json_is_a_manifest_or_refused(changes: dict[str, Any]) -> None:
    try:
        manifest = decode_listed(document(**changes))
    except ManifestError:
        return
    assert len(fingerprint(manifest.shards)) == 16
    assert manifest.nsamples >= 0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"url": "s3://copy/of/train-000000.tar"}, True),
        ({"sha256": "cd" * 32}, True),
        ({"url": "train-000009.tar"}, False),
        ({"nsamples": 3}, False),
        ({"nsamples": None}, False),
        ({"filesize": 4097}, False),
    ],
    ids=str,
)
def test_fingerprint_changes_with_values_that_decide_the_order(
    change: dict[str, Any], *, same: bool
) -> None:
    changed = (replace(TINY.shards[0], **change), *TINY.shards[1:])
    assert (fingerprint(changed) == fingerprint(TINY.shards)) is same


def test_fingerprint_depends_on_order_and_number_of_shards() -> None:
    prints = {fingerprint(shards) for shards in (TINY.shards, TINY.shards[::-1], TINY.shards[:2])}
    assert len(prints) == 3
    assert fingerprint(TINY.shards) == "20d6b9f7a0ceecc6"
