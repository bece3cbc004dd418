"""Sources -> shards: ``ss.pack``, `ShardWriter`, ``ss.index`` and ``ss.verify``.

A record passes through these files:

    job                               plan a packing job and run it
    destination, journal              check the destination; note finished shards, to resume a stopped job
    source_detection, source          find the kind of source; records and keys
    folder_source, table_source, tables, tar_source, file_keys   the kinds of sources
    class_numbering, split            number classes; order records and assign splits
    parallel_encode, encode, image_encode    records -> encoded samples
    shard_writer, tar_shard, shard_upload    encoded samples -> published shards
    report                            progress, and the result of a job

Packed data pass through ``shard_scan`` for ``indexing`` and ``verification`` (with ``verify_checks``); ``inspect`` shows
shards and single samples.
"""
