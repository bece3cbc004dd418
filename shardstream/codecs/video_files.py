"""Tell the container of a video by its first bytes, find files that are cut short, and read the times of the frames of an MP4 file.

FFmpeg takes any bytes for any of its 300 formats, some of which are texts that name other files and hosts (DASH, HLS, ffconcat, SDP): only the
containers of this list reach it. It also reads the packets that are there and reports success for half a file. Formats: ISO 14496-12 (boxes of mp4
and mov), RFC 8794 and RFC 9559 (elements of Matroska and WebM), RIFF (AVI), Adobe's FLV 10.1, Microsoft's ASF 1.2. MPEG streams and Ogg declare no length.

The times are in the boxes ``moov/trak/mdia/minf/stbl`` of MP4 and QuickTime, ``stts`` (durations), ``ctts`` (reordering), ``stss`` (key frames) and ``stsz``
(number), and ``edts/elst`` (start on the time line), so that the frames themselves need not be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_BOXES = (
    *(b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"),
    *(b"moof", b"mfra", b"sidx", b"styp", b"uuid"),
)
_ADTS = rb"\xff[\xf0\xf1\xf8\xf9]"
_ADTS_HEADER_BYTES = 7
_MAGIC = {
    rb"RIFF....AVI ": "avi",
    rb"RIFF....WAVE": "wav",
    rb"OggS\0": "ogg",
    rb"FLV\x01": "flv",
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c": "asf",  # its GUID; wmv
    rb"DKIF\0\0": "ivf",
    rb"YUV4MPEG2 ": "yuv4mpegpipe",
    rb"\xff\xd8\xff": "mjpeg",
    _ADTS: "aac",  # the sync word of ADTS with layer 0, which MP3 does not have
    rb"(\x47.{187}){2}\x47|(.{4}\x47.{187}){2}.{4}\x47": "mpegts",  # m2ts has 4 bytes more
    # Start codes: pack and sequence of MPEG-1 and 2, sequence of MPEG-4, delimiter, SEI and SPS of H.264, VPS, SPS and delimiter of H.265.
    rb"\0\0\x01\xba": "mpeg",
    rb"\0\0\x01\xb3": "mpegvideo",
    rb"\0\0\x01\xb0": "m4v",
    rb"\0?\0\0\x01[\x09\x06\x27\x47\x67]": "h264",
    rb"\0?\0\0\x01[\x40\x42\x46]\x01": "hevc",
}
"""Patterns of the first bytes of a file, and FFmpeg's name of the container."""
_HEAD_BYTES = 1024
_FLV, _FLV_TAGS = b"FLV", (8, 9, 18)  # sound, video, metadata
_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_ASF_HEAD_BYTES = 24
# parts that a file has once
_ONCE = frozenset([b"ftyp", b"moov", b"AVI ", _EBML, _FLV, _ASF_HEADER])
_DOCUMENT_TYPES = (b"matroska", b"webm")
_LATER_EBML = rb"\x1a\x45\xdf\xa3.{,60}\x42\x82.(matroska|webm)"


_TABLES_LIMIT_BYTES = 256 << 20
"""Of the box with all tables; that of ten hours has 20 MB."""
_FRAMES_LIMIT = 1 << 22
"""38 hours of 30 frames a second; a frame takes 400 bytes as torchcodec takes the table."""


class Sliceable(Protocol):
    """Bytes, or a file that is read by slices."""

    def __len__(self) -> int:
        """Return the length in bytes."""

    def __getitem__(self, part: slice, /) -> bytes: ...


class _Part(NamedTuple):
    """A part of the top level of a file."""

    kind: bytes
    start: int
    end: int


def container_of(data: Sliceable) -> str:
    """Return FFmpeg's name of the container of a video file, by its first bytes.

    A text cannot have these bytes, or FFmpeg is sure of the container when it sees them: it does not choose another one for what follows.

    Raises:
        ValueError: If it is none of the list.
    """
    head = data[:_HEAD_BYTES]
    if head[:4] == _EBML:
        size, length = _element_size(head, len(_EBML))
        if any(name in head[4 + length : 4 + length + size] for name in _DOCUMENT_TYPES):
            return "matroska"
    if head[4:8] in _BOXES and (head[0] == 0 or head[4:8] == b"mdat"):
        return "mov"
    for pattern, name in _MAGIC.items():
        if re.match(pattern, head, re.DOTALL):
            return name
    raise ValueError(
        f"the file begins with {head[:16]!r}, as no video of this list: mp4, mov, mkv, webm, {', '.join(_MAGIC.values())}; "
        "other formats, such as playlists, could make FFmpeg read other files and hosts"
    )


def check_whole(data: Sliceable) -> None:
    """Check that the parts of a container are there, and that no second file follows.

    Of joined files FFmpeg reads the first only (MP4, QuickTime, FLV, ASF), or all with the parameters of the first (Matroska, AVI).

    Raises:
        ValueError: If a part is longer than the rest of the file, or one comes again that a file has once.
    """
    seen, end = set[bytes](), 0
    for kind, start, part_end in _parts(data):
        if kind in seen:
            raise ValueError(
                f"a second file begins at byte {start} of {len(data)}, which would be left out or misread; "
                "split the file, or join its parts with FFmpeg"
            )
        seen.update({kind} & _ONCE)
        end = part_end
    if end > len(data):
        raise ValueError(f"the file is cut short: {len(data)} of {end} bytes are there")


