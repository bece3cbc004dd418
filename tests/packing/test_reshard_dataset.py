"""Test that `reshard` writes datasets with their steps: the same samples as they yield, with any executor, or an error."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardstream as ss
from shardstream.cli import main
from tests.pairs import with_slow_rest

ROOT = Path(__file__).parent.parent.parent
COUNT = 60


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write 60 small JPEGs with class, number and a text, in shards of 7."""
    folder = tmp_path_factory.mktemp("dataset") / "images"
    random = np.random.default_rng(0)
    with ss.ShardWriter(folder, max_samples=7, columns="__key__,cls") as writer:
        for number in range(COUNT):
            pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            fields = {"jpg": pixels, "cls": number % 3, "json": {"n": number}, "txt": f"t{number}"}
            writer.write({"__key__": f"{number:03d}", **fields})
    (folder / "classes.json").write_text('["a", "b", "c"]')
    return str(folder)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write scores of the same keys in another order."""
    folder = tmp_path_factory.mktemp("dataset") / "scores"
    with ss.ShardWriter(folder, max_samples=9, columns="__key__") as writer:
        for number in np.random.default_rng(1).permutation(COUNT).tolist():
            writer.write({"__key__": f"{number:03d}", "score.cls": number * 2})
    return str(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fields_of(samples: Iterable[Any]) -> list[dict[str, Any]]:
    return [{name: one[name] for name in one if name != "__url__"} for one in samples]


def add_text(sample: dict[str, Any], text: str) -> dict[str, Any]:
    return {**sample, "new.txt": f"{text} {sample['__key__']}".encode()}


def is_even(sample: dict[str, Any]) -> bool:
    return int(sample["__key__"]) % 2 == 0


def add_noise(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise.txt": str(generator.integers(1 << 30)).encode()}


def joined(images: str, scores: str) -> Any:
    first = ss.ShardDataset(images, subset=[*range(50, 5, -1)])
    return ss.join(first, {scores: {"s.cls": "score.cls"}}).map(partial(add_text, text="joined"))


def noise_of_epoch(images: str, _: str) -> Any:
    dataset = ss.ShardDataset(images).map(add_noise, rng=True)
    dataset.set_epoch(3)
    return dataset


DATASETS: dict[str, Callable[[str, str], Any]] = {
    "fields": lambda images, _: ss.ShardDataset(images, fields=("jpg", "cls")).rename(image="jpg"),
    "where": lambda images, _: ss.ShardDataset(images, where="cls = 1"),
    "steps": lambda images, _: (
        ss.ShardDataset(images, seed=4)
        .select(is_even)
        .map(partial(add_text, text="a"), threads=2)
        .map(add_noise, rng=True)
    ),
    "by number": lambda images, _: ss.ShardDataset(images).by_number()[50:3:-2],
    "join": joined,
    "epoch": noise_of_epoch,
    "decode": lambda images, _: ss.ShardDataset(images).decode(only=("json", "cls")),
}


@pytest.mark.parametrize(
    "name", with_slow_rest([name for name in DATASETS if name not in ("where", "fields")], DATASETS)
)
def test_samples_are_those_of_the_dataset_with_any_executor(
    name: str, images: str, scores: str, tmp_path: Path, two_processes: ProcessPoolExecutor
) -> None:
    make = partial(DATASETS[name], images, scores)
    limits: dict[str, Any] = {"max_samples": 8}
    ss.reshard(make(), tmp_path / "one", **limits)
    expected = list(make())
    if name != "decode":
        assert fields_of(ss.ShardDataset(str(tmp_path / "one")).by_number()) == fields_of(expected)
    raw = {one["__key__"]: one.get("jpg") for one in ss.ShardDataset(images)}
    for sample in ss.ShardDataset(str(tmp_path / "one")):
        assert sample.get("jpg", raw[sample["__key__"]]) == raw[sample["__key__"]]
    assert ss.ShardDataset(str(tmp_path / "one")).classes == ("a", "b", "c")
    executor = ss.tasks.FuturesExecutor(two_processes)
    ss.reshard(make(), tmp_path / "two", executor=executor, **limits)
    ss.reshard(make(), tmp_path / "shuffled", seed=3, **limits)
    ss.reshard(make(), tmp_path / "shuffled 2", seed=3, executor=executor, **limits)
    assert files_of(tmp_path / "shuffled") == files_of(tmp_path / "shuffled 2")
    dataset = make()
    for part in (2, 1):
        ss.reshard(
            dataset, tmp_path / "parts", executor=ss.tasks.Parts(part, 2), version=1, **limits
        )
        next(iter(dataset))  # a used dataset is the same source
        dataset.set_epoch(3 * (name == "epoch"))
    ss.merge(tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_class_names_are_those_of_the_dataset_whose_numbers_are_written(
    images: str, tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("texts", "labels")]
    for folder, field in zip(folders, ("md", "cls"), strict=True):
        with ss.ShardWriter(folder, columns="__key__") as writer:
            for number in range(COUNT):
                writer.write({"__key__": f"{number:03d}", field: b"1"})
    (tmp_path / "labels" / "classes.json").write_text('["x", "y"]')
    joined = ss.join(*folders)
    assert joined.classes == ("x", "y")
    assert ss.join(folders[0], {images: ["txt"]}).classes is None
    ss.reshard(joined, tmp_path / "joined")
    ss.reshard(ss.join({images: ["jpg"]}, {folders[1]: ["cls"]}), tmp_path / "added")
    ss.reshard(ss.join(images, {folders[1]: {"x.cls": "cls"}}), tmp_path / "both")
    names = [ss.ShardDataset(str(tmp_path / one)).classes for one in ("joined", "added", "both")]
    assert names == [("x", "y"), ("x", "y"), ("a", "b", "c")]


def test_condition_in_the_command_chooses_samples(images: str, scores: str, tmp_path: Path) -> None:
    options = ["--where", "cls = 2", "--add", f"{scores}:score.cls", "--shuffle"]
    assert main(["reshard", images, str(tmp_path / "command"), *options]) == 0
    chosen = ss.ShardDataset(images, where="cls = 2")
    joined = ss.join(chosen, {scores: ["score.cls"]})
    ss.reshard(joined, tmp_path / "python", seed=0)
    assert files_of(tmp_path / "command") == files_of(tmp_path / "python")
    found = {one["__key__"]: one["score.cls"] for one in ss.ShardDataset(str(tmp_path / "command"))}
    assert found == {f"{n:03d}": b"%d" % (2 * n) for n in range(COUNT) if n % 3 == 2}


def test_decoded_pixels_are_encoded_as_a_writer_does(images: str, tmp_path: Path) -> None:
    decoded = ss.ShardDataset(images).decode("rgb8")
    report = ss.reshard(decoded, tmp_path / "again")
    assert any("jpg: pictures were decoded and are encoded again" in one for one in report.warnings)
    assert not ss.reshard(ss.ShardDataset(images), tmp_path / "copied").warnings
    classes = decoded.rename(keep=False, **{"n.cls": "cls"})
    assert not ss.reshard(classes, tmp_path / "classes").warnings
    (pixels, again, copied) = (
        next(iter(ss.ShardDataset(url)))["jpg"]
        for url in (images, str(tmp_path / "again"), str(tmp_path / "copied"))
    )
    assert copied == pixels != again
    with ss.ShardWriter(tmp_path / "written") as writer, Image.open(io.BytesIO(pixels)) as image:
        writer.write({"__key__": "a", "jpg": np.asarray(image)})
    assert next(iter(ss.ShardDataset(str(tmp_path / "written"))))["jpg"] == again


def test_png_that_loses_its_transparency_is_named_in_a_warning(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "images") as writer:
        pixels = np.zeros((4, 4, 4), dtype=np.uint8)
        writer.write({"__key__": "a", "png": pixels, "seg.png": pixels[..., 0]})
    dataset = ss.ShardDataset(str(tmp_path / "images")).decode("rgb8")
    (warning,) = ss.reshard(dataset, tmp_path / "again").warnings
    assert warning.startswith("png: pictures were decoded and are encoded again, which may lose")
    masks = dataset.rename(keep=False, **{"seg.png": "seg.png"})
    assert not ss.reshard(masks, tmp_path / "masks").warnings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda url: ss.ShardDataset(url, shuffle=True), "the dataset is shuffled, .*; leave shuffle= out, and pass seed="),
        (lambda url: ss.ShardDataset(url, weights=[1] * COUNT), "weights= draws samples several times"),
        (lambda url: ss.ShardDataset(url, on_error="skip"), "on_error= would leave bad samples out"),
        (lambda url: ss.ShardDataset(url, read=ss.ReadOptions(index="ignore")), "read without an index, .*; run 'shardstream index'"),
        (lambda url: ss.ShardDataset(url, placement=ss.Placement(1, 2)), r"executor=ss\.tasks\.Parts\(part, of\)"),
        (lambda url: ss.mix([ss.ShardDataset(url), ss.ShardDataset(url)]), "a mix has no order of its own"),
        (lambda url: ss.ShardDataset(url).batched(4), "the step Batched needs several samples.*batch_size="),
        (lambda url: ss.ShardDataset(url).shuffle(10), "the step Shuffle needs several samples"),
        (lambda url: ss.ShardDataset(url).slice(10), "the step Slice needs several samples"),
        (lambda url: ss.ShardDataset(url).to_tuple("jpg", "cls"), "the step ToTuple returns tuples"),
        (lambda url: ss.ObjectDataset(url, label=None), "loose files are not shards; write them with ss.pack"),
        (lambda url: ss.ShardDataset(url).map(lambda sample: sample["cls"]), "returned bytes, not a dict"),
        (lambda url: ss.ShardDataset(url).select(lambda sample: "no" in sample), "no sample is left"),
        (lambda url: ss.ShardDataset(url).map(next), "TypeError: .*in map"),
        (lambda url: ss.ShardDataset(url).decode("rgb8").map(lambda sample: {**sample, "x": 1}), "takes bytes, not int"),
        (lambda _url: 5, "takes URLs of shards, or a dataset of shardstream, not a int"),
        (lambda url: [ss.ShardDataset(url)], r"a list holds URLs of shards, not ShardDataset; pass ss.join\(first, second\)"),
    ],
    ids=range(17),
)  # fmt: skip
def test_dataset_that_cannot_be_cut_is_refused(
    make: Any, message: str, images: str, tmp_path: Path
) -> None:
    if "loose files" in message:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "a.txt").write_text("a")
        images = str(tmp_path / "files")
    with pytest.raises(ss.ShardStreamError, match=message):
        ss.reshard(make(images), tmp_path / "new")
    assert not (tmp_path / "new" / "index.json").exists()


def test_step_that_ends_early_is_an_error(images: str, tmp_path: Path) -> None:
    def end(sample: dict[str, Any]) -> dict[str, Any]:
        raise StopIteration

    cases: tuple[dict[str, Any], ...] = ({}, {"batch_size": 7})
    for options in cases:
        with pytest.raises(ss.errors.SourceError, match="StopIteration"):
            ss.reshard(images, tmp_path / "new", map=end, overwrite=True, **options)


def test_steps_with_other_values_are_another_job(images: str, tmp_path: Path) -> None:
    for part, text, seed in ((1, "a", 0), (2, "b", 0), (2, "a", 1)):
        dataset = ss.ShardDataset(images, seed=seed).map(partial(add_text, text=text))
        write = partial(ss.reshard, dataset, tmp_path / "new", max_samples=8, version=1)
        if part == 1:
            write(executor=ss.tasks.Parts(1, 2))
            continue
        with pytest.raises(ss.errors.OptionError, match=r"steps.* was .*, now "):
            write(executor=ss.tasks.Parts(2, 2))


def write_a_part(images: str, dest: str, part: str) -> None:
    dataset = ss.ShardDataset(images).decode(only=("cls", "json"), masks=("a.png", "b.png"))
    dataset = dataset.rename(True, **{"label.json": "json"}).select(is_even)
    dataset = dataset.map(partial(add_text, text="a"))
    ss.reshard(dataset, dest, executor=ss.tasks.Parts.parse(part), max_samples=20, version=1)


def test_equal_steps_are_one_job_in_all_processes(images: str, tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    write_a_part(images, new, "1/2")
    code = (
        "import sys; from tests.packing.test_reshard_dataset import *; write_a_part(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, images, new, "2/2"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    assert ss.merge(new).samples == COUNT // 2


def test_folder_that_is_read_is_not_written(images: str, scores: str) -> None:
    with pytest.raises(ss.errors.OptionError, match="write elsewhere"):
        ss.reshard(ss.join(images, scores), scores, overwrite=True)


def test_tasks_of_a_dataset_hold_what_their_samples_need(images: str, tmp_path: Path) -> None:
    sizes = []

    class Measures:
        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for task in tasks:
                sizes.append(len(pickle.dumps(task)))
                done(task, task.run())

    dataset = ss.ShardDataset(images, subset=[*reversed(range(COUNT))])
    ss.reshard(dataset, tmp_path / "new", max_samples=5, executor=Measures())
    assert len(sizes) == COUNT // 5
    assert max(sizes) < 4_000


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", ["join", "where", "fields"])
def test_ranges_of_one_process_share_catalogs_and_may_travel_twice(
    name: str, seed: int | None, images: str, scores: str, tmp_path: Path
) -> None:
    class Travels:
        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for task in tasks:
                once = pickle.loads(pickle.dumps(task))  # noqa: S301  (made in the same line)
                twice = pickle.loads(pickle.dumps(once))  # noqa: S301  (made in the same line)
                done(task, twice.run())

    dataset = DATASETS[name](images, scores)
    ss.reshard(dataset, tmp_path / "here", max_samples=8, seed=seed)
    ss.reshard(dataset, tmp_path / "there", max_samples=8, seed=seed, executor=Travels())
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


def test_a_mask_that_is_written_without_its_photo_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = np.zeros((4, 4), np.uint8)
    with ss.ShardWriter(tmp_path / "images") as writer:
        writer.write({"__key__": "a", "jpg": pixels, "png": pixels})
    images = ss.ShardDataset(str(tmp_path / "images"))
    to_seg: dict[str, Any] = {"seg.png": "png"}
    made = {
        "fields": ss.reshard(images, tmp_path / "fields", fields=["png"]),
        "rename": ss.reshard(images.rename(image="jpg"), tmp_path / "rename"),
    }
    for name, report in made.items():
        assert [one.partition(",")[0] for one in report.warnings] == [
            "png: a mask by the photo beside it"
        ], name
    assert not ss.reshard(images, tmp_path / "whole").warnings
    assert not ss.reshard(images.rename(keep=False, **to_seg), tmp_path / "seg").warnings
    (sample,) = ss.ShardDataset(images.samples.url_of(0), fields=["png"])
    alone = pytest.warns(UserWarning, match="png: a mask by the photo beside it")
    with ss.ShardWriter(tmp_path / "written") as writer, alone:
        writer.write(sample)
    with ss.ShardWriter(tmp_path / "named") as writer:
        writer.write({"__key__": "a", "seg.png": sample["png"]})
    photos, others = (str(tmp_path / name) for name in ("images", "named"))
    caplog.clear()
    ss.replace_fields(photos, add={photos: ["png"]})
    ss.replace_fields(others, add={photos: {"m_mask.png": "png"}})
    assert "a mask by the photo" not in caplog.text
    ss.replace_fields(others, add={photos: ["png"]})
    assert "png: a mask by the photo beside it" in caplog.text
