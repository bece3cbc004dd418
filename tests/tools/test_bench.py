"""The benchmark runs, counts what it is given, and says the truth about targets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import report, rows, targets
from benchmarks.case import Case, Result
from benchmarks.data import Corpus, packed_samples, photo
from benchmarks.modes import check, consume, count
from benchmarks.runner import as_document
from benchmarks.sizes import TINY

BENCH = Path(__file__).parent.parent.parent / "tools" / "bench.py"


def results(**seconds: list[float]) -> dict[str, list[Result]]:
    return {
        name.replace("_", "-"): [Result(seconds=s, samples=100, payload_bytes=1000) for s in times]
        for name, times in seconds.items()
    }


def setting(**changes: Any) -> rows.Setting:
    case = Case(contestant="", mode="throughput", location="")
    corpus = Corpus(kind="small", samples=100)
    return rows.Setting(row="row", label="label", case=case, corpus=corpus, **changes)


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


def test_a_row_of_our_own_is_measured_written_and_rendered(tmp_path: Path) -> None:
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


def test_a_row_that_is_not_there_is_refused_with_those_that_are() -> None:
    done = subprocess.run(
        [sys.executable, BENCH, "--only", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no row 'nonsense'; there are: small-local, photo-local" in done.stderr


def test_ratios_are_of_medians_and_say_whether_they_suffice() -> None:
    found = results(shardstream=[1.0, 9.0, 1.0], webdataset=[4.0, 4.0, 1.0], limit_pages=[0.5])
    twice = setting(
        targets=(targets.against("webdataset", 5), targets.of_limit(0.5, "limit-pages"))
    )
    document = as_document(twice, found)
    assert [(each["reached"], each["met"]) for each in document["targets"]] == [
        (4.0, False),
        (0.5, True),
    ]


def test_the_best_peer_is_the_fastest_but_neither_we_nor_a_limit() -> None:
    found = results(
        shardstream=[1.0], **{"shardstream+fast": [0.1]}, a=[3.0], b=[2.0], limit_x=[0.1]
    )
    assert targets.best_peer(1).reached(found) == pytest.approx(2.0)
    assert targets.best_peer(1, ours="shardstream+fast").reached(found) == pytest.approx(20.0)


def test_a_target_without_a_peer_is_neither_met_nor_missed() -> None:
    alone = as_document(setting(targets=(targets.best_peer(1),)), results(shardstream=[1.0]))
    assert alone["targets"][0]["met"] is None
    assert list(report.target_lines(alone)) == ["x best peer: wanted at least 1, not known"]


def test_what_must_be_small_is_met_from_below() -> None:
    fresh = [Result(seconds=1.1, samples=64, extra={"fresh_s": 1.0})]
    target = targets.as_fresh(1.2)
    reached = target.reached({"shardstream": fresh})
    assert reached is not None
    assert target.is_met(reached)
    assert not target.is_met(1.3)


def test_who_delivers_something_else_is_shown_but_never_counted() -> None:
    found = results(shardstream=[1.0], webdataset=[0.1])
    found["webdataset"] = [Result(seconds=0.1, samples=99, wrong="99 samples instead of 1 x 100")]
    document = as_document(setting(targets=(targets.against("webdataset", 1),)), found)
    assert document["targets"][0]["reached"] is None
    last = list(report.lines(document))[-1]
    assert last[:2] == ("webdataset", "not counted: 99 samples instead of 1 x 100")


@pytest.mark.parametrize(
    "batch", [[{"a": b"12", "b": b"3"}] * 2, {"a": [b"12"] * 2, "b": [b"3"] * 2}]
)
def test_both_shapes_of_a_batch_are_counted_alike(batch: Any) -> None:
    assert count(batch, ("a", "b")) == (2, 6)
    assert consume([batch, batch], ("a", "b")) == (4, 12, True)
    assert consume([batch, batch], ("a", "b"), until=0.0) == (2, 6, False)


def test_a_missing_byte_is_found() -> None:
    case = Case(contestant="x", mode="throughput", location="", samples=10, payload_bytes=50)
    assert check(case, 20, 100, epochs=2) == ""
    assert "99 bytes instead of 2 x 50" in check(case, 20, 99, epochs=2)
    assert "19 samples instead of 2 x 10" in check(case, 19, 100, epochs=2)


def test_the_slower_the_lower_in_the_table_whatever_is_better() -> None:
    found = results(shardstream=[1.0], a=[3.0], b=[0.5])
    by_rate = as_document(setting(), found)
    by_time = as_document(setting(metric="seconds"), found)
    for document in (by_rate, by_time):
        assert [line[0] for line in report.lines(document)] == ["b", "shardstream", "a"]
        assert report.advantage(document, "a") == pytest.approx(3.0)


def test_photos_are_seeded_and_of_the_size_of_photos() -> None:
    first = photo(7)
    assert first == photo(7)
    assert first != photo(8)
    assert 55_000 < len(first) < 125_000


def test_the_data_step_reads_back_what_our_writer_wrote(tmp_path: Path) -> None:
    import shardstream as ss  # noqa: PLC0415

    corpus = list(Corpus(kind="small", samples=5))
    with ss.ShardWriter(tmp_path, max_samples=2) as writer:
        for sample in corpus:
            writer.write(sample)
    assert list(packed_samples(tmp_path)) == corpus


def test_a_short_run_keeps_all_rows_what_is_at_stake_and_two_peers() -> None:
    whole = list(rows.settings(TINY))
    short = list(rows.shortened(whole))
    assert {one.row for one in short} == {one.row for one in whole}
    assert [one.name for one in short if one.targets] == [one.name for one in whole if one.targets]
    names = {name for one in short for name in one.contestants}
    assert names == {"shardstream", "shardstream+fast", "webdataset", "litdata", "tarfile"}


def test_peers_far_from_the_best_are_measured_once_unless_a_target_names_them() -> None:
    found = results(shardstream=[1.0], near=[2.0], far=[9.0], named=[9.0], limit_pages=[99.0])
    wanted = [targets.best_peer(1.0), targets.against("named", 2.0)]
    repeated = targets.are_worth_repeating(found, wanted)
    assert repeated == ["shardstream", "near", "named", "limit-pages"]
