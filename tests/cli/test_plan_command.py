from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.cli import main
from tests.small_datasets import loader, numbered

ON_RANKS = ("--ranks", "2", "--workers", "2", "--batch-size", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbers"), 100, columns="cls")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def test_a_step_is_a_table(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, folder, *ON_RANKS, "--step", "1", "--rank", "1").splitlines()
    assert lines[0] == "epoch 0: 13 steps of 2 ranks, in stored order"
    assert lines[1].split() == ["step", "rank", "worker", "place", "number", "key"]
    assert lines[2].split() == ["1", "1", "1", "0", "12", "000012"]
    assert len(lines) == 6


def test_a_step_is_what_a_loader_reads(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    order = ("--shuffle", "--seed", "3", "--epoch", "2")
    rows = shown(capsys, folder, *ON_RANKS, *order, "--step", "4")["samples"]
    made = loader(
        folder, 4, shuffle=True, seed=3, num_workers=2, placement=ss.Placement(1, 2), lanes=4
    )
    made.set_epoch(2)
    batch = list(islice(made, 5))[4]["cls"].tolist()
    assert [row["number"] for row in rows if row["rank"] == 1] == batch
    assert [row["key"] for row in rows] == [f"{row['number']:06d}" for row in rows]


def test_where_a_key_and_a_number_come(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_key = shown(capsys, folder, *ON_RANKS, "--shuffle", "--key", "000007", "--key", "000050")
    numbers = ("--number", "7", "--number", "50")
    assert shown(capsys, folder, *ON_RANKS, "--shuffle", *numbers) == by_key
    assert {row["number"] for row in by_key["samples"]} == {7, 50}
    dropped = run(capsys, folder, "--batch-size", "64", "--drop-last", "--number", "99")
    assert dropped.splitlines()[1] == "no such sample comes in it"


@pytest.mark.parametrize("kind", ["json", "pt", "folder"])
def test_a_saved_state_goes_on(
    folder: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = loader(folder, 8, shuffle=True, seed=9)
    batches = iter(made)
    list(islice(batches, 3))
    if kind == "json":
        file = tmp_path / "state.json"
        file.write_text(json.dumps({"loader": made.state_dict()}))
    else:
        saved = ss.save_checkpoint(tmp_path, step=3, loader=made, note="text")
        file = Path(saved) if kind == "pt" else tmp_path
    found = shown(capsys, folder, "--batch-size", "8", "--state", str(file), "--step", "0")
    assert (found["steps"], found["consumed"]) == (10, 24)
    text = run(capsys, folder, "--batch-size", "8", "--state", str(file), "--epoch", "0")
    assert text.startswith("epoch 0 from sample 24 on: 10 steps of 1 rank, shuffled")
    assert [row["number"] for row in found["samples"]] == next(batches)["cls"].tolist()


def test_a_file_of_two_states_or_none_is_refused(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state.json"
    states = [loader(folder, 8, seed=seed).state_dict() for seed in (0, 1)]
    for value, message in ((states, "states of 2 loaders"), ({}, "not a state of a ShardLoader")):
        file.write_text(json.dumps(value))
        assert main(["plan", folder, "--batch-size", "8", "--state", str(file)]) == 1
        assert message in capsys.readouterr().err
    file.write_text(json.dumps(states[0]))
    assert main(["plan", folder, "--batch-size", "8", "--state", str(file), "--seed", "4"]) == 1
    assert "seed: the state says 0, here it is 4" in capsys.readouterr().err


def test_the_dataset_of_a_function(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"import shardstream as ss\none = ss.ShardDataset({folder!r})\nmix = lambda: ss.mix({{'a': one, 'b': one}})\nnone = dict\n"
    (tmp_path / "made_for_plan.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    rows = shown(capsys, "--dataset", "made_for_plan:mix", "--batch-size", "4", "--number", "150")[
        "samples"
    ]
    assert [(row["dataset"], row["key"]) for row in rows] == [("b", "000050")]
    assert main(["plan", "--dataset", "made_for_plan:none", "--batch-size", "4"]) == 1
    assert "returned dict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "0", "--number", "1"], "one of --step, --key and --number"),
        (["--rank", "0"], "--rank needs --step"),
        (["--dataset", "a:b"], "--dataset has its own URL"),
        (["--dataset", "a:b", "--no-shuffle"], "--dataset has its own URL"),
    ],
)
def test_wrong_usage(
    folder: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", folder, "--batch-size", "4", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- shardstream first-use


@pytest.fixture
def trained(tmp_path: Path) -> tuple[str, str, list[list[int]]]:
    """A dataset, the checkpoints of a run with two loaders, and the batches of rank 1 of the first epoch and a half."""
    url = numbered(tmp_path / "data", 60, columns=["cls", "__key__"])
    place, other = ss.Placement(1, 2), loader(numbered(tmp_path / "test", 10), 5)
    made = loader(url, 4, shuffle=True, seed=3, placement=place)
    batches: list[list[int]] = []
    for _ in range(2):
        for batch in islice(made, 8 if not batches else 3):
            batches.append(batch["cls"].tolist())
            ss.save_checkpoint(tmp_path / "run", step=len(batches), train=made, test=other)
    return url, str(tmp_path / "run"), batches


def uses(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["first-use", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_first_use_of_samples(
    trained: tuple[str, str, list[list[int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, run, batches = trained
    asked = [batches[5][0], batches[3][2]]
    expected = [
        {"epoch": 0, "step": step, "rank": 1, "number": number, "key": f"{number:06d}"}
        for step, number in ((3, asked[1]), (5, asked[0]))
    ]
    (tmp_path / "keys.txt").write_text("".join(f"{one:06d}\n" for one in asked))
    by_keys = uses(capsys, url, "--run", run, "--keys", str(tmp_path / "keys.txt"))
    assert by_keys["samples"] == expected
    assert by_keys["checkpoint"] == f"{run}/step-00000003.pt"
    numbers = [text for one in asked for text in ("--number", str(one))]
    assert uses(capsys, url, "--run", run, *numbers) == by_keys
    ss.delete(url, keys=["000001"])  # the run has read the version before
    keys = [text for one in asked for text in ("--key", f"{one:06d}")]
    assert uses(capsys, url, "--run", run, *keys) == by_keys
    assert main(["first-use", url, "--run", run, *keys]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the last checkpoint before any use: ")
    assert lines[0].endswith("step-00000003.pt (epoch 0, after 24 samples of it)")
    assert lines[1].split() == ["epoch", "step", "rank", "number", "key"]
    assert len(lines) == 4
    assert main(["first-use", url, "--run", run, "--number", str(batches[0][0])]) == 0
    assert "there is no checkpoint before the first use" in capsys.readouterr().out


def test_wrong_usage_of_first_use(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["first-use", folder, "--run", str(tmp_path)]) == 2
    assert "one of --key, --keys and --number" in capsys.readouterr().err
    assert main(["first-use", folder, "--run", str(tmp_path), "--number", "3"]) == 1
    assert "no checkpoint" in capsys.readouterr().err
