"""What contestants' loaders share: the options of torch's `DataLoader`, a shuffle buffer, batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any, TypeVar

from benchmarks.case import Case, Epochs

T = TypeVar("T")
_BUFFER_SAMPLES = 1000


def loader_options(case: Case) -> dict[str, Any]:
    """Return the arguments of a loader; raw samples stay a list."""
    options = {"batch_size": case.batch_size} | worker_options(case)
    return options | {"collate_fn": list} if case.task == "raw" else options


def worker_options(case: Case) -> dict[str, Any]:
    """Return the arguments of a loader for its processes."""
    if not case.workers:
        return {"num_workers": 0}
    return {
        "num_workers": case.workers,
        "persistent_workers": True,
        "prefetch_factor": case.prefetch,
    }


def epochs_of(case: Case, loader: Any) -> Epochs:
    """Return the function that makes the batches of an epoch, for a loader without epoch numbers."""
    return (lambda _: loader) if case.task == "raw" else (lambda _: map(tuple, loader))


def collate(case: Case) -> Callable[[Iterable[Any]], Any]:
    """Return the function from raw samples to a batch, which workers can be sent."""
    return keep if case.task == "raw" else decode_batch


def keep(samples: Iterable[T]) -> list[T]:
    """Return a batch of raw samples (`list` itself is no function to Grain and SPDL)."""
    return list(samples)


def decode_batch(samples: Iterable[Any]) -> tuple[Any, ...]:
    """Return images and labels of raw samples, decoded with Pillow."""
    from torch.utils.data import default_collate  # noqa: PLC0415  (raw rows need no torch)

    from benchmarks import images  # noqa: PLC0415

    return tuple(default_collate(list(map(images.example, samples))))


def shuffled(samples: Iterable[T], rng: random.Random) -> Iterator[T]:
    """Yield samples in random order, from a buffer of 1,000, as `webdataset` does."""
    waiting = iter(samples)
    buffer = list(islice(waiting, _BUFFER_SAMPLES))
    for sample in waiting:
        place = rng.randrange(_BUFFER_SAMPLES)
        buffer[place], sample = sample, buffer[place]  # noqa: PLW2901
        yield sample
    rng.shuffle(buffer)
    yield from buffer


def joined(members: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield samples of the members of tars: names up to the first dot are keys.

    >>> list(joined([("1.jpg", b"x"), ("1.cls", b"0"), ("2.jpg", b"y")]))
    [{'jpg': b'x', 'cls': b'0'}, {'jpg': b'y'}]
    """
    for _, group in groupby(members, key=lambda member: member[0].partition(".")[0]):
        yield {name.partition(".")[2]: data for name, data in group}


def batched(samples: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield batches; the last one may be smaller."""
    waiting = iter(samples)
    while batch := list(islice(waiting, size)):
        yield batch
