"""Test that the benchmark runs, counts correctly, and reports targets correctly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import pytest
from benchmarks import limits, objects, report, rows, start, targets
from benchmarks.case import Case, Result
from benchmarks.data import Corpus, packed_samples, photo
from benchmarks.modes import check, consume, count, throughput
from benchmarks.runner import as_document
from benchmarks.setting import Setting
from benchmarks.sizes import FULL, TINY
from benchmarks.work import Work

import shardstream as ss
from tests.servers import S3Server

BENCH = Path(__file__).parent.parent.parent / "tools" / "bench.py"


def results(**seconds: list[float]) -> dict[str, list[Result]]:
    return {
        name.replace("_", "-"): [Result(seconds=s, samples=100, payload_bytes=1000) for s in times]
        for name, times in seconds.items()
    }


def setting(**changes: Any) -> Setting:
    case = Case(contestant="", mode="throughput", location="")
    corpus = Corpus(kind="small", samples=100)
    return Setting(row="row", label="label", case=case, corpus=corpus, **changes)


def run_bench(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_row_of_shardstream_is_measured_written_and_rendered(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    text = run_bench(
        "--tiny", "--only", "small-local", "--contestants", "shardstream", "--json", out
    )
    assert "small-local: 0 workers" in text
    measured = json.loads(out.read_text())["settings"]
    assert [found["label"] for found in measured] == ["0 workers", "2 workers"]
    limits = [["limit-pages", "limit-bytes"], ["limit-pages"]]
    for found, named in zip(measured, limits, strict=True):
        assert list(found["results"]) == ["shardstream", *named]
        for result in [result for each in found["results"].values() for result in each]:
            assert result["wrong"] == ""
            assert result["samples"] % TINY.small.samples == 0
            assert result["seconds"] > 0
    table = run_bench("--render", out)
    assert "### small-local: 0 workers (samples/s)" in table
    assert "| shardstream |" in table


def test_unknown_row_is_refused_with_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, BENCH, "--only", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no row 'nonsense'; there are: small-local, photo-local" in done.stderr


def test_ratios_use_medians_and_state_whether_targets_are_met() -> None:
    found = results(shardstream=[1.0, 9.0, 1.0], webdataset=[4.0, 4.0, 1.0], limit_pages=[0.5])
    twice = setting(
        targets=(targets.against("webdataset", 5), targets.of_limit(0.5, "limit-pages"))
    )
    document = as_document(twice, found)
    assert [(each["reached"], each["met"]) for each in document["targets"]] == [
        (4.0, False),
        (0.5, True),
    ]


def test_best_peer_is_the_fastest_except_shardstream_and_limits() -> None:
    found = results(
        shardstream=[1.0], **{"shardstream+fast": [0.1]}, a=[3.0], b=[2.0], limit_x=[0.1]
    )
    assert targets.best_peer(1).reached(found) == pytest.approx(2.0)
    assert targets.best_peer(1, ours="shardstream+fast").reached(found) == pytest.approx(20.0)


def test_missed_target_names_the_value_of_the_lowest_limit() -> None:
    found = results(shardstream=[1.0], a=[2.0], limit_high=[0.1], limit_low=[0.8])
    found |= results(**{"shardstream+fast": [0.9], "limit-x+fast": [0.5]})
    wanted = (
        targets.best_peer(3.0),
        targets.best_peer(4.1, ours="shardstream+fast"),
        targets.of_limit(0.9, "limit-low"),
        targets.against("a", 1.9),
    )
    document = as_document(setting(targets=wanted), found)
    assert list(report.target_lines(document)) == [
        "x best peer: wanted at least 3, is 2: NOT MET (limit-low is 2.5)",
        "shardstream+fast x best peer: wanted at least 4.1, is 2.22: NOT MET (limit-x+fast is 4)",
        "shardstream, share of limit-low: wanted at least 0.9, is 0.8: NOT MET",
        "x a: wanted at least 1.9, is 2: met",
    ]
    assert targets.less_cpu().lowest_limit(found) is None


def test_limit_below_a_target_is_measured_as_often() -> None:
    found = results(shardstream=[1.0], a=[2.0], limit_high=[0.1], limit_low=[0.8])
    for wanted, names in ((2.4, set()), (2.6, {"limit-low"})):
        repeated = targets.are_worth_repeating(found, (targets.against("a", wanted),))
        assert set(repeated) == {"shardstream", "a"} | names


def test_target_without_a_peer_is_neither_met_nor_missed() -> None:
    alone = as_document(setting(targets=(targets.best_peer(1),)), results(shardstream=[1.0]))
    assert alone["targets"][0]["met"] is None
    assert list(report.target_lines(alone)) == ["x best peer: wanted at least 1, not known"]


def test_upper_targets_are_met_from_below() -> None:
    fresh = [Result(seconds=1.1, samples=64, extra={"fresh_s": 1.0})]
    target = targets.as_fresh(1.2)
    reached = target.reached({"shardstream": fresh})
    assert reached is not None
    assert target.is_met(reached)
    assert not target.is_met(1.3)


def test_peer_with_other_output_is_shown_but_not_counted() -> None:
    found = results(shardstream=[1.0], webdataset=[0.1])
    found["webdataset"] = [Result(seconds=0.1, samples=99, wrong="99 samples instead of 1 x 100")]
    document = as_document(setting(targets=(targets.against("webdataset", 1),)), found)
    assert document["targets"][0]["reached"] is None
    last = list(report.lines(document))[-1]
    assert last[:2] == ("webdataset", "not counted: 99 samples instead of 1 x 100")


@pytest.mark.parametrize(
    "batch", [[{"a": b"12", "b": b"3"}] * 2, {"a": [b"12"] * 2, "b": [b"3"] * 2}]
)
def test_both_batch_layouts_are_counted_equally(batch: Any) -> None:
    assert count(batch, ("a", "b")) == (2, 6)
    assert consume([batch, batch], ("a", "b")) == (4, 12, True)
    assert consume([batch, batch], ("a", "b"), until=0.0) == (2, 6, False)


def test_missing_byte_is_detected() -> None:
    case = Case(contestant="x", mode="throughput", location="", samples=10, payload_bytes=50)
    assert check(case, 20, 100, epochs=2) == ""
    assert "99 bytes instead of 2 x 50" in check(case, 20, 99, epochs=2)
    assert "19 samples instead of 2 x 10" in check(case, 19, 100, epochs=2)


def test_table_rows_are_sorted_from_best_to_worst() -> None:
    found = results(shardstream=[1.0], a=[3.0], b=[0.5])
    by_rate = as_document(setting(), found)
    by_time = as_document(setting(metric="seconds"), found)
    for document in (by_rate, by_time):
        assert [line[0] for line in report.lines(document)] == ["b", "shardstream", "a"]
        assert report.advantage(document, "a") == pytest.approx(3.0)


def test_photos_are_deterministic_and_of_realistic_size() -> None:
    first = photo(7)
    assert first == photo(7)
    assert first != photo(8)
    assert 55_000 < len(first) < 125_000


def test_data_step_reads_the_written_shards(tmp_path: Path) -> None:
    corpus = list(Corpus(kind="small", samples=5))
    with ss.ShardWriter(tmp_path, max_samples=2) as writer:
        for sample in corpus:
            writer.write(sample)
    assert list(packed_samples(tmp_path)) == corpus


def test_short_run_keeps_all_rows_with_two_peers() -> None:
    whole = list(rows.settings(TINY))
    short = list(rows.shortened(whole))
    assert {one.row for one in short} == {one.row for one in whole}
    assert [one.name for one in short if one.targets] == [one.name for one in whole if one.targets]
    names = {name for one in short for name in one.contestants}
    assert names == {"shardstream", "shardstream+fast", "webdataset", "litdata", "tarfile"}
    alone = next(one for one in short if one.row == "resume")
    assert alone.contestants == ("shardstream",)


def test_machine_limits_are_measured_for_rows_that_read_or_write() -> None:
    without = {one.name for one in rows.settings(TINY) if not one.limits}
    plans = {f"scale: plan of 10^{exponent} samples" for exponent in (4, 6, 8, 10)}
    plans.add("scale: first batch of 10^4 shards, 10^8 samples")
    # Ray's share of the time to write is far from that of the disk; a viewer waits for a person.
    views = {"view: many samples, local", "view: photos, local", "view: photos, s3-slow"}
    assert without == plans | views | {"ray: small samples, written", "ray: photos, written"}


@pytest.fixture
def tars(tmp_path: Path) -> dict[str, bytes]:
    """Paths of two tars of two samples with two fields."""
    with ss.ShardWriter(tmp_path / "tars", max_samples=2) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "a": b"1" * 700, "b": b"22"})
    return {str(path): path.read_bytes() for path in sorted((tmp_path / "tars").glob("*.tar"))}


def limit_case(name: str, mode: Any, location: str, **options: Any) -> Case:
    case = Case(contestant=name, mode=mode, location=location, fields=("a", "b"), batch_size=3)
    return replace(case, samples=4, payload_bytes=4 * 702, **options)


def test_limit_of_an_index_hashes_every_byte(tars: dict[str, bytes], tmp_path: Path) -> None:
    found = limits.measure(limit_case("limit-hash", "index", str(tmp_path / "tars")))
    assert found.samples == 8  # members
    assert found.extra["bytes_read"] == sum(map(len, tars.values()))


@pytest.mark.usefixtures("ceph", "s3_env")
def test_limits_of_sending_and_first_batch_move_the_expected_bytes(
    tars: dict[str, bytes], tmp_path: Path, bucket: str, s3: S3Server
) -> None:
    objects.s3_client.cache_clear()
    local = str(tmp_path / "tars")
    limits.measure(limit_case("limit-put", "pack", local, target=bucket))
    with closing(s3.client()) as client:
        name = bucket.removeprefix("s3://")
        for path, data in tars.items():
            assert client.get_object(Bucket=name, Key=Path(path).name)["Body"].read() == data
    for location in (local, bucket):
        for workers in (0, 1):
            case = limit_case("limit-start", "resume", location, workers=workers)
            found = start.measure(case)
            assert (found.samples, found.payload_bytes) == (3, 3 * 702)
    objects.s3_client.cache_clear()


def test_contestants_with_a_target_are_repeated_as_configured() -> None:
    wanted = (targets.best_peer(1.0),)
    often, once = setting(targets=wanted, repetitions=5), setting(repetitions=5)
    assert [one.count_repetitions(FULL) for one in (often, once)] == [5, 1]
    asked = replace(FULL, repetitions=9)
    assert [one.count_repetitions(asked) for one in (often, once)] == [9, 1]


@pytest.mark.parametrize(("warm", "epochs"), [(True, [0, 1]), (False, [0])])
def test_warm_up_epoch_is_not_counted(warm: bool, epochs: list[int]) -> None:
    case = Case(
        contestant="x", mode="throughput", location="", fields=("a",), samples=2, payload_bytes=2
    )
    begun: list[int] = []

    def epoch(number: int) -> list[list[dict[str, bytes]]]:
        begun.append(number)
        time.sleep(0.02)
        return [[{"a": b"1"}, {"a": b"2"}]]

    result = throughput(replace(case, warm=warm, min_s=0.01), epoch)
    assert (result.samples, result.wrong) == (2, "")
    assert begun == epochs


HOLDING = """
import multiprocessing
from benchmarks.watch import Watch

