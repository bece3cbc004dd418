"""DataPipeline: webdataset's list of stages, with a log line, and pickled with its rank and length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Self

from webdataset import pipeline as _theirs

from shardstream.errors import OptionError, get_logger
from shardstream.webdataset.utils import inherit_placement, main_placement

_logger = get_logger(__name__)


class DataPipeline(_theirs.DataPipeline):
    """Stages that are run one after the other; a torch ``IterableDataset``.

    Args:
        args: Stages: first a source (an iterable dataset, a loader, a list, or a function without arguments), then functions of an
            iterator, or objects with ``run(iterator)``. None is left out, a list is joined.
    """

    _was_logged = False

    def close(self) -> None:
        """Close the stages that can be closed, and drop all."""
        super().close()
        self.pipeline: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if not self.pipeline:
            raise OptionError("the pipeline has no stages, or was closed")
        if not self._was_logged:
            self._was_logged = True
            _logger.info("%s runs %s", type(self).__name__, self.describe())
        return super().__iter__()  # type: ignore[no-any-return]

    def describe(self) -> str:
        """Return in words how the pipeline is run, for the log."""
        return (
            "its stages one after the other, as webdataset does; shards are read from start to end"
        )

    def compose(self, *args: Any) -> Self:
        """Return a copy with more stages."""
        result = super().compose(*args)
        result._was_logged = False
        return result  # type: ignore[no-any-return]

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
