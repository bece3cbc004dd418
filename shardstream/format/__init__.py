"""Parse and write the bytes of shards, indexes and manifests; pure functions without I/O.

Reading a shard uses these files, in this order:

    forward_reader      read a stream by growing offsets; open compressed tars
    tar_reader, pax     512-byte headers and extended headers -> members with offsets
    tar_diagnostics     links and trailing bytes that a pass over a tar leaves out
    names               member name <-> key and field
    samples             members of one key -> a sample
    columnar, columns   many samples at once with NumPy, stored as one column per field
    image_formats, bit_depth   supported image formats; bit depth of the stored numbers

Writing a shard uses ``names`` and ``tar_writer`` (members -> headers and padded bodies). Files in the folder of
the shards: ``index`` (``NAME.tar.idx``), ``manifest`` and ``manifest_pages`` (``index.json``, of entries from ``shard_info``), ``column_file`` (``NAME.tar.cols.parquet``, read by ``parquet``),
``classes_json`` and ``dali_index``.
"""

from shardstream.format.bit_depth import (
    BitDepth,
    is_inverted,
    is_rendered,
    scale_to_8_bits,
    stored_depth,
    stored_maximum,
)
from shardstream.format.classes_json import CLASSES_NAME, decode_classes, encode_classes
from shardstream.format.column_file import (
    KEY_COLUMN,
    Column,
    columns_in_file,
    decode_column_file,
    encode_column_file,
    is_reserved_column,
    parse_columns,
)
from shardstream.format.columnar import (
    ShardSlice,
    find_samples,
    is_worth_vectorizing,
    read_one,
    read_samples,
)
from shardstream.format.columns import (
    Columns,
    JoinedFields,
    LazyColumns,
    Rows,
    TupleColumns,
    Values,
    as_rows,
    from_rows,
    restore_order,
)
from shardstream.format.dali_index import decode_member_index, encode_member_index
from shardstream.format.forward_reader import (
    ForwardReader,
    Readable,
    open_by_content,
    open_decompressed,
)
from shardstream.format.image_formats import (
    IMAGE_FORMATS,
    PILLOW_FORMATS,
    UNSUPPORTED_IMAGES,
    check_masks,
    has_mask_word,
    is_image_field,
    is_image_name,
    is_plain_jpeg,
    mask_fields,
    words_of,
)
from shardstream.format.index import (
    OFFSET_BYTES,
    Offsets,
    ShardScan,
    check_extent,
    decode_index,
    encode_index,
    num_samples,
    scan_members,
    scan_shard,
)
from shardstream.format.manifest import (
    KIND,
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
    encode_manifest_files,
)
from shardstream.format.manifest_pages import (
    PAGED_KIND,
    ManifestPage,
    PagedManifest,
    decode_page,
    decode_pages,
    encode_page,
    is_pages_name,
)
from shardstream.format.names import (
    INT_FIELDS,
    JSON_FIELDS,
    canonical_field,
    find_repeated,
    is_meta_name,
    is_name,
    member_name,
    split_member_name,
)
from shardstream.format.parquet import (
    column_chunks,
    import_parquet,
    least_bytes,
    limit_of_rows,
    read_parquet,
)
from shardstream.format.samples import (
    FIELDS_LIMIT,
    Group,
    Sample,
    iter_groups,
    iter_samples,
    read_sample,
)
from shardstream.format.shard_info import (
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    ShardInfo,
    checksum,
    fingerprint,
)
from shardstream.format.tar_diagnostics import TarDiagnostics
from shardstream.format.tar_reader import (
    BLOCK_BYTES,
    Buffer,
    Member,
    ReadAt,
    empty_tar,
    iter_members,
    iter_whole,
)
from shardstream.format.tar_writer import (
    END_OF_ARCHIVE,
    encode_member,
    encode_members,
    member_bytes,
)

__all__ = [
    "BLOCK_BYTES",
    "CLASSES_NAME",
    "COLUMNS_SUFFIX",
    "END_OF_ARCHIVE",
    "FIELDS_LIMIT",
    "IMAGE_FORMATS",
    "INDEX_SUFFIX",
    "INT_FIELDS",
    "JSON_FIELDS",
    "KEY_COLUMN",
    "KIND",
    "MANIFEST_NAME",
    "OFFSET_BYTES",
    "PAGED_KIND",
    "PILLOW_FORMATS",
    "UNSUPPORTED_IMAGES",
    "BitDepth",
    "Buffer",
    "Column",
    "Columns",
    "ForwardReader",
    "Group",
    "JoinedFields",
    "LazyColumns",
    "Manifest",
    "ManifestPage",
    "Member",
    "Offsets",
    "PagedManifest",
    "ReadAt",
    "Readable",
    "Rows",
    "Sample",
    "ShardInfo",
    "ShardScan",
    "ShardSlice",
    "TarDiagnostics",
    "TupleColumns",
    "Values",
    "as_rows",
    "canonical_field",
    "check_extent",
    "check_masks",
    "checksum",
    "column_chunks",
    "columns_in_file",
    "decode_classes",
    "decode_column_file",
    "decode_index",
    "decode_manifest",
    "decode_member_index",
    "decode_page",
    "decode_pages",
    "empty_tar",
    "encode_classes",
    "encode_column_file",
    "encode_index",
    "encode_manifest",
    "encode_manifest_files",
    "encode_member",
    "encode_member_index",
    "encode_members",
    "encode_page",
    "find_repeated",
    "find_samples",
    "fingerprint",
    "from_rows",
    "has_mask_word",
    "import_parquet",
    "is_image_field",
    "is_image_name",
    "is_inverted",
    "is_meta_name",
    "is_name",
    "is_pages_name",
    "is_plain_jpeg",
    "is_rendered",
    "is_reserved_column",
    "is_worth_vectorizing",
    "iter_groups",
    "iter_members",
    "iter_samples",
    "iter_whole",
    "least_bytes",
    "limit_of_rows",
    "mask_fields",
    "member_bytes",
    "member_name",
    "num_samples",
    "open_by_content",
    "open_decompressed",
    "parse_columns",
    "read_one",
    "read_parquet",
    "read_sample",
    "read_samples",
    "restore_order",
    "scale_to_8_bits",
    "scan_members",
    "scan_shard",
    "split_member_name",
    "stored_depth",
    "stored_maximum",
    "words_of",
]
