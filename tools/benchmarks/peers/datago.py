"""datago: loose files, decoded whole by its own threads in Rust; cropped with torch, as shardstream's fast row.

It decodes always, so raw rows are not comparable, and knows no labels of files, which are read beside them. Its webdataset source takes http only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datago import DatagoClient
from torch.utils.data import default_collate

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import batched

FORMAT = "files"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    source = {"root_path": case.location, "random_sampling": True, "rank": 0, "world_size": 1}
    config = {"source_type": "file", "source_config": source, "limit": case.samples}
    client = DatagoClient(json.dumps(config | {"samples_buffer_size": case.batch_size}))

    def examples() -> Iterator[Any]:
        client.start()
        while (sample := client.get_sample()) is not None:
            label = Path(sample.id.strip('"')).with_suffix(".cls").read_bytes()
            yield images.crop_pixels(sample.image.to_numpy_array()), int(label)
        client.stop()

    return lambda _: (tuple(default_collate(some)) for some in batched(examples(), case.batch_size))
