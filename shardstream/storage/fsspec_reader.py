"""Any fsspec file system, by what all of them have."""

from __future__ import annotations

from typing import Any

from fsspec.asyn import sync

from shardstream.storage.response import RangeResponse

_SLOWEST_BYTES_PER_S = 100_000


class FilesystemReader:
    """Reads by ``cat_file``, which tells neither a file's length nor its version.

    Args:
        filesystem: Open in this process.
        read_timeout_s: Limit of the time for the first byte; where it can be had, 100 kB a second are asked for after that.
    """

    def __init__(self, filesystem: Any, read_timeout_s: float) -> None:
        self._filesystem = filesystem
        self._read_timeout_s = read_timeout_s

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Ask once for the bytes ``start`` to ``end``."""
        # start=0, end=None is a plain GET: a range on an empty object would be refused
        asked = {} if (start, end) == (0, None) else {"start": start, "end": end}
        filesystem = self._filesystem
        is_async = getattr(filesystem, "async_impl", False)
        if max_bytes is not None and not is_async:  # which cut a range at the file's end
            asked = {"start": start, "end": start + max_bytes}
        if end is not None and is_async:
            limit_s = self._read_timeout_s + (end - start) / _SLOWEST_BYTES_PER_S
            data = sync(filesystem.loop, filesystem._cat_file, path, timeout=limit_s, **asked)
        else:
            data = filesystem.cat_file(path, **asked)
        return RangeResponse(data=bytes(data))
