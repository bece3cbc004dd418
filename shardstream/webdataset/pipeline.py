"""DataPipeline: a list of stages, each of which takes the iterator of the one before it."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset

from shardstream.errors import OptionError, get_logger
from shardstream.webdataset.environment import inherit_placement, main_placement
from shardstream.webdataset.utils import PipelineStage

_logger = get_logger(__name__)


class DataPipeline(IterableDataset[Any], PipelineStage):
    """Stages that are run one after the other; a torch ``IterableDataset``.

    Args:
        args: Stages: first a source (an iterable dataset, a loader, a list, or a function without arguments), then functions of an
            iterator, or objects with ``run(iterator)``. None is left out, a list is joined.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  (WebDataset ignores them, too)
        super().__init__()
        self.pipeline: list[Any] = []
        self.length = -1
        self.repetitions = 1
        self.nsamples = -1
        self._was_logged = False
        for arg in args:
            if arg is not None:
                self.pipeline += arg if isinstance(arg, list) else [arg]

    def close(self) -> None:
        """Close the stages that can be closed, and drop all."""
        for stage in self.pipeline:
            if hasattr(stage, "close"):
                stage.close()
        self.pipeline = []

    def invoke(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one stage.

        Raises:
            ValueError: If it is no stage.
        """
        if isinstance(f, IterableDataset | DataLoader) and not args:
            return iter(f)
        if isinstance(f, PipelineStage):
            return f.run(*args, **kwargs)
        if isinstance(f, list):
            return iter(f)
        if callable(f):
            return f(*args, **kwargs)
        raise OptionError(
            f"{f!r} is not a valid pipeline stage: it is neither callable nor has run()"
        )

    def iterator1(self) -> Iterator[Any]:
        """Run the stages once."""
        if not self.pipeline:
            raise OptionError("the pipeline has no stages, or was closed")
        source = self.invoke(self.pipeline[0])
        for stage in self.pipeline[1:]:
            source = self.invoke(stage, source)
        return source  # type: ignore[no-any-return]

    def iterator(self) -> Iterator[Any]:
        """Run the stages as often as was set; an empty pass ends it."""
        for _ in range(self.repetitions):
            count = 0
            for sample in self.iterator1():
                yield sample
                count += 1
            if not count:
                break

    def __iter__(self) -> Iterator[Any]:
        if not self._was_logged:
            self._was_logged = True
            _logger.info("%s runs %s", type(self).__name__, self.describe())
        if self.repetitions != 1 and self.nsamples > 0:
            return itertools.islice(self.iterator(), self.nsamples)
        return self.iterator()

    def describe(self) -> str:
        """Return in words how the pipeline is run, for the log."""
        return (
            "its stages one after the other, as webdataset does; shards are read from start to end"
        )

    def stage(self, i: int) -> Any:
        """Return a stage by number."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Append a stage to this pipeline."""
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        """Return a copy with more stages."""
        result = copy.copy(self)
        result.pipeline = [*self.pipeline, *args]
        result._was_logged = False
        return result

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Give this pipeline a ``len``, which changes nothing else."""
        if not silent:
            warnings.warn(
                "with_length() only sets the value of len(), for loops that need it; the number of samples stays the same",
                stacklevel=2,
            )
        self.size = n
        kind = type(self)
        if "__len__" not in vars(kind):
            self.__class__ = type(
                f"{kind.__name__}_Length", (kind,), {"__len__": _length, "__reduce__": _reduce}
            )
        return self

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Make each iteration yield so many items of this pipeline, from its start, repeated where needed."""
        self.repetitions = sys.maxsize
        self.nsamples = max(nsamples, nbatches)
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Repeat this pipeline a number of times, or without end, up to a number of items."""
        self.repetitions = nepochs if nepochs > 0 else sys.maxsize
        self.nsamples = nbatches
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_main_placement": main_placement()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inherit_placement(state.pop("_main_placement", None))
        self.__dict__.update(state)


def _length(self: Any) -> int:
    return int(self.size)


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickle by the class without a length, which can be imported."""
    return _with_length, (type(self).__mro__[1], self.__getstate__())


def _with_length(kind: type[DataPipeline], state: dict[str, Any]) -> DataPipeline:
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made.with_length(state["size"], silent=True)
