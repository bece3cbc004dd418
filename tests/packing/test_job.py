"""Packing jobs: order, splits, processes, skips, and publishing after a failure."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardstream.cli import main
from shardstream.errors import (
    ChangedError,
    OptionError,
    SourceError,
    StorageError,
    UnfinishedError,
)
from shardstream.format import iter_samples
from shardstream.packing import (
    FileRef,
    PackRequest,
    Progress,
    Record,
    RecordEncoder,
    assign_splits,
    chunked,
    index,
    pack,
    progress_lines,
    reshard,
    shuffled_order,
    split_counts,
    verify,
)
from shardstream.storage import LocalFolder, Storage, locate_shards, publish_bytes
from shardstream.tasks import LocalExecutor
from tests.limits import module_of, set_limits

CLASSES = ("ant", "bee", "cat")
_SLOW_S = 600  # of a working process while another one is killed


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """90 JPEGs of 3 classes; the shade is the number in the name."""
    root = tmp_path / "photos"
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(30):
            shade = np.full((12, 16), label * 30 + i, np.uint8)
            Image.fromarray(shade).save(root / name / f"{i:02d}.jpeg", quality=95)
    return root


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """Return all samples of a published dataset, in order."""
    found = []
    for shard in locate_shards(str(folder), Storage()).shards:
        data = Path(shard.url).read_bytes()
        found += [s for _, s in iter_samples(lambda at, n, d=data: d[at : at + n], shard=shard.url)]  # type: ignore[misc]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_folder_of_classes_is_packed(photos: Path, tmp_path: Path) -> None:
    report = pack(photos, tmp_path / "out", max_samples=40, name="insects")
    assert (report.samples, report.shards, report.skipped) == (90, 3, ())
    assert report.total_bytes == sum(
        path.stat().st_size for path in (tmp_path / "out").glob("*.tar")
    )
    assert report.seconds > 0
    assert json.loads((tmp_path / "out" / "classes.json").read_bytes()) == list(CLASSES)
    samples = samples_of(tmp_path / "out")
    files = {path.read_bytes(): path.parent.name for path in photos.rglob("*.jpeg")}
    assert all(files[sample["jpg"]] == CLASSES[int(sample["cls"])] for sample in samples)
    assert len({sample["jpg"] for sample in samples}) == len(files) == 90
    first_labels = {int(sample["cls"]) for sample in samples[:15]}
    assert first_labels == {0, 1, 2}, "shuffled by default"
    keys = [sample["__key__"] for sample in samples]
    assert sorted(keys) == sorted(f"{name}/{i:02d}" for name in CLASSES for i in range(30))


def test_relative_paths_are_accepted(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pack("photos/", "out/", shuffle=False, key="{path}")
    pack("./photos", "other/{shard}.tar", shuffle=False, key="{path}")
    assert [s["__key__"] for s in samples_of(tmp_path / "out")][:2] == ["ant/00", "ant/01"]
    assert (tmp_path / "out/000000.tar").read_bytes() == (tmp_path / "other/0.tar").read_bytes()
    assert photos.exists()


def test_order_of_the_source_can_be_kept(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", shuffle=False, key="{class}/{stem}")
    keys = [sample["__key__"] for sample in samples_of(tmp_path / "out")]
    assert keys == sorted(keys)
    assert keys[31] == "bee/01"


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_input_gives_equal_bytes_for_any_number_of_processes(
    processes: int, photos: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "max_samples": 20,
        "split": {"train": 0.8, "val": 0.2},
        "max_side": 8,
        "image_format": "webp",
    }
    pack(photos, tmp_path / "a", **options)
    pack(photos, tmp_path / "b", processes=processes, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert {*samples_of(tmp_path / "a" / "val")[0]} == {"__key__", "__url__", "webp", "cls"}


class _Growing:
    """Samples whose number is another one than their length says."""

    def __init__(self, length: int, samples: int) -> None:
        self.length, self.samples = length, samples

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"cls": number} for number in range(self.samples))


@pytest.mark.parametrize(("length", "found"), [(20, "fewer"), (10, "more")])
def test_samples_of_another_number_than_was_split_are_an_error(
    length: int, found: str, tmp_path: Path
) -> None:
    with pytest.raises(ChangedError, match=f"the source has {found} records than when"):
        pack(_Growing(length, 15), tmp_path, split={"a": 0.5, "b": 0.5})
    assert not list(tmp_path.rglob("index.json"))


def test_splits_are_exact_disjoint_and_complete(photos: Path, tmp_path: Path) -> None:
    report = pack(
        photos, tmp_path / "out-{shard:02d}.tar", split={"train": 0.75, "val": 0.15, "test": 0.1}
    )
    assert [(s.name, s.samples) for s in report.splits] == [("train", 68), ("val", 13), ("test", 9)]
    assert [s.url for s in report.splits] == [
        f"{tmp_path}/{name}" for name in ("train", "val", "test")
    ]
    assert (tmp_path / "val" / "out-00.tar").exists()
    keys = [
        {s["__key__"] for s in samples_of(tmp_path / name)} for name in ("train", "val", "test")
    ]
    assert sum(map(len, keys)) == len(set().union(*keys)) == 90
    again = pack(
        photos, tmp_path / "again", split={"train": 0.75, "val": 0.15, "test": 0.1}, seed=1
    )
    assert again.samples == 90
    assert {s["__key__"] for s in samples_of(tmp_path / "again" / "val")} != keys[1]


@given(st.integers(3, 500), st.lists(st.integers(1, 20), min_size=2, max_size=3), st.integers(0, 3))
def test_every_record_goes_to_one_split(count: int, parts: list[int], seed: int) -> None:
    fractions = {f"s{i}": part / sum(parts) for i, part in enumerate(parts)}
    try:
        counts = split_counts(count, fractions)
    except OptionError as error:
        assert "would be empty" in str(error)  # noqa: PT017
        return
    assigned = assign_splits(count, fractions, seed=seed)
    assert np.bincount(assigned, minlength=len(parts)).tolist() == list(counts.values())
    assert all(abs(counts[name] - fractions[name] * count) < 1 for name in fractions)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"train": 0.9, "val": 0.2}, r"add up to 1\.1, not 1"),
        ({"train": 1.0, "val": 0.0}, "must be between 0 and 1"),
        ({"../train": 0.5, "val": 0.5}, "must have only letters"),
        ({"train": 0.999, "val": 0.001}, "'val' would be empty: the source has 90 samples"),
    ],
)
def test_invalid_splits_are_refused(
    split: Mapping[str, float], message: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        pack(photos, tmp_path / "out", split=split)
    assert not (tmp_path / "out").exists()


def order(count: int, *, seed: int, purpose: str) -> list[int]:
    found = list(shuffled_order(count, seed=seed, purpose=purpose))
    return [number for some in found for number in some.tolist()]


def test_packing_order_is_pinned() -> None:
    assert order(8, seed=0, purpose="order") == [7, 3, 1, 4, 6, 2, 0, 5]
    assert sorted(order(1000, seed=3, purpose="split")) == list(range(1000))


def test_table_with_errors_raises_or_skips(photos: Path, tmp_path: Path) -> None:
    rows = ["path,label", "ant/00.jpeg,1", "no/such.jpeg,2", "bee/00.jpeg,many", "bee/01.jpeg,3"]
    (photos / "t.csv").write_text("\n".join(rows))
    options: dict[str, Any] = {"fields": {"jpg": "path", "cls": "label"}}
    with pytest.raises(SourceError, match=r"no/such\.jpeg.*t\.csv, row 2"):
        pack(photos / "t.csv", tmp_path / "out", **options)
    assert not (tmp_path / "out" / "index.json").exists()
    report = pack(photos / "t.csv", tmp_path / "out", on_error="skip", **options)
    assert report.samples == 2
    assert [skip.where.rsplit("/", 1)[-1] for skip in report.skipped] == [
        "t.csv, row 2",
        "t.csv, row 3",
    ]
    assert "whole number" in report.skipped[1].reason
    assert [sample["cls"] for sample in samples_of(tmp_path / "out")] == [b"1", b"3"]


@pytest.mark.parametrize("options", [{}, {"max_side": 8}])
def test_empty_image_is_an_error_that_names_it(
    options: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    (photos / "bee" / "07.jpeg").write_bytes(b"")
    with pytest.raises(SourceError, match=r"image is empty.*bee/07\.jpeg"):
        pack(photos, tmp_path / "out", **options)


def test_broken_image_names_its_file_when_images_are_changed(photos: Path, tmp_path: Path) -> None:
    (photos / "bee" / "07.jpeg").write_bytes(b"no image")
    with pytest.raises(SourceError, match=r"not a readable image.*bee/07\.jpeg"):
        pack(photos, tmp_path / "out", max_side=8, processes=2)


def cut_image(photos: Path) -> Path:
    path = photos / "bee" / "07.jpeg"
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    return path


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="here"),
        pytest.param({"processes": 2}, id="processes", marks=pytest.mark.slow),
        pytest.param({"executor": LocalExecutor()}, id="parts"),
    ],
)
def test_check_finds_images_whose_pixels_are_cut(
    options: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    cut = cut_image(photos)
    assert pack(photos, tmp_path / "unchecked").samples == 90
    with pytest.raises(SourceError, match=r"cannot be decoded \(.*truncated.*bee/07\.jpeg"):
        pack(photos, tmp_path / "refused", check=True)
    report = pack(photos, tmp_path / "out", check=True, on_error="skip", **options)
    assert (report.samples, [skip.where for skip in report.skipped]) == (89, [str(cut)])
    assert not verify(str(tmp_path / "out"), decode=True).problems


def test_pack_with_a_check_keeps_no_shards_of_one_without(photos: Path, tmp_path: Path) -> None:
    rows = ["path", *(f"ant/{i:02d}.jpeg" for i in range(30)), "no/such.jpeg"]
    (photos / "t.csv").write_text("\n".join(rows))
    options: dict[str, Any] = {"fields": {"jpg": "path"}, "max_samples": 1}
    with pytest.raises(SourceError, match="not found"):
        pack(photos / "t.csv", tmp_path / "out", **options)
    with pytest.raises(OptionError, match="check was None, now True"):
        pack(photos / "t.csv", tmp_path / "out", check=True, **options)


def test_command_checks_and_skips_images_that_cannot_be_decoded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut_image(photos)
    command = ["pack", str(photos), str(tmp_path / "out"), "--check"]
    assert main(command) == 1
    assert main([*command, "--skip-errors"]) == 0
    assert "07.jpeg" in capsys.readouterr().err


def test_everything_skipped_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"no sample is left.*2 were skipped, the first: .*whole number"
    ):
        pack([{"cls": "a"}, {"cls": "b"}], tmp_path / "out", on_error="skip")


def test_empty_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the source is empty"):
        pack([], tmp_path / "out")
    (tmp_path / "rows.csv").write_text("a,b\n")
    for executor in (None, LocalExecutor()):
        with pytest.raises(SourceError, match="the source is empty"):
            pack(tmp_path / "rows.csv", tmp_path / "out", executor=executor)


def test_python_iterables_are_packed(tmp_path: Path) -> None:
    pack(({"txt": f"{i}"} for i in range(9)), tmp_path / "out")
    assert [sample["txt"] for sample in samples_of(tmp_path / "out")] == [
        b"%d" % i for i in range(9)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"processes": 2}, {"shuffle": True}, {"split": {"a": 0.5, "b": 0.5}}], ids=str
)
@pytest.mark.parametrize("kind", ["png", "picture.png", "npy", "bin", "json", "pt"])
def test_a_generator_may_fill_one_buffer_for_all_samples(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    pixels = np.zeros((4, 4), np.uint8)
    picture = Image.fromarray(pixels.copy())
    number: dict[str, Any] = {"n": 0}
    tensor = torch.zeros(3, dtype=torch.uint8)
    raw = bytearray(3)
    values = {"png": pixels, "picture.png": picture, "npy": pixels, "bin": memoryview(raw)}
    values |= {"json": number, "pt": tensor}

    def refill() -> Iterator[dict[str, Any]]:
        sample: dict[str, Any] = {}
        for i in range(6):
            pixels[:] = i
            picture.putpixel((0, 0), i)
            number["n"] = i
            tensor[:] = i
            raw[:] = bytes([i] * 3)
            sample["cls"], sample[kind] = i, values[kind]
            yield sample

    pack(refill(), tmp_path / "out", **options)
    read: dict[str, Callable[[bytes], Any]] = {"bin": lambda data: data[0]}
    read |= {"npy": lambda data: int(np.load(io.BytesIO(data))[0, 0])}
    read |= {"json": lambda data: json.loads(data)["n"]}
    read |= {"pt": lambda data: int(torch.load(io.BytesIO(data))[0])}
    found = {
        int(sample["cls"]): read.get(kind, _first_pixel)(sample[kind])
        for name in options.get("split", ("",))
        for sample in samples_of(tmp_path / "out" / name)
    }
    assert found == {i: i for i in range(6)}


def _first_pixel(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).getpixel((0, 0))


def test_the_bytes_in_a_chunk_count_pixels(tmp_path: Path) -> None:
    made: list[int] = []

    def frames() -> Iterator[dict[str, Any]]:
        for i in range(40):
            made.append(i)
            yield {"png": np.zeros((1024, 4096), np.uint8)}

    written: list[int] = []
    pack(frames(), tmp_path / "out", progress=lambda _: written.append(len(made)))
    assert written[0] <= 5  # 4 MiB each, of at most 16 MiB


def test_images_from_python_are_made_smaller_and_converted(tmp_path: Path) -> None:
    picture = Image.new("RGB", (64, 32))
    samples: list[dict[str, Any]] = [{"png": picture}, {"png": np.zeros((32, 64), np.uint8)}]
    pack(samples, tmp_path / "out", max_side=16, image_format="jpg")
    assert [Image.open(io.BytesIO(one["jpg"])).size for one in samples_of(tmp_path / "out")] == [
        (16, 8)
    ] * 2


def test_tars_are_packed_again(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "a", max_samples=20)
    report = pack(tmp_path / "a", tmp_path / "b", max_samples=50, split={"x": 0.5, "y": 0.5})
    assert [split.samples for split in report.splits] == [45, 45]
    before = {s["__key__"]: (s["jpg"], s["cls"]) for s in samples_of(tmp_path / "a")}
    after = samples_of(tmp_path / "b" / "x") + samples_of(tmp_path / "b" / "y")
    assert {s["__key__"]: (s["jpg"], s["cls"]) for s in after} == before
    with pytest.raises(OptionError, match="overwritten while they are read"):
        pack(tmp_path / "a", tmp_path / "a", overwrite=True)
    with pytest.raises(OptionError, match="tars cannot be shuffled"):
        pack(tmp_path / "a", tmp_path / "c", shuffle=True)


def test_progress_is_a_line_every_30_s() -> None:
    times, lines = iter([0.0, 29.0, 30.0, 59.0, 61.0]), list[str]()
    update = progress_lines("verifying", lines.append, clock=lambda: next(times))
    for done in (1, 2, 3, 4):
        update(Progress(done * 10, 0, done << 20, None, total_bytes=4 << 20))
    assert [line.split()[:5] for line in lines] == [
        ["verifying:", "50", "%", "0", "shards"],
        ["verifying:", "100", "%", "0", "shards"],
    ]


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_jobs_of_python_log_their_progress_at_info(
    level: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_limits(monkeypatch, Progress, LINE_EVERY_S=0)
    caplog.set_level(level, logger="shardstream")
    pack(photos, tmp_path / "a")
    pack(photos, tmp_path / "b", executor=LocalExecutor())
    reshard(tmp_path / "a", tmp_path / "c")
    index(tmp_path / "a")
    verify(tmp_path / "a")
    names = {line.partition(":")[0] for line in caplog.messages if "  90 samples  " in line}
    jobs = {"pack a", "pack b", "reshard c", "index a"}
    logged = {f"{job[:-1]}{tmp_path}/{job[-1]}" for job in jobs} | {"verify"}
    assert names == (logged if level == "INFO" else set())


@pytest.mark.parametrize("executor", [None, LocalExecutor()], ids=["here", "executor"])
@pytest.mark.parametrize("max_side", [None, 8])
def test_progress_counts_up_to_the_end(
    executor: LocalExecutor | None, max_side: int | None, photos: Path, tmp_path: Path
) -> None:
    found: list[Progress] = []
    options: dict[str, Any] = {"max_samples": 50, "max_side": max_side, "executor": executor}
    report = pack(photos, tmp_path / "out", progress=found.append, **options)
    assert found[-1][:2] == (90, 0)
    assert (found[-1].shards, found[-1].failures) == (2, 0)
    # Samples are counted when they are written, before the two blocks at the end of each tar.
    ends = 2 * 1024 * (executor is None)
    assert found[-1].size_bytes == report.total_bytes - ends
    assert {progress.total for progress in found} == {90}
    assert [progress.samples for progress in found] == sorted(
        progress.samples for progress in found
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes must be 1"),
        ({"on_error": "ignore"}, "'raise' or 'skip'"),
        ({"quality": 0}, "quality"),
        ({"quality": 80}, "has no effect, since images are packed as they are"),
        ({"quality": 80, "image_format": "png", "max_side": 1}, "has no effect on png"),
        ({"processes": 2, "executor": LocalExecutor()}, "has no effect with an executor"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, Any], message: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        pack(photos, tmp_path / "out", **options)


class _Deadly(RecordEncoder):
    def encode(self, records: Any) -> Any:
        if any(record.key == "bee/10" for record in records):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(records)


@pytest.mark.slow
def test_dead_process_raises_without_hanging(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of(PackRequest), "RecordEncoder", _Deadly)
    with pytest.raises(SourceError, match="a process that encodes died"):
        pack(photos, tmp_path / "out", processes=2, max_samples=5, max_side=64)
    assert not (tmp_path / "out" / "index.json").exists()
    assert not list((tmp_path / "out").glob("*.part-*"))


class _DeadlyAmongSlow(RecordEncoder):
    def encode(self, records: Any) -> Any:
        if records[0].key == "ant/00":
            time.sleep(_SLOW_S)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_dead_process_raises_without_waiting_for_others(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of(PackRequest), "RecordEncoder", _DeadlyAmongSlow)
    begin = time.monotonic()
    with pytest.raises(SourceError, match="a process that encodes died"):
        pack(photos, tmp_path / "out", processes=2, shuffle=False, max_side=64)
    assert time.monotonic() - begin < _SLOW_S / 2


def test_copied_files_are_not_sent_through_processes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of(RecordEncoder), "ProcessPool", None)
    assert pack(photos, tmp_path / "out", processes=2).samples > 0


@pytest.mark.usefixtures("s3_env")
def test_pack_from_s3_to_s3(bucket: str, photos: Path, tmp_path: Path) -> None:
    for path in photos.rglob("*1.jpeg"):
        publish_bytes(Storage(), f"{bucket}/in/{path.relative_to(photos)}", path.read_bytes())
    report = pack(f"{bucket}/in/", f"{bucket}/out/{{shard:03d}}.tar", max_samples=5, processes=2)
    assert (report.samples, report.shards) == (9, 2)
    names = [file.url.rsplit("/", 1)[-1] for file in Storage().find(f"{bucket}/out")]
    assert names == [
        "000.tar",
        "000.tar.idx",
        "001.tar",
        "001.tar.idx",
        "classes.json",
        "index.json",
    ]
    back = pack(f"{bucket}/out/", tmp_path / "back")
    assert back.samples == 9
    with pytest.raises(StorageError, match="the bucket '.*' does not exist; create it"):
        pack(photos, "s3://no-such-bucket-here/x", max_samples=5)


FULL_DISK = """
import resource, signal, sys
from shardstream.packing import pack
from tests.limits import module_of, module_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
pack([{"bin": bytes(100_000 if i < 20 else 400_000)} for i in range(40)], sys.argv[1], max_samples=10)
"""


def test_failed_publication_of_a_split_publishes_none_and_can_be_resumed(
    photos: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_samples": 20, "split": {"a": 0.4, "b": 0.3, "c": 0.3}}
    pack(photos, tmp_path / "clean", **options)
    for split in ("a", "b", "c"):
        dest = tmp_path / f"without-{split}"
        blocking_path = dest / split / "index.json" / "x"
        blocking_path.mkdir(parents=True)
        with pytest.raises(StorageError, match=r"directory.*index\.json"):
            pack(photos, dest, **options)
        assert [path for path in dest.glob("*/index.json") if path.is_file()] == []
        for folder in {"a", "b", "c"} - {split}:
            with pytest.raises(UnfinishedError):
                locate_shards(str(dest / folder), Storage())
        blocking_path.rmdir()
        blocking_path.parent.rmdir()
        assert pack(photos, dest, **options).kept == 6
        assert contents(dest) == contents(tmp_path / "clean")


def test_split_that_cannot_be_unpublished_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store of one split fails after its manifest was written, and refuses all later requests."""
    (tmp_path / "t.csv").write_text("n\n" + "1\n" * 10)
    dest = tmp_path / "out"
    (dest / "a" / "index.json" / "x").mkdir(parents=True)

    def fail(_folder: LocalFolder, name: str) -> None:
        raise StorageError("out of reach", shard=name)

    monkeypatch.setattr(LocalFolder, "remove", fail)
    command = ["pack", str(tmp_path / "t.csv"), str(dest), "--split", "a=0.5,b=0.5"]
    assert main(command) == 1
    shown_text = capsys.readouterr().err
    assert f"{dest}/b is published already" in shown_text
    assert "run the same pack again" in shown_text
    assert (dest / "b" / "index.json").is_file()
    monkeypatch.undo()
    (dest / "a" / "index.json" / "x").rmdir()
    (dest / "a" / "index.json").rmdir()
    assert main(command) == 0
    assert sum(shard.nsamples or 0 for shard in locate_shards([f"{dest}/a", f"{dest}/b"], Storage()).shards) == 10  # fmt: skip


def test_full_disk_publishes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, tmp_path / "out"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "StorageError: the disk is full" in done.stderr
    assert "index.json" not in contents(tmp_path / "out")
    assert not [name for name in contents(tmp_path / "out") if ".part-" in name]


def test_chunks_are_bounded_by_bytes() -> None:
    records = [Record("a", {"bin": FileRef("x", 10 << 20)}, "x")] * 5
    assert [len(chunk) for _, chunk in chunked(enumerate(records))] == [2, 2, 1]


def test_packing_does_not_import_torch() -> None:
    code = "import sys, shardstream.packing, shardstream.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_error_ends_the_thread_that_publishes_parts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"txt": "a"}, {"txt": "b"}, {"txt": object()}]
    with pytest.raises(SourceError) as failed:
        pack(rows, tmp_path, max_samples=1)
    assert failed.value.__traceback__ is not None  # which keeps what the job had opened
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("shardstream-end")]
