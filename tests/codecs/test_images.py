from __future__ import annotations

import io
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import webdataset
from webdataset.autodecode import ImageHandler, imagespecs

import shardstream as ss
from shardstream.codecs import IMAGE_NAMES, ImageDecoder
from shardstream.errors import DecodeError, OptionError, SkipBudgetError
from shardstream.format import IMAGE_FORMATS
from shardstream.loader import to_tensor
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, flat, grouped, labels, picture, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def palette() -> bytes:
    stream = io.BytesIO()
    PIL.Image.open(io.BytesIO(picture())).quantize(16).save(stream, "PNG", transparency=3)
    return stream.getvalue()


PICTURES = {
    "rgb.png": picture("RGB"),
    "rgba.png": picture("RGBA"),
    "grey.png": picture("L"),
    "grey_alpha.png": picture("LA"),
    "palette.png": palette(),
    "rgb.jpg": picture("RGB", (31, 17), fmt="JPEG"),
    "grey.jpg": picture("L", fmt="JPEG"),
    "rgb.webp": picture("RGB", fmt="WEBP"),
    "rgb.bmp": picture("RGB", fmt="BMP"),
    "one_pixel.png": picture("RGB", (1, 1)),
}


@pytest.mark.filterwarnings(
    "ignore:.*turns a palette image into shades of grey:shardstream.errors.ImageWarning"
)
@pytest.mark.parametrize("name", sorted(PICTURES))
@pytest.mark.parametrize("spec", sorted(imagespecs))
def test_images_are_decoded_bitwise_as_in_webdataset(spec: str, name: str) -> None:
    data = PICTURES[name]
    ours = ImageDecoder(spec=spec, to_tensor=to_tensor)(data)
    theirs = ImageHandler(spec)(f".{name}", data)
    if isinstance(theirs, PIL.Image.Image):
        assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
        assert ours.tobytes() == theirs.tobytes()
        return
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_every_name_of_webdataset_is_known() -> None:
    assert set(IMAGE_NAMES) == imagespecs.keys() | {"raw", "mask"}


@pytest.mark.parametrize("spec", ["rgb8", "rgb", "l8", "torchrgb8", "torchl"])
def test_decoded_arrays_are_writable(spec: str) -> None:
    decoded = ImageDecoder(spec=spec, to_tensor=to_tensor)(PICTURES["rgb.jpg"])
    decoded += 1
    if isinstance(decoded, torch.Tensor):
        assert decoded.is_contiguous()


def test_unknown_image_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"no image decoder is called 'rgb16'.*pilrgb.*torchrgb8"):
        ImageDecoder(spec="rgb16")


@pytest.mark.parametrize("extension", ["eps", "ps", "wmf", "emf", "pdf", "svg"])
def test_formats_that_run_other_programs_are_not_decoded(extension: str) -> None:
    assert extension not in IMAGE_FORMATS


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's open file
def test_dataset_yields_the_same_samples_as_webdataset(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{i}", "jpg": PICTURES["rgb.jpg"], "seg.png": PICTURES["grey.png"], "cls": i}
        for i in range(5)
    ]
    folder = make_shards(tmp_path, samples=samples, per_shard=5)
    ours = list(ss.ShardDataset(folder).decode("torchrgb").to_tuple("jpg", "seg.png", "cls"))
    url = f"{folder}/000000.tar"
    pipeline: Any = webdataset.WebDataset(url, shardshuffle=False, empty_check=False)
    theirs = list(pipeline.decode("torchrgb").to_tuple("jpg", "seg.png", "cls"))
    assert len(ours) == len(theirs) == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
        assert mine[2] == other[2]


# -- bad images --------------------------------------------------------------------------------------------------------------

