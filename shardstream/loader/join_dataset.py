"""Join the samples of several datasets to one sample each (``ss.join``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from shardstream.catalog import (
    Catalog,
    JoinCatalog,
    JoinPart,
    Numbers,
    SubsetCatalog,
    match_keys,
    open_table,
    read_column,
)
from shardstream.errors import OptionError, get_logger, plural
from shardstream.format import KEY_COLUMN
from shardstream.loader.dataset import ShardDataset, StreamDataset
from shardstream.loader.epoch_counter import EpochCounter
from shardstream.pipeline import CatalogSource, Pipeline, WeightedSource
from shardstream.storage import Storage

_log = get_logger(__name__)

OtherDataset = (
    ShardDataset | str | os.PathLike[str] | Mapping[str, Sequence[str] | Mapping[str, str] | None]
)
"""A dataset, or its URL, or its URL -> the fields to take (None for all); of a table field -> column."""
JoinBy = Literal["auto", "key", "position"]
JoinMissing = Literal["error", "drop", "keep"] | Mapping[str, bytes]
_POLICIES = ("error", "drop", "keep")


def join(
    first: ShardDataset | str | os.PathLike[str],
    *others: OtherDataset,
    by: JoinBy = "auto",
    missing: JoinMissing = "error",
    storage_options: dict[str, Any] | None = None,
) -> JoinDataset:
    """Join datasets with the same keys: each sample gets the fields of the samples of the same key in the others.

    The first dataset decides: its samples, their order, ``shuffle``, ``seed``, ``subset=`` and all other options of reading. Length, splits,
    states and steps are those of a `ShardDataset`. Bytes of each dataset are read by range requests of their own, ahead of their use.
    Samples of the others whose key the first does not have are not read.

        images = ss.ShardDataset("s3://bucket/images/", shuffle=True)
        dataset = ss.join(images, "s3://bucket/captions/", {"s3://bucket/embeddings/": ["npy"]})

    Args:
        first: The dataset that decides, without steps; or its URL.
        others: Datasets whose fields are added, without steps; their URLs; or ``{url: fields}`` to add some fields only. A field that two of them have is an error at its sample, and if their
            manifests list fields, when they are opened.
        by: "key" joins by the keys in the columns that ``pack`` and ``index`` write (``shardstream index URL --columns __key__``). "position" joins
            sample i with sample i, for datasets of the same length and order; the keys of each sample are compared when it is read, and
            different ones are an error. "auto" takes the keys where all datasets have columns, else the position.
        missing: What happens to a sample whose key another dataset lacks: "error" when the join is opened; "drop" leaves it out, with a
            warning in the log that counts them; "keep" leaves its fields out; or fields as bytes (``{"txt": b""}``) that it gets instead.
        storage_options: For fsspec, to open URLs.

    Raises:
        OptionError: If a dataset has steps or cannot be read by number, keys are missing, or fields are in two datasets.
        StorageError: If a dataset or its columns cannot be read.
    """
    if not others:
        raise OptionError("join takes two datasets or more")
    if by not in ("auto", "key", "position"):
        raise OptionError(f"by must be 'auto', 'key' or 'position', not {by!r}")
    if not isinstance(missing, Mapping) and missing not in _POLICIES:
        raise OptionError(f"missing must be 'error', 'drop', 'keep' or fields, not {missing!r}")
    if not isinstance(first, ShardDataset):
        _check_url(first)
        first = ShardDataset(first, storage_options=storage_options)
    source = _source_of(first)
    opened = [_open(other, storage_options) for other in others]
    _check_fields(source.catalog, opened)
    _check_defaults(missing, opened)
    catalog = _join(source.catalog, opened, by, missing)
    joined = Pipeline(source=replace(source, catalog=catalog), on_error=first.pipeline.on_error)
    return JoinDataset(joined, first)


class JoinDataset(StreamDataset):
    """The dataset that `join` returns."""

    def __init__(self, pipeline: Pipeline, first: ShardDataset) -> None:
        super().__init__(pipeline, first.given_placement)
        self._first = first
        self._epochs = EpochCounter(first.chosen_epoch)
        self.follow_epoch(first)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes of the first dataset, as `ShardDataset.classes`."""
        return self._first.classes


def _source_of(dataset: ShardDataset) -> CatalogSource:
    source = dataset.pipeline.source
    if dataset.pipeline.stages:
        raise OptionError(
            f"a dataset with steps ({', '.join(dataset.pipeline.steps)}) cannot be joined; join first, then add the steps, and give fields to join: {{url: [field, ...]}}"
        )
    if isinstance(source, WeightedSource):
        raise OptionError(
            "a dataset with weights= cannot be joined; ss.reshard(add=) writes a joined dataset that can be weighted"
        )
    if not isinstance(source, CatalogSource):
        raise OptionError(
            "only shards with an index can be joined; run 'shardstream index' on their folder",
            shard=source.place()[1],
        )
    return source


