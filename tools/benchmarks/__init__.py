"""The parts of `tools/bench.py`: data, contestants, limits, rows, report."""
