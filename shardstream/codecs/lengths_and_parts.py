"""Lengths and sizes of values and files, and parts of long ones; of files only headers and the bytes of the parts are read, where that can be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeGuard

import numpy as np
import PIL.Image

from shardstream.codecs.arrays import NpyLayout, read_npy_layout
from shardstream.codecs.audio import Audio, AudioDecoder, audio_decoders, sound_header
from shardstream.codecs.installed import import_extra
from shardstream.codecs.video import VIDEO_EXTENSIONS, Video
from shardstream.codecs.video_readers import RangedFile, open_reader, read_video_length
from shardstream.errors import ShardStreamError, describe_error
from shardstream.format import IMAGE_FORMATS, JSON_FIELDS, PILLOW_FORMATS, TEXT_FIELDS

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


Number = int | float
_Property = Callable[[RangedFile], Number]


def _of_picture(name: str) -> _Property:
    def read(file: RangedFile) -> Number:
        with PIL.Image.open(file.open(), formats=PILLOW_FORMATS) as image:
            return int(getattr(image, name))

    return read


def _of(read: Callable[[RangedFile], Any], name: str) -> _Property:
    take = attrgetter(name)
    return lambda file: take(read(file))


_TEXT: dict[str, _Property] = {"len": lambda file: len(file.read().decode())}
_PICTURE = {name: _of_picture(name) for name in ("height", "width")}
_SOUND = {name: _of(sound_header, name) for name in ("frames", "seconds", "rate", "channels")}
_VIDEO = {name: _of(read_video_length, name) for name in ("frames", "seconds")}
_VIDEO |= {
    name: _of(lambda file: open_reader(file, None).metadata, name) for name in ("height", "width")
}
_PROPERTIES: dict[str, dict[str, _Property]] = {
    "npy": {"len": array_length},
    **dict.fromkeys(TEXT_FIELDS, _TEXT),
    **dict.fromkeys(IMAGE_FORMATS, _PICTURE),
    **dict.fromkeys(audio_decoders(AudioDecoder()), _SOUND),
    **dict.fromkeys(VIDEO_EXTENSIONS, _VIDEO),
}
"""Last part of a field's name -> properties of the file."""


@cache
def properties_of(field: str) -> Mapping[str, Callable[[RangedFile], Number]]:
    """Return the properties of a field's files, by name; none of JSON, whose names are those of its values.

    ``bytes`` is the size of the file. ``len`` of ``npy`` is the first dimension of the array, of text the number of characters (Unicode code points). Pictures have ``height`` and ``width``, in pixels
    as they are stored, without the EXIF orientation. Videos have these, ``frames`` and ``seconds``. Sounds have ``frames``, the samples of
    each channel, ``seconds``, ``rate`` in Hz and ``channels``.

    >>> [*properties_of("left.jpg")], [*properties_of("tokens.npy")], [*properties_of("json")]
    (['bytes', 'height', 'width'], ['bytes', 'len'], [])
    """
    kind = field.rpartition(".")[2].lower()
    return {} if kind in JSON_FIELDS else {"bytes": len, **_PROPERTIES.get(kind, {})}


def read_property(field: str, name: str, file: RangedFile) -> Number:
    """Return a property of a file, one of `properties_of` its field.

    Raises:
        OptionError: If a library that reads it is not installed.
        StorageError: If its bytes cannot be read.
        ValueError: If the file is damaged, or has no such property.
    """
    file.failure = None
    try:
        value = properties_of(field)[name](file)
    except (ShardStreamError, MemoryError):
        raise
    except Exception as error:
        if file.failure is not None:
            raise file.failure from error
        if isinstance(error, ValueError):
            raise
        raise ValueError(describe_error(error)) from error
    if file.failure is not None:  # which a library has hidden
        raise file.failure
    return value
