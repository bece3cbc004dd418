"""Test that `reshard` of a join by key gives each sample the fields of its own key, or an error, with any executor."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from shardstream.cli import main
from shardstream.storage import Storage
from tests.pairs import with_slow_rest

ROOT = Path(__file__).parent.parent.parent
NSAMPLES = 240
KEYS = [f"{number:04d}" for number in range(NSAMPLES)]


def shuffled(seed: int) -> list[str]:
    return [KEYS[number] for number in np.random.default_rng(seed).permutation(NSAMPLES)]


def caption(key: str) -> str:
    return f"caption of {key} " + "x" * (int(key) % 50)


def write_captions(folder: Path, keys: Iterable[str], **options: Any) -> str:
    with ss.ShardWriter(folder, max_samples=31, **options) as writer:
        for key in keys:
            emb = np.full(4, int(key), dtype=np.float32)
            writer.write({"__key__": key, "txt": caption(key), "emb.npy": emb})
    return str(folder)


def write_parquet(path: Path, keys: Iterable[str], *, key: str = "key", rows: int = 37) -> str:
    keys = list(keys)
    table = pa.table(
        {
            key: keys,
            "score": [int(one) * 2 for one in keys],
            "meta": [{"source": f"site {one}"} for one in keys],
        }
    )
    pq.write_table(table, path, row_group_size=rows)
    return str(path)


def write_repeated(path: Path) -> str:
    """Write a table that has two columns of one name."""
    columns = [pa.array(KEYS)] * 3
    pq.write_table(pa.Table.from_arrays(columns, ["key", "score", "score"]), path)
    return str(path)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Samples, and captions, scores and tags of the same keys in other orders."""
    folder = tmp_path_factory.mktemp("add")
    random = np.random.default_rng(0)
    with ss.ShardWriter(folder / "train", max_samples=50) as writer:
        for number, key in enumerate(KEYS):
            data = random.bytes(int(random.integers(1, 3000)))
            writer.write({"__key__": key, "bin": data, "cls": number % 2})
    with open(folder / "tags.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "tag", "other"])
        rows.writerows([key, f'a "tag",\nof {key}', "?"] for key in shuffled(3))
    with open(folder / "tags.jsonl", "w") as file:
        for key in KEYS:
            file.write(json.dumps({"key": key, "tag": f"tag {key}"}) + "\n")
    return {
        "train": str(folder / "train"),
        "captions": write_captions(folder / "captions", shuffled(1)),
        "same order": write_captions(folder / "same", KEYS),
        "scores": write_parquet(folder / "scores.parquet", shuffled(2)),
        "tags": str(folder / "tags.csv"),
        "tag lines": str(folder / "tags.jsonl"),
        "repeated": write_repeated(folder / "repeated.parquet"),
    }


@pytest.fixture
def memory_captions() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}"
    with ss.ShardWriter(url, max_samples=31) as writer:
        for key in shuffled(5):
            writer.write({"__key__": key, "txt": caption(key)})
    yield url
    MemoryFileSystem().rm(url, recursive=True)


class SlowMap:
    """A function whose instance takes a moment to make, so that threads wait for each other."""

    def __init__(self) -> None:
        time.sleep(0.1)

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        return sample


def samples_of(folder: Path | str) -> list[dict[str, Any]]:
    return list(ss.ShardDataset(str(folder)).by_number())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_even(sample: Mapping[str, Any]) -> bool:
    return int(sample["id"]) % 4 == 0  # the score is twice the number


