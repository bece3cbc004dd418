"""Names of the fields and keys of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from shardstream.errors import OptionError, SourceError
from shardstream.format import KEY_COLUMN, is_reserved_column
from shardstream.samples import Numbers

Fields = Sequence[str] | Mapping[str, str] | None
"""Columns to read, or field -> column; None for all. The field ``__key__`` is made of the column that is given for it, or of the one of this name;
without one, a key is the file and the number of the row in it."""


def choose_columns(
    names: Sequence[str], fields: Fields, url: str
) -> tuple[dict[str, str], str | None]:
    """Return field -> column, and the column of the keys.

    Args:
        names: The columns that there are.
        fields: The user's choice.
        url: URL of the table, for messages.

    Raises:
        OptionError: If there is no such column, or a field has a reserved name.
        SourceError: If two columns have one name.
    """
    if len({*names}) < len(names):
        raise SourceError("two columns have one name; rename one", shard=url)
    if fields is None:
        fields = [name for name in names if not is_reserved_column(name)]
    chosen = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    key = chosen.pop(KEY_COLUMN, KEY_COLUMN if KEY_COLUMN in names else None)
    for name in [*chosen.values(), *([key] if key else [])]:
        if name not in names:
            raise OptionError(f"no column {name!r}; there are: {', '.join(names)}", shard=url)
    reserved = [name for name in chosen if is_reserved_column(name)]
    if reserved or not chosen:
        problem = f"{reserved[0]!r} is no name of a field" if reserved else "fields= names none"
        raise OptionError(f"{problem}; name columns, or {{field: column}}", shard=url)
    return chosen, key


def keys_of(cells: Sequence[Any] | None, rows: Numbers, file: tuple[str, str]) -> list[str]:
    """Return the keys of rows.

    Args:
        cells: Their values in the column of keys; None if there is none.
        rows: Their numbers in the file, shape (n,).
        file: Its URL, and its name in keys.

    Raises:
        SourceError: If a key is missing, or neither text nor a whole number.
    """
    url, stem = file
    if cells is None:
        return [f"{stem}/{row:08d}" for row in rows.tolist()]
    for row, cell in zip(rows.tolist(), cells, strict=True):
        if cell in (None, "") or isinstance(cell, bool) or not isinstance(cell, str | int):
            raise SourceError(
                f"row {row} has the key {cell!r}: a key is text or a whole number; name another column",
                shard=url,
            )
    return list(map(str, cells))


def names_below(urls: Sequence[str], suffix: str) -> list[str]:
    """Return the paths of files below their common folder, up to a suffix.

    >>> names_below(["s3://b/a/0.mds.zstd", "s3://b/b/0.mds"], ".mds")
    ['a/0', 'b/0']
    """
    folders = [url.split("/")[:-1] for url in urls]
    shared = len([*takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))])
    paths = ["/".join(url.split("/")[shared:]) for url in urls]
    return [path[: path.lower().rindex(suffix)] for path in paths]
