"""Exceptions and warnings of shardstream, as one tree.

    ShardStreamError
    ├── OptionError              an invalid argument (also a ValueError)
    ├── StorageError             a URL that cannot be listed, read or written
    │   ├── NotFoundError        not found (also a FileNotFoundError)
    │   ├── AccessDeniedError    missing or wrong credentials (also a PermissionError)
    │   ├── ChangedError         a file that changed since it was indexed or read
    │   └── UnfinishedError      a dataset that is being written, or whose writer was stopped
    ├── ShardError               a tar whose bytes are damaged or truncated
    │   └── IndexMismatchError   a tar, its index and its manifest that do not match
    ├── ManifestError            an invalid index.json
    ├── SampleError              a sample that cannot be written, grouped or batched
    │   └── DecodeError          a field whose bytes cannot be decoded
    ├── SourceError              a file or row that cannot be packed
    ├── StateError               a state that cannot be continued exactly
    ├── SkipBudgetError          more bad samples than the caller allowed
    └── WorkerError              a loader worker that died (also a RuntimeError, as torch raises)

Every message says what failed, where (shard, byte, key, field) and what to do. Loader workers rebuild an exception as
``type(message)``, so each class takes one positional message; the rest are optional keywords kept as attributes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from typing import Self

_USERINFO = re.compile(r"(?<=://)[^/\s]*@")  # a password may have an @
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_ADDRESS = re.compile(r" ?<[\w.]+ object at 0x[0-9a-fA-F]+>| at 0x[0-9a-fA-F]{6,}")
_QUERY = re.compile(r"(?<=[^\s])\?[^\s'\"]*")


def redact(url: str) -> str:
    """Remove possible secrets from a URL: user info, and the query string of a signed URL.

    >>> redact("https://user:p@ss@host/a.tar?X-Amz-Signature=1f3")
    'https://host/a.tar?…'
    """
    if "://" not in url:
        return url
    return _QUERY.sub("?…", _USERINFO.sub("", url))


def without_addresses(text: str) -> str:
    """Remove addresses of objects in memory from the message of another library.

    >>> without_addresses("cannot identify image file <_io.BytesIO object at 0x7f00>")
    'cannot identify image file'
    """
    return _ADDRESS.sub("", text)


def describe_error(error: BaseException) -> str:
    """Format type and message of an error of another library or of the user's code, without addresses of objects.

    >>> describe_error(ValueError("no image"))
    'ValueError: no image'
    """
    return f"{type(error).__name__}: {without_addresses(str(error))}"


class _RedactUrls(logging.Filter):
    """Remove possible secrets from the URLs of a log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "://" in text:
            record.msg, record.args = _URL.sub(lambda found: redact(found[0]), text), None
        return True


_redact_urls = _RedactUrls()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose messages show no secrets of URLs."""
    logger = logging.getLogger(name)
    logger.addFilter(_redact_urls)  # once, however often
    return logger


def shown(text: str) -> str:
    r"""Escape terminal control characters, such as in names of hostile tars; line breaks and tabs stay.

    >>> shown("a\x1b[31m\u202e\n")
    'a\\x1b[31m\\u202e\n'
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


