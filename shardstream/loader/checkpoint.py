"""Save and load training checkpoints on any store: atomic writes, concurrent reads, no code execution."""

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
from shardstream.pipeline import State, find_states, parse_state
from shardstream.storage import (
    PendingFile,
    Storage,
    is_part,
    join_url,
    open_pending,
    remove,
    translate_errors,
)

_PART_BYTES = 8 << 20  # per request
_FEW_BYTES = 256 << 10  # per request, where only the structure of a checkpoint is read
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
    """Save models, optimizers, loaders and plain values to one file.

    The format is that of ``torch.save``; the store can be S3 or any other. The file is published atomically: if the program stops
    during the write, the previous checkpoint remains. The calling process writes; with several ranks call it on one
    (``if rank == 0``): the state of a `ShardLoader` is the same on every rank unless steps change counts.

    Args:
        url: A folder or prefix (``s3://bucket/run/``), where the file is named ``step-00001200.pt``; or a file that ends in ``.pt``
            or ``.pth``.
        step: Training step; names the file in a folder, and is saved too.
        keep: In a folder: after the write, keep only the latest ``keep`` checkpoints up to this step. Later steps are not deleted.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.
        objects: By name. Objects with a ``state_dict`` are saved as that dict; others must be tensors, numbers, text, or dicts,
            lists, tuples and sets of these.

    Returns:
        URL of the file.

    Raises:
        OptionError: If an object could only be loaded by running code, or an argument is invalid.
        StorageError: If the file cannot be written; an existing file is left unchanged.
    """
    storage, folder = Storage(storage_options, filesystem), os.fspath(url)
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
    """Load a checkpoint of `save_checkpoint`, or a dict written by ``torch.save``.

    The file must hold tensors and plain values only. It is read with concurrent requests, its checksums are compared, and nothing
    in it runs as code. A remote checkpoint takes twice its size in memory while it is loaded.

    Args:
        url: A file; or a folder, whose checkpoint of the latest step is loaded.
        map_location: Device of the tensors, as in ``torch.load``.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.

    Returns:
        State dicts and values by name, and ``"step"`` if it was given.

    Raises:
        NotFoundError: If there is no checkpoint.
        StateError: If it is damaged, or could only be loaded by running code. There is no fallback to an older one: pass its
            URL.
        StorageError: If it cannot be read.
    """
    storage = Storage(storage_options, filesystem)
    file = find_checkpoints(os.fspath(url), storage)[-1]
    with _open(file, storage) as stream:
        _check_sums(stream, file)
        loaded = _load(stream, map_location, file)
    if not isinstance(loaded, dict):
        raise StateError(
            f"not a checkpoint: the file holds a {type(loaded).__name__}, expected a dict",
            shard=file,
        )
    return cast("dict[str, Any]", loaded)


def read_states(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[State]:
    """Return the states of loaders in a checkpoint, in all checkpoints of a folder, or in a file of JSON.

    Of checkpoints neither tensors nor code are read.

    Args:
        url: A file of `save_checkpoint` (``.pt``), a folder of them, or a ``.json`` file of ``json.dumps(loader.state_dict())``.
        storage_options: For fsspec.

    Raises:
        NotFoundError: If there is no checkpoint.
        StateError: If a file has no state of a loader, or is damaged.
        StorageError: If one cannot be read.
    """
    text, storage = os.fspath(url), Storage(storage_options)
    if text.endswith(".json"):
        return [parse_state(storage.read_bounded(text).decode(errors="replace"))]
    found: list[State] = []
    for file in find_checkpoints(text, storage):
        states = find_states(read_values(file, storage))
        if not states:
            raise StateError("the checkpoint has no state of a loader", shard=file)
        found += states
    return found


def read_values(url: str, storage: Storage) -> Any:
    """Return what a checkpoint holds without the values of its tensors, which are not read: those are on the device "meta"."""
    with storage.open(url, buffer_bytes=_FEW_BYTES) as stream:
        return _load(stream, "meta", url)


def _load(stream: BinaryIO, map_location: Any, url: str) -> Any:
    try:
        return torch.load(stream, map_location=map_location, weights_only=True)
    except Exception as error:
        # The type depends on torch's version; device errors (out of memory, for example) arrive here too.
        raise StateError(
            "the checkpoint cannot be loaded as tensors and plain values; if you trust its source, use torch.load(..., "
            f"weights_only=False), which runs its code ({type(error).__name__}: {_first_line(error)})",
            shard=url,
        ) from error


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
    """Check that `load_checkpoint` could load a value without running code.

    Raises:
        OptionError: If not; names the place of the value.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _PLAIN:
        return
    if kind not in _CONTAINERS:
        raise OptionError(
            f"{path} is of {kind.__module__}.{kind.__qualname__}, which cannot be loaded without running code; "
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
    """File object for ``torch.save``; keeps the original error of a write, which torch replaces."""

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


def find_checkpoints(url: str, storage: Storage) -> list[str]:
    """Return a file itself, or the checkpoints of a folder in the order of their steps, at least one."""
    found = [url] if _is_file(url) else list(_steps(url, storage).values())
    if not found:
        raise NotFoundError("no checkpoint (step-….pt) found; check the URL", shard=url)
    return found


def _remove_older(folder: str, storage: Storage, *, step: int, keep: int) -> None:
    """Delete checkpoints of earlier steps, and their partial files from killed writers."""
    older = [url for other, url in _steps(folder, storage).items() if other < step]
    for url in older[: max(0, len(older) - (keep - 1))]:
        remove(storage, url)
    for file in storage.list_folder(folder)[0]:
        match = _NAME.match(file.url.rpartition("/")[2])
        if match and int(match[1]) < step and is_part(file.url):
            remove(storage, file.url)


def _open(url: str, storage: Storage) -> BinaryIO:
    """Open a local file; read a remote one into memory with concurrent range requests."""
    path = storage.local_path(url)
    if path is not None:
        with translate_errors(url):
            return Path(path).open("rb")
    size = storage.info(url).size
    stream = io.BytesIO()
    if size:
        stream.seek(size - 1)
        stream.write(b"\0")  # allocates the full size at once, so that no later write reallocates

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
    """Verify the checksums of the zip archive, which torch writes but does not check.

    Raises:
        StateError: If one differs, the file is not an archive, or its entries hold more bytes than the file, which torch never writes.
    """
    length = stream.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            # Compressed, or of parts that overlap: a small file could take all memory.
            if size > length:
                raise _damaged_error(f"{size} bytes in a file of {length}", url)
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise _damaged_error("compressed entries", url)
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise _damaged_error(f"{error}", url) from error
    if bad is not None:
        raise _damaged_error(f"the checksum of {bad} is wrong", url)
    stream.seek(0)


def _damaged_error(reason: str, url: str) -> StateError:
    return StateError(
        f"the checkpoint is damaged, truncated, or not written by torch.save ({reason}); load an older one by its URL",
        shard=url,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
