"""Where bytes live: the only package that knows fsspec."""
