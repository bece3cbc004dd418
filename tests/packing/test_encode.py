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
from PIL import Image

import shardstream as ss
from shardstream.codecs import ImageDecoder
from shardstream.errors import DecodeError, OptionError, SampleError, SourceError
from shardstream.format import INT_FIELDS
from shardstream.packing import ImageOptions, encode_field, encode_sample, reencode
from shardstream.pipeline import BASIC
from tests.image_files import netpbm_of, png_of

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
def test_text_and_numbers_are_encoded(field: str, value: object, expected: bytes) -> None:
    assert encode_field(field, value) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cls", "3", "takes a whole number or bytes, not str"),
        ("cls", 3.0, "takes a whole number or bytes, not float"),
        ("txt", 3, "takes text or bytes, not int"),
        ("txt", "\ud800", "not valid Unicode"),
        ("bin", "text", "takes bytes, not str; use value.encode"),
        ("wav", [1], "takes bytes, not list"),
        ("json", {"a": float("nan")}, "JSON cannot hold this value"),
        ("json", {"a": {1}}, "set is not JSON serialisable"),
        ("json", {"a": b"x"}, "bytes is not JSON serialisable"),
        ("json", [{"a": {"1": 2, 1: 3}}], "two keys have one text"),
        ("jsonl", [{None: 2, "null": 3}], "two keys have one text"),
        ("npz", {"1": np.ones(1), 1: np.ones(2)}, "two arrays have one name"),
        ("npy", np.array([None]), "pickles run code"),
        ("npy", np.ma.array([1, 2], mask=[False, True]), "lose its mask"),
        ("npz", {"a": np.ma.array([1, 2], mask=[False, True])}, "lose its mask"),
        ("ten", [np.ma.array([1.0, 2.0], mask=[False, True])], "lose its mask"),
        ("png", np.ma.array(RGB, mask=RGB > 9), "lose its mask"),
        ("npy", {"a": 1}, "takes an array, a tensor"),
        ("npy", [[1], [1, 2]], "differ in length"),
        ("npy", [[1], [2**63 + 1]], "9223372036854775809 would become"),
        ("npy", [float("nan"), 0.5, 2**53 + 1], "9007199254740993 would become"),
        ("npy", [1j, 2**53 + 1], "would become"),
        ("npy", [1, "a"], "1 would become '1'"),
        ("npz", np.arange(3), "takes a dict of arrays"),
        ("npz", {"a": np.array([{}])}, "pickles run code"),
        ("pt", {"a": {1}}, "takes tensors, numbers and text"),
        ("png", np.zeros((2, 2)), "uint8, these are float64; multiply values from 0 to 1 by 255"),
        ("png", np.zeros((2, 2), np.int32), "convert them to uint8, or keep them as 'npy'"),
        ("png", np.zeros((2, 2, 5), np.uint8), r"shape \(2, 2, 5\) are not an image"),
        ("png", np.zeros((0, 2), np.uint8), r"shape \(0, 2\) are not an image"),
        ("jpg", np.zeros((2, 2, 4), np.uint8), "JPEG cannot hold an image of mode RGBA"),
        ("jpg", "a.jpg", "str is not an image; give a PIL image"),
    ],
)  # fmt: skip
def test_unsupported_value_raises_with_the_accepted_types(
    field: str, value: object, message: str
) -> None:
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
def test_encoded_values_round_trip(field: str, value: object) -> None:
    assert BASIC[field.rpartition(".")[2]](encode_field(field, value)) == value


def test_npz_reads_back() -> None:
    loaded = np.load(
        io.BytesIO(encode_field("npz", {"a": RGB, "b": torch.ones(2)})), allow_pickle=False
    )
    assert np.array_equal(loaded["a"], RGB)
    assert loaded["b"].tolist() == [1, 1]


