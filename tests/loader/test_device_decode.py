"""decode(device=): workers send JPEG files, the main process makes the pixels; on the CPU with the same decoder as the workers."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.loader import ImageBatchDecoder, RingBuffer
from shardstream.pipeline import EncodedImage
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
CPU = torch.device("cpu")
COUNT = 20


def image_bytes(number: int, format_: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """Return an image file whose size and pixels depend on the number."""
    shape = (40 + number % 3 * 8, 48, 3)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).convert(mode).save(file, format_, **options)
    return file.getvalue()


def without_tables(jpeg: bytes) -> bytes:
    """Return a JPEG with a sound header that no decoder can decode: its quantisation tables are missing."""
    at = jpeg.index(b"\xff\xdb")
    while jpeg[at : at + 2] == b"\xff\xdb":
        jpeg = jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4]) :]
    return jpeg


# Files that a GPU does not decode, or not to the same pixels: the workers decode them.
OTHERS: dict[str, Callable[[int], bytes]] = {
    "png": lambda n: image_bytes(n, "PNG"),
    "grey": lambda n: image_bytes(n, mode="L"),
    "cmyk": lambda n: image_bytes(n, mode="CMYK"),
    "padded": lambda n: image_bytes(n) + bytes(3),
    "progressive": lambda n: image_bytes(n, progressive=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """JPEGs of three sizes, every fourth of another kind, with labels and masks."""
    others, samples = list(OTHERS.values()), []
    for number in range(COUNT):
        make = others[number // 4 % len(others)] if number % 4 == 3 else image_bytes
        mask = image_bytes(0, "PNG", mode="L")
        samples.append(
            {"__key__": f"{number:03d}", "jpg": make(number), "cls": number, "seg.png": mask}
        )
    return make_shards(tmp_path_factory.mktemp("images"), samples=samples, per_shard=7)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("spec", ["rgb8", "rgb", "torchrgb8", "torchrgb", "torch"])
def test_pixels_are_those_of_the_workers(spec: str, num_workers: int, folder: str) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True)
    options: dict[str, Any] = {"num_workers": num_workers, "device": "cpu"}
    loader = ss.ShardLoader(dataset.decode(spec, device="cpu"), 8, **options)
    singles = ss.ShardLoader(dataset.decode(spec), None, num_workers=num_workers)
    wanted = {sample["__key__"]: sample for sample in singles}
    seen = 0
    for batch in loader:
        assert isinstance(batch["jpg"], list)
        for key, image, mask in zip(batch["__key__"], batch["jpg"], batch["seg.png"], strict=True):
            expected = torch.as_tensor(wanted[key]["jpg"])
            assert image.dtype == expected.dtype
            assert torch.equal(image, expected)
            assert np.array_equal(mask, wanted[key]["seg.png"])
            seen += 1
    assert seen == COUNT


def test_images_of_one_size_are_a_list_too(tmp_path: Path) -> None:
    samples = [{"__key__": str(n), "jpg": image_bytes(3 * n)} for n in range(4)]
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples))
    (batch,) = ss.ShardLoader(dataset.decode("torchrgb8", device="cpu"), 4, device="cpu")
    assert torch.stack(batch["jpg"]).shape == (4, 3, 40, 48)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_single_items_tuples_and_own_collate_functions_are_decoded(
    num_workers: int, folder: str
) -> None:
    dataset = ss.ShardDataset(folder).decode("rgb8", device="cpu")
    options: dict[str, Any] = {"num_workers": num_workers, "device": "cpu"}
    plain = [sample["jpg"] for sample in ss.ShardDataset(folder).decode("rgb8")]
    pairs = dataset.to_tuple("jpg", "cls")
    for found in (
        [sample["jpg"] for sample in ss.ShardLoader(dataset, None, **options)],
        [one for images, _ in ss.ShardLoader(pairs, 8, **options) for one in images],
        [
            one
            for batch in ss.ShardLoader(pairs, 8, collate_fn=as_is, **options)
            for one, _ in batch
        ],
        [one for batch in ss.ShardLoader(pairs.batched(3), None, **options) for one in batch[0]],
    ):
        assert all(torch.equal(torch.as_tensor(a), b) for a, b in zip(plain, found, strict=True))


def as_is(items: list[Any]) -> list[Any]:
    return items


def test_fields_choose_their_decoder(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode(fields={"jpg": "torchrgb8", "seg.png": "mask"}, device="cpu")  # fmt: skip
    batch = next(iter(ss.ShardLoader(dataset, None, device="cpu")))
    assert batch["jpg"].shape == (3, 40, 48)
    assert isinstance(batch["seg.png"], np.ndarray)


def test_mix_decodes_all_parts(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode("rgb8", device="cpu")
    loader = ss.ShardLoader(ss.mix([dataset, dataset]), 8, device="cpu")
    assert sum(len(batch["jpg"]) for batch in loader) == 2 * COUNT
    nested = ss.mix([ss.mix([dataset, dataset]), ss.ShardDataset(folder).decode()])
    with pytest.raises(ss.OptionError, match="pass device='cpu' to the ShardLoader"):
        ss.ShardLoader(nested, 8)
    streams = ss.mix([dataset.slice(3), dataset])
    with pytest.raises(ss.OptionError, match="pass device='cpu' to the ShardLoader"):
        ss.ShardLoader(streams, 8)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_skip_files_that_they_see_to_be_bad(num_workers: int, tmp_path: Path) -> None:
    bad = [image_bytes(0)[:-500], b"no image", image_bytes(1, "PNG")[:-40]]
    samples = [{"__key__": f"{n:03d}", "jpg": image_bytes(n)} for n in range(10)]
    samples += [{"__key__": f"bad{n}", "jpg": data} for n, data in enumerate(bad)]
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples), on_error="skip")
    loader = ss.ShardLoader(
        dataset.decode("rgb8", device="cpu"), 4, num_workers=num_workers, device="cpu"
    )
    assert sum(len(batch["jpg"]) for batch in loader) == 10
    assert loader.skipped == {"DecodeError": 3}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_that_only_decoding_finds_is_an_error_of_its_batch(
    num_workers: int, tmp_path: Path
) -> None:
    samples = [{"__key__": f"{n:03d}", "jpg": image_bytes(n)} for n in range(10)]
    samples[6]["jpg"] = without_tables(image_bytes(6))
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples), on_error="skip")
    loader = ss.ShardLoader(
        dataset.decode("rgb8", device="cpu"),
        2,
        num_workers=num_workers,
        device="cpu",
        prefetch_to_device=4,
    )
    batches = iter(loader)
    assert [batch["__key__"] for batch in islice(batches, 3)] == [["000", "001"], ["002", "003"], ["004", "005"]]  # fmt: skip
    message = (
        r"cannot be decoded.*on_error can skip it in the worker.*\.tar, sample '006', field 'jpg'"
    )
    with pytest.raises(ss.DecodeError, match=message):
        next(batches)
    assert loader.batches_left == 2


def test_state_does_not_depend_on_the_device(folder: str) -> None:
    def loader(device: str | None) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder).decode("rgb8", device=device).select(_is_even)
        return ss.ShardLoader(dataset, None, device=device)

    first = loader("cpu")
    seen = [sample["cls"] for sample in islice(first, 4)]
    rest = loader(None)
    rest.load_state_dict(first.state_dict())
    assert seen + [sample["cls"] for sample in rest] == list(range(0, COUNT, 2))


def _is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


# -- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "options", "message"),
    [
        ({"device": "cpu"}, {}, "decodes images on 'cpu', the loader has device=None; pass device='cpu'"),
        ({"device": "cuda"}, {"device": "cpu"}, "decodes images on 'cuda', the loader has device='cpu'"),
        ({"device": "cpu"}, {"device": "meta"}, "the loader has device='meta'"),
        ({"device": "meta"}, {}, "images are decoded on 'cuda', or on 'cpu' in the main process"),
        ({"device": "cpu", "max_side": 8}, {}, "does not support max_side: the workers have no pixels"),
        ({"device": "cpu", "upright": True}, {}, "does not support upright"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(
    decode: dict[str, Any], options: dict[str, Any], message: str, folder: str
) -> None:
    with pytest.raises(ss.OptionError, match=message):
        ss.ShardLoader(ss.ShardDataset(folder).decode("rgb8", **decode), 8, **options)


@pytest.mark.parametrize("spec", ["l8", "pil", "raw", "mask", "rgba8"])
def test_other_image_names_are_refused(spec: str, folder: str) -> None:
    with pytest.raises(ss.OptionError, match=f"decode.device=. makes rgb8, .*, not '{spec}'"):
        ss.ShardDataset(folder).decode(spec, device="cpu")


def test_device_without_image_name_is_refused(folder: str) -> None:
    with pytest.raises(ss.OptionError, match="decodes nothing there; pass an image name"):
        ss.ShardDataset(folder).decode(device="cpu")


def test_readers_without_a_device_are_refused(folder: str) -> None:
    dataset = ss.ShardDataset(folder).decode("rgb8", device="cpu")
    with pytest.raises(ss.OptionError, match=r"use ShardLoader\(..., device='cpu'\)"):
        iter(dataset)
    with pytest.raises(ss.OptionError, match="a dataset without ShardLoader has only the files"):
        next(iter(DataLoader(dataset, 8)))
    with pytest.raises(ss.OptionError, match="a map-style dataset has only the files"):
        ss.ShardMapDataset(folder).decode("rgb8", device="cpu")


@pytest.mark.parametrize(
    ("step", "kind"),
    [(lambda sample: sample["jpg"].shape, AttributeError), (lambda s: np.asarray(s["jpg"]), TypeError)],
)  # fmt: skip
def test_steps_that_need_pixels_are_told(
    step: Callable[[Any], Any], kind: type[Exception], folder: str
) -> None:
    dataset = ss.ShardDataset(folder).decode("rgb8", device="cpu").map(step)
    with pytest.raises(kind, match="field 'jpg' of sample '000' in .* has no pixels before"):
        next(iter(ss.ShardLoader(dataset, 8, device="cpu")))


# -- the decoder of a device ---------------------------------------------------------------------------------------------------


def encoded(*contents: Any) -> list[EncodedImage]:
    return [
        EncodedImage(content=one, spec="torchrgb8", key=f"k{n}", shard="a.tar", field="jpg")
        for n, one in enumerate(contents)
    ]


def test_jpegs_are_decoded_together_and_other_pixels_only_moved() -> None:
    calls = []

    def decode(files: list[bytes]) -> list[torch.Tensor]:
        calls.append(files)
        return [torch.full((3, 1, 1), len(file), dtype=torch.uint8) for file in files]

    array = np.zeros((2, 2, 3), np.uint8)
    batch = {"a": encoded(b"x", array), "b": (encoded(b"yyy")[0], "text")}
    decoded, tensors = ImageBatchDecoder(CPU, decode)(batch)
    assert calls == [[b"x", b"yyy"]]
    assert [one.flatten()[0].item() for one in tensors] == [1, 0, 3]
    assert decoded["a"][0] is tensors[0]
    assert decoded["b"][0] is tensors[2]
    assert decoded["a"][1].shape == (3, 2, 2)
    assert decoded["b"][1] == "text"


def test_files_that_the_device_refuses_are_decoded_by_the_cpu_with_a_warning() -> None:
    def refuse(files: list[bytes]) -> list[torch.Tensor]:
        raise RuntimeError("not supported")

    decoder = ImageBatchDecoder(CPU, refuse)
    with pytest.warns(ss.ImageWarning, match="decodes none of 2 JPEGs .* not supported"):
        decoded, _ = decoder(encoded(image_bytes(0), image_bytes(1)))
    assert [tuple(one.shape) for one in decoded] == [(3, 40, 48), (3, 48, 48)]
    broken = encoded(image_bytes(0), without_tables(image_bytes(1)))
    with (
        pytest.warns(ss.ImageWarning, match="decodes none"),
        pytest.raises(ss.DecodeError, match="in a.tar, sample 'k1', field 'jpg'"),
    ):
        decoder(broken)


def test_lack_of_memory_is_not_taken_for_a_bad_file() -> None:
    def fail(files: list[bytes]) -> list[torch.Tensor]:
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        ImageBatchDecoder(CPU, fail)(encoded(image_bytes(0)))


def test_files_pass_through_the_ring_outside_the_pickle() -> None:
    ring, files = RingBuffer(), [bytes([n]) * 50_000 for n in range(3)]
    message = ring.pack({"jpg": encoded(*files, np.ones((1, 2, 3), np.uint8))}, 0)
    *_, (start, end) = message.places
    assert len(message.places) == 4
    assert end - start < 5000
    *images, pixels = ring.unpack(message)["jpg"]
    assert [one.content for one in images] == files
    assert (images[2].key, images[2].shard, images[2].field) == ("k2", "a.tar", "jpg")
    assert pixels.content.tolist() == [[[1, 1, 1], [1, 1, 1]]]


def test_16_bit_pictures_are_scaled_in_the_worker(tmp_path: Path) -> None:
    deep = np.full((4, 4), 40_000, np.uint16)
    with ss.ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "0", "png": deep})
    dataset = ss.ShardDataset(tmp_path).decode("rgb8", scale_16_bits=True, device="cpu")
    (batch,) = ss.ShardLoader(dataset, 1, num_workers=0, device="cpu")
    assert np.array_equal(np.asarray(batch["png"][0]), np.full((4, 4, 3), 156))
