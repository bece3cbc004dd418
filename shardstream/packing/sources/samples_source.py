"""Make records of samples from Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from shardstream.errors import SampleError
from shardstream.format import is_image_field
from shardstream.packing.encode import encode_field
from shardstream.packing.sources.source import Record, Source, named


class SamplesSource(Source):
    """Samples from Python: a list of dicts, or any other iterable.

    Args:
        samples: Mappings as `ShardWriter.write` takes them; without ``__key__`` the key is the number.
        name: Name of the source, for messages.
        fingerprint: Any text that identifies these samples in this order; a stopped pack is resumed if the text is equal. By default
            the attribute of this name of ``samples``, if it has one.
    """

    def __init__(
        self,
        samples: Iterable[Mapping[str, Any]],
        *,
        name: str = "samples",
        fingerprint: str | None = None,
    ) -> None:
        self.name = name
        self.is_repeatable = isinstance(samples, Sequence)
        self._samples = samples
        own = getattr(samples, "fingerprint", None)
        self._fingerprint = fingerprint or (own if isinstance(own, str) else None)

    @property
    def length(self) -> int | None:
        """Number of samples, if the iterable has a length."""
        samples: Any = self._samples
        return len(samples) if hasattr(samples, "__len__") else None

    @property
    def fingerprint(self) -> str | None:
        """Text that identifies the samples, if there is one."""
        return self._fingerprint

    @property
    def named_classes(self) -> tuple[str, ...] | None:
        """Names of the class numbers that the samples have, where they say so, as a `ShardDataset` does."""
        found = getattr(self._samples, "classes", None)
        return found if isinstance(found, tuple) else None

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return itertools.starmap(
            self._record, itertools.islice(enumerate(self._samples), first, None)
        )

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers, of a sequence (see `in_any_order`)."""
        samples: Any = self._samples
        return (self._record(number, samples[number]) for number in numbers)

    def in_any_order(self) -> Source:
        """Return this source if its samples are a sequence, else a copy in a temporary file."""
        return self if isinstance(self._samples, Sequence) else super().in_any_order()

    def _record(self, index: int, sample: Mapping[str, Any]) -> Record:
        where = f"{self.name}, sample {index}"
        key = sample.get("__key__", f"{self.number_prefix}{index:08d}")
        if not isinstance(key, str):
            raise SampleError(f"__key__ of {where} is {key!r}, not text; use str(key)")
        try:
            fields = {
                name: _as_it_is_now(name, value)
                for name, value in sample.items()
                if not (name.startswith("__") and name.endswith("__"))
            }
        except SampleError as error:
            return Record(key, {}, where, named(error, where))
        return Record(key, fields, where)


def _as_it_is_now(field: str, value: object) -> object:
    """Encode a value, since its owner may fill the same buffer with the next sample; pixels are copied: processes may encode them."""
    if is_image_field(field) and (type(value) is Image.Image or isinstance(value, np.ndarray)):
        return value.copy()
    return encode_field(field, value)
