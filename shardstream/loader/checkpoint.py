"""Checkpoints on the store that the data are on: written whole or not at all, read side by side, never run as code."""

from __future__ import annotations

import io
import operator
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex, cast

import torch

from shardstream.errors import NotFoundError, OptionError, StateError
from shardstream.storage import (
    PendingFile,
    Storage,
    is_part,
    join_url,
    open_pending,
    remove,
    translate_errors,
)

_PART_BYTES = 8 << 20  # of one request
_THREADS = 8
_SUFFIXES = (".pt", ".pth")
_NAME = re.compile(r"step-(\d+)\.pt")
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter,
    torch.Size, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)


def save_checkpoint(
    url: str | os.PathLike[str],
    /,
    *,
    step: SupportsIndex | None = None,
    keep: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    **objects: Any,
) -> str:
    """Save models, optimizers, loaders and plain values to one file, on S3 or any other store, in the format of ``torch.save``.

    The file appears when all of it has been written, and never otherwise: whatever stops the program, the checkpoint before is
    still there. The process that calls writes; with several ranks let one do it (``if rank == 0``): the state of a `ShardLoader` is
    the same on every rank unless steps change counts.

    Args:
        url: A folder or prefix (``s3://bucket/run/``), which gets ``step-00001200.pt``; or a file that ends in ``.pt`` or ``.pth``.
        step: Names the file in a folder, and is saved too.
        keep: In a folder: delete older checkpoints but for the latest ``keep - 1``, once the new one is there. Those of later steps
            stay.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.
        objects: By name. What has a ``state_dict`` is saved as that; else tensors, numbers, text, and dicts, lists, tuples and
            sets of these.

    Returns:
        URL of the file.

    Raises:
        OptionError: If an object holds what could not be loaded again without running code, or an argument makes no sense.
        StorageError: If it cannot be written; what was there is as it was.
    """
    storage, folder = _storage(storage_options, filesystem), os.fspath(url)
    number = None if step is None else operator.index(step)  # NumPy's numbers are welcome here
    _check(folder, number, keep)
    file = folder if _is_file(folder) else join_url(folder, f"step-{number:08d}.pt")
    saved = {name: _state_of(value) for name, value in objects.items()}
    if number is not None:
        saved["step"] = number
    for name, value in saved.items():
        _refuse_code(value, name)
    pending = open_pending(storage, file)
    try:
        _save(saved, pending)
        pending.commit()
    finally:
        pending.discard()
    if keep is not None and number is not None:
        _remove_older(folder, storage, step=number, keep=keep)
    return file


def load_checkpoint(
    url: str | os.PathLike[str],
    /,
    *,
    map_location: Any = "cpu",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, or any file of ``torch.save`` that holds tensors and plain values in a dict.

    It is read with several requests at a time, its checksums are compared, and nothing in it runs as code. One from afar is in memory
    twice while it is loaded.

    Args:
        url: A file, or a folder: its checkpoint of the latest step.
        map_location: Where tensors go, as in ``torch.load``.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.

    Returns:
        State dicts and values by name, and ``"step"`` if it was given.

    Raises:
        NotFoundError: If there is none.
        StateError: If it is damaged, or holds what would have to run as code. No older one is taken instead: name it by its own
            URL.
        StorageError: If it is out of reach.
    """
    storage, file = _storage(storage_options, filesystem), os.fspath(url)
    if not _is_file(file):
        file = _latest(file, storage)
    with _open(file, storage) as stream:
        _check_sums(stream, file)
        loaded = _load(stream, map_location, file)
    if not isinstance(loaded, dict):
        raise StateError(
            f"this file holds a {type(loaded).__name__}, no checkpoint: a dict by name", shard=file
        )
    return cast("dict[str, Any]", loaded)


def _load(stream: BinaryIO, map_location: Any, url: str) -> Any:
    try:
        return torch.load(stream, map_location=map_location, weights_only=True)
    except Exception as error:
        # Of which kind depends on torch's version; an error of the device (no memory, say) is told as it is, too.
        raise StateError(
            "this checkpoint cannot be loaded as tensors and plain values; if you trust who wrote it, torch.load(..., "
            f"weights_only=False) runs what it holds ({type(error).__name__}: {_first_line(error)})",
            shard=url,
        ) from error


def _storage(options: Mapping[str, Any] | None, filesystem: Any) -> Storage:
    # obstore's threads in this process would keep loader workers that are forked later from using it.
    return Storage({"s3_client": "s3fs"} | dict(options or {}), filesystem)


def _is_file(url: str) -> bool:
    return url.endswith(_SUFFIXES)


def _check(url: str, step: int | None, keep: int | None) -> None:
    if step is not None and step < 0:
        raise OptionError(f"step must be at least 0, not {step}")
    if keep is not None and keep < 1:
        raise OptionError(f"keep must be at least 1, not {keep}")
    if _is_file(url) and keep is not None:
        raise OptionError("keep= needs a folder, not a file", shard=url)
    if not _is_file(url) and step is None:
        raise OptionError("a folder needs step=, which names the file in it", shard=url)


def _state_of(value: Any) -> Any:
    has_state = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    return value.state_dict() if has_state else value


def _refuse_code(value: Any, path: str) -> None:
    """Refuse now what `load_checkpoint` would refuse then.

    Raises:
        OptionError: Naming the place.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _PLAIN:
        return
    if kind not in _CONTAINERS:
        raise OptionError(
            f"{path} is of {kind.__module__}.{kind.__qualname__}, which only code could load again; "
            "save tensors (torch.from_numpy), numbers (.item()), text, or dicts, lists and tuples of these"
        )
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_code(name, f"a key of {path}")
            _refuse_code(inner, f"{path}[{name!r}]")
    else:
        for place, inner in enumerate(value):
            _refuse_code(inner, f"{path}[{place}]")


class _Sink(io.RawIOBase):
    """Where torch writes; keeps the error of a write, which torch hides behind one of its own."""

    def __init__(self, pending: PendingFile) -> None:
        super().__init__()
        self._pending = pending
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _PART_BYTES):
                self._pending.write(view[start : start + _PART_BYTES])
        except Exception as error:
            self.error = error
            raise
        return len(view)


