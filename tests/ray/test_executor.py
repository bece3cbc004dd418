"""Jobs on a Ray cluster give the bytes of a job in one process, also when workers die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

import shardstream as ss
from shardstream.ray import RayExecutor
from tests.ray.cluster import MARKS

ROOT = Path(__file__).parent.parent.parent
pytestmark = MARKS


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f"square {self.number}"

    def run(self) -> Mapping[str, Any]:
        return {"square": self.number**2, "process": os.getpid()}


@dataclass(frozen=True)
class DiesOnce(Square):
    """Kills its process at the first run; the file remembers it."""

    seen: str = ""

    def run(self) -> Mapping[str, Any]:
        if not Path(self.seen).exists():
            Path(self.seen).write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run()


class Fails(Square):
    def run(self) -> Mapping[str, Any]:
        raise ss.errors.ShardError("the tar is damaged", shard="s3://b/a.tar", offset=512)


class ImportsMissing(Square):
    def run(self) -> Mapping[str, Any]:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401, PLC0415

        raise AssertionError


class DiesAlways(Square):
    def run(self) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def squares(executor: ss.tasks.Executor, tasks: list[Any]) -> dict[int, Any]:
    results: dict[int, Any] = {}
    executor.run(tasks, lambda task, result: results.update({int(task.name.split()[1]): result}))
    return results


@pytest.fixture
def source(tmp_path: Path) -> str:
    with ss.ShardWriter(tmp_path / "source", max_samples=30) as writer:
        for number in range(120):
            writer.write({"__key__": f"{number:04d}", "bin": bytes(number), "cls": number % 5})
    return str(tmp_path / "source")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tasks_run_in_other_processes(cluster: None) -> None:
    results = squares(RayExecutor(in_flight=3), [Square(number) for number in range(20)])
    assert {number: one["square"] for number, one in results.items()} == {
        number: number**2 for number in range(20)
    }
    assert os.getpid() not in {one["process"] for one in results.values()}


def test_task_whose_worker_dies_is_run_again(cluster: None, tmp_path: Path) -> None:
    tasks = [Square(0), DiesOnce(1, str(tmp_path / "seen")), Square(2)]
    executor = RayExecutor()
    assert {one["square"] for one in squares(executor, tasks).values()} == {0, 1, 4}
    assert executor.retries == 1


def test_error_of_a_task_keeps_its_type_and_names_the_task(cluster: None) -> None:
    with pytest.raises(ss.errors.ShardError, match="at byte 512") as caught:
        squares(RayExecutor(), [Square(0), Fails(1), Square(2)])
    assert caught.value.__notes__ == ["in task 'square 1'"]


def test_worker_that_always_dies_is_one_error(cluster: None) -> None:
    with pytest.raises(
        ss.errors.WorkerError, match="'square 1' died more often than it is retried"
    ):
        squares(RayExecutor(max_retries=0), [DiesAlways(1)])


def test_missing_package_on_a_worker_is_named(cluster: None) -> None:
    with pytest.raises(ss.errors.WorkerError, match="cannot import 'no_such_package'"):
        squares(RayExecutor(), [ImportsMissing(1)])


def test_task_that_no_node_can_run_is_refused(cluster: None) -> None:
    with pytest.raises(ss.errors.OptionError, match="a task needs 64 CPUs"):
        squares(RayExecutor(num_cpus=64), [Square(1)])


@pytest.mark.parametrize(
    "options", [{"num_cpus": 0}, {"in_flight": 0}, {"max_retries": -1}], ids=str
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ss.errors.OptionError):
        RayExecutor(**options)


def test_reshard_on_ray_writes_the_same_bytes(cluster: None, source: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_samples": 25,
        "seed": 1,
        "map": lambda sample: sample | {"txt": "x"},
    }
    ss.reshard(source, tmp_path / "here", **options)
    report = ss.reshard(source, tmp_path / "ray", executor=RayExecutor(), **options)
    assert (report.samples, report.shards) == (120, 5)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "ray")


def test_relative_paths_mean_the_folder_of_the_driver(
    cluster: None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    executor = RayExecutor()
    ss.reshard("source", "new", max_samples=50, executor=executor)
    ss.pack("source", "packed", max_samples=50, executor=executor)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "packed")
    assert ss.verify("new", executor=executor).samples == 120
    for path in [*Path("new").glob("*.idx"), Path("new", "index.json")]:
        path.unlink()
    ss.index("new", executor=executor)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "packed")


def test_fields_are_added_on_ray_as_here(
    cluster: None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ss.reshard(source, "labels", fields=["cls"], seed=1)
    rows = "".join(f"{number:04d},tag {number}\n" for number in reversed(range(120)))
    Path("tags.csv").write_text("key,tag\n" + rows)
    others: list[Any] = [{"labels": {"label.cls": "cls"}}, {"tags.csv": {"txt": "tag"}}]
    joined = ss.join("source", *others, by="key")
    ss.reshard(joined, "ray", max_samples=25, seed=4, executor=RayExecutor())
    ss.reshard(joined, "here", max_samples=25, seed=4)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "ray")
    for sample in ss.ShardDataset("ray").by_number():
        number = int(sample["__key__"])
        assert (int(sample["label.cls"]), sample["txt"]) == (number % 5, b"tag %d" % number)


def test_error_of_a_function_on_ray_names_the_sample(
    cluster: None, source: str, tmp_path: Path
) -> None:
    def fails_at_50(sample: dict[str, Any]) -> dict[str, Any]:
        return {"__key__": sample["__key__"], "cls": 1 // (int(sample["__key__"]) - 50)}

    with pytest.raises(
        ss.errors.SourceError, match=r"ZeroDivisionError.*sample '0050' of .*000001\.tar"
    ):
        ss.reshard(source, tmp_path / "new", map=fails_at_50, executor=RayExecutor())
    assert not (tmp_path / "new" / "index.json").exists()


def test_index_and_verify_on_ray(cluster: None, source: str) -> None:
    before = files_of(Path(source))
    for path in [*Path(source).glob("*.idx"), Path(source, "index.json")]:
        path.unlink()
    ss.index(source, executor=RayExecutor())
    assert files_of(Path(source)) == before
    assert ss.verify(source, executor=RayExecutor()).samples == 120


def test_worker_killed_during_a_job_changes_nothing(
    cluster: None, source: str, tmp_path: Path
) -> None:
    seen = str(tmp_path / "seen")

    def kill_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == "0060" and not Path(seen).exists():
            Path(seen).write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    ss.reshard(source, tmp_path / "ray", max_samples=25, map=kill_once, executor=RayExecutor())
    assert Path(seen).exists()
    ss.reshard(source, tmp_path / "here", max_samples=25)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "ray")


def test_address_that_does_not_answer_is_an_error_within_seconds() -> None:
    code = (
        "import time, shardstream as ss\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    ss.ray.RayExecutor('127.0.0.1:9').run([], print)\n"
        "except ss.errors.StorageError as error:\n"
        "    print(error)\n"
        "print('bounded', time.monotonic() - begin < 60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "no Ray cluster answers at 127.0.0.1:9" in done.stdout
    assert "bounded True" in done.stdout


@pytest.mark.slow
def test_killed_driver_is_resumed_to_the_same_bytes(
    cluster: None, source: str, tmp_path: Path
) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return sample

    address = ray.get_runtime_context().gcs_address
    code = (
        "import sys, time, shardstream as ss\n"
        "def slow(sample):\n"
        "    time.sleep(0.02)\n"
        "    return sample\n"
        "report = ss.reshard(sys.argv[1], sys.argv[2], max_samples=10, map=slow, version=1, executor=ss.ray.RayExecutor(sys.argv[3]))\n"
        "print(report.kept)\n"
    )
    script = tmp_path / "job.py"
    script.write_text(code)
    command = [sys.executable, str(script), source, str(tmp_path / "new"), address]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment) as process:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "new").glob(".*part-0*.json"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 3
    ss.reshard(source, tmp_path / "here", max_samples=10)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "new")


@pytest.mark.slow
def test_command_runs_on_the_cluster_at_an_address(
    cluster: None, source: str, tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "shardstream", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    address = ray.get_runtime_context().gcs_address
    dest = str(tmp_path / "new")
    assert "wrote 120 samples in 12 shards" in run(
        "reshard", source, dest, "--max-samples", "10", "--ray-address", address
    )
    assert "sound" in run("verify", dest, "--ray-address", address)
    assert "leave --processes and --part out" in run("verify", dest, "--ray", "--part", "1/2")
    assert "no Ray cluster answers" in run("verify", dest, "--ray-address", "127.0.0.1:9")
