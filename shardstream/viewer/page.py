"""Decide what the page shows of samples: cards for the grid, and the details of one sample, as JSON values."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import PIL

from shardstream.codecs import parse_json
from shardstream.display import (
    Kind,
    choose_thumbnail,
    extension,
    image_size,
    is_mask_array,
    kinds_of,
    npz_statistics,
    played_type,
    statistics,
)
from shardstream.errors import DecodeError, describe_error, redact
from shardstream.pipeline import BASIC, BadSample
from shardstream.viewer.samples import BrokenSample, FoundSample, Place, Shown

_EXCERPT = 240  # characters of a card
_TEXT = 100_000  # of the details
_PARSED_BYTES = 64 << 10  # larger JSON is not parsed for a card
_DECODED_BYTES = 64 << 20
_MAX_DIGITS = 18  # of a class number
_MAX_BOXES = 1000
# Names of boxes -> how their four numbers are read first; the page can change it.
_BOX_FORMS = {"bbox": "xywh", "bboxes": "xywh", "boxes": "xyxy", "box": "xyxy"}
_BOX_LISTS = ("annotations", "objects", "instances", "detections", "labels")
_LABELS = ("category_name", "label", "class", "name", "category", "category_id")
_PLAIN_OPTIONS = ("anon", "endpoint_url", "region", "s3_client")
_SECRET = "…"  # noqa: S105  (what is shown in its place)

Classes = Sequence[str] | None
ReadField = Callable[[str], bytes]


def card_of(sample: Shown, classes: Classes, bad: Sequence[BadSample] = ()) -> dict[str, Any]:
    """Return what the grid shows of a sample.

    Args:
        sample: The sample; small bodies of it are used.
        classes: Names of the classes.
        bad: Its entries in the report of bad samples.
    """
    card: dict[str, Any] = {"number": sample.place.number, "size": sample.place.size}
    reported = [f"{one.error}: {one.message}" for one in bad]
    if isinstance(sample, BrokenSample):
        return card | {"error": sample.message, "fields": [], "reported": reported}
    chosen = choose_thumbnail(tuple(sample.fields))
    card |= {
        "key": sample.key,
        "fields": list(sample.fields),
        "thumbnail": {"kind": chosen.kind, "field": chosen.field},
        "reported": reported,
    }
    problems = [
        f"{name}: {problem}"
        for name, kind in kinds_of(tuple(sample.fields)).items()
        if (problem := find_problem(kind, sample.bodies.get(name)))
    ]
    if problems:
        card["error"] = "; ".join(problems)
    label = _class_of(sample, classes)
    if label is not None:
        card["class"] = label
    card["text"] = _excerpt(sample, chosen.excerpt, is_alone=chosen.kind is None)
    return card


def find_problem(kind: Kind, data: Any) -> str | None:
    r"""Return what is wrong with the bytes of a small field; None if nothing is, or another kind of field is judged elsewhere.

    >>> find_problem("class", b"x"), find_problem("json", b"{}"), find_problem("text", b"\xff")
    ("the class is not a number: 'x'", None, 'not UTF-8 at byte 0')
    """
    if data is None or len(data) > _PARSED_BYTES:
        return None
    data = bytes(data)
    if kind == "class":
        is_number = data.strip().lstrip(b"-").isdigit()
        shown = data[:40].decode("utf-8", "replace")
        return None if is_number else f"the class is not a number: {shown!r}"
    if kind == "json":
        try:
            parse_json(data)
        except (ValueError, RecursionError) as error:
            return f"invalid JSON: {error}"
    if kind == "text":
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return f"not UTF-8 at byte {error.start}"
    return None


def details_of(
    sample: FoundSample,
    read: ReadField,
    classes: Classes,
    cat: str,
    bad: Sequence[BadSample] = (),
) -> dict[str, Any]:
    """Return all that the details panel shows of a sample.

    Args:
        sample: The sample.
        read: Returns the bytes of a field.
        classes: Names of the classes.
        cat: Command that shows the sample in a terminal.
        bad: Its entries in the report of bad samples.
    """
    kinds = kinds_of(tuple(sample.fields))
    fields = [_field_details(name, kind, sample.fields[name], read) for name, kind in kinds.items()]
    boxes: list[dict[str, Any]] = []
    for one in fields:
        boxes += one.pop("boxes", [])
    return _place(sample.place) | {
        "key": sample.key,
        "class": _class_of(sample, classes),
        "cat": cat,
        "fields": fields,
        "boxes": boxes[:_MAX_BOXES],
        "masks": masks_of(kinds),
        "reported": [f"{one.error}: {one.message}" for one in bad],
    }


def masks_of(kinds: Mapping[str, Kind]) -> list[str]:
    """Return the fields that lie over the picture, of kind by field."""
    return [name for name, kind in kinds.items() if kind == "mask" or is_mask_array(name)]


def has_boxes(name: str, kind: Kind) -> bool:
    """Return whether boxes are looked for in a field: in JSON, and in arrays whose name has "box"."""
    return kind == "json" or (extension(name) == "npy" and "box" in name)


def boxes_of(value: Any) -> list[dict[str, Any]]:
    """Return the boxes in the value of a field that `has_boxes`: as `find_boxes`, or the rows of an array as corners."""
    if not isinstance(value, np.ndarray):
        return find_boxes(value)[:_MAX_BOXES]
    if value.ndim != 2 or value.shape[1] < 4:
        return []
    rows = value[:_MAX_BOXES, :4].astype(float).tolist()
    return [{"box": row, "form": "xyxy", "label": ""} for row in rows]


def broken_details(sample: BrokenSample, cat: str) -> dict[str, Any]:
    """Return all that the details panel shows of a sample that cannot be read."""
    return _place(sample.place) | {"error": sample.message, "cat": cat, "fields": []}


def command_line(arguments: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return a command that shows the same in a terminal; storage options that may be secret are left out.

    >>> command_line(["cat", "my data/", "--number", "5"], {"anon": True, "key": "AKIA"})
    "shardstream cat 'my data/' --number 5 --option anon=true --option key=…"
    """
    words = ["shardstream", *arguments]
    for name, value in options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        is_plain = name in _PLAIN_OPTIONS
        words += ["--option", f"{name}={redact(text) if is_plain else _SECRET}"]
    return " ".join(word if word.endswith(f"={_SECRET}") else shlex.quote(word) for word in words)


