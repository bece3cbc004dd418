"""litdata: chunks of raw bytes, its shuffle, its own loader.

Local chunks are mapped in place. From S3 it downloads whole chunks, by obstore if installed (as here), to a cache that is new for
each repetition: the first epoch is measured. Chunks have the size of shardstream's shards.
"""

from __future__ import annotations

from typing import Any

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import downloader

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import epochs_of, loader_options

FORMAT = "litdata"


def make_loader(case: Case) -> Any:
    """Return the loader of a case."""
    remote = case.location.startswith("s3://")
    if remote:  # its client refuses http otherwise
        vars(downloader)["_OBSTORE_CLIENT_OPTIONS"]["allow_http"] = True
    transform = images.example
    dataset = StreamingDataset(
        case.location,
        cache_dir=case.cache if remote else None,
        shuffle=True,
        **{"transform": transform} if case.task == "train" else {},
    )
    return StreamingDataLoader(dataset, **loader_options(case))


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    return epochs_of(case, make_loader(case))
