"""`gc` removes versions and the files that only they need, and nothing else."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import ManifestError, NotFoundError, OptionError, StateError
from shardstream.storage import encode_numbers
from tests.pairs import with_slow_rest
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 100
DAY_S = 24 * 3600


def numbers(url: str, version: int | str | None = None) -> list[int]:
    return [int(sample["cls"]) for sample in ss.ShardDataset(url, version=version)]


def files(url: str) -> set[str]:
    return {path.relative_to(url).as_posix() for path in Path(url).rglob("*") if path.is_file()}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Versions 1 to 6: packed, deleted, compacted, deleted twice, compacted."""
    url = numbered(tmp_path / "data", N, 15, columns=["cls"])
    ss.delete(url, numbers=[0, 50])
    ss.compact(url)
    ss.delete(url, numbers=[0, 20], version=3)
    ss.delete(url, numbers=[90], version=4)
    ss.compact(url)
    return url


def test_one_version_is_left_and_its_files(url: str) -> None:
    before, expected = files(url), numbers(url)
    dry = ss.versions.gc(url, keep=1)
    assert isinstance(dry, ss.versions.GcReport)
    assert files(url) == before
    assert numbers(url, 1) == [*range(N)]
    done = ss.versions.gc(url, keep=1, dry_run=False)
    assert done == dry
    assert (done.removed, done.kept) == ([1, 2, 3, 4, 5], [6])
    assert files(url) == before - {*done.files}
    assert numbers(url) == expected
    listed = {one["url"] for one in json.loads((Path(url) / "index.json").read_text())["shardlist"]}
    assert {name for name in files(url) if name.endswith(".tar")} == listed
    assert not [name for name in files(url) if name.endswith(".npy")]
    assert not [*(Path(url) / "versions").iterdir()]
    assert ss.verify(url).problems == ()
    with pytest.raises(OptionError, match=r"version 3 was removed \(gc\)"):
        numbers(url, 3)
    again = ss.versions.gc(url, keep=1, dry_run=False)
    assert (again.removed, again.files) == ([], [])


@pytest.mark.parametrize(
    ("keep", "tagged"),
    with_slow_rest(
        [(1, ()), (1, (4,)), (2, (1,)), (3, (2,)), (4, (4,)), (5, ()), (6, (2,)), (9, (1,))],
        [1, 2, 3, 4, 5, 6, 9],
        [(), (1,), (2,), (4,)],
    ),
)
def test_versions_that_stay_have_their_samples(
    url: str, keep: int, tagged: tuple[int, ...]
) -> None:
    expected = {number: numbers(url, number) for number in range(1, 7)}
    for number in tagged:
        ss.versions.tag(url, f"v{number}", number)
    report = ss.versions.gc(url, keep, dry_run=False)
    assert {*range(max(1, 7 - keep), 7), *tagged} <= {*report.kept}
    assert sorted([*report.kept, *report.removed]) == [1, 2, 3, 4, 5, 6]
    for number in report.kept:
        assert numbers(url, number) == expected[number]
    # Numbers of the oldest version can be carried to the latest one.
    found = ss.versions.diff(url, report.kept[0])
    assert found.deleted == len({*expected[report.kept[0]]} - {*expected[6]})


def test_files_of_others_stay(url: str) -> None:
    for name in ("README.md", "mine.tar", "mine.npy", "other/append.tar", "versions/notes.txt"):
        path = Path(url) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    ss.versions.gc(url, keep=1, dry_run=False)
    assert {"README.md", "mine.tar", "mine.npy", "other/append.tar", "versions/notes.txt"} <= files(
        url
    )


