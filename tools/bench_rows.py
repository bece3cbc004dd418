"""Measure how full packed rows are, which tokens are lost, and the time of packing: rows of shardstream and packers of other projects.

    python tools/bench_rows.py [--documents 100000] [--packer trl]

Documents have the lengths of web text (lognormal, sigma 1, mean 700), rows 8192 tokens. A packer whose project is not installed is left out; those of
peers need trl, torchtitan or llm-foundry. Time is that of the processor until all rows of tokens are made: of shardstream from shards on a
local disk, of peers from memory.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

import shardstream as ss

LENGTH, MEAN = 8192, 700
Documents = Sequence[np.ndarray[Any, Any]]


class Packed(NamedTuple):
    """Rows that a packer has made.

    Args:
        rows: Number of rows.
        tokens: Tokens of documents in them.
        seconds: Processor time.
    """

    rows: int
    tokens: int
    seconds: float


def pack_by_shardstream(documents: Documents, packing: Literal["best_fit", "concat"]) -> Packed:
    """Write documents to shards, which is not timed, and read rows of them."""
    with TemporaryDirectory() as folder:
        with ss.ShardWriter(folder, max_bytes=100_000_000) as writer:
            for number, ids in enumerate(documents):
                writer.write({"__key__": f"{number:08d}", "npy": ids})
        lengths = [len(one) for one in documents]
        started = time.process_time()
        dataset = ss.ShardDataset(folder).decode()
        rows = dataset.pack_sequences("npy", LENGTH, lengths=lengths, packing=packing)
        tokens = sum(int(np.count_nonzero(row["segments"])) for row in rows)
        return Packed(len(rows), tokens, time.process_time() - started)


def pack_by_trl(documents: Documents, strategy: str) -> Packed:
    """Pack all documents in memory by trl's ``pack_dataset``."""
    trl = importlib.import_module("trl.data_utils")
    datasets, arrow = importlib.import_module("datasets"), importlib.import_module("pyarrow")
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    ids = arrow.LargeListArray.from_arrays(offsets, np.concatenate(documents))
    table = datasets.Dataset(arrow.table({"input_ids": ids}))
    started = time.process_time()
    packed = trl.pack_dataset(table, LENGTH, strategy)
    lengths = np.diff(packed.data["input_ids"].combine_chunks().offsets)
    return Packed(len(lengths), int(lengths.sum()), time.process_time() - started)


def pack_by_torchtitan(documents: Documents) -> Packed:
    """Pack a stream by torchtitan's ``MMSamplePacker``, whose buffer has 100 samples."""
    module = importlib.import_module("torchtitan.hf_datasets.multimodal.utils.packing")
    packer, rows, tokens, started = module.MMSamplePacker(LENGTH), 0, 0, time.process_time()
    for one in map(torch.from_numpy, documents):
        packer.add_sample({"input_ids": one, "labels": one, "positions": torch.arange(len(one))})
    packer.flush()
    for row in packer.packed_samples:
        rows, tokens = rows + 1, tokens + len(row["input_ids"])
    return Packed(rows, tokens, time.process_time() - started)


def pack_by_llm_foundry(documents: Documents, ratio: float) -> Packed:
    """Pack batches of 64 rows by the collator of llm-foundry, of ``ratio`` documents for each row; longer ones are cut before."""
    module = importlib.import_module("llmfoundry.data.packing")
    packer = module.BinPackCollator(lambda batch: batch, 64, LENGTH, 0, "right")
    rows, tokens, size, started = 0, 0, int(64 * ratio), time.process_time()
    for first in range(0, len(documents), size):
        ids = [torch.from_numpy(one[:LENGTH]) for one in documents[first : first + size]]
        batch = [{"input_ids": one, "sequence_id": torch.zeros_like(one)} for one in ids]
        packed = packer._pack_trimmed_examples(batch, list(map(len, ids)))
        rows += len(packed["input_ids"])
        tokens += int((packed["sequence_id"] >= 0).sum())
    return Packed(rows, tokens, time.process_time() - started)


PACKERS: dict[str, Callable[[Documents], Packed]] = {
    "shardstream, best fit": lambda all_: pack_by_shardstream(all_, "best_fit"),
    "shardstream, concat": lambda all_: pack_by_shardstream(all_, "concat"),
    "trl, bfd_split": lambda all_: pack_by_trl(all_, "bfd_split"),
    "trl, bfd": lambda all_: pack_by_trl(all_, "bfd"),
    "trl, wrapped": lambda all_: pack_by_trl(all_, "wrapped"),
    "torchtitan, MMSamplePacker": pack_by_torchtitan,
    "llm-foundry, ratio 9": lambda all_: pack_by_llm_foundry(all_, 9),
    "llm-foundry, ratio 11": lambda all_: pack_by_llm_foundry(all_, 11),
}


def main() -> None:
    """Print a table of all packers that are installed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--packer", default="")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(MEAN) - 0.5, 1.0, given.documents).astype(int))
    documents = [rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths.tolist()]
    print("| packer | filled | tokens that are lost | processor s |")
    print("| --- | --- | --- | --- |")
    for name, pack in PACKERS.items():
        if given.packer not in name:
            continue
        try:
            pack(documents[:100])  # imports
        except ImportError as error:
            print(f"| {name} | {error} | | |")
            continue
        rows, tokens, seconds = pack(documents)
        lost = 1 - tokens / lengths.sum()
        print(f"| {name} | {tokens / rows / LENGTH:.2%} | {lost:.2%} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
