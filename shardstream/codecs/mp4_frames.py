"""Times of all frames of an MP4 or QuickTime file, from its tables, so that the frames themselves need not be read.

Format: ISO 14496-12; boxes ``moov/trak/mdia/minf/stbl`` with ``stts`` (durations), ``ctts`` (reordering), ``stss`` (key frames) and
``stsz`` (number), ``edts/elst`` (start on the time line).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

_TABLES_LIMIT_BYTES = 256 << 20
"""Of the box with all tables; that of ten hours has 20 MB."""
_FRAMES_LIMIT = 1 << 22
"""38 hours of 30 frames a second; a frame takes 400 bytes as torchcodec takes the table."""


class Sliceable(Protocol):
    """Bytes, or a file that is read by slices."""

    def __len__(self) -> int:
        """Return the length in bytes."""

    def __getitem__(self, part: slice, /) -> bytes: ...


class FrameTable(NamedTuple):
    """Frames of a video stream, in the order of their times: arrays of shape (n,)."""

    times: npt.NDArray[np.int64]
    durations: npt.NDArray[np.int64]
    is_key: npt.NDArray[np.bool_]
    timescale: int
    """Units of time in a second."""

    @property
    def duration_s(self) -> float:
        """Time from the first frame to the end of the last, in seconds."""
        return int(self.times[-1] + self.durations[-1] - self.times[0]) / self.timescale

    @property
    def fps(self) -> float:
        """Mean number of frames a second; 0 if they take no time."""
        return len(self.times) / self.duration_s if self.duration_s else 0.0


def read_frame_table(data: Sliceable) -> FrameTable | None:
    """Return the frames of the only video stream of a file.

    Returns:
        The table; None for other formats and for files whose times are not a matter of these tables: fragments, several video streams, edits
        that cut.
    """
    moov = _top_level_box(data, b"moov")
    if moov is None:
        return None
    boxes = dict(_boxes(moov))
    if b"mvex" in boxes:  # fragments follow
        return None
    videos = [track for name, track in _boxes(moov) if name == b"trak" and _is_video(track)]
    if len(videos) != 1 or b"mvhd" not in boxes:
        return None
    return _track_table(videos[0], movie_timescale=_timescale(boxes[b"mvhd"]))


def check_frame_counts(data: Sliceable) -> None:
    """Check that a file can hold the frames that its tables name: FFmpeg loops over 2^26 frames that are not there.

    Raises:
        ValueError: If it cannot.
    """
    for name, track in _boxes(_top_level_box(data, b"moov") or b""):
        sizes = _find(track, b"mdia", b"minf", b"stbl", b"stsz") if name == b"trak" else None
        if sizes is not None:
            _check_sizes(sizes, int.from_bytes(sizes[8:12], "big"), len(data))


def _track_table(track: bytes, *, movie_timescale: int) -> FrameTable | None:
    header, stbl = _find(track, b"mdia", b"mdhd"), _find(track, b"mdia", b"minf", b"stbl")
    tables = dict(_boxes(stbl or b""))
    if header is None or not {b"stts", b"stsz"} <= tables.keys():
        return None
    count = int.from_bytes(tables[b"stsz"][8:12], "big")
    if not 0 < count <= _FRAMES_LIMIT or _has_empty(tables[b"stsz"]):
        return None
    durations = _runs(tables[b"stts"], count, signed=False)
    if durations is None:
        return None
    times = np.cumsum(durations) - durations
    if b"ctts" in tables:
        shifts = _runs(tables[b"ctts"], count, signed=True)
        if shifts is None:
            return None
        times += shifts
    is_key = np.ones(count, dtype=np.bool_)
    if b"stss" in tables:
        numbers = np.frombuffer(tables[b"stss"][8:], ">u4").astype(np.int64) - 1
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
            return None
        is_key[:] = False
        is_key[numbers] = True
    order = np.argsort(times, kind="stable")
    times, durations, is_key = times[order], durations[order], is_key[order]
    timescale = _timescale(header)
    if not timescale or len(np.unique(times)) != count:
        return None
    table = FrameTable(times, durations, is_key, timescale)
    start = _edit_start(track, int(times[0]), table.duration_s, movie_timescale)
    return None if start is None else table._replace(times=times - start)


def _check_sizes(sizes: bytes, count: int, file_bytes: int) -> None:
    """Check that the file can hold its frames, before there are arrays of so many numbers.

    Raises:
        ValueError: If the size of each, or all bytes of frames of one size, do not fit.
    """
    uniform = int.from_bytes(sizes[4:8], "big")
    if (count * uniform > file_bytes) if uniform else (12 + 4 * count > len(sizes)):
        raise ValueError(f"its table names {count} frames, which {file_bytes} bytes cannot hold")


def _has_empty(sizes: bytes) -> bool:
    """Return whether a sample has no bytes: decoders count no frame for it."""
    uniform, count = sizes[4:8], int.from_bytes(sizes[8:12], "big")
    if any(uniform):
        return False
    found = np.frombuffer(sizes[12 : 12 + 4 * count], ">u4", len(sizes[12 : 12 + 4 * count]) // 4)
    return len(found) != count or not found.all()


def _edit_start(track: bytes, first: int, length_s: float, movie_timescale: int) -> int | None:
    """Return the time that the edit list moves to 0; None if it does more than that."""
    edits = _find(track, b"edts", b"elst")
    if edits is None:
        return 0
    is_long = edits[0] == 1
    if int.from_bytes(edits[4:8], "big") != 1 or not movie_timescale:
        return None
    size = 8 if is_long else 4
    duration = int.from_bytes(edits[8 : 8 + size], "big")
    start = int.from_bytes(edits[8 + size : 8 + 2 * size], "big", signed=True)
    is_whole = (duration + 1) / movie_timescale >= length_s  # it is rounded to the movie's unit
    rate = edits[8 + 2 * size : 12 + 2 * size]
    return start if start == first and is_whole and rate == b"\0\1\0\0" else None


def _top_level_box(data: Sliceable, wanted: bytes) -> bytes | None:
    """Return the content of a box; the boxes before it are not read."""
    start = 0
    while start + 8 <= len(data):
        head = data[start : start + 16]
        size, begin = int.from_bytes(head[:4], "big"), 8
        if size == 1:
            size, begin = int.from_bytes(head[8:16], "big"), 16
        if size < begin:  # 0: to the end of the file
            size = len(data) - start
        if not head[4:8].isalnum():
            return None
        if head[4:8] == wanted:
            return data[start + begin : start + size] if size <= _TABLES_LIMIT_BYTES else None
        start += size
    return None


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield type and content of the boxes in a box."""
    start = 0
    while start + 8 <= len(data):
        size = int.from_bytes(data[start : start + 4], "big")
        if size < 8:
            return
        yield data[start + 4 : start + 8], data[start + 8 : start + size]
        start += size


def _find(data: bytes, *path: bytes) -> bytes | None:
    found: bytes | None = data
    for name in path:
        found = next((content for kind, content in _boxes(found or b"") if kind == name), None)
    return found


def _is_video(track: bytes) -> bool:
    handler = _find(track, b"mdia", b"hdlr")
    return handler is not None and handler[8:12] == b"vide"


def _timescale(header: bytes) -> int:
    """Return the units in a second, of a box ``mvhd`` or ``mdhd``."""
    start = 20 if header[:1] == b"\1" else 12
    return int.from_bytes(header[start : start + 4], "big")


def _runs(table: bytes, frames: int, *, signed: bool) -> npt.NDArray[Any] | None:
    """Return the values of a table of counts and values, one for each frame; None if the counts are wrong."""
    count = int.from_bytes(table[4:8], "big")
    pairs = np.frombuffer(table[8 : 8 + 8 * count], ">i4" if signed else ">u4")
    pairs = pairs[: len(pairs) // 2 * 2].reshape(-1, 2).astype(np.int64)
    if pairs[:, 0].min(initial=0) < 0 or pairs[:, 0].sum() != frames:
        return None
    return np.repeat(pairs[:, 1], pairs[:, 0])
