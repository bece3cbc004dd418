"""Which bytes of which shard each sample is.

base             the `Catalog` protocol: number of a sample -> shard and byte range
shard_catalog    the samples of tar shards, by their indexes
object_catalog   loose files, presented as the tars that `pack` would write
concat_catalog   several catalogs as one
integrity        compare the bytes of shards with the checksums of their manifest
manifest_versions  notice remote datasets that are replaced while they are read
class_names      class names, from the ``classes.json`` beside the shards
"""

from shardstream.catalog.base import Catalog, Extents, Numbers, check_numbers

__all__ = ["Catalog", "Extents", "Numbers", "check_numbers"]