def _check_url(value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise OptionError(
            f"join takes ShardDatasets and URLs, not a {type(value).__name__}; ss.join(a, b, c) joins several at once"
        )


def _open(other: OtherDataset, storage_options: dict[str, Any] | None) -> JoinPart:
    fields: Sequence[str] | Mapping[str, str] | None = None
    if isinstance(other, Mapping):
        if len(other) != 1 or any(isinstance(one, str) for one in other.values()):
            raise OptionError(
                f"give each dataset with fields as {{url: [field, ...]}}, not {dict(other)!r}"
            )
        [(other, fields)] = other.items()
    if not isinstance(other, ShardDataset):
        _check_url(other)
        url = os.fspath(other)
        if url.lower().endswith(".parquet"):
            columns = fields if isinstance(fields, Mapping) else {one: one for one in fields or ()}
            return JoinPart(catalog=open_table(url, columns, Storage(storage_options)), defaults={})
        other = ShardDataset(url, storage_options=storage_options)
    catalog = _source_of(other).catalog
    known = catalog.fields
    unknown = [] if known is None else sorted(set(fields or ()) - set(known))
    if unknown:
        raise OptionError(
            f"no sample has the field {unknown[0]!r}, but {', '.join(known or ())}",
            shard=catalog.url_of(0),
        )
    return JoinPart(catalog=catalog, fields=None if fields is None else tuple(fields), defaults={})


def _check_fields(first: Catalog, parts: Sequence[JoinPart]) -> None:
    """Refuse fields that two datasets have, where the manifests list them."""
    found: dict[str, str] = {}
    for catalog, chosen in ((first, None), *((part.catalog, part.fields) for part in parts)):
        for field in (catalog.fields if chosen is None else chosen) or ():
            url = catalog.url_of(0)
            if field in found:
                raise OptionError(
                    f"two datasets have the field {field!r}: {found[field]} and {url}; choose the fields of each: "
                    "ss.join(first, {url: [field, ...]})"
                )
            found[field] = url


def _check_defaults(missing: JoinMissing, parts: Sequence[JoinPart]) -> None:
    """Refuse defaults of fields that no joined dataset has."""
    found = [part.catalog.fields if part.fields is None else part.fields for part in parts]
    known = {field for fields in found for field in fields or ()}
    unknown = sorted(set(missing) - known) if isinstance(missing, Mapping) else []
    if unknown and None not in found:
        raise OptionError(
            f"missing= has the field {unknown[0]!r}, which no joined dataset has; they have {', '.join(sorted(known))}"
        )


def _join(
    first: Catalog, parts: Sequence[JoinPart], by: JoinBy, missing: JoinMissing
) -> JoinCatalog:
    catalogs = [first, *(part.catalog for part in parts)]
    keys: list[Any] | None = None
    if by != "position":
        keys = [read_column(catalog, KEY_COLUMN) for catalog in catalogs]
    lacking = [] if keys is None else [n for n, found in enumerate(keys) if found is None]
    if by == "key" and lacking:
        raise OptionError(
            "this dataset has no columns to join by; run 'shardstream index --columns __key__' on its folder",
            shard=catalogs[lacking[0]].url_of(0),
        )
    if keys is None or lacking:
        _check_lengths(catalogs)
        return JoinCatalog(first, parts)
    found = [
        match_keys(keys[0], theirs, catalog.url_of(0))
        for theirs, catalog in zip(keys[1:], catalogs[1:], strict=True)
    ]
    absent = np.any([numbers < 0 for numbers in found], axis=0)
    if missing == "error":
        _refuse_missing(keys[0], found, catalogs)
    if missing == "drop" and absent.any():
        _log.warning(
            "%s of %s left out: another dataset of the join lacks the key, the first %r",
            plural(int(absent.sum()), "sample"), first.url_of(0), keys[0][int(absent.argmax())].as_py(),
        )  # fmt: skip
        kept = np.flatnonzero(~absent)
        if not len(kept):
            raise OptionError("no key is in all datasets of the join", shard=first.url_of(0))
        first, found = SubsetCatalog(first, kept), [numbers[kept] for numbers in found]
    defaults = missing if isinstance(missing, Mapping) else {}
    return JoinCatalog(
        first,
        [
            replace(part, numbers=_compact(numbers), defaults=_defaults_of(part, defaults))
            for part, numbers in zip(parts, found, strict=True)
        ],
    )


def _compact(numbers: Numbers) -> Numbers | None:
    """Return None for the numbers 0, 1, 2, ...: the datasets have one order."""
    return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers


def _defaults_of(part: JoinPart, defaults: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those of the fields that a part has."""
    fields = part.catalog.fields if part.fields is None else part.fields
    return {name: value for name, value in defaults.items() if fields is None or name in fields}


def _check_lengths(catalogs: Sequence[Catalog]) -> None:
    for catalog in catalogs[1:]:
        if len(catalog) != len(catalogs[0]):
            raise OptionError(
                f"{plural(len(catalogs[0]), 'sample')} cannot be joined by position with {plural(len(catalog), 'sample')}; "
                "run 'shardstream index --columns __key__' on each dataset, to join by key",
                shard=catalog.url_of(0),
            )


def _refuse_missing(keys: Any, found: Sequence[Numbers], catalogs: Sequence[Catalog]) -> None:
    for numbers, catalog in zip(found, catalogs[1:], strict=True):
        absent = np.flatnonzero(numbers < 0)
        if len(absent):
            raise OptionError(
                f"{plural(len(absent), 'key')} of {len(numbers):,} missing in this dataset, the first {keys[int(absent[0])].as_py()!r}; "
                "choose missing='drop', 'keep' or fields to take instead",
                shard=catalog.url_of(0),
            )
