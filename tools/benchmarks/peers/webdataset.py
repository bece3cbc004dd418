"""webdataset: shuffled shards, a buffer of 1,000 samples, batches made in the workers.

Its documentation recommends this. Tars are read as whole streams; from S3 by ``pipe:curl`` on presigned URLs, which starts
faster than ``pipe:aws s3 cp`` and uses less CPU. `photo-train` decodes with the function that all contestants share.
"""

from __future__ import annotations

from typing import Any

import webdataset as wds

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import epochs_of, worker_options
from benchmarks.objects import list_tars, presign

FORMAT = "tar"
_BUFFER_SAMPLES = 1000


def shard_urls(case: Case) -> list[str]:
    """Return the tars, as webdataset reads them."""
    tars = list_tars(case.location)
    if not case.location.startswith("s3://"):
        return tars
    return [f"pipe:curl -s -f '{presign(url)}'" for url in tars]


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    urls = shard_urls(case)
    dataset: Any = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(_BUFFER_SAMPLES)
    if case.task == "train":
        dataset = dataset.map(images.example).batched(case.batch_size)
    elif case.task == "decoded":
        dataset = dataset.decode().to_tuple(*case.fields).batched(case.batch_size)
    else:
        dataset = dataset.batched(case.batch_size, collation_fn=list)
    loader = wds.WebLoader(dataset, batch_size=None, **worker_options(case))
    return epochs_of(case, loader)
