"""Write samples to tars. Equal samples give equal bytes; a file is visible only when it is complete."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import PIL.Image
import torch
from webdataset import writer as _theirs

from shardstream.codecs import encode_buffer, encode_cbor, encode_msgpack
from shardstream.errors import OptionError, SampleError, get_logger
from shardstream.format import BLOCK_BYTES, END_OF_ARCHIVE, is_meta_name, split_member_name
from shardstream.packing import encode_field, encode_npz
from shardstream.webdataset.gopen import UrlWriter, gopen
from shardstream.webdataset.handlers import UnsafeError

_logger = get_logger(__name__)
_FORMATS = {"JPG": "JPEG", "TIF": "TIFF", **dict.fromkeys(("IMG", "IMAGE", "PBM", "PGM"), "PPM")}
_BEST = {"JPEG": {"quality": 100}, "TIFF": {"quality": 100}}

Encoder = Callable[[Any], bytes]


class EncodingError(SampleError, ValueError):
    """A sample that cannot be written; also a ``ValueError``, as WebDataset raises."""


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Encode a PIL image, or an array: uint8 or floats from 0 to 1, shape (H, W), (H, W, 1) or (H, W, 3); uint16 or bool, (H, W) or (H, W, 1).

    Raises:
        ValueError: If it is none of these, or the format cannot hold it.
    """
    if isinstance(image, np.ndarray):
        image = PIL.Image.fromarray(_to_pixels(image))
    elif not isinstance(image, PIL.Image.Image):
        raise EncodingError(f"an image must be a PIL image or an array, not {type(image).__name__}")
    name = _FORMATS.get(format.upper(), format.upper())
    stream = io.BytesIO()
    try:
        image.save(stream, format=name, **_BEST.get(name, {}))
    except OSError as error:
        raise EncodingError(f"{error}; use a field png") from error
    return stream.getvalue()


def _to_pixels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype in (np.float32, np.float64):
        if array.size and not (array.min() > -0.001 and array.max() < 1.001):
            raise EncodingError(
                f"image values out of range: {array.min()} to {array.max()}, not 0 to 1"
            )
        array = (np.clip(array, 0.0, 1.0) * 255.0).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_colour = array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8
    is_plane = array.ndim == 2 and array.dtype in (np.uint8, np.uint16, np.bool_)
    if not (is_colour or is_plane):
        raise EncodingError(
            "an image must be uint8, or floats from 0 to 1, of shape (H, W) or (H, W, 3), or uint16 or bool of shape (H, W), "
            f"not {array.dtype} of {array.shape}"
        )
    return array


def numpy_dumps(data: np.ndarray[Any, Any]) -> bytes:
    """Encode an array as ``npy``; arrays of objects, which are pickles, are refused."""
    return encode_field("npy", data)


