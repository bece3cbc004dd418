"""Expand brace patterns and ``::`` joins, recognise tars, and simplify globs, with limits on the number of URLs and on the time of a match."""

from __future__ import annotations

import os
import re
import reprlib
import string
from collections.abc import Iterable, Sequence

import braceexpand

from shardstream.errors import OptionError
from shardstream.storage.clients import is_known_protocol

URLS_LIMIT = 1_000_000
_TEXT_LIMIT = 65_536
_DEPTH_LIMIT = 20
_DEEP_STARS_LIMIT = 4  # a match takes time that grows with the path's length to this power
_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?")
_LETTERS = string.ascii_uppercase + string.ascii_lowercase  # as `braceexpand` counts them
_MAX_DIGITS = 18
_BEYOND: int = 10**_MAX_DIGITS
_GLOB = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\\.|[{},]", re.DOTALL)
TAR_SUFFIXES = (".tar",)
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst")

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Location of a dataset: a URL or path of a tar, pattern, folder or manifest, or several."""


def is_tar(name: str) -> bool:
    """Return whether a file name has the suffix of a shard."""
    return without_query(name).lower().endswith(TAR_SUFFIXES + COMPRESSED_SUFFIXES)


def is_compressed(name: str) -> bool:
    """Return whether a shard is compressed, so that it can only be read from start to end."""
    return without_query(name).lower().endswith(COMPRESSED_SUFFIXES)


def expand_urls(urls: Urls) -> list[str]:
    """Expand ``::`` joins and brace patterns, in order; an fsspec chain (``simplecache::s3://…``) stays one URL.

    >>> expand_urls("a-{00..02}.tar::b.tar")
    ['a-00.tar', 'a-01.tar', 'a-02.tar', 'b.tar']

    Raises:
        OptionError: If a brace is not closed, or the patterns expand to too many URLs (see `url_patterns`).
    """
    expanded: list[str] = []
    for part in [urls] if isinstance(urls, str | os.PathLike) else urls:
        text = os.fspath(part)
        patterns = _split_join(text) if "::" in text and not _is_path(text) else [text]
        expanded += expand_braces(*patterns) if "{" in text else patterns
    return expanded


def _is_path(text: str) -> bool:
    """Return whether a text with ``::`` is a path of this machine, or a pattern in a folder of this machine."""
    folder = os.path.dirname(text)
    return os.path.exists(text) or ("::" in folder and os.path.exists(folder))


def _split_join(text: str) -> Iterable[str]:
    chain = ""
    *heads, last = text.split("::")
    for part in heads:
        if part.isalnum() and is_known_protocol(part):
            chain += f"{part}::"  # the head of an fsspec chain, not a file
        else:
            yield chain + part
            chain = ""
    yield chain + last  # even if it is the name of a protocol: a folder may be called "data"


def expand_braces(*patterns: str, limit: int = URLS_LIMIT) -> list[str]:
    """Expand brace patterns into texts, in order.

    >>> expand_braces("{a,b}-{00..01}.tar")
    ['a-00.tar', 'a-01.tar', 'b-00.tar', 'b-01.tar']

    Raises:
        OptionError: If a brace is not closed, or the patterns stand for over a million texts or are too deep or long.
    """
    expanded: list[str] = []
    for pattern in patterns:
        expanded += _expand_one(pattern, limit - len(expanded), limit)
    return expanded


def _expand_one(pattern: str, left: int, limit: int) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    if len(pattern) > _TEXT_LIMIT:
        raise OptionError(
            f"a pattern of {len(pattern)} characters, the limit is {_TEXT_LIMIT}; pass a list of URLs"
        )
    count = _count(pattern)
    if count > left:
        number = f"{count:,}" if count < _BEYOND else f"over {_BEYOND:,}"
        raise OptionError(
            f"{reprlib.repr(pattern)} stands for {number} URLs, the limit is {limit:,} in all; "
            "check its ranges, or name the folder"
        )
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise OptionError(
            f"the braces of {reprlib.repr(pattern)} are not closed or hold no range; "
            "write a range of shards as {000000..000099}"
        ) from error


def has_glob_signs(url: str) -> bool:
    """Return whether a URL has the signs of a glob; the "?" of a web server's query is none.

    >>> has_glob_signs("s3://b/[ab].tar"), has_glob_signs("https://h/a.tar?sign=x")
    (True, False)
    """
    return _GLOB.search(without_query(url)) is not None


def without_query(url: str) -> str:
    """Remove the query of an HTTP URL: its "?" is not a glob, and the suffix is in the path."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


def simplify_glob(pattern: str) -> str:
    """Return a glob that matches the same in bounded time.

    >>> simplify_glob("s3://b/**/**/*.tar")
    's3://b/**/*.tar'

    Raises:
        OptionError: If too many parts of it stand for any number of folders.
    """
    simple = re.sub(r"(\*\*/)+", "**/", re.sub(r"\*{3,}", "**", pattern))
    if simple.count("**") > _DEEP_STARS_LIMIT:
        raise OptionError(
            f"the pattern {reprlib.repr(pattern)} has {simple.count('**')} times '**', the limit is {_DEEP_STARS_LIMIT}; "
            "name the folders, or list the shards"
        )
    return simple


def _count(pattern: str) -> int:
    """Return how many texts a pattern with closed braces stands for, without making one.

    Raises:
        OptionError: If braces are nested too deep.
    """
    groups = [_Group(0)]
    for found in _BRACES.finditer(pattern):
        mark, group = found[0], groups[-1]
        if mark == "{":
            if len(groups) > _DEPTH_LIMIT:
                raise OptionError(
                    f"the braces of {reprlib.repr(pattern)} are over {_DEPTH_LIMIT} deep; write a plainer pattern"
                )
            groups.append(_Group(found.end()))
        elif mark == "," and len(groups) > 1:
            group.done, group.product = group.done + group.product, 1
        elif mark == "}" and len(groups) > 1:
            groups.pop()
            text = pattern[group.start : found.start()]
            groups[-1].product *= _range_size(text) or group.done + group.product
    return max(group.product for group in groups)


class _Group:
    """The counts of an open brace."""

    __slots__ = ("done", "product", "start")

    def __init__(self, start: int) -> None:
        self.start, self.done, self.product = start, 0, 1


def _range_size(text: str) -> int | None:
    """Return how many texts a range like "00..99" or "a..f" has; None if it is no range."""
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    if max(map(len, found.groups(""))) > _MAX_DIGITS:
        return _BEYOND
    first, last = (
        (int(found[1]), int(found[2]))
        if found[1]
        else (_LETTERS.index(found[3]), _LETTERS.index(found[4]))
    )
    return abs(last - first) // (int(found[5] or 1) or 1) + 1
