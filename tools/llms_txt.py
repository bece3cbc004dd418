"""Make llms.txt (llmstxt.org): the title, a summary, and each page of the documentation with its first sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_GROUP, _PAGE = re.compile(r"^  - (\w[^:]*):$"), re.compile(r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_OPTIONAL = ("changelog.md", "decisions/README.md")  # pages that a short context can do without


def llms_txt(root: Path, texts: Mapping[Path, str], prefix: str, suffix: str) -> str:
    """Return the list of pages as llms.txt.

    Args:
        root: Folder of the repository, with mkdocs.yml and docs/.
        texts: Texts of pages that are made anew, in place of their files.
        prefix: Beginning of the links, such as "docs/".
        suffix: End of the links in place of ".md", such as ".html".
    """
    docs = root / "docs"

    def entry(page: str) -> str:
        path = docs / page
        text = texts.get(path) or path.read_text(encoding="utf-8")
        found = re.search(r"^# (.+)$", text, re.MULTILINE)
        title = path.stem.capitalize() if found is None else found[1]
        name = page.removesuffix(".md")
        if suffix == ".html":  # as the builders of the site do
            name = re.sub(r"README$", "index", name)
        link = f"{prefix}{name}{suffix}"
        return f"- [{title}]({link}): {first_sentence(text)}".removesuffix(": ")

    groups = dict(_groups((root / "mkdocs.yml").read_text(encoding="utf-8")))
    further = {one for pages in groups.values() for one in pages if one.startswith("decisions/")}
    lines = ["# shardstream", "", f"> {first_sentence((docs / 'index.md').read_text())}", ""]
    for name, pages in groups.items():
        shown = [one for one in pages if one not in {*_OPTIONAL, *further}]
        lines += [f"## {name}", "", *map(entry, shown), ""]
    lines += ["## Optional", "", *map(entry, _OPTIONAL), ""]
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    r"""Return the first sentence of a page's prose without links, or nothing.

    >>> first_sentence("# Title\n\n```bash\nls\n```\n\nRead [this](a.md)\nfirst. Then that.")
    'Read this first.'
    """
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in prose.split("\n\n"):
        if re.match(r"\w|`|\*\*|\[", one := " ".join(paragraph.split())):
            sentence = re.match(r".*?[.?:](?= [A-Z`\[]|$)|.*", _LINK.sub(r"\1", one))
            return sentence[0].removesuffix(":") if sentence else ""
    return ""


def _groups(config: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of the navigation, each with its pages."""
    name, pages = "", list[str]()
    for line in config.partition("\nnav:\n")[2].splitlines():
        if found := _GROUP.match(line):
            if pages:
                yield name, pages
            name, pages = found[1], []
        elif found := _PAGE.match(line):
            pages.append(found[1])
    yield name, pages
