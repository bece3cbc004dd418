"""What the bytes on disk mean: pure functions on given bytes, no I/O of their own."""
