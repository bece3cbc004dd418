from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from webdataset.autodecode import Decoder as TheirDecoder

import shardstream as ss
from shardstream.codecs import decode_gzip, decode_npy, decode_npz
from shardstream.errors import DecodeError, OptionError
from shardstream.format import Sample
from shardstream.pipeline import BASIC, Context, Decode
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.small_datasets import picture


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def decode_with(stage: Decode, **fields: Any) -> Sample:
    sample = {"__key__": "0042", "__url__": "s3://b/train-7.tar", **fields}
    decoded = stage.bind(Context())(sample, 0)
    assert isinstance(decoded, dict)
    return decoded


def decode_field(field: str, data: bytes, **options: Any) -> Any:
    """Decode one field with the defaults of a dataset."""
    return decode_with(stage_of(**options), **{field: data})[field]


def stage_of(*handlers: Any, **options: Any) -> Decode:
    """Return the stage that ``ShardDataset.decode`` appends."""
    stage = _an_empty_dataset().decode(*handlers, **options).pipeline.stages[-1]
    assert isinstance(stage, Decode)
    return stage


def _an_empty_dataset() -> ss.ShardDataset:
    return ss.ShardDataset(_folder[0])


_folder: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _dataset(tmp_path_factory: pytest.TempPathFactory) -> None:
    _folder[:] = [make_shards(tmp_path_factory.mktemp("one"), samples=1)]


def saved(save: Callable[[io.BytesIO], Any]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


ARRAY = np.arange(12, dtype=np.float16).reshape(3, 4)
NPY = saved(lambda stream: np.save(stream, ARRAY))
NPZ = saved(lambda stream: np.savez_compressed(stream, a=ARRAY, b=np.array([True])))
TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "more": [torch.tensor(3), "text", None]}
PT = saved(lambda stream: torch.save(TENSORS, stream))

BASICS: list[tuple[str, bytes, Any]] = [
    ("txt", "Grüße\n".encode(), "Grüße\n"),
    ("text", b"", ""),
    ("transcript", b"one two", "one two"),
    ("cls", b"7", 7),
    ("cls2", b" -12\n", -12),
    ("index", b"0", 0),
    ("inx", b"1", 1),
    ("id", b"123456789012345678901234567890", 123456789012345678901234567890),
    ("json", b'{"a": [1, null, 2.5]}', {"a": [1, None, 2.5]}),
    ("jsn", b"[]", []),
]


@pytest.mark.parametrize(("field", "data", "value"), BASICS)
@pytest.mark.parametrize("prefix", ["", "left.", "a.b."])
def test_basic_fields_are_decoded_as_in_webdataset(
    prefix: str, field: str, data: bytes, value: Any
) -> None:
    found = decode_field(prefix + field, data)
    theirs = TheirDecoder([]).decode({prefix + field: data})[prefix + field]
    assert found == theirs == value
    assert type(found) is type(value)


@pytest.mark.parametrize("field", ["class", "count"])
def test_integer_fields_that_webdataset_leaves_as_bytes_are_decoded(field: str) -> None:
    assert decode_field(field, b"3") == 3
    assert TheirDecoder([]).decode({field: b"3"})[field] == b"3"


def test_arrays_are_decoded_as_in_webdataset() -> None:
    found = decode_field("npy", NPY)
    theirs = TheirDecoder([]).decode({"npy": NPY})["npy"]
    assert found.dtype == theirs.dtype == ARRAY.dtype
    assert np.array_equal(found, theirs)
    archive = decode_field("npz", NPZ)
    assert archive.keys() == TheirDecoder([]).decode({"npz": NPZ})["npz"].keys() == {"a", "b"}
    assert np.array_equal(archive["a"], ARRAY)
    assert archive["b"].tolist() == [True]


@pytest.mark.parametrize("field", ["pt", "pth", "emb.pth"])
def test_tensors_and_plain_containers_are_loaded(field: str) -> None:
    found = decode_field(field, PT)
    assert torch.equal(found["weight"], TENSORS["weight"])  # type: ignore[arg-type]
    assert found["more"][1:] == ["text", None]


@pytest.mark.parametrize(
    ("field", "data", "value"),
    [
        ("txt.gz", gzip.compress(b"hello", mtime=0), "hello"),
        ("meta.json.gz", gzip.compress(b"[1]", mtime=0), [1]),
        ("cls.gz", gzip.compress(b"4", mtime=0) + gzip.compress(b"2", mtime=0), 42),
        ("blob.gz", gzip.compress(b"\x00\x01", mtime=0), b"\x00\x01"),
    ],
)
def test_gzipped_fields_are_decompressed_first(field: str, data: bytes, value: Any) -> None:
    assert decode_field(field, data) == value