def hold(tell):
    held = b"x" * 200_000_000
    tell.send(len(held))
    tell.poll(60)

context = multiprocessing.get_context("fork")
mine, theirs = context.Pipe()
with Watch() as watch:
    before = watch.held_bytes()
    worker = context.Process(target=hold, args=(theirs,))
    worker.start()
    mine.recv()
    watch.held_bytes()
    during = watch.held_bytes()
    mine.send(None)
    worker.join()
    watch.held_bytes()
    print(*before, *during, *watch.held_bytes())
"""


def test_worker_memory_is_measured_from_outside() -> None:
    said = subprocess.run(
        [sys.executable, "-c", HOLDING],
        env={**os.environ, "PYTHONPATH": str(BENCH.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    *before, most, mean, after, after_mean = map(int, said.stdout.split())
    assert (before, after, after_mean) == ([0, 0], 0, 0)
    assert 200_000_000 < mean <= most < 300_000_000


def test_modules_of_contestants_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text("import sys; print(sys.dont_write_bytecode)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert Work(tmp_path)._run("told", [], {}, sys.executable, 60) == "False\n"


def test_slow_contestant_is_measured_once_unless_a_target_needs_it() -> None:
    found = results(
        shardstream=[1.0],
        near=[2.0],
        far=[9.0],
        named=[9.0],
        met=[9.0],
        limit_pages=[0.1],
        limit_bytes=[0.1],
    )
    wanted = [targets.best_peer(1.0), targets.against("named", 8.0), targets.against("met", 2.0)]
    wanted.append(targets.of_limit(0.5, "limit-bytes"))
    repeated = targets.are_worth_repeating(found, wanted)
    assert repeated == ["shardstream", "near", "named", "limit-bytes"]


def test_row_without_its_server_is_reported_and_what_was_measured_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    monkeypatch.setenv("PATH", "")  # no Azurite
    command = ["bench.py", "--tiny", "--only", "azure", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    assert "not counted: no server: azurite-blob is missing" in capsys.readouterr().out
    whole = json.loads(out.read_text())
    assert len(whole["settings"]) > 1
    assert report.markdown(whole)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "print_setting", stop)
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    assert json.loads(out.read_text())["settings"] == whole["settings"][:1]
