"""Values become field bytes that read back as the same values, and equal values give equal bytes."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from shardstream.errors import OptionError, SampleError, SourceError
from shardstream.read.decode import BASIC
from shardstream.write.encode import INT_FIELDS, encode_field, encode_sample
from shardstream.write.images import ImageOptions, reencode

RGB = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)


def open_image(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def jpeg(width: int, height: int, *, orientation: int = 1) -> bytes:
    image = Image.new("RGB", (width, height), "red")
    exif = image.getexif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()


@pytest.mark.parametrize("field", ["jpg", "cls", "json", "npy", "anything", "seg.png"])
@pytest.mark.parametrize(
    "value", [b"\x00raw", bytearray(b"\x00raw"), memoryview(b"\x00raw")], ids=type
)
def test_bytes_pass_unchanged_in_every_field(field: str, value: object) -> None:
    assert encode_field(field, value) == b"\x00raw"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("txt", "Straße", "Straße".encode()),
        ("caption.txt", "a", b"a"),
        ("cls", 7, b"7"),
        ("cls", np.int64(-3), b"-3"),
        ("cls", torch.tensor(5), b"5"),
        ("a.cls2", 0, b"0"),
        ("json", {"b": 1, "a": "ü"}, '{"b":1,"a":"ü"}'.encode()),
        ("json", {"n": np.float32(0.5), "v": np.arange(2)}, b'{"n":0.5,"v":[0,1]}'),
        ("json", "text", b'"text"'),
        ("json", None, b"null"),
    ],
)
def test_text_and_numbers(field: str, value: object, expected: bytes) -> None:
    assert encode_field(field, value) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cls", "3", "takes a whole number or bytes, not str"),
        ("cls", 3.0, "takes a whole number or bytes, not float"),
        ("txt", 3, "takes text or bytes, not int"),
        ("txt", "\ud800", "no valid Unicode"),
        ("bin", "text", "takes bytes, not str; use value.encode"),
        ("wav", [1], "takes bytes, not list"),
        ("json", {"a": float("nan")}, "JSON cannot hold this value"),
        ("json", {"a": {1}}, "set is no JSON"),
        ("json", {"a": b"x"}, "bytes is no JSON"),
        ("npy", np.array([None]), "pickles run code"),
        ("npy", {"a": 1}, "takes an array, a tensor"),
        ("npy", [[1], [1, 2]], "differ in length"),
        ("npz", np.arange(3), "takes a dict of arrays"),
        ("npz", {"a": np.array([{}])}, "pickles run code"),
        ("pt", {"a": {1}}, "takes tensors, numbers and text"),
        ("png", np.zeros((2, 2)), "uint8, these are float64; multiply values from 0 to 1 by 255"),
        ("png", np.zeros((2, 2), np.int32), "convert them to uint8, or keep them as 'npy'"),
        ("png", np.zeros((2, 2, 5), np.uint8), r"shape \(2, 2, 5\) are no image"),
        ("png", np.zeros((0, 2), np.uint8), r"shape \(0, 2\) are no image"),
        ("jpg", np.zeros((2, 2, 4), np.uint8), "JPEG cannot hold an image of mode RGBA"),
        ("jpg", "a.jpg", "str is no image; give a PIL image"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_says_what_does(field: str, value: object, message: str) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        encode_field(field, value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "value",
    [np.arange(6).reshape(2, 3), np.float32(1.5), np.array("é"), torch.arange(4).float(), [1, 2]],
    ids=repr,
)
def test_npy_reads_back(value: Any) -> None:
    loaded = np.load(io.BytesIO(encode_field("npy", value)), allow_pickle=False)
    assert np.array_equal(loaded, np.asarray(value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("txt", "Straße\n"),
        ("a.transcript", ""),
        *((name, -7) for name in sorted(INT_FIELDS)),
        ("json", {"a": [1, None, "ü", 1.5], "b": {}}),
        ("jsn", "text"),
    ],
)
def test_what_is_encoded_decodes_to_itself(field: str, value: object) -> None:
    assert BASIC[field.rpartition(".")[2]](encode_field(field, value)) == value


def test_npz_reads_back() -> None:
    loaded = np.load(
        io.BytesIO(encode_field("npz", {"a": RGB, "b": torch.ones(2)})), allow_pickle=False
    )
    assert np.array_equal(loaded["a"], RGB)
    assert loaded["b"].tolist() == [1, 1]


def test_pt_reads_back_and_leaves_the_rest_of_a_storage_behind() -> None:
    data = encode_field("pt", {"a": [torch.arange(100_000)[:3], 1, "x"], "b": (None, True)})
    assert len(data) < 10_000
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["a"][0].tolist() == [0, 1, 2]
    assert loaded["b"] == (None, True)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("npz", lambda: {"a": RGB, "b": np.arange(3)}),
        ("npy", RGB.copy),
        ("pt", lambda: {"w": torch.arange(50)[10:20]}),
        ("png", RGB.copy),
        ("jpg", RGB.copy),
        ("webp", RGB.copy),
        ("tiff", RGB.copy),
    ],
)
def test_equal_values_give_equal_bytes(
    field: str, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encode_field(field, make())
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert encode_field(field, make()) == first


@pytest.mark.parametrize("field", ["png", "bmp", "tif", "tiff", "ppm", "depth.png"])
@pytest.mark.parametrize(
    "value",
    [RGB, Image.fromarray(RGB), torch.from_numpy(RGB).permute(2, 0, 1), np.asfortranarray(RGB)],
    ids=lambda value: type(value).__name__,
)
def test_lossless_images_read_back(field: str, value: object) -> None:
    assert np.array_equal(np.asarray(open_image(encode_field(field, value)).convert("RGB")), RGB)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
def test_grey_images_read_back(shape: tuple[int, ...]) -> None:
    pixels = np.arange(20, dtype=np.uint8).reshape(shape)
    found = open_image(encode_field("png", pixels))
    assert (found.mode, np.asarray(found).tolist()) == ("L", pixels.reshape(4, 5).tolist())


@pytest.mark.parametrize(
    ("field", "form"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP"), ("gif", "GIF")]
)
def test_other_image_formats(field: str, form: str) -> None:
    image = open_image(encode_field(field, RGB))
    assert (image.format, image.size) == (form, (9, 6))


def test_encode_sample_leaves_the_names_of_the_sample_out() -> None:
    sample = {"__key__": "a", "__url__": "b", "__local_path__": 3, "txt": "x", "cls": 1}
    assert encode_sample(sample) == {"txt": b"x", "cls": b"1"}


def test_an_image_that_fits_keeps_its_bytes() -> None:
    data = jpeg(40, 20)
    assert reencode(data, "jpg", ImageOptions(max_side=40, format="jpg"), where="x") == (
        "jpg",
        data,
    )


def test_what_is_no_image_is_named_even_if_nothing_is_changed() -> None:
    assert reencode(jpeg(4, 2), "jpg", ImageOptions(), where="x")[1] == jpeg(4, 2)
    with pytest.raises(SourceError, match=r"no image that can be read \(unknown format\).*x"):
        reencode(b"no image", "jpg", ImageOptions(), where="x")


@pytest.mark.parametrize(
    ("orientation", "size"), [(1, (16, 8)), (6, (8, 16)), (8, (8, 16)), (3, (16, 8))]
)
def test_a_larger_image_is_made_smaller_and_turned_upright(
    orientation: int, size: tuple[int, int]
) -> None:
    data = jpeg(64, 32, orientation=orientation)
    field, smaller = reencode(data, "jpg", ImageOptions(max_side=16), where="x")
    image = open_image(smaller)
    assert (field, image.size) == ("jpg", size)
    assert ImageOps.exif_transpose(image).size == size


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *itertools.product(["RGBA", "LA", "P", "1", "L", "CMYK"], ["jpg", "png", "webp"]),
        ("I;16", "png"),  # 16 bits do not fit the others
    ],
)
def test_every_mode_becomes_every_format_that_can_hold_it(mode: str, form: str) -> None:
    out = io.BytesIO()
    Image.new(mode, (20, 10)).save(out, "TIFF")
    field, data = reencode(
        out.getvalue(), "seg.tif", ImageOptions(max_side=10, format=form), where="x"
    )
    assert (field, open_image(data).size) == (f"seg.{form}", (10, 5))


def test_transparency_becomes_white_where_there_is_none() -> None:
    out = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(out, "PNG")
    data = reencode(out.getvalue(), "png", ImageOptions(format="jpg"), where="x")[1]
    assert open_image(data).getpixel((0, 0)) == (255, 255, 255)


def _animation() -> bytes:
    out = io.BytesIO()
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 255)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "no image that can be read"),
        (jpeg(64, 64)[:200], "no image that can be read"),
        (_animation(), "an animation of 2 frames"),
    ],
)
def test_a_broken_image_is_an_error_that_names_its_file(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        reencode(data, "gif", ImageOptions(max_side=4), where="cats/7.gif")
    assert "cats/7.gif" in str(caught.value)


@pytest.mark.parametrize("pixels_allowed", [3000, 1000])
def test_a_decompression_bomb_is_an_error(
    pixels_allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels_allowed)
    with pytest.raises(SourceError, match=r"decompression bomb.*\[in a\.jpg\]"):
        reencode(jpeg(64, 64), "jpg", ImageOptions(max_side=8), where="a.jpg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_side": 0}, "max_side must be 1"),
        ({"quality": 101}, "1 to 100"),
        ({"format": "gif"}, "turned into jpg, png, webp, not into 'gif'"),
        ({"format": "heic"}, "turned into jpg, png, webp, not into 'heic'"),
    ],
)
def test_image_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ImageOptions(**options)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    pickle.dumps(Evil())
    for field in ("npy", "npz", "pt", "json", "txt", "png", "pkl"):
        with pytest.raises(SampleError):
            encode_field(field, Evil())
    with pytest.raises(SampleError):
        encode_field("pt", [Evil()])
    assert json.loads(encode_field("json", [1]))
