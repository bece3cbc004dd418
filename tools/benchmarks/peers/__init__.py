"""One module per contestant; its docstring explains why its configuration is the best fair one.

Each has ``FORMAT``, the data it reads (see `benchmarks.data`), and ``epochs(case)``, which returns a function from the number of
an epoch to its batches. A raw batch is a list of dicts or a dict of lists; one to train with is a tuple of images and labels.
"""
