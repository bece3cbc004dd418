"""The S3 connector for PyTorch: whole tars by `S3IterableDataset`, parsed by webdataset's tar reader.

Its client fetches an object in parts of 8 MiB over several connections, so tars are its best case by far: single photos cost a round
trip each (on `s3-slow` under 30 a second and worker). It shuffles nothing by itself: shards are listed in random order and samples
go through a buffer of 1,000, webdataset's, as its documentation combines the two.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import webdataset as wds
from s3torchconnector import S3ClientConfig, S3IterableDataset, S3ReaderConstructor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.case import Case, Epochs
from benchmarks.loaders import worker_options
from benchmarks.objects import list_tars

FORMAT = "tar"


class Samples(IterableDataset[Any]):
    """Samples of the tars that the connector yields."""

    def __init__(self, case: Case) -> None:
        tars = list_tars(case.location)
        random.Random(0).shuffle(tars)
        self._case = case
        self._objects = S3IterableDataset.from_objects(
            tars,
            region=os.environ["AWS_REGION"],
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            enable_sharding=True,
            s3client_config=S3ClientConfig(force_path_style=True),
            reader_constructor=S3ReaderConstructor.sequential(),
        )

    def __iter__(self) -> Iterator[Any]:
        opened = ({"url": reader.key, "stream": reader} for reader in self._objects)
        samples = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(opened))
        return iter(
            wds.filters.batched(self._case.batch_size, collation_fn=list)(
                wds.filters.shuffle(1000)(samples)
            )
        )


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    loader = DataLoader(
        Samples(case),
        batch_size=None,
        **worker_options(case),
    )
    return lambda _: loader