def _parts(data: Sliceable) -> Iterator[_Part]:
    """Return the parts of the top level of a file; none for other formats."""
    if data[:4] == _EBML:
        return _segments(data)
    if data[:4] == b"RIFF":
        return _riffs(data)
    if data[:3] == _FLV:
        return _tags(data)
    if re.match(_ADTS, data[:2]):
        return _adts_frames(data)
    return _objects(data) if data[:16] == _ASF_HEADER else _boxes(data)


def _riffs(data: Sliceable) -> Iterator[_Part]:
    """Yield the RIFFs of an AVI file: the first, and those of type "AVIX" that continue it."""
    start = 0
    while data[start : start + 4] == b"RIFF":
        end = start + 8 + int.from_bytes(data[start + 4 : start + 8], "little")
        yield _Part(data[start + 8 : start + 12], start, end)
        start = end + end % 2


def _boxes(data: Sliceable) -> Iterator[_Part]:
    """Yield the boxes of the top level."""
    start = 0
    while (kind := (head := data[start : start + 16])[4:8]).isalnum():
        size = int.from_bytes(head[:4], "big")
        if size == 1:  # then 64 bits follow
            size = int.from_bytes(head[8:], "big")
        end = start + size if size else len(data)  # 0: to the end of the file
        if 0 < size < 8 or (end > len(data) and kind not in _BOXES):
            break
        yield _Part(kind, start, end)
        start = end


def _objects(data: Sliceable) -> Iterator[_Part]:
    """Yield the objects of an ASF file; what follows them need not be one."""
    start = 0
    while (size := int.from_bytes(data[start + 16 : start + 24], "little")) >= _ASF_HEAD_BYTES:
        kind, end = data[start : start + 16], start + size
        if end > len(data) and kind not in (_ASF_HEADER, _ASF_DATA):
            break
        yield _Part(kind, start, end)
        start = end


def _tags(data: Sliceable) -> Iterator[_Part]:
    """Yield the header and the tags of an FLV file, without the length that is repeated after each."""
    start, head = 0, data[:11]
    while len(head) == 11 and (head[:3] == _FLV or head[0] & 0x1F in _FLV_TAGS):
        kind = _FLV if head[:3] == _FLV else b"tag"
        size = int.from_bytes(head[5:9] if kind == _FLV else head[1:4], "big")
        end = start + size + (0 if kind == _FLV else len(head))
        yield _Part(kind, start, end)
        start = end + 4
        head = data[start : start + 11]


def _adts_frames(data: Sliceable) -> Iterator[_Part]:
    """Yield the frames of an ADTS stream (ISO 13818-7, 6.2): FFmpeg drops some of the last ones that are cut, without an error."""
    start = 0
    while (head := data[start : start + 6])[:1] == b"\xff":
        size = _ADTS_HEADER_BYTES  # of a header that is cut
        if len(head) == 6:
            size = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
            if size < _ADTS_HEADER_BYTES or not re.match(_ADTS, head):  # a tag, or damaged
                return
        yield _Part(b"adts", start, start + size)
        start += size


def _segments(data: Sliceable) -> Iterator[_Part]:
    """Yield the headers and the segments of a Matroska file; one of unknown length, of a live recording, is the last."""
    start = 0
    while (kind := data[start : start + 4]) in (_EBML, _SEGMENT):
        size, length = _element_size(data, start + 4)
        if kind == _SEGMENT and size == (1 << 7 * length) - 1:
            yield from _headers_after(start, data)
            return
        end = start + 4 + length + size
        yield _Part(kind, start, end)
        start = end


def _headers_after(start: int, data: Sliceable) -> Iterator[_Part]:
    """Yield the headers that follow somewhere in a segment of unknown length."""
    for found in re.finditer(_LATER_EBML, data[start:], re.DOTALL):
        yield _Part(_EBML, start + found.start(), start + found.end())


def _element_size(data: Sliceable, start: int) -> tuple[int, int]:
    """Return the size of an element and the length of that number, which has one zero bit less in front."""
    length = 9 - int.from_bytes(data[start : start + 1], "big").bit_length()
    number = int.from_bytes(data[start : start + length], "big")
    return number & (1 << 7 * length) - 1, length


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
    boxes = dict(_boxes_in(moov))
    if b"mvex" in boxes:  # fragments follow
        return None
    videos = [track for name, track in _boxes_in(moov) if name == b"trak" and _is_video(track)]
    if len(videos) != 1 or b"mvhd" not in boxes:
        return None
    return _track_table(videos[0], movie_timescale=_timescale(boxes[b"mvhd"]))


def check_frame_counts(data: Sliceable) -> None:
    """Check that a file can hold the frames that its tables name: FFmpeg loops over 2^26 frames that are not there.

    Raises:
        ValueError: If it cannot.
    """
    for name, track in _boxes_in(_top_level_box(data, b"moov") or b""):
        sizes = _find(track, b"mdia", b"minf", b"stbl", b"stsz") if name == b"trak" else None
        if sizes is not None:
            _check_sizes(sizes, int.from_bytes(sizes[8:12], "big"), len(data))


def _track_table(track: bytes, *, movie_timescale: int) -> FrameTable | None:
    header, stbl = _find(track, b"mdia", b"mdhd"), _find(track, b"mdia", b"minf", b"stbl")
    tables = dict(_boxes_in(stbl or b""))
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
    for kind, start, end in _boxes(data):
        if kind == wanted:
            begin = start + (16 if data[start : start + 4] == b"\0\0\0\1" else 8)
            return data[begin:end] if end - start <= _TABLES_LIMIT_BYTES else None
    return None


def _boxes_in(data: bytes) -> Iterator[tuple[bytes, bytes]]:
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
        found = next((content for kind, content in _boxes_in(found or b"") if kind == name), None)
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
