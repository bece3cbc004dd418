"""Encode values to field bytes, by the last part of the field's name."""

from __future__ import annotations

import datetime
import io
import json
import operator
import re
import reprlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardstream.codecs import encode_buffer, encode_cbor, encode_msgpack, import_extra
from shardstream.errors import OptionError, SampleError, describe_error
from shardstream.format import IMAGE_FORMATS, INT_FIELDS, JSON_FIELDS, TEXT_FIELDS
from shardstream.packing.images import encode_image

_PLAIN = (str, bytes, int, float, bool, type(None))
MASK_ALONE = (
    "a mask by the photo beside it, which is left out here, so that decode takes it for a picture; give it a name such as 'seg.png', or read it "
    "with decode(masks=[...])"
)
"""What is wrong with a mask that is written so."""
_DOUBLES_END = 1 << 53  # from here on not every whole number is a double


def encode_field(field: str, value: object) -> bytes:
    """Return the bytes of one field; equal values give equal bytes.

    Bytes pass unchanged in any field. Other values are encoded by the last part of the name: text to UTF-8, ``cls`` etc. to
    digits, ``json``, ``jsonl`` (a list), ``msgpack``, ``cbor``, ``ten`` (arrays), ``safetensors`` (a dict of tensors), ``npy`` and ``npz`` (arrays or tensors; no objects), ``pt`` and ``pth`` (tensors, or plain lists and
    dicts of them), images (see `encode_image`). Only values that ``torch.load(weights_only=True)`` reads are pickled.

    >>> encode_field("cls", 7), encode_field("meta.json", {"a": [1, None]})
    (b'7', b'{"a":[1,null]}')

    Raises:
        SampleError: If the value does not fit the field.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    extension = field.rpartition(".")[2].lower()
    if isinstance(value, np.ma.MaskedArray) and extension != "json":  # there it becomes null
        raise _masked_error(field)
    encoder = _ENCODERS.get(extension)
    if encoder is None:
        advice = (
            "encode it first"
            if not isinstance(value, str)
            else "use value.encode(), or a field ending in 'txt'"
        )
        raise SampleError(
            f"this field takes bytes, not {type(value).__name__}; {advice}", field=field
        )
    return encoder(field, value)


def has_encoder(field: str) -> bool:
    """Return whether values other than bytes can be encoded under this name.

    >>> has_encoder("label"), has_encoder("label.cls")
    (False, True)
    """
    return field.rpartition(".")[2].lower() in _ENCODERS


def encode_sample(sample: Mapping[str, object]) -> dict[str, bytes]:
    """Return the fields of a sample as bytes, in its order; ``__key__`` and other names like ``__this__`` are left out.

    Raises:
        SampleError: If a value does not fit its field.
    """
    return {
        field: encode_field(field, value)
        for field, value in sample.items()
        if not (field.startswith("__") and field.endswith("__"))
    }


def _encode_text(field: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise _wrong_type_error(field, value, "text or bytes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise SampleError(f"the text is not valid Unicode: {error}", field=field) from error


def _encode_int(field: str, value: object) -> bytes:
    try:
        return b"%d" % operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise _wrong_type_error(field, value, "a whole number or bytes") from error


def _encode_json(field: str, value: object) -> bytes:
    try:
        text = _JSON.encode(value)
        if _has_other_keys(text):
            json.loads(text, object_pairs_hook=_refuse_repeated)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(
            f"JSON cannot hold this value: {error}; give numbers, text, lists and dicts, None for a missing number",
            field=field,
        ) from error


def _encode_jsonl(field: str, value: object) -> bytes:
    if isinstance(value, str):
        return _encode_text(field, value)
    if not isinstance(value, list | tuple):
        raise _wrong_type_error(field, value, "a list of JSON values, text or bytes")
    return b"".join(_encode_json(field, item) + b"\n" for item in value)


def _encode_tenbin(field: str, value: object) -> bytes:
    arrays = value if isinstance(value, list | tuple) else [value]
    try:
        return encode_buffer([_to_array(field, array) for array in arrays])
    except ValueError as error:
        raise SampleError(str(error), field=field) from error


def _encode_safetensors(field: str, value: object) -> bytes:
    if not isinstance(value, Mapping):
        raise _wrong_type_error(field, value, "a dict of arrays or tensors, or bytes")
    torch = sys.modules.get("torch")
    if torch is not None and all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        library = import_extra("safetensors.torch", extra="formats", purpose="encoding safetensors")
        tensors = {name: tensor.detach().contiguous() for name, tensor in value.items()}
    else:
        library = import_extra("safetensors.numpy", extra="formats", purpose="encoding safetensors")
        tensors = {
            name: np.ascontiguousarray(_to_array(field, array)) for name, array in value.items()
        }
    encoded: bytes = _encode_by(library.save)(field, tensors)
    return encoded


def _encode_by(function: Callable[[Any], bytes]) -> Callable[[str, object], bytes]:
    """Return an encoder that names the field in errors of a library."""

    def encode(field: str, value: object) -> bytes:
        try:
            return function(value)
        except OptionError:
            raise
        except Exception as error:
            raise SampleError(
                f"cannot be encoded: {describe_error(error)}; give plain values, or bytes",
                field=field,
            ) from error

    return encode


def _to_json(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON serialisable")


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("two keys have one text, such as 1 and '1'")


# Keys that may have been no text. A search takes a third as long as to encode short values; to decode all takes longer than that.
_has_other_keys = re.compile(r'"(?:-?\d[\d.e+-]*|true|false|null)":').search

# `json.dumps` makes one for each value, which takes as long as to encode a short one.
_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_to_json
)


def _encode_npy(field: str, value: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, _to_array(field, value), allow_pickle=False)
    return buffer.getvalue()


def encode_npz(field: str, value: object, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Encode a dict of arrays as `encode_field` does, or with a compression of zipfile.

    Raises:
        SampleError: If it is none.
    """
    if not isinstance(value, Mapping):
        raise _wrong_type_error(field, value, "a dict of arrays or bytes")
    arrays = {str(name): _to_array(field, array) for name, array in value.items()}
    if len(arrays) < len(value):
        raise SampleError("two arrays have one name, such as 1 and '1'; rename one", field=field)
    buffer = io.BytesIO()
    # As np.savez, which takes no array called "file". The date is 1980-01-01, so equal arrays give equal bytes.
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)
    return buffer.getvalue()


