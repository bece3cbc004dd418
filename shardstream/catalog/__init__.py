"""Map sample numbers to byte ranges of shards.

base             the `Catalog` protocol: number of a sample -> shard and byte range
shard_catalog    samples of tar shards, by their indexes
object_catalog   loose files, returned as the tars that `pack` would write
concat_catalog   several catalogs as one
integrity        compare the bytes of shards with the checksums of their manifest
manifest_versions  detect remote datasets that are replaced while they are read
class_names      class names, from the ``classes.json`` in the folder of the shards
"""

from shardstream.catalog.base import Catalog, Extents, Numbers

__all__ = ["Catalog", "Extents", "Numbers"]
