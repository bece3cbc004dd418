"""URLs: their protocols and chains, folders and names, brace patterns and ``::`` joins, globs, and those that a manifest may name.

Patterns have limits on the number of URLs and on the time of a match.
"""

from __future__ import annotations

import os
import re
import reprlib
import string
from collections.abc import Iterable, Sequence
from urllib.parse import unquote, urlsplit

import braceexpand
import fsspec

from shardstream.errors import ManifestError, OptionError
from shardstream.format import MANIFEST_NAME, VERSIONS_FOLDER

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
IN_PLACE_SUFFIXES = (".parquet", ".mds", ".mds.zstd", ".mds.gz", ".mds.bz2")
"""Ends of the names of tables that are read in place."""
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst")

HTTP = ("http", "https")
WEB = ("http://", "https://")
"""The beginnings of the URLs of web servers, which seldom list a folder."""
# Other names of a protocol.
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
_UNCHAINED = {*ALIASES, *ALIASES.values(), *HTTP, "file", "local"}  # they open no other URL
_PROTOCOL = re.compile(r"(?:s3a?|gs|gcs|az|abfss?|hf|https?|s?ftp|memory):", re.IGNORECASE)
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
        OptionError: If there is no URL, a brace is not closed, the patterns expand to too many URLs (see `expand_braces`), or as in `check_parts`.
    """
    expanded: list[str] = []
    for part in [urls] if isinstance(urls, str | os.PathLike) else urls:
        text = os.fspath(part)
        patterns = _split_join(text) if "::" in text and not _is_path(text) else [text]
        expanded += expand_braces(*patterns) if "{" in text else patterns
    for url in expanded:
        is_file = is_tar(url) or url.lower().endswith(IN_PLACE_SUFFIXES)
        if "://" in url and (has_glob_signs(url) or not is_file):
            check_parts(url)
    if not expanded:
        raise OptionError("no shards: the list of URLs is empty")
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
    return url.partition("?")[0] if url.startswith(WEB) else url


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


def check_slashes(path: str) -> None:
    """Refuse ``s3:/bucket``, which would be a folder of this machine named ``s3:``.

    Raises:
        OptionError: If a path begins like that.
    """
    if match := _PROTOCOL.match(path):
        raise OptionError(
            f"{path} is a path of this machine, not a URL: a URL begins with {match[0]}//; "
            f"for a folder of that name, write ./{path}"
        )


def check_parts(url: str) -> None:
    """Refuse a folder of a bucket with an empty part in its URL: clients list another folder in its place.

    Raises:
        OptionError: If it has one, as ``s3://b//train`` and ``s3://b/train//`` do.
    """
    if protocol_of(url) in {*ALIASES, *ALIASES.values()} and "//" in url.partition("://")[2]:
        raise OptionError(
            "the URL has an empty part ('//'), so that another folder would be listed; remove a slash, or copy the files to another prefix",
            shard=url,
        )


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def with_one_protocol(url: str) -> str:
    """Return a URL with the first of the names of its protocol.

    >>> with_one_protocol("s3a://b/a.tar")
    's3://b/a.tar'
    """
    name, sign, path = url.partition("://")
    return f"{ALIASES.get(name, name)}{sign}{path}"


def is_chain(url: str) -> bool:
    """Return whether a URL is a chain of fsspec; paths and keys of objects may hold ``::``, too.

    >>> [is_chain(url) for url in ("simplecache::s3://b/a", "zip://a::b.zip", "/data/a::b", "s3://b/::/a")]
    [True, True, False, False]
    """
    head, sign, _ = url.partition("::")
    if not sign:
        return False
    return protocol_of(head) not in _UNCHAINED if "://" in head else is_known_protocol(head)


def is_known_protocol(name: str) -> bool:
    """Return whether fsspec has a file system of that name."""
    return name in fsspec.available_protocols()


def join_url(folder: str, name: str) -> str:
    """Append a relative name to the URL of a folder; an absolute name stays as it is.

    >>> join_url("s3://b/train/", "a.tar"), join_url("x", "s3://b/a.tar")
    ('s3://b/train/a.tar', 's3://b/a.tar')
    """
    if "://" in name or name.startswith("/"):
        return name
    return f"{folder.rstrip('/')}/{name}"


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return a path of this machine as an absolute one, for processes with another current folder; other URLs stay as they are.

    >>> absolute_url("s3://b/train/"), absolute_url("/data/../train/")
    ('s3://b/train/', '/train/')
    """
    text = os.fspath(url)
    if "://" in text or ("::" in text and not os.path.exists(text)):
        return text
    check_slashes(text)
    return os.path.abspath(os.path.expanduser(text)) + "/" * (text.endswith("/") and text != "/")


