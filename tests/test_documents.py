"""Test that documents name files and public names that exist, and link to each other."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest

import shardstream as ss

ROOT = Path(__file__).parent.parent
DECISIONS = ROOT / "docs" / "decisions"
PAGES = sorted(DECISIONS.glob("*.md"))
USERS = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
DEVELOPERS = (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md", *PAGES)
# In backticks: a path with a folder and a suffix, or a module of the package's root.
_FILE = re.compile(r"`((?:\w+/)+\w+\.py|distributed\.py|process\.py)`")
_NAME = re.compile(r"\bss\.([\w.]*\w)")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", USERS, ids=name_of)
def test_public_names_that_are_mentioned_exist(path: Path) -> None:
    for name in set(_NAME.findall(path.read_text(encoding="utf-8"))):
        operator.attrgetter(name)(ss)


@pytest.mark.parametrize("path", DEVELOPERS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    for name in set(_FILE.findall(path.read_text(encoding="utf-8"))):
        assert (ROOT / name).is_file() or (ROOT / "shardstream" / name).is_file(), name


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_links_name_a_subject_not_a_file_that_readers_of_the_site_do_not_see(path: Path) -> None:
    assert not re.findall(r"\[[a-z-]+\.md\]", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DEVELOPERS, ids=name_of)
def test_links_have_targets(path: Path) -> None:
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_every_decision_is_in_the_index() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    linked = set(_LINK.findall(index))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def test_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "shardstream").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}`" not in text} == set()


def test_modules_in_the_drawings_exist() -> None:
    """The first words of a line in a diagram are a room and its modules."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "shardstream").glob("*/__init__.py")}
    room = ""
    for block in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1:]:
        for line in block.splitlines():
            found = re.match(r"  (\w*) +((?:\w+, )*\w+)  ", line)
            if found is None:
                continue
            room = found[1] or room
            assert room in rooms, line
            for module in found[2].split(", "):
                assert [*(ROOT / "shardstream" / room).rglob(f"{module}.py")], line
