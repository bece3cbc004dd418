"""Parts of long values: rows of an array, frames of a video, samples of a sound; of a lazy field only their bytes are read."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import numpy as np

from shardstream.codecs.arrays import NpyLayout, read_npy_layout
from shardstream.codecs.audio import Audio
from shardstream.codecs.optional import import_extra
from shardstream.codecs.video import Video
from shardstream.codecs.video_readers import RangedFile

_BLOCK_BYTES = 1 << 14  # a part may be much smaller than what other readers fetch at once
_WHAT = "an array, a tensor, a list, a decoded sound or video, or a lazy field of a .npy, wav or flac file"


def length_of(value: Any) -> int:
    """Return the number of elements of a value, of which `part_of` returns some.

    Raises:
        TypeError: If it has none.
        ValueError: If a file is damaged.
    """
    if isinstance(value, Audio):
        return int(value.samples.shape[-1])
    if _is_file(value):
        layout = _npy_layout(value)
        if layout is not None:
            return _num_rows(*layout, len(value))
        with _sound_file(value) as file:
            return int(file.frames)
    if (
        isinstance(value, bytes | str)
        or getattr(value, "shape", None) == ()
        or not hasattr(value, "__len__")
    ):
        raise TypeError(
            f"a {type(value).__name__} has no parts: {_WHAT} has; decode the field first"
        )
    return len(value)


def array_length(file: RangedFile) -> int:
    """Return the first dimension of the array in a ``.npy`` file, of which only the header is read.

    Raises:
        TypeError: If the array has no dimension.
        ValueError: If the file is damaged, cut short or of another format.
    """
    layout = _npy_layout(file)
    if layout is None:
        raise ValueError(f"the file begins with {file[:8]!r}, as no .npy file")
    return _num_rows(*layout, len(file))


def _num_rows(layout: NpyLayout, first: int, size_bytes: int) -> int:
    if layout.size * layout.dtype.itemsize > size_bytes - first:
        raise ValueError(
            f"the array is cut short: {layout.shape} of {layout.dtype} do not fit in {size_bytes - first} bytes"
        )
    return layout.shape[0]


def part_of(value: Any, start: int, stop: int) -> Any:
    """Return the elements of a value from ``start`` to before ``stop``, as a copy.

    Args:
        value: An array or tensor, shape (n, ...); a list; a `Video`; an `Audio`, shape (C, n); or a file whose parts can be read.
        start: First element.
        stop: Element after the last one.

    Returns:
        An array, shape (stop - start, ...); of a video its frames, shape (stop - start, H, W, 3), uint8; of a sound an `Audio`,
        shape (C, stop - start).

    Raises:
        TypeError: If the value has no parts.
        ValueError: If a file is damaged.
    """
    if isinstance(value, Audio):
        return value._replace(samples=_copy(value.samples[..., start:stop]))
    if isinstance(value, Video):
        return value.frames(range(start, stop))
    if _is_file(value):
        return _part_of_file(value, start, stop)
    length_of(value)
    return _copy(value[start:stop])


def _is_file(value: Any) -> TypeGuard[RangedFile]:
    # An isinstance of a protocol looks at each of its members, for each value.
    return hasattr(value, "block_bytes")


def _copy(part: Any) -> Any:
    """Return a part that shares no memory with the whole: steps may change it."""
    # A tensor's deep copy has the whole storage.
    return part.clone() if hasattr(part, "clone") else copy.deepcopy(part)


def _part_of_file(file: RangedFile, start: int, stop: int) -> Any:
    layout = _npy_layout(file)
    if layout is None:
        with _sound_file(file) as sound:
            sound.seek(start)
            samples = sound.read(stop - start, dtype="float32", always_2d=True)
            return Audio(np.ascontiguousarray(samples.T), sound.samplerate)
    (shape, dtype, order, _), first = layout
    if order == "F" and len(shape) > 1:
        raise ValueError(
            "the array is stored by columns, so its rows are not together; store it in C order, or decode it whole"
        )
    row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    data = file[first + start * row : first + stop * row]
    if len(data) != (stop - start) * row:
        raise ValueError(
            f"the array is cut short: rows {start} to {stop} of {shape[0]} are missing"
        )
    return np.frombuffer(bytearray(data), dtype).reshape(stop - start, *shape[1:])


def _npy_layout(file: RangedFile) -> tuple[NpyLayout, int] | None:
    """Return the layout of a .npy file and where its data begin; None for other files."""
    file.block_bytes = _BLOCK_BYTES
    head = file[:_BLOCK_BYTES]
    if not head.startswith(b"\x93NUMPY"):
        return None
    layout, first = read_npy_layout(head)
    if not layout.shape:
        raise TypeError(f"an array of one number has no parts: {_WHAT} has")
    return layout, first


def _sound_file(file: RangedFile) -> Any:
    soundfile = import_extra("soundfile", extra="audio", purpose="reading parts of sound")
    source = file.open()
    try:
        return soundfile.SoundFile(source)
    except soundfile.LibsndfileError as error:
        raise TypeError(
            f"this file has no parts that can be read: {_WHAT} has; decode the field first"
        ) from error
