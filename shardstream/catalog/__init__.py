"""Map sample numbers to byte ranges of shards.

base             the `Catalog` protocol: number of a sample -> shard and byte range
shard_catalog    samples of tar shards, by their indexes
object_catalog   loose files, returned as the tars that `pack` would write
concat_catalog   several catalogs as one
join_keys        match the samples of two catalogs by key
table_catalog    rows of a table in memory, to be joined
join             find the samples of several catalogs that belong together
join_catalog     samples of several catalogs as one sample
sample_columns   values of all samples in Parquet next to the shards; samples by key and by condition
subset_catalog   some samples of a catalog
member_indexes   ranges of some members of samples, by ``NAME.idx``
integrity        compare the bytes of shards with the checksums of their manifest
manifest_versions  detect remote datasets that are replaced while they are read
class_weights    weights of samples by their class
inspect          list shards and read single samples, also without an index
class_names      class names, from the ``classes.json`` in the folder of the shards
"""

from shardstream.catalog.base import Catalog, Extents, IndexChunk, Numbers, check_numbers
from shardstream.catalog.class_names import (
    Classes,
    ClassNames,
    common_classes,
    find_difference,
    read_all_classes,
    read_classes,
    warn_of_difference,
)
from shardstream.catalog.class_weights import class_weights
from shardstream.catalog.concat_catalog import ConcatCatalog
from shardstream.catalog.inspect import (
    Listing,
    class_name,
    list_shards,
    list_splits,
    open_headers,
    read_one,
    stream_samples,
)
from shardstream.catalog.integrity import VerifiedReader, Verify
from shardstream.catalog.join import JoinBy, JoinMissing, check_missing, join_catalogs, open_part
from shardstream.catalog.join_catalog import JoinCatalog, JoinPart
from shardstream.catalog.manifest_versions import check_manifests
from shardstream.catalog.object_catalog import LabelFunction, ObjectCatalog, folder_label
from shardstream.catalog.sample_columns import Keys, Where, read_columns
from shardstream.catalog.shard_catalog import ShardCatalog, lacks_index
from shardstream.catalog.subset_catalog import Subset, SubsetCatalog, choose_samples, read_array
from shardstream.catalog.table_catalog import TableCatalog

__all__ = [
    "Catalog",
    "ClassNames",
    "Classes",
    "ConcatCatalog",
    "Extents",
    "IndexChunk",
    "JoinBy",
    "JoinCatalog",
    "JoinMissing",
    "JoinPart",
    "Keys",
    "LabelFunction",
    "Listing",
    "Numbers",
    "ObjectCatalog",
    "ShardCatalog",
    "Subset",
    "SubsetCatalog",
    "TableCatalog",
    "VerifiedReader",
    "Verify",
    "Where",
    "check_manifests",
    "check_missing",
    "check_numbers",
    "choose_samples",
    "class_name",
    "class_weights",
    "common_classes",
    "find_difference",
    "folder_label",
    "join_catalogs",
    "lacks_index",
    "list_shards",
    "list_splits",
    "open_headers",
    "open_part",
    "read_all_classes",
    "read_array",
    "read_classes",
    "read_columns",
    "read_one",
    "stream_samples",
    "warn_of_difference",
]
