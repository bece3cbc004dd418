"""MosaicML streaming: MDS shards of raw bytes with its default shuffle (py1e).

Local shards are read in place. From S3 it downloads whole shards to a cache that is new for each repetition, ahead of use
(``predownload`` of 8 batches: the default for one batch size). Shards have the size of shardstream's.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import epochs_of, loader_options

FORMAT = "mds"


def import_streaming() -> Any:
    """Import MosaicML's package, also if torchvision for CPU is missing.

    It imports torchvision for image datasets that are not used here, so empty modules can replace it.
    """
    try:
        import torchvision  # noqa: F401, PLC0415
    except (ImportError, RuntimeError, OSError):
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            empty = types.ModuleType(f"torchvision{name}")
            empty.__spec__ = ModuleSpec(empty.__name__, None)
            sys.modules[empty.__name__] = empty
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
        vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None
    import streaming  # noqa: PLC0415

    return streaming


def make_loader(case: Case) -> Any:
    """Return the loader of a case."""
    streaming = import_streaming()
    example = images.example

    class Photos(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        """Decodes samples in the worker."""

        def __getitem__(self, number: int) -> Any:
            return example(super().__getitem__(number))

    remote = case.location.startswith("s3://")
    kind = Photos if case.task == "train" else streaming.StreamingDataset
    dataset = kind(
        remote=case.location if remote else None,
        local=f"{case.cache}/mds" if remote else case.location,
        shuffle=True,
        batch_size=case.batch_size,
        predownload=8 * case.batch_size,
    )
    return streaming.StreamingDataLoader(dataset, **loader_options(case))


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    return epochs_of(case, make_loader(case))
