"""Sample number -> shard and byte range, of datasets that ``storage.discover`` or ``storage.listing`` has found.

shard_catalog    samples of tar shards
object_catalog   samples of loose files, in the shape of the tar that would be packed of them
concat_catalog   several catalogs as one
integrity        compare the bytes of shards with the checksums of their manifest
file_versions    notice local files that are overwritten while they are read
manifest_versions  notice remote datasets that are replaced while they are read
mmap_pool        memory maps of local shards, kept over epochs
class_names      class names of datasets, from ``classes.json``
"""
