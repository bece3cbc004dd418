"""From sources to shards."""
