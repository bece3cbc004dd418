"""adlfs: shardstream's loader on adlfs's file system, which reads where obstore is not installed."""

from __future__ import annotations

import os
from typing import Any

from adlfs import AzureBlobFileSystem

import shardstream as ss
from benchmarks.case import Case, Epochs
from benchmarks.loaders import worker_options

FORMAT = "tar"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    filesystem = AzureBlobFileSystem(
        connection_string=os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    )
    dataset = ss.ShardDataset(case.location, shuffle=case.shuffle, seed=0, filesystem=filesystem)
    loader = ss.ShardLoader(dataset, batch_size=case.batch_size, **worker_options(case))

    def epoch(number: int) -> Any:
        loader.set_epoch(number)
        return loader

    return epoch
