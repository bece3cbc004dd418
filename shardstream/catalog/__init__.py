"""Map sample numbers to byte ranges of shards and of loose files."""

from shardstream.catalog.changes import deleted_by_shard, refuse_deleted
from shardstream.catalog.class_names import (
    Classes,
    ClassNames,
    StoredClassNames,
    common_classes,
    find_difference,
    read_all_classes,
    read_classes,
    warn_of_difference,
)
from shardstream.catalog.columns import iter_keys
from shardstream.catalog.conditions import (
    Keys,
    Where,
    choose_samples,
    find_keys,
    find_where,
    read_columns,
    samples_with_keys,
)
from shardstream.catalog.doctor import examine_dataset, examine_machine
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
from shardstream.catalog.manifest_versions import check_manifests
from shardstream.catalog.object_catalog import LabelFunction, ObjectCatalog, folder_label
from shardstream.catalog.shard_catalog import ShardCatalog, lacks_index, open_samples
from shardstream.fetch import Catalog, Extents
from shardstream.samples import check_numbers

__all__ = [
    "Catalog",
    "ClassNames",
    "Classes",
    "Extents",
    "Keys",
    "LabelFunction",
    "Listing",
    "ObjectCatalog",
    "ShardCatalog",
    "StoredClassNames",
    "VerifiedReader",
    "Verify",
    "Where",
    "check_manifests",
    "check_numbers",
    "choose_samples",
    "class_name",
    "common_classes",
    "deleted_by_shard",
    "examine_dataset",
    "examine_machine",
    "find_difference",
    "find_keys",
    "find_where",
    "folder_label",
    "iter_keys",
    "lacks_index",
    "list_shards",
    "list_splits",
    "open_headers",
    "open_samples",
    "read_all_classes",
    "read_classes",
    "read_columns",
    "read_one",
    "refuse_deleted",
    "samples_with_keys",
    "stream_samples",
    "warn_of_difference",
]
