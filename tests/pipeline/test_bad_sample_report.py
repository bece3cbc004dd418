"""Test the list of bad samples of all workers and epochs, and its report file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from shardstream.distributed import Placement
from shardstream.errors import OptionError, SkipBudgetError
from shardstream.pipeline import BadSample, BadSampleReport
from shardstream.storage import Storage
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES, grouped, labels

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
BAD = (3, 17, 18, 33)


def even(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 17:
        raise ZeroDivisionError("17 is odd")
    return sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Dataset of 40 samples in shards of 10: two with invalid JSON, one that a function refuses, one with a damaged header."""
    samples = [
        {"__key__": f"k{n:02d}", "cls": n, "json": b"{" if n in (3, 33) else b"[1]"}
        for n in range(40)
    ]
    place = make_shards(tmp_path_factory.mktemp("bad"), samples=samples, per_shard=10)
    tar = Path(place) / "000001.tar"
    data = bytearray(tar.read_bytes())
    data[8 * 2048] ^= 0xFF  # the first header of sample 18
    tar.write_bytes(data)
    return place


def loader(folder: str, on_error: Any = "skip", *, num_workers: int = 0, **more: Any) -> Any:
    dataset = ss.ShardDataset(folder, **grouped(on_error=on_error, **more)).decode().map(even)
    return ss.ShardLoader(dataset, batch_size=4, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_each_bad_sample_is_listed_with_its_position(num_workers: int, folder: str) -> None:
    one = loader(folder, num_workers=num_workers)
    assert one.bad_samples == []
    list(one)
    found = sorted(one.bad_samples, key=lambda bad: bad.number)
    assert [bad.number for bad in found] == [*BAD]
    places = [(Path(bad.shard).name, bad.offset, bad.key, bad.field, bad.error) for bad in found]
    assert places == [
        ("000000.tar", 3 * 2048, "k03", "json", "DecodeError"),
        ("000001.tar", 7 * 2048, "k17", None, "ZeroDivisionError"),
        ("000001.tar", 8 * 2048, None, None, "ShardError"),
        ("000003.tar", 3 * 2048, "k33", "json", "DecodeError"),
    ]
    assert [bad.rank for bad in found] == [0] * 4
    assert {bad.worker for bad in found} <= set(range(max(1, num_workers)))
    assert "17 is odd" in found[1].message
    assert "map(even)" in found[1].message


def test_sample_that_is_bad_in_every_epoch_is_listed_once(folder: str) -> None:
    one = loader(folder, shuffle=True, num_workers=2)
    for _ in range(3):
        list(one)
        assert one.skipped == {"DecodeError": 2, "ZeroDivisionError": 1, "ShardError": 1}
    assert [bad.epoch for bad in one.bad_samples] == [0] * 4


def test_list_grows_with_the_yielded_batches(folder: str) -> None:
    one = loader(folder, num_workers=2)
    counts = [len(one.bad_samples) for _ in one]
    assert counts == [1, 1, 1, 1, 3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_list_is_available_after_the_budget_is_exceeded(num_workers: int, folder: str) -> None:
    one = loader(folder, ss.SkipBudget(samples=0), num_workers=num_workers)
    with pytest.raises(SkipBudgetError, match=r"1 bad sample, limit 0 .*k03"):
        list(one)
    assert [bad.key for bad in one.bad_samples] == ["k03"]
    assert one.state_dict()["consumed"] == 0


def test_steps_that_change_counts_list_bad_samples(folder: str) -> None:
    dataset = ss.ShardDataset(folder, on_error="skip").decode().select(even).batched(4)  # type: ignore[arg-type]
    one = ss.ShardLoader(dataset, batch_size=None, num_workers=2)
    list(one)
    found = {(bad.key, bad.error) for bad in one.bad_samples}
    assert found == {("k03", "DecodeError"), ("k17", "ZeroDivisionError"), ("k33", "DecodeError"), (None, "ShardError")}  # fmt: skip


def test_sequential_reads_list_the_byte_offset(folder: str) -> None:
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore"), on_error="skip")
    one = ss.ShardLoader(dataset, batch_size=4)
    list(one)
    (bad,) = one.bad_samples
    assert (Path(bad.shard or "").name, bad.offset) == ("000001.tar", 8 * 2048)


def test_mix_lists_the_shards_of_its_parts(folder: str) -> None:
    parts = [ss.ShardDataset(folder, on_error="skip").decode() for _ in range(2)]
    one = ss.ShardLoader(ss.mix(parts), batch_size=4)
    list(one)
    assert {(bad.key, bad.number) for bad in one.bad_samples if bad.key} == {("k03", None), ("k33", None)}  # fmt: skip


def test_plain_iteration_lists_bad_samples(folder: str) -> None:
    samples = iter(ss.ShardDataset(folder, on_error="skip").decode().map(even))
    assert len(list(samples)) == 36
    assert len(samples.bad_samples) == len(samples.bad_samples) == 4
    assert samples.skipped == {"DecodeError": 2, "ZeroDivisionError": 1, "ShardError": 1}


def test_plain_iteration_lists_numbers_of_the_dataset(folder: str) -> None:
    """Not those of copies that are drawn by weight; none in a mix, where they may count in a part."""

    def numbers(dataset: Any) -> set[int | None]:
        samples = iter(dataset)
        assert list(samples)
        return {bad.number for bad in samples.bad_samples}

    drawn = ss.ShardDataset(
        folder, on_error="skip", weights=[1.0 + 99 * (n == 18) for n in range(40)]
    )
    assert numbers(drawn) == {18}
    parts = [ss.ShardDataset(folder, on_error="skip").decode().map(even) for _ in range(2)]
    assert numbers(ss.mix(parts)) == {None}


# --- the report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_report_has_one_json_line_per_bad_sample(folder: str, tmp_path: Path) -> None:
    report = tmp_path / "logs" / "bad.jsonl"
    one = loader(folder, ss.SkipBudget(report=str(report)), num_workers=2)
    list(one)
    found = lines(report)
    assert [line["number"] for line in found] == [bad.number for bad in one.bad_samples]
    assert [ss.pipeline.BadSample(**line) for line in found] == one.bad_samples


def test_report_is_written_after_a_break(folder: str, tmp_path: Path) -> None:
    report = tmp_path / "bad.jsonl"
    one = loader(folder, ss.SkipBudget(report=str(report)))
    for step, _ in enumerate(one):
        if step == 5:
            break
    assert {line["key"] for line in lines(report)} == {"k03", "k17", None}


def test_report_keeps_the_entries_of_earlier_runs(folder: str, tmp_path: Path) -> None:
    report = tmp_path / "bad.jsonl"
    list(loader(folder, ss.SkipBudget(report=str(report))))
    before = report.read_text(encoding="utf-8")
    earlier = json.loads(before.splitlines()[0]) | {"key": "other"}
    report.write_text(json.dumps(earlier) + "\n" + before, encoding="utf-8")
    list(loader(folder, ss.SkipBudget(report=str(report))))
    assert [line["key"] for line in lines(report)][:2] == ["other", "k03"]
    assert len(lines(report)) == 5


def test_epoch_without_bad_samples_writes_no_report(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "data", samples=20)
    list(
        ss.ShardLoader(ss.ShardDataset(folder, on_error=ss.SkipBudget(report=str(tmp_path / "r"))))
    )
    assert not (tmp_path / "r").exists()


def test_report_does_not_overwrite_another_file(folder: str, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("once upon a time\n", encoding="utf-8")
    with pytest.raises(OptionError, match="is not a report of bad samples"):
        list(loader(folder, ss.SkipBudget(report=str(precious))))
    assert precious.read_text(encoding="utf-8") == "once upon a time\n"


def test_each_rank_writes_its_own_report(folder: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"2 ranks would write one file; put \{rank\}"):
        loader(folder, ss.SkipBudget(report="bad.jsonl"), placement=ss.Placement(0, 2))
    report = str(tmp_path / "bad-{rank}.jsonl")
    steps = []
    for rank in range(2):
        one = loader(folder, ss.SkipBudget(report=report), placement=ss.Placement(rank, 2))
        steps.append(len(labels(one)))
    assert steps == [5, 5]
    # without shuffle all of them belong to rank 0
    assert [line["number"] for line in lines(tmp_path / "bad-0.jsonl")] == [3, 18, 17, 33]
    assert {line["rank"] for line in lines(tmp_path / "bad-0.jsonl")} == {0}
    assert not (tmp_path / "bad-1.jsonl").exists()


def test_report_can_be_written_to_any_filesystem(folder: str) -> None:
    url = "memory://logs/bad.jsonl"
    list(loader(folder, ss.SkipBudget(report=url)))
    assert len(Storage().read(url).splitlines()) == 4


# --- a report that cannot be written


def no_room(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 30:
        raise MemoryError("mine")
    return sample


def nowhere(tmp_path: Path) -> str:
    """Path under a file, which cannot be written."""
    (tmp_path / "file").write_bytes(b"")
    return str(tmp_path / "file" / "bad.jsonl")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unwritable_report_does_not_replace_the_error(
    num_workers: int, folder: str, tmp_path: Path
) -> None:
    budget = ss.SkipBudget(report=nowhere(tmp_path))
    dataset = ss.ShardDataset(folder, on_error=budget).decode().map(even).map(no_room)
    with pytest.raises(MemoryError, match="mine") as caught:
        list(ss.ShardLoader(dataset, batch_size=4, num_workers=num_workers))
    assert "the report of bad samples cannot be written" in caught.value.__notes__[-1]


def test_unwritable_report_causes_a_warning(folder: str, tmp_path: Path) -> None:
    one = loader(folder, ss.SkipBudget(report=nowhere(tmp_path)))
    with pytest.warns(
        ss.errors.ReportWarning, match=r"cannot be written: .*bad.jsonl.*training continues"
    ):
        assert len(list(one)) == 10
    assert len(one.bad_samples) == 4


class Slow(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that requires a password, and responds when the test releases it."""

    protocol = "slowmemory"
    store: ClassVar[dict[str, Any]] = {}
    is_requested, may_answer = threading.Event(), threading.Event()

    def __init__(self, access: str = "", **options: Any) -> None:
        if access != "sesame":
            raise ValueError("no entry")
        super().__init__(**options)

    def info(self, path: str, **options: Any) -> Any:
        if "report" in path:
            self.is_requested.set()
            assert self.may_answer.wait(300)
        return super().info(path, **options)


@pytest.fixture
def _slow() -> Iterator[None]:
    fsspec.register_implementation("slowmemory", Slow, clobber=True)
    Slow.is_requested.clear()
    Slow.may_answer.clear()
    yield
    Slow.may_answer.set()


@pytest.mark.usefixtures("_slow")
def test_report_is_written_in_the_background_with_the_storage_options_of_the_data() -> None:
    options = {"access": "sesame"}
    samples = [{"__key__": f"{n:02d}", "cls": n} for n in range(40)]
    url = make_shards("slowmemory://data", samples=samples, per_shard=10, storage_options=options)
    dataset = ss.ShardDataset(
        url,
        storage_options=options,
        on_error=ss.SkipBudget(report="slowmemory://logs/report.jsonl"),
    )
    batches = iter(ss.ShardLoader(dataset.decode().map(even), batch_size=4))
    assert sum(1 for _ in islice(batches, 9)) == 9
    assert Slow.is_requested.wait(300)  # being written since the fifth batch
    Slow.may_answer.set()
    assert sum(1 for _ in batches) == 1
    assert len(Storage(options).read("slowmemory://logs/report.jsonl").splitlines()) == 1


@pytest.mark.usefixtures("_slow")
def test_newest_report_stays_and_an_interrupted_run_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage({"access": "sesame"})
    report = BadSampleReport("slowmemory://logs/report-newest.jsonl", Placement(), storage)
    first, second = (BadSample(error="E", message="", key=key) for key in "ab")
    report.add([first], epoch=0, worker=0)
    assert Slow.is_requested.wait(300)  # the first is being written
    report.add([second], epoch=0, worker=0)
    set_limits(monkeypatch, BadSample, REPORT_TIMEOUT_S=0.01)
    assert "took over" in str(report.finish())
    assert report.finish(waits=False) is None
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("shardstream-report") == 2  # one writes, the other waits for it
    Slow.may_answer.set()
    set_limits(monkeypatch, BadSample, REPORT_TIMEOUT_S=300.0)
    assert report.finish() is None
    written = storage.read("slowmemory://logs/report-newest.jsonl").splitlines()
    assert [json.loads(line)["key"] for line in written] == ["a", "b"]
