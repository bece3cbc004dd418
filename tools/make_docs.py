"""Write the pages of the documentation that are made from other files; a test compares them.

    python tools/make_docs.py

llms.txt, docs/llms.txt        the pages, each with its first sentence: of the repository, and of the site
docs/reference/cli.md          the options and arguments of the command line
docs/reference/webdataset.md   the names of shardstream.webdataset
docs/images/speed.svg          the README's figure, from docs/benchmarks.json
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llms_txt import llms_txt
from speed_chart import speed_chart
from typer.core import TyperArgument

import shardstream.webdataset as wds
from shardstream.cli import command_tree

ROOT = Path(__file__).parent.parent
_SHARED = 3  # commands that have an option, from which it is explained once


def pages() -> dict[Path, str]:
    """Return the text of each page that this tool writes."""
    docs = ROOT / "docs"
    made = {
        docs / "reference" / "cli.md": cli_page(),
        docs / "reference" / "webdataset.md": webdataset_page(),
        docs / "images" / "speed.svg": speed_chart(
            json.loads((docs / "benchmarks.json").read_text(encoding="utf-8"))
        ),
    }
    return made | {
        ROOT / "llms.txt": llms_txt(ROOT, made, "docs/", ".md"),
        docs / "llms.txt": llms_txt(ROOT, made, "", ".html"),
    }


def cli_page() -> str:
    """Return the reference of the command line, from the functions and types that define it."""
    root = command_tree()
    lines = [
        "# Command line",
        "",
        "`shardstream COMMAND --help` shows the same in a terminal.",
        "[Shell completion](../install.md#shell-completion) completes commands and options.",
        "",
        *_help(root.help),
        "| exit code | |",
        "| --- | --- |",
        "| 0 | success |",
        "| 1 | an error, or problems that `verify` found |",
        "| 2 | wrong usage |",
        "| 130, 143 | interrupted by Ctrl-C, ended by SIGTERM |",
        "",
        *_listed(row for row in _parameters(root, "shardstream") if "completion" not in row[0]),
    ]
    rows = {name: list(_parameters(one, name)) for name, one in root.commands.items()}
    counts = Counter(row for found in rows.values() for row in found)
    shared = [row for row, count in counts.items() if count >= _SHARED]
    lines += ["## Options of several commands", "", *_listed(shared)]
    for name, command in root.commands.items():
        arguments = [
            str(param.metavar) for param in command.params if isinstance(param, TyperArgument)
        ]
        usage = " ".join(["shardstream", name, *arguments])
        lines += [f"## {name}", "", f"`{usage}`", ""]
        also = ", ".join(
            f"`{row[0].split()[0]}`"
            for row in rows[name]
            if row in shared and row[0].startswith("-")
        )
        lines += [*_help(command.help), *_listed(row for row in rows[name] if row not in shared)]
        lines += [f"[Also](#options-of-several-commands) {also}.", ""] if also else []
    return "\n".join(lines).rstrip() + "\n"


def _help(text: str) -> Iterator[str]:
    """Yield the help as Markdown: examples, which are indented, become a block."""
    for paragraph in text.replace("\b\n", "").strip().split("\n\n"):
        lines = paragraph.splitlines()
        code = [line.strip() for line in lines if line.startswith("  ")]
        yield from (_escape(line) for line in lines if not line.startswith(("  ", "Example")))
        if code:
            yield from ("```console", *(f"$ {line}" for line in code), "```")
        yield ""


def _parameters(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of each argument and option."""
    context = command.make_context(name, [], resilient_parsing=True)
    for param in command.params:
        if isinstance(param, TyperArgument):
            yield str(param.metavar), _escape(param.help or "")
        elif not param.hidden:
            names, text = param.get_help_record(context)
            yield names, _escape(text)


def _listed(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"- `{name}`: {text}" for name, text in rows)
    yield ""


def _escape(text: str) -> str:
    for one in "|<*_":  # single backticks, as in docstrings, mark code here, too
        text = text.replace(one, f"\\{one}")
    return re.sub(r"\s+", " ", text).strip()


def webdataset_names() -> list[str]:
    """Return the public names of shardstream.webdataset that are not modules."""
    names = (name for name, value in vars(wds).items() if not inspect.ismodule(value))
    return sorted((name for name in names if not name.startswith("_")), key=str.lower)


def webdataset_page() -> str:
    """Return the list of the names of shardstream.webdataset."""
    lines = [
        "# WebDataset's names",
        "",
        "The names of `shardstream.webdataset`, with webdataset's arguments and meaning. [From WebDataset](../webdataset.md) shows how they are used, and the differences; `help(wds.NAME)` describes each.",
        "",
        ", ".join(f"`{name}`" for name in webdataset_names()) + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
