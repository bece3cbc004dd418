"""What can go wrong, as one tree of exceptions.

    ShardStreamError
    ├── OptionError         an argument that makes no sense (also a ValueError)
    ├── StorageError        a place that cannot be listed, read or written
    │   ├── NotFoundError    nothing is there (also a FileNotFoundError)
    │   ├── AccessDeniedError    no credentials, or wrong ones (also a PermissionError)
    │   ├── ChangedError    not the file that was indexed, or read before
    │   └── UnfinishedError a dataset that is being written, or whose writer was stopped
    ├── ShardError          a tar whose bytes are damaged or cut
    │   └── IndexMismatchError   a tar, its index and its manifest that do not fit each other
    ├── ManifestError       an index.json that is none of ours
    ├── SampleError         a sample that cannot be written, grouped or batched
    │   └── DecodeError     a field whose bytes cannot be decoded
    ├── SourceError         a file or row that cannot be packed
    ├── StateError          a state that cannot be continued exactly
    ├── SkipBudgetError  more bad samples than the caller allowed
    └── WorkerError         a worker process that died (also a RuntimeError, as torch raises)

Every message says what is wrong, where (shard, byte, key, field) and what to do. Loader workers rebuild an exception as
``type(message)``, so each class takes one positional message; the rest are optional keywords kept as attributes.
"""

from __future__ import annotations

import errno
import re

_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(?<=[^\s])\?[^\s'\"]*")


def redact(url: str) -> str:
    """Return ``url`` without what may be a secret: user info and the query string of a signed URL.

    >>> redact("https://user:pass@host/a.tar?X-Amz-Signature=1f3")
    'https://host/a.tar?…'
    """
    if "://" not in url:
        return url
    return _QUERY.sub("?…", _USERINFO.sub("", url))


def shown(text: str) -> str:
    r"""Escape what a terminal would obey rather than show, such as names in hostile tars; lines stay lines.

    >>> shown("a\x1b[31m\u202e\n")
    'a\\x1b[31m\\u202e\n'
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


def plural(count: int, noun: str) -> str:
    """Give a count with its noun.

    >>> plural(1, "shard"), plural(12345, "sample"), plural(2, "class"), plural(0, "batch")
    ('1 shard', '12,345 samples', '2 classes', '0 batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


class ShardStreamError(Exception):
    """Base of all errors that shardstream raises on purpose.

    Attributes: ``what`` is wrong, ``remedy`` (what to do; empty where ``what`` says it) and ``where`` (the place, in words), of which
    the message is made: ``what; remedy [where]``; and the arguments.

    Args:
        what: What is wrong.
        remedy: What to do about it.
        shard: URL of the shard, or of the file, that it happened in.
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
    """An argument that makes no sense."""


class StorageError(ShardStreamError):
    """A place that cannot be listed, read or written: missing, refused or out of reach."""


class NotFoundError(StorageError, FileNotFoundError):
    """Nothing is there. Trying again does not help."""

    errno = errno.ENOENT


class AccessDeniedError(StorageError, PermissionError):
    """No credentials, or wrong ones. Trying again does not help."""

    errno = errno.EACCES


class ChangedError(StorageError):
    """A file that is not what its manifest says, or not what it was before. Trying again does not help."""


class UnfinishedError(StorageError):
    """A dataset that is being written, or whose writer was stopped: shards may be missing."""


class ShardError(ShardStreamError):
    """A tar whose bytes are damaged, cut or not a tar at all."""


class IndexMismatchError(ShardError):
    """A tar, its index and its manifest that do not fit each other."""


class ManifestError(ShardStreamError):
    """An ``index.json`` that cannot be understood."""


class SampleError(ShardStreamError):
    """A sample that cannot be written, grouped or batched."""


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
    """Nothing is kept on the local disk: it is full, cannot be written, or what is read has no version."""


class ReportWarning(UserWarning):
    """The list of bad samples cannot be written; training goes on."""


class ShardWarning(UserWarning):
    """A tar is read, but links in it are not, or its end is missing: samples may be incomplete or missing."""


class ImageWarning(UserWarning):
    """An image is decoded in a way that leaves something out."""
