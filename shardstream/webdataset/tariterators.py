"""Shard URLs -> streams -> files -> samples, each as one iterator that can be replaced.

Headers are parsed by shardstream: a shard that is damaged, cut, or two tars in one is an error, never a short epoch.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

from shardstream.errors import OptionError, SampleError, ShardError, redact
from shardstream.format import ForwardReader, Member, TarDiagnostics, iter_whole, open_by_content
from shardstream.webdataset.filters import pipelinefilter
from shardstream.webdataset.gopen import gopen
from shardstream.webdataset.handlers import Handler, goes_on, reraise_exception

_READ_BYTES = 4 << 20
_BASE_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
meta_prefix = meta_suffix = "__"

Files = Iterator[dict[str, Any]]
"""Dicts with ``fname``, ``data`` and ``__url__``; a `ShardEnd` after each shard."""


class TarError(ShardError, tarfile.ReadError):
    """A shard that is damaged or cut; also a ``tarfile.ReadError``, as WebDataset raises."""


class DuplicateFieldError(SampleError, ValueError):
    """A sample with a field twice; also a ``ValueError``, as WebDataset raises."""


class ShardEnd(dict[str, Any]):
    """The empty dict after the files of a shard; read as a file, it has an empty name, which belongs to no sample.

    Args:
        is_cut: Whether the shard ended by an error, so that its last sample may lack files.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__()
        self.is_cut = is_cut

    def __missing__(self, name: str) -> Any:
        # open_clip's group_by_keys_nothrow reads these of each item, and was written before there were ends.
        if name not in ("fname", "data", "__url__"):
            raise KeyError(name)
        return b"" if name == "data" else ""


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """Split a path at the first dot of its last part; two None without one.

    >>> base_plus_ext("a.b/c.seg.png"), base_plus_ext("README")
    (('a.b/c', 'seg.png'), (None, None))
    """
    match = _BASE_AND_EXTENSION.match(path)
    return (match[1], match[2]) if match else (None, None)


def valid_sample(sample: Any) -> bool:
    """Return whether this is a sample with any entry, and not marked ``__bad__``."""
    return isinstance(sample, dict) and bool(sample) and not sample.get("__bad__", False)


def url_opener(
    data: Iterable[Any], handler: Handler = reraise_exception, **kw: Any
) -> Iterator[dict[str, Any]]:
    """Open the ``url`` of each dict and add it as ``stream``; ``kw`` as in `gopen`."""
    for source in data:
        if not isinstance(source, dict) or "url" not in source:
            raise OptionError(
                f"a shard must be a dict with 'url', not {source!r}; begin with SimpleShardList"
            )
        try:
            source["stream"] = gopen(source["url"], **kw)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if goes_on(error, handler):
                continue
            break
        yield source


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = r"__[^/]*__($|/)",
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    url: str = "",
) -> Files:
    """Yield name and bytes of each file of a tar, plain or compressed with gzip or zstd.

    Args:
        fileobj: The tar, as a binary stream from its current position.
        skip_meta: Pattern of names that are skipped.
        handler: Decides about exceptions in one file.
        select_files: Keeps the files whose name, after renaming, it accepts.
        rename_files: Changes names.
        url: URL of the tar, for messages.

    Raises:
        TarError: If the tar is damaged or cut.
    """
    with open_by_content(fileobj, shard=url) as (stream, size):
        read = ForwardReader(stream, chunk_bytes=_READ_BYTES)
        for member in _members(read, size, url):
            stored_name = member[0]
            try:
                name = stored_name if rename_files is None else rename_files(stored_name)
                if _is_skipped(stored_name, skip_meta) or (select_files and not select_files(name)):
                    continue
            except Exception as error:  # noqa: BLE001  (the handler decides)
                if goes_on(error, handler):
                    continue
                _note_cut(handler)
                return
            try:
                data = _read_body(read, member, url)
            except Exception as error:  # noqa: BLE001
                goes_on(error, handler)  # may raise
                _note_cut(handler)
                return  # nothing after it can be read
            yield {"fname": name, "data": data}


def _read_body(read: ForwardReader, member: Member, url: str) -> bytes:
    name, header, body, size = member
    data = read(body, size)
    if len(data) < size:
        raise TarError(
            f"the tar is cut: {len(data)} of {size} bytes of {name}",
            remedy="fetch or write the shard again",
            shard=url,
            offset=header,
        )
    return data


