"""Test ``shardstream pack`` and the tools for packing."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from shardstream.cli import main
from shardstream.storage import Storage, locate_shards

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def photos(tmp_path: Path) -> str:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (20, 10)).save(tmp_path / "photos" / name / f"{i}.png")
    return str(tmp_path / "photos")


def test_pack_images(photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        main(
            [
                "pack",
                photos,
                str(out),
                "--split",
                "train=0.8,val=0.2",
                "--max-samples",
                "10",
                "--max-side",
                "8",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "packed 20 samples into 3 shards" in said.out
    assert "images of 2 classes" in said.out
    assert f"shardstream verify {out}/train" in said.out
    assert said.err == ""
    assert main(["verify", f"{out}/train", f"{out}/val"]) == 0
    assert json.loads((out / "val" / "index.json").read_bytes())["nsamples"] == 4


def test_columns_that_some_samples_lack_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    command = ["pack", str(tmp_path / "t.jsonl"), str(tmp_path / "out"), "--columns", "json.a"]
    assert main(command) == 0
    message = "warning: column a (json.a): 1 sample of 2 without a value"
    assert message in capsys.readouterr().err


def test_rate_of_a_resumed_pack_does_not_count_kept_samples(
    photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(photos, "dog", "9.png").write_bytes(b"bad")
    pack = ["pack", photos, str(tmp_path / "out"), "--no-shuffle", "--max-samples", "5"]
    assert main(pack) == 1
    assert main([*pack, "--skip-errors"]) == 0
    said = capsys.readouterr().out
    assert "shards of an earlier run that was stopped" in said
    assert "packed 19 samples into 4 shards" in said
    assert "samples/s" not in said


def test_folder_of_masks_requires_the_masks_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids" / "a").mkdir(parents=True)
    mask = Image.new("L", (20, 10), 7)
    mask.paste(19, (0, 0, 9, 9))
    mask.save(tmp_path / "ids" / "a" / "0.png")
    command = ["pack", str(tmp_path / "ids"), str(tmp_path / "out"), "--max-side", "8"]
    assert main(command) == 1
    assert "2 shades of grey, as a mask has" in capsys.readouterr().err
    for masks in ("png", "none"):
        assert main([*command, "--masks", masks, "--overwrite"]) == 0


def test_broken_table_rows_are_reported_or_skipped(
    photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("file,n\ncat/0.png,1\nno.png,2\ncat/1.png,x\ndog/1.png,4\n")
    command = [
        "pack",
        str(table),
        str(tmp_path / "out"),
        "--root",
        photos,
        "--map",
        "png=file",
        "--map",
        "cls=n",
    ]
    assert main(command) == 1
    assert "row 2" in capsys.readouterr().err
    skips = tmp_path / "skipped.jsonl"
    skipping = [*command, "--skip-errors", "--report", str(skips)]
    assert main([*skipping, "--key", "{n}", "--max-bytes", "1MB"]) == 0
    lines = [json.loads(line) for line in skips.read_text().splitlines()]
    assert [line["where"] for line in lines] == [f"{table}, row 2", f"{table}, row 3"]
    assert "a whole number" in lines[1]["reason"]
    said = capsys.readouterr()
    assert "2 skipped" in said.out
    assert said.err.count("skipped:") == 2
    assert main(command) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--skip-errors", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing", "out"], 1, "not found; check the path"),
        (["PHOTOS", "OUT", "--split", "train:0.9"], 2, "train=0.9,val=0.1"),
        (["PHOTOS", "OUT", "--split", "train=0.9"], 1, "add up to 0.9"),
        (["PHOTOS", "OUT", "--map", "jpg"], 2, "FIELD=COLUMN"),
        (["PHOTOS", "OUT", "--max-bytes", "big"], 1, "is not a size"),
        (["PHOTOS", "OUT/x.tar"], 1, "{shard}"),
        (["PHOTOS"], 2, "DEST"),
        (["PHOTOS", "OUT", "--classes", "PHOTOS/cat/0.png"], 1, "no class names found"),
        (["PHOTOS", "OUT", "--option", "foo=bar"], 1, "--option) has no effect"),
        (["PHOTOS", "OUT", "--source-option", "foo=bar"], 1, "--source-option) has no effect"),
        (["PHOTOS", "OUT", "--masks", ""], 1, "--masks none"),
        (["PHOTOS", "OUT", "--masks", "none,png"], 1, "--masks none"),
    ],
)
def test_usage_mistakes_are_explained(
    arguments: list[str],
    code: int,
    message: str,
    photos: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.replace("PHOTOS", photos).replace("OUT", str(tmp_path / "out")) for a in arguments]
    assert main(["pack", *filled]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--help"]) == 0
    said = capsys.readouterr().out
    assert "  shardstream pack photos/ s3://bucket/photos/ --split train=0.9,val=0.1\n" in said
    assert "--max-side" in said


def test_terminal_gets_a_progress_bar(photos: str, tmp_path: Path) -> None:
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        pytest.skip(f"this machine gives no terminal: {error}")
    code = "import sys; from shardstream.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", photos, tmp_path / "out"],
        stderr=theirs, stdout=subprocess.PIPE, check=True, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    with suppress(OSError):  # at the end
        while text := os.read(ours, 1 << 16).decode(errors="ignore"):
            shown += text
    os.close(ours)
    assert "20 samples" in shown
    assert "MB/s" in shown or "kB/s" in shown
    assert b"packed 20 samples" in done.stdout


@pytest.mark.parametrize(
    ("tool", "arguments", "samples"),
    [
        ("pack_imagefolder", ["PHOTOS", "--max-side", "8"], 20),
        pytest.param(
            "pack_table", ["TABLE", "--map", "png=file", "--key", "id"], 2, marks=pytest.mark.slow
        ),
        pytest.param("pack_digits", [], 1797, marks=pytest.mark.slow),
    ],
)
def test_pack_tools_run(
    tool: str, arguments: list[str], samples: int, photos: str, tmp_path: Path
) -> None:
    table = Path(photos, "t.csv")
    table.write_text("id,file\na,cat/0.png\nb,dog/0.png\n")
    filled = [a.replace("PHOTOS", photos).replace("TABLE", str(table)) for a in arguments]
    dest = str(tmp_path / "out")
    command = [
        sys.executable,
        str(ROOT / "tools" / f"{tool}.py"),
        *filled,
        "--dest",
        dest,
        "--split",
        "a=0.5,b=0.5",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert f"{samples:,} samples" in done.stdout
    counts = [
        shard.nsamples or 0
        for part in "ab"
        for shard in locate_shards(f"{dest}/{part}", Storage()).shards
    ]
    assert sum(counts) == samples
    again = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (again.returncode, again.stderr.count("error: "), again.stderr.count("Traceback")) == (
        1,
        1,
        0,
    )
    assert "overwrite" in again.stderr


def test_loose_files_and_their_fields_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loose").mkdir()
    for name in ("a.txt", "a.json", "b.txt", "c.v1.txt"):
        (tmp_path / "loose" / name).write_text("1")
    assert main(["pack", str(tmp_path / "loose"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "  4 files -> 3 samples, 3 fields: txt (2), json (1), v1.txt (1)\n" in said.out
    assert said.err == ""


def test_splits_are_packed_and_listed_together(
    photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all").mkdir()
    Path(photos).rename(tmp_path / "all" / "train")
    (tmp_path / "all" / "val" / "dog").mkdir(parents=True)
    Image.new("RGB", (20, 10)).save(tmp_path / "all" / "val" / "dog" / "rex.png")
    out = str(tmp_path / "out")
    assert main(["pack", str(tmp_path / "all"), out]) == 0
    assert "images of 2 classes and 2 splits" in capsys.readouterr().out
    assert main(["ls", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(("/", ")"))] == [
        "train/", "classes: 2 (cat, dog)", "val/", "classes: 2 (cat, dog)",
    ]  # fmt: skip
    assert "total: 1 shard, 20 samples" in lines[3]
    assert main(["ls", out, "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert {name: split["nsamples"] for name, split in splits.items()} == {"train": 20, "val": 1}
    assert splits["val"]["classes"] == ["cat", "dog"]
    assert main(["cat", f"{out}/val"]) == 0
    shown = capsys.readouterr().out
    assert "key    dog/rex\n" in shown
    assert shown.endswith("1 (dog)\n")
    again = ["pack", str(tmp_path / "all" / "val"), str(tmp_path / "again")]
    assert main([*again, "--classes", f"{out}/train"]) == 0
    assert json.loads((tmp_path / "again" / "classes.json").read_bytes()) == ["cat", "dog"]
    for folder in (str(tmp_path / "all"), str(tmp_path / "gone")):
        assert main(["ls", folder]) == 1
        assert capsys.readouterr().err.startswith("error: no")
