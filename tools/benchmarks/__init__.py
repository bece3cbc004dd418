"""Parts of `tools/bench.py`: data, contestants, limits, rows and report."""