def _members(read: ForwardReader, size: int | None, url: str) -> Iterator[Member]:
    """Yield the files of a tar, and check its end; an archive that ends at once has none."""
    diagnostics = TarDiagnostics()
    try:
        yield from iter_whole(read, end=size, shard=url, diagnostics=diagnostics)
    except ShardError as error:
        if isinstance(error, TarError):
            raise
        raise TarError(
            error.what, remedy=error.remedy, shard=error.shard, offset=error.offset
        ) from error
    diagnostics.warn(url)


def _is_skipped(name: str, skip_meta: str | None) -> bool:
    is_meta = "/" not in name and name.startswith(meta_prefix) and name.endswith(meta_suffix)
    return is_meta or (skip_meta is not None and re.match(skip_meta, name) is not None)


def tar_file_expander(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = {},  # noqa: B006  (compared, never changed)
) -> Files:
    """Yield the files of each opened tar, and ``eof_value`` after it, also after an error; closes the streams."""
    for source in data:
        noted = _NotingHandler(handler)
        url, local_path = source["url"], source.get("local_path")
        try:
            for file in tar_file_iterator(
                source["stream"],
                handler=noted,
                select_files=select_files,
                rename_files=rename_files,
                url=url,
            ):
                file["__url__"] = url
                if local_path is not None:
                    file["__local_path__"] = local_path
                yield file
        except Exception as error:  # noqa: BLE001  (the handler decides)
            error.add_note(f"in {redact(str(url))}")
            if not goes_on(error, noted):
                return
            _note_cut(noted)
        finally:
            with suppress(AttributeError):  # a stream of the caller may have no close()
                source["stream"].close()
        # Without a mark, the last sample of a shard and the first of the next would join if their keys are equal.
        if eof_value is not None:
            yield ShardEnd(is_cut=noted.has_cut) if eof_value == {} else eof_value


class _NotingHandler:
    """A handler with a note whether the shard was read to its end."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.has_cut = False

    def __call__(self, error: Exception) -> Any:
        return self._handler(error)


def _note_cut(handler: Handler) -> None:
    if isinstance(handler, _NotingHandler):
        handler.has_cut = True


def group_by_keys(
    data: Files,
    keys: Callable[[str], tuple[str | None, str | None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler = reraise_exception,
) -> Iterator[dict[str, Any]]:
    """Group successive files of one key to samples; the last sample of a shard that was cut is left out.

    Args:
        data: Files, as `tar_file_expander` yields them.
        keys: Splits a name into key and field; files without a key are skipped.
        lcase: Lower the case of fields.
        suffixes: Fields to keep; None keeps all.
        handler: Decides about files that make a field appear twice.

    Raises:
        DuplicateFieldError: If a sample has a field twice.
    """
    sample: dict[str, Any] = {}
    for file in data:
        try:
            if file == {}:
                if valid_sample(sample) and not getattr(file, "is_cut", False):
                    yield sample
                sample = {}
                continue
            key, field = keys(file["fname"])
            if key is None or field is None:
                continue
            if key != sample.get("__key__"):
                if valid_sample(sample):
                    yield sample
                sample = {"__key__": key, "__url__": file["__url__"]}
            _add(sample, field.lower() if lcase else field, file, suffixes)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if not goes_on(error, handler):
                break
    if valid_sample(sample):
        yield sample


def _add(
    sample: dict[str, Any], field: str, file: dict[str, Any], suffixes: Collection[str] | None
) -> None:
    if field in sample:
        raise DuplicateFieldError(
            "duplicate file name in tar file: a sample has a field twice",
            remedy="write the shard again, or pass handler=",
            shard=file["__url__"],
            key=sample["__key__"],
            field=field,
        )
    if suffixes is None or field in suffixes:
        sample[field] = file["data"]
    if "__local_path__" in file:
        sample["__local_path__"] = file["__local_path__"]


def tarfile_samples(
    src: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    **kw: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of shards; ``kw`` as in `gopen`, such as ``storage_options``."""
    streams = url_opener(src, handler=handler, **kw)
    files = tar_file_expander(
        streams, handler=handler, select_files=select_files, rename_files=rename_files
    )
    return group_by_keys(files, handler=handler)


tarfile_to_samples = pipelinefilter(tarfile_samples)
