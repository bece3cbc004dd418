"""Sources -> shards: ``ss.pack``, `ShardWriter`, ``ss.reshard``, ``ss.index`` and ``ss.verify``."""

from shardstream.packing.compact import CompactReport, compact
from shardstream.packing.encode import encode_field, encode_npz, encode_sample, has_encoder
from shardstream.packing.images import ImageOptions, reencode
from shardstream.packing.index import index
from shardstream.packing.job.claim import Claim, claim_destination
from shardstream.packing.job.folder_state import Journal, ShardNames, Task, read_journal
from shardstream.packing.job.key_hashes import KeyHashes, find_repeated_keys, hash_keys, place_of
from shardstream.packing.job.pack_plan import PackRequest, assign_splits, split_counts
from shardstream.packing.job.parallel_encode import Encoded, RecordEncoder, chunked
from shardstream.packing.job.parts import PartFiles, PartJob, cut_by_size, iter_cuts
from shardstream.packing.job.publish import merge
from shardstream.packing.job.report import PackReport, Progress, counts_text, progress_lines
from shardstream.packing.job.run_jobs import run_jobs
from shardstream.packing.pack import pack
from shardstream.packing.replace_fields import replace_fields
from shardstream.packing.reshard import reshard
from shardstream.packing.shards.part_writer import (
    PartResult,
    PartWriter,
    TarShard,
    WriterOptions,
    sample_pieces,
)
from shardstream.packing.shards.shard_writer import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_SAMPLES,
    ShardWriter,
    write_shard,
)
from shardstream.packing.sources.class_numbering import sibling_folders
from shardstream.packing.sources.detection import open_source
from shardstream.packing.sources.joined_table import open_joined_table, open_table_part
from shardstream.packing.sources.source import (
    FileRef,
    Record,
    SamplesSource,
    Source,
    SourceOptions,
    shuffled_order,
)
from shardstream.packing.sources.tables import is_table, iter_rows, read_row_group, rows_of
from shardstream.packing.verify import VerifyReport, verify

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MAX_SAMPLES",
    "Claim",
    "CompactReport",
    "Encoded",
    "FileRef",
    "ImageOptions",
    "Journal",
    "KeyHashes",
    "PackReport",
    "PackRequest",
    "PartFiles",
    "PartJob",
    "PartResult",
    "PartWriter",
    "Progress",
    "Record",
    "RecordEncoder",
    "SamplesSource",
    "ShardNames",
    "ShardWriter",
    "Source",
    "SourceOptions",
    "TarShard",
    "Task",
    "VerifyReport",
    "WriterOptions",
    "assign_splits",
    "chunked",
    "claim_destination",
    "compact",
    "counts_text",
    "cut_by_size",
    "encode_field",
    "encode_npz",
    "encode_sample",
    "find_repeated_keys",
    "has_encoder",
    "hash_keys",
    "index",
    "is_table",
    "iter_cuts",
    "iter_rows",
    "merge",
    "open_joined_table",
    "open_source",
    "open_table_part",
    "pack",
    "place_of",
    "progress_lines",
    "read_journal",
    "read_row_group",
    "reencode",
    "replace_fields",
    "reshard",
    "rows_of",
    "run_jobs",
    "sample_pieces",
    "shuffled_order",
    "sibling_folders",
    "split_counts",
    "verify",
    "write_shard",
]
