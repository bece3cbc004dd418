"""Read and prefetch samples by number.

fetcher      choose memory maps of local shards, or range reads
readahead    ask the kernel to load pages of local shards before use
remote       prefetch by range requests within a byte budget
coalesce     merge neighbouring samples into one range
in_flight    send concurrent range requests; hedge slow ones
"""
