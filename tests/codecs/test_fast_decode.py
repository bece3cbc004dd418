"""Test that fast decoders return the values of json and Pillow."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.codecs import ImageDecoder, decode_jpeg, has_only_pixels, parse_json
from shardstream.loader import to_tensor
from tests.limits import module_of


def photo(width: int, height: int, mode: str = "RGB", **options: Any) -> bytes:
    rng = np.random.default_rng(width * height)
    noise = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    picture = PIL.Image.fromarray(noise).resize((width, height), PIL.Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    picture.convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def with_exif() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    return photo(40, 30, exif=exif)


def with_fill_bytes() -> bytes:
    """Return a photo whose EXIF marker follows fill bytes, which T.81 allows before any marker."""
    data = with_exif()
    return data[:2] + b"\xff\xff\xff" + data[2:]


def by_pillow(*_: Any, **__: Any) -> None:
    """Replace `decode_jpeg` so that Pillow decodes."""


def decoded(data: bytes, spec: str, **options: Any) -> Any:
    return ImageDecoder(spec=spec, to_tensor=to_tensor, **options)(data)


@pytest.mark.parametrize(
    "spec", ["rgb8", "rgb", "l8", "rgba8", "torchrgb8", "torchl", "pil", "pill"]
)
@pytest.mark.parametrize(
    "data",
    [
        photo(64, 48),
        photo(61, 47, quality=95, subsampling=0),
        photo(61, 47, quality=20, subsampling=2, progressive=True),
        photo(33, 17, "L"),
        photo(40, 24, "CMYK"),
        photo(1, 1),
        with_exif(),
        with_fill_bytes(),
        photo(40, 30, icc_profile=b"x" * 500, comment=b"on holiday", dpi=(300, 300)),
    ],
    ids=["420", "444", "progressive", "grey", "cmyk", "pixel", "exif", "fill bytes", "profile"],
)
def test_jpeg_pixels_equal_pillows(spec: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = decoded(data, spec)
    monkeypatch.setattr(module_of(ImageDecoder), "decode_jpeg", by_pillow)
    slow = decoded(data, spec)
    assert type(quick) is type(slow)
    np.testing.assert_array_equal(np.asarray(quick), np.asarray(slow))
    if isinstance(quick, PIL.Image.Image):
        assert (quick.mode, quick.getexif()) == (slow.mode, slow.getexif())
        assert quick.info.get("icc_profile") == slow.info.get("icc_profile")


def test_common_files_use_the_fast_decoder() -> None:
    assert decode_jpeg(photo(64, 48), "RGB") is not None
    assert decode_jpeg(photo(64, 48, "L"), "L") is not None


def test_unsupported_files_are_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_jpeg(photo(40, 24, "CMYK"), "RGB") is None
    assert decode_jpeg(photo(40, 24), "L") is None  # another formula for grey
    assert decode_jpeg(b"\xff\xd8 no more", "RGB") is None
    assert decode_jpeg(b"GIF89a", "RGB") is None
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    assert decode_jpeg(photo(64, 48), "RGB") is None


def test_has_only_pixels_detects_metadata() -> None:
    assert has_only_pixels(photo(40, 24, comment=b"on holiday", progressive=True))
    assert has_only_pixels(b"\xff\xd8\xff\xff" + photo(40, 24)[2:])
    assert not has_only_pixels(with_exif())
    assert not has_only_pixels(with_fill_bytes())
    assert not has_only_pixels(photo(40, 24, icc_profile=b"x" * 70_000))


@pytest.mark.parametrize("make", [with_exif, with_fill_bytes, lambda: photo(8, 8)])
def test_truncated_jpegs_are_handled_at_every_byte(make: Any) -> None:
    data = make()
    pixels = data.index(b"\xff\xda")
    assert not any(has_only_pixels(data[:size]) for size in range(pixels))


@given(data=st.sampled_from([photo(16, 8), with_exif(), with_fill_bytes()]), changes=st.data())
def test_jpeg_with_only_pixels_has_no_metadata_in_pillow(data: bytes, changes: Any) -> None:
    changed = bytearray(data)
    for place in changes.draw(st.lists(st.integers(2, data.index(b"\xff\xda") + 3), max_size=4)):
        changed[place] = changes.draw(st.sampled_from([0, 1, 0xD8, 0xDA, 0xE1, 0xE2, 0xFF]))
    if has_only_pixels(bytes(changed)) and decode_jpeg(bytes(changed), "RGB") is not None:
        with PIL.Image.open(io.BytesIO(changed)) as image:
            assert not image.getexif()
            assert "icc_profile" not in image.info


@pytest.mark.parametrize("spec", ["rgb8", "pil"])
@given(data=st.data())
def test_damaged_jpegs_are_decoded_by_pillow(spec: str, data: st.DataObject) -> None:
    picture = bytearray(data.draw(st.sampled_from([photo(64, 48), with_exif()])))
    for _ in range(data.draw(st.integers(1, 4))):
        picture[data.draw(st.integers(2, len(picture) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(picture[: data.draw(st.integers(2, len(picture)))])

    def outcome() -> Any:
        try:
            return np.asarray(decoded(damaged, spec)).shape
        except Exception as error:  # noqa: BLE001  (compared)
            return type(error)

    with pytest.MonkeyPatch.context() as patch:
        quick = outcome()
        patch.setattr(module_of(ImageDecoder), "decode_jpeg", by_pillow)
        assert quick == outcome()


@pytest.mark.parametrize("spec", ["rgb8", "torchrgb8", "pil", "l8", "rgba8"])
@pytest.mark.parametrize("size", [(640, 480), (480, 640), (100, 900), (200, 100), (150, 150)])
@pytest.mark.parametrize("fast", [True, False])
def test_larger_image_is_scaled_down(
    spec: str, size: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(module_of(ImageDecoder), "decode_jpeg", by_pillow)
    made = decoded(photo(*size), spec, max_side=150)
    shape = np.asarray(made).shape
    height, width = shape[1:] if spec.startswith("torch") else shape[:2]
    scale = min(1, 150 / max(size))
    assert (width, height) == (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def test_scaled_decode_resembles_a_resized_image() -> None:
    data = photo(640, 480, quality=95)
    small = decoded(data, "rgb8", max_side=160).astype(int)
    whole = PIL.Image.fromarray(decoded(data, "rgb8")).resize((160, 120), PIL.Image.Resampling.BOX)
    assert np.abs(small - np.asarray(whole).astype(int)).mean() < 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(value=JSON, ascii_only=st.booleans(), encoding=st.sampled_from(["utf-8", "utf-16"]))
def test_json_values_equal_those_of_the_standard_library(
    value: Any, ascii_only: bool, encoding: str
) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode(encoding, "surrogatepass")
    try:
        expected = repr(json.loads(data))
    except ValueError as error:
        expected = repr(type(error))
    try:
        found = repr(parse_json(data))
    except ValueError as error:
        found = repr(type(error))
    assert found == expected


@pytest.mark.parametrize(
    "text",
    ["123456789012345678901234567890", "18446744073709551616", "-9223372036854775809", "NaN"],
)
def test_numbers_that_orjson_would_change_are_kept(text: str) -> None:
    assert repr(parse_json(text.encode())) == repr(json.loads(text))


@given(
    data=st.binary(max_size=12)
    | st.text(alphabet='{}[]",:0123456789eE.-+ntrufalse', max_size=12).map(str.encode)
)
def test_invalid_json_raises_the_same_error(data: bytes) -> None:
    def outcome(parse: Any) -> str:
        try:
            return repr(parse(data))
        except ValueError as error:
            return (
                type(error)
                .__name__.replace("JSONDecodeError", "ValueError")
                .replace("UnicodeDecodeError", "ValueError")
            )

    assert outcome(parse_json) == outcome(json.loads)
