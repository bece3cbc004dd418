"""SPDL: whole tars parsed by its reader in C++, tars in random order and a buffer of 1,000, batches made in threads.

It is built for threads, which decode without holding Python's lock: workers are threads here. With ``fast`` its own decoder
(FFmpeg's) decodes, crops and scales.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import spdl.io
from spdl.pipeline import PipelineBuilder

from benchmarks.case import Case, Epochs
from benchmarks.loaders import batched, collate, joined, shuffled
from benchmarks.objects import list_tars

FORMAT = "tar"


def decode_fast(samples: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """Return images and labels, decoded, cropped and scaled by SPDL."""
    import torch  # noqa: PLC0415  (raw rows need no torch)

    from benchmarks import images  # noqa: PLC0415

    frames = []
    for sample in samples:
        packets = spdl.io.demux_image(bytes(sample["jpg"]))
        left, top, right, bottom = map(int, images.crop_box(packets.width, packets.height))
        crop = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1"
        scale = f"scale={images.SIDE}:{images.SIDE}:flags=bilinear,format=rgb24"
        frames.append(spdl.io.decode_packets(packets, filter_desc=f"{crop},{scale}"))
    pixels = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
    return pixels.contiguous(), torch.tensor([int(bytes(sample["cls"])) for sample in samples])


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    make: Callable[[Any], Any] = decode_fast if case.decoder == "fast" else collate(case)
    threads = max(1, case.workers)

    def raw_batches(number: int) -> Iterator[Any]:
        rng = random.Random(number)
        tars = list_tars(case.location)
        rng.shuffle(tars)
        members = (
            member for tar in tars for member in spdl.io.iter_tarfile(Path(tar).read_bytes())
        )
        return batched(shuffled(joined(members), rng), case.batch_size)

    def epoch(number: int) -> Iterator[Any]:
        builder = PipelineBuilder().add_source(raw_batches(number))
        builder = builder.pipe(make, concurrency=threads).add_sink(case.prefetch * threads)
        pipeline = builder.build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch
