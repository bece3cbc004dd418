"""Describe a field of a sample briefly, without executing or unpacking its content."""

from __future__ import annotations

import io
import re
import warnings

from shardstream.cli.terminal_text import printable, shortened

_TEXT = frozenset(
    ["txt", "text", "transcript", "caption", "cls", "cls2", "id", "index", "inx", "json", "jsonl"]
) | {"csv", "tsv", "md", "html", "xml", "yaml", "yml", "srt", "vtt", "log"}
_PICKLES = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])
_BREAKS = re.compile(r"([\n\t])")
_PREVIEW_CHARACTERS = 100
_PREVIEW_BYTES = 16


def describe(field: str, data: bytes, *, limit: int | None = _PREVIEW_CHARACTERS) -> str:
    r"""Describe a field: text in full, images and arrays by header, others by first bytes.

    >>> describe("cls", b"7"), describe("bin", b"\x00\xff"), describe("txt", b"\x1b[31mred")
    ('7', 'bytes 00 ff', '\\x1b[31mred')

    Args:
        field: Name of the field; its extension determines the kind.
        data: Content of the field.
        limit: Characters of text to show; None for all, with line breaks.
    """
    from shardstream.format import IMAGE_FORMATS  # noqa: PLC0415  (numpy; a command starts without it)

    kind = field.rsplit(".", 1)[-1].lower()
    if not data:
        return "(empty)"
    preview = None
    if kind in _TEXT:
        preview = _text(data, limit)
    elif kind in IMAGE_FORMATS:
        preview = _image(data)
    elif kind == "npy":
        preview = _array(data)
    if preview is None:
        preview = _preview(data)
        if kind in _PICKLES:
            preview += " (may hold a pickle: not opened)"
    return preview


def _text(data: bytes, limit: int | None) -> str | None:
    limited = data if limit is None else data[: 4 * limit + 4]
    try:
        # "ignore" when truncated: the cut may split the last character.
        text = limited.decode("utf-8", "strict" if len(limited) == len(data) else "ignore")
    except UnicodeDecodeError:
        return None
    if limit is None:
        return "".join(part if part in "\n\t" else printable(part) for part in _BREAKS.split(text))
    return shortened(printable(text), limit)


def _image(data: bytes) -> str | None:
    from PIL import Image  # noqa: PLC0415  (imported only for images)

    from shardstream.format import PILLOW_FORMATS  # noqa: PLC0415  (numpy)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow's size warning does not apply: only the header is read
            with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
                return f"{image.format} {image.width}x{image.height} {image.mode}"
    except Exception:  # noqa: BLE001  (Pillow raises various errors on damaged headers; show bytes instead)
        return None


def _array(data: bytes) -> str | None:
    from numpy.lib import format as npy  # noqa: PLC0415

    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    except Exception:  # noqa: BLE001  (numpy's header parser uses Python's tokenizer, which raises various errors)
        return None
    kind = "Python objects: not opened" if dtype.hasobject else str(dtype)
    return f"array {kind} {'x'.join(map(str, shape)) or 'scalar'}"


def _preview(data: bytes) -> str:
    more = " …" if len(data) > _PREVIEW_BYTES else ""
    return f"bytes {data[:_PREVIEW_BYTES].hex(' ')}{more}"
