"""Write the bytes of shards, and scan those that are there."""
