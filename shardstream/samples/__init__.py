"""Samples by number: all that orders, pipelines and loaders know of a dataset, and views that are made of other samples."""

from shardstream.samples.base import (
    Fetcher,
    FetchOptions,
    FieldChoice,
    MappedSamples,
    Numbers,
    RefusedError,
    Samples,
    check_numbers,
    chunk_steps,
    places_in,
    split_by_step,
)
from shardstream.samples.concat import Concat
from shardstream.samples.deletions import (
    DeletedSince,
    WithoutDeleted,
    deleted_since,
    has_deleted_since,
)
from shardstream.samples.join import Join, JoinPart
from shardstream.samples.join_samples import (
    JoinBy,
    JoinMissing,
    check_missing,
    join_samples,
    open_part,
)
from shardstream.samples.key_matching import match_keys
from shardstream.samples.lengths import (
    CostFunction,
    Lengths,
    costs_of,
    lengths_of,
    run_lengths,
    values_of,
)
from shardstream.samples.row_samples import (
    RowItem,
    RowSamples,
    parts_in_rows,
    rows_with,
    samples_in_rows,
)
from shardstream.samples.subset import Choice, Subset, select_subset
from shardstream.samples.table import Table
from shardstream.samples.view import View, leaves_of, replace_leaves

__all__ = [
    "Choice",
    "Concat",
    "CostFunction",
    "DeletedSince",
    "FetchOptions",
    "Fetcher",
    "FieldChoice",
    "Join",
    "JoinBy",
    "JoinMissing",
    "JoinPart",
    "Lengths",
    "MappedSamples",
    "Numbers",
    "RefusedError",
    "RowItem",
    "RowSamples",
    "Samples",
    "Subset",
    "Table",
    "View",
    "WithoutDeleted",
    "check_missing",
    "check_numbers",
    "chunk_steps",
    "costs_of",
    "deleted_since",
    "has_deleted_since",
    "join_samples",
    "leaves_of",
    "lengths_of",
    "match_keys",
    "open_part",
    "parts_in_rows",
    "places_in",
    "replace_leaves",
    "rows_with",
    "run_lengths",
    "samples_in_rows",
    "select_subset",
    "split_by_step",
    "values_of",
]
