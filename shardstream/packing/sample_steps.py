"""Run the steps of a dataset, and the user's functions, on samples that are written again; tell jobs with other functions apart."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import itertools
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, cast

from shardstream.errors import (
    OptionError,
    SampleError,
    ShardStreamError,
    SourceError,
    describe_error,
    plural,
)
from shardstream.format import Sample
from shardstream.packing.encode import encode_sample
from shardstream.packing.sample_range import SampleRange
from shardstream.pipeline import (
    Context,
    Map,
    Run,
    Select,
    SkipTracker,
    SourceRun,
    Stage,
    State,
    function_name,
    open_stages,
)

SampleFunction = Callable[..., Any]
"""Takes a sample, field -> bytes, with ``__key__`` and ``__url__``; or a list of samples."""

_PROTOCOL = 4  # of pickle, to take values apart
_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_IN_C = (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_NAMED = (type, FunctionType, MethodType, *_IN_C)
# Python 3.11 parses a class in two threads at once to a SystemError now and then (cpython issue 106905).
_source_lock = threading.Lock()


def user_stages(
    select: SampleFunction | None, function: SampleFunction | None, batch_size: int | None
) -> tuple[Stage, ...]:
    """Return the stages of the user's functions.

    Args:
        select: Says whether to keep a sample.
        function: Returns the new sample or samples; a class is instantiated once in each process.
        batch_size: Samples of a call of ``function``; None calls it with single samples.

    Raises:
        OptionError: If ``batch_size`` is under 1, or used without a function.
    """
    if batch_size is not None and (batch_size < 1 or function is None):
        raise OptionError("batch_size is the number of samples that map gets at a time, 1 or more")
    stages: list[Stage] = [] if select is None else [Select(predicate=select)]
    if function is not None:
        one = _Instance(function) if isinstance(function, type) else function
        stages.append(Map(function=one) if batch_size is None else _MapLists(one, batch_size))
    return tuple(stages)


class _Instance:
    """Calls an instance of a class, which is made at the first call in each process, for example to load a model."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._made: Any = None
        self._lock = threading.Lock()
        self.__qualname__ = kind.__qualname__

    def __call__(self, *arguments: Any) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._kind()
        return self._made(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._kind,)


@dataclass(frozen=True, slots=True)
class _MapLists:
    """Calls a function with lists of samples; it returns as many."""

    function: SampleFunction
    size: int

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on the samples of a part."""
        return _ListsRun(source, self.function, self.size, context.skips)


class _ListsRun(SourceRun):
    def __init__(
        self, source: Run, function: SampleFunction, size: int, skips: SkipTracker
    ) -> None:
        super().__init__(source)
        self._function, self._size, self._skips = function, size, skips
        self._made: Iterator[tuple[int, Any]] = iter(())
        self._number = -1

    @property
    def number(self) -> int:
        return self._number

    def __next__(self) -> Any:
        found = next(self._made, None)
        if found is None:
            self._made = self._next_list()
            found = next(self._made)
        self._number, item = found
        return item

    def _next_list(self) -> Iterator[tuple[int, Any]]:
        batch = [(self.source.number, one) for one in itertools.islice(self.source, self._size)]
        if not batch:
            return iter(())
        samples = [one for _, one in batch]
        try:
            made = self._function(samples)
        except Exception as error:
            first, last = samples[0], samples[-1]
            error.add_note(
                f"in map({function_name(self._function)}) on samples {first['__key__']!r} to {last['__key__']!r} of {first['__url__']}"
            )
            self._skips.skip_or_raise(error)
            raise
        if not isinstance(made, list | tuple) or len(made) != len(samples):
            found = len(made) if isinstance(made, list | tuple) else type(made).__name__
            raise SourceError(
                f"map returned {found} for {plural(len(samples), 'sample')}; with batch_size it returns a list of as many",
                shard=str(samples[0]["__url__"]),
                key=str(samples[0]["__key__"]),
            )
        return iter([(number, item) for (number, _), item in zip(batch, made, strict=True)])


@dataclass(slots=True)
class _RangeRun:
    """The samples of a range, as the run that stages begin with."""

    rows: Generator[Sample]
    numbers: Iterator[int]
    number: int = -1
    origins: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Number -> key and URL, of the samples that are on their way."""
    is_at_end: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Sample:
        try:
            row = next(self.rows)
        except StopIteration:
            self.is_at_end = True
            raise
        self.number = next(self.numbers)
        self.origins[self.number] = row["__key__"], str(row["__url__"])
        return row

    def state_dict(self) -> State:
        """Return nothing: a part begins at its first sample."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.rows.close()


def encoded_samples(
    samples: SampleRange, context: Context, fields: frozenset[str] | None
) -> Generator[tuple[str, dict[str, bytes]]]:
    """Yield key and encoded fields of the samples that are left after all steps.

    Args:
        samples: The samples.
        context: Seed and epoch of steps with random numbers.
        fields: Fields to keep; None keeps all.

    Raises:
        SourceError: If a function raises an error of its own, or the last step returns no sample.
        SampleError: If a value does not fit its field.
    """
    with closing(_stepped(samples, context)) as stepped:
        for sample, key, url in stepped:
            name = sample.get("__key__", key)
            if not isinstance(name, str):
                raise SampleError(
                    f"__key__ is text, not {type(name).__name__}; use str(key)", shard=url
                )
            kept = sample
            if fields is not None:
                kept = {field: value for field, value in sample.items() if field in fields}
            try:
                yield name, encode_sample(kept)
            except SampleError as error:
                raise SampleError(str(error), shard=url, key=name) from error


def _stepped(
    samples: SampleRange, context: Context
) -> Generator[tuple[Mapping[str, Any], str, str]]:
    """Yield the samples after all steps, with the keys and URLs that they had before."""
    stages, rows = samples.stages.value, samples.rows()
    if not stages:
        with closing(rows):
            yield from ((row, row["__key__"], str(row["__url__"])) for row in rows)
        return
    first = _RangeRun(rows, iter(samples.order.numbers().tolist()))
    with closing(open_stages(stages, first, context)) as run:
        for item in _translated(run):
            key, url = first.origins.pop(run.number)
            if not isinstance(item, Mapping):
                raise SourceError(
                    f"the last step returned {type(item).__name__}, not a dict of fields; to leave samples out use select",
                    shard=url,
                    key=key,
                )
            yield item, key, url
    if not first.is_at_end:
        raise SourceError(
            "a step ended before its last sample; a step that is written has an item for each item",
            shard=samples.samples.url_of(0),
        )


def _translated(run: Run) -> Iterator[Any]:
    """Yield the items of a run; an error of the user's code becomes one that any process can raise."""
    while True:
        try:
            item = next(run)
        except StopIteration:
            return
        except ShardStreamError:
            raise
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            raise SourceError(f"{describe_error(error)}{f' ({notes})' if notes else ''}") from error
        yield item


