"""Open fields that are read where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardstream.errors import OptionError
from shardstream.format import Sample
from shardstream.pipeline.keep_fields import check_fields, field_names, keep_fields
from shardstream.pipeline.stage import Context, ItemFunction, ItemStage, Stage
from shardstream.storage import FieldFile, FieldPlaces, Storage


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
    verify: object,
) -> tuple[list[Stage], FieldPlaces | None]:
    """Return the stages for ``fields=`` and ``lazy=`` of a dataset, and the places of lazy fields; None if there are none.

    Args:
        fields: Names of fields; None for all.
        lazy: Names of fields that are not read.
        known: The fields that the dataset has; None if they are unknown.
        storage: Storage of the shards.
        verify: Its ``verify=``.

    Raises:
        OptionError: If one is no list of names, there is no such field, or the options exclude each other.
    """
    stages: list[Stage] = [] if fields is None else [keep_fields(fields, known)]
    if not lazy:
        return stages, None
    check_fields(lazy, known, "the dataset", alternatives=False, option="lazy")
    kept = field_names(fields)
    if left_out := [name for name in lazy if kept and name not in kept]:
        raise OptionError(f"lazy= names {left_out[0]!r}, which fields= leaves out")
    if verify is not None:
        raise OptionError(
            "verify= compares all bytes of the shards, which lazy= does not read; give one of them"
        )
    places = FieldPlaces(lazy)
    opens = OpenFields(names=tuple(dict.fromkeys(lazy)), places=places, storage=storage)
    return [*stages, opens], places