def _save(saved: dict[str, Any], pending: PendingFile) -> None:
    sink = _Sink(pending)
    try:
        torch.save(saved, cast("BinaryIO", sink))
    except Exception:
        if sink.error is not None:
            raise sink.error from None
        raise


def _steps(folder: str, storage: Storage) -> dict[int, str]:
    """Return the checkpoints of a folder by step, in order."""
    files, _ = storage.list_folder(folder)
    found = [(_NAME.fullmatch(file.url.rpartition("/")[2]), file.url) for file in files]
    return dict(sorted((int(match[1]), url) for match, url in found if match))


def _latest(folder: str, storage: Storage) -> str:
    steps = _steps(folder, storage)
    if not steps:
        raise NotFoundError("no checkpoint is here (step-….pt); check the URL", shard=folder)
    return list(steps.values())[-1]


def _remove_older(folder: str, storage: Storage, *, step: int, keep: int) -> None:
    """Delete checkpoints of earlier steps, and what killed writers left of them."""
    older = [url for other, url in _steps(folder, storage).items() if other < step]
    for url in older[: max(0, len(older) - (keep - 1))]:
        remove(storage, url)
    for file in storage.list_folder(folder)[0]:
        match = _NAME.match(file.url.rpartition("/")[2])
        if match and int(match[1]) < step and is_part(file.url):
            remove(storage, file.url)


def _open(url: str, storage: Storage) -> BinaryIO:
    """Open a file of this machine; read any other to memory, several ranges at a time."""
    path = storage.local_path(url)
    if path is not None:
        with translate_errors(url):
            return Path(path).open("rb")
    size = storage.info(url).size
    stream = io.BytesIO()
    if size:
        stream.seek(size - 1)
        stream.write(b"\0")  # all of it at once, without a copy later

    def read(start: int) -> None:
        end = min(start + _PART_BYTES, size)
        view[start:end] = storage.read(url, start, end)

    with (
        stream.getbuffer() as view,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-checkpoint") as pool,
    ):
        list(pool.map(read, range(0, size, _PART_BYTES)))
    stream.seek(0)
    return stream


def _check_sums(stream: BinaryIO, url: str) -> None:
    """Compare the checksums of the archive, which torch writes but does not read.

    Raises:
        StateError: If one differs, or it is no archive.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise _damaged(f"{error}", url) from error
    if bad is not None:
        raise _damaged(f"the checksum of {bad} is wrong", url)
    stream.seek(0)


def _damaged(why: str, url: str) -> StateError:
    return StateError(
        f"this checkpoint is damaged, cut, or none of torch.save ({why}); load an older one by its own URL",
        shard=url,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
