"""All samples of a dataset in one order, with its steps, to be cut into ranges that are read anywhere (`ss.reshard`)."""

from __future__ import annotations

from dataclasses import dataclass

from shardstream.catalog import ObjectCatalog
from shardstream.errors import OptionError
from shardstream.pipeline.indexed_source import SamplesSource, numbered_source
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.rows import RowSource
from shardstream.pipeline.sample_steps import MapTuple, OpenFields, ToTuple
from shardstream.pipeline.stage import ItemStage, Stage
from shardstream.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All samples of a dataset, in the order without shuffle, and the steps that each sample passes.

    Args:
        samples: The samples by number.
        stages: Steps that depend on one sample only; `Select` leaves samples out.
        steps: Their signatures.
        seed: Seed of steps with random numbers.
        epoch: Epoch of these numbers.
        classes: Names of the classes; None if there are none.
    """

    samples: Samples
    stages: tuple[Stage, ...] = ()
    steps: tuple[str, ...] = ()
    seed: int = 0
    epoch: int = 0
    classes: tuple[str, ...] | None = None


def records_of(pipeline: Pipeline, classes: tuple[str, ...] | None, epoch: int) -> Records:
    """Return the samples and steps of a pipeline.

    Args:
        pipeline: The pipeline of a dataset.
        classes: Names of its classes.
        epoch: Epoch of steps with random numbers.

    Raises:
        OptionError: If its samples have no fixed order, or a step needs more than one of them.
    """
    source = pipeline.source
    numbered_source(source)
    if isinstance(source, RowSource):
        raise _refusal(
            "rows are made of parts of samples when they are read",
            "write the samples; or rows, each with a __key__ of its own, with ss.pack(iterable, dest)",
        )
    if not isinstance(source, SamplesSource):
        raise _refusal(
            "a mix has no order of its own",
            "write each dataset, or ShardDataset([url, url]) without weights",
        )
    if source.draws:
        raise _refusal(
            "weights= draws samples several times, and their keys would repeat", "leave it out"
        )
    if isinstance(source.samples, ObjectCatalog):
        raise _refusal("loose files are not shards", "write them with ss.pack")
    if source.shuffle:
        raise _refusal(
            "the dataset is shuffled, in another order for each epoch",
            "leave shuffle= out, and pass seed= to reshard for a random order",
        )
    if pipeline.on_error != "raise":
        raise _refusal(
            "on_error= would leave bad samples out in silence",
            "leave it out, and bad samples with select()",
        )
    for step, stage in zip(pipeline.steps, pipeline.stages, strict=True):
        _check_stage(stage, step.partition("(")[0])
    return Records(
        samples=source.samples,
        stages=pipeline.stages,
        steps=pipeline.steps,
        seed=source.seed,
        epoch=epoch,
        classes=classes,
    )


def _check_stage(stage: Stage, name: str) -> None:
    if isinstance(stage, ToTuple | MapTuple):
        raise _refusal(
            f"the step {name} returns tuples, but a sample is a dict of fields",
            "leave it out, or use rename(..., keep=False)",
        )
    if isinstance(stage, OpenFields):
        raise _refusal("lazy= leaves the bytes of fields unread", "leave it out")
    if not isinstance(stage, ItemStage):
        raise _refusal(
            f"the step {name} needs several samples, or changes their number or order",
            "leave it out; map, select, decode, rename and stages of one item per item can be written, and reshard(batch_size=) calls "
            "map= with lists",
        )


def _refusal(reason: str, remedy: str) -> OptionError:
    return OptionError(f"this dataset cannot be cut into parts: {reason}", remedy=remedy)