def test_files_of_killed_writers_are_deleted_when_they_are_old(url: str) -> None:
    names = [
        "append-0123456789abcdef/000000.tar",
        "append-0123456789abcdef/.shardstream-pack-000000.json",
        encode_numbers("deleted", np.arange(3))[0],
        "index.json.part-0123456789ab",
        "compact-000002/000009-0123456789ab.tar",
    ]
    fresh = "append-ba98765432100000/000000.tar"
    now = (Path(url) / "index.json").stat().st_mtime
    for name in [*names, fresh]:
        path = Path(url) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    old = now - DAY_S - 60
    os.utime(Path(url) / "append-ba98765432100000" / "000000.tar", (old, old))
    other = Path(url) / "append-ba98765432100000" / "000001.tar"  # its writer goes on
    other.write_bytes(b"x")
    assert ss.versions.gc(url, keep=9, dry_run=False).files == []
    for path in (Path(url) / name for name in files(url)):
        if path != other:
            os.utime(path, (old, old))
    assert sorted(ss.versions.gc(url, keep=9, dry_run=False).files) == sorted(names)
    assert fresh in files(url)
    assert len(numbers(url)) == N - 5


def test_datasets_of_others_in_the_folder_stay(url: str) -> None:
    for name in ("compact-cars", "fields-2024", "append-only"):
        numbered(Path(url) / name, 10, 5)
    for path in Path(url).rglob("*"):
        os.utime(path, (1, 1))
    report = ss.versions.gc(url, keep=1, dry_run=False)
    assert not [name for name in report.files if name.startswith(("compact-c", "fields-", "app"))]
    assert ss.delete(f"{url}/compact-cars", numbers=[0]).version == 2
    assert len(numbers(f"{url}/compact-cars")) == 9


def test_a_file_of_the_future_does_not_make_others_old(url: str) -> None:
    path = Path(url) / "append-0123456789abcdef" / "000000.tar"
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.utime(Path(url) / "000000.tar", (4e9, 4e9))
    assert ss.versions.gc(url, keep=9).files == []
    assert ss.versions.gc(url, keep=9, dry_run=False).files == []


def test_a_killed_gc_is_completed(url: str) -> None:
    expected = {*ss.versions.gc(url, keep=1).files}
    before = files(url)
    manifest = Path(url) / "versions" / "000003.json"
    saved = manifest.read_bytes()
    ss.versions.gc(url, keep=1, dry_run=False)
    # As if it had been killed before it deleted one of these.
    tar = next(name for name in sorted(expected) if name.startswith("compact-000001/"))
    (Path(url) / tar).write_bytes(b"x")
    manifest.write_bytes(saved)
    assert {*ss.versions.gc(url, keep=1, dry_run=False).files} == {tar, "versions/000003.json"}
    assert files(url) == before - expected


def test_a_missing_manifest_of_a_version_that_stays(url: str) -> None:
    (Path(url) / "versions" / "000005.json").unlink()
    with pytest.raises(ManifestError, match="the manifest of version 5 is missing"):
        ss.versions.gc(url, keep=3, dry_run=False)
    report = ss.versions.gc(url, keep=1, dry_run=False)
    assert report.kept == [6]
    assert len(numbers(url)) == N - 5


def make_old(url: str, days: dict[int, float]) -> None:
    """Say for how many days versions have not been the current one."""
    now = time.time()
    for number, age in days.items():
        path = Path(url) / f"versions/{number:06d}.json"
        os.utime(path, (now - age * DAY_S, now - age * DAY_S))


def test_versions_of_the_last_days_stay(url: str) -> None:
    make_old(url, {1: 40, 2: 30, 3: 20, 4: 10, 5: 0})
    assert ss.versions.gc(url, 1, keep_days=25).kept == [3, 4, 5, 6]
    assert ss.versions.gc(url, 1, keep_days=15).kept == [4, 5, 6]
    assert ss.versions.gc(url, 3, keep_days=0.5).kept == [4, 5, 6]
    assert ss.versions.gc(url, 1, keep_days=0.5).kept == [5, 6]
    make_old(url, {1: 40, 2: 3, 3: 20})  # clocks disagree
    assert ss.versions.gc(url, 1, keep_days=5, dry_run=False).kept == [2, 3, 4, 5, 6]
    assert numbers(url, 3) == [n for n in range(N) if n not in (0, 50)]