def parent_url(url: str) -> str:
    """Return the URL of the folder that a file is in.

    >>> parent_url("s3://b/train/a.tar"), parent_url("a.tar")
    ('s3://b/train', '.')
    """
    folder, slash, _ = url.rpartition("/")
    return folder if slash else "."


_BUCKETS = frozenset({*ALIASES.values(), "adl", "oss", "hf", "memory"})
# Clients disagree on where the server's name ends in an authority with one of these.
_AMBIGUOUS = re.compile(r"[?#@\\\s\x00-\x20\x7f-\x9f]")


def folder_of_manifest(url: str) -> str:
    """Return the URL of the folder of a dataset, by that of its manifest or of an earlier one.

    >>> folder_of_manifest("s3://b/train/index.json"), folder_of_manifest("s3://b/train/versions/000012.json")
    ('s3://b/train', 's3://b/train')
    """
    folder = parent_url(url)
    return folder if url.endswith(MANIFEST_NAME) else folder.removesuffix(f"/{VERSIONS_FOLDER}")


def check_names(manifest_url: str, names: Iterable[str]) -> None:
    """Refuse names of shards outside the store of a remote manifest.

    A local manifest is trusted like the command line: it may name anything. A remote one may name relative paths in or below
    its folder, and absolute URLs of the same store: the same protocol, and for protocols with a server name (http, sftp, ...)
    the same server.

    >>> check_names("s3://b/train/index.json", ["0.tar", "more/1.tar", "s3://b/2.tar"])

    Raises:
        ManifestError: At the first other name.
    """
    place = manifest_url.rsplit("::", 1)[-1]
    protocol, authority = _split(place)
    if protocol in ("", "file", "local"):
        return
    for name in names:
        if not (_is_in_store(name, protocol, authority) if "://" in name else _is_below(name)):
            raise ManifestError(
                f"it names {reprlib.repr(name)}, which is not in its own store; if you trust it, "
                "copy it to this machine and name the copy, or list the shards' URLs yourself",
                shard=manifest_url,
            )


def is_under(url: str, prefix: str) -> bool:
    """Return whether every client resolves a URL to a place under another URL, such as a folder, a server or ``https://``.

    >>> is_under("s3://b/train/a.jpg", "s3://b/train"), is_under("s3://b/train/../x.jpg", "s3://b/train")
    (True, False)
    >>> is_under("/data/a.jpg", "/data/"), is_under("https://host@other/a.jpg", "https://host")
    (True, False)
    """
    url, prefix = (_without_file_protocol(one) for one in (url, prefix))
    if "://" not in prefix:
        if "://" in url or "::" in url:
            return False
        url, prefix = absolute_url(url), absolute_url(prefix)  # resolves ".."
    folder = prefix if prefix.endswith("/") else f"{prefix}/"
    return url.startswith(folder) and _is_below(url[len(folder) :].lstrip("/"))


def _without_file_protocol(url: str) -> str:
    return url.removeprefix("file://").removeprefix("local://")


def _is_below(name: str) -> bool:
    """Return whether a relative name stays in its folder, also where a client decodes "%2e%2e"."""
    decoded = unquote(name).replace("\\", "/")
    return not ("::" in name or decoded.startswith("/") or ".." in decoded.split("/"))


def _is_in_store(url: str, protocol: str, authority: str) -> bool:
    """Return whether all clients resolve a URL to this store."""
    manifest_protocol, manifest_authority = _split(url)
    if manifest_protocol != protocol or not _is_below(url.partition("://")[2]):
        return False
    if manifest_authority == authority:  # the server that the user named
        return True
    try:  # urllib must parse it to the same server
        if (
            _AMBIGUOUS.search(manifest_authority)
            or urlsplit(url).netloc.lower() != manifest_authority
        ):
            return False
    except ValueError:
        return False
    return protocol in _BUCKETS or manifest_authority == authority.rpartition("@")[2]


def _split(url: str) -> tuple[str, str]:
    """Return protocol and authority; the protocol of a path is empty."""
    protocol, separator, rest = url.partition("://")
    protocol = protocol.lower()
    return (
        (ALIASES.get(protocol, protocol), rest.partition("/")[0].lower()) if separator else ("", "")
    )
