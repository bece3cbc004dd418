"""Tell the container of a video by its first bytes, and find files that are cut short.

FFmpeg takes any bytes for any of its 300 formats, some of which are texts that name other files and hosts (DASH, HLS, ffconcat, SDP): only the
containers of this list reach it. It also reads the packets that are there and reports success for half a file. Formats: ISO 14496-12 (boxes of mp4
and mov), RFC 8794 and RFC 9559 (elements of Matroska and WebM), RIFF (AVI). MPEG streams and Ogg declare no length.
"""

from __future__ import annotations

import re

from shardstream.codecs.mp4_frames import Sliceable

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_BOXES = (
    *(b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"),
    *(b"moof", b"mfra", b"sidx", b"styp", b"uuid"),
)
_MAGIC = {
    rb"RIFF....AVI ": "avi",
    rb"RIFF....WAVE": "wav",
    rb"OggS\0": "ogg",
    rb"FLV\x01": "flv",
    rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c": "asf",  # its GUID; wmv
    rb"DKIF\0\0": "ivf",
    rb"YUV4MPEG2 ": "yuv4mpegpipe",
    rb"\xff\xd8\xff": "mjpeg",
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
_DOCUMENT_TYPES = (b"matroska", b"webm")


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
    """Check that the parts of a container are there.

    Raises:
        ValueError: If a part is longer than the rest of the file.
    """
    if data[:4] == _EBML:
        end = _matroska_end(data)
    elif data[:4] == b"RIFF":
        end = 8 + int.from_bytes(data[4:8], "little")
    else:
        end = _boxes_end(data)
    if end > len(data):
        raise ValueError(f"the file is cut short: {len(data)} of {end} bytes are there")


def _boxes_end(data: Sliceable) -> int:
    """Return the end of the last box of the top level that begins in the file; 0 for other formats."""
    start = 0
    while data[start + 4 : start + 8] in _BOXES:
        size = int.from_bytes(data[start : start + 4], "big")
        if size == 1:  # then 64 bits follow
            size = int.from_bytes(data[start + 8 : start + 16], "big")
        if size < 8:  # 0: to the end of the file
            break
        start += size
    return start


def _matroska_end(data: Sliceable) -> int:
    """Return the end of the segment; 0 if its length is unknown, as in a live recording."""
    size, length = _element_size(data, len(_EBML))
    start = len(_EBML) + length + size
    if data[start : start + 4] != _SEGMENT:
        return start
    size, length = _element_size(data, start + len(_SEGMENT))
    is_unknown = size == (1 << 7 * length) - 1
    return 0 if is_unknown else start + len(_SEGMENT) + length + size


def _element_size(data: Sliceable, start: int) -> tuple[int, int]:
    """Return the size of an element and the length of that number, which has one zero bit less in front."""
    length = 9 - int.from_bytes(data[start : start + 1], "big").bit_length()
    number = int.from_bytes(data[start : start + length], "big")
    return number & (1 << 7 * length) - 1, length
