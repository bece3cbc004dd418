"""Steps on single samples: map, map_dict, map_tuple, rename, to_tuple, select."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError, SampleError, plural, redact
from shardstream.format import Columns, Sample, TupleColumns
from shardstream.order import derive_key
from shardstream.pipeline.runner import ItemFunction, ItemStage
from shardstream.pipeline.stage import Context
from shardstream.samples import RefusedError

if TYPE_CHECKING:
    import numpy as np


def name_of(function: object) -> str:
    """Return the name of a function for messages."""
    inner = inspect.unwrap(function) if callable(function) else function
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__


def add_place(error: Exception, step: str, item: object) -> None:
    """Add a note with the step and the sample to an error of user code."""
    where = f"in {step}"
    if isinstance(item, dict) and "__key__" in item:
        where += f" on sample {item['__key__']!r} of {redact(str(item.get('__url__')))}"
    error.add_note(where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Map(ItemStage):
    """Apply a function to each item.

    Args:
        function: ``function(item)``, or ``function(item, generator)`` with ``rng``.
        rng: Pass a `numpy.random.Generator` keyed by (seed, epoch, sample number).
        purpose: Number that separates the generators of several steps of one chain.
        threads: As in `ItemStage`.
        name: Name of the function in states, instead of its own name.
        version: Version of the function; states with another version are refused.
    """

    function: Callable[..., Any]
    rng: bool = False
    purpose: int = 0
    threads: int = 0
    name: str | None = None
    version: int | str | None = None

    def bind(self, context: Context) -> ItemFunction:
        """Return the function for one epoch."""
        function, purpose, rng = self.function, derive_key(self.purpose), self.rng
        step = f"map({name_of(function)})"

        def apply(item: Any, number: int) -> Any:
            try:
                return function(item, context.generator(number, purpose)) if rng else function(item)
            except Exception as error:
                add_place(error, step, item)
                raise

        return apply


@dataclass(frozen=True, slots=True, kw_only=True)
class MapDict(ItemStage):
    """Apply functions to single fields."""

    functions: Mapping[str, Callable[[Any], Any]]

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        return self._apply

    def _apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        if not isinstance(sample, dict):
            raise _no_field("", sample, "map_dict")
        changed = dict(sample)
        for name, function in self.functions.items():
            if name not in changed:
                raise _no_field(name, sample, "map_dict")
            try:
                changed[name] = function(sample[name])
            except Exception as error:
                add_place(error, f"map_dict({name}={name_of(function)})", sample)
                raise
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTuple(ItemStage):
    """Apply the first function to the first element, and so on; further elements stay as they are.

    With ``rng`` the functions get one generator, in order; ``purpose`` is as in `Map`.
    """

    functions: tuple[Callable[..., Any] | None, ...]
    rng: bool = False
    purpose: int = 0

    def bind(self, context: Context) -> ItemFunction:
        """Return the function for one epoch."""
        if not self.rng:
            return lambda item, _: self._apply(item)
        purpose = derive_key(self.purpose)
        return lambda item, number: self._apply(item, context.generator(number, purpose))

    def _apply(self, item: Any, *generator: np.random.Generator) -> tuple[Any, ...]:
        if not isinstance(item, tuple) or len(item) < len(self.functions):
            raise OptionError(
                f"map_tuple with {plural(len(self.functions), 'function')} got {type(item).__name__}; put to_tuple before it"
            )
        changed = list(item)
        for place, function in enumerate(self.functions):
            if function is None:
                continue
            try:
                changed[place] = function(item[place], *generator)
            except Exception as error:
                add_place(error, f"map_tuple({name_of(function)}), element {place}", item)
                raise
        return like_tuple(item, changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename(ItemStage):
    """Rename fields; of several old names (``"jpg;png"``) the first that exists is used.

    Args:
        names: New name -> old name, or several joined with ``;``.
        keep: Keep all other fields.
    """

    names: Mapping[str, str]
    keep: bool = True

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        return self._apply

    def _apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        if not isinstance(sample, dict):
            raise _no_field("", sample, "rename")
        return self._renamed(sample, sample)

    def apply_to_columns(self, columns: Columns) -> Columns | None:
        """Rename the columns; None if one is missing, or used twice: batches would share its memory."""
        fields = columns.columns
        if not all(fields.keys() & old.split(";") for old in self.names.values()):
            return None
        renamed = self._renamed(fields, dict.fromkeys(fields))
        return Columns(renamed) if len(set(map(id, renamed.values()))) == len(renamed) else None

    def _renamed(self, fields: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        taken = {new: find_field(old, names, "rename") for new, old in self.names.items()}
        used = set(taken.values())
        kept = {
            name: value
            for name, value in fields.items()
            if name.startswith("__") or (self.keep and name not in used)
        }
        return kept | {new: fields[old] for new, old in taken.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTuple(ItemStage):
    """Return some fields of each sample as a tuple; ``"jpg;png"`` takes the first that exists."""

    names: tuple[str, ...]

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        return self._apply

    def apply_to_columns(self, columns: Columns) -> TupleColumns | None:
        """Return the columns of these fields; None if one is missing, or used twice: batches would share its memory."""
        fields = columns.columns
        chosen = [
            next((one for one in (names, *names.split(";")) if one in fields), None)
            for names in self.names
        ]
        if not chosen or None in chosen or len(set(chosen)) < len(chosen):
            return None
        return TupleColumns([fields[name] for name in chosen if name is not None])

    def _apply(self, sample: Sample, number: int) -> tuple[Any, ...]:  # noqa: ARG002
        if not isinstance(sample, dict):
            raise _no_field("", sample, "to_tuple")
        return tuple(
            [
                sample[name] if name in sample else sample[find_field(name, sample, "to_tuple")]
                for name in self.names
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(ItemStage):
    """Refuse the items that a predicate does not accept; name and version as in `Map`.

    Raises:
        OptionError: If the predicate returns objects that are always true: a class, or a function with ``yield`` or ``async``.
    """

    predicate: Callable[[Any], bool]
    name: str | None = None
    version: int | str | None = None

    def __post_init__(self) -> None:
        predicate = self.predicate
        if (
            (isinstance(predicate, type) and predicate is not bool)
            or inspect.isgeneratorfunction(predicate)
            or inspect.iscoroutinefunction(predicate)
        ):
            raise OptionError(
                f"select takes a function that returns True or False; what {name_of(predicate)} returns always counts as true, so that all items "
                "would be kept",
                remedy="pass a plain function, or an instance of the class",
            )

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        predicate, step = self.predicate, f"select({name_of(self.predicate)})"

        def apply(item: Any, number: int) -> Any:  # noqa: ARG001  (an `ItemFunction`)
            try:
                is_accepted = bool(predicate(item))
            except Exception as error:
                add_place(error, step, item)
                raise
            if not is_accepted:
                raise RefusedError(step)
            return item

        return apply


def like_tuple(model: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values as a tuple, of the named tuple type of ``model`` if it has one."""
    make = getattr(type(model), "_make", tuple)
    tuple_value: tuple[Any, ...] = make(values)
    return tuple_value


def find_field(names: str, sample: Any, step: str) -> str:
    """Return the first field of ``"jpg;png"`` that a sample has.

    Raises:
        SampleError: If it has none of them.
    """
    for name in names.split(";") if isinstance(sample, dict) else ():
        if name in sample:
            return name
    raise _no_field(names, sample, step)


def _no_field(names: str, sample: Any, step: str) -> SampleError:
    if not isinstance(sample, dict):
        return SampleError(
            f"{step} works on samples, not on {type(sample).__name__}: put it before to_tuple and batched"
        )
    field_names = ", ".join(name for name in sample if not name.startswith("__"))
    return SampleError(
        f"{step}: no field {names!r}; the sample has: {field_names}",
        shard=sample.get("__url__"),
        key=sample.get("__key__"),
    )