def test_npz_takes_any_name_with_the_bytes_of_numpy() -> None:
    names = ("file", "allow_pickle", "compressed", "a/b")
    data = encode_field("npz", dict.fromkeys(names, RGB))
    assert BASIC["npz"](data).keys() == set(names)
    expected = io.BytesIO()
    np.savez(expected, a=RGB, b=np.arange(3))
    assert encode_field("npz", {"a": RGB, "b": np.arange(3)}) == expected.getvalue()


def test_pt_round_trips_without_the_rest_of_its_storage() -> None:
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
def test_other_image_formats_round_trip(field: str, form: str) -> None:
    image = open_image(encode_field(field, RGB))
    assert (image.format, image.size) == (form, (9, 6))


def test_encode_sample_omits_key_and_url() -> None:
    sample = {"__key__": "a", "__url__": "b", "__local_path__": 3, "txt": "x", "cls": 1}
    assert encode_sample(sample) == {"txt": b"x", "cls": b"1"}


def test_image_that_fits_keeps_its_bytes() -> None:
    data = jpeg(40, 20)
    assert reencode(data, "jpg", ImageOptions(max_side=40, format="jpg"), where="x") == (
        "jpg",
        data,
    )


def test_invalid_image_is_an_error_even_without_changes() -> None:
    assert reencode(jpeg(4, 2), "jpg", ImageOptions(), where="x")[1] == jpeg(4, 2)
    with pytest.raises(SourceError, match=r"not a readable image \(unknown format\).*x"):
        reencode(b"no image", "jpg", ImageOptions(), where="x")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["jpg", "png", "webp"])
@pytest.mark.parametrize("max_side", [None, 16])
def test_reencoded_photo_keeps_its_exif_orientation(
    orientation: int, form: str, max_side: int | None
) -> None:
    data = jpeg(64, 32, orientation=orientation)
    options = ImageOptions(max_side=max_side, format=form)
    image = open_image(reencode(data, "jpg", options, where="x")[1])
    assert image.size == ((64, 32) if max_side is None else (16, 8))
    assert image.getexif().get(0x0112, 1) == orientation
    assert len(image.getexif()) <= 1


def test_pack_and_decode_agree_on_the_orientation_of_large_and_small_photos() -> None:
    large, small = (jpeg(side, side // 2, orientation=6) for side in (64, 16))
    again = [
        reencode(data, "jpg", ImageOptions(max_side=16), where="x")[1] for data in (large, small)
    ]
    assert [ImageDecoder(spec="rgb8")(data).shape for data in again] == [(8, 16, 3)] * 2
    decode = ImageDecoder(spec="rgb8", upright=True)
    assert [decode(data).shape for data in again] == [(16, 8, 3)] * 2


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *itertools.product(["RGBA", "LA", "P", "PA", "1", "L", "CMYK"], ["jpg", "png", "webp"]),
        ("I;16", "png"),  # other formats cannot hold 16 bits
        ("I;16B", "png"),
    ],
)
def test_every_mode_is_converted_to_every_suitable_format(mode: str, form: str) -> None:
    out = io.BytesIO()
    Image.new(mode, (20, 10)).save(out, "TIFF")
    field, data = reencode(
        out.getvalue(), "x.tif", ImageOptions(max_side=10, format=form), where="x"
    )
    assert (field, open_image(data).size) == (f"x.{form}", (10, 5))


# -- numbers ---------------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
IDS = np.kron(RNG.choice([0, 7, 19], (30, 40)), np.ones((7, 5))).astype(np.uint8)


