"""`pack` with an executor: the same dataset whoever runs the parts, and for unchanged files that of a pack in one process."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import shardstream as ss
from shardstream.errors import UnfinishedError
from shardstream.format import decode_manifest, is_records_name
from shardstream.packing import assign_splits
from shardstream.storage import JOURNAL_NAME, LocalFolder
from shardstream.tasks import JSON, Task
from tests.limits import set_limits
from tests.pairs import with_slow_rest

CLASSES = ("ant", "bee", "cat")


def jpeg(seed: int, side: int = 24) -> bytes:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (side, side + seed % 7, 3), dtype=np.uint8
    )
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 photos in three class folders."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(60):
        path = folder / CLASSES[number % 3] / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(number))
    return str(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("caption", "score"))
        rows.writerows((f"caption {number}", number % 5) for number in range(50))
    return str(path)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    with ss.ShardWriter(folder, max_samples=9) as writer:
        for number in range(40):
            writer.write({"__key__": f"s{number:03d}", "bin": bytes(100 + number)})
    return str(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "photos": ("photos", {"max_bytes": "30kB"}),
    "shuffled": ("photos", {"max_samples": 17, "seed": 5}),
    "smaller": ("photos", {"max_samples": 17, "max_side": 16}),
    "split": ("photos", {"max_samples": 8, "split": {"train": 0.75, "val": 0.25}}),
    "smaller split": (
        "photos",
        {"max_samples": 8, "max_side": 16, "split": {"a": 0.75, "b": 0.25}},
    ),
    "rows": ("table", {"max_samples": 8, "fields": {"txt": "caption", "cls": "score"}}),
    "tars": ("tars", {"max_samples": 7}),
    "keys": ("tars", {"max_samples": 7, "key": "{index:08d}"}),
}


@pytest.mark.parametrize("job", with_slow_rest([job for job in JOBS if job != "split"], JOBS))
def test_parts_write_the_dataset_of_one_process(
    job: str, tmp_path: Path, request: pytest.FixtureRequest, two_processes: ProcessPoolExecutor
) -> None:
    fixture, options = JOBS[job]
    source = request.getfixturevalue(fixture)
    plain = ss.pack(source, tmp_path / "plain", **options)
    own = job == "split"
    executor = (
        ss.tasks.LocalExecutor(processes=2) if own else ss.tasks.FuturesExecutor(two_processes)
    )
    report = ss.pack(source, tmp_path / "two", executor=executor, **options)
    for part in (2, 3, 1):
        ss.pack(source, tmp_path / "parts", executor=ss.tasks.Parts(part, 3), **options)
    merged = ss.merge(tmp_path / "parts")
    assert sorted(split.name for split in merged.splits) == sorted(options.get("split", [""]))
    assert (merged.samples, merged.fields) == (plain.samples, plain.fields)
    assert max(plain.fields.values()) == plain.samples
    assert files_of(tmp_path / "two") == files_of(tmp_path / "parts")
    assert (report.samples, report.fields, report.files) == (
        plain.samples,
        plain.fields,
        plain.files,
    )
    assert [split.name for split in report.splits] == [split.name for split in plain.splits]
    # Sizes of photos that are made smaller are not known before; here, no shard is full by bytes.
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "two")
    for split in report.splits:
        assert not ss.verify(split.url).problems


class OrderedExecutor:
    """Runs some tasks here, in a given order, and stops before the others."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        listed = list(tasks)
        self.names = [task.name for task in listed]
        for number in self.numbers:
            done(listed[number], listed[number].run())
        if len(self.numbers) < len(listed):
            raise StoppedError


