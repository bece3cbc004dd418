"""Make windows and batches of the samples of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardstream.codecs import length_of, part_of
from shardstream.errors import SampleError
from shardstream.pipeline.batch import Collate, collated
from shardstream.pipeline.map import find_field
from shardstream.pipeline.row_source import RowPart

_STEP = "windows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Makes windows of a long field: a sample with a part of the field, and ``__start__``, the place of its first element.

    Args:
        fields: Fields of which a window has a part, with one length in each sample.
    """

    fields: tuple[str, ...]
    is_batch: ClassVar[bool] = False
    needs_all: ClassVar[bool] = False

    def length_of(self, sample: Any) -> int | None:
        """Return the length of the fields of a sample.

        Raises:
            SampleError: If it lacks one, they have no parts, or differ.
        """
        lengths = {name: self._length(sample, name) for name in self.fields}
        if len({*lengths.values()}) > 1:
            raise SampleError(
                f"{_STEP}: fields of different lengths, {lengths}, have no common windows",
                shard=sample.get("__url__"),
                key=sample.get("__key__"),
            )
        return next(iter(lengths.values()))

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the window."""
        (part,) = parts
        cut = {find_field(name, part.sample, _STEP) for name in self.fields}
        window = {
            name: part_of(part.sample[name], part.start, part.stop)
            if name in cut
            else part.value(name)
            for name in part.sample
        }
        return window | {"__start__": part.start}

    @staticmethod
    def _length(sample: Any, names: str) -> int:
        name = find_field(names, sample, _STEP)
        try:
            return length_of(sample[name])
        except TypeError as error:
            raise SampleError(
                f"{_STEP}: {error}",
                shard=sample.get("__url__"),
                key=sample.get("__key__"),
                field=name,
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWindows:
    """Makes windows of samples that follow each other: a dict of the list of values of each field; arrays of one shape are stacked.

    ``__key__`` is that of the first sample.
    """

    is_batch: ClassVar[bool] = False
    needs_all: ClassVar[bool] = True

    def length_of(self, sample: Any) -> int | None:
        """Return the samples as they are: None.

        Raises:
            SampleError: If it is no dict.
        """
        if not isinstance(sample, dict):
            raise SampleError(
                f"{_STEP} of samples take dicts, not {type(sample).__name__}: put it before to_tuple"
            )
        return None

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the window."""
        names = dict.fromkeys(name for part in parts for name in part.sample)
        window: dict[str, Any] = {}
        for name in names:
            if name.startswith("__"):
                window[name] = parts[0].sample.get(name)
                continue
            lacking = next((part.sample for part in parts if name not in part.sample), None)
            if lacking is not None:
                raise SampleError(
                    f"{_STEP}: a sample lacks the field {name!r}, which others of its window have",
                    shard=lacking.get("__url__"),
                    key=lacking.get("__key__"),
                    field=name,
                )
            values = [part.value(name) for part in parts]
            shapes = {getattr(value, "shape", None) for value in values}
            is_array = isinstance(values[0], np.ndarray) and len(shapes) == 1
            window[name] = np.stack(values) if is_array else values
        return window


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Makes batches of samples.

    Args:
        collate: Makes a batch of a list of samples.
        name: As in `Map`.
        version: As in `Map`.
    """

    collate: Collate
    name: str | None = None
    version: int | str | None = None
    is_batch: ClassVar[bool] = True
    needs_all: ClassVar[bool] = False

    def length_of(self, sample: Any) -> int | None:  # noqa: ARG002
        """Return None: samples are taken whole."""
        return None

    def make(self, parts: Sequence[RowPart]) -> Any:
        """Return the batch."""
        return collated(self.collate, [part.sample for part in parts])