@pytest.mark.parametrize(
    "field", ["bin", "mp4", "txt.orig", "pickle", "pkl", "pyd", "flac", "jpg", "gz.x"]
)
def test_fields_without_a_decoder_stay_bytes(field: str) -> None:
    assert decode_field(field, b"\x80\x04N.") == b"\x80\x04N."


def test_metadata_and_decoded_values_pass_unchanged() -> None:
    sample = {"__json__": b"[1]", "cls": 3, "json": {"a": 1}, "txt": None}
    decoded = decode_with(stage_of(), **sample)
    assert {name: decoded[name] for name in sample} == sample


@pytest.mark.parametrize("only", ["json", ["json"], ("json", "missing")])
def test_only_named_fields_are_decoded(only: Any) -> None:
    decoded = decode_with(stage_of(only=only), json=b"[1]", cls=b"1")
    assert (decoded["json"], decoded["cls"]) == ([1], b"1")


def test_fields_can_have_their_own_decoders() -> None:
    stage = stage_of(fields={"seg.txt": len, "bin": bytes.hex, "mask.png": "l8"})
    decoded = decode_with(
        stage, **{"seg.txt": b"four", "a.bin": b"\x01", "txt": b"x", "mask.png": picture("L")}
    )
    assert decoded["seg.txt"] == 4
    assert decoded["a.bin"] == "01"
    assert decoded["txt"] == "x"
    assert decoded["mask.png"].shape == (9, 13)


def test_handlers_are_tried_in_order() -> None:
    calls: list[str] = []

    def first(name: str, data: bytes) -> Any:
        calls.append(name)
        return data.decode().upper() if name.endswith(".txt") else None

    def second(name: str, data: bytes) -> Any:
        return {"second": data} if name == ".cls" else None

    decoded = decode_with(stage_of(first, second), txt=b"a", cls=b"1", json=b"2")
    assert (decoded["txt"], decoded["cls"], decoded["json"]) == ("A", {"second": b"1"}, 2)
    assert calls == [".txt", ".cls", ".json"]
    gz = decode_with(stage_of(first), **{"txt.gz": gzip.compress(b"b", mtime=0)})
    assert gz["txt.gz"] == "B"
    assert calls[-1] == ".txt"


@pytest.mark.parametrize(
    ("field", "write"),
    [
        ("npy", lambda bad, s: np.save(s, np.array([bad], dtype=object), allow_pickle=True)),
        ("npz", lambda bad, s: np.savez(s, x=np.array([bad], dtype=object))),
        ("pt", lambda bad, s: torch.save([bad], s)),
        ("pth", lambda bad, s: torch.save({"x": bad}, s, _use_new_zipfile_serialization=False)),
        ("pth", pickle.dump),
        ("npy.gz", lambda bad, s: s.write(gzip.compress(pickle.dumps(bad), mtime=0))),
        ("npz", pickle.dump),
        ("npy", pickle.dump),
    ],
)
def test_pickled_code_is_refused_and_not_run(
    field: str, write: Callable[[Payload, io.BytesIO], Any], tmp_path: Path
) -> None:
    data = saved(lambda stream: write(Payload(tmp_path / "ran"), stream))
    with pytest.raises(DecodeError, match=rf"train-7\.tar, sample '0042', field '{field}'"):
        decode_field(field, data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd", "a.pkl"])
def test_pickles_stay_bytes_without_a_user_decoder(field: str, tmp_path: Path) -> None:
    data = pickle.dumps(Payload(tmp_path / "ran"))
    assert decode_field(field, data) == data
    assert not (tmp_path / "ran").exists()
    calls = decode_with(stage_of(fields={"pkl": len, "pickle": len, "pyd": len}), **{field: data})
    assert calls[field] == len(data)


@pytest.mark.parametrize(
    ("field", "data", "message"),
    [
        ("cls", b"dog", "ValueError: invalid literal"),
        ("cls", b"9" * 5000, "ValueError: Exceeds the limit"),
        ("txt", b"\xff\xfe", "UnicodeDecodeError"),
        ("json", b"{", "JSONDecodeError"),
        ("json", b"[" * 200_000, "RecursionError"),
        ("npy", NPY[:-1], "ValueError"),
        ("npy", b"", "EOF"),
        ("npz", NPZ[:-30], "BadZipFile"),
        ("pt", PT[:-30], "RuntimeError"),
        ("txt.gz", b"no gzip", "BadGzipFile"),
        ("txt.gz", gzip.compress(b"hello", mtime=0)[:-9], "EOFError"),
    ],
)
def test_decode_error_names_shard_key_and_field(field: str, data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message) as caught:
        decode_field(field, data)
    error = caught.value
    assert (error.shard, error.key, error.field) == ("s3://b/train-7.tar", "0042", field)
    assert "skip it with on_error" in str(error)
    assert error.__cause__ is not None


def test_contents_that_decompress_past_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, decode_gzip, INFLATED_LIMIT_BYTES=1000)
    zeros = saved(lambda stream: np.savez_compressed(stream, x=np.zeros(2000, dtype=np.uint8)))
    with pytest.raises(ValueError, match="the limit is 1000"):
        decode_npz(zeros)
    with pytest.raises(ValueError, match="unpacks to 2000 bytes or more, the limit is 1000"):
        decode_gzip(gzip.compress(bytes(2000), mtime=0))
    assert len(decode_gzip(gzip.compress(bytes(1000), mtime=0))) == 1000