@pytest.mark.parametrize("kind", ["tars", "table", "parquet"])
def test_parts_in_any_order_read_the_records_of_one_pass(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Parts begin inside tars and row groups, some where the one before has ended, and some are there already."""
    options: dict[str, Any] = {"max_samples": 4}
    if kind == "parquet":
        captions = pa.table({"caption": [f"caption {number}" for number in range(40)]})
        source = str(tmp_path / "rows.parquet")
        parquet.write_table(captions, source, row_group_size=7)
    else:
        source = request.getfixturevalue(kind)
    if kind != "tars":
        options |= {"fields": {"txt": "caption"}, "max_samples": 4 if kind == "parquet" else 5}
    ss.pack(source, tmp_path / "plain", **options)
    with pytest.raises(StoppedError):
        ss.pack(source, tmp_path / "out", executor=OrderedExecutor(4, 5, 8, 2), **options)
    shutil.copytree(tmp_path / "out", tmp_path / "streamed")
    others = OrderedExecutor(6, 7, 0, 1, 4, 5, 9, 3, 2, 8)
    for name, executor in (("out", others), ("streamed", None)):
        report = ss.pack(source, tmp_path / name, executor=executor, **options)
        assert report.kept == 4
        assert files_of(tmp_path / name) == files_of(tmp_path / "plain")


def test_finished_parts_are_kept_as_they_are(table: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_samples": 5, "fields": {"txt": "caption"}}
    with pytest.raises(StoppedError):
        ss.pack(table, tmp_path, executor=OrderedExecutor(0, 9), **options)
    with pytest.raises(
        UnfinishedError, match="8 of 10 tasks are not done: number 1, 2, 3, 4, 5, 6, 7, 8; run"
    ):
        ss.merge(tmp_path)
    (tmp_path / ".shardstream-pack-part-000009.json").unlink()
    with pytest.raises(
        UnfinishedError, match="9 of 10 .* number 1, 2, 3, 4, 5, 6, 7, 8 and 1 more;"
    ):
        ss.merge(tmp_path)
    inode = (tmp_path / "000000.tar").stat().st_ino
    executor = OrderedExecutor(*range(10))
    report = ss.pack(table, tmp_path, executor=executor, **options)
    assert (tmp_path / "000000.tar").stat().st_ino == inode
    assert executor.names == [f"part {number} of {tmp_path}" for number in range(10)]
    tars = [path.stat().st_size for path in tmp_path.glob("*.tar")]
    assert (report.kept, report.shards, report.total_bytes) == (1, 10, sum(tars))


def test_no_split_is_published_while_parts_of_another_are_missing(
    photos: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = JOBS["split"][1]
    ss.pack(photos, tmp_path, executor=ss.tasks.Parts(1, 2), **options)
    with pytest.raises(UnfinishedError, match="part 2/2"):
        ss.merge(tmp_path)
    ss.pack(photos, tmp_path, executor=ss.tasks.Parts(2, 2), **options)
    (tmp_path / "val" / ".shardstream-pack-part-000000.json").unlink()
    with pytest.raises(UnfinishedError, match="/val"):
        ss.merge(tmp_path)
    assert not list(tmp_path.rglob("index.json"))


def test_no_split_is_published_where_another_was_not_begun(photos: str, tmp_path: Path) -> None:
    ss.pack(photos, tmp_path, executor=ss.tasks.Parts(1, 1), **JOBS["split"][1])
    (tmp_path / ".DS_Store").write_bytes(b"")  # hides no split
    kept = (tmp_path / "val").rename(tmp_path.parent / f"{tmp_path.name}-val")
    with pytest.raises(UnfinishedError, match="split val has been run"):
        ss.merge(tmp_path)
    assert not list(tmp_path.rglob("index.json"))
    kept.rename(tmp_path / "val")
    with pytest.raises(ss.errors.OptionError, match="merge the folder above"):
        ss.merge(tmp_path / "val")
    splits = ss.merge(tmp_path).splits
    assert [one.url.rpartition("/")[2] for one in splits] == ["train", "val"]


def test_merge_leaves_other_jobs_in_the_folders_beside_the_splits_alone(
    photos: str, tmp_path: Path
) -> None:
    ss.pack(photos, tmp_path, executor=ss.tasks.Parts(1, 1), **JOBS["split"][1])
    ss.pack(
        photos, tmp_path / "other", max_samples=8, executor=ss.tasks.Parts(1, 2)
    )  # its other part is missing
    writer = ss.ShardWriter(tmp_path / "mine" / "{shard:06d}.tar")
    writer.write({"txt": "a"})
    assert {split.name for split in ss.merge(tmp_path).splits} == {"train", "val"}
    with pytest.raises(UnfinishedError, match="part 2/2"):
        ss.merge(tmp_path / "other")
    writer.close()


@pytest.mark.parametrize("is_published", [False, True])
def test_merge_of_a_folder_with_a_job_of_its_own_leaves_the_splits_under_it_alone(
    table: str, photos: str, tmp_path: Path, *, is_published: bool
) -> None:
    every = ss.tasks.Parts(1, 1)
    ss.pack(photos, tmp_path, split={"a": 0.5, "b": 0.5}, executor=every)
    ss.pack(table, tmp_path, fields={"txt": "caption"}, executor=None if is_published else every)
    if is_published:
        with pytest.raises(ss.errors.OptionError, match="published already"):
            ss.merge(tmp_path)
    else:
        report = ss.merge(tmp_path)
        assert (report.samples, [split.url for split in report.splits]) == (50, [str(tmp_path)])
        assert 0 < report.seconds < 600
    assert published_in(tmp_path) == {tmp_path.name}


@pytest.mark.parametrize(
    ("key", "field"),
    [("k" * 96, "txt"), ("k" * 97, "txt"), ("k" * 95, "txt"), ("\xe9k", "txt"), ("k", "\xe9"), ("a", "f" * 98), ("a", "f" * 99)],
)  # fmt: skip
def test_the_sizes_of_long_names_are_known_before(key: str, field: str, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "in" / f"{number}").mkdir(parents=True)
        (tmp_path / "in" / f"{number}" / f"{key}.{field}").write_bytes(bytes(512 * 3))
    options: dict[str, Any] = {"key": key[:-1] + "{index:d}"}
    one = ss.pack(tmp_path / "in", tmp_path / "one", max_samples=1, **options)
    size = (tmp_path / "one" / "000000.tar").stat().st_size
    two = 2 * size - 1024  # the end of a tar is two blocks
    report = ss.pack(tmp_path / "in", tmp_path / "two", max_bytes=two, **options)
    assert (one.shards, report.shards, report.total_bytes) == (4, 2, 2 * two)
    assert ss.pack(tmp_path / "in", tmp_path / "four", max_bytes=two - 1, **options).shards == 4


def test_merge_warns_of_a_split_that_numbers_its_classes_differently(
    photos: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ss.pack(photos, tmp_path / "val", executor=ss.tasks.Parts(1, 1))
    ss.pack(photos, tmp_path / "train", classes=[*reversed(CLASSES)])
    ss.merge(tmp_path / "val")
    assert "class numbers differ among splits" in caplog.text


def test_exact_sizes_fill_shards_up_to_the_limit(photos: str, tmp_path: Path) -> None:
    ss.pack(photos, tmp_path / "new", max_bytes="30kB", executor=ss.tasks.LocalExecutor())
    sizes = [path.stat().st_size for path in sorted((tmp_path / "new").glob("*.tar"))]
    assert max(sizes) <= 30_000
    assert min(sizes[:-1]) > 26_000
    assert not list((tmp_path / "new").glob("*_01.tar"))


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
def test_shards_of_unknown_sizes_are_filled_to_nine_tenths_of_the_limit(
    executor: ss.tasks.LocalExecutor | None, tmp_path: Path
) -> None:
    """Sizes that grow are measured all over the source; where they exceed the mean, further shards begin."""
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.bin").write_bytes(bytes(number * 100))
    rows = "".join(f"files/{number:02d}.bin\n" for number in range(60))
    (tmp_path / "rows.csv").write_text("path\n" + rows)
    options: dict[str, Any] = {"fields": {"bin": "path"}, "max_bytes": "51kB", "executor": executor}
    ss.pack(tmp_path / "rows.csv", tmp_path / "new", **options)
    names = sorted(path.name for path in (tmp_path / "new").glob("*.tar"))
    assert names == [f"{name}.tar" for name in ("000000", "000001", "000002", "000003", "000003_01", "000004", "000004_01", "000005")]  # fmt: skip
    assert max(path.stat().st_size for path in (tmp_path / "new").glob("*.tar")) <= 51_000
    assert [len(sample["bin"]) for sample in ss.ShardDataset(str(tmp_path / "new"))] == [
        number * 100 for number in range(60)
    ]


def repeated_bytes(_: Path) -> list[Any]:
    return [bytes(30_000)] * 100


def differing_bytes(_: Path) -> list[Any]:
    """Rows of 3 kB, but those of 205 kB that would be measured as some of all."""
    return [bytes(512 * (399 if row in (8, 25, 41, 58, 75, 91) else 5)) for row in range(100)]


def pictures_with_bytes(folder: Path) -> list[Any]:
    """What Hugging Face writes."""
    return [{"bytes": value, "path": None} for value in differing_bytes(folder)]


def pictures_with_paths(folder: Path) -> list[Any]:
    """The same, of which the large ones are in a file."""
    (folder / "large").write_bytes(bytes(399 * 512))
    return [
        {"bytes": value, "path": None} if len(value) < 100_000 else {"bytes": None, "path": "large"}
        for value in differing_bytes(folder)
    ]


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
@pytest.mark.parametrize(
    ("cells", "has_dictionary", "num_shards"),
    [
        (differing_bytes, False, 6),
        (pictures_with_bytes, False, 6),
        (pictures_with_paths, False, 50),
        (repeated_bytes, True, 8),
    ],
)
def test_parquet_is_cut_by_the_sizes_that_its_metadata_tell_else_by_some_rows(
    cells: Callable[[Path], list[Any]],
    has_dictionary: bool,
    num_shards: int,
    executor: ss.tasks.LocalExecutor | None,
    tmp_path: Path,
) -> None:
    rows = pa.table({"image": cells(tmp_path), "label": [*range(100)]})
    parquet.write_table(
        rows, tmp_path / "rows.parquet", row_group_size=50, use_dictionary=has_dictionary
    )
    report = ss.pack(
        tmp_path / "rows.parquet",
        tmp_path / "new",
        fields={"bin": "image", "cls": "label"},
        max_bytes="500kB",
        executor=executor,
    )
    assert (report.samples, report.shards) == (100, num_shards)


def test_skipped_records_are_reported_by_all_executors(photos: str, tmp_path: Path) -> None:
    source = tmp_path / "photos"
    shutil.copytree(photos, source)
    (source / "ant" / "000.jpg").write_bytes(b"no image")
    (source / "bee" / "058.jpg").write_bytes(jpeg(1)[:200])
    with pytest.raises(ss.errors.SourceError, match="000.jpg"):
        ss.pack(str(source), tmp_path / "none", executor=ss.tasks.LocalExecutor(), shuffle=False)
    assert not (tmp_path / "none" / "index.json").exists()
    options: Mapping[str, Any] = {"max_samples": 10, "on_error": "skip"}
    plain = ss.pack(str(source), tmp_path / "plain", **options)
    report = ss.pack(
        str(source), tmp_path / "two", executor=ss.tasks.LocalExecutor(processes=2), **options
    )
    assert sorted(report.skipped) == sorted(plain.skipped)
    assert report.samples == plain.samples == 60 - len(plain.skipped)
    keys = [
        sorted(sample["__key__"] for sample in ss.ShardDataset(str(tmp_path / name)).by_number())
        for name in ("plain", "two")
    ]
    assert keys[0] == keys[1]


def test_a_value_that_json_cannot_hold_is_skipped_whoever_encodes_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n{"a": NaN}\n{"a": {"b": 2}}\n{"a": [1e999]}\n')
    for name, options in (
        ("here", {}),
        ("two", {"processes": 2}),
        ("executor", {"executor": ss.tasks.LocalExecutor()}),
    ):
        report = ss.pack(
            rows, tmp_path / name, fields={"json": "a"}, max_samples=1, on_error="skip", **options
        )
        assert [one.where for one in report.skipped] == [f"{rows}, row 2", f"{rows}, row 4"]
        assert "JSON cannot hold this value" in report.skipped[0].reason
        assert files_of(tmp_path / name) == files_of(tmp_path / "here")


def test_a_pack_goes_on_after_a_bad_record_with_skips_and_not_back_without(
    photos: str, tmp_path: Path
) -> None:
    source = tmp_path / "photos"
    shutil.copytree(photos, source)
    (source / "bee" / "058.jpg").write_bytes(b"no image")
    job: Mapping[str, Any] = {"max_samples": 10, "shuffle": False, "max_side": 8}
    for executor in (ss.tasks.LocalExecutor(), ss.tasks.Parts(1, 1)):
        options = {**job, "executor": executor}
        out = tmp_path / type(executor).__name__
        with pytest.raises(ss.errors.SourceError, match=r"058\.jpg"):
            ss.pack(str(source), out, **options)
        report = ss.pack(str(source), out, **options, on_error="skip")
        assert (len(report.skipped), report.samples) == (1, 59)
    with pytest.raises(
        ss.errors.OptionError, match=r"stopped run skipped 1 record, .*--skip-errors"
    ):
        ss.pack(str(source), tmp_path / "Parts", **job, executor=ss.tasks.Parts(1, 1))


def test_source_that_changes_between_parts_is_refused(photos: str, tmp_path: Path) -> None:
    source = tmp_path / "photos"
    shutil.copytree(photos, source)
    ss.pack(str(source), tmp_path / "new", max_samples=20, executor=ss.tasks.Parts(1, 2))
    (source / "ant" / "999.jpg").write_bytes(jpeg(3))
    with pytest.raises(ss.errors.OptionError, match="the source has changed"):
        ss.pack(str(source), tmp_path / "new", max_samples=20, executor=ss.tasks.Parts(2, 2))


def test_source_that_changes_before_a_task_opens_it_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("caption\n" + "a\n" * 9)

    class LateExecutor(OrderedExecutor):
        def run(
            self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]
        ) -> None:
            listed = list(tasks)
            rows.write_text("caption\n" + "b\n" * 9)
            super().run(listed, done)

    options: dict[str, Any] = {"fields": {"txt": "caption"}, "max_samples": 3}
    with pytest.raises(
        ss.errors.ChangedError, match=r"have changed since the job began.*rows\.csv"
    ):
        ss.pack(rows, tmp_path / "out", executor=LateExecutor(0, 1, 2), **options)
    assert not list((tmp_path / "out").glob("*.tar"))
    report = ss.pack(rows, tmp_path / "out", executor=OrderedExecutor(0, 1, 2), **options)
    assert (report.samples, report.kept) == (9, 0)


@pytest.fixture
def equal_tables(tmp_path: Path) -> tuple[Path, Path]:
    """Two tables with the same bytes and time, whose rows name files next to them: "old" and "new"."""
    tables = (tmp_path / "old" / "t.csv", tmp_path / "new" / "t.csv")
    for table in tables:
        table.parent.mkdir()
        table.write_text("path\n" + "".join(f"{number}.bin\n" for number in range(6)))
        os.utime(table, ns=(1, 1))
        for number in range(6):
            (table.parent / f"{number}.bin").write_text(table.parent.name)
    return tables


BINS: dict[str, Any] = {"fields": {"bin": "path"}, "max_samples": 2}


def test_equal_tables_of_two_folders_are_two_sources(
    equal_tables: tuple[Path, Path], tmp_path: Path, two_processes: ProcessPoolExecutor
) -> None:
    """A process of a pool has the source of an earlier job open; a stopped job is not continued with other files."""
    for table in equal_tables:
        out = tmp_path / f"{table.parent.name}.out"
        ss.pack(table, out, executor=ss.tasks.FuturesExecutor(two_processes), **BINS)
        texts = {sample["bin"] for sample in ss.ShardDataset(str(out))}
        assert texts == {table.parent.name.encode()}
    ss.pack(equal_tables[0], tmp_path / "mixed", executor=ss.tasks.Parts(1, 2), **BINS)
    with pytest.raises(ss.errors.OptionError, match="the source has changed"):
        ss.pack(equal_tables[1], tmp_path / "mixed", **BINS)


def test_a_pack_with_relative_paths_is_continued_here(
    equal_tables: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(equal_tables[0].parent)
    ss.pack("t.csv", "out", root="../new", executor=ss.tasks.Parts(1, 2), **BINS)
    assert ss.pack("t.csv", "out", root="../new", **BINS).kept == 2


def test_half_written_files_of_a_killed_publication_are_deleted(table: str, tmp_path: Path) -> None:
    ss.pack(table, tmp_path, fields={"txt": "caption"}, executor=ss.tasks.Parts(1, 1))
    files = (
        ".shardstream-pack-000000.json",
        ".shardstream-pack-part-000000.json",
        "000000.tar.idx",
        "index.json",
    )
    for name in files:
        (tmp_path / f"{name}.part-0123456789ab").write_bytes(b"{")
    (tmp_path / "notes.txt.part-0123456789ab").write_bytes(b"{")
    ss.merge(tmp_path)
    left = {"000000.tar", "000000.tar.idx", "index.json", "notes.txt.part-0123456789ab"}
    assert set(files_of(tmp_path)) == left


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
def test_a_new_shard_is_never_next_to_the_old_index(
    table: str,
    tmp_path: Path,
    executor: ss.tasks.LocalExecutor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job: dict[str, Any] = {"fields": {"txt": "caption"}, "overwrite": True}
    ss.pack(table, tmp_path, **job)
    commit, indexes = LocalFolder.commit, list[list[Path]]()

    def look_and_commit(self: LocalFolder, *files: Any) -> None:
        indexes.append([*tmp_path.glob("*.idx")])
        commit(self, *files)

    monkeypatch.setattr(LocalFolder, "commit", look_and_commit)
    ss.pack(table, tmp_path, executor=executor, **job, seed=1)
    assert not any(indexes)


def test_records_of_a_replaced_job_are_not_parts_of_the_next(table: str, tmp_path: Path) -> None:
    """A kill while the folder is taken over leaves some of them."""
    job: dict[str, Any] = {"fields": {"txt": "caption"}}
    ss.pack(table, tmp_path / "old", executor=ss.tasks.Parts(1, 1), max_samples=10, **job)
    ss.pack(table, tmp_path / "new", executor=ss.tasks.Parts(1, 2), max_samples=30, **job)
    for number in range(1, 5):
        name = f".shardstream-pack-part-{number:06d}.json"
        shutil.copy(tmp_path / "old" / name, tmp_path / "new" / name)
    assert ss.pack(table, tmp_path / "new", max_samples=30, **job).samples == 50
    assert set(files_of(tmp_path / "new")) == {"000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "index.json"}  # fmt: skip


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
def test_parts_without_their_columns_are_run_again(
    table: str, tmp_path: Path, executor: ss.tasks.LocalExecutor | None
) -> None:
    """And further shards that a killed run has left, and the next one did not need, are deleted."""
    job: dict[str, Any] = {"max_samples": 25, "fields": {"cls": "score"}, "columns": "cls"}
    ss.pack(table, tmp_path, executor=ss.tasks.Parts(1, 1), **job)
    shutil.copy(tmp_path / "000000.tar", tmp_path / "000000_01.tar")
    (tmp_path / "000001.tar.cols.parquet").unlink()
    with pytest.raises(
        ss.errors.StorageError, match=r"file is missing .* \[in .*/000001.tar.cols.parquet"
    ):
        ss.merge(tmp_path)
    assert ss.pack(table, tmp_path, executor=executor, **job).kept == 1
    assert {path.name.partition(".")[0] for path in tmp_path.glob("0*")} == {"000000", "000001"}
    assert len(list(tmp_path.glob("*.cols.parquet"))) == 2


def test_key_that_two_parts_have_is_refused_by_merge(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "tars", max_samples=10) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number // 10}/{number % 10}", "txt": "a"})
    options: dict[str, Any] = {
        "max_samples": 10,
        "key": "{stem}",
        "executor": ss.tasks.LocalExecutor(),
    }
    with pytest.raises(
        ss.errors.SourceError,
        match=r"the key '0' comes twice, in 000000.tar and in 000001.tar, and so do 9 other keys",
    ):
        ss.pack(str(tmp_path / "tars"), tmp_path / "new", **options)
    assert not (tmp_path / "new" / "index.json").exists()


@pytest.mark.parametrize("kind", ["table", "files"])
@pytest.mark.parametrize("key", ["{stem}{index}", "{{index}}", "{index:.0e}"])
def test_keys_with_a_number_that_are_equal_in_two_shards_are_refused(
    kind: str, key: str, tmp_path: Path
) -> None:
    stems = ["r0", "a1", *(f"r{number}" for number in range(2, 11)), "a"]  # "a1" + "1", "a" + "11"
    for number, stem in enumerate(stems):
        path = tmp_path / "in" / f"{number:02d}" / f"{stem}.txt"
        path.parent.mkdir(parents=True)
        path.write_text("text")
    (tmp_path / "in.csv").write_text("stem\n" + "".join(f"{stem}\n" for stem in stems))
    source = tmp_path / ("in" if kind == "files" else "in.csv")
    with pytest.raises(ss.errors.SourceError, match="comes twice"):
        ss.pack(source, tmp_path / "new", kind=kind, key=key, max_samples=1)
    assert not (tmp_path / "new" / "index.json").exists()


@pytest.mark.parametrize(
    "samples", [[{"txt": "a"}], iter([{"txt": "a"}])], ids=["list", "iterator"]
)
def test_samples_from_python_are_refused(samples: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ss.errors.OptionError, match="samples from Python are packed in this process"
    ):
        ss.pack(samples, tmp_path / "new", executor=ss.tasks.LocalExecutor(processes=2))


def test_parts_of_a_longer_table_with_the_same_fingerprint_are_not_published(
    tmp_path: Path,
) -> None:
    table = tmp_path / "rows.csv"
    options: dict[str, Any] = {"fields": {"txt": "text"}, "max_samples": 10}
    for part, count in (1, 20), (2, 40):
        table.write_text("text\n" + f"{'a' * (800 // count - 1)}\n" * count)
        os.utime(table, (1, 1))
        ss.pack(table, tmp_path / "new", executor=ss.tasks.Parts(part, 2), **options)
    error = "this run has 2 parts, but the job was begun with more: the source has changed"
    with pytest.raises(ss.errors.StorageError, match=error):
        ss.merge(tmp_path / "new")
    assert not (tmp_path / "new" / "index.json").exists()


def test_part_of_another_job_is_refused(photos: str, tmp_path: Path) -> None:
    ss.pack(photos, tmp_path / "new", max_samples=20, executor=ss.tasks.Parts(1, 2))
    with pytest.raises(ss.errors.OptionError, match="seed was 0, now 1"):
        ss.pack(photos, tmp_path / "new", max_samples=20, seed=1, executor=ss.tasks.Parts(2, 2))
    # The same pack in one process goes on where the parts have stopped, also if the last part is done and an earlier one is not.
    report = ss.pack(photos, tmp_path / "new", max_samples=20)
    assert (report.kept, report.shards, report.samples) == (2, 3, 60)


def test_part_of_a_process_that_measures_other_sizes_is_refused(
    photos: str, tmp_path: Path
) -> None:
    """As with another version of an encoder: its parts would begin at other records."""
    options: dict[str, Any] = {"max_side": 16, "max_samples": 20}
    ss.pack(photos, tmp_path, executor=ss.tasks.Parts(1, 2), **options)
    journal = tmp_path / JOURNAL_NAME
    document = json.loads(journal.read_text())
    assert document["options"]["part_records"] == 20
    document["options"]["part_records"], document["run"] = 19, "another"
    journal.write_text(json.dumps(document))
    for executor in (ss.tasks.Parts(2, 2), None):
        with pytest.raises(ss.errors.OptionError, match="part_records was 19, now 20"):
            ss.pack(photos, tmp_path, executor=executor, **options)
    ss.pack(photos, tmp_path / "exact", max_samples=20, executor=ss.tasks.Parts(1, 2))
    assert "part_records" not in (tmp_path / "exact" / JOURNAL_NAME).read_text()


class StoppedError(BaseException):
    """Raised by a test while a dataset is published."""


def test_no_split_is_published_if_a_check_of_another_fails(tmp_path: Path) -> None:
    split = {"a": 0.5, "b": 0.5}
    rows = [row for row, number in enumerate(assign_splits(20, split, seed=0)) if number == 1]
    twice = (rows[0], rows[-1])
    table = tmp_path / "t.csv"
    table.write_text("k,v\n" + "".join(f"{'x' if i in twice else i},v\n" for i in range(20)))
    options: dict[str, Any] = {"key": "k", "split": split, "max_samples": 4}
    options |= {"executor": ss.tasks.LocalExecutor()}
    for _ in range(2):
        with pytest.raises(ss.errors.SourceError, match="the key 'x' comes twice"):
            ss.pack(table, tmp_path / "out", **options)
        assert not list((tmp_path / "out").rglob("index.json"))


def merge_stopped(
    dest: Path, number: int, *, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Merge, stopped before or after a call that changes a folder; return whether it came to that call.

    Args:
        dest: Folder of the job.
        number: Number of the call, from 1: two for each change.
        killed: Nothing is changed afterwards, as by a killed process.
        monkeypatch: Undone at the end.
    """
    left = number

    def stop() -> None:
        nonlocal left
        left -= 1
        if left == 0 or (killed and left < 0):
            raise StoppedError

    with monkeypatch.context() as patch:
        for name in ("write", "remove"):
            original = getattr(LocalFolder, name)

            def call(*args: Any, original: Callable[..., None] = original, **kwargs: Any) -> None:
                stop()
                original(*args, **kwargs)
                stop()

            patch.setattr(LocalFolder, name, call)
        with suppress(StoppedError):
            ss.merge(dest)
    return left <= 0


def published_in(dest: Path) -> set[str]:
    return {path.parent.name for path in dest.rglob("index.json")}


@pytest.mark.parametrize(
    ("again", "killed"),
    with_slow_rest(
        [("same command", True), ("merge", False)], ["same command", "merge"], [True, False]
    ),
)
def test_publication_of_splits_that_was_stopped_goes_on(
    again: str, *, killed: bool, photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"split": {"a": 0.7, "b": 0.3}, "max_samples": 20}
    ss.pack(photos, tmp_path / "clean", executor=ss.tasks.LocalExecutor(), **options)
    clean = files_of(tmp_path / "clean")
    number = 0
    for number in itertools.count(1, 2):
        dest = tmp_path / f"out{number}"
        for part in (1, 2):
            ss.pack(photos, dest, executor=ss.tasks.Parts(part, 2), **options)
        if not merge_stopped(dest, number, killed=killed, monkeypatch=monkeypatch):
            break
        # Between two manifests a killed process leaves one of them; an error leaves none.
        assert published_in(dest) in (set(), {"a", "b"}, *[{"b"}] * killed)
        if not list(dest.rglob(".shardstream-pack-*")):
            with pytest.raises(ss.errors.OptionError, match="published already"):
                ss.merge(dest)
            with pytest.raises(ss.errors.OptionError, match="a dataset is published here"):
                ss.pack(photos, dest, executor=ss.tasks.LocalExecutor(), **options)
        elif again == "same command":
            executor = None if killed else ss.tasks.LocalExecutor()
            report = ss.pack(photos, dest, executor=executor, **options)
            assert ([one.name for one in report.splits], report.samples) == (["a", "b"], 60)
        else:
            report = ss.merge(dest)
            assert ({one.name for one in report.splits}, report.samples) == ({"a", "b"}, 60)
        assert files_of(dest) == clean
    dest = tmp_path / f"out{number}"  # not stopped
    assert files_of(dest) == clean
    with pytest.raises(ss.errors.OptionError, match="published already"):
        ss.merge(dest)


@pytest.fixture
def two_splits(photos: str, tmp_path: Path) -> Callable[[str], Path]:
    """Run all parts of two splits, a and b, in a new folder; `merge` publishes them."""

    def run_parts(name: str) -> Path:
        options: dict[str, Any] = {"split": {"a": 0.7, "b": 0.3}, "max_samples": 20}
        for part in (1, 2):
            ss.pack(photos, tmp_path / name, executor=ss.tasks.Parts(part, 2), **options)
        return tmp_path / name

    return run_parts


def at_manifest_of_a(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something after the last manifest is written, which is that of the first split."""
    original = LocalFolder.write

    def write(self: LocalFolder, name: str, data: bytes) -> None:
        original(self, name, data)
        if (name, self.url.rpartition("/")[2]) == ("index.json", "a"):
            act()

    monkeypatch.setattr(LocalFolder, "write", write)


def test_split_that_is_published_stays_if_another_fails_again(
    two_splits: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, dest = two_splits("clean"), two_splits("out")
    ss.merge(clean)

    def stop(*_: object) -> None:
        raise StoppedError

    with monkeypatch.context() as patch:
        at_manifest_of_a(patch, stop)
        patch.setattr(LocalFolder, "remove", stop)  # as if the process was killed
        with pytest.raises(StoppedError):
            ss.merge(dest)
    (dest / "a" / "index.json").unlink()
    with monkeypatch.context() as patch:
        at_manifest_of_a(patch, stop)
        with pytest.raises(StoppedError):
            ss.merge(dest)
    assert published_in(dest) == {"b"}
    ss.merge(dest)
    assert files_of(dest) == files_of(clean)


def test_records_stay_if_another_process_removes_a_manifest_meanwhile(
    two_splits: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, dest = two_splits("clean"), two_splits("out")
    ss.merge(clean)
    with monkeypatch.context() as patch:
        at_manifest_of_a(patch, (dest / "b" / "index.json").unlink)
        with pytest.raises(ss.errors.StorageError, match=r"removed index\.json meanwhile"):
            ss.merge(dest)
    assert ss.merge(dest).samples == 60
    assert files_of(dest) == files_of(clean)


@pytest.mark.parametrize("last", [("write", "index.json"), ("remove", JOURNAL_NAME)])
def test_publication_of_python_samples_that_was_stopped_is_completed_by_merge(
    last: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command cannot know that it has the same samples; it changes nothing."""
    is_killed = False

    def pack(folder: str, **options: Any) -> ss.packing.PackReport:
        samples = [{"cls": number} for number in range(20)]
        return ss.pack(
            samples, tmp_path / folder, split={"a": 0.5, "b": 0.5}, max_samples=5, **options
        )

    with monkeypatch.context() as patch:
        for method in ("write", "remove"):
            original = getattr(LocalFolder, method)

            def call(
                self: LocalFolder,
                name: str = "",
                *args: Any,
                original: Callable[..., None] = original,
            ) -> None:
                nonlocal is_killed
                is_killed |= (original.__name__, name) == last and self.url.endswith("/a")
                if is_killed:
                    raise StoppedError
                original(self, *filter(None, (name,)), *args)

            patch.setattr(LocalFolder, method, call)
        with pytest.raises(StoppedError):
            pack("out")
    before = files_of(tmp_path / "out")
    with pytest.raises(
        ss.errors.OptionError, match=r"complete it with merge .* or replace it with over"
    ):
        pack("out")
    assert files_of(tmp_path / "out") == before
    shutil.copytree(tmp_path / "out", tmp_path / "replaced")
    assert ss.merge(tmp_path / "out").samples == pack("clean").samples == 20
    pack("replaced", overwrite=True)
    for folder in ("out", "replaced"):
        assert files_of(tmp_path / folder) == files_of(tmp_path / "clean")


@pytest.mark.slow
def test_splits_of_many_rows_are_the_same_here_and_as_tasks(tmp_path: Path) -> None:
    """Splits are looked up in blocks of 65,536 records."""
    table = tmp_path / "t.csv"
    table.write_text("n\n" + "".join(f"{number}\n" for number in range(70_000)))
    options: dict[str, Any] = {"fields": {"cls": "n"}, "split": {"a": 0.9, "b": 0.1}}
    for folder, executor in (("here", None), ("tasks", ss.tasks.LocalExecutor())):
        ss.pack(table, tmp_path / folder, executor=executor, **options)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "tasks")
    labels = [
        int(sample["cls"])
        for split in "ab"
        for sample in ss.ShardDataset(tmp_path / "here" / split, shuffle=False)
    ]
    assert sorted(labels) == [*range(70_000)]


class OvertakenExecutor:
    """Runs the tasks here; then, another process finishes the job first."""

    def __init__(self, overtake: Callable[[], object]) -> None:
        self.overtake = overtake

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        ss.tasks.LocalExecutor().run(tasks, done)
        self.overtake()


def test_pack_whose_dataset_another_process_publishes_first_changes_nothing(
    table: str, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"max_samples": 20, "fields": {"txt": "caption"}, "columns": "txt"}
    overtakes: dict[str, Callable[[], object]] = {
        "merged": lambda: ss.merge(tmp_path / "merged"),
        "other": lambda: ss.pack([{"cls": 1}], tmp_path / "other", overwrite=True),
        "deleted": lambda: shutil.rmtree(tmp_path / "deleted"),
    }
    for name, overtake in overtakes.items():
        executor = OvertakenExecutor(overtake)
        with pytest.raises(ss.errors.StorageError, match=r"journal of this pack .* was deleted"):
            ss.pack(table, tmp_path / name, executor=executor, **job)
    assert len(ss.ShardDataset(str(tmp_path / "merged"))) == 50
    assert len(ss.ShardDataset(str(tmp_path / "other"))) == 1
    assert not (tmp_path / "deleted" / "index.json").exists()


def test_shard_that_is_replaced_before_its_keys_are_compared_is_an_error(tmp_path: Path) -> None:
    rows, shard = tmp_path / "rows.csv", tmp_path / "out" / "000001.tar"
    rows.write_text("k,v\n0,a\n1,b\n0,c\n1,d\n")
    erasing = OvertakenExecutor(lambda: shard.write_bytes(bytes(shard.stat().st_size)))
    with pytest.raises(ss.errors.ChangedError, match=r"shard was replaced meanwhile.*000001\.tar"):
        ss.pack(rows, tmp_path / "out", key="k", max_samples=2, executor=erasing)
    assert not (tmp_path / "out" / "index.json").exists()


def test_records_of_a_replaced_manifest_are_deleted(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=2)
    job: dict[str, Any] = {"fields": {"txt": "caption"}}
    ss.pack(table, tmp_path, max_samples=10, **job)
    assert any(map(is_records_name, files_of(tmp_path)))
    ss.pack(table, tmp_path, overwrite=True, **job)
    assert set(files_of(tmp_path)) == {"000000.tar", "000000.tar.idx", "index.json"}


@pytest.mark.parametrize("split", ["a", "b"])
def test_records_of_a_replaced_manifest_are_deleted_after_a_kill_that_left_them(
    split: str, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=2)
    job: dict[str, Any] = {"fields": {"txt": "caption"}, "split": {"a": 0.5, "b": 0.5}}
    ss.pack(table, tmp_path / "clean", **job)
    ss.pack(table, tmp_path / "out", max_samples=5, **job)
    is_killed = False
    with monkeypatch.context() as patch:
        for method in ("write", "remove"):
            original = getattr(LocalFolder, method)

            def call(
                self: LocalFolder,
                name: str = "",
                *args: Any,
                original: Callable[..., None] = original,
            ) -> None:
                nonlocal is_killed
                if is_killed:
                    raise StoppedError
                original(self, *filter(None, (name,)), *args)
                is_killed = name == "index.json" and bool(args) and self.url.endswith(f"/{split}")

            patch.setattr(LocalFolder, method, call)
        with pytest.raises(StoppedError):
            ss.pack(table, tmp_path / "out", overwrite=True, **job)
    assert any(map(is_records_name, files_of(tmp_path / "out" / split)))
    ss.pack(table, tmp_path / "out", **job)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")
