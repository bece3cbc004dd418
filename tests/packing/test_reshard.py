"""Test that `reshard` keeps every sample, gives the same shards with any executor, and resumes a stopped job."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.cli import main
from shardstream.format import Manifest, decode_manifest
from shardstream.packing import Progress, cut_by_size
from tests.pairs import with_slow_rest

ROOT = Path(__file__).parent.parent.parent
NSAMPLES = 240


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Dataset of 240 samples of 1 to 3,000 bytes in shards of 50, with class names."""
    folder = tmp_path_factory.mktemp("source") / "train"
    random = np.random.default_rng(0)
    with ss.ShardWriter(folder, max_samples=50) as writer:
        for number in range(NSAMPLES):
            data = random.bytes(int(random.integers(1, 3000)))
            writer.write({"__key__": f"{number:04d}", "bin": data, "cls": number % 2})
    (folder / "classes.json").write_text('["even", "odd"]')
    return str(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def keys_of(folder: Path | str) -> list[str]:
    return [sample["__key__"] for sample in ss.ShardDataset(str(folder)).by_number()]


def fields_of(folder: Path | str) -> list[tuple[str, bytes]]:
    return [
        (sample["__key__"], sample["bin"]) for sample in ss.ShardDataset(str(folder)).by_number()
    ]


def is_even(sample: Mapping[str, Any]) -> bool:
    return bool(sample["cls"] == b"0")


def same(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    return sample


def double_bytes(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "bin": sample["bin"] * 2, "txt": "doubled"}


def name_by_twos(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Give two samples in one new shard different keys, which those of the next shard have, too."""
    return {**sample, "__key__": f"{int(sample['__key__']) % 2}"}


class BatchModel:
    """A model that adds the size of its batch."""

    def __call__(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**sample, "count": len(batch)} for sample in batch]


class CountedModel(BatchModel):
    """A model that counts how often it was loaded in this process."""

    loaded = 0

    def __init__(self) -> None:
        type(self).loaded += 1

    def __call__(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**sample, "id": self.loaded} for sample in super().__call__(batch)]


def raise_at_77(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    if sample["__key__"] == "0077":
        raise ValueError("no caption")
    return sample


class SlowDown:
    """A step with a pause for each sample, so that the process can be killed between samples."""

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        time.sleep(0.01)
        return sample


def test_samples_keep_their_order_in_shards_of_another_size(source: str, tmp_path: Path) -> None:
    report = ss.reshard(source, tmp_path / "new", max_samples=100, max_bytes="64kB")
    assert fields_of(tmp_path / "new") == fields_of(source)
    assert (report.samples, report.shards) == (
        NSAMPLES,
        len(list((tmp_path / "new").glob("*.tar"))),
    )
    sizes = [path.stat().st_size for path in sorted((tmp_path / "new").glob("*.tar"))]
    assert max(sizes) <= 64_000
    assert min(sizes[:-1]) > 64_000 - 5_000  # another sample would not fit
    assert not ss.verify(str(tmp_path / "new")).problems
    assert (tmp_path / "new" / "classes.json").read_text().count("even") == 1
    assert not list((tmp_path / "new").glob(".*"))


def test_seed_gives_a_random_order_of_all_samples(source: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        ss.reshard(source, tmp_path / str(seed), max_samples=70, seed=seed)
    orders = [keys_of(tmp_path / "0"), keys_of(tmp_path / "1"), keys_of(source)]
    assert sorted(orders[0]) == sorted(orders[1]) == orders[2]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    # Samples are mixed globally: the first 60 contain some of each fifth of the source.
    assert {int(key) // 48 for key in orders[0][:60]} == set(range(5))
    counts = [len(keys_of(path)) for path in sorted((tmp_path / "0").glob("*.tar"))]
    assert counts == [60, 60, 60, 60]


def test_wds_shards_without_index_can_be_resharded_from_disk(source: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in Path(source).glob("*.tar"):
        (bare / path.name).write_bytes(path.read_bytes())
    ss.reshard(str(bare), tmp_path / "new")
    assert fields_of(tmp_path / "new") == fields_of(source)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": 3, "fields": ["cls"]},
    {"map": double_bytes, "version": 1},
    {"map": BatchModel, "batch_size": 7, "version": "a"},
]


@pytest.mark.parametrize(
    "options",
    with_slow_rest(OPTIONS[:3], OPTIONS),
    ids=lambda options: "-".join(options) or "plain",
)
def test_executors_and_parts_write_the_same_bytes(
    source: str, tmp_path: Path, options: dict[str, Any], two_processes: ProcessPoolExecutor
) -> None:
    limits: dict[str, Any] = {"max_samples": 100, "max_bytes": "50kB"}
    ss.reshard(source, tmp_path / "one", **limits, **options)
    own = "batch_size" in options
    executor = (
        ss.tasks.LocalExecutor(processes=2) if own else ss.tasks.FuturesExecutor(two_processes)
    )
    ss.reshard(source, tmp_path / "two", executor=executor, **limits, **options)
    for part in (3, 1, 2, 1):
        ss.reshard(
            source, tmp_path / "parts", executor=ss.tasks.Parts(part, 3), **limits, **options
        )
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(str(tmp_path / "parts"))
    ss.merge(tmp_path / "parts")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "parts")
    assert max(path.stat().st_size for path in (tmp_path / "one").glob("*.tar")) <= 50_000
    assert not ss.verify(str(tmp_path / "one")).problems


def test_select_map_and_fields_change_the_samples(source: str, tmp_path: Path) -> None:
    report = ss.reshard(
        ss.ShardDataset(source).select(is_even),
        tmp_path / "new",
        map=double_bytes,
        fields=["bin", "txt"],
    )
    assert report.fields == {"bin": NSAMPLES // 2, "txt": NSAMPLES // 2}
    expected = [(key, data * 2) for key, data in fields_of(source) if int(key) % 2 == 0]
    assert fields_of(tmp_path / "new") == expected


def test_field_that_only_the_function_makes_can_be_kept(source: str, tmp_path: Path) -> None:
    report = ss.reshard(source, tmp_path / "new", map=double_bytes, fields="txt")
    assert report.fields == {"txt": NSAMPLES}


def test_a_class_is_instantiated_once_and_gets_batches(source: str, tmp_path: Path) -> None:
    CountedModel.loaded = 0
    ss.reshard(source, tmp_path / "new", max_samples=50, map=CountedModel, batch_size=20)
    samples = list(ss.ShardDataset(str(tmp_path / "new")).by_number())
    assert {sample["id"] for sample in samples} == {b"1"}
    assert [int(sample["count"]) for sample in samples[:50]] == [20] * 40 + [10] * 10


def test_growing_samples_begin_further_shards_within_the_limit(source: str, tmp_path: Path) -> None:
    ss.reshard(source, tmp_path / "new", max_bytes="100kB", map=double_bytes)
    manifest = decode_manifest((tmp_path / "new" / "index.json").read_bytes(), url="index.json")
    assert isinstance(manifest, Manifest)
    names = [shard.url for shard in manifest.shards]
    assert names[:3] == ["000000.tar", "000000_01.tar", "000001.tar"]
    assert keys_of(tmp_path / "new") == keys_of(source)


@pytest.mark.parametrize(
    "executor",
    [None, pytest.param(ss.tasks.LocalExecutor(processes=2), marks=pytest.mark.slow)],
)
def test_error_of_a_function_names_shard_and_key(
    source: str, tmp_path: Path, executor: ss.tasks.Executor | None
) -> None:
    with pytest.raises(
        ss.errors.SourceError, match=r"no caption.*map\(raise_at_77\).*'0077' of .*000001.tar"
    ):
        ss.reshard(source, tmp_path / "new", map=raise_at_77, max_samples=30, executor=executor)
    assert not (tmp_path / "new" / "index.json").exists()
    with pytest.raises(ss.errors.UnfinishedError, match="written in parts"):
        ss.ShardDataset(str(tmp_path / "new"))
    # A corrected function is another job: it must not be mixed with the shards of the first.
    with pytest.raises(ss.errors.OptionError, match="steps was"):
        ss.reshard(source, tmp_path / "new", max_samples=30, map=double_bytes)
    ss.reshard(source, tmp_path / "new", max_samples=30, map=double_bytes, overwrite=True)
    assert keys_of(tmp_path / "new") == keys_of(source)
    assert not ss.verify(str(tmp_path / "new")).problems


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": lambda sample: [sample]}, "returned list, not a dict"),
        ({"map": lambda batch: batch[:-1], "batch_size": 4}, "map returned 3 for 4 samples"),
        ({"map": lambda sample: {**sample, "__key__": 7}}, "__key__ is text"),
        ({"map": lambda sample: {**sample, "bin": 7}}, "takes bytes, not int"),
        ({"map": lambda sample: {**sample, "__key__": "same"}}, "key is in the shard already"),
        ({"fields": ["jpg"]}, "no sample has the field jpg; the fields are bin, cls"),
        ({"fields": ["bin", "clss"]}, "no sample has the field clss; the fields are bin, cls"),
        ({"fields": ["txt"], "map": same}, "a sample without fields would be lost"),
        ({"fields": ["bin", "txt"], "map": same}, "no sample has the field txt, which was to be"),
        ({"batch_size": 4}, "batch_size"),
        ({"max_samples": 0}, "max_samples"),
    ],
)
def test_bad_options_and_results_are_refused(
    source: str, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ss.ShardStreamError, match=message):
        ss.reshard(source, tmp_path / "new", **options)
    assert not (tmp_path / "new" / "index.json").exists()


def test_function_that_other_processes_cannot_import_is_refused(
    source: str, tmp_path: Path
) -> None:
    executor = ss.tasks.LocalExecutor(processes=2)
    with pytest.raises(ss.errors.OptionError, match="importable"):
        ss.reshard(source, tmp_path / "new", map=lambda sample: sample, executor=executor)


def test_key_that_two_new_shards_have_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(
        ss.errors.SourceError, match=r"comes twice, in .*nothing is published; .*map="
    ):
        ss.reshard(source, tmp_path / "new", max_samples=2, map=name_by_twos)
    assert not (tmp_path / "new" / "index.json").exists()


def test_source_must_not_be_the_destination(source: str) -> None:
    with pytest.raises(ss.errors.OptionError, match="write elsewhere"):
        ss.reshard(source, source, overwrite=True)
    assert len(keys_of(source)) == NSAMPLES


def test_published_dataset_is_replaced_only_with_overwrite(source: str, tmp_path: Path) -> None:
    ss.reshard(source, tmp_path / "new", max_samples=20)
    with pytest.raises(ss.errors.OptionError, match="overwrite"):
        ss.reshard(source, tmp_path / "new", max_samples=100)
    report = ss.reshard(source, tmp_path / "new", max_samples=100, overwrite=True)
    assert report.shards == len(list((tmp_path / "new").glob("*.tar"))) == 3
    assert not ss.verify(str(tmp_path / "new")).problems


def test_source_that_changes_between_parts_is_detected(source: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ss.reshard(source, copy, max_samples=60)
    ss.reshard(str(copy), tmp_path / "new", max_samples=30, executor=ss.tasks.Parts(1, 2))
    ss.reshard(source, copy, max_samples=60, seed=1, overwrite=True)  # same sizes, other samples
    with pytest.raises(ss.errors.OptionError, match="the source has changed"):
        ss.reshard(str(copy), tmp_path / "new", max_samples=30, executor=ss.tasks.Parts(2, 2))


def test_tar_that_is_replaced_between_parts_is_detected_without_checksums(
    source: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "index.json").unlink()
    ss.reshard(str(copy), tmp_path / "new", max_samples=30, executor=ss.tasks.Parts(1, 2))
    first = min(copy.glob("*.tar"))
    data = bytearray(first.read_bytes())
    data[512] ^= 1  # a body: same names and sizes
    first.write_bytes(data)
    with pytest.raises(ss.errors.OptionError, match="the source has changed"):
        ss.reshard(str(copy), tmp_path / "new", max_samples=30, executor=ss.tasks.Parts(2, 2))


def test_tasks_are_small_whatever_the_number_of_shards(source: str, tmp_path: Path) -> None:
    class Measures:
        sizes: ClassVar[list[int]] = []

        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for task in tasks:
                self.sizes.append(len(pickle.dumps(task)))
                done(task, task.run())

    ss.reshard(source, tmp_path / "new", max_samples=2, executor=Measures())
    assert len(Measures.sizes) == NSAMPLES // 2
    assert max(Measures.sizes) < 4_000


def test_progress_has_the_retries_of_the_executor(source: str, tmp_path: Path) -> None:
    class RunsEachTaskTwice:
        retries = 5  # of an earlier job

        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for task in tasks:
                task.run()
                self.retries += 1
                done(task, task.run())

    reports: list[Progress] = []
    ss.reshard(
        source,
        tmp_path / "new",
        max_samples=60,
        executor=RunsEachTaskTwice(),
        progress=reports.append,
    )
    assert [(one.shards, one.samples, one.retries) for one in reports] == [
        (1, 60, 1),
        (2, 120, 2),
        (3, 180, 3),
        (4, 240, 4),
    ]


def test_executor_that_loses_a_task_publishes_nothing(source: str, tmp_path: Path) -> None:
    class LosesOne:
        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for number, task in enumerate(tasks):
                if number != 2:
                    done(task, task.run())

    with pytest.raises(ss.errors.UnfinishedError, match="1 of 4 tasks are not done: number 2"):
        ss.reshard(source, tmp_path / "new", max_samples=60, executor=LosesOne())
    assert not (tmp_path / "new" / "index.json").exists()


def test_job_killed_at_any_time_is_resumed_to_the_same_bytes(source: str, tmp_path: Path) -> None:
    ss.reshard(source, tmp_path / "whole", max_samples=20, map=SlowDown, version=1)
    command = [sys.executable, "-c", (
        "import sys, shardstream as ss\n"
        "from tests.packing.test_reshard import SlowDown\n"
        "if __name__ == '__main__':\n"
        "    report = ss.reshard(sys.argv[1], sys.argv[2], max_samples=20, map=SlowDown, version=1)\n"
        "    print(report.kept)\n"
    ), source, str(tmp_path / "new")]  # fmt: skip
    for wanted in (2, 5):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 120
            while len(list((tmp_path / "new").glob(".*part-0*.json"))) < wanted:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 5
    assert files_of(tmp_path / "new") == files_of(tmp_path / "whole")


def test_reshard_on_s3_with_the_same_bytes(
    source: str, tmp_path: Path, bucket: str, s3_env: None
) -> None:
    ss.reshard(source, f"{bucket}/copy", max_samples=50)
    options: dict[str, Any] = {"max_samples": 100, "max_bytes": "50kB", "seed": 2}
    for part in (2, 1):
        ss.reshard(f"{bucket}/copy", f"{bucket}/new", executor=ss.tasks.Parts(part, 2), **options)
    ss.merge(f"{bucket}/new")
    ss.reshard(source, tmp_path / "new", **options)
    assert fields_of(f"{bucket}/new") == fields_of(tmp_path / "new")
    assert not ss.verify(f"{bucket}/new").problems


@given(
    sizes=st.lists(st.lists(st.integers(1, 50), max_size=30), min_size=1, max_size=6),
    max_samples=st.integers(1, 10),
    max_bytes=st.integers(1, 120),
)
def test_runs_cover_all_sizes_and_none_could_be_longer(
    sizes: list[list[int]], max_samples: int, max_bytes: int
) -> None:
    flat = [size for some in sizes for size in some]
    arrays = [np.array(some, dtype=np.int64) for some in sizes]
    firsts = cut_by_size(arrays, max_samples, max_bytes).tolist()
    assert firsts[0] == 0
    assert firsts[-1] == len(flat)
    for first, last in itertools.pairwise(firsts):
        run = flat[first:last]
        assert 1 <= len(run) <= max_samples or not flat
        assert sum(run) <= max_bytes or len(run) == 1
        if last < len(flat):
            assert len(run) == max_samples or sum(flat[first : last + 1]) > max_bytes


class Adds:
    """Instances have one name, whatever they hold."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.n < 0 and sample["__key__"] == "0077":
            raise ValueError("stopped")
        return {**sample, "cls": abs(self.n)}


def classes_of(folder: Path) -> set[bytes]:
    return {sample["cls"] for sample in ss.ShardDataset(str(folder)).by_number()}


@pytest.mark.slow
def test_stopped_job_with_functions_and_no_version_begins_again_with_a_warning(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dest = tmp_path / "new"
    for executor in (None, ss.tasks.LocalExecutor(processes=2)):
        options: dict[str, Any] = {"max_samples": 20, "executor": executor, "overwrite": True}
        with pytest.raises(ss.errors.SourceError, match="stopped"):
            ss.reshard(source, dest, map=Adds(-1), **options)
        assert list(dest.glob(".*part-0*.json"))
        report = ss.reshard(source, dest, map=Adds(2), **(options | {"overwrite": False}))
        assert (report.kept, classes_of(dest)) == (0, {b"2"})
        assert "the stopped job begins again" in caplog.text
        caplog.clear()
        assert keys_of(dest) == keys_of(source)


def test_stopped_job_with_functions_goes_on_with_its_version_only(
    source: str, tmp_path: Path
) -> None:
    dest = tmp_path / "new"
    options: dict[str, Any] = {"max_samples": 20}
    with pytest.raises(ss.errors.SourceError, match="stopped"):
        ss.reshard(source, dest, map=Adds(-1), version=1, **options)
    with pytest.raises(ss.errors.OptionError, match="version was 1, now 2"):
        ss.reshard(source, dest, map=Adds(2), version=2, **options)
    with pytest.raises(ss.errors.OptionError, match="steps was"):
        ss.reshard(source, dest, map=double_bytes, version=1, **options)
    assert ss.reshard(source, dest, map=Adds(1), version=1, **options).kept > 0
    assert classes_of(dest) == {b"1"}


@pytest.mark.parametrize(
    "options", [{"map": double_bytes}, {"map": BatchModel, "batch_size": 2}], ids="-".join
)
def test_parts_with_functions_need_a_version(
    options: dict[str, Any], source: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.errors.OptionError, match="pass version= to reshard"):
        ss.reshard(source, tmp_path / "new", executor=ss.tasks.Parts(1, 2), **options)
    dataset = ss.ShardDataset(source)
    for steps in (dataset.decode(fields={"cls": len}), dataset.select(is_even)):
        with pytest.raises(ss.errors.OptionError, match="pass version= to reshard"):
            ss.reshard(steps, tmp_path / "new", executor=ss.tasks.Parts(1, 2))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [["--seed", "7"], ["--shuffle", "--seed", "7"]], ids=str)
def test_seed_shuffles_in_the_command_as_in_python(
    options: list[str], source: str, tmp_path: Path
) -> None:
    assert main(["reshard", source, str(tmp_path / "a"), *options]) == 0
    ss.reshard(source, tmp_path / "b", seed=7)
    assert (tmp_path / "a" / "000000.tar").read_bytes() == (
        tmp_path / "b" / "000000.tar"
    ).read_bytes()
