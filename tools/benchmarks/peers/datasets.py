"""Hugging Face datasets: its webdataset builder, streaming, with its shuffle of shards and a buffer of 1,000 samples.

Photos are kept as bytes (``Image(decode=False)``), as in the other raw rows; numbers of ``cls`` come decoded, always. It decodes
``npy`` and ``json`` always, too, so `small-local` is not comparable. From S3 it
streams presigned URLs: ``s3://`` fails in its opening of files (it hands ``block_size`` to a client that knows no such argument).
"""

from __future__ import annotations

from typing import Any

import datasets as hf
from torch.utils.data import DataLoader

from benchmarks.case import Case, Epochs
from benchmarks.loaders import decode_batch, loader_options
from benchmarks.objects import list_tars, presign

FORMAT = "tar"


def _flat(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"jpg": sample["jpg"]["bytes"], "cls": str(sample["cls"])} for sample in samples]


def _examples(samples: list[dict[str, Any]]) -> Any:
    return decode_batch(_flat(samples))


def _urls(location: str) -> list[str]:
    tars = list_tars(location)
    return [presign(url) for url in tars] if location.startswith("s3://") else tars


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    stream: Any = hf.load_dataset(
        "webdataset",
        data_files={"train": _urls(case.location)},
        split="train",
        streaming=True,
    )
    stream = stream.cast_column("jpg", hf.Image(decode=False)).shuffle(seed=0, buffer_size=1000)
    collate = {"collate_fn": _examples if case.task == "train" else _flat}
    loader: Any = DataLoader(stream, **loader_options(case) | collate)

    def epoch(number: int) -> Any:
        stream.set_epoch(number)
        return loader

    return epoch