def file_of(pixels: np.ndarray[Any, Any] | Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(out, form, **options)
    return out.getvalue()


def palette_of(pixels: np.ndarray[Any, Any]) -> Image.Image:
    image = Image.fromarray(pixels)
    image.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def stored(data: bytes) -> np.ndarray[Any, Any]:
    pixels = ImageDecoder(spec="raw")(data)
    assert isinstance(pixels, np.ndarray)
    return pixels


@pytest.mark.parametrize(
    ("field", "form"),
    [("png", "PNG"), ("tif", "TIFF"), ("bmp", "BMP"), ("pgm", "PPM"), ("gif", "GIF")],
)
@pytest.mark.parametrize("image_format", [None, "jpg", "webp"])
def test_mask_is_shrunk_without_new_values_in_its_format(
    field: str, form: str, image_format: str | None
) -> None:
    more = {"optimize": False} if form == "GIF" else {}
    options = ImageOptions(max_side=50, format=image_format)
    name, data = reencode(
        file_of(IDS, form, **more), f"seg.{field}", options, where="x", is_mask=True
    )
    small = stored(data)
    assert name == f"seg.{field}"
    assert small.shape == (50, 48)
    assert set(np.unique(small)) == {0, 7, 19}
    whole = reencode(file_of(IDS), "seg.png", ImageOptions(format="jpg"), where="x", is_mask=True)
    assert whole == ("seg.png", file_of(IDS))


def test_webp_mask_stays_lossless() -> None:
    colours = np.stack([IDS, IDS, IDS], axis=2)
    data = file_of(colours, "WEBP", lossless=True)
    again = reencode(data, "seg.webp", ImageOptions(max_side=50), where="x", is_mask=True)[1]
    assert set(np.unique(stored(again))) == {0, 7, 19}
    assert set(np.unique(stored(encode_field("seg.webp", colours)))) == {0, 7, 19}


@pytest.mark.parametrize(
    ("pixels", "form"),
    [
        (palette_of(IDS), "PNG"),
        (palette_of(IDS), "TIFF"),
        (IDS > 0, "PNG"),
        (IDS.astype(np.uint16) * 300, "PNG"),
        (IDS.astype(np.uint16) * 300, "TIFF"),
        (IDS.astype(np.int32) * -70_000, "TIFF"),
        (IDS.astype(np.float32) * 0.37, "TIFF"),
    ],
)
def test_palettes_bits_and_16_bit_values_are_never_averaged(pixels: Any, form: str) -> None:
    data = file_of(pixels, form)
    _, again = reencode(data, form.lower(), ImageOptions(max_side=50), where="x")
    assert stored(again).dtype == stored(data).dtype
    assert set(np.unique(stored(again))) == set(np.unique(stored(data)))


def test_photo_and_mask_are_shrunk_to_the_same_size() -> None:
    for width, height in [(210, 200), (211, 97), (64, 333), (100, 99), (513, 384)]:
        options = ImageOptions(max_side=50)
        photo = reencode(jpeg(width, height), "jpg", options, where="x")[1]
        mask = file_of(np.zeros((height, width), np.uint8))
        small = reencode(mask, "png", options, where="x", is_mask=True)[1]
        assert open_image(photo).size == open_image(small).size


DEEP = RNG.integers(0, 65536, (9, 13, 2), np.uint16)


@pytest.mark.parametrize(
    ("data", "field", "options", "message"),
    [
        (file_of(IDS), "png", {"max_side": 50}, r"3 shades of grey.*max_side would mix them.*--masks png"),
        (file_of(IDS), "png", {"format": "jpg"}, "image_format would mix them"),
        (file_of(IDS, "BMP"), "x.bmp", {"max_side": 50, "format": "png"}, r"max_side would mix.*--masks x\.bmp.*--overwrite"),
        (png_of(np.dstack([DEEP, DEEP[:, :, :1]])), "png", {"max_side": 5}, "would be cut to 8 bits"),
        (file_of(IDS.astype(np.uint16)), "png", {"format": "webp"}, "WEBP cannot hold 16-bit"),
        (file_of(IDS.astype(np.float32), "TIFF"), "tif", {"format": "webp"}, "WEBP cannot hold 32-bit float"),
        (file_of(IDS.astype(np.int32) * 70_000, "TIFF"), "tif", {"format": "png"}, "PNG cannot hold 32-bit"),
    ],
)  # fmt: skip
def test_lossy_conversion_is_an_error(
    data: bytes, field: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        reencode(data, field, ImageOptions(**options), where="x")


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (jpeg(64, 32), "jpg", "a JPEG does not keep the numbers"),
        (png_of(IDS % 4, bits=2), "png", "2-bit unsigned numbers would be stretched"),
        (netpbm_of("P5", IDS, 20), "pgm", "5-bit unsigned numbers would be stretched"),
    ],
)
def test_masks_that_cannot_be_shrunk_are_an_error(data: bytes, field: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        reencode(data, field, ImageOptions(max_side=5), where="x", is_mask=True)


def test_few_shades_are_kept_in_another_lossless_format() -> None:
    options = ImageOptions(max_side=500, format="png")
    field, data = reencode(file_of(IDS, "BMP"), "bmp", options, where="x")
    assert field == "png"
    assert np.array_equal(stored(data), IDS)


@pytest.mark.parametrize("masks", [("",), ("none", "png"), ("none",), ("pngg",)])
def test_masks_without_a_name_are_refused(masks: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="fields of images"):
        ImageOptions(masks=masks)


def test_masks_none_treats_images_as_photos() -> None:
    again = reencode(file_of(IDS), "png", ImageOptions(max_side=50, masks=()), where="x")[1]
    assert len(np.unique(stored(again))) > 3


def test_packed_mask_has_the_values_of_its_file(tmp_path: Path) -> None:
    source = tmp_path / "loose"
    source.mkdir()
    for number in range(2):
        (source / f"{number}.jpg").write_bytes(jpeg(210, 200, orientation=6))
        (source / f"{number}.png").write_bytes(file_of(palette_of(IDS)))
        (source / f"{number}.depth.tif").write_bytes(file_of(IDS.astype(np.uint16) * 300, "TIFF"))
    ss.pack(source, tmp_path / "out", max_side=50, image_format="webp")
    dataset = ss.ShardDataset(str(tmp_path / "out"))
    fields: dict[str, Any] = {"png": "mask", "depth.tif": "raw"}
    samples = list(dataset.decode("rgb8", fields=fields))
    assert len(samples) == 2
    for sample in samples:
        assert sample["webp"].shape == (48, 50, 3)
        assert set(np.unique(sample["png"])) == {0, 7, 19}
        assert np.array_equal(sample["depth.tif"], sample["png"].astype(np.uint16) * 300)
    with pytest.raises(SourceError, match="'png'.*leave one out|cannot|two images"):
        ss.pack(source, tmp_path / "none", max_side=50, image_format="webp", masks=[])


@pytest.mark.parametrize("field", ["png", "tif", "depth.png"])
@pytest.mark.parametrize("shape", [(9, 13), (9, 13, 1)])
def test_uint16_arrays_read_back(field: str, shape: tuple[int, ...]) -> None:
    found = stored(encode_field(field, DEEP[:, :, 0].reshape(shape)))
    assert found.dtype == np.uint16
    assert np.array_equal(found, DEEP[:, :, 0])


@pytest.mark.parametrize("field", ["jpg", "png", "webp"])
def test_pillow_image_keeps_its_orientation(field: str) -> None:
    again = open_image(encode_field(field, open_image(jpeg(8, 4, orientation=6))))
    assert (again.size, again.getexif().get(0x0112)) == ((8, 4), 6)


@pytest.mark.parametrize("field", ["jpg", "png", "gif"])
def test_animated_pillow_image_is_refused(field: str) -> None:
    with pytest.raises(SampleError, match="would keep one frame; give the bytes"):
        encode_field(field, open_image(_animation()))


def test_gif_keeps_array_values() -> None:
    assert np.array_equal(stored(encode_field("seg.gif", IDS)), IDS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((form, DEEP[:, :, 0], "cannot hold the numbers of an image of mode I;16; use the field 'png'")
          for form in ("jpg", "webp", "gif", "bmp")),
        ("png", DEEP, "uint16"),
        ("png", IDS > 0, "these are bool; convert them to uint8"),
        ("png", IDS / 255, "multiply values from 0 to 1 by 255"),
        ("png", IDS.astype(np.int64), "these are int64"),
        ("webp", Image.fromarray(IDS.astype(np.float32)), "cannot hold the numbers of an image of mode F"),
        ("gif", Image.fromarray(IDS.astype(np.int32)), "cannot hold the numbers of an image of mode I"),
        ("png", Image.fromarray(IDS.astype(np.int32) * 70_000), "cannot hold the numbers of an image of mode I"),
        ("seg.jpg", IDS, "a JPEG does not keep the numbers of a mask"),
        ("mask.jpeg", Image.fromarray(IDS > 0), "a JPEG does not keep the numbers of a mask"),
    ],
)  # fmt: skip
def test_pixels_that_a_format_would_change_are_refused(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(SampleError, match=message):
        encode_field(field, value)


def test_transparency_becomes_white_in_formats_without_alpha() -> None:
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
        (b"no image", "not a readable image"),
        (jpeg(64, 64)[:200], "not a readable image"),
        (_animation(), "an animation of 2 frames"),
    ],
)
def test_broken_image_is_an_error_that_names_its_file(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        reencode(data, "gif", ImageOptions(max_side=4), where="cats/7.gif")
    assert "cats/7.gif" in str(caught.value)


@pytest.mark.parametrize("pixels_allowed", [3000, 1000])
def test_decompression_bomb_is_an_error(
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
        ({"format": "gif"}, "converted to jpg, png, webp, not to 'gif'"),
        ({"format": "heic"}, "converted to jpg, png, webp, not to 'heic'"),
    ],
)
def test_invalid_image_options_are_refused(options: dict[str, Any], message: str) -> None:
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


def test_image_format_goes_by_the_bytes_of_a_file() -> None:
    png = saved(Image.new("RGB", (4, 4), "red"), "PNG")
    field, data = reencode(png, "jpg", ImageOptions(format="jpg"), where="a.jpg")
    assert (field, Image.open(io.BytesIO(data)).format) == ("jpg", "JPEG")
    assert reencode(png, "jpg", ImageOptions(format="png"), where="a.jpg") == ("png", png)
    assert reencode(png, "jpg", ImageOptions(max_side=9), where="a.jpg") == ("jpg", png)


def test_profile_of_other_colours_is_dropped() -> None:
    cmyk = bytes(16) + b"CMYK" + bytes(108)
    image = saved(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG", icc_profile=cmyk)
    _, data = reencode(image, "jpg", ImageOptions(format="png"), where="a.jpg")
    png = Image.open(io.BytesIO(data))
    assert (png.mode, png.info.get("icc_profile")) == ("RGB", None)
    _, data = reencode(image, "jpg", ImageOptions(max_side=2), where="a.jpg")
    jpg = Image.open(io.BytesIO(data))
    assert (jpg.mode, jpg.info.get("icc_profile")) == ("CMYK", cmyk)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_colour_key_is_clear_after_a_conversion(mode: str) -> None:
    image = Image.new(mode, (8, 8), 0)
    image.paste(255 if mode == "L" else (255, 0, 0), (0, 0, 4, 8))
    key = 0 if mode == "L" else (0, 0, 0)
    data = saved(image, "PNG", transparency=key)
    none = ()  # no field is a mask
    _, jpg = reencode(data, "png", ImageOptions(format="jpg", masks=none), where="a.png")
    assert min(Image.open(io.BytesIO(jpg)).convert("RGB").getpixel((7, 4))) > 250  # type: ignore[arg-type]
    for options in (ImageOptions(format="webp", masks=none), ImageOptions(max_side=4, masks=none)):
        _, other = reencode(data, "png", options, where="a.png")
        alpha = Image.open(io.BytesIO(other)).convert("RGBA").getchannel("A")
        assert (alpha.getpixel((0, 1)), alpha.getpixel((alpha.width - 1, 1))) == (255, 0)


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def class_folders(root: Path, pixels: np.ndarray[Any, Any]) -> Path:
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        (root / name / "1.jpg").write_bytes(jpeg(210, 200))
        (root / name / "2.png").write_bytes(file_of(pixels))
    return root


@pytest.mark.parametrize("shades", [(0, 255, 255), (0, 90, 200)])
@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()])
def test_grey_pictures_of_few_shades_in_folders_of_classes_are_averaged_with_a_warning(
    shades: tuple[int, ...], executor: Any, tmp_path: Path
) -> None:
    root = class_folders(
        tmp_path / "in", np.array(shades, np.uint8)[np.searchsorted(np.unique(IDS), IDS)]
    )
    with pytest.warns(ss.errors.ImageWarning, match=r"taken for pictures.*pass masks=\['png'\]"):
        assert ss.pack(root, tmp_path / "out", max_side=50, executor=executor).samples == 4
    ss.pack(root, tmp_path / "masks", max_side=50, masks=["png"], executor=executor)
    counts = [
        {
            len(np.unique(stored(sample["png"])))
            for sample in ss.ShardDataset(tmp_path / name)
            if "png" in sample
        }
        for name in ("out", "masks")
    ]
    assert min(counts[0]) > 3
    assert counts[1] == {len({*shades})}


