"""What a job may do with a folder: for each journal, manifest and other file that can be there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.errors import OptionError, StorageError
from shardstream.format import decode_manifest
from shardstream.packing import Claim, Journal, ShardNames, Task, claim_destination
from shardstream.storage import JOURNAL_NAME, FileInfo, LocalFolder, part_record_name
from tests.limits import set_limits

TASK = Task(source="files", options={"template": "{shard:06d}.tar"})
OTHERS = Task(source="files", options={"template": "a-{shard}.tar", "max_samples": 3})
UNNAMED = Task(source=None, options=TASK.options)  # samples from Python
WRITER = Task(source=None, options={"writer": "ShardWriter"})
TASKS = {"writer": WRITER, "same job": TASK, "samples": UNNAMED, "other job": OTHERS}
MESSAGES = {
    "published": r"a dataset is published here.*index\.json",
    "samples": "have no identity: complete it with merge",
    "shards": r"a shard of this name exists without an index\.json.*000003\.tar",
    "writer": "another pack or ShardWriter is writing here",
    "job": "an unfinished pack with another source or options is here: .*max_samples was 3, now None",
    "journal": "journal of an unfinished pack cannot be read",
}


def fill(
    path: Path, *, journal: str = "none", manifest: str = "none", files: Iterable[str] = ()
) -> LocalFolder:
    """Make a folder as a stopped job has left it.

    Args:
        path: The folder.
        journal: Whose journal is there.
        manifest: "none", "of the job", or "another one" than that which the journal announces.
        files: Names of other files.
    """
    path.mkdir()
    folder = LocalFolder(str(path), str(path))
    for name in files:
        (path / name).write_text("data")
    data = (
        b'{"shardlist": [{"url": "old.tar"}], "__kind__": "wids-shard-index-v1", "wids_version": 1}'
    )
    if manifest != "none":
        (path / "index.json").write_bytes(data)
    if journal != "none":
        Journal(
            folder=folder,
            task=TASKS.get(journal, TASK),
            run=uuid.uuid4().hex,
            stale=frozenset({"x.tar"}),
        ).write()
        document = json.loads((path / JOURNAL_NAME).read_text())
        if manifest != "none":
            digest = sha256(data if manifest == "of the job" else b"").hexdigest()
            document["published"] = {"sha256": digest, "skipped": [], "warnings": []}
        text = "{" if journal == "unreadable" else json.dumps(document)
        (path / JOURNAL_NAME).write_text(text)
    return folder


def claim(folder: LocalFolder, task: Task = TASK, *, overwrite: bool = False) -> Claim:
    names = ShardNames(folder=folder.url, template="{shard:06d}.tar")
    journal = Journal(folder=folder, task=task, run=uuid.uuid4().hex)
    return claim_destination(journal, names, overwrite=overwrite)


NOTES, SHARD, TAR, RECORD = ("a.txt",), ("000003.tar",), ("a.tar",), (part_record_name(0),)
# journal, manifest, other files, action without and with overwrite
CASES = [
    ("none", "none", (), "take", "take"),
    ("none", "none", NOTES, "take", "take"),
    ("none", "none", SHARD, "shards", "replace"),
    ("none", "none", TAR, "take", "take"),
    ("none", "another one", (), "published", "replace"),
    ("unreadable", "none", (), "journal", "replace"),
    ("unreadable", "of the job", SHARD, "journal", "replace"),
    ("same job", "none", (), "join", "join"),
    ("same job", "none", SHARD, "join", "join"),
    ("same job", "of the job", SHARD, "tidy", "replace"),
    ("same job", "another one", SHARD, "published", "join"),
    ("samples", "none", SHARD, "replace", "replace"),
    ("samples", "of the job", SHARD, "samples", "replace"),
    ("samples", "another one", SHARD, "published", "replace"),
    ("writer", "none", (), "take", "take"),
    ("writer", "none", SHARD, "shards", "replace"),
    ("writer", "none", TAR, "writer", "replace"),
    ("writer", "none", RECORD, "writer", "replace"),
    ("writer", "of the job", (), "published", "replace"),
    ("other job", "none", (), "take", "take"),
    ("other job", "none", SHARD, "job", "replace"),
    ("other job", "none", TAR, "job", "replace"),
    ("other job", "none", RECORD, "job", "replace"),
    ("other job", "of the job", (), "published", "replace"),
]


@pytest.mark.parametrize(("journal", "manifest", "files", "plain", "forced"), CASES)
def test_what_is_in_a_folder_decides_what_a_job_does(
    journal: str, manifest: str, files: tuple[str, ...], plain: str, forced: str, tmp_path: Path
) -> None:
    folder = fill(tmp_path / "out", journal=journal, manifest=manifest, files=files)
    before = folder.list_files()
    task = UNNAMED if journal == "samples" else TASK
    if plain in MESSAGES:
        with pytest.raises(OptionError, match=MESSAGES[plain]):
            claim(folder, task)
    else:
        assert claim(folder, task).action == plain
    assert claim(folder, task, overwrite=True).action == forced
    assert folder.list_files() == before


def test_a_journal_that_is_deleted_after_the_listing_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed = fill(tmp_path / "out", journal="other job"), LocalFolder.list_files

    def list_before_the_end(folder: LocalFolder) -> dict[str, FileInfo]:
        files = listed(folder)
        folder.remove(JOURNAL_NAME)
        return files

    monkeypatch.setattr(LocalFolder, "list_files", list_before_the_end)
    with pytest.raises(StorageError, match="has just ended here; check its dataset"):
        claim(folder)


@pytest.mark.parametrize("journal", ["none", "writer", "same job", "samples", "other job"])
def test_a_writer_resumes_nothing(journal: str, tmp_path: Path) -> None:
    empty, folder = (
        fill(tmp_path / name, journal=journal, files=files)
        for name, files in (("empty", ()), ("out", TAR))
    )
    assert claim(empty, WRITER).action == "take"
    if journal == "none":
        assert claim(folder, WRITER).action == "take"
        return
    with pytest.raises(OptionError, match=MESSAGES["writer"]):
        claim(folder, WRITER)
    assert claim(folder, WRITER, overwrite=True).action == "replace"


@pytest.mark.parametrize(
    ("journal", "manifest", "stale"),
    [
        ("none", "none", {"000003.tar"}),
        ("none", "another one", {"000003.tar", "old.tar"}),
        ("writer", "none", {"000003.tar", "x.tar"}),
        ("other job", "none", {"000003.tar", "a-7.tar", "x.tar"}),
        ("other job", "of the job", {"000003.tar", "a-7.tar", "x.tar", "old.tar"}),
        ("unreadable", "none", {"000003.tar"}),
        ("same job", "none", {"x.tar"}),  # what the job that began has named
        ("same job", "of the job", {"000003.tar", "x.tar", "old.tar"}),
    ],
)
def test_shards_of_the_earlier_dataset_and_no_other_tars_are_stale(
    journal: str, manifest: str, stale: set[str], tmp_path: Path
) -> None:
    others = ("000003.tar", "000003.tar.idx", "a-7.tar", "x.tar", "b.tar", "a.txt")
    folder = fill(tmp_path / "out", journal=journal, manifest=manifest, files=others)
    found = claim(folder, overwrite=True)
    assert found.journal.stale == stale
    head = tmp_path / "out" / JOURNAL_NAME
    assert found.journal.head == (head.read_bytes() if head.exists() else None)
    assert found.replaces


@pytest.mark.parametrize(
    ("name", "replaces"),
    [("a.txt", False), ("a.tar", False), ("000003.tar.idx", True), ("000003_01.tar.cols.parquet", True)],
)  # fmt: skip
def test_files_that_are_left_of_a_shard_may_be_replaced(
    name: str, *, replaces: bool, tmp_path: Path
) -> None:
    found = claim(fill(tmp_path / "out", files=(name,)))
    assert (found.action, found.replaces) == ("take", replaces)


def test_only_what_killed_writers_have_left_is_deleted_at_once(tmp_path: Path) -> None:
    half = ".part-0123456789ab"
    gone = [
        part_record_name(0),
        *(
            f"{name}{half}"
            for name in ("000000.tar", "000000.tar.idx", "index.json", "classes.json")
        ),
        *(f"{name}{half}" for name in (JOURNAL_NAME, "shards-0123456789abcdef.npy")),
    ]
    kept = ["000000.tar", "a.txt", f"a.tar{half}", f"b.json{half}", "classes.json"]
    folder = fill(tmp_path / "out", journal="other job", files=[*gone, *kept])
    names = ShardNames(folder=folder.url, template="{shard:06d}.tar")
    extras = frozenset({"classes.json"})
    claim_destination(
        Journal(folder=folder, task=TASK, run=uuid.uuid4().hex),
        names,
        overwrite=True,
        extras=extras,
    ).take()
    assert set(folder.list_files()) == {*kept, JOURNAL_NAME}


@pytest.mark.parametrize("extras", [frozenset[str](), frozenset({"classes.json"})])
def test_class_names_that_are_not_written_again_are_kept_with_a_warning(
    extras: frozenset[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tmp_path / "out", manifest="another one", files=("classes.json",))
    names = ShardNames(folder=folder.url, template="{shard:06d}.tar")
    claim_destination(
        Journal(folder=folder, task=TASK, run=uuid.uuid4().hex),
        names,
        overwrite=True,
        extras=extras,
    ).take().check_owner()
    assert set(folder.list_files()) == {"classes.json", JOURNAL_NAME}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (not extras)


PATTERNS = [
    ("out", "out", "{shard:06d}.tar"),
    ("out/", "out", "{shard:06d}.tar"),
    ("/", "/", "{shard:06d}.tar"),
    ("s3://b/a.b/", "s3://b/a.b", "{shard:06d}.tar"),
    ("s3://b/a/x-{shard:04x}.tar", "s3://b/a", "x-{shard:04x}.tar"),
    ("{shard}.tar", ".", "{shard}.tar"),
    ("a/{{b}}-{shard}.tar", "a", "{{b}}-{shard}.tar"),
]


@pytest.mark.parametrize(("url", "folder", "template"), PATTERNS)
def test_a_destination_is_a_folder_or_a_pattern(url: str, folder: str, template: str) -> None:
    names = ShardNames.parse(url)
    assert (names.folder, names.template) == (folder, template)
    assert names.url("a.tar") == ("/a.tar" if folder == "/" else f"{folder}/a.tar")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("a/b.tar", "must contain {shard} once"),
        ("a/B.TAR", "must contain {shard} once"),
        ("a/{shard}-{shard}.tar", "must contain {shard} once"),
        ("a/{shard}.tgz", "must contain {shard} once"),
        ("{shard}/a.tar", "must contain {shard} once"),
        ("{shard}/{shard}.tar", "must contain {shard} once"),
        ("a/{shard.tar", "the pattern is wrong"),
        ("a/{part}.tar", "may contain only {shard}"),
        ("a/{}.tar", "may contain only {shard}"),
        ("a/{shard!r}.tar", "may contain only {shard}"),
        ("a/{shard:.2f}.tar", "may contain only {shard}"),
    ],
)
def test_a_pattern_without_one_number_for_each_shard_is_refused(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ShardNames.parse(url)


def test_nothing_is_left_of_the_shards_of_a_replaced_dataset(tmp_path: Path) -> None:
    samples = [{"cls": number} for number in range(4)]
    ss.pack(samples, tmp_path / "out", max_samples=2, columns="cls")
    assert len([*(tmp_path / "out").glob("*.cols.parquet")]) == 2
    for name in ("000000_01.tar", "000000_01.tar.idx", "mine.tar", "mine.tar.idx"):
        (tmp_path / "out" / name).write_text("data")
    ss.pack(samples, tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "000000.tar", "000000.tar.idx", "index.json", "mine.tar", "mine.tar.idx",
    ]  # fmt: skip


def test_nothing_is_left_of_a_replaced_dataset_with_a_file_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=2)
    samples = [{"cls": number} for number in range(6)]
    ss.pack(samples, tmp_path / "old-{shard}.tar", max_samples=2)
    assert len([*tmp_path.glob("shards-*.npy")]) == 1
    ss.pack(samples, tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000000.tar", "000000.tar.idx", "index.json",
    ]  # fmt: skip
