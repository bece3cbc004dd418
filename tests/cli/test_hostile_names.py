"""Terminal control characters in names and texts of a shard are escaped, and only requested files are written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.cli import main
from shardstream.errors import SampleError, ShardError
from shardstream.packing import sample_pieces
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_tars import tar_bytes
from tests.strategies import make_header, octal

TRICKS = {
    "colour": "a\x1b[31mb",
    "title": "a\x1b]0;owned\x07b",
    "carriage return": "a\rb",
    "backspace": "abc\x08\x08\x08",
    "right to left": "a\u202egpj",
    "C1 controls": "a\x9b31mb",
    "markup": "[red]a[/red][link=http://evil]b",
    "not UTF-8": "a\udcff\udc9bb",
}


@pytest.fixture(params=TRICKS, name="folder")
def _folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    trick = TRICKS[request.param]
    folder = tmp_path / "data"
    folder.mkdir()
    members = [
        (f"{trick}.{trick.lower()}", b"1"),
        (f"{trick}.txt", trick.encode("utf-8", "replace")),
    ]
    (folder / "a.tar").write_bytes(tar_bytes(members))
    return str(folder)


COMMANDS = [["ls"], ["ls", "--json"], ["cat"], ["cat", "--field", "txt"], ["cat", "--key", "none"],
            ["cat", "--field", "none"], ["index"], ["verify"]]  # fmt: skip
ALWAYS = [
    *((COMMANDS[place], True) for place in (0, 1, 2, 3, 5, 6, 7)),
    *((COMMANDS[place], False) for place in (0, 2, 4)),
]


@pytest.mark.parametrize(
    ("command", "is_terminal"), with_slow_rest(ALWAYS, COMMANDS, [False, True])
)
def test_output_contains_only_printable_characters(
    command: list[str], is_terminal: bool, folder: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    main([command[0], folder, *command[1:]])
    shown = capsys.readouterr()
    text = (shown.out + shown.err).replace("\n", "")
    assert text.isprintable(), [one for one in text if not one.isprintable()]
    assert "Traceback" not in text


def test_rich_markup_in_names_is_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("[red]a.txt", b"[bold]b[/bold]")]))
    assert main(["cat", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "key    [red]a" in out
    assert "[bold]b[/bold]" in out


def test_errors_of_the_library_are_printable_too(tmp_path: Path) -> None:
    tar = make_header(b"a\x1b[31m.txt", size=octal(5000)) + bytes(512)
    (tmp_path / "a.tar").write_bytes(tar)
    with pytest.raises(ShardError, match=r"is cut: a\\x1b\[31m\.txt needs"):
        ss.ShardDataset(str(tmp_path))


@pytest.mark.parametrize("name", ["../evil.txt", "/evil/evil.txt", "a/../../evil.txt"])
def test_extract_writes_only_the_requested_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "data" / "a.tar").write_bytes(tar_bytes([(name, b"evil")]))
    monkeypatch.chdir(tmp_path / "here")
    before = set(tmp_path.rglob("*"))
    assert main(["cat", "../data", "--field", "txt", "--output", "out.txt"]) == 0
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "here" / "out.txt"}


EVIL_KEYS = ["../a", "a/../b", "/etc/a", "a//b", "a\0b", "", "a/", "..", "__x__/a"]


@pytest.mark.parametrize("key", EVIL_KEYS)
def test_member_names_outside_the_folder_are_not_written(key: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError):
        sample_pieces(key, {"txt": b"1"})
    with ss.ShardWriter(str(tmp_path / "{shard:06d}.tar")) as writer:
        with pytest.raises(SampleError):
            writer.write({"__key__": key, "txt": "1"})
        writer.write({"__key__": "good", "txt": "1"})
    assert [sample["__key__"] for sample in ss.ShardDataset(str(tmp_path))] == ["good"]


@pytest.mark.parametrize("field", ["a/b", "../a", "a\0b", "", "__key__"])
def test_field_names_outside_the_folder_are_not_written(field: str) -> None:
    with pytest.raises(SampleError):
        sample_pieces("a", {field: b"1"})


def test_hostile_tars_are_not_packed_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(tar_bytes([("../../evil.txt", b"1")]))
    with pytest.raises(ss.ShardStreamError, match=r"\.\."):
        ss.pack(str(tmp_path / "in"), str(tmp_path / "out"))
    assert not list(tmp_path.rglob("evil*"))


def test_output_of_make_shards_passes_verify(tmp_path: Path) -> None:
    assert not ss.verify(make_shards(tmp_path, samples=3)).errors
