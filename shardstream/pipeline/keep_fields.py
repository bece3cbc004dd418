"""Keep some fields of each sample, before any other step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from shardstream.errors import OptionError
from shardstream.fetch import MappedSamples
from shardstream.format import Columns, Sample
from shardstream.pipeline.map import find_field
from shardstream.pipeline.stage import Context, ItemFunction, ItemStage

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
        names = self._chosen(columns.columns)
        return None if names is None else Columns({n: columns.columns[n] for n in (*FRAME, *names)})

    def mapped(self, samples: MappedSamples) -> MappedSamples:
        """Return samples in mapped shards with these fields only, whose other bytes are not read; all if they lack one."""
        names = self._chosen(samples.fields)
        return samples if names is None else samples.select(names)

    def _chosen(self, fields: Collection[str]) -> list[str] | None:
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
