"""Test hostile fields: each is one bad sample, in bounded memory and time, and none runs code."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import shardstream as ss
from shardstream.codecs import ImageDecoder, decode_gzip, encode_buffer
from shardstream.format import IMAGE_FORMATS
from shardstream.loader import load_safetensors, load_tensors
from shardstream.pipeline import BASIC, Context, Decode
from shardstream.testing import make_shards
from tests.attack import survived
from tests.format.test_hostile import zeros_packed
from tests.limits import set_limits
from tests.small_datasets import picture

MiB = 1 << 20
GiB = 1 << 30
TABLE: dict[str, Callable[[bytes], Any]] = {
    **BASIC,
    "pt": load_tensors,
    "pth": load_tensors,
    "safetensors": load_safetensors,
    **dict.fromkeys(IMAGE_FORMATS, ImageDecoder(spec="rgb8")),
}


def decode(field: str, data: bytes) -> Any:
    sample = {"__key__": "0042", "__url__": "s3://b/train-7.tar", field: data}
    decoded = Decode(table=TABLE).bind(Context())(sample, 0)
    assert isinstance(decoded, dict)
    return decoded[field]


def attacked(field: str, data: bytes, *, memory_bytes: int = 512 * MiB) -> str:
    return survived(lambda: decode(field, data), memory_bytes=memory_bytes)


def saved(save: Callable[[io.BytesIO], Any]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode().ljust(64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def zipped(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return stream.getvalue()


def zip_of_zeros(size: int, *, declared_size: int, kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip whose only entry unpacks to more than its declared size."""
    body, name = zeros_packed(size, wbits=-15), b"x.npy"
    local = struct.pack(
        "<IHHHHHIIIHH", 0x04034B50, 20, 0, kind, 0, 0, 0, len(body), declared_size, len(name), 0
    )
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, kind, 0, 0, 0, len(body), declared_size,
                          len(name), 0, 0, 0, 0, 0, 0) + name  # fmt: skip
    start = len(local) + len(name) + len(body)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), start, 0)
    return local + name + body + central + end


def zip_of_entries(count: int) -> bytes:
    """Return a zip that repeats the same empty entry, 47 bytes each."""
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    central = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0,
                          1, 0, 0, 0, 0, 0, 0) + b"x"  # fmt: skip
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0, 0, len(central) * count, len(local), 0)
    return local + central * count + end


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