def numpy_npz_dumps(data: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Encode a dict of arrays as ``npz``, compressed."""
    return encode_npz("npz", data, zipfile.ZIP_DEFLATED)


def torch_dumps(data: Any) -> bytes:
    """Encode tensors, numbers and text, in plain lists and dicts, as ``pth``."""
    return encode_field("pth", data)


def tenbin_dumps(x: Any) -> bytes:
    """Encode an array, or a list of arrays, in WebDataset's tensor format."""
    return encode_buffer(x if isinstance(x, list) else [x])


mp_dumps, cbor_dumps = encode_msgpack, encode_cbor


def _refuse_pickle(value: Any) -> bytes:  # noqa: ARG001
    raise UnsafeError(
        "pickles are not written, because reading one could run code; use a field json, npy or pth"
    )


def _encode_number(value: Any) -> bytes:
    return str(value.item() if isinstance(value, torch.Tensor | np.generic) else value).encode(
        "ascii"
    )


def _image_encoder(name: str) -> Encoder:
    return lambda image: imageencoder(image, name)


def make_handlers() -> dict[str, Encoder]:
    """Return the encoders by last part of a field."""
    handlers: dict[str, Encoder] = {}

    def add(names: str, encoder: Encoder) -> None:
        handlers.update(dict.fromkeys(names.split(), encoder))

    add("cls cls2 class count index inx id", _encode_number)
    add("pyd pickle pkl", _refuse_pickle)
    add("pth", torch_dumps)
    add("npy", numpy_dumps)
    add("npz", numpy_npz_dumps)
    add("ten tenbin tb", tenbin_dumps)
    add("json jsn", lambda value: json.dumps(value).encode())
    add("mp msgpack msg", mp_dumps)
    add("cbor", cbor_dumps)
    add("jpg jpeg img image", _image_encoder("jpg"))
    add("tiff tif", _image_encoder("tiff"))
    for name in ("png", "pbm", "pgm", "ppm"):
        add(name, _image_encoder(name))
    return handlers


default_handlers = make_handlers()


def encode_based_on_extension1(data: Any, tname: str, handlers: Mapping[str, Encoder]) -> Any:
    """Encode one field; bytes stay, text becomes UTF-8, and a name that ends in ``.gz`` is compressed.

    Raises:
        ValueError: If there is no encoder for the name.
    """
    if tname.startswith("_"):
        if not isinstance(data, str):
            raise EncodingError("the values of metadata must be of string type", field=tname)
        return data
    plain = tname.removesuffix(".gz")
    if isinstance(data, str):
        data = data.encode("utf-8")
    elif not isinstance(data, bytes):
        encoder = handlers.get(plain.rpartition(".")[2].lower())
        if encoder is None:
            raise EncodingError(
                f"no handler found for {plain}; encode the value to bytes", field=tname
            )
        data = encoder(data)
    return gzip.compress(data, mtime=0) if tname.endswith(".gz") else data


def encode_based_on_extension(
    sample: Mapping[str, Any], handlers: Mapping[str, Encoder]
) -> dict[str, Any]:
    """Encode the fields of a sample, see `encode_based_on_extension1`."""
    return {
        name: encode_based_on_extension1(value, name, handlers) for name, value in sample.items()
    }


def make_encoder(spec: Any) -> Callable[[Any], Any]:
    """Return the function for ``encoder=``: True, False or None, a function of a sample, or a dict of functions by extension.

    Raises:
        ValueError: If it is none of these.
    """
    if spec is False or spec is None:
        return dict
    if callable(spec):
        encoder: Callable[[Any], Any] = spec
        return encoder
    if spec is True or isinstance(spec, dict):
        handlers = default_handlers if spec is True else spec
        return lambda sample: encode_based_on_extension(sample, handlers)
    raise OptionError(
        f"encoder must be True, False, a function or a dict of functions, not {spec!r}"
    )


class TarWriter:
    """Writes samples to a tar; its fields are sorted, as in WebDataset.

    A file that is named by URL or path appears when the writer is closed; an exception in its ``with`` block discards it.

    Args:
        fileobj: URL or path, or a binary stream, which stays open.
        user: Name of the owner in the headers.
        group: Name of the group.
        mode: Permissions of the files.
        compress: True or "gz" compresses with gzip, also where the name ends in "gz"; False does not.
        encoder: See `make_encoder`.
        keep_meta: Also write names that begin with "_", but for ``__key__``.
        mtime: Time of the files; 0 without one, so that equal samples give equal bytes.
        format: A format of tarfile; by default ustar, with pax headers for what does not fit.

    Raises:
        OptionError: If an argument is invalid.
    """

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o0444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: Any = None,
    ) -> None:
        name = fileobj if isinstance(fileobj, str) else ""
        if compress in ("bz2", "xz") or (compress is None and name.endswith(("bz2", "xz"))):
            raise OptionError(
                "bzip2 and xz are not written, because they are slow to read; use compress='gz' or a plain tar"
            )
        if compress not in (None, True, False, "", "gz"):
            raise OptionError(f"compress must be True, False or 'gz', not {compress!r}")
        self.encoder = make_encoder(encoder)
        self.user, self.group, self.mode = user, group, mode
        self.keep_meta = keep_meta
        self.mtime = mtime
        self._format: Any = (
            tarfile.PAX_FORMAT if format is None else getattr(tarfile, str(format), format)
        )
        is_packed = compress in (True, "gz") or (compress is None and name.endswith("gz"))
        opened = gopen(fileobj, "wb") if isinstance(fileobj, str) else fileobj
        self.own_fileobj: Any = opened if name not in ("", "-") else None
        self.stream = opened
        self._packer = (
            gzip.GzipFile(filename="", mode="wb", fileobj=self.stream, mtime=0)
            if is_packed
            else None
        )
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *args: object) -> None:
        if kind is not None and isinstance(self.own_fileobj, UrlWriter):
            self._is_closed = True
            self.own_fileobj.discard()
        self.close()

    def close(self) -> None:
        """Write the end of the archive, and publish a file that was named."""
        if self._is_closed:
            return
        self._is_closed = True
        self._write(END_OF_ARCHIVE)
        if self._packer is not None:
            self._packer.close()
        if self.own_fileobj is not None:
            self.own_fileobj.close()
        else:
            self.stream.flush()

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write a sample; nothing of it is written if it is refused.

        Returns:
            Bytes of its fields.

        Raises:
            ValueError: If it has no ``__key__`` or no field, a field is not bytes after encoding, or it would be read back under
                another key or field.
        """
        if self._is_closed:
            raise OptionError("the writer is closed; write before close()")
        sample = self.encoder(obj)
        if "__key__" not in sample:
            raise EncodingError("object must contain a __key__")
        pieces: list[bytes] = []
        total = 0
        for name in sorted(sample):
            if name == "__key__" or (name.startswith("_") and not self.keep_meta):
                continue
            data = self._bytes_of(sample[name], name)
            pieces += (
                self._header(str(sample["__key__"]), name, len(data)),
                data,
                bytes(-len(data) % BLOCK_BYTES),
            )
            total += len(data)
        if not pieces:
            raise EncodingError(
                "a sample without fields would be lost; give it one", key=str(sample["__key__"])
            )
        self._write(b"".join(pieces))
        return total

    def _bytes_of(self, value: Any, name: str) -> bytes:
        if isinstance(value, str) and name.startswith("_"):
            return value.encode("utf-8")
        if not isinstance(value, bytes | bytearray | memoryview):
            raise EncodingError(
                f"{name} doesn't map to bytes after encoding ({type(value).__name__})", field=name
            )
        return bytes(value)

    def _header(self, key: str, name: str, size: int) -> bytes:
        path = f"{key}.{name}"
        if split_member_name(path) != (key, name.lower()) or "\0" in path or is_meta_name(path):
            raise EncodingError(
                "it would be skipped or read under another key: a key ends at the first dot after its last slash, and must not be "
                "in double underscores; rename it",
                key=key,
                field=name,
            )
        info = tarfile.TarInfo(path)
        info.size = size
        info.mtime = int(self.mtime or 0)
        info.mode = self.mode
        info.uname, info.gname = self.user, self.group
        return info.tobuf(self._format, "utf-8", "surrogateescape")

    def _write(self, data: bytes) -> None:
        (self.stream if self._packer is None else self._packer).write(data)


class ShardWriter(_theirs.ShardWriter):
    """Writes samples to tars of a limited size, each visible when it is complete.

    Args:
        pattern: Names of the tars, such as ``"shard-%06d.tar"``.
        maxcount: Samples of a tar.
        maxsize: Bytes of the fields of a tar, which the last sample may exceed.
        post: Called with the name of each tar that is complete.
        start_shard: Number of the first tar.
        verbose: Whether to log the names, at level INFO.
        opener: Function of a name that returns a binary stream, which is closed with the tar.
        kw: Options of `TarWriter`.
    """

    tarstream: TarWriter | None
    fname: str | None

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **kw: Any,
    ) -> None:
        try:
            is_numbered = pattern % 0 != pattern % 1
        except (TypeError, ValueError):
            is_numbered = False
        if not is_numbered:
            raise OptionError(
                f"the pattern {pattern!r} gives all shards one name; write a number: 'shard-%06d.tar'"
            )
        super().__init__(pattern, maxcount, maxsize, post, start_shard, verbose, opener, **kw)

    def next_stream(self) -> None:
        """Finish the tar, and begin the next one."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            _logger.info("writing %s, after %d samples", self.fname, self.total)
        self.shard += 1
        self.tarstream = TarWriter(
            self.opener(self.fname) if self.opener else self.fname, **self.kw
        )
        self.count = self.size = 0

    def finish(self) -> None:
        """Finish the tar; `close` is the method for callers."""
        if self.tarstream is None:
            return
        self.tarstream.close()
        if self.opener:
            self.tarstream.stream.close()
        self.tarstream = None
        if self.post is not None and self.fname is not None:
            self.post(self.fname)

    def close(self) -> None:
        """Finish the last tar."""
        self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *args: object) -> None:
        if kind is not None and self.tarstream is not None:
            self.tarstream.__exit__(kind)
            self.tarstream = None
        self.close()