BAD = {3, 17, 18, 30}
DAMAGED = [b"", b"no image", PICTURES["rgb.jpg"][:200], PICTURES["rgb.png"][:100]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    good = picture("RGB", (4, 4))
    damaged = dict(zip(sorted(BAD), DAMAGED, strict=True))
    samples = [{"__key__": f"{i:02d}", "png": damaged.get(i, good), "cls": i} for i in range(40)]
    return make_shards(tmp_path_factory.mktemp("bad"), samples=samples, per_shard=7)


def open_loader(folder: str, *, threads: int = 0, num_workers: int = 0, **more: Any) -> Any:
    dataset = ss.ShardDataset(folder, **grouped(**more)).decode("rgb8", threads=threads)
    return ss.ShardLoader(dataset, batch_size=5, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("threads", [0, 2])
def test_bad_image_stops_the_epoch_by_default(folder: str, threads: int, num_workers: int) -> None:
    loader = open_loader(folder, threads=threads, num_workers=num_workers)
    with pytest.raises(DecodeError, match=r"000000\.tar, sample '03', field 'png'"):
        list(loader)


@pytest.mark.parametrize(
    ("num_workers", "threads", "on_error"),
    with_slow_rest(
        [(0, 2, "skip"), (2, 0, "warn"), (0, 0, ss.SkipBudget(samples=4)), (2, 2, "skip")],
        [0, 2],
        [0, 2],
        ["skip", "warn", ss.SkipBudget(samples=4)],
    ),
)
def test_bad_images_are_skipped_and_counted(
    folder: str, on_error: Any, threads: int, num_workers: int
) -> None:
    loader = open_loader(folder, on_error=on_error, threads=threads, num_workers=num_workers)
    batches = labels(loader)
    assert len(batches) == len(loader) == 8
    assert sorted(flat(batches)) == sorted(set(range(40)) - BAD)
    assert [len(batch) for batch in batches] == [4, 5, 5, 3, 5, 5, 4, 5]
    assert loader.skipped == {"DecodeError": 4}
    list(loader)
    assert loader.skipped == {"DecodeError": 4}  # of this epoch, not of all


def test_counts_grow_with_the_yielded_batches(folder: str) -> None:
    loader = open_loader(folder, on_error="skip", num_workers=2)
    counts = [sum(loader.skipped.values()) for _ in loader]
    assert counts == [1, 1, 1, 3, 3, 3, 4, 4]


@pytest.mark.parametrize(("on_error", "level"), [("warn", logging.WARNING), ("skip", logging.INFO)])
def test_each_bad_image_is_logged_with_its_position(
    folder: str, on_error: Any, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardstream"):
        list(open_loader(folder, on_error=on_error))
    records = [record for record in caplog.records if "skipped a sample" in record.message]
    assert [record.levelno for record in records] == [level] * 4
    assert "sample '03', field 'png'" in records[0].message


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_bad_image_over_the_budget_is_an_error(folder: str, num_workers: int) -> None:
    loader = open_loader(folder, on_error=ss.SkipBudget(samples=3), num_workers=num_workers)
    with pytest.raises(SkipBudgetError, match=r"4 bad samples, limit 3 .*sample '30'"):
        list(loader)


def test_ranks_have_equal_steps_with_skipped_samples(folder: str) -> None:
    steps = [
        len(labels(open_loader(folder, on_error="skip", placement=ss.Placement(rank, 3))))
        for rank in range(3)
    ]
    assert steps == [3, 3, 3]


def test_batch_with_only_bad_images_is_omitted(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{i:02d}", "png": b"bad" if 4 <= i < 8 else picture(), "cls": i}
        for i in range(14)
    ]
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples), on_error="skip")
    loader = ss.ShardLoader(dataset.decode("rgb8"), batch_size=4)
    states = [(batch["cls"].tolist(), loader.state_dict()["consumed"]) for batch in loader]
    assert states == [([0, 1, 2, 3], 4), ([8, 9, 10, 11], 12), ([12, 13], 0)]
    assert len(loader) == 4  # the step counts
    assert loader.skipped == {"DecodeError": 4}


def test_batch_with_only_bad_images_is_replaced_if_there_are_several_ranks(
    tmp_path: Path,
) -> None:
    samples = [
        {"__key__": f"{i:02d}", "png": b"bad" if 4 <= i < 8 else picture(), "cls": i}
        for i in range(16)
    ]
    folder = make_shards(tmp_path, samples=samples)
    runs = []
    for num_workers in (0, 2):
        place = ss.Placement(1, 2)
        dataset = ss.ShardDataset(folder, on_error="skip", placement=place).decode("rgb8")
        loader = ss.ShardLoader(dataset, batch_size=4, num_workers=num_workers)
        runs.append(labels(loader))
    assert runs[0] == runs[1]
    (substitute,), last = runs[0]
    assert substitute not in range(4, 8)
    assert last == [12, 13, 14, 15]


def bad_every_fifth(folder: Path, nsamples: int) -> str:
    samples = [
        {"__key__": f"{i:03d}", "png": b"bad" if i % 5 == 2 else picture(size=(2, 2)), "cls": i}
        for i in range(nsamples)
    ]
    return make_shards(folder, samples=samples)


def refilling(folder: str, rank: int, num_workers: int = 0, **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder, **grouped(shuffle=True, lanes=4, on_error=ss.SkipBudget(refill=True), placement=ss.Placement(rank, 2), **options))  # fmt: skip
    return ss.ShardLoader(dataset.decode("rgb8"), 4, num_workers=num_workers)


def test_refilled_batches_have_equal_size_and_no_repeated_sample(tmp_path: Path) -> None:
    folder = bad_every_fifth(tmp_path, 70)
    loaders = [refilling(folder, rank) for rank in (0, 1)]
    ranks = [labels(loader) for loader in loaders]
    assert [[len(batch) for batch in rank] for rank in ranks] == [[4] * 8 + [3]] * 2
    assert all(len(set(batch)) == len(batch) for rank in ranks for batch in rank)
    seen = Counter(label for rank in ranks for batch in rank for label in batch)
    assert set(seen) == {i for i in range(70) if i % 5 != 2}  # no sample is lost by it
    assert sum(loader.refilled for loader in loaders) == 14 == seen.total() - len(seen)
    # Replacements may be bad as well, and are counted too.
    assert all(loader.skipped["DecodeError"] >= loader.refilled for loader in loaders)
    assert ranks == [labels(refilling(folder, rank, num_workers=2)) for rank in (0, 1)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_draws_the_same_replacements(num_workers: int, tmp_path: Path) -> None:
    folder = bad_every_fifth(tmp_path, 70)
    full = labels(refilling(folder, 1))
    left = refilling(folder, 1, num_workers)
    take(left, 3)
    resumed = refilling(folder, 1, num_workers)
    resumed.load_state_dict(left.state_dict())
    assert labels(resumed) == full[3:]
    assert labels(resumed) != full  # another epoch has other samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_replacement_that_storage_cannot_read_is_an_error(num_workers: int, tmp_path: Path) -> None:
    """It is not counted as a bad sample: another one would take its place in silence."""
    samples = [{"__key__": f"{i:02d}", "cls": i} for i in range(40)]
    folder = make_shards(tmp_path, samples=samples, per_shard=40)
    tar = tmp_path / "000000.tar"

    def overwrite(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == b"2":
            tar.write_bytes(tar.read_bytes())
            raise ValueError("a bad sample")
        return sample

    dataset = ss.ShardDataset(folder, on_error=ss.SkipBudget(refill=True)).map(overwrite)
    loader = ss.ShardLoader(dataset, 4, num_workers=num_workers)
    with pytest.raises(ss.errors.ChangedError, match="overwritten after the dataset was opened"):
        list(loader)


def test_refill_without_effect_is_refused(tmp_path: Path) -> None:
    budget = ss.SkipBudget(refill=True)
    dataset = ss.ShardDataset(bad_every_fifth(tmp_path, 10), on_error=budget).decode("rgb8")
    with pytest.raises(ss.errors.OptionError, match="no effect with batch_size=None"):
        ss.ShardLoader(dataset, None)
    with pytest.raises(ss.errors.OptionError, match="no effect after steps that change"):
        ss.ShardLoader(dataset.shuffle(9), 4)


def test_refill_repeats_samples_of_the_batch_as_a_last_resort(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "png": b"bad" if i else picture(), "cls": i} for i in range(4)]
    budget = ss.SkipBudget(refill=True)
    folder = make_shards(tmp_path, samples=samples)
    loader = ss.ShardLoader(ss.ShardDataset(folder, on_error=budget).decode("rgb8"), 4)
    assert labels(loader) == [[0, 0, 0, 0]]


def test_mix_is_refilled_by_its_weights(tmp_path: Path) -> None:
    good = make_shards(
        tmp_path / "b",
        samples=[{"__key__": f"{i}", "png": picture(), "cls": 500 + i} for i in range(40)],
    )
    budget = ss.SkipBudget(refill=True)
    one = ss.ShardDataset(bad_every_fifth(tmp_path / "a", 40), on_error=budget).decode("rgb8")
    two = ss.ShardDataset(good, on_error=budget).decode("rgb8")
    loader = ss.ShardLoader(ss.mix({"a": one, "b": two}, {"a": 1.0, "b": 0.0}), 4)
    batches = labels(loader)
    assert {len(batch) for batch in batches} == {4}
    assert max(label for batch in batches for label in batch) < 40
    assert loader.refilled == 8


def test_rank_with_only_bad_samples_raises_if_there_are_several_ranks(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:02d}", "png": b"bad"} for i in range(8)]
    folder = make_shards(tmp_path, samples=samples)
    dataset = ss.ShardDataset(folder, on_error="skip", placement=ss.Placement(1, 2))
    with pytest.raises(ss.errors.SampleError, match="have fewer batches than the others"):
        list(ss.ShardLoader(dataset.decode("rgb8"), batch_size=4))


def test_resume_after_skips_is_exact(folder: str) -> None:
    full = labels(open_loader(folder, on_error="skip"))
    loader = open_loader(folder, on_error="skip", num_workers=2)
    for step, _ in enumerate(loader):
        if step == 3:
            break
    resumed = open_loader(folder, on_error="skip")
    resumed.load_state_dict(loader.state_dict())
    assert labels(resumed) == full[4:]


def test_image_with_too_many_pixels_is_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(PIL.Image.DecompressionBombError):
        ImageDecoder(spec="rgb8")(PICTURES["rgb.png"])