class Call:
    """A pickle that calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def tensor_file(change: Callable[[bytes], bytes]) -> bytes:
    """Return a file of ``torch.save`` with another pickle inside."""
    whole = saved(lambda stream: torch.save(torch.arange(4), stream))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["archive/data.pkl"] = change(entries["archive/data.pkl"])
    return zipped(entries)


# Large fields are made by the test: each process of pytest that forks would carry all of them.
ATTACKS: dict[str, tuple[str, bytes | Callable[[], bytes], str]] = {
    "gzip": ("txt.gz", lambda: zeros_packed(3 * GiB), "the limit is 67108864"),
    "gzip in pieces": ("json.gz", lambda: gzip.compress(bytes(8 * MiB)) * 40, "the limit is 67108864"),
    "gzip in gzip": ("npy.gz", gzip.compress(gzip.compress(bytes(MiB))), "ValueError"),
    "npz that says so": ("npz", lambda: zip_of_zeros(2 * GiB, declared_size=2 * GiB), "the limit is 67108864"),
    "npz that says little": ("npz", lambda: zip_of_zeros(4 * GiB, declared_size=100), "ValueError|CRC"),
    "npz that says nothing": ("npz", lambda: zip_of_zeros(4 * GiB, declared_size=0), "EOF|CRC|ValueError"),
    "npz of bzip2": ("npz", lambda: zipped({"x.npy": bytes(64 * MiB)}, zipfile.ZIP_BZIP2), "numpy does not use"),
    "npz of lzma": ("npz", lambda: zipped({"x.npy": bytes(64 * MiB)}, zipfile.ZIP_LZMA), "numpy does not use"),
    "npz of many": ("npz", lambda: zip_of_entries(65_537), "65537 arrays, the limit is 65536"),
    "npz of nothing": ("npz", b"PK\x05\x06" + b"\xff" * 18, "BadZipFile"),
    "npy of 10^15 elements": ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}", b"1"), "does not fit in"),
    "npy of less than nothing": ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", b"1" * 8), "ValueError"),
    "npy of nothing, 2^70 times": ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1180591620717411303424)}"), "Error"),
    "npy of huge items": ("npy", npy("{'descr': '|V2000000000', 'fortran_order': False, 'shape': (4,)}"), "does not fit in"),
    **{
        f"npy of 10^12 items without bytes, {kind}": ("npy", npy(f"{{'descr': {kind}, 'fortran_order': False, 'shape': (1000000000000,)}}"), "items of 0 bytes")
        for kind in ("'|V0'", "'<U0'", "'|S0'", "[]", "[('a', '|V0')]", "[('a', '<i4', (0,))]")
    },
    "npz of items without bytes": ("npz", zipped({"x.npy": npy("{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}")}), "items of 0 bytes"),
    "npy of huge subarrays": ("npy", npy("{'descr': ('<f8', (100000, 100000)), 'fortran_order': False, 'shape': (1,)}"), "ValueError"),
    "npy of deep minuses": ("npy", npy("-" * 9000 + "1"), "nested too deeply|ValueError"),
    "npy of deep brackets": ("npy", npy("(" * 9000), "TokenError|SyntaxError|ValueError"),
    "npy of a long header": ("npy", npy("{'descr': '<f8'}" + " " * 60_000), "ValueError"),
    "npy of objects": ("npy", saved(lambda s: np.save(s, np.array([{}]), allow_pickle=True)), "is a pickle"),
    "npy of objects inside": ("npy", npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", b"12345678"), "is a pickle"),
    "json that is deep": ("json", b"[" * 100_000, "RecursionError"),
    "json that is too deep for a pickle": ("json", b"[" * 700 + b"]" * 700, "nested over 200 levels"),
    "json that is deep in dicts": ("json", b'{"a":' * 500 + b"1" + b"}" * 500, "nested over 200 levels"),
    "json of 11 million lists": ("json", lambda: b"[" + b"[]," * 5_500_000 + b"[]]", "JSON of 11000002 values"),
    "jsonl that is deep": ("jsonl", b"1\n" + b"[" * 700 + b"]" * 700, "nested over 200 levels"),
    "jsonl of 11 million lists": ("jsonl", lambda: b"[]\n" * 11_000_000, "JSON of 11000000 values"),
    "jsonl of 11 million lines": ("jsonl", lambda: b"1\n" * 11_000_000, "11000001 lines"),
    "csv of 11 million rows": ("csv", lambda: b"\n" * 11_000_000, "11000000 values, the limit is 10000000"),
    "csv with an open quote": ("csv", b'a,"b\n1', "not CSV"),
    "csv of a large cell": ("csv", b"a" * MiB, "not CSV: field larger than field limit"),
    "msgpack that is deep": ("msgpack", b"\x91" * 100_000 + b"\0", "ValueError|StackError"),
    "msgpack that is too deep for a pickle": ("mp", b"\x91" * 300 + b"\0", "nested over 200 levels"),
    "msgpack of 4 billion values": ("msg", b"\xdd\xff\xff\xff\xff\0", "ValueError|exceeds"),
    "msgpack of 33 million lists": ("msgpack", lambda: b"\xdd\x02\x00\x00\x01" + b"\x90" * 33_554_433, "the limit is 33554432"),
    "msgpack and more": ("msgpack", b"\0\0", "ExtraData"),
    "msgpack of colliding keys": ("msgpack", lambda: b"\xdf\0\0\x80\0" + b"".join(b"\xcd" + n.to_bytes(2) + b"\0" for n in range(32_768)), "map key"),
    "cbor that is deep": ("cbor", b"\x81" * 100_000 + b"\0", "nesting depth"),
    "cbor of 2^50 values": ("cbor", b"\x9b\0\x0f" + b"\xff" * 6, "CBORDecodeEOF"),
    "cbor of 2^50 bytes": ("cbor", b"\x5b\0\x0f" + b"\xff" * 6, "CBORDecodeEOF"),
    "cbor that contains itself": ("cbor", b"\xd8\x1c\x81\xd8\x1d\x00", "semantic tag 29"),
    "cbor of a huge fraction": ("cbor", b"\xc5\x82\x1b\0\0\0" + b"\xff" * 5 + b"\1", "CBORDecodeError"),
    "cbor of an expression": ("cbor", b"\xd8\x23\x61a", "semantic tag 35"),
    "cbor of numbers with one hash as keys": ("cbor", lambda: b"\xba\0\0\x9c\x40" + b"".join(b"\xc2\x4a" + (n * (2**61 - 1)).to_bytes(10) + b"\0" for n in range(40_000)), "map key must be a text string or byte string"),
    "cbor of a set of numbers": ("cbor", lambda: b"\xd9\x01\x02\x9a\0\0\x9c\x40" + b"".join(b"\x1b" + n.to_bytes(8) for n in range(40_000)), "element must be a text string or byte string"),
    "cbor of a decimal of a million digits": ("cbor", b"\xc4\x82\0\xc2\x5a\0\x06\x1a\x80" + b"\xff" * 400_000, "a whole number of 400000 bytes, the limit is 1024"),
    "cbor of a binary fraction of 400 kB": ("cbor", b"\xc5\x82\0\xc3\x5a\0\x06\x1a\x80" + b"\xff" * 400_000, "a whole number of 400000 bytes, the limit is 1024"),
    "cbor of 33 MiB": ("cbor", lambda: b"\x5a\x02\x10\0\0" + bytes(33 * MiB), "the limit is 33554432"),
    "ten without an array": ("ten", b"~TenBin~" + b"\xff" * 8, "does not fit"),
    "ten of 2^60 numbers": ("ten", encode_buffer([np.zeros(7)]).replace(struct.pack("<qq", 1, 7), struct.pack("<qq", 1, 1 << 60)), "does not fit in"),
    "safetensors of a huge header": ("safetensors", b"\xff" * 7 + b"\0{}", "SafetensorError"),
    "safetensors past its bytes": ("safetensors", struct.pack("<Q", 61) + b'{"a":{"dtype":"F32","shape":[999999],"data_offsets":[0,9999]}}'[:61], "SafetensorError"),
    "json of a huge number": ("json", b"9" * MiB, "Exceeds the limit"),
    "cls of a huge number": ("cls", b"9" * MiB, "Exceeds the limit"),
    "cls of other digits": ("cls", "\uff13".encode("utf-16"), "invalid literal"),
    "txt that is none": ("txt", b"\xff" * 100, "UnicodeDecodeError"),
    "pt that is packed": ("pt", lambda: zipped({"archive/data.pkl": bytes(64 * MiB)}, zipfile.ZIP_DEFLATED), "entries expand to"),
    "pt with little in its storage": ("pt", tensor_file(lambda p: p.replace(b"K\x04tq", b"J\xff\xff\xff\x0ftq")), "RuntimeError"),
    "pt past its storage": ("pt", tensor_file(lambda p: p.replace(b"K\x04\x85", b"J\xff\xff\xff\x0f\x85")), "RuntimeError"),
    "pt that repeats itself": ("pt", saved(lambda s: torch.save(torch.zeros(1).expand(1 << 40), s)), "repeats its memory"),
    "pt that is deep": ("pt", saved(lambda s: torch.save({"a": [Call(os.system, "true")]}, s)), "UnpicklingError"),
    "pt of a bytearray": ("pt", saved(lambda s: torch.save(Call(bytearray, 1 << 40), s)), "a bytearray"),
    "pt of a bytearray of an old kind": ("pt", saved(lambda s: torch.save(Call(bytearray, 1 << 40), s, _use_new_zipfile_serialization=False)), "a bytearray"),
    "pt of an old kind": ("pt", saved(lambda s: torch.save(Call(eval, "1"), s, _use_new_zipfile_serialization=False)), "UnpicklingError"),
    "png of 3.6 gigapixels": ("png", png(60_000, 60_000), "DecompressionBombError"),
    "png with text that unpacks": ("png", lambda: png(8, 8, *[(b"zTXt", b"k\0\0" + zlib.compress(bytes(MiB - 1)))] * 99), "Too much memory"),
    "png cut short": ("png", png(4000, 4000)[:80], "OSError|SyntaxError|UnidentifiedImage"),
    "jpg of 4 gigapixels": ("jpg", b"\xff\xd8\xff\xc0\x00\x11\x08" + b"\xff\xdc" * 2 + b"\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00", "DecompressionBombError"),
    "gif of a huge screen": ("gif", b"GIF89a\xff\xff\xff\xff\x00\x00\x00\x2c\0\0\0\0\xff\xff\xff\xff\0\x08", "DecompressionBombError"),
    "eps called jpg": ("jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", "UnidentifiedImageError"),
    "svg called png": ("png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "UnidentifiedImageError"),
}  # fmt: skip


@pytest.mark.parametrize("field", sorted({field for field, *_ in ATTACKS.values()}))
def test_hostile_fields_are_bad_samples_in_bounded_memory(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, decode_gzip, INFLATED_LIMIT_BYTES=64 * MiB)
    attacks = {
        name: (data, message) for name, (one, data, message) in ATTACKS.items() if one == field
    }

    def outcomes() -> str:
        return json.dumps({name: outcome_of(field, data) for name, (data, _) in attacks.items()})

    found = json.loads(survived(outcomes, memory_bytes=256 * MiB, timeout_s=120))
    for name, (_, message) in attacks.items():
        assert found[name].startswith("DecodeError: cannot be decoded"), name
        assert "sample '0042'" in found[name], name
        assert any(part in found[name] for part in message.split("|")), (name, found[name])


def outcome_of(field: str, data: bytes | Callable[[], bytes]) -> str:
    try:
        decode(field, data() if callable(data) else data)
    except Exception as error:  # noqa: BLE001  (that is what is asked)
        return f"{type(error).__name__}: {error}"
    return "decoded"


def test_long_cells_are_refused_also_after_a_table_was_packed(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("id,txt\n1,a\n")
    ss.pack(tmp_path / "table.csv", tmp_path / "out")  # raises Python's limit for the process
    assert "field larger than field limit" in attacked("csv", b"a" * MiB)


def test_pickles_in_fields_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for evil in (Call(os.system, f"touch {mark}"), Call(eval, f"open({str(mark)!r}, 'w')")):
        data = pickle.dumps(evil)
        objects = saved(lambda s, e=evil: np.save(s, np.array([e]), allow_pickle=True))  # type: ignore[misc]
        for field, value in {
            "npy": objects,
            "npz": zipped({"x.npy": objects}),
            "npz.gz": gzip.compress(zipped({"x.npy": data})),
            "pt": data,
            "pth": tensor_file(lambda _, d=data: d),  # type: ignore[misc]
            "pkl": data,
            "pyd": data,
            "pickle": data,
        }.items():
            survived(lambda f=field, v=value: decode(f, v), memory_bytes=GiB)  # type: ignore[misc]
    assert not mark.exists()


@pytest.mark.parametrize("field", ["jpg", "png", "tif"])
def test_no_image_starts_ghostscript(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    fake = tmp_path / "bin" / "gs"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\ntouch {mark}\n", encoding="ascii")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    eps = saved(lambda stream: PIL.Image.new("RGB", (8, 8)).save(stream, "EPS"))
    outcome = attacked(field, eps, memory_bytes=GiB)
    assert "UnidentifiedImageError" in outcome
    assert not mark.exists()


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    frames = [PIL.Image.new("P", (500, 500), color=n % 256) for n in range(300)]
    data = saved(
        lambda stream: frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    )
    outcome = survived(lambda: decode("gif", data).shape, memory_bytes=64 * MiB)
    assert outcome == "(500, 500, 3)"


def test_xml_and_yaml_are_never_parsed() -> None:
    bomb = b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 1000 + b'"><!ENTITY c "&b;&b;&b;">]><a>&c;</a>'
    assert decode("xml", bomb) == bomb
    yaml = b"a: &a [x, x]\nb: &b [*a, *a]\n!!python/object/apply:os.system [true]\n"
    assert decode("yaml", yaml) == decode("yml", yaml) == yaml


def test_json_depth_within_the_limit_is_accepted() -> None:
    deep = json.loads("[" * 200 + "]" * 200)
    assert decode("json", json.dumps(deep).encode()) == deep
    wide: dict[str, Any] = {"boxes": [[1, 2, 3, 4]] * 1000}
    assert decode("json", json.dumps(wide).encode()) == wide


def test_large_valid_fields_are_accepted() -> None:
    array = np.zeros(20_000_000, dtype=np.uint8)
    assert decode("npz", saved(lambda s: np.savez_compressed(s, a=array)))["a"].size == array.size
    assert decode("npy.gz", gzip.compress(saved(lambda s: np.save(s, array)))).size == array.size
    tensor = torch.arange(6.0).expand(1000, 6)
    assert decode("pt", saved(lambda s: torch.save(tensor, s))).shape == (1000, 6)


def test_budget_skips_hostile_fields_and_lists_them(tmp_path: Path) -> None:
    huge = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}", b"1")
    evil = {3: huge, 8: npy("-" * 9000 + "1")}
    good = saved(lambda stream: np.save(stream, np.arange(3)))
    samples = [{"__key__": f"{n:02d}", "npy": evil.get(n, good), "cls": n} for n in range(12)]
    folder = make_shards(tmp_path, samples=samples, per_shard=5)
    loader = ss.ShardLoader(ss.ShardDataset(folder, on_error="skip").decode(), batch_size=4)
    found = [number for batch in loader for number in batch["cls"].tolist()]
    assert found == [n for n in range(12) if n not in evil]
    assert [(bad.key, bad.field, bad.number) for bad in loader.bad_samples] == [
        ("03", "npy", 3),
        ("08", "npy", 8),
    ]


def test_large_image_below_the_limit_causes_a_warning() -> None:
    data = saved(lambda stream: PIL.Image.new("1", (10_000, 9_500)).save(stream, "PNG"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ImageDecoder(spec="l8")(data).shape == (9_500, 10_000)
    assert [one.category for one in caught] == [PIL.Image.DecompressionBombWarning]
    assert ImageDecoder(spec="l8")(picture()).ndim == 2
