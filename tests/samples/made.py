"""Samples of every kind beside what they must be, by tarfile and plain Python."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shardstream as ss
from shardstream.catalog import ObjectCatalog, ShardCatalog
from shardstream.samples import Concat, Samples, Subset, join_samples, open_part
from shardstream.storage import Storage, list_files, locate_shards

Row = dict[str, object]


class Made(NamedTuple):
    """Samples, and the fields and ``__key__`` of each."""

    samples: Samples
    rows: list[Row]


def open_shards(folder: str) -> Samples:
    storage = Storage()
    return ShardCatalog(locate_shards(folder, storage), storage)


def read_tars(folder: str | Path) -> list[Row]:
    """Return the samples of the tars of a local folder, by tarfile."""
    rows: dict[str, Row] = {}
    for path in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                body = tar.extractfile(member)
                assert body is not None
                rows.setdefault(key, {"__key__": key})[field] = body.read()
    return list(rows.values())


def write_shards(
    folder: str | Path, keys: Sequence[int], field: str, *, size: int = 1, has_cls: bool = True
) -> str:
    """Write a sample for each key, with its number in ``field`` and in the columns; ``cls`` is its key modulo 3."""
    columns = "__key__,cls" if has_cls else "__key__"
    with ss.ShardWriter(folder, max_samples=5, columns=columns) as writer:
        for key in keys:
            sample: dict[str, Any] = {"__key__": f"{key:04d}", field: b"%04d" % key * size}
            writer.write(sample | ({"cls": key % 3} if has_cls else {}))
    return str(folder)


def open_files(folder: str) -> Samples:
    storage = Storage()
    return ObjectCatalog(folder, list_files(folder, storage), storage)


def subset(made: Made, numbers: Sequence[int]) -> Made:
    chosen = Subset(made.samples, np.array(numbers, dtype=np.int64))
    return Made(chosen, [made.rows[n] for n in numbers])


def concat(*made: Made) -> Made:
    return Made(Concat([one.samples for one in made]), [row for one in made for row in one.rows])


def join(first: Made, *others: Made, missing: Any = "error") -> Made:
    parts = [open_part(one.samples, None) for one in others]
    joined = join_samples(first.samples, parts, "key", missing)
    by_key = [{row["__key__"]: row for row in one.rows} for one in others]
    rows = []
    for row in first.rows:
        found = [one.get(row["__key__"]) for one in by_key]
        if None not in found or missing == "keep":
            rows.append(row | {name: value for one in found for name, value in (one or {}).items()})
    return Made(joined, rows)
