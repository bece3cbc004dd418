"""Test that plain JPEGs are JPEGs for Pillow, too, and that usual photos are accepted as plain."""

from __future__ import annotations

import io
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardstream.codecs import is_plain_jpeg


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 5).save(out, "JPEG", **options)
    return out.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6
KINDS = [
    jpeg(),
    jpeg("L"),
    jpeg("CMYK"),
    jpeg(progressive=True),
    jpeg(optimize=True, quality=100, subsampling=0),
    jpeg(exif=EXIF, comment=b"on holiday", icc_profile=b"x" * 70_000, restart_marker_blocks=2),
]


@pytest.mark.parametrize("data", KINDS)
def test_camera_jpegs_are_plain(data: bytes) -> None:
    assert is_plain_jpeg(data, 40 * 30)
    assert is_plain_jpeg(data, None)


@pytest.mark.parametrize("data", KINDS)
def test_jpeg_over_the_pixel_limit_is_not_plain(data: bytes) -> None:
    assert not is_plain_jpeg(data, 40 * 30 - 1)


@pytest.mark.parametrize("data", KINDS)
def test_truncated_jpeg_is_not_plain(data: bytes) -> None:
    pixels = data.index(b"\xff\xda")
    assert not any(is_plain_jpeg(data[:size], None) for size in range(0, pixels, 7))


@given(
    data=st.sampled_from(KINDS),
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=4),
    size=st.integers(0, 2000) | st.none(),
)
def test_pillow_opens_all_plain_jpegs(
    data: bytes, changes: list[tuple[int, int]], size: int | None
) -> None:
    changed = bytearray(data[:size])
    for place, value in changes:
        if place < len(changed):
            changed[place] = value
    if is_plain_jpeg(bytes(changed), None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                with Image.open(io.BytesIO(changed)) as image:
                    assert image.format in ("JPEG", "MPO")
            finally:
                Image.MAX_IMAGE_PIXELS = limit


@given(st.binary(max_size=300) | st.binary(max_size=300).map(b"\xff\xd8\xff".__add__))
def test_other_files_are_not_plain(data: bytes) -> None:
    assert not is_plain_jpeg(data, None) or b"\xff\xda" in data
