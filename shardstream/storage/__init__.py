"""Bytes by URL: the only room that imports fsspec and s3fs."""

from shardstream.storage.atomic_write import (
    PendingFile,
    final_name,
    is_part,
    open_pending,
    publish,
    publish_bytes,
    publish_bytes_over,
    remove,
)
from shardstream.storage.byte_sizes import parse_bytes
from shardstream.storage.cache import CACHE_CHUNK_BYTES, HEADER_BYTES, Cache, open_cache, version_of
from shardstream.storage.cache_space import CacheSpace, load_usage
from shardstream.storage.check_manifest_urls import check_names, is_under
from shardstream.storage.clients import Clients, protocol_of
from shardstream.storage.concurrency import (
    DEFAULT_REQUESTS,
    AdaptiveLimit,
    Slot,
    hints_of,
    limit_of_worker,
    share_requests,
)
from shardstream.storage.discover import (
    LocatedShards,
    absolute_urls,
    check_folder_finished,
    locate_shards,
    read_manifest,
)
from shardstream.storage.error_messages import broken_link, classify_error, translate_errors
from shardstream.storage.field_file import FieldFile, FieldPlace, FieldPlaces
from shardstream.storage.file_list import FileList, FileRows, ListedFile
from shardstream.storage.find_tars import cached_look_up, find_tars
from shardstream.storage.fork_safety import new_lock
from shardstream.storage.http_status import ErrorMeaning
from shardstream.storage.journal_marker import (
    JOURNAL_NAME,
    check_finished,
    is_journal,
    is_part_record,
    part_record_name,
)
from shardstream.storage.listing import (
    iter_members,
    list_all,
    list_beginning,
    list_files,
    sample_members,
    warn_of_rare_fields,
)
from shardstream.storage.local_files import (
    FileVersion,
    FileVersions,
    MmapPool,
    check_map,
    map_file,
    num_maps,
)
from shardstream.storage.multipart_upload import PART_BYTES, S3Object, S3Upload, may_be_md5
from shardstream.storage.output_folder import (
    LocalFolder,
    OutputFolder,
    RemoteFolder,
    commit_all,
    open_output_folder,
    output_folder_in,
)
from shardstream.storage.paged_shards import (
    LocalPaths,
    PagedShards,
    checksum_of_shards,
    fingerprint_of_shards,
)
from shardstream.storage.range_file import RangeStream
from shardstream.storage.response import RangeResponse, ReceiveBuffer
from shardstream.storage.retry import TruncatedResponseError, retry_call
from shardstream.storage.row_file import RowFile, sort_rows
from shardstream.storage.s3_config import complete_s3fs_options, parse_s3_options
from shardstream.storage.store import FileInfo, Storage, absolute_url, join_url, parent_url
from shardstream.storage.temporary_file import TemporaryFile
from shardstream.storage.transfer import SLOWEST_BYTES_PER_S, Cancellation
from shardstream.storage.url_globs import is_glob
from shardstream.storage.url_patterns import (
    TAR_SUFFIXES,
    Urls,
    expand_braces,
    expand_urls,
    is_compressed,
    is_tar,
)

__all__ = [
    "CACHE_CHUNK_BYTES",
    "DEFAULT_REQUESTS",
    "HEADER_BYTES",
    "JOURNAL_NAME",
    "PART_BYTES",
    "SLOWEST_BYTES_PER_S",
    "TAR_SUFFIXES",
    "AdaptiveLimit",
    "Cache",
    "CacheSpace",
    "Cancellation",
    "Clients",
    "ErrorMeaning",
    "FieldFile",
    "FieldPlace",
    "FieldPlaces",
    "FileInfo",
    "FileList",
    "FileRows",
    "FileVersion",
    "FileVersions",
    "ListedFile",
    "LocalFolder",
    "LocalPaths",
    "LocatedShards",
    "MmapPool",
    "OutputFolder",
    "PagedShards",
    "PendingFile",
    "RangeResponse",
    "RangeStream",
    "ReceiveBuffer",
    "RemoteFolder",
    "RowFile",
    "S3Object",
    "S3Upload",
    "Slot",
    "Storage",
    "TemporaryFile",
    "TruncatedResponseError",
    "Urls",
    "absolute_url",
    "absolute_urls",
    "broken_link",
    "cached_look_up",
    "check_finished",
    "check_folder_finished",
    "check_map",
    "check_names",
    "checksum_of_shards",
    "classify_error",
    "commit_all",
    "complete_s3fs_options",
    "expand_braces",
    "expand_urls",
    "final_name",
    "find_tars",
    "fingerprint_of_shards",
    "hints_of",
    "is_compressed",
    "is_glob",
    "is_journal",
    "is_part",
    "is_part_record",
    "is_tar",
    "is_under",
    "iter_members",
    "join_url",
    "limit_of_worker",
    "list_all",
    "list_beginning",
    "list_files",
    "load_usage",
    "locate_shards",
    "map_file",
    "may_be_md5",
    "new_lock",
    "num_maps",
    "open_cache",
    "open_output_folder",
    "open_pending",
    "output_folder_in",
    "parent_url",
    "parse_bytes",
    "parse_s3_options",
    "part_record_name",
    "protocol_of",
    "publish",
    "publish_bytes",
    "publish_bytes_over",
    "read_manifest",
    "remove",
    "retry_call",
    "sample_members",
    "share_requests",
    "sort_rows",
    "translate_errors",
    "version_of",
    "warn_of_rare_fields",
]