def swap(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {**sample, "note.txt": sample["txt"].decode().upper()}


class SlowDown:
    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        time.sleep(0.01)
        return sample


def add_all(places: Mapping[str, str]) -> dict[str, Any]:
    return {
        places["captions"]: ["txt"],
        places["scores"]: {"id": "score", "meta.json": "meta"},
        places["tags"]: {"__key__": "id", "tag.txt": "tag"},
    }


def reshard_joined(
    source: str,
    dest: Path | str,
    *,
    add: str | Mapping[str, Any],
    missing: Any = "error",
    fields: Sequence[str] | None = None,
    select: Callable[[Mapping[str, Any]], bool] | None = None,
    **options: Any,
) -> ss.PackReport:
    """Write samples with fields of other sources, joined by key, as the command does with ``--add``."""
    named = add if isinstance(add, Mapping) else {add: None}
    others = [{url: names} for url, names in named.items()]
    dataset = ss.join({source: fields}, *others, by="key", missing=missing)
    return ss.reshard(dataset if select is None else dataset.select(select), dest, **options)


def test_fields_of_shards_and_tables_in_other_orders_are_joined_by_key(
    places: dict[str, str], tmp_path: Path
) -> None:
    report = reshard_joined(places["train"], tmp_path / "new", max_samples=100, add=add_all(places))
    before = samples_of(places["train"])
    found = samples_of(tmp_path / "new")
    assert [one["__key__"] for one in found] == KEYS
    for old, new in zip(before, found, strict=True):
        key = new["__key__"]
        assert (new["bin"], new["cls"]) == (old["bin"], old["cls"])
        assert new["txt"].decode() == caption(key)
        assert int(new["id"]) == int(key) * 2
        assert json.loads(new["meta.json"]) == {"source": f"site {key}"}
        assert new["tag.txt"].decode() == f'a "tag",\nof {key}'
        assert "emb.npy" not in new
    assert report.fields["txt"] == report.fields["id"] == NSAMPLES
    assert report.warnings == ()
    assert not ss.verify(str(tmp_path / "new")).problems
    assert not list((tmp_path / "new").glob(".*"))


@pytest.mark.parametrize("with_pool", [True, False])
def test_threads_share_no_sources(
    places: dict[str, str], tmp_path: Path, memory_captions: str, with_pool: bool
) -> None:
    def reshard(number: int, executor: ss.tasks.Executor) -> None:
        reshard_joined(
            places["train"],
            tmp_path / f"{number}",
            max_samples=60,
            add={memory_captions: ["txt"]},
            map=SlowMap,
            version=1,
            executor=executor,
        )

    with ThreadPoolExecutor(4) as pool:
        if with_pool:
            reshard(0, ss.tasks.FuturesExecutor(pool))
        else:  # two jobs, each in two parts
            jobs = [(number, ss.tasks.Parts(part, 2)) for number in (0, 1) for part in (1, 2)]
            list(pool.map(reshard, *zip(*jobs, strict=True)))
            assert ss.merge(tmp_path / "0").samples == ss.merge(tmp_path / "1").samples == NSAMPLES
    assert {one["__key__"]: one["txt"].decode() for one in samples_of(tmp_path / "0")} == {
        key: caption(key) for key in KEYS
    }


def test_all_fields_of_shards_are_added_without_names(
    places: dict[str, str], tmp_path: Path
) -> None:
    reshard_joined(places["train"], tmp_path / "new", add=places["same order"])
    for sample in samples_of(tmp_path / "new"):
        assert sample["txt"].decode() == caption(sample["__key__"])
        assert len(sample["emb.npy"]) == 144


def test_field_can_get_another_name(places: dict[str, str], tmp_path: Path) -> None:
    add = {places["captions"]: {"long.txt": "txt"}, places["tag lines"]: {"txt": "tag"}}
    reshard_joined(places["train"], tmp_path / "new", add=add)
    for sample in samples_of(tmp_path / "new"):
        assert sample["long.txt"].decode() == caption(sample["__key__"])
        assert sample["txt"].decode() == f"tag {sample['__key__']}"


def test_shards_are_filled_with_regard_to_the_added_fields(
    places: dict[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_bytes": "50kB", "add": add_all(places)}
    for seed in (None, 1):
        dest = tmp_path / str(seed)
        reshard_joined(places["train"], dest, seed=seed, **options)
        sizes = [path.stat().st_size for path in sorted(dest.glob("*.tar"))]
        assert max(sizes) <= 50_000
        assert sum(sizes) / len(sizes) > 35_000


OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": 3},
    {"seed": 1, "select": is_even, "map": swap, "version": 1, "fields": ["bin"]},
]


@pytest.mark.parametrize(
    "options",
    with_slow_rest(OPTIONS[:1], OPTIONS),
    ids=lambda options: "-".join(options) or "plain",
)
def test_executors_and_parts_write_the_same_bytes(
    places: dict[str, str],
    tmp_path: Path,
    options: dict[str, Any],
    two_processes: ProcessPoolExecutor,
) -> None:
    options = {"max_samples": 70, "max_bytes": "60kB", "add": add_all(places), **options}
    source = places["train"]
    reshard_joined(source, tmp_path / "one", **options)
    own = "map" in options
    executor = (
        ss.tasks.LocalExecutor(processes=2) if own else ss.tasks.FuturesExecutor(two_processes)
    )
    reshard_joined(source, tmp_path / "two", executor=executor, **options)
    for part in (3, 1, 2, 1):
        reshard_joined(source, tmp_path / "parts", executor=ss.tasks.Parts(part, 3), **options)
    ss.merge(tmp_path / "parts")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "parts")
    for sample in samples_of(tmp_path / "one"):
        assert sample["txt"].decode() == caption(sample["__key__"])
        assert "select" not in options or int(sample["__key__"]) % 2 == 0
        if "map" in options:
            assert sample["note.txt"].decode() == caption(sample["__key__"]).upper()
            assert "cls" not in sample


def test_field_that_the_sample_has_is_an_error_or_replaced(
    places: dict[str, str], tmp_path: Path
) -> None:
    add: dict[str, Any] = {places["scores"]: {"cls": "score"}}
    with pytest.raises(ss.errors.OptionError, match=r"two datasets have the field 'cls'.*new\.cls"):
        reshard_joined(places["train"], tmp_path / "new", add=add)
    with pytest.raises(ss.errors.OptionError, match="two datasets have the field 'cls'"):
        reshard_joined(places["train"], tmp_path / "b", add=add, fields=["bin", "cls"])
    reshard_joined(places["train"], tmp_path / "c", add=add, fields=["bin"])
    for sample in samples_of(tmp_path / "c"):
        assert int(sample["cls"]) == 2 * int(sample["__key__"])


def test_old_field_does_not_stay_where_its_replacement_is_missing(
    places: dict[str, str], tmp_path: Path
) -> None:
    scores = write_parquet(tmp_path / "some.parquet", KEYS[::2])
    reshard_joined(
        places["train"],
        tmp_path / "new",
        add={scores: {"cls": "score"}},
        fields=["bin"],
        missing="keep",
    )
    for sample in samples_of(tmp_path / "new"):
        is_known = int(sample["__key__"]) % 2 == 0
        assert sample.get("cls") == (b"%d" % (2 * int(sample["__key__"])) if is_known else None)


@pytest.mark.parametrize("kind", ["shards", "table"])
def test_missing_keys_are_an_error_kept_or_dropped(
    places: dict[str, str], tmp_path: Path, kind: str
) -> None:
    known = [key for key in KEYS if int(key) % 3]
    if kind == "shards":
        add: dict[str, Any] = {write_captions(tmp_path / "some", known): ["txt"]}
    else:
        add = {write_parquet(tmp_path / "some.parquet", known): {"txt": "score"}}
    with pytest.raises(
        ss.errors.OptionError, match=r"80 keys of 240 missing .*'0000'; .*missing=.*some"
    ):
        reshard_joined(places["train"], tmp_path / "new", add=add)
    assert not (tmp_path / "new" / "index.json").exists()
    reshard_joined(places["train"], tmp_path / "kept", add=add, missing="keep")
    assert [s["__key__"] for s in samples_of(tmp_path / "kept") if "txt" in s] == known
    assert len(samples_of(tmp_path / "kept")) == NSAMPLES
    reshard_joined(places["train"], tmp_path / "less", add=add, missing="drop")
    assert [s["__key__"] for s in samples_of(tmp_path / "less")] == known


def test_missing_field_of_one_sample_is_an_error(places: dict[str, str], tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "some") as writer:
        for key in KEYS:
            writer.write({"__key__": key, "txt": "a", **({} if key == "0005" else {"md": "b"})})
    table = pa.table({"key": KEYS, "tag": [None if key == "0007" else "x" for key in KEYS]})
    pq.write_table(table, tmp_path / "tags.parquet")
    new = tmp_path / "new"
    with pytest.raises(ss.errors.SampleError, match=r"has no such field.*'0005'.*field 'md'"):
        reshard_joined(places["train"], new, add={str(tmp_path / "some"): ["txt", "md"]})
    add = {str(tmp_path / "tags.parquet"): {"tag.txt": "tag"}}
    with pytest.raises(ss.errors.SampleError, match=r"has no such field.*'0007'.*field 'tag.txt'"):
        reshard_joined(places["train"], new, add=add, overwrite=True)
    with pytest.raises(ss.errors.SampleError, match=r"has no such field.*'0007'.*field 'tag.txt'"):
        reshard_joined(places["train"], new, add=add, missing="drop", overwrite=True)
    reshard_joined(places["train"], new, add=str(tmp_path / "some"), overwrite=True)
    assert [s["__key__"] for s in samples_of(new) if "md" not in s] == ["0005"]


@pytest.mark.parametrize("kind", ["shards", "parquet", "csv"])
def test_repeated_key_in_the_added_source_is_an_error(
    places: dict[str, str], tmp_path: Path, kind: str
) -> None:
    keys = [*KEYS, "0042"]
    if kind == "shards":
        add: dict[str, Any] = {write_captions(tmp_path / "twice", KEYS): ["txt"]}
        write_captions(tmp_path / "extra", ["0042"])
        (tmp_path / "extra" / "000000.tar").rename(tmp_path / "twice" / "000099.tar")
        (tmp_path / "twice" / "index.json").unlink()
    elif kind == "parquet":
        add = {write_parquet(tmp_path / "twice.parquet", keys): {"txt": "score"}}
    else:
        (tmp_path / "twice.csv").write_text("key,tag\n" + "".join(f"{k},t\n" for k in keys))
        add = {str(tmp_path / "twice.csv"): {"txt": "tag"}}
    where = "000001.tar and .*000099.tar" if kind == "shards" else "row 43 and .*row 241"
    with pytest.raises(
        ss.errors.OptionError, match=f"several samples have the key '0042', in .*{where}"
    ):
        reshard_joined(places["train"], tmp_path / "new", add=add)
    assert not (tmp_path / "new" / "index.json").exists()


def test_keys_without_a_sample_are_counted_in_a_warning(
    places: dict[str, str], tmp_path: Path
) -> None:
    captions = write_captions(tmp_path / "more", [*KEYS, "7000", "7001"])
    add = {captions: ["txt"], places["tags"]: {"__key__": "id", "tag.txt": "tag"}}
    for part in (1, 2):
        reshard_joined(
            places["train"],
            tmp_path / "new",
            max_samples=50,
            add=add,
            executor=ss.tasks.Parts(part, 2),
        )
    report = ss.merge(tmp_path / "new")
    assert report.warnings == (f"{captions}: 2 keys of 242 without a sample in the source",)


def test_source_without_any_key_of_the_samples_is_an_error(
    places: dict[str, str], tmp_path: Path
) -> None:
    captions = write_captions(tmp_path / "other", ["8000", "8001"])
    with pytest.raises(
        ss.errors.OptionError, match="no sample of .* has a key of this dataset.*other"
    ):
        reshard_joined(places["train"], tmp_path / "new", add=captions, missing="keep")
    assert not (tmp_path / "new" / "index.json").exists()


@pytest.mark.parametrize("kind", ["shards", "table"])
def test_added_source_that_changes_between_parts_is_an_error(
    places: dict[str, str], tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"max_samples": 30}
    path = tmp_path / ("captions" if kind == "shards" else "scores.parquet")
    if kind == "shards":
        options["add"] = {write_captions(path, KEYS): ["txt"]}
    else:
        options["add"] = {write_parquet(path, KEYS): {"txt": "score"}}
    reshard_joined(places["train"], tmp_path / "new", executor=ss.tasks.Parts(1, 2), **options)
    if kind == "shards":
        write_captions(path, shuffled(7), overwrite=True)
    else:
        write_parquet(path, shuffled(7))
    with pytest.raises(ss.errors.OptionError, match="the source has changed"):
        reshard_joined(places["train"], tmp_path / "new", executor=ss.tasks.Parts(2, 2), **options)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        ({"captions": ["txt", "md"]}, "no sample has the field 'md', but emb.npy, txt"),
        ({"captions": ["txt"], "same order": ["txt"]}, "two datasets have the field 'txt'"),
        ({"captions": None, "same order": ["txt"]}, "two datasets have the field 'txt'"),
        ({"scores": None}, "name the columns to take"),
        ({"scores": {"txt": "scor"}}, "no column 'scor'; there are: 'key', 'score', 'meta'"),
        ({"scores": {"__key__": "id", "txt": "score"}}, "no column id for the keys"),
        ({"tags": {"txt": "tag"}}, "no column __key__ or key for the keys.*'id', 'tag', 'other'"),
        ({"tags": {"__key__": "id", "jpg": "tag"}}, "holds text, but 'jpg' takes bytes"),
        ({"repeated": {"txt": "score"}}, "two columns are named 'score'; rename one"),
        ({"repeated": {"__key__": "score", "txt": "key"}}, "two columns are named 'score'"),
        ({"scores": {"TXT": "score"}}, "'TXT' is not a field name"),
        ({}, "join takes two datasets or more"),
    ],
)
def test_wrong_sources_are_refused_before_anything_is_written(
    places: dict[str, str], tmp_path: Path, add: dict[str, Any], message: str
) -> None:
    named = {places[name]: fields for name, fields in add.items()}
    with pytest.raises(ss.ShardStreamError, match=message):
        reshard_joined(places["train"], tmp_path / "new", add=named)
    assert not (tmp_path / "new").exists()


