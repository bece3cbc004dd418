"""Find the files that a glob matches, by listings.

The globs of the S3 clients take a file for a folder, and leave it out, if anything lies under "its name/".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fsspec.utils import glob_translate

from shardstream.errors import AccessDeniedError, NotFoundError, OptionError
from shardstream.storage.urls import WEB, has_glob_signs, simplify_glob

if TYPE_CHECKING:
    from shardstream.storage.store import FileInfo, Storage


def is_glob(url: str, storage: Storage) -> bool:
    """Return whether a URL is a glob; not if there is a file or folder of exactly this name."""
    is_web = url.startswith(WEB)
    return has_glob_signs(url) and (is_web or not storage.exists(url))


def matching_files(pattern: str, storage: Storage) -> list[FileInfo]:
    """Return the files that a glob matches, sorted by name.

    A folder in it is meant literally if there is one of this name, as ``out[v1]``.

    Raises:
        OptionError: If it would take too long (see `simplify_glob`), or its "**" is not a whole folder.
        StorageError: If a folder cannot be listed.
        NotFoundError: If the folder before its first sign is missing.
    """
    pattern = simplify_glob(pattern)
    storage.resolve(pattern)  # refuses commands and unknown protocols
    start = pattern.rfind("://") + 3 if "://" in pattern else 0
    try:
        found = list(_matches(pattern[:start], pattern[start:].split("/"), storage))
    except NotFoundError as error:
        message = f"the folder of this pattern is missing: {error.what}"
        raise NotFoundError(message, shard=pattern) from error
    return sorted(found, key=lambda file: file.url)


def relative_paths(root: str, storage: Storage) -> Callable[[FileInfo], str]:
    """Return a function that returns the path of a file under a folder."""
    path = storage.local_path(root) or storage.resolve(root)[1]
    start = len(path.rstrip("/")) + 1
    return lambda file: (storage.local_path(file.url) or storage.resolve(file.url)[1])[start:]


def _matches(folder: str, parts: Sequence[str], storage: Storage) -> Iterator[FileInfo]:
    """Yield the files in a folder ("" or with a slash at its end) whose paths match the parts of a glob."""
    for number, part in enumerate(parts[:-1]):
        if not has_glob_signs(part) or (part.strip("*") and storage.exists(f"{folder}{part}")):
            folder += f"{part}/"
            continue
        parts = parts[number:]
        break
    else:
        parts = parts[-1:]
    wanted = _translate("/".join(parts))
    if "**" in parts:
        path_of = relative_paths(folder or ".", storage)
        yield from (file for file in storage.find(folder or ".") if wanted(path_of(file)))
        return
    files, names = storage.list_folder(folder or ".")
    if len(parts) == 1:
        yield from (file for file in files if wanted(file.url.rpartition("/")[2]))
        return
    is_match = _translate(parts[0])
    for name in names:
        if is_match(name):
            with suppress(NotFoundError):  # there may be no folder of the following names in it
                yield from _matches(f"{folder}{name}/", parts[1:], storage)


def _translate(pattern: str) -> Callable[[str], object]:
    try:
        return re.compile(glob_translate(pattern)).match
    except ValueError as error:
        raise OptionError(
            f"the pattern {pattern!r} is no glob: {error}; '**' stands for folders, as in '**/*.tar'"
        ) from error


@contextmanager
def explain_web_folder(url: str) -> Iterator[None]:
    """Say how the shards of a web server that does not list them can be named."""
    try:
        yield
    except (NotFoundError, AccessDeniedError) as error:
        if not url.startswith(WEB):
            raise
        raise type(error)(
            "this folder has no index.json, and the web server does not list it (or refuses access)",
            remedy="name the shards by a pattern such as {000000..000099}.tar, "
            "or put an index.json there with 'shardstream index'",
            shard=url,
        ) from error