def identity_of(function: object) -> str | None:
    """Return name and hash of a function, class or step, of its code and the values that it holds; None for None.

    Values that cannot be pickled make the identity a random one: such a job is neither resumed nor joined by other parts.
    """
    if function is None:
        return None
    try:
        return _described(function)
    except Exception:  # noqa: BLE001  (a class may raise anything when it is taken apart)
        return f"{_named(function)} {uuid.uuid4().hex}"


def _described(function: object) -> str:
    held = _held_by(function)
    if held is None:
        return _named(function)
    return f"{_named(function)} {hashlib.sha256(_content(held).encode()).hexdigest()[:16]}"


def _held_by(function: object) -> object:
    """Return what tells functions, classes or instances of one name and one source text apart; None for nothing."""
    if isinstance(function, type):
        return _held_by_class(function)
    if inspect.isfunction(function):
        # Its code: lambdas of one line share their text, and a notebook may have none.
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        held = {
            name: cell.cell_contents
            for name, cell in zip(names, cells, strict=True)
            if name != "__class__"  # of super()
        }
        return function.__code__, held, function.__defaults__, function.__kwdefaults__
    if isinstance(function, MethodType):
        return function.__func__, function.__self__
    if isinstance(function, _IN_C):
        owner = getattr(function, "__self__", None)
        return None if isinstance(owner, type | ModuleType) else owner
    return _reduced(function)  # an instance, or a `functools.partial`


def _held_by_class(kind: type) -> object:
    """Return the methods and plain values of a class whose source text is missing, or is shared by classes of several calls."""
    if "<locals>" not in kind.__qualname__ and _source_hash(kind) is not None:
        return None
    found: dict[str, object] = {"bases": kind.__bases__}
    for name, value in sorted(vars(kind).items()):
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(inner, property):
            inner = (inner.fget, inner.fset)
        is_plain = isinstance(inner, _PLAIN) and not name.startswith("__")
        if is_plain or isinstance(inner, FunctionType):
            found[name] = inner
    return found


def _reduced(value: object) -> object:
    """Take an instance apart as pickle does."""
    reduce = copyreg.dispatch_table.get(type(value))  # compiled patterns of `re`, for example
    reduced = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        # A name in a module, which `...` lacks; `functools.cache` returns that of its function.
        module = getattr(value, "__module__", None)
        return module, reduced, getattr(value, "__wrapped__", None)
    return [[*one] if isinstance(one, Iterator) else one for one in reduced]


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
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, CodeType):
        parts = [value.co_code, value.co_consts, value.co_names, value.co_varnames]
        return _content([*parts, value.co_exceptiontable])
    return _described(value) if isinstance(value, _NAMED) else _content(_reduced(value))


def _named(function: object) -> str:
    """Return name and source hash of a function, or of the class of an instance."""
    named: Any = function if isinstance(function, _NAMED) else type(function)
    text = f"{named.__module__}.{named.__qualname__}"
    found = _source_hash(named)
    return text if found is None else f"{text} {found}"


def _source_hash(named: object) -> str | None:
    """Return a hash of the source text; None in an interactive session, or if it is written in C."""
    try:
        with _source_lock:
            source = inspect.getsource(cast("Any", named))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