def number_array(value: object, dtype: np.dtype[Any] | None) -> object:
    """Return a number, or nested lists of numbers, as an array of a type.

    Without a type, if a number is missing, or lists differ in length, they stay as they are, for `encode_field`.
    """
    try:
        is_plain = dtype is not None and not np.asarray(value).dtype.hasobject
    except ValueError:
        return value
    return np.asarray(value, dtype) if is_plain else value


def _masked_error(field: str) -> SampleError:
    return SampleError(
        "a masked array would lose its mask; fill it, value.filled(0), or store value.data and value.mask as two fields",
        field=field,
    )


def _to_array(field: str, value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise _masked_error(field)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except TypeError as error:
            raise SampleError(f"{error}; convert it, or use the field 'pt'", field=field) from error
    if isinstance(value, list | tuple | int | float):
        given = value
        try:
            value = np.asarray(given)
        except ValueError as error:
            raise SampleError(
                f"the rows of this list differ in length: {error}", field=field
            ) from error
        _check_exact(field, given, value)
    if not isinstance(value, np.ndarray | np.generic):
        raise _wrong_type_error(field, value, "an array, a tensor, a list of numbers or bytes")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise SampleError(
            "an array of objects can only be pickled, and pickles run code when read; "
            "give it a plain dtype (numbers, fixed text), or use the field 'json'",
            field=field,
        )
    return array


def _check_exact(field: str, given: object, array: np.ndarray[Any, Any]) -> None:
    """Refuse a list of which NumPy has changed values: to text, or to doubles, as it does with 2**63 beside 1."""
    kind = array.dtype.kind
    if not (kind in "US" or (kind in "fc" and (np.abs(array) >= _DOUBLES_END).any())):
        return
    values = np.asarray(given, object).ravel().tolist()
    for value, stored in zip(values, array.ravel().tolist(), strict=True):
        exact = value.item() if isinstance(value, np.generic) else value
        if exact != stored and repr(exact) != repr(stored):  # not NaN
            raise SampleError(
                f"{exact!r} would become {stored!r}, the type of the list; give an array of a type that holds all its values",
                field=field,
            )


def _encode_torch(field: str, value: object) -> bytes:
    torch = sys.modules.get("torch")
    if torch is None:  # then the value holds no tensor
        raise _wrong_type_error(
            field, value, "a tensor, plain lists and dicts of tensors, or bytes"
        )
    buffer = io.BytesIO()
    torch.save(_to_plain(field, value, torch), buffer)
    return buffer.getvalue()


def _to_plain(field: str, value: object, torch: Any) -> object:
    """Check that only tensors and plain values are there; copy views, so that the rest of their storage is not saved."""
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return value.detach().cpu().clone()  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        items = [_to_plain(field, item, torch) for item in value]  # type: ignore[attr-defined]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        return {_to_plain(field, k, torch): _to_plain(field, v, torch) for k, v in value.items()}
    if type(value) in _PLAIN:
        return value
    raise _wrong_type_error(
        field, value, "tensors, numbers and text, in plain lists and dicts, or bytes"
    )


def _wrong_type_error(field: str, value: object, accepted: str) -> SampleError:
    return SampleError(
        f"this field takes {accepted}, not {type(value).__name__} ({reprlib.repr(value)}); "
        "convert it, or choose another field",
        field=field,
    )


_ENCODERS: dict[str, Callable[[str, object], bytes]] = {
    **dict.fromkeys(TEXT_FIELDS, _encode_text),
    **dict.fromkeys(INT_FIELDS, _encode_int),
    **dict.fromkeys(JSON_FIELDS, _encode_json),
    **dict.fromkeys(("pt", "pth"), _encode_torch),
    **dict.fromkeys(IMAGE_FORMATS, encode_image),
    "npy": _encode_npy,
    "npz": encode_npz,
    "jsonl": _encode_jsonl,
    **dict.fromkeys(("ten", "tb"), _encode_tenbin),
    **dict.fromkeys(("mp", "msg", "msgpack"), _encode_by(encode_msgpack)),
    "cbor": _encode_by(encode_cbor),
    "safetensors": _encode_safetensors,
}
