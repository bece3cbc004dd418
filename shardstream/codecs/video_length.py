"""Find video files that are cut short, by the lengths that their containers declare.

FFmpeg reads the packets that are there and reports success. Formats: ISO 14496-12 (boxes of mp4 and mov), RFC 8794 and RFC 9559 (elements of
Matroska and WebM), RIFF (AVI). MPEG streams and Ogg declare no length.
"""

from __future__ import annotations

from shardstream.codecs.mp4_frames import Sliceable

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_BOXES = (
    *(b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"),
    *(b"moof", b"mfra", b"sidx", b"styp", b"uuid"),
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
