"""Shards are appended to a dataset as a new version: each sample once, also after kills and with several writers at once."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import PIL.Image
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import (
    ManifestError,
    OptionError,
    ShardStreamError,
    SourceError,
    StorageError,
    UnfinishedError,
)
from shardstream.format import decode_manifest, is_records_name
from shardstream.storage import LocalFolder, is_part_record
from shardstream.tasks import LocalExecutor, Parts
from shardstream.testing import make_shards
from tests.limits import set_limits

N = 40


def samples(first: int, last: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{i:06d}", "cls": i, "txt": f"text {i}"} for i in range(first, last)]


def write_table(path: Path, first: int, last: int) -> str:
    """Write a table of samples, which is packed in parts of its own."""
    lines = [
        json.dumps({"key": f"{i:06d}", "cls": i, "txt": f"text {i}"}) for i in range(first, last)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


TABLE: dict[str, Any] = {"key": "key", "fields": {"cls": "cls", "txt": "txt"}, "max_samples": 7}


def numbers(url: str, **options: Any) -> list[int]:
    return [int(sample["cls"]) for sample in ss.ShardDataset(url, **options)]


def version(url: str) -> dict[str, Any]:
    text = (Path(url) / "index.json").read_text()
    return dict(json.loads(text).get("dataset_version", {"number": 1}))


def left_in(url: str) -> list[str]:
    """Return the journals and records of parts that are left."""
    return [str(path) for path in Path(url).rglob(".shardstream*")]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_shards(tmp_path / "data", samples=samples(0, N), per_shard=7, columns=["cls"])


@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    ways=st.lists(st.sampled_from(["pack", "writer", "delete"]), min_size=5, max_size=5),
)
@settings(max_examples=15, deadline=None)
def test_each_version_has_its_samples(
    sizes: list[int], ways: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = make_shards(tmp_path_factory.mktemp("data") / "one", samples=samples(0, N), per_shard=7)
    expected, end = [list(range(N))], N
    for size, way in zip(sizes, ways, strict=False):
        new = samples(end, end + size)
        if way == "delete":
            ss.delete(url, numbers=[0], version=len(expected))
            expected.append(expected[-1][1:])
            continue
        if way == "pack":
            assert ss.pack(new, url, append=True, max_samples=10).samples == size
        else:
            with ss.ShardWriter(url, append=True, max_samples=10) as writer:
                for sample in new:
                    writer.write(sample)
        expected.append([*expected[-1], *range(end, end + size)])
        end += size
    for number, some in enumerate(expected, start=1):
        assert numbers(url, version=number) == some
    assert numbers(url) == expected[-1]
    dataset = ss.ShardDataset(url, shuffle=True).decode()
    batches = [int(n) for batch in ss.ShardLoader(dataset, 7, num_workers=0) for n in batch["cls"]]
    assert sorted(batches) == expected[-1]
    assert left_in(url) == []


def test_shards_that_are_there_stay_as_they_are(url: str) -> None:
    before = {path.name: path.read_bytes() for path in Path(url).iterdir()}
    ss.pack(samples(N, 60), url, append=True)
    assert (Path(url) / "versions/000001.json").read_bytes() == before.pop("index.json")
    assert before == {name: (Path(url) / name).read_bytes() for name in before}


@pytest.mark.parametrize("are_many", [False, True])
def test_a_pattern_without_the_new_tars_warns(
    are_many: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_many:  # for a manifest with files of records
        set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=4)
        set_limits(monkeypatch, is_records_name, CHUNK_SHARDS=3)
        ss.index(url)
    ss.pack(samples(N, 60), url, append=True)
    assert [*Path(url).glob("shards-*.npy")] or not are_many
    with pytest.warns(UserWarning, match="left out: 1 shard of this dataset .* append-"):
        assert numbers(f"{url}/*.tar") == [*range(N)]
    assert numbers(f"{url}/00000[12].tar") == [*range(7, 21)]
    assert numbers(f"{url}/append-*/*.tar") == [*range(N, 60)]


def test_keys_that_are_there_are_refused(url: str) -> None:
    before = (Path(url) / "index.json").read_bytes()
    with pytest.raises(SourceError, match=r"'000039' .*append-.* is in .*000005\.tar already"):
        ss.pack(samples(N - 1, 60), url, append=True)
    writer = ss.ShardWriter(url, append=True)
    writer.write(samples(3, 4)[0])
    with pytest.raises(SourceError, match="'000003'"):
        writer.close()
    assert (Path(url) / "index.json").read_bytes() == before
    ss.pack(samples(N - 1, 60), url, append=True, check_keys=False)
    assert numbers(url) == [*range(N), *range(N - 1, 60)]
    with pytest.raises(SourceError, match="'000045'"):  # of samples that were not compared, too
        ss.pack(samples(45, 46), url, append=True)


def test_keys_of_deleted_samples_may_come_again(url: str) -> None:
    ss.delete(url, numbers=[5, 6])
    ss.pack(samples(5, 6), url, append=True)
    with pytest.raises(SourceError, match="'000005'"):
        ss.pack(samples(5, 7), url, append=True)
    ss.pack(samples(6, 7), url, append=True)
    assert numbers(url) == [*(n for n in range(N) if n not in (5, 6)), 5, 6]


@pytest.mark.parametrize("check_keys", [False, True])
def test_an_append_is_not_done_twice_after_compactions(
    url: str, tmp_path: Path, *, check_keys: bool
) -> None:
    table = write_table(tmp_path / "rows.jsonl", N, 60)
    options = TABLE | {"append": True, "check_keys": check_keys}
    ss.pack(table, url, **options)
    expected = [*range(60)]
    for deleted in ([41], [48, 57], [42, 58]):
        ss.delete(url, keys=[f"{i:06d}" for i in deleted])
        ss.compact(url)
        ss.versions.gc(url, 1, dry_run=False)
        expected = [i for i in expected if i not in deleted]
        with pytest.raises(OptionError, match="this source was appended already"):
            ss.pack(table, url, **options)
        assert numbers(url) == expected
    assert not [*Path(url).glob("append-*/*.tar")]
    ss.delete(url, where="cls >= 40")
    ss.compact(url)
    ss.versions.gc(url, 1, dry_run=False)
    ss.pack(table, url, **options)
    assert numbers(url) == [*range(60)]
    assert ss.verify(url).problems == ()


def test_few_files_of_keys_are_named(url: str) -> None:
    for number in range(N, N + 40):
        ss.pack(samples(number, number + 1), url, append=True)
    files = version(url)["keys"]
    assert sum(one["nsamples"] for one in files) == N + 40
    assert len(files) <= 4
    with pytest.raises(SourceError, match=f"'{N:06d}'"):
        ss.pack(samples(N, N + 1), url, append=True)


def test_a_file_of_keys_that_is_damaged_is_an_error(url: str) -> None:
    ss.pack(samples(N, 50), url, append=True)
    path = Path(url) / version(url)["keys"][0]["name"]
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ss.ShardStreamError, match="keys do not match the name"):
        ss.pack(samples(50, 60), url, append=True)


def test_running_numbers_differ_from_those_that_are_there(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    ss.pack([{"txt": "a"}, {"txt": "b"}], url)
    ss.pack([{"txt": "c"}, {"txt": "d"}], url, append=True)
    with ss.ShardWriter(url, append=True) as writer:
        writer.write({"txt": "e"})
    (tmp_path / "rows.csv").write_text("txt\nf\ng\n")
    ss.pack(str(tmp_path / "rows.csv"), url, append=True, fields={"txt": "txt"})
    found = [(sample["__key__"], sample["txt"]) for sample in ss.ShardDataset(url)]
    assert b"".join(text for _, text in found) == b"abcdefg"
    assert len({key for key, _ in found}) == 7


def test_an_append_whose_samples_were_deleted_is_repeated_after_gc(
    url: str, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "rows.jsonl", N, 60)
    ss.pack(table, url, append=True, **TABLE)
    ss.delete(url, where="cls >= 40")
    ss.compact(url)
    with pytest.raises(OptionError, match="all its samples were deleted; remove the versions"):
        ss.pack(table, url, append=True, **TABLE)
    ss.versions.gc(url, 1, dry_run=False)
    ss.pack(table, url, append=True, **TABLE)
    assert numbers(url) == [*range(60)]


def test_an_append_that_is_done_is_not_repeated(url: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "new.jsonl", N, 60)
    ss.pack(table, url, append=True, check_keys=False, **TABLE)
    with pytest.raises(OptionError, match="appended already"):
        ss.pack(table, url, append=True, check_keys=False, **TABLE)
    assert numbers(url) == [*range(60)]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parts_are_appended_together(url: str, tmp_path: Path, processes: int) -> None:
    table = write_table(tmp_path / "new.jsonl", N, 75)
    if processes == 2:
        ss.pack(table, url, append=True, executor=LocalExecutor(processes=2), **TABLE)
    else:
        report = ss.pack(table, url, append=True, executor=Parts(1, 2), **TABLE)
        folder = report.splits[0].url
        with pytest.raises(UnfinishedError):
            ss.packing.merge(folder)
        ss.pack(samples(75, 80), url, append=True)  # another writer meanwhile
        ss.pack(table, url, append=True, executor=Parts(2, 2), **TABLE)
        assert ss.packing.merge(folder).splits[0].url == url
    assert sorted(numbers(url)) == [*range(75 if processes == 2 else 80)]
    assert left_in(url) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_append_goes_on(
    url: str, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "new.jsonl", N, 75)
    command = ["pack", table, url, "--append", "--key", "key", "--max-samples", "7"]
    command += ["--map", "cls=cls", "--map", "txt=txt"]
    made = make_shards(tmp_path / "other", samples=samples(0, N), per_shard=7)
    total = calls_of(lambda: main([*command[:2], made, *command[3:]]))
    assert total is not None
    numbers_ = random.Random(seed)
    for _ in range(3):
        calls_of(lambda: main(command), numbers_.randrange(1, total))
        assert numbers(url) in ([*range(N)], [*range(75)])
    code = main(command)
    assert numbers(url) == [*range(75)]
    assert code == 0 or "appended already" in capsys.readouterr().err
    assert left_in(url) == []


def test_an_append_whose_records_were_half_deleted_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, remove = write_table(tmp_path / "new.jsonl", N, 75), LocalFolder.remove
    deleted: list[str] = []

    def fail(folder: LocalFolder, *names: str) -> None:
        for name in names:
            deleted.append(name)
            if len(deleted) == 3:
                raise StorageError("the disk has failed")
            remove(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "remove", fail)
        with pytest.raises(StorageError, match="disk has failed"):
            ss.pack(table, url, append=True, **TABLE)
    assert all(map(is_part_record, deleted))
    for _ in range(2):
        assert numbers(url) == [*range(75)]
        if left_in(url):
            assert ss.pack(table, url, append=True, **TABLE).samples == 35
    assert left_in(url) == []


def calls_of(work: Callable[[], object], killed_at: int = 0) -> int | None:
    """Run a function in a fork, which kills itself at a call of a function of shardstream; return the number of calls, or None."""
    context, place = multiprocessing.get_context("fork"), os.path.dirname(ss.__file__)
    calls: Any = context.RawValue("q", 0)

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(place):
            calls.value += 1
            if calls.value == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        threading.setprofile(count)
        sys.setprofile(count)
        work()
        sys.setprofile(None)

    process = context.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return None if process.exitcode else int(calls.value)


def append_some(url: str, me: int, count: int, barrier: Any, way: str) -> None:
    barrier.wait(300)
    for number in range(count):
        first = 1000 * (me + 1) + 10 * number
        if way == "writer":
            with ss.ShardWriter(url, append=True) as writer:
                for sample in samples(first, first + 10):
                    writer.write(sample)
        else:
            ss.pack(samples(first, first + 10), url, append=True, max_samples=5)


@pytest.mark.parametrize("how", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_two_processes_append_at_once(url: str, how: str) -> None:
    append_at_once(url, how)
    assert version(url)["number"] == 11


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_two_processes_append_at_once_to_s3(bucket: str) -> None:
    url = make_shards(f"{bucket}/data", samples=samples(0, N), per_shard=7)
    append_at_once(url, "spawn")
    with pytest.raises(SourceError, match="'001010'"):
        ss.pack(samples(1010, 1011), url, append=True)


def append_at_once(url: str, how: str) -> None:
    context: Any = multiprocessing.get_context(how)
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=append_some, args=(url, me, 5, barrier, way))
        for me, way in enumerate(("writer", "pack"))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    found = numbers(url)
    assert found[:N] == [*range(N)]
    assert sorted(found[N:]) == [*range(1000, 1050), *range(2000, 2050)]


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_what_it_has_published(url: str, tmp_path: Path) -> None:
    def write(url: str, first: int) -> None:
        with ss.ShardWriter(url, append=True, max_samples=3) as writer:
            for number in range(first, first + 20):
                writer.write({"__key__": f"{number:06d}", "cls": number, "txt": "x"})
                if number == first + 11:
                    writer.publish()

    other = make_shards(tmp_path / "other", samples=samples(0, N), per_shard=7)
    total = calls_of(lambda: write(other, 1000))
    assert total is not None
    choose = random.Random(50)
    for first in range(1000, 6000, 100):
        before = numbers(url)
        calls_of(functools.partial(write, url, first), choose.randrange(1, total))
        added = [*range(first, first + 20)]
        assert numbers(url) in (before, before + added[:12], before + added)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://appended/data"
    MemoryFileSystem.store.clear()


def test_a_remote_dataset(memory: str) -> None:
    make_shards(memory, samples=samples(0, N), per_shard=7)
    ss.pack(samples(N, 60), memory, append=True, max_samples=7)
    with pytest.raises(SourceError, match="'000050'"):
        ss.pack(samples(50, 61), memory, append=True)
    assert numbers(memory) == [*range(60)]
    assert numbers(memory, version=1) == [*range(N)]


# --- class numbers


def write_classes(folder: Path, classes: list[str], start: str = "a") -> str:
    """Write an image of each class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        PIL.Image.new("RGB", (4, 4)).save(folder / name / f"{start}-{name}-0.jpg")
    return str(folder)