@pytest.mark.parametrize(("field", "is_picture"), [("cls", True), ("txt", False)])
def test_only_image_of_a_labelled_row_is_a_picture(
    field: str, is_picture: bool, tmp_path: Path
) -> None:
    pixels = np.array([0, 90, 200], np.uint8)[np.searchsorted(np.unique(IDS), IDS)]
    samples = [{"png": file_of(pixels), field: b"1"}]
    if is_picture:
        with pytest.warns(ss.errors.ImageWarning, match="they have a class"):
            ss.pack(samples, tmp_path / "out", max_side=50)
        samples[0]["x.png"] = samples[0]["png"]
    with pytest.raises(SourceError, match="3 shades of grey, as a mask has"):
        ss.pack(samples, tmp_path / "other", max_side=50)


@pytest.mark.parametrize("shades", [(0, 1, 2), (0, 1, 255)])
def test_class_ids_in_folders_of_classes_are_not_averaged(
    shades: tuple[int, ...], tmp_path: Path
) -> None:
    root = class_folders(
        tmp_path / "in", np.array(shades, np.uint8)[np.searchsorted(np.unique(IDS), IDS)]
    )
    with pytest.raises(SourceError, match=r"3 shades of grey, as a mask has"):
        ss.pack(root, tmp_path / "out", max_side=50)


