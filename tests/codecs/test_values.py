"""Test fields of plain values and arrays: what is written is read, in loaders too, and equal to the formats' own libraries."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset

import shardstream as ss
import shardstream.webdataset as wds
from shardstream.codecs import decode_buffer
from shardstream.errors import OptionError, SampleError
from shardstream.packing import encode_field
from shardstream.testing import make_shards

VALUE = {"a": [1, -2, 0.5, None, True, "ü"], "b": {"c": b"\0\1", "d": []}}
VALUES: list[tuple[str, Any]] = [
    ("msgpack", VALUE),
    ("x.mp", [1, 2]),
    ("msgpack", {1: "a", -2: [{0.5: None}]}),
    ("cbor", {1: "a", -2: [{0.5: None}]}),
    ("msg", "text"),
    ("cbor", VALUE),
    ("jsonl", [{"a": 1}, [2], "three", None]),
    ("jsonl", []),
]


@pytest.mark.parametrize(("field", "value"), VALUES)
def test_values_round_trip(field: str, value: Any) -> None:
    data = encode_field(field, value)
    assert encode_field(field, value) == data
    assert ss.decode_sample({field: data}) == {field: value}


def test_other_libraries_write_and_read_the_same_bytes() -> None:
    assert msgpack.unpackb(encode_field("msgpack", VALUE)) == VALUE
    assert cbor2.loads(encode_field("cbor", VALUE)) == VALUE
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert ss.decode_sample({"cbor": cbor2.dumps([when, 2**80])}) == {"cbor": [when, 2**80]}
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    data = encode_field("safetensors", tensors)
    assert data == safetensors.torch.save(tensors)
    found = ss.decode_sample({"emb.safetensors": data})["emb.safetensors"]
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    arrays = encode_field("safetensors", {"a": np.arange(4, dtype=np.int16)})
    assert safetensors.torch.load(arrays)["a"].tolist() == [0, 1, 2, 3]
    transposed = torch.arange(6.0).reshape(2, 3).T
    again = safetensors.torch.load(encode_field("safetensors", {"t": transposed}))["t"]
    assert torch.equal(again, transposed)


def test_ten_is_that_of_webdataset() -> None:
    arrays: list[Any] = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7], np.int64)]
    data = encode_field("ten", arrays)
    theirs = webdataset.tenbin.decode_buffer(data)
    assert all(np.array_equal(a, b) for a, b in zip(theirs, arrays, strict=True))
    found = ss.decode_sample({"ten": bytes(webdataset.tenbin.encode_buffer(arrays))})["ten"]
    assert all(
        np.array_equal(a, b) and a.flags.writeable for a, b in zip(found, arrays, strict=True)
    )
    assert np.array_equal(decode_buffer(encode_field("tb", arrays[0]))[0], arrays[0])
    assert wds.tenbin.decode_buffer is decode_buffer  # one implementation


def test_csv_is_rows_of_text_without_losing_the_first() -> None:
    data = b'\xef\xbb\xbfname,box\r\n"a, ""b""","1\n2"\r\n\r\nc,\r\n'
    assert ss.decode_sample({"csv": data})["csv"] == [
        *(["name", "box"], ['a, "b"', "1\n2"], [], ["c", ""]),
    ]
    assert ss.decode_sample({"tsv": b"a\tb,c\n1\t2"})["tsv"] == [["a", "b,c"], ["1", "2"]]
    quotes = b'1\t"a ""b"""\n2\t"open\n3\t"Hi," he said\n4\t"'
    assert ss.decode_sample({"tsv": quotes})["tsv"] == [
        ["1", 'a "b"'], ["2", '"open'], ["3", '"Hi," he said'], ["4", '"'],
    ]  # fmt: skip


def test_jsonl_takes_text_and_leaves_out_blank_lines() -> None:
    assert encode_field("jsonl", '{"a":1}\n') == b'{"a":1}\n'
    assert ss.decode_sample({"jsonl": b'{"a":1}\n\n[2]\r\n  \n3'})["jsonl"] == [{"a": 1}, [2], 3]
    with pytest.raises(ss.errors.DecodeError, match="field 'jsonl'"):
        ss.decode_sample({"jsonl": b"1\n{"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("msgpack", {1, 2}, "TypeError"),
        ("msgpack", 1 << 80, "OverflowError"),
        ("cbor", object(), "cannot be encoded"),
        ("msgpack", [{7: "x" * 70_000}], "the key 7 is no text"),
        ("msgpack", {"a": {(1, 2): "x"}}, "unhashable type: 'list'"),
        ("cbor", {"a": {7: "x" * 70_000}}, "the key 7 is no text"),
        ("msgpack", "x" * (33 << 20), "the limit is 33554432"),
        ("jsonl", {"a": 1}, "a list of JSON values"),
        ("ten", np.zeros(2, bool), "cannot be stored; use npy"),
        ("ten", "text", "this field takes an array"),
        ("safetensors", [1], "a dict of arrays"),
        ("safetensors", {"a": "b"}, "this field takes an array"),
    ],
)
def test_values_that_a_format_lacks_are_errors_that_name_the_field(
    field: str, value: Any, message: str
) -> None:
    with pytest.raises(SampleError, match=f"{message}.*field '{field}'"):
        encode_field(field, value)


@pytest.mark.parametrize(
    ("field", "package", "kind"),
    [
        ("msgpack", "msgpack", "MessagePack"),
        ("cbor", "cbor2", "CBOR"),
        ("safetensors", "safetensors.torch", "safetensors"),
    ],
)
def test_missing_package_is_one_error_that_names_the_extra(
    field: str, package: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match=rf"decoding {kind} needs .*\.\[formats\]"):
        ss.decode_sample({field: b"x"})
    with pytest.raises(OptionError, match=rf"encoding {kind} needs .*\.\[formats\]"):
        encode_field(field, {"a": torch.zeros(1)})


def test_written_fields_are_batched_by_a_loader(tmp_path: Path) -> None:
    samples = [
        {
            "cls": n,
            "emb.safetensors": {"x": torch.full((3,), float(n))},
            "meta.msgpack": {"n": n},
            "boxes.jsonl": [{"n": n}] * n,
        }
        for n in range(4)
    ]
    folder = make_shards(tmp_path, samples=samples)
    (batch,) = ss.ShardLoader(ss.ShardDataset(folder).decode(), batch_size=4, num_workers=1)
    assert batch["meta.msgpack"] == [{"n": n} for n in range(4)]
    assert [len(boxes) for boxes in batch["boxes.jsonl"]] == [0, 1, 2, 3]
    assert torch.equal(batch["emb.safetensors"][2]["x"], torch.full((3,), 2.0))