@pytest.mark.parametrize("kind", ["json", "file", "folder"])
def test_versions_of_states_stay(url: str, tmp_path: Path, kind: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(url, version=3, shuffle=True), batch_size=8)
    batches = iter(loader)
    seen = [int(n) for _ in range(3) for n in next(batches)["cls"]]
    place = str(tmp_path / {"json": "state.json", "file": "one.pt", "folder": "run/"}[kind])
    if kind == "json":
        Path(place).write_text(json.dumps(loader.state_dict()))
    else:
        ss.save_checkpoint(place, step=3 if kind == "folder" else None, loader=loader)
    states = ss.loader.read_states(place)
    assert ss.versions.gc(url, 1, states=states).kept == [3, 5, 6]
    assert main(["gc", url, "--keep", "1", "--states", place, "--yes"]) == 0
    later = ss.ShardLoader(ss.ShardDataset(url, shuffle=True), batch_size=8)
    later.load_state_dict(states[0])
    seen += [int(n) for batch in later for n in batch["cls"]]
    left = numbers(url)
    assert sorted(n for n in seen if n in left) == left
    assert ss.versions.gc(url, 1, dry_run=False).removed == [3, 5]


def test_states_without_versions_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="names no version of its dataset"):
        ss.versions.gc(url, states=[{"step": 3}])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StateError, match="no state_checksum"):
        ss.loader.read_states(tmp_path / "other.json")
    with pytest.raises(NotFoundError, match="no checkpoint"):
        ss.loader.read_states(tmp_path)


def test_two_at_once_do_not_warn(
    url: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with ThreadPoolExecutor(4) as pool:
        reports = [*pool.map(lambda keep: ss.versions.gc(url, keep, dry_run=False), [4, 1, 2, 1])]
    assert min(one.kept[-1] for one in reports) == 6
    assert ss.versions.gc(url, 1, dry_run=False).kept == [6]
    assert len(numbers(url)) == N - 5
    assert ss.verify(url).problems == ()
    assert not caplog.records
    assert not recwarn.list


def test_wrong_options(url: str) -> None:
    with pytest.raises(OptionError, match="the current version always stays"):
        ss.versions.gc(url, keep=0)
    with pytest.raises(NotFoundError):
        ss.versions.gc(f"{url}-with-another-name", dry_run=False)
    assert not Path(f"{url}-with-another-name").exists()


def test_diff_follows_compactions(url: str) -> None:
    all_numbers = {number: numbers(url, number) for number in range(1, 7)}
    for first in range(1, 7):
        for last in range(first, 7):
            found = ss.versions.diff(url, last, first, keys=True)
            assert isinstance(found, ss.versions.VersionDiff)
            assert (found.earlier, found.later, found.added) == (first, last, 0)
            gone = np.setdiff1d(all_numbers[first], all_numbers[last]).tolist()
            assert found.deleted_keys == [f"{number:06d}" for number in gone]
            assert found.deleted == len(gone)
    assert ss.versions.diff(url, 1, 2).shards_added == []
    assert ss.versions.diff(url, 2, 3).shards_removed == ["000000.tar", "000003.tar"]
    ss.replace_fields(url, {"txt": {"000003": "new"}})
    assert ss.versions.diff(url, 1).fields == ["txt"]


def test_commands(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", url, "1", "2", "--keys"]) == 0
    out = capsys.readouterr().out
    assert "version 1 to 2: 0 samples added, 2 deleted\ndeleted 000000\ndeleted 000050" in out
    assert main(["diff", url, "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == 5
    assert main(["gc", url, "--keep", "2"]) == 0
    out = capsys.readouterr().out
    assert "would remove versions: 1, 2, 3, 4; " in out
    assert "run it with --yes" in out
    assert len(ss.versions.log(url)) == 6
    assert main(["gc", url, "--keep", "2", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == [5, 6]
    assert len(ss.versions.log(url)) == 2
