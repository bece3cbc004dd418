"""Stages that open shards, with or without a cache on the local disk, and names of files in a cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from webdataset.cache import LRUCleanup, islocal, pipe_cleaner, url_to_cache_name

from shardstream.errors import OptionError
from shardstream.webdataset.handlers import Handler, reraise_exception
from shardstream.webdataset.tariterators import url_opener

Streams = Iterator[dict[str, Any]]


def local_path(url: str) -> str | None:
    """Return the path of a file of this machine; None for any other URL."""
    return url2pathname(urlparse(url).path) if islocal(url) else None


class StreamingOpen:
    """Open shards; yield dicts with ``url``, ``stream`` and, for local files, ``local_path``.

    Args:
        verbose: Ignored.
        handler: Decides about shards that cannot be opened.
        options: Options of `gopen`, such as ``storage_options``.
    """

    def __init__(
        self,
        verbose: bool = False,
        handler: Handler = reraise_exception,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.verbose = verbose
        self.handler = handler
        self.options = options or {}

    def __call__(self, urls: Iterable[Any]) -> Streams:
        """Open shards, given as URLs or dicts with ``url``."""
        sources = ({"url": one["url"] if isinstance(one, dict) else one} for one in urls)
        for source in url_opener(sources, handler=self.handler, **self.options):
            if (path := local_path(source["url"])) is not None:
                source["local_path"] = path
            yield source


class FileCache(StreamingOpen):
    """Open shards through shardstream's cache: chunks of remote files are kept on the local disk, checked and limited.

    Whole files are not kept, so samples of remote shards have no ``__local_path__``.

    Args:
        cache_dir: Folder of the cache.
        url_to_name: Must be left out, because the cache names its files itself.
        verbose: Ignored.
        validator: Ignored: bytes are checked when they are read.
        handler: Decides about shards that cannot be opened.
        cache_size: Limit in bytes; without one a tenth of the disk stays free.
        cache_cleanup_interval: Ignored: the limit holds at all times.
        options: Further options of `gopen`.

    Raises:
        OptionError: If ``url_to_name`` is given, or the folder is missing.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[..., str] = url_to_cache_name,
        verbose: bool = False,
        validator: Any = None,  # noqa: ARG002
        handler: Handler = reraise_exception,
        cache_size: int = -1,
        cache_cleanup_interval: int = 30,  # noqa: ARG002
        options: dict[str, Any] | None = None,
    ) -> None:
        check_url_to_name(url_to_name)
        folder = os.path.expanduser("./_cache" if cache_dir is None else cache_dir)
        limit = {"cache_bytes": int(cache_size)} if cache_size > 0 else {}
        super().__init__(verbose, handler, {**(options or {}), "cache_dir": folder, **limit})


def check_url_to_name(url_to_name: Callable[..., str]) -> None:
    """Refuse a function of the caller.

    Raises:
        OptionError: If it is one.
    """
    if url_to_name not in (url_to_cache_name, pipe_cleaner):
        raise OptionError(
            "url_to_name is not used: the cache keeps chunks of files under names of its own; leave it out"
        )
