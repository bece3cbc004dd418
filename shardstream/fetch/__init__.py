"""Samples by number, read ahead of their use.

fetcher      open what fits the data: memory maps of local shards, or range reads
readahead    ask the system to load pages of local shards that will be used soon
remote       plan range requests ahead of use, within a budget of bytes
coalesce     join samples that are near each other to one range
in_flight    send range requests side by side; hedge the late ones
"""
