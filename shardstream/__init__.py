"""Pack samples into tar shards and stream them into PyTorch."""