RAMP = np.arange(0, 65536, 13, dtype=np.uint16)[:5000].reshape(50, 100)
DEEP_FILES = {
    "grey.png": png_of(RAMP),
    "colours.png": png_of(np.dstack([RAMP, RAMP[::-1], RAMP.T.reshape(RAMP.shape)])),
    "grey.tif": file_of(RAMP, "TIFF"),
    "12 bits.pgm": netpbm_of("P5", RAMP >> 4, 4095),
}
WHITE_IS_0 = {262: 0}  # the tag of a TIFF


def jpeg2000_of_12_bits(pixels: Any) -> bytes:
    """Return a JPEG 2000 of 12 bits; Pillow writes 16, whose middle (32768) is stored as 0, as that of 12 (2048) is."""
    data = bytearray(file_of((pixels + (32768 - 2048)).astype(np.uint16), "JPEG2000", no_jp2=True))
    data[data.index(b"\xff\x4f\xff\x51") + 42] = 12 - 1  # Ssiz of the component
    return bytes(data)


@pytest.mark.parametrize("name", DEEP_FILES)
def test_16_bits_are_scaled_to_8_where_asked_in_pack_and_decode(name: str, tmp_path: Path) -> None:
    data, field = DEEP_FILES[name], name.rpartition(".")[2]
    pixels = ImageDecoder(spec="raw")(data)
    expected = (pixels >> (4 if field == "pgm" else 8)).astype(np.uint8)
    sample = {"__key__": "0", field: data, f"depth.{field}": data}
    ss.pack([sample], tmp_path / "raw")
    ss.pack([sample], tmp_path / "scaled", scale_16_bits=True)
    image_name = "rgb8" if pixels.ndim == 3 else "l8"
    masks: dict[str, Any] = {"fields": {f"depth.{field}": "raw"}}
    (found,) = ss.ShardDataset(tmp_path / "raw").decode(image_name, scale_16_bits=True, **masks)
    (packed,) = ss.ShardDataset(tmp_path / "scaled").decode(image_name, **masks)
    for one in (found, packed):
        assert np.abs(one[field].astype(int) - expected).max() <= (field == "pgm")
        assert np.array_equal(one[f"depth.{field}"], pixels)  # a mask keeps all bits
    dataset = ss.ShardDataset(tmp_path / "raw")
    with pytest.raises(DecodeError, match=rf"decode\('{image_name}', scale_16_bits=True\)"):
        list(dataset.decode(image_name, only=field))
    (single,) = dataset.decode(fields={field: image_name}, scale_16_bits=True, only=field)
    assert np.array_equal(single[field], found[field])


