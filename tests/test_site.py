"""Test the pages that the site adds: each public name, error and page is there once, and generated pages are up to date."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest
from make_docs import pages, webdataset_names

import shardstream as ss
from shardstream import testing

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
ERRORS = DOCS / "reference" / "errors.md"
_DIRECTIVE = re.compile(r"^::: shardstream\.([\w.]+)$", re.MULTILINE)


IN_ROOMS = (
    "catalog.Catalog",
    "catalog.read_columns",
    "catalog.read_shard",
    "codecs.Audio",
    "codecs.AudioDecoder",
    "codecs.Video",
    "codecs.VideoDecoder",
    "loader.CatalogDataset",
    "loader.Follow",
    "loader.collate",
    "packing.write_shard",
    "pipeline.BadSample",
    "storage.FieldFile",
    "tasks.Executor",
    "tasks.FuturesExecutor",
    "tasks.LocalExecutor",
    "tasks.Parts",
    "tasks.Task",
    "versions.DeleteReport",
    "versions.GcReport",
    "versions.OpenWriter",
    "versions.VersionDiff",
    "versions.VersionRecord",
    "versions.close_writers",
    "versions.diff",
    "versions.gc",
    "versions.log",
    "versions.tag",
    "versions.untag",
)
"""Names for users that are not in ``shardstream`` itself."""


SEARCHED = (
    ("skip corrupt images", "troubleshooting"),
    ("skip corrupt images", "faults"),
    ("randomerasing", "troubleshooting"),
    ("uneven batches", "troubleshooting"),
    ("hangs at the end", "troubleshooting"),
    ("hangs at the end", "ranks"),
    ("nccl timeout", "troubleshooting"),
    ("resume mid epoch", "resume"),
    ("shuffle buffer", "order"),
    ("num_workers", "tuning"),
    ("too many open files", "troubleshooting"),
    ("out of memory", "troubleshooting"),
    ("uneven", "ranks"),
    ("corrupt jpeg", "troubleshooting"),
    ("deterministic", "order"),
    ("drop_last", "ranks"),
    ("distributedsampler", "ranks"),
    ("which command data", "index"),
)
"""Words that users search for, and the page with the cure."""


def documented() -> Counter[str]:
    """Return how often each name has an entry in the reference."""
    return Counter(
        name for path in REFERENCE for name in _DIRECTIVE.findall(path.read_text(encoding="utf-8"))
    )


def entry_of(name: str) -> str:
    """Return the name of the entry of a public name: its full path if a module of the same name would hide it."""
    found = attrgetter(name)(ss)
    module = getattr(found, "__module__", "")
    if module.rpartition(".")[2] == name.rpartition(".")[2]:
        return f"{module}.{found.__name__}".removeprefix("shardstream.")
    return name


def public_functions(module: object) -> list[str]:
    """Return the public names that a module without ``__all__`` defines itself."""
    own = getattr(module, "__name__", "")
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == own
    ]


def integrations() -> list[str]:
    """Return the public classes and functions of the integrations, whose import takes seconds."""
    return [
        f"integrations.{path.stem}.{node.name}"
        for path in (ROOT / "shardstream" / "integrations").glob("[a-z]*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]


def errors() -> list[str]:
    """Return the names of all errors and warnings."""
    return [name for name in vars(ss.errors) if name.endswith(("Error", "Warning"))]


def test_each_public_name_is_once_in_the_reference() -> None:
    names = [
        entry_of(name)
        for name in {*ss.__all__} - {"catalog", "codecs", "errors", "tasks", "versions"}
    ]
    names += [entry_of(name) for name in IN_ROOMS]
    names += [entry_of(f"ray.{one}") for one in dir(ss.ray)]
    names += [f"errors.{name}" for name in errors() if name not in ss.__all__]
    names += integrations()
    names += [f"testing.{name}" for name in public_functions(testing)]
    found = documented()
    assert {name: found[name] for name in names if found[name] != 1} == {}
    assert [name for name, count in found.items() if count > 1] == []


def test_each_name_of_webdataset_is_once_in_its_list() -> None:
    text = (DOCS / "reference" / "webdataset.md").read_text(encoding="utf-8")
    assert re.findall(r"`(\w+)`", text.splitlines()[-1]) == webdataset_names()


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_page_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages()[path], "run python tools/make_docs.py"


def test_each_page_is_once_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_each_page_but_decisions_is_once_in_llms_txt() -> None:
    for path, beginning, end in (
        (ROOT / "llms.txt", "docs/", ".md"),
        (DOCS / "llms.txt", "", ".html"),
    ):
        linked = re.findall(r"^- \[.+\]\((\S+)\)", path.read_text(encoding="utf-8"), re.MULTILINE)
        names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
        wanted = [f"{beginning}{one}{end}" for one in names if not one.startswith("decisions/")]
        decisions = f"{beginning}decisions/{'README' if end == '.md' else 'index'}{end}"
        assert sorted(linked) == sorted([*wanted, decisions])


@pytest.mark.parametrize(("query", "page"), SEARCHED)
def test_words_that_users_search_for_are_in_one_section(query: str, page: str) -> None:
    """The search of the site finds the sections that have all words of a query."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").lower()
    sections = re.split(r"^#+ ", text, flags=re.MULTILINE)
    assert any(all(word in section for word in query.split()) for section in sections)


def test_pages_show_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"copyright: shardstream {version} " in (ROOT / "mkdocs.yml").read_text()


def literals() -> str:
    """Return all texts of the package; parts of a text that are computed become a line break."""
    texts: list[str] = []
    for path in (ROOT / "shardstream").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\n" for part in node.values
                ]
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def test_messages_on_the_page_of_errors_exist() -> None:
    """Word for word; ``...`` stands for what is computed."""
    found = literals()
    messages = re.findall(
        r"^\| `(.+?)`(?: \(|,? \|)", ERRORS.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(messages) >= 60
    parts = [(part.strip(), message) for message in messages for part in message.split("...")]
    assert [message for part, message in parts if part and part not in found] == []


def test_each_error_has_messages() -> None:
    sections = re.split(r"::: shardstream\.(?:errors\.)?", ERRORS.read_text(encoding="utf-8"))[1:]
    rows = {section.partition("\n")[0]: section.count("\n| `") for section in sections}
    assert set(rows) == set(errors())
    assert [name for name, count in rows.items() if not count] == ["ShardStreamError"]
