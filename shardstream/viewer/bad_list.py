"""Read reports of bad samples, and find their entries by the number of a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardstream.errors import OptionError
from shardstream.pipeline import BadSample
from shardstream.storage import Storage

_NAMES = frozenset(field.name for field in fields(BadSample))
_MAX_LISTED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BadList:
    """The entries of reports of bad samples.

    Args:
        entries: Each with the number of its sample in the dataset, None if it is not in these shards.
    """

    entries: tuple[tuple[int | None, BadSample], ...] = ()

    def by_number(self) -> dict[int, list[BadSample]]:
        """Return number of a sample -> its entries."""
        found: dict[int, list[BadSample]] = {}
        for number, one in self.entries:
            if number is not None:
                found.setdefault(number, []).append(one)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the list that the page shows."""
        rows = [asdict(one) | {"number": number} for number, one in self.entries[:_MAX_LISTED]]
        return {"total": len(self.entries), "rows": rows}


def read_reports(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> list[BadSample]:
    """Return the entries of reports of bad samples, each once.

    Args:
        urls: Paths or URLs of the reports, which ``SkipBudget(report=)`` writes.
        storage_options: ``storage_options`` of fsspec.

    Raises:
        OptionError: If a file is no such report.
        StorageError: If one cannot be read.
    """
    found: dict[BadSample, None] = {}
    for url in urls:
        storage = Storage(storage_options if "://" in url else None)
        found.update(dict.fromkeys(parse_report(storage.read_bounded(url), url)))
    return list(found)


def parse_report(data: bytes, url: str) -> list[BadSample]:
    """Return the entries of a report of bad samples.

    Raises:
        OptionError: If it is no such report.
    """
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not {"error", "message"} <= values.keys() <= _NAMES:
            raise OptionError(
                f"line {number} is no entry of a report of bad samples, as SkipBudget(report=) writes it; give another file",
                shard=url,
            )
        found.append(BadSample(**values))
    return found


def locate(entries: Sequence[BadSample], number_at: Callable[[str, int], int | None]) -> BadList:
    """Find the numbers of bad samples by shard and offset: their numbers may be those of a subset.

    Args:
        entries: Entries of reports.
        number_at: Shard and offset -> number of the sample there.
    """
    found = []
    for one in entries:
        number = None
        if one.shard is not None and one.offset is not None:
            number = number_at(one.shard, one.offset)
        found.append((number, one))
    return BadList(entries=tuple(found))