def test_jpeg2000_of_12_bits_is_scaled_to_8(tmp_path: Path) -> None:
    data = jpeg2000_of_12_bits(RAMP >> 4)
    ss.pack([{"jp2": data}], tmp_path / "raw")
    ss.pack([{"jp2": data}], tmp_path / "scaled", scale_16_bits=True)
    (found,) = ss.ShardDataset(tmp_path / "raw").decode("l8", scale_16_bits=True)
    (packed,) = ss.ShardDataset(tmp_path / "scaled").decode("l8")
    for sample in (found, packed):
        (pixels,) = (sample[name] for name in sample if not name.startswith("__"))
        assert np.array_equal(pixels, RAMP >> 8)


def test_scaled_images_are_averaged_and_converted(tmp_path: Path) -> None:
    for options in ({"max_side": 10}, {"image_format": "jpg"}):
        name = next(iter(options))
        ss.pack([{"png": DEEP_FILES["grey.png"]}], tmp_path / name, scale_16_bits=True, **options)
        (sample,) = ss.ShardDataset(tmp_path / name).decode("l8")
        pixels = sample["jpg" if name == "image_format" else "png"]
        assert abs(pixels.astype(float).mean() - (RAMP >> 8).mean()) < 2


def test_scaled_tiff_that_stores_white_as_0_looks_like_one_of_8_bits(tmp_path: Path) -> None:
    deep = file_of(RAMP, "TIFF", tiffinfo=WHITE_IS_0)
    plain = ImageDecoder(spec="l8")(
        file_of((~(RAMP >> 8)).astype(np.uint8), "TIFF", tiffinfo=WHITE_IS_0)
    )
    ss.pack([{"tif": deep}], tmp_path / "raw")
    ss.pack([{"tif": deep}], tmp_path / "scaled", scale_16_bits=True)
    for name in ("raw", "scaled"):
        (sample,) = ss.ShardDataset(tmp_path / name).decode("l8", scale_16_bits=True)
        assert np.array_equal(sample["tif"], plain)


@pytest.mark.parametrize(
    "data", [file_of(RAMP.astype(np.float32), "TIFF"), file_of(RAMP.astype(np.int32), "TIFF")]
)
def test_numbers_without_a_known_range_are_not_scaled(data: bytes, tmp_path: Path) -> None:
    ss.pack([{"tif": data}], tmp_path, scale_16_bits=True)
    (sample,) = ss.ShardDataset(tmp_path).decode("raw")
    assert sample["tif"].dtype.itemsize == 4
    with pytest.raises(DecodeError, match=r"32-bit .* do not fit 'l8'"):
        list(ss.ShardDataset(tmp_path).decode("l8", scale_16_bits=True))
