"""Decide by the names of fields how they are shown, and which types a browser may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardstream.codecs import VIDEO_EXTENSIONS, AudioDecoder, audio_decoders
from shardstream.format import IMAGE_FORMATS, has_mask_word, mask_fields

Kind = Literal["picture", "mask", "video", "sound", "array", "json", "text", "class", "other"]

_TEXT = ("txt", "text", "transcript", "caption", "csv", "tsv", "md", "html", "htm", "svg", "xml")
_MORE_TEXT = ("yaml", "yml", "srt", "vtt", "log", "jsonl", "id", "index", "inx", "js", "css")
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_FORMATS, "picture"),
    **dict.fromkeys(VIDEO_EXTENSIONS, "video"),
    **dict.fromkeys(audio_decoders(AudioDecoder()), "sound"),
    **dict.fromkeys(("npy", "npz", "ten", "tb"), "array"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys((*_TEXT, *_MORE_TEXT), "text"),
    **dict.fromkeys(("cls", "cls2", "class"), "class"),
}
# The types that a browser plays; it is sent nothing else of the data but pictures made here.
_PLAYED = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "oga": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "webm": "video/webm",
}
_FIRST: tuple[Kind, ...] = ("picture", "video", "sound", "mask", "array")
_EXCERPT: tuple[Kind, ...] = ("text", "json")


class Thumbnail(NamedTuple):
    """The fields that a card shows."""

    kind: Kind | None
    """Kind of the picture; None for none."""
    field: str | None
    """The field that it is made of."""
    excerpt: str | None
    """The field whose beginning is shown as text."""


def kinds_of(fields: Sequence[str]) -> dict[str, Kind]:
    """Return the kind of each field of a sample.

    >>> kinds_of(["jpg", "seg.png", "cls", "mask.npy", "x.pyd"])
    {'jpg': 'picture', 'seg.png': 'mask', 'cls': 'class', 'mask.npy': 'array', 'x.pyd': 'other'}
    """
    masks = mask_fields(fields)
    return {
        name: "mask" if name in masks else _KINDS.get(extension(name), "other") for name in fields
    }


def is_mask_array(name: str) -> bool:
    """Return whether a field is an array of class numbers, by its name.

    >>> is_mask_array("seg.npy"), is_mask_array("npy")
    (True, False)
    """
    return extension(name) == "npy" and has_mask_word(name.rpartition(".")[0])


def choose_thumbnail(fields: Sequence[str]) -> Thumbnail:
    """Return what the card of a sample shows: the first picture, else video, sound, mask, array; and the first text.

    >>> choose_thumbnail(["txt", "seg.png", "jpg"])
    Thumbnail(kind='picture', field='jpg', excerpt='txt')
    """
    kinds = kinds_of(fields)
    kind, field = next(
        ((kind, name) for kind in _FIRST for name in fields if kinds[name] == kind), (None, None)
    )
    excerpt = next(
        (name for kind in _EXCERPT for name in fields if kinds[name] == kind and name != field),
        None,
    )
    return Thumbnail(kind, field, excerpt)


def played_type(field: str) -> str | None:
    """Return the type with which a browser is sent a sound or a video; None for all other fields.

    >>> played_type("left.mp3"), played_type("html")
    ('audio/mpeg', None)
    """
    return _PLAYED.get(extension(field))


def extension(field: str) -> str:
    """Return the last part of a field's name, in lower case."""
    return field.rsplit(".", 1)[-1].lower()