def find_boxes(value: Any) -> list[dict[str, Any]]:
    """Return the boxes in the value of a JSON field: four numbers each, with a label if there is one.

    >>> find_boxes({"annotations": [{"bbox": [1, 2, 3, 4], "label": "cat"}]})
    [{'box': [1.0, 2.0, 3.0, 4.0], 'form': 'xywh', 'label': 'cat'}]
    >>> find_boxes({"boxes": [[0, 0, 9, 9]], "labels": [3]})
    [{'box': [0.0, 0.0, 9.0, 9.0], 'form': 'xyxy', 'label': '3'}]
    """
    if isinstance(value, list):
        return [
            box for one in value[:_MAX_BOXES] if isinstance(one, dict) for box in find_boxes(one)
        ]
    if not isinstance(value, dict):
        return []
    found: list[dict[str, Any]] = []
    labels = value.get("labels")
    for name, form in _BOX_FORMS.items():
        boxes = value.get(name)
        if not isinstance(boxes, list):
            continue
        many = boxes if boxes and isinstance(boxes[0], list) else [boxes]
        for place, box in enumerate(many[:_MAX_BOXES]):
            numbers = _four_numbers(box)
            if numbers is not None:
                names = labels if isinstance(labels, list) and place < len(labels) else None
                label = names[place] if names else _label_of(value)
                found.append({"box": numbers, "form": form, "label": str(label)[:80]})
    for name in _BOX_LISTS:
        if isinstance(value.get(name), list):
            found += find_boxes(value[name])
    return found


