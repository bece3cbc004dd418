"""Fields of a dataset that are kept (``fields=``), and fields that are read where they are used (``lazy=``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from shardstream.errors import OptionError
from shardstream.format import Columns, Sample
from shardstream.pipeline.map import find_field
from shardstream.pipeline.runner import ItemFunction, ItemStage
from shardstream.pipeline.stage import Context, Stage
from shardstream.storage import FieldFile, FieldPlaces, Storage

FRAME = ("__key__", "__url__")
"""Names that are in every sample and are no fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFields(ItemStage):
    """Keep some fields of each sample, in the order given, with its key and URL.

    A sample without one of them is a bad sample.

    Args:
        names: Names of fields; of ``"jpg;png"`` the first that the sample has, under its own name.
        left_out: Other fields of the dataset, as far as they are known: `Decode` takes a png for a mask if there is a jpg, too.
    """

    names: tuple[str, ...]
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    leads_by_column = True

    @property
    def possible(self) -> tuple[str, ...]:
        """All fields that a sample may have, alternatives one by one."""
        return tuple(part for name in self.names for part in name.split(";"))

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        return self._apply

    def _apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        kept = {name: sample[name] for name in FRAME if name in sample}
        for names in self.names:
            name = names if names in sample else find_field(names, sample, "fields=")
            kept[name] = sample[name]
        return kept

    def apply_to_columns(self, columns: Columns) -> Columns | None:
        """Return the fields of samples that all have the same; None if they lack one."""
        names = self.chosen(columns.columns)
        return None if names is None else Columns({n: columns.columns[n] for n in (*FRAME, *names)})

    def chosen(self, fields: Collection[str]) -> list[str] | None:
        """Return the field that each name stands for; None if there is none for one of them."""
        chosen = [
            next((name for name in names.split(";") if name in fields), None)
            for names in self.names
        ]
        known = [name for name in chosen if name is not None]
        return known if len(known) == len(chosen) else None


def keep_fields(fields: Sequence[str], known: Sequence[str] | None) -> KeepFields:
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


def field_names(fields: Sequence[str] | None) -> tuple[str, ...]:
    """Return all names of ``fields=``, alternatives one by one; none for all fields."""
    if fields is None:
        return ()
    check_fields(fields, None, "the dataset")
    return KeepFields(names=tuple(fields)).possible


def check_fields(
    fields: Sequence[str],
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
    if isinstance(fields, str) or not all(isinstance(name, str) for name in fields):
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

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        """Return the function for one epoch."""
        return self._apply

    def _apply(self, sample: Sample, number: int) -> Sample:  # noqa: ARG002
        opened = dict(sample)
        for name in self.names:
            if name in sample:
                opened[name] = self._open(sample, name)
        return opened

    def _open(self, sample: Sample, name: str) -> FieldFile:
        place = self.places.decode(sample[name])
        if place is None:
            return FieldFile(sample[name])
        return FieldFile.in_shard(self.storage, sample["__url__"], sample["__key__"], name, place)


def first_stages(
    fields: Sequence[str] | None,
    lazy: Sequence[str],
    known: Sequence[str] | None,
    storage: Storage,
) -> tuple[list[Stage], FieldPlaces | None]:
    """Return the stages for ``fields=`` and ``lazy=`` of a dataset, and the places of lazy fields; None if there are none.

    Args:
        fields: Names of fields; None for all.
        lazy: Names of fields that are not read.
        known: The fields that the dataset has; None if they are unknown.
        storage: Storage of the shards.

    Raises:
        OptionError: If one is no list of names, or there is no such field.
    """
    stages: list[Stage] = [] if fields is None else [keep_fields(fields, known)]
    if not lazy:
        return stages, None
    check_fields(lazy, known, "the dataset", alternatives=False, option="lazy")
    kept = field_names(fields)
    if left_out := [name for name in lazy if kept and name not in kept]:
        raise OptionError(f"lazy= names {left_out[0]!r}, which fields= leaves out")
    places = FieldPlaces(lazy)
    opens = OpenFields(names=tuple(lazy), places=places, storage=storage)
    return [*stages, opens], places