def header_of(shape: tuple[int, ...]) -> bytes:
    return saved(
        lambda stream: np.lib.format.write_array_header_1_0(
            stream, {"descr": "|u1", "fortran_order": False, "shape": shape}
        )
    )


@pytest.mark.parametrize("shape", [(1 << 46,), (1 << 62, 4), (1 << 40, 1 << 40)])
def test_array_with_a_huge_declared_shape_is_a_bad_sample(
    shape: tuple[int, ...],
) -> None:
    data = header_of(shape) + bytes(100)
    with pytest.raises(DecodeError, match="ValueError"):
        decode_field("npy", data)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x.npy", data)
    with pytest.raises(DecodeError, match="ValueError"):
        decode_field("npz", stream.getvalue())


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", ["<f8", ">i2", "|b1", "<U3", "<c8", "<M8[s]"])
def test_arrays_of_every_shape_and_dtype_round_trip(
    dtype: str, shape: tuple[int, ...], order: Any
) -> None:
    array = np.zeros(shape, dtype=dtype, order=order)
    found = decode_npy(saved(lambda stream: np.save(stream, array)))
    assert found.dtype == array.dtype
    assert found.shape == shape
    assert np.array_equal(found, array)


def test_decoder_table_is_read_only() -> None:
    assert sorted(BASIC) == [
        *("cbor", "class", "cls", "cls2", "count", "csv", "id", "index", "inx", "jsn", "json"),
        *("jsonl", "mp", "msg", "msgpack", "npy", "npz", "tb", "ten", "text", "transcript", "tsv"),
        "txt",
    ]


def test_cached_decoder_choices_are_bounded() -> None:
    stage = stage_of()
    for number in range(3000):
        decode_with(stage, **{f"{number}.txt": b"a"})
    assert len(stage._chosen) <= 1000


def test_decode_after_to_tuple_is_refused() -> None:
    with pytest.raises(OptionError, match="put it before to_tuple and batched"):
        stage_of().bind(Context())((b"1",), 0)


@pytest.mark.parametrize("threads", [0, 2])
def test_sequential_dataset_decodes_samples(threads: int, tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{i}", "json": {"i": i}, "npy": ARRAY + i, "txt": str(i)} for i in range(7)
    ]
    folder = make_shards(tmp_path, samples=samples, per_shard=3)
    decoded = list(ss.ShardDataset(folder).decode(threads=threads))
    assert [sample["json"] for sample in decoded] == [{"i": i} for i in range(7)]
    assert all(np.array_equal(sample["npy"], ARRAY + i) for i, sample in enumerate(decoded))
    assert json.dumps(decoded[0]["txt"]) == '"0"'


def test_message_of_a_bad_image_has_no_address(tmp_path: Path) -> None:
    folder = make_shards(tmp_path, samples=[{"__key__": "a", "jpg": b"no image"}])
    with pytest.raises(ss.errors.DecodeError, match="cannot identify image file; ") as caught:
        next(iter(ss.ShardDataset(folder).decode("rgb8")))
    assert "0x" not in caught.value.what


def test_error_of_a_pt_that_holds_objects_names_them_without_advice_to_run_them(
    tmp_path: Path,
) -> None:
    stream = io.BytesIO()
    torch.save({"half": Fraction(1, 2)}, stream)
    folder = make_shards(tmp_path, samples=[{"__key__": "a", "pt": stream.getvalue()}])
    with pytest.raises(DecodeError, match="Unsupported global: GLOBAL fractions.Fraction") as info:
        list(ss.ShardDataset(folder).decode())
    assert not any(part in str(info.value) for part in ("\x1b", "x1b[", "`weights_only`", "\n"))