def names(url: str, **options: Any) -> tuple[str, ...] | None:
    return ss.ShardDataset(url, **options).classes


def test_new_classes_get_the_next_numbers(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    ss.pack(write_classes(tmp_path / "first", ["bee", "cat"]), url)
    ss.pack(write_classes(tmp_path / "second", ["ant", "cat"], "b"), url, append=True)
    ss.pack(write_classes(tmp_path / "third", ["ant", "dog"], "c"), url, append=True)
    assert names(url) == ("bee", "cat", "ant", "dog")
    assert [names(url, version=one) for one in (1, 2, 3)] == [
        ("bee", "cat"), ("bee", "cat", "ant"), ("bee", "cat", "ant", "dog"),
    ]  # fmt: skip
    found = sorted((s["__key__"], int(s["cls"])) for s in ss.ShardDataset(url))
    assert found == [
        ("a-bee-0", 0), ("a-cat-0", 1), ("b-ant-0", 2), ("b-cat-0", 1), ("c-ant-0", 2), ("c-dog-0", 3),
    ]  # fmt: skip


def test_class_numbers_that_contradict_are_refused(tmp_path: Path) -> None:
    url, new = str(tmp_path / "data"), write_classes(tmp_path / "new", ["ant"], "b")
    ss.pack(write_classes(tmp_path / "first", ["bee", "cat"]), url)
    with pytest.raises(OptionError, match="'ant' is class 0 in classes, where .* has 'bee'"):
        ss.pack(new, url, append=True, classes=["ant", "bee", "cat"])
    ss.pack(new, url, append=True, classes=["bee", "cat", "dog", "ant"])
    assert names(url) == ("bee", "cat", "dog", "ant")
    unnamed = make_shards(tmp_path / "numbers", samples=[{"__key__": "a", "jpg": b"", "cls": 3}])
    with pytest.raises(OptionError, match=r"no classes\.json"):
        ss.pack(new, unnamed, append=True)


def test_class_numbers_of_another_dataset_are_compared(tmp_path: Path) -> None:
    url, other, longer = (str(tmp_path / name) for name in ("data", "other", "longer"))
    ss.pack(write_classes(tmp_path / "first", ["bee", "cat"]), url)
    ss.pack(write_classes(tmp_path / "second", ["ant", "bee"], "b"), other)
    ss.pack(write_classes(tmp_path / "third", ["bee", "cat", "dog"], "c"), longer)
    with pytest.raises(OptionError, match="'bee' is class 0 in .*, where samples has 'ant'"):
        ss.pack(ss.ShardDataset(other), url, append=True)
    ss.pack(ss.ShardDataset(longer), url, append=True)
    assert names(url) == ("bee", "cat", "dog")


def test_class_names_of_an_earlier_version_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, file = str(tmp_path / "data"), tmp_path / "data/classes.json"
    ss.pack(write_classes(tmp_path / "first", ["bee"]), url)
    earlier = file.read_text()
    ss.pack(write_classes(tmp_path / "second", ["cat"], "b"), url, append=True)
    file.write_text(earlier)  # a copy that took it before the append, and index.json after it
    older = "it has 1 name, but version 2 of the dataset added some"
    with pytest.raises(ManifestError, match=older):  # "dog" would be class 1, as "cat" is
        ss.pack(write_classes(tmp_path / "third", ["dog"], "c"), url, append=True)
    assert ss.ShardDataset(url).classes is None
    assert older in caplog.text
    assert older in ss.verify(url).errors[0].what
    assert ss.ShardDataset(url, version=1).classes == ("bee",)


def write_all(new: Any, url: str, *, append: bool) -> None:
    with ss.ShardWriter(url, append=append) as writer:
        for sample in new:
            writer.write(sample)


@pytest.mark.parametrize("write", [write_all, ss.pack])
def test_class_numbers_without_names_are_refused(write: Any, tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=samples(0, 3))
    (tmp_path / "data/classes.json").write_text('["a", "b", "c"]')
    write([{**samples(3, 4)[0], "cls": -1}], url, append=True)
    new = [{**samples(4, 5)[0], "cls": 2}, *samples(5, 7)]
    with pytest.raises(ShardStreamError, match="class 5 has no name: .* has 3 names.*000005"):
        write(new, url, append=True)
    with pytest.raises(ShardStreamError, match="class 5 has no name.*000001"):
        ss.replace_fields(url, {"cls": {"000001": 5}})
    assert numbers(url) == [0, 1, 2, -1]
    assert len(ss.pack(new, url, append=True, on_error="skip").skipped) == 2
    assert numbers(url) == [0, 1, 2, -1, 2]


def test_a_writer_that_is_too_late_numbers_its_classes_anew(tmp_path: Path) -> None:
    url, late = str(tmp_path / "data"), write_classes(tmp_path / "late", ["ant"], "b")
    ss.pack(write_classes(tmp_path / "first", ["bee"]), url)
    folder = ss.pack(late, url, append=True, executor=Parts(1, 1)).splits[0].url
    ss.pack(write_classes(tmp_path / "other", ["cat"], "c"), url, append=True)
    with pytest.raises(OptionError, match="class 1 is 'ant' in the new samples.*another writer"):
        ss.packing.merge(folder)
    assert names(url) == ("bee", "cat")
    ss.pack(late, url, append=True)
    assert names(url) == ("bee", "cat", "ant")
    assert [int(sample["cls"]) for sample in ss.ShardDataset(url)] == [0, 1, 2]


# --- fields and columns


def test_other_fields_are_refused(url: str) -> None:
    with pytest.raises(OptionError, match="new samples lack txt, .* and have json"):
        ss.pack([{"__key__": "x", "cls": 1, "json": {}}], url, append=True)
    ss.pack([{"__key__": "x", "cls": 90, "txt": "x"}], url, append=True)
    assert numbers(url)[-1] == 90


def test_columns_are_those_of_the_dataset(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    url = make_shards(tmp_path / "d", samples=samples(0, N), per_shard=9, columns=["n=cls"])
    ss.pack(samples(N, 60), url, append=True)
    with ss.ShardWriter(url, append=True) as writer:
        writer.write(samples(60, 61)[0])
    assert ss.catalog.read_columns(url)["n"].to_pylist() == [*range(61)]
    assert numbers(url, where="n >= 39") == [*range(39, 61)]
    with pytest.raises(
        OptionError, match="the dataset has the columns n=cls, not the columns m=cls"
    ):
        ss.pack(samples(70, 80), url, append=True, columns=["m=cls"])
    plain = make_shards(tmp_path / "plain", samples=samples(0, N))
    with pytest.raises(OptionError, match="has no columns"):
        ss.pack(samples(70, 80), plain, append=True, columns=["m=cls"])
    typed = make_shards(
        tmp_path / "typed", samples=[{"__key__": "a", "json": {"n": 1}}], columns=["json.n"]
    )
    with pytest.raises(OptionError, match="do not fit together"):
        ss.pack([{"__key__": "b", "json": {"n": "one"}}], typed, append=True)


# --- what cannot be appended to


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda _: None, {}, "no dataset to append to"),
        (lambda url: make_shards(url, samples=samples(0, 3)), {"overwrite": True}, "leave overwrite"),
        (lambda url: make_shards(url, samples=samples(0, 3)), {"name": "x"}, "leave overwrite and name"),
        (lambda url: make_shards(url, samples=samples(0, 3)), {"split": {"a": 0.5, "b": 0.5}}, "not the splits a, b"),
    ],
)  # fmt: skip
def test_what_is_refused(
    make: Callable[[str], object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "data")
    make(url)
    with pytest.raises(OptionError, match=message):
        ss.pack(samples(3, 9), url, append=True, **options)


def test_splits_are_appended_one_by_one(tmp_path: Path) -> None:
    def write(name: str, classes: list[str]) -> Path:
        for number, one in enumerate(classes * 10):
            (tmp_path / name / one).mkdir(parents=True, exist_ok=True)
            picture = PIL.Image.new("RGB", (8, 8), (number, 0, 0))
            picture.save(tmp_path / name / one / f"{name}{number}.jpg")
        return tmp_path / name

    split, dest, new = {"train": 0.8, "val": 0.2}, tmp_path / "dest", tmp_path / "new"
    ss.pack(write("old", ["cat", "dog"]), dest, split=split)
    later = write("later", ["ant", "dog"])
    with pytest.raises(OptionError, match=r"not the splits train, val.*dest/train"):
        ss.pack(later, dest, split=split, append=True)
    with pytest.raises(StorageError, match="found: train/, val/.*; name the folder that holds"):
        ss.pack(later, dest, append=True)
    ss.pack(later, new, split=split, classes=["cat", "dog", "ant"])
    for name, count in (("train", 32), ("val", 8)):
        ss.pack(new / name, dest / name, append=True)
        names = json.loads((dest / name / "classes.json").read_text())
        assert names == ["cat", "dog", "ant"]
        found = [*ss.ShardDataset(dest / name)]
        assert len({one["__key__"] for one in found}) == len(found) == count
        assert {names[int(one["cls"])] for one in found} == {*names}


def test_a_dataset_without_indexes_is_refused(url: str) -> None:
    (Path(url) / "000002.tar.idx").unlink()
    with pytest.raises(OptionError, match=r"shardstream index.*000002\.tar"):
        ss.pack(samples(N, 60), url, append=True)


def test_gc_keeps_the_keys(url: str) -> None:
    ss.pack(samples(N, 60), url, append=True)
    files = {one["name"] for one in version(url)["keys"]}
    for path in Path(url).glob("keys-*.npy"):
        os.utime(path, (0, 0))
    ss.versions.gc(url, keep=1, dry_run=False)
    assert files == {path.name for path in Path(url).glob("keys-*.npy")}
    with pytest.raises(SourceError, match="'000050'"):
        ss.pack(samples(50, 61), url, append=True)


# --- publications of a writer that goes on


@pytest.mark.parametrize("check_keys", [True, False])
def test_a_writer_publishes_what_is_written_so_far(url: str, check_keys: bool) -> None:
    end = N
    with ss.ShardWriter(url, append=True, max_samples=4, check_keys=check_keys) as writer:
        for count in (1, 9, 0, 4, 2):
            for sample in samples(end, end + count):
                writer.write(sample)
            end += count
            writer.publish()
            assert numbers(url) == [*range(end)]
        for sample in samples(end, end + 3):
            writer.write(sample)
    assert numbers(url) == [*range(end + 3)]
    assert version(url)["number"] == 6
    assert numbers(url, version=3) == [*range(N + 10)]
    assert left_in(url) == []
    assert json.loads((Path(url) / "index.json").read_text())["fields"] == {
        "cls": end + 3,
        "txt": end + 3,
    }


def test_a_key_that_was_published_before_is_refused(url: str) -> None:
    writer = ss.ShardWriter(url, append=True)
    for sample in samples(N, 50):
        writer.write(sample)
    writer.publish()
    writer.write(samples(45, 46)[0])
    with pytest.raises(SourceError, match="'000045'"):
        writer.close()
    assert numbers(url) == [*range(50)]  # what was published stays
    unchecked = ss.ShardWriter(url, append=True, check_keys=False)
    for _ in range(2):
        unchecked.write(samples(70, 71)[0])
        if unchecked.nsamples == 1:
            unchecked.publish()
    with pytest.raises(SourceError, match="'000070'"):  # its own are compared
        unchecked.close()


def test_publications_go_by_time_and_beside_others(url: str) -> None:
    with ss.ShardWriter(url, append=True, publish_s=0) as writer:
        for number, sample in enumerate(samples(N, 50)):
            writer.write(sample)
            ss.pack(samples(100 + number, 101 + number), url, append=True)
    found = numbers(url)
    assert [number for number in found if number < 100] == [*range(50)]
    assert [number for number in found if number >= 100] == [*range(100, 110)]
    new = ss.ShardWriter(f"{url}-new")
    with pytest.raises(OptionError, match="append=True"):
        new.publish()
    new.abort()
    with pytest.raises(OptionError, match="append=True"):
        ss.ShardWriter(f"{url}-new", publish_s=1)


def test_the_command_takes_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--key", "key", "--map", "cls=cls", "--map", "txt=txt", "--max-samples", "7"]
    for name, first, last in (("old", 0, N), ("new", N, 60)):
        write_table(tmp_path / f"{name}.jsonl", first, last)
    assert main(["pack", "old.jsonl", "data", *options]) == 0
    assert main(["pack", "new.jsonl", "data", "--append", *options]) == 0
    with ss.ShardWriter("data", append=True) as writer:
        writer.write(samples(60, 61)[0])
    assert numbers("data") == [*range(61)]
    capsys.readouterr()
    assert main(["verify", "data"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["pack", "new.jsonl", "data", "--append", *options]) == 1
    assert "appended already" in capsys.readouterr().err


def test_shards_of_an_open_writer_are_compacted_and_removed(url: str) -> None:
    with ss.ShardWriter(url, append=True, publish_s=60) as writer:
        for first in (N, N + 10):
            for sample in samples(first, first + 10):
                writer.write(sample)
            writer.publish()
            ss.delete(url, keys=[f"{first:06d}"])
            ss.compact(url)
            ss.versions.gc(url, keep=1, dry_run=False)
        writer.write(samples(N + 20, N + 21)[0])
    assert numbers(url) == [*range(N), *range(N + 1, N + 10), *range(N + 11, N + 21)]
    assert ss.verify(url).problems == ()