def test_wrong_options_are_refused(places: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ss.errors.OptionError, match="missing must be 'error', 'drop', 'keep'"):
        reshard_joined(places["train"], tmp_path / "new", add=places["captions"], missing="skip")
    with pytest.raises(ss.errors.OptionError, match="write elsewhere"):
        reshard_joined(places["train"], places["captions"], add=places["captions"], overwrite=True)
    assert len(samples_of(places["captions"])) == NSAMPLES


def test_tasks_are_small_whatever_the_number_of_keys(
    places: dict[str, str], tmp_path: Path
) -> None:
    sizes = []

    class Measures:
        def run(self, tasks: Iterable[ss.tasks.Task], done: Callable[..., None]) -> None:
            for task in tasks:
                sizes.append(len(pickle.dumps(task)))
                done(task, task.run())

    reshard_joined(
        places["train"], tmp_path / "new", max_samples=9, add=add_all(places), executor=Measures()
    )
    assert max(sizes) < 16_000


@pytest.mark.slow
def test_job_killed_at_any_time_is_resumed_to_the_same_bytes(
    places: dict[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_samples": 20, "map": SlowDown, "version": 1}
    options["add"] = places["captions"]
    reshard_joined(places["train"], tmp_path / "whole", **options)
    command = [sys.executable, "-c", (
        "import sys\n"
        "from tests.packing.test_reshard_add import SlowDown, reshard_joined\n"
        "if __name__ == '__main__':\n"
        "    source, dest, add = sys.argv[1:]\n"
        "    print(reshard_joined(source, dest, max_samples=20, map=SlowDown, version=1, add=add).kept)\n"
    ), places["train"], str(tmp_path / "new"), places["captions"]]  # fmt: skip
    for wanted in (1, 4):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 120
            while len(list((tmp_path / "new").glob(".*part-0*.json"))) < wanted:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 4
    assert files_of(tmp_path / "new") == files_of(tmp_path / "whole")


def test_reshard_with_added_fields_on_s3(
    places: dict[str, str], tmp_path: Path, bucket: str, s3_env: None
) -> None:
    for name in ("train", "captions"):
        ss.reshard(places[name], f"{bucket}/{name}", max_samples=50)
    filesystem, target = Storage().resolve(f"{bucket}/scores.parquet")
    filesystem.put_file(places["scores"], target)
    score = {"id": "score"}
    add = {f"{bucket}/captions": ["txt"], f"{bucket}/scores.parquet": score}
    options: dict[str, Any] = {"max_samples": 100, "seed": 2}
    for part in (2, 1):
        executor = ss.tasks.Parts(part, 2)
        reshard_joined(f"{bucket}/train", f"{bucket}/new", add=add, executor=executor, **options)
    ss.merge(f"{bucket}/new")
    add = {places["captions"]: ["txt"], places["scores"]: score}
    reshard_joined(places["train"], tmp_path / "new", add=add, **options)
    remote, local = samples_of(f"{bucket}/new"), samples_of(tmp_path / "new")
    assert [{**s, "__url__": ""} for s in remote] == [{**s, "__url__": ""} for s in local]
    assert not [
        name for name in filesystem.find(f"{target.rpartition('/')[0]}/new") if "keys" in name
    ]


def test_command_adds_fields_and_prints_warnings(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = write_captions(tmp_path / "more", [*KEYS[7:], "7000"])
    adds = ["--add", f"{captions}:long.txt=txt", "--add", f"{places['tags']}:__key__=id,txt=tag"]
    command = ["reshard", places["train"], str(tmp_path / "new"), *adds]
    assert main([*command, "--missing", "sometimes"]) == 1
    assert "missing must be 'error', 'drop', 'keep'" in capsys.readouterr().err
    assert main([*command, "--missing", "drop"]) == 0
    said = capsys.readouterr()
    assert said.err == f"warning: {captions}: 1 key of 234 without a sample in the source\n"
    assert "wrote 233 samples in 1 shard" in said.out
    for sample in samples_of(tmp_path / "new"):
        assert sample["long.txt"].decode() == caption(sample["__key__"])
        assert sample["txt"].decode() == f'a "tag",\nof {sample["__key__"]}'
    assert main([*command, "--add", captions]) == 2
