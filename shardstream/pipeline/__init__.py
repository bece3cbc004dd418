"""Stages and runs that turn field bytes into batches. No file here imports torch."""

from shardstream.pipeline.bad_sample_report import (
    BadSample,
    BadSampleReport,
    warn_or_raise,
)
from shardstream.pipeline.bad_samples import OnError, SkipBudget, SkipTracker
from shardstream.pipeline.balance import Balance, balance_of
from shardstream.pipeline.batch import Batched, Unbatched, split_batch
from shardstream.pipeline.decode import (
    BASIC,
    Decode,
    Decoder,
    Handler,
)
from shardstream.pipeline.epoch_samples import (
    EpochSamples,
    planned_source,
)
from shardstream.pipeline.fields import (
    KeepFields,
    OpenFields,
    check_fields,
    field_names,
    first_stages,
    keep_fields,
)
from shardstream.pipeline.group_batch import GroupBatched
from shardstream.pipeline.indexed_source import (
    LOOK_AHEAD_BYTES,
    IndexedRun,
    IndexedSource,
    OrderedSource,
    SamplesSource,
    default_partition,
    group_by_window,
    numbered_source,
    plan_steps,
)
from shardstream.pipeline.loader_state import (
    VERSION,
    LoaderPosition,
    check_state,
    compare_states,
    data_identity,
    find_states,
    part_state,
    past_of,
    plan_state,
    position_in,
    seal_state,
    state_digest,
)
from shardstream.pipeline.map import (
    Map,
    MapDict,
    MapTuple,
    Rename,
    Select,
    ToTuple,
    find_field,
    like_tuple,
)
from shardstream.pipeline.mix import (
    MixIndexedSource,
    MixRecipe,
    MixWeights,
    Stop,
    WeightSchedule,
)
from shardstream.pipeline.options import (
    OrderOptions,
    ReadOptions,
    options_or_default,
    refuse_options,
)
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.read_shard import read_shard
from shardstream.pipeline.records import Records, records_of
from shardstream.pipeline.row_makers import Batches, SampleWindows, Windows
from shardstream.pipeline.row_source import RowMaker, row_pipeline, rowable_source
from shardstream.pipeline.runner import ItemFunction, ItemStage, Runner, open_runner
from shardstream.pipeline.sequence_packing import (
    PackedRows,
    Packing,
    PackSequences,
    check_packing,
    check_row_fields,
)
from shardstream.pipeline.sequential_source import (
    SequentialRun,
    SequentialSource,
    open_sequential_source,
)
from shardstream.pipeline.source import Source
from shardstream.pipeline.stage import (
    Context,
    Run,
    SourceRun,
    Stage,
    State,
    check_at_least,
    check_epoch,
    check_stage,
    open_stages,
    whole_number,
)
from shardstream.pipeline.step_signatures import describe, function_name
from shardstream.pipeline.stream_ops import Compose, Repeat, Shuffle, Slice
from shardstream.pipeline.weighted_source import (
    SampleWeights,
    WeightedSource,
    Weights,
    draw_samples,
)

__all__ = [
    "BASIC",
    "LOOK_AHEAD_BYTES",
    "VERSION",
    "BadSample",
    "BadSampleReport",
    "Balance",
    "Batched",
    "Batches",
    "Compose",
    "Context",
    "Decode",
    "Decoder",
    "EpochSamples",
    "GroupBatched",
    "Handler",
    "IndexedRun",
    "IndexedSource",
    "ItemFunction",
    "ItemStage",
    "KeepFields",
    "LoaderPosition",
    "Map",
    "MapDict",
    "MapTuple",
    "MixIndexedSource",
    "MixRecipe",
    "MixWeights",
    "OnError",
    "OpenFields",
    "OrderOptions",
    "OrderedSource",
    "PackSequences",
    "PackedRows",
    "Packing",
    "Pipeline",
    "ReadOptions",
    "Records",
    "Rename",
    "Repeat",
    "RowMaker",
    "Run",
    "Runner",
    "SampleWeights",
    "SampleWindows",
    "SamplesSource",
    "Select",
    "SequentialRun",
    "SequentialSource",
    "Shuffle",
    "SkipBudget",
    "SkipTracker",
    "Slice",
    "Source",
    "SourceRun",
    "Stage",
    "State",
    "Stop",
    "ToTuple",
    "Unbatched",
    "WeightSchedule",
    "WeightedSource",
    "Weights",
    "Windows",
    "balance_of",
    "check_at_least",
    "check_epoch",
    "check_fields",
    "check_packing",
    "check_row_fields",
    "check_stage",
    "check_state",
    "compare_states",
    "data_identity",
    "default_partition",
    "describe",
    "draw_samples",
    "field_names",
    "find_field",
    "find_states",
    "first_stages",
    "function_name",
    "group_by_window",
    "keep_fields",
    "like_tuple",
    "numbered_source",
    "open_runner",
    "open_sequential_source",
    "open_stages",
    "options_or_default",
    "part_state",
    "past_of",
    "plan_state",
    "plan_steps",
    "planned_source",
    "position_in",
    "read_shard",
    "records_of",
    "refuse_options",
    "row_pipeline",
    "rowable_source",
    "seal_state",
    "split_batch",
    "state_digest",
    "warn_or_raise",
    "whole_number",
]
