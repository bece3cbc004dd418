"""Select and change samples with the user's functions, while shards are written again."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self, cast

from shardstream.errors import OptionError, SampleError, SourceError, describe_error, plural
from shardstream.format import Sample
from shardstream.packing.encode import encode_sample

SampleFunction = Callable[..., Any]
"""Takes a sample, field -> bytes, with ``__key__`` and ``__url__``; or a list of samples."""

_PROTOCOL = 4  # of pickle, to take values apart
# Of this process: job -> the instance of the class that is its `map`.
_instance_here: dict[str, Callable[..., Any]] = {}
_instance_lock = threading.Lock()
# Python 3.11 parses a class in two threads at once to a SystemError now and then (cpython issue 106905).
_source_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSteps:
    """Changes to samples.

    Args:
        fields: Fields to keep; None keeps all.
        select: Says whether to keep a sample.
        function: Returns the new sample or samples; a class is instantiated once in each process.
        batch_size: Samples of a call of ``function``; None calls it with single samples.
    """

    fields: frozenset[str] | None
    select: SampleFunction | None
    function: SampleFunction | None
    batch_size: int | None

    @classmethod
    def checked(
        cls,
        fields: Sequence[str] | None,
        select: SampleFunction | None,
        function: SampleFunction | None,
        batch_size: int | None,
    ) -> Self:
        """Return the steps that a user describes.

        Raises:
            OptionError: If ``batch_size`` is under 1, or used without a function.
        """
        if batch_size is not None and (batch_size < 1 or function is None):
            raise OptionError(
                "batch_size is the number of samples that map gets at a time, 1 or more"
            )
        named = [fields] if isinstance(fields, str) else fields
        kept = None if named is None else frozenset(named)
        return cls(fields=kept, select=select, function=function, batch_size=batch_size)

    def keeping(self, fields: frozenset[str]) -> SampleSteps:
        """Return steps that keep some more fields."""
        return self if self.fields is None else replace(self, fields=self.fields | fields)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the result, as JSON values: name, source text and held values of the functions, not what they call."""
        return {
            "fields": None if self.fields is None else sorted(self.fields),
            "select": _identity(self.select),
            "map": _identity(self.function),
            "batch_size": self.batch_size,
        }

    def apply(self, samples: Iterable[Sample], job: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield key and encoded fields of the samples that are kept."""
        for sample, url in self._mapped(self._selected(samples), job):
            key = sample.get("__key__")
            if not isinstance(key, str):
                raise SampleError(
                    f"__key__ is text, not {type(key).__name__}; use str(key)", shard=url
                )
            fields = sample
            if self.fields is not None:
                fields = {name: value for name, value in sample.items() if name in self.fields}
            try:
                yield key, encode_sample(fields)
            except SampleError as error:
                raise SampleError(str(error), shard=url, key=key) from error

    def _selected(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        if self.select is None:
            yield from samples
            return
        for sample in samples:
            try:
                is_kept = self.select(sample)
            except Exception as error:
                raise _function_error("select", self.select, error, [sample]) from error
            if is_kept:
                yield sample

    def _mapped(self, samples: Iterator[Sample], job: str) -> Iterator[tuple[Sample, str]]:
        if self.function is None:
            yield from ((sample, str(sample["__url__"])) for sample in samples)
            return
        function = _instance(self.function, job)
        for batch in batched(samples, self.batch_size or 1):
            origins = [(sample["__key__"], str(sample["__url__"])) for sample in batch]
            try:
                made = function(batch) if self.batch_size else [function(batch[0])]
            except Exception as error:
                raise _function_error("map", self.function, error, batch) from error
            if not isinstance(made, list | tuple) or len(made) != len(batch):
                found = len(made) if isinstance(made, list | tuple) else type(made).__name__
                raise SourceError(
                    f"map returned {found} for {plural(len(batch), 'sample')}; with batch_size it returns a list of as many",
                    shard=origins[0][1],
                    key=origins[0][0],
                )
            for sample, (key, url) in zip(made, origins, strict=True):
                if not isinstance(sample, Mapping):
                    raise SourceError(
                        f"map returned {type(sample).__name__}, not a dict of fields; to leave samples out use select",
                        shard=url,
                        key=key,
                    )
                yield {"__key__": key, **sample}, url


def batched(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield lists of ``size`` samples; the last may be shorter."""
    while batch := list(itertools.islice(samples, size)):
        yield batch


def _function_error(
    step: str, function: object, error: Exception, samples: Sequence[Sample]
) -> SourceError:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    last = f" to {samples[-1]['__key__']!r}" if len(samples) > 1 else ""
    return SourceError(
        f"{step}({name}) raised {describe_error(error)}{' (samples' + last + ')' if last else ''}",
        shard=str(samples[0]["__url__"]),
        key=str(samples[0]["__key__"]),
    )


def _identity(function: object) -> str | None:
    """Return name and source hash of a function or class, and a hash of the values that it holds; None for None.

    Values that cannot be pickled make the identity a random one: such a job is neither resumed nor joined by other parts.
    """
    if function is None:
        return None
    try:
        return _described(function)
    except Exception:  # noqa: BLE001  (a class may raise anything when it is taken apart)
        return f"{_named(function)} {uuid.uuid4().hex}"


def _described(function: object) -> str:
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | ModuleType):  # a bound method
        held: object = owner
    elif isinstance(function, type):
        held = None
    elif hasattr(function, "__qualname__"):
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        held = (
            cells,
            getattr(function, "__defaults__", None) or (),
            getattr(function, "__kwdefaults__", None) or {},
        )
        held = held if any(held) else None
    else:
        held = [*function.__reduce_ex__(_PROTOCOL)]  # an instance, or a `functools.partial`
    if held is None:
        return _named(function)
    return f"{_named(function)} {hashlib.sha256(_content(held).encode()).hexdigest()[:16]}"


def _content(value: object) -> str:
    """Return text that is equal for equal values, in all processes."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if type(value) is bytes:
        return hashlib.sha256(value).hexdigest()
    if type(value) in (list, tuple):
        return f"[{','.join(map(_content, cast('list[object]', value)))}]"
    if type(value) is dict:
        return _content([*value.items()])
    if type(value) in (set, frozenset):
        return f"{{{','.join(sorted(map(_content, cast('set[object]', value))))}}}"
    if isinstance(value, type) or inspect.isroutine(value):
        return _described(value)
    reduced = value.__reduce_ex__(_PROTOCOL)
    if isinstance(reduced, str):
        return reduced
    return _content([[*one] if isinstance(one, Iterator) else one for one in reduced])


def _named(function: object) -> str:
    """Return name and source hash of a function, or of the class of an instance."""
    named = function if hasattr(function, "__qualname__") else type(function)
    text = f"{named.__module__}.{named.__qualname__}"
    try:
        with _source_lock:
            source = inspect.getsource(cast("Any", named))
    except (OSError, TypeError):  # defined in an interactive session, or in C
        return text
    return f"{text} {hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _instance(function: SampleFunction | type, job: str) -> Callable[..., Any]:
    """Return a function, or the instance of a class that this process keeps for a job."""
    if not isinstance(function, type):
        return function
    with _instance_lock:
        if job not in _instance_here:
            _instance_here.clear()
            _instance_here[job] = function()
        return _instance_here[job]


def forget_instances() -> None:
    """Drop the instances of classes, which may hold models."""
    _instance_here.clear()