def describe_value(value: Any) -> dict[str, Any]:
    """Return a decoded value as JSON values: arrays as statistics, others as text."""
    if hasattr(value, "__array__") and not np.isscalar(value):
        return {"array": statistics(np.asarray(value))}
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(v, np.ndarray) for v in value.values())
    ):
        return {"arrays": {str(name): statistics(array) for name, array in value.items()}}
    if isinstance(value, str):
        return {"text": value[:_TEXT], "cut": len(value) > _TEXT}
    if isinstance(value, bytes | memoryview):
        return {"text": bytes(value[:64]).hex(" ")}
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return {"text": text[:_TEXT], "cut": len(text) > _TEXT}


def _field_details(
    name: str, kind: Kind, place: tuple[int, int], read: ReadField
) -> dict[str, Any]:
    """Return what the details panel shows of a field; an error of its decoder is shown in its place."""
    offset, size = place
    found: dict[str, Any] = {"name": name, "kind": kind, "offset": offset, "size": size}
    if kind in ("sound", "video"):
        return found | {"media_type": played_type(name)}
    if size > _DECODED_BYTES:
        return found | {"note": "too large to be decoded here; download it"}
    try:
        data = read(name)
        if kind in ("picture", "mask"):
            return found | image_size(data)
        return found | _value_details(name, kind, data)
    except Exception as error:  # noqa: BLE001  (decoders raise any error; the page shows it)
        return found | {"error": message_of(error)}


def _value_details(name: str, kind: Kind, data: bytes) -> dict[str, Any]:
    decoder = BASIC.get(extension(name))
    if decoder is None and kind != "text":
        more = " …" if len(data) > 64 else ""
        return {"text": data[:64].hex(" ") + more}
    if kind == "text":
        return describe_value(data.decode("utf-8"))
    if extension(name) == "npz":
        return {"arrays": npz_statistics(data)}
    value = decoder(data) if decoder is not None else data
    found = describe_value(value)
    if has_boxes(name, kind):
        found["boxes"] = boxes_of(value)
    return found


def message_of(error: Exception) -> str:
    """Return the message of a decoder's error."""
    if isinstance(error, DecodeError):
        return str(error)
    if isinstance(error, PIL.UnidentifiedImageError):  # whose message has an address in memory
        return "the bytes are no picture of a format that is decoded"
    return describe_error(error)


def _place(place: Place) -> dict[str, Any]:
    return {
        "number": place.number,
        "shard": redact(place.url),
        "start": place.start,
        "end": place.end,
        "size": place.size,
    }


def _class_of(sample: FoundSample, classes: Classes) -> dict[str, Any] | None:
    data = bytes(sample.bodies.get("cls", b"")[:_MAX_DIGITS])
    if not data.isdigit():
        return None
    number = int(data)
    name = classes[number] if classes is not None and number < len(classes) else None
    return {"number": number, "name": name}


def _excerpt(sample: FoundSample, field: str | None, *, is_alone: bool) -> str | None:
    """Return the beginning of a field as text; of a sample with nothing else to show, the first bytes."""
    if field is not None and field in sample.bodies:
        data = bytes(sample.bodies[field][: 4 * _EXCERPT])
        text = data.decode(
            "utf-8", "replace" if len(data) == len(sample.bodies[field]) else "ignore"
        )
        return text[:_EXCERPT] + ("…" if len(text) > _EXCERPT else "")
    if not is_alone or field is not None:
        return None
    name = next((name for name in sample.fields if name in sample.bodies and name != "cls"), None)
    return None if name is None else f"{name}: {bytes(sample.bodies[name][:32]).hex(' ')}"


def _four_numbers(box: Any) -> list[float] | None:
    if not isinstance(box, list) or len(box) != 4:
        return None
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in box):
        return None
    return [float(n) for n in box]


def _label_of(value: Mapping[str, Any]) -> Any:
    return next((value[name] for name in _LABELS if isinstance(value.get(name), str | int)), "")
