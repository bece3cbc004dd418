"""Decode one sample outside a dataset."""

from __future__ import annotations

from typing import Any, Self, cast

from shardstream.codecs import AudioDecoder, VideoDecoder
from shardstream.format import Sample
from shardstream.loader.steps import ItemSteps
from shardstream.pipeline import Context, Handler, ItemStage, Stage, open_runner


class _OneStep(ItemSteps):
    """Receives the stage that a step of a dataset appends."""

    stage: Stage | None = None
    _num_stages = 0

    def then(self, stage: Stage) -> Self:
        """Keep the stage."""
        self.stage = stage
        return self


def decode_sample(
    sample: Sample, *handlers: str | AudioDecoder | VideoDecoder | Handler, **options: Any
) -> Sample:
    """Decode the fields of one sample, as `ShardDataset.decode` does.

    >>> decode_sample({"__key__": "a", "cls": b"7", "txt": b"cat"})
    {'__key__': 'a', 'cls': 7, 'txt': 'cat'}

    Args:
        sample: Fields as bytes; other values stay as they are.
        handlers: As in ``decode``: names, and functions ``handler(".jpg", data)``.
        options: As in ``decode``: ``only``, ``fields``, ``max_side``, ``upright``, ``scale_16_bits``, ``masks``.

    Raises:
        DecodeError: If a field cannot be decoded.
        OptionError: If an option is invalid.
    """
    stage = cast("ItemStage", _OneStep().decode(*handlers, **options).stage)
    (decoded,), _ = open_runner([stage], Context())([sample], [0])
    return cast("Sample", decoded)
