"""Bytes by URL: the only room that imports fsspec, s3fs and obstore.

A URL becomes bytes in these steps:

    discover, url_patterns, check_manifest_urls   URL, pattern, list or manifest -> shards
    listing, journal_marker      files below a folder; refuse a dataset that is not finished
    store, clients               one door for all stores; clients are opened once in each process
    local_files                  list, read and map files of this machine; notice that one is overwritten
    s3_config, gcs_azure_config  storage options and variables -> settings of the clients of S3, Google and Azure
    obstore_client, fsspec_readers   send one request; return a ``response``
    read_small_files             read a manifest before an S3 client is imported
    retry, concurrency, error_messages     retry and resume, limit requests in flight, explain errors
    range_file                   a remote file as a stream
    cache, cache_space           a bounded cache on the local disk

Written files pass through ``atomic_write`` and, on S3, ``multipart_upload``; ``output_folder`` is the folder of a dataset
that is being written, on this machine or elsewhere. ``fork_safety`` protects forked children from
clients of their parent; ``byte_sizes`` parses sizes such as "2 GB".
"""