def why_not_imported() -> str:
    """Say why processes that were spawned may fail to import the main program and its functions, and what to do."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return (
            "it cannot import functions and classes of a notebook or an interactive session: "
            "write them to a module (a .py file) and import them from there"
        )
    if not os.path.exists(path):
        return "it cannot import a program that is read from standard input: save it to a file"
    return (
        f"it imports {path} for what was sent to it: define functions at the top level there, "
        "and put what the script runs under 'if __name__ == \"__main__\":'"
    )


def how_to_install(extra: str) -> str:
    """Format the command that installs an extra of shardstream, which no package index has yet.

    >>> how_to_install("view")
    'pip install ".[view]" in a clone of shardstream'
    """
    return f'pip install ".[{extra}]" in a clone of shardstream'


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "shard"), plural(12345, "sample"), plural(2, "class"), plural(0, "batch")
    ('1 shard', '12,345 samples', '2 classes', '0 batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def human_bytes(count: int) -> str:
    """Format a number of bytes in decimal units.

    >>> human_bytes(999), human_bytes(256_000_000)
    ('999 B', '256.0 MB')
    """
    value = float(count)
    for unit in _UNITS:
        if value < 999.95 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes: 1 MB is 10^6, 1 MiB is 2^20.

    >>> parse_bytes("256MB"), parse_bytes("1.5 GiB"), parse_bytes(512)
    (256000000, 1610612736, 512)

    Raises:
        OptionError: If it is not a size, or less than 1.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise OptionError(f"{size!r} is not a size; write '256MB', '1GiB' or a number of bytes")
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _EXPONENTS[prefix.lower()])
    if size < 1:
        raise OptionError(f"a size must be 1 byte or more, not {size}")
    return size


class ShardStreamError(Exception):
    """Base of all errors that shardstream raises on purpose.

    The message is ``what; remedy [where]``. Attributes: ``what`` failed, ``remedy`` (the action; empty if ``what`` includes it),
    ``where`` (the place, as text), and the other arguments.

    Args:
        what: The failure.
        remedy: The action to take.
        shard: URL of the shard or file.
        offset: Byte offset in that file.
        key: Key of the sample.
        field: Field of the sample.
    """

    def __init__(
        self,
        what: str,
        *,
        remedy: str = "",
        shard: str | None = None,
        offset: int | None = None,
        key: str | None = None,
        field: str | None = None,
    ) -> None:
        self.what = shown(what)
        self.remedy = shown(remedy)
        self.shard = None if shard is None else redact(shard)
        self.offset = offset
        self.key = key
        self.field = field
        places = (
            None if self.shard is None else f"in {self.shard}",
            None if offset is None else f"at byte {offset}",
            None if key is None else f"sample {key!r}",
            None if field is None else f"field {field!r}",
        )
        self.where = ", ".join(place for place in places if place)
        message = f"{what}; {remedy}" if remedy else what
        super().__init__(shown(f"{message} [{self.where}]" if self.where else message))


class OptionError(ShardStreamError, ValueError):
    """An argument with an invalid value or type."""


class StorageError(ShardStreamError):
    """A URL that cannot be listed, read or written: missing, denied or unreachable."""


class NotFoundError(StorageError, FileNotFoundError):
    """A URL that was not found. A retry does not help."""

    errno = errno.ENOENT


class AccessDeniedError(StorageError, PermissionError):
    """Missing or wrong credentials. A retry does not help."""

    errno = errno.EACCES


class ChangedError(StorageError):
    """A file that differs from its manifest, or changed since it was read. A retry does not help."""


class UnfinishedError(StorageError):
    """A dataset that is being written, or whose writer was stopped: shards may be missing."""


class ShardError(ShardStreamError):
    """A file whose bytes are damaged, truncated or not a tar."""


class IndexMismatchError(ShardError):
    """A tar, its index and its manifest that do not match."""


class ManifestError(ShardStreamError):
    """An invalid ``index.json``."""


class SampleError(ShardStreamError):
    """A sample that cannot be written, grouped or batched."""

    @classmethod
    def of(cls, sample: object, what: str, *, remedy: str = "", field: str | None = None) -> Self:
        """Return an error of a sample, with the shard and the key that it has if it is a dict."""
        own = sample if isinstance(sample, dict) else {}
        return cls(
            what, remedy=remedy, shard=own.get("__url__"), key=own.get("__key__"), field=field
        )


class DecodeError(SampleError):
    """A field whose bytes cannot be decoded."""


class SourceError(ShardStreamError):
    """A file or row that cannot be packed."""


class StateError(ShardStreamError):
    """A state that cannot be continued exactly here."""


class SkipBudgetError(ShardStreamError):
    """More bad samples than the caller's budget allows."""


class WorkerError(ShardStreamError, RuntimeError):
    """A loader worker, or a process that runs tasks, that died."""


class NoIndexWarning(UserWarning):
    """Shards without an index are read, which is slower and less exact."""


class ClassesWarning(UserWarning):
    """Datasets that are read together number their classes differently."""


class CacheWarning(UserWarning):
    """The cache stores nothing: the disk is full or not writable, or the remote file has no version."""


class ReportWarning(UserWarning):
    """The report of bad samples cannot be written; training continues."""


class ShardWarning(UserWarning):
    """A tar with unread links or a missing end: samples may be incomplete or missing."""


class ImageWarning(UserWarning):
    """An image is decoded only in part, such as one frame of an animation."""
