"""Test that stored numbers of images are returned unchanged or refused: "raw", "mask" and 8-bit names."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.features
import PIL.Image
import PIL.ImageOps
import PIL.TiffImagePlugin
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.codecs import IMAGE_NAMES, ImageDecoder
from shardstream.errors import DecodeError, ImageWarning, OptionError
from shardstream.loader import to_tensor
from shardstream.testing import make_shards
from tests.image_files import netpbm_of, png_of, tiff_of
from tests.limits import module_of
from tests.small_datasets import picture

Array = np.ndarray[Any, Any]
EIGHT_BITS = [name for name in IMAGE_NAMES if name not in ("raw", "mask")]
RNG = np.random.default_rng(0)
WIDTH, HEIGHT = 13, 9


def decoded(data: bytes, spec: str, **options: Any) -> Any:
    return ImageDecoder(spec=spec, to_tensor=to_tensor, **options)(data)


def file_of(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def noise(dtype: str, *more: int) -> Array:
    if np.dtype(dtype).kind == "f":
        return RNG.normal(0, 1e5, (HEIGHT, WIDTH, *more)).astype(dtype)
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, (HEIGHT, WIDTH, *more), dtype, endpoint=True)


def palette_image(pixels: Array) -> PIL.Image.Image:
    image = PIL.Image.fromarray(pixels)
    image.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    assert image.mode == "P"
    return image


DEEP: dict[str, tuple[bytes, Array]] = {
    f"png {channels} of 16{' interlaced' * interlaced}": (png_of(p, interlaced=interlaced), p)
    for channels in (1, 2, 3, 4)
    for interlaced in (False, True)
    for p in [noise("uint16", *([channels] if channels > 1 else []))]
}
DEEP |= {
    f"tiff {dtype}{more} {order}": (tiff_of(p, order), p)
    for order in "<>"
    for dtype, *more in [("uint16",), ("int16",), ("int32",), ("float32",), ("int8",), ("uint16", 3), ("uint16", 4)]
    for p in [noise(dtype, *more)]  # type: ignore[arg-type]
    if (dtype, order) != ("int8", ">")
}  # fmt: skip
CMYK = noise("uint16", 4)
UINT32 = noise("uint32")
PGM, PGM10 = noise("uint16"), RNG.integers(0, 1024, (HEIGHT, WIDTH), np.uint16)
FLOATS = noise("float32")
DEEP |= {
    "tiff cmyk": (tiff_of(CMYK, "<", photometric=5), CMYK),
    "tiff uint32": (tiff_of(UINT32, "<"), UINT32),
    "tiff of Pillow": (file_of(PIL.Image.fromarray(PGM), "TIFF", compression="tiff_lzw"), PGM),
    "tiff float": (file_of(PIL.Image.fromarray(FLOATS), "TIFF"), FLOATS),
    "pgm": (netpbm_of("P5", PGM, 65535), PGM),
    "pgm of 10 bits": (netpbm_of("P5", PGM10, 1023), PGM10),
    "pgm of 10 bits in digits": (netpbm_of("P2", PGM10, 1023), PGM10),
    "jpeg 2000": (file_of(PIL.Image.fromarray(PGM), "JPEG2000"), PGM),
}

AVIF10 = base64.b64decode(  # 4 x 4 pixels of 10 bits, by libavif
    "AAAAIGZ0eXBhdmlmAAAAAGF2aWZtaWYxbWlhZk1BMUIAAADrbWV0YQAAAAAAAAAhaGRscgAAAAAAAAAAcGljdAAAAAAAAAAAAAAAAAAAAAAOcGl0bQAAAAAAAQAA"
    "AB5pbG9jAAAAAEQAAAEAAQAAAAEAAAETAAAAIAAAAChpaW5mAAAAAAABAAAAGmluZmUCAAAAAAEAAGF2MDFDb2xvcgAAAABqaXBycAAAAEtpcGNvAAAAFGlzcGUA"
    "AAAAAAAABAAAAAQAAAAQcGl4aQAAAAADCgoKAAAADGF2MUOBAEwAAAAAE2NvbHJuY2x4AAEADQAGgAAAABdpcG1hAAAAAAAAAAEAAQQBAoMEAAAAKG1kYXQSAAoI"
    "GAR9qgIaDQgyEhlHh4YhiaaaZoJAAJA/mwxgog=="
)

IDS = RNG.integers(0, 21, (HEIGHT, WIDTH), np.uint8)
BITS = IDS > 9
FEW, FEWER = IDS % 16, IDS % 4
GREYS = RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8)
SHALLOW: dict[str, tuple[bytes, Array]] = {
    "1 png": (file_of(PIL.Image.fromarray(BITS), "PNG"), BITS),
    "1 tiff": (file_of(PIL.Image.fromarray(BITS), "TIFF"), BITS),
    "1 bmp": (file_of(PIL.Image.fromarray(BITS), "BMP"), BITS),
    "1 pbm": (file_of(PIL.Image.fromarray(BITS), "PPM"), BITS),
    "L png": (file_of(PIL.Image.fromarray(GREYS), "PNG"), GREYS),
    "L tiff": (file_of(PIL.Image.fromarray(GREYS), "TIFF"), GREYS),
    "L pgm": (file_of(PIL.Image.fromarray(GREYS), "PPM"), GREYS),
    "L gif": (file_of(PIL.Image.fromarray(GREYS), "GIF", optimize=False), GREYS),
    "L bmp": (file_of(PIL.Image.fromarray(GREYS), "BMP"), GREYS),
    "L tga": (file_of(PIL.Image.fromarray(GREYS), "TGA"), GREYS),
    "L jp2": (file_of(PIL.Image.fromarray(GREYS), "JPEG2000"), GREYS),
    "2 bits png": (png_of(FEWER, bits=2), FEWER),
    "4 bits png": (png_of(FEW, bits=4), FEW),
    "pgm to 20": (netpbm_of("P5", IDS, 20), IDS),
    "pgm to 20 in digits": (netpbm_of("P2", IDS, 20), IDS),
    "white is zero tiff": (tiff_of(GREYS, "<", photometric=0), GREYS),
    "P png": (file_of(palette_image(IDS), "PNG"), IDS),
    "P png of 4 bits": (file_of(palette_image(FEW), "PNG", bits=4), FEW),
    "P png with a clear entry": (file_of(palette_image(IDS), "PNG", transparency=3), IDS),
    "P gif": (file_of(palette_image(IDS), "GIF", optimize=False), IDS),
    "P tiff": (file_of(palette_image(IDS), "TIFF"), IDS),
    "P bmp": (file_of(palette_image(IDS), "BMP"), IDS),
    "P tga": (file_of(palette_image(IDS), "TGA"), IDS),
}
COLOURS: dict[str, tuple[bytes, Array]] = {
    f"{form} {channels}": (file_of(PIL.Image.fromarray(p), form, **options), p)
    for form, options in [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True, "exact": True}), ("PPM", {}), ("BMP", {}), ("TGA", {}), ("JPEG2000", {})]
    for channels in (3, 4)
    for p in [noise("uint8", channels)]
    if (form, channels) not in [("PPM", 4), ("BMP", 4)]
}  # fmt: skip
TWO = noise("uint8", 2)
COLOURS["PNG 2"] = file_of(PIL.Image.fromarray(TWO, "LA"), "PNG"), TWO


def same(found: Any, expected: Array) -> None:
    assert found.dtype == expected.dtype
    assert found.dtype.isnative
    assert found.flags.writeable
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", [*DEEP, *SHALLOW, *COLOURS])
def test_raw_returns_the_stored_values(name: str) -> None:
    data, pixels = (DEEP | SHALLOW | COLOURS)[name]
    same(decoded(data, "raw"), pixels)


@pytest.mark.parametrize("name", [*DEEP])
def test_8_bit_names_refuse_values_they_would_clip(name: str) -> None:
    for spec in EIGHT_BITS:
        with pytest.raises(ValueError, match=r"(16|32|10|8)-bit .* do not fit .*'raw'"):
            decoded(DEEP[name][0], spec)


@pytest.mark.parametrize("name", [*SHALLOW])
def test_mask_returns_its_values(name: str) -> None:
    data, pixels = SHALLOW[name]
    same(decoded(data, "mask"), pixels.astype(np.uint8))


@pytest.mark.parametrize("name", [name for name in DEEP if DEEP[name][1].ndim == 2])
def test_mask_may_have_large_integers_but_no_fractions(name: str) -> None:
    data, pixels = DEEP[name]
    if pixels.dtype.kind == "f":
        with pytest.raises(ValueError, match="one whole number for each pixel, got float32"):
            decoded(data, "mask")
    else:
        same(decoded(data, "mask"), pixels)


def test_invalid_mask_is_refused() -> None:
    for data in (COLOURS["PNG 3"][0], COLOURS["PNG 2"][0], COLOURS["WEBP 3"][0]):
        with pytest.raises(ValueError, match=r"got uint8 of shape \(9, 13, [23]\)"):
            decoded(data, "mask")
    for mode in ("RGB", "L"):
        with pytest.raises(ValueError, match="a JPEG does not keep the numbers of a mask"):
            decoded(picture(mode, fmt="JPEG"), "mask")


@pytest.mark.parametrize(
    "data",
    [
        netpbm_of("P6", noise("uint16", 3), 65535),
        file_of(PIL.Image.new("LAB", (5, 4), (50, 20, 30)), "TIFF"),
        struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 70, 0, 0, 54, 40, 3, 2, 1, 16, 0, 16, 0, 0, 0, 0) + bytes(16),
    ],
    ids=["ppm of 16 bits", "lab", "bmp of 5 bits"],
)  # fmt: skip
def test_raw_refuses_images_that_pillow_changes(data: bytes) -> None:
    with pytest.raises(ValueError, match="Pillow changes .*pass your own decoder"):
        decoded(data, "raw")


@pytest.mark.skipif(not PIL.features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_is_decoded_if_pillow_supports_it(tmp_path: Path) -> None:
    data = file_of(PIL.Image.fromarray(noise("uint8", 3)), "AVIF", quality=100)
    folder = make_shards(tmp_path, samples=[{"__key__": "0", "avif": data}])
    (sample,) = ss.ShardDataset(folder).decode("rgb8")
    same(sample["avif"], np.asarray(PIL.Image.open(io.BytesIO(data))))
    for spec in ("rgb8", "pil"):
        with pytest.raises(ValueError, match="10-bit unsigned numbers do not fit"):
            decoded(AVIF10, spec)
    with pytest.raises(ValueError, match="Pillow changes 10-bit"):
        decoded(AVIF10, "raw")


def test_jpeg_2000_of_over_8_bits_is_refused() -> None:
    data = file_of(PIL.Image.fromarray(noise("uint8", 3)), "JPEG2000")
    place = data.index(b"\xff\x4f\xff\x51") + 42
    deep = bytearray(data)
    deep[place : place + 9 : 3] = [11] * 3  # each of three components has 12 bits
    with pytest.raises(ValueError, match="12-bit unsigned numbers do not fit 'rgb8'"):
        decoded(bytes(deep), "rgb8")
    with pytest.raises(ValueError, match="Pillow changes 12-bit"):
        decoded(bytes(deep), "raw")


# -- several frames ----------------------------------------------------------------------------------------------------------


def frames(form: str) -> bytes:
    first, *more = [PIL.Image.fromarray(noise("uint8", 3)) for _ in range(3)]
    return file_of(first, form, save_all=True, append_images=more)


@pytest.mark.parametrize("form", ["GIF", "TIFF", "WEBP", "PNG"])
def test_first_of_several_frames_is_decoded_with_a_warning(form: str) -> None:
    data = frames(form)
    with pytest.warns(ImageWarning, match="only the first frame of an image with several"):
        found = decoded(data, "rgb8")
    with PIL.Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))
    for spec in ("raw", "mask"):
        with pytest.raises(ValueError, match="several frames or pages"):
            decoded(data, spec)


# -- palettes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["l8", "l", "torchl8", "pill"])
def test_grey_palette_causes_a_warning(spec: str) -> None:
    with pytest.warns(ImageWarning, match="'mask' returns its stored numbers"):
        decoded(SHALLOW["P png"][0], spec)
    grey = PIL.Image.fromarray(GREYS)
    grey.putpalette(np.repeat(np.arange(256, dtype=np.uint8), 3).tobytes())
    np.testing.assert_array_equal(decoded(file_of(grey, "PNG"), "l8"), GREYS)


def test_palette_photo_is_decoded_to_colours() -> None:
    data = SHALLOW["P gif"][0]
    with PIL.Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decoded(data, "rgb8"), np.asarray(image.convert("RGB")))


# -- masks recognised by name ---------------------------------------------------------------------------------------------------


def sample_of(folder: Path, options: dict[str, Any], *specs: str, **fields: bytes) -> Any:
    shards = make_shards(folder, samples=[{"__key__": "0042", **fields}])
    (sample,) = ss.ShardDataset(shards).decode(*specs, **options)
    return sample


@pytest.mark.parametrize("data", ["P png", "1 png", "4 bits png"])
def test_photo_name_is_refused_for_a_mask_that_it_would_change(data: str, tmp_path: Path) -> None:
    fields = {"jpg": picture(fmt="JPEG"), "seg.png": SHALLOW[data][0]}
    with pytest.raises(DecodeError, match=r"would replace the numbers of a mask.*field 'seg\.png'"):
        sample_of(tmp_path / "a", {}, "rgb8", **fields)
    sample = sample_of(tmp_path / "b", {"fields": {"seg.png": "mask"}}, "rgb8", **fields)
    same(sample["seg.png"], SHALLOW[data][1].astype(np.uint8))
    assert sample["jpg"].shape == (9, 13, 3)
    sample = sample_of(tmp_path / "c", {"masks": []}, "rgb8", **fields)
    assert sample["seg.png"].shape == (9, 13, 3)


@pytest.mark.parametrize("spec", ["l8", "pill", "torchl"])
def test_field_named_with_grey_refuses_a_palette(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="to keep them use .*'mask'"):
        sample_of(tmp_path, {"fields": {"png": spec}}, png=SHALLOW["P png"][0])


LARGE_IDS = np.kron(RNG.choice([0, 7, 19], (30, 40)), np.ones((7, 5))).astype(np.uint8)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (["seg.png"], {}),
        (["left_mask2.png"], {}),
        (["jpg", "png"], {}),
        (["left.jpg", "left.tif"], {}),
        (["png"], {"masks": ["png"]}),
        (["png"], {"masks": "png"}),
    ],
)
@pytest.mark.parametrize("spec", ["l8", "rgb8", "pil", "mask", "raw"])
def test_masks_are_shrunk_without_new_values(
    fields: list[str], options: dict[str, Any], spec: str, tmp_path: Path
) -> None:
    photo = file_of(PIL.Image.fromarray(LARGE_IDS).convert("RGB"), "JPEG")
    kinds = {"jpg": photo, "png": file_of(PIL.Image.fromarray(LARGE_IDS), "PNG")}
    kinds["tif"] = file_of(PIL.Image.fromarray(LARGE_IDS), "TIFF")
    values = {name: kinds[name.rpartition(".")[2]] for name in fields}
    more = {"only": fields[-1:]} if spec in ("mask", "raw") else {}
    sample = sample_of(tmp_path, {"max_side": 50, **options, **more}, spec, **values)
    mask = np.asarray(sample[fields[-1]])
    assert mask.shape[:2] == (50, 48)
    assert set(np.unique(mask)) == {0, 7, 19}
    if not more and len(fields) == 2:
        assert np.asarray(sample[fields[0]]).shape[:2] == (50, 48)


@pytest.mark.parametrize("spec", ["mask", "raw"])
def test_mask_named_in_fields_has_the_size_of_its_photo(spec: str, tmp_path: Path) -> None:
    photo = file_of(PIL.Image.fromarray(LARGE_IDS).convert("RGB"), "JPEG")
    mask = file_of(palette_image(LARGE_IDS), "PNG")
    options: dict[str, Any] = {"fields": {"ids.png": spec}, "max_side": 50}
    sample = sample_of(tmp_path, options, "rgb8", **{"jpg": photo, "ids.png": mask})
    assert sample["jpg"].shape[:2] == sample["ids.png"].shape == (50, 48)
    assert set(np.unique(sample["ids.png"])) == {0, 7, 19}


def test_palettes_and_bilevel_images_are_shrunk_without_new_colours() -> None:
    image = palette_image(LARGE_IDS)
    colours = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
    small = decoded(file_of(image, "PNG"), "rgb8", max_side=50)
    np.testing.assert_array_equal(np.unique(small.reshape(-1, 3), axis=0), colours)
    bits = decoded(file_of(PIL.Image.fromarray(LARGE_IDS > 0), "PNG"), "l8", max_side=50)
    assert set(np.unique(bits)) == {0, 255}


def test_photo_is_shrunk_with_averaging() -> None:
    photo = PIL.Image.fromarray(LARGE_IDS)
    assert len(np.unique(decoded(file_of(photo, "PNG"), "l8", max_side=50))) > 3


def test_mask_and_photo_names_select_the_same_pixels() -> None:
    data = file_of(PIL.Image.fromarray(noise("uint8")), "PNG")
    for max_side in range(1, 14):
        chosen = decoded(data, "mask", max_side=max_side)
        np.testing.assert_array_equal(chosen, decoded(data, "l8", max_side=max_side, is_mask=True))


@given(width=st.integers(1, 300), height=st.integers(1, 300), max_side=st.integers(1, 100))
def test_photo_and_mask_of_equal_size_keep_equal_size(
    width: int, height: int, max_side: int
) -> None:
    mask = file_of(PIL.Image.new("L", (width, height)), "PNG")
    expected = decoded(mask, "mask", max_side=max_side).shape
    photo = file_of(PIL.Image.new("RGB", (width, height)), "JPEG")
    for spec in ("rgb8", "pil", "rgba8"):  # the last with Pillow
        assert np.asarray(decoded(photo, spec, max_side=max_side)).shape[:2] == expected


# -- EXIF orientation --------------------------------------------------------------------------------------------------------


def turned(form: str, orientation: int, **options: Any) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    shades = np.kron(noise("uint8", 3)[:3, :4], np.ones((8, 8, 1))).astype(np.uint8)
    return file_of(PIL.Image.fromarray(shades), form, exif=exif, **options)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("spec", ["rgb8", "torchrgb8", "l8", "pil", "raw"])
@pytest.mark.parametrize("fast", [True, False])
def test_pixels_come_as_stored_or_upright(
    spec: str, form: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(module_of(ImageDecoder), "decode_jpeg", lambda *_, **__: None)
    for orientation in range(1, 9):
        check_orientation(form, orientation, spec)


def check_orientation(form: str, orientation: int, spec: str) -> None:
    data = turned(form, orientation)
    with PIL.Image.open(io.BytesIO(data)) as image:
        mode = "L" if spec == "l8" else "RGB"
        stored, upright = image.convert(mode), PIL.ImageOps.exif_transpose(image).convert(mode)
    for wanted, options in ((stored, {}), (upright, {"upright": True})):
        found = decoded(data, spec, **options)
        if spec == "torchrgb8":
            assert found.is_contiguous()
            found = found.permute(1, 2, 0)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
        if spec == "pil":
            assert found.getexif().get(0x0112, 1) == (1 if options else orientation)
        small = np.asarray(decoded(data, spec, max_side=16, **options))
        assert small.shape[1 if spec == "torchrgb8" else 0] == wanted.height // 2


def test_tiff_orientation_is_applied_once() -> None:
    pixels = noise("uint8", 3)
    info = PIL.TiffImagePlugin.ImageFileDirectory_v2()
    info[0x0112] = 6
    data = file_of(PIL.Image.fromarray(pixels), "TIFF", tiffinfo=info)
    for spec in ("rgb8", "raw", "pil"):
        for upright in (False, True):
            found = np.asarray(decoded(data, spec, upright=upright))
            np.testing.assert_array_equal(found, np.rot90(pixels, -1))


@given(orientation=st.integers(0, 65_535))
def test_invalid_orientation_changes_nothing(orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = file_of(PIL.Image.new("RGB", (8, 4), (9, 9, 9)), "JPEG", exif=exif)
    expected = (8, 4, 3) if 5 <= orientation <= 8 else (4, 8, 3)
    assert decoded(data, "rgb8", upright=True).shape == expected


# -- through a dataset -------------------------------------------------------------------------------------------------------


def test_16_bit_images_pass_through_a_loader(tmp_path: Path) -> None:
    depth, ids = noise("uint16"), noise("uint8")
    samples = [{"__key__": f"{i}", "depth.png": file_of(PIL.Image.fromarray(depth), "PNG"),
                "seg.png": file_of(palette_image(ids), "PNG")} for i in range(4)]  # fmt: skip
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples))
    fields: dict[str, Any] = {"depth.png": "raw", "seg.png": "mask"}
    loader = ss.ShardLoader(dataset.decode(fields=fields), batch_size=4, num_workers=1)
    (batch,) = loader
    assert torch.equal(batch["depth.png"][3].long(), torch.from_numpy(depth.astype(np.int64)))
    assert torch.equal(batch["seg.png"][0], torch.from_numpy(ids))


def test_bit_depth_error_names_sample_field_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=r"16-bit.*'raw'.*sample '0042', field 'png'") as caught:
        sample_of(tmp_path, {}, "rgb8", png=DEEP["png 3 of 16"][0])
    assert "on_error" not in str(caught.value)  # all such samples would be skipped


@pytest.mark.parametrize(
    ("handlers", "options", "message"),
    [
        ((None,), {}, r"not None; decode\(\) alone decodes text"),
        ((3,), {}, "not 3"),
        (
            ("sound",),
            {},
            "no decoder is called 'sound'; available: .*mask.*rgb8.*torch_audio.*fields=",
        ),
        (("rgb8", "l8"), {}, r"takes one image name, not \['rgb8', 'l8'\]"),
        (
            ("audio", ss.codecs.AudioDecoder(mono=True)),
            {},
            r"takes one audio name, not \['audio', Audio",
        ),
        ((), {"fields": {"png": None}}, "not None"),
        ((), {"fields": {"wav": "sound"}}, "no decoder is called 'sound'"),
    ],
)
def test_unknown_decoder_is_refused_with_the_known_ones(
    handlers: tuple[Any, ...], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=1))
    decode: Callable[..., Any] = dataset.decode
    with pytest.raises(OptionError, match=message):
        decode(*handlers, **options)
