"""Steps on single samples: fields= and lazy= of a dataset, map, map_dict, map_tuple, rename, to_tuple, select."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError, SampleError, get_logger, plural, redact
from shardstream.format import Columns, Sample, TupleColumns
from shardstream.order import derive_key
from shardstream.pipeline.stage import Context, ItemFunction, ItemStage
from shardstream.samples import RefusedError
from shardstream.storage import (
    FieldFile,
    FieldPlaces,
    Storage,
    is_mask,
    keep_masks,
    lost_masks,
    masks_in,
)

if TYPE_CHECKING:
    import numpy as np


_log = get_logger(__name__)

FRAME = ("__key__", "__url__")
"""Names that are in every sample and are no fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFields(ItemStage):
    """Keep some fields of each sample, in the order given, with its key and URL.

    A sample without one of them is a bad sample.

    Args:
        names: Names of fields; of ``"jpg;png"`` the first that the sample has, under its own name.
        left_out: Other fields of the dataset, as far as they are known: they may not be read, and a png is a mask if there is a jpg.
    """

    names: tuple[str, ...]
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    leads_by_column = True

    @property
    def possible(self) -> tuple[str, ...]:
        """All fields that a sample may have, alternatives one by one."""
        return tuple(part for name in self.names for part in name.split(";"))

    def apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        """Return the sample with the fields that are kept."""
        kept = {name: sample[name] for name in FRAME if name in sample}
        for names in self.names:
            name = names if names in sample else find_field(names, sample, "fields=")
            kept[name] = sample[name]
        return keep_masks(sample, kept, *self.left_out)

    def apply_to_columns(self, columns: Columns) -> Columns | None:
        """Return the fields of samples that all have the same; None if they lack one, or lose the photo of a mask."""
        names = self.chosen(columns.columns)
        if names is None:
            return None
        kept = {n: columns.columns[n] for n in (*FRAME, *names)}
        return None if lost_masks(columns.columns, kept, *self.left_out) else Columns(kept)

    def chosen(self, fields: Collection[str]) -> list[str] | None:
        """Return the field that each name stands for; None if there is none for one of them."""
        chosen = [
            next((name for name in names.split(";") if name in fields), None)
            for names in self.names
        ]
        known = [name for name in chosen if name is not None]
        return known if len(known) == len(chosen) else None


def keep_fields(fields: Collection[str], known: Sequence[str] | None) -> KeepFields:
    """Return the stage for the ``fields=`` of a dataset.

    Args:
        fields: As in `check_fields`.
        known: The fields that the dataset has; None if they are unknown.

    Raises:
        OptionError: As in `check_fields`.
    """
    check_fields(fields, known, "the dataset")
    keeps = KeepFields(names=tuple(name for name in dict.fromkeys(fields) if name not in FRAME))
    return replace(keeps, left_out=frozenset(known or ()).difference(keeps.possible))


def check_fields(
    fields: Collection[str],
    known: Sequence[str] | None,
    where: str,
    *,
    alternatives: bool = True,
    option: str = "fields",
) -> None:
    """Check the names of fields that a user asks for; key and URL are always there.

    Args:
        fields: The names.
        known: The fields that there are; None if they are unknown.
        where: Where they are from, for the message.
        alternatives: Whether ``"jpg;png"`` stands for several names, of which one must be known.
        option: The user's option, for the message.

    Raises:
        OptionError: If they are no list of names, or it is known that there is no such field; names those that there are.
    """
    if isinstance(fields, str | Mapping) or not all(isinstance(name, str) for name in fields):
        example = fields if isinstance(fields, str) else "jpg"
        raise OptionError(
            f"{option}= must be a list of names, such as [{example!r}], not {fields!r}"
        )
    if known is None:
        return
    for name in fields:
        names = name.split(";") if alternatives else [name]
        if not {*known, *FRAME}.intersection(names):
            raise OptionError(f"{where} has no field {name!r}; its fields are {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFields(ItemStage):
    """Replace the values of some fields by a `FieldFile`.

    Args:
        names: Names of the fields; a sample may lack some.
        places: Decodes the places that the catalog puts into large samples.
        storage: Storage of the shards.
    """

    names: tuple[str, ...]
    places: FieldPlaces = field(compare=False)
    storage: Storage = field(compare=False, repr=False)

    def apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        """Return the sample with a `FieldFile` for each of the fields that it has."""
        opened = dict(sample)
        for name in self.names:
            if name in sample:
                opened[name] = self._open(sample, name)
        return opened

    def _open(self, sample: Sample, name: str) -> FieldFile:
        data, key = sample[name], sample["__key__"]
        place = self.places.decode(data)
        if place is None:
            file = FieldFile(data)
        else:
            file = FieldFile.in_shard(self.storage, sample["__url__"], key, name, place)
        file.is_mask = is_mask(data)
        return file


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
            before = dict(item) if isinstance(item, dict) and masks_in(item) else {}
            try:
                new = function(item, context.generator(number, purpose)) if rng else function(item)
            except Exception as error:
                add_place(error, step, item)
                raise
            return keep_masks(before, new) if before and isinstance(new, dict) else new

        return apply


@dataclass(frozen=True, slots=True, kw_only=True)
class MapDict(ItemStage):
    """Apply functions to single fields."""

    functions: Mapping[str, Callable[[Any], Any]]

    def apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        """Return the sample with the changed fields."""
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

    def apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        """Return the sample with new names of fields."""
        if not isinstance(sample, dict):
            raise _no_field("", sample, "rename")
        return keep_masks(sample, self._renamed(sample, sample))

    def apply_to_columns(self, columns: Columns) -> Columns | None:
        """Rename the columns; None if one is missing, loses its photo, or is used twice: batches would share its memory."""
        fields = columns.columns
        if not all(fields.keys() & old.split(";") for old in self.names.values()):
            return None
        renamed = self._renamed(fields, dict.fromkeys(fields))
        is_shared = len(set(map(id, renamed.values()))) < len(renamed)
        return None if is_shared or lost_masks(fields, renamed) else Columns(renamed)

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

    def apply(self, sample: Sample, number: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Return the fields as a tuple."""
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
    return SampleError.of(sample, f"{step}: no field {names!r}; the sample has: {field_names}")
