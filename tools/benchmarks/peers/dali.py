"""DALI on the CPU: its webdataset reader with a buffer of 1,024 samples of tars in order, in its own threads.

With ``fast`` it decodes, crops and scales by itself; else Pillow does in the thread that reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from benchmarks.case import Case, Epochs
from benchmarks.loaders import collate
from benchmarks.objects import list_tars

FORMAT = "tar"


@pipeline_def(device_id=None)  # type: ignore[untyped-decorator]
def _pipeline(case: Case) -> Any:
    tars = sorted(list_tars(case.location))
    options = {"random_shuffle": True, "pad_last_batch": True, "prefetch_queue_depth": 2}
    first, *others = fn.readers.webdataset(paths=tars, ext=list(case.fields), **options)
    if case.decoder == "fast":
        crop = fn.decoders.image_random_crop(first, output_type=types.RGB)
        first = fn.resize(crop, size=(224, 224), interp_type=types.INTERP_LINEAR)
    return first, *others


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    running = _pipeline(case, batch_size=case.batch_size, num_threads=max(1, case.workers))
    make = collate(case)

    def epoch(_: int) -> Iterator[Any]:
        for left in range(case.samples, 0, -case.batch_size):  # the last batch repeats a sample
            first, *others = running.run()
            rows = [[np.array(one).tobytes() for one in column][:left] for column in others]
            if case.decoder == "fast":
                pixels = torch.from_numpy(np.array(first.as_array()[:left])).permute(0, 3, 1, 2)
                yield pixels.contiguous(), torch.tensor(list(map(int, rows[0])))
                continue
            rows = [[np.array(one).tobytes() for one in first][:left], *rows]
            yield make(
                [dict(zip(case.fields, row, strict=True)) for row in zip(*rows, strict=True)]
            )

    return epoch
