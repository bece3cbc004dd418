"""Lengths and sizes of the files in fields, from their headers where these tell, so that few bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import PIL.Image

from shardstream.codecs.audio import AudioDecoder, audio_decoders, sound_header
from shardstream.codecs.value_parts import array_length
from shardstream.codecs.video import VIDEO_EXTENSIONS
from shardstream.codecs.video_readers import RangedFile, open_reader, read_video_length
from shardstream.errors import ShardStreamError, describe_error
from shardstream.format import IMAGE_FORMATS, JSON_FIELDS, PILLOW_FORMATS, TEXT_FIELDS

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


def _video_metadata(file: RangedFile) -> Any:
    return open_reader(file, None).metadata


_TEXT: dict[str, _Property] = {"len": lambda file: len(file.read().decode())}
_PICTURE = {name: _of_picture(name) for name in ("height", "width")}
_SOUND = {name: _of(sound_header, name) for name in ("frames", "seconds", "rate", "channels")}
_VIDEO = {name: _of(read_video_length, name) for name in ("frames", "seconds")}
_VIDEO |= {name: _of(_video_metadata, name) for name in ("height", "width")}
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
