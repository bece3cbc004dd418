"""Map sample numbers to byte ranges of shards.

base             the `Catalog` protocol: number of a sample -> shard and byte range
shard_catalog    samples of tar shards, by their indexes
object_catalog   loose files, returned as the tars that `pack` would write
concat_catalog   several catalogs as one
subset_catalog   some samples of a catalog
integrity        compare the bytes of shards with the checksums of their manifest
manifest_versions  detect remote datasets that are replaced while they are read
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
from shardstream.catalog.concat_catalog import ConcatCatalog
from shardstream.catalog.integrity import VerifiedReader, Verify
from shardstream.catalog.manifest_versions import check_manifests
from shardstream.catalog.object_catalog import LabelFunction, ObjectCatalog, folder_label
from shardstream.catalog.shard_catalog import ShardCatalog, lacks_index
from shardstream.catalog.subset_catalog import Subset, SubsetCatalog, read_array, select_subset

__all__ = [
    "Catalog",
    "ClassNames",
    "Classes",
    "ConcatCatalog",
    "Extents",
    "IndexChunk",
    "LabelFunction",
    "Numbers",
    "ObjectCatalog",
    "ShardCatalog",
    "Subset",
    "SubsetCatalog",
    "VerifiedReader",
    "Verify",
    "check_manifests",
    "check_numbers",
    "common_classes",
    "find_difference",
    "folder_label",
    "lacks_index",
    "read_all_classes",
    "read_array",
    "read_classes",
    "select_subset",
    "warn_of_difference",
]
