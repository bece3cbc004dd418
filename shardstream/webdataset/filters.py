"""Stages: webdataset's own, but for those that decode or cache samples, and for handlers, which get no error of the program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from webdataset import filters as _theirs
from webdataset.filters import FilterFunction, RestCurried, decode_bin, decode_text, pipelinefilter

from shardstream.webdataset import autodecode
from shardstream.webdataset.handlers import Handler, UnsafeError, goes_on, reraise_exception
from shardstream.webdataset.utils import PipelineStage

Items = Iterable[Any]


def __getattr__(name: str) -> Any:
    """Return a stage or function that is webdataset's as it is."""
    return getattr(_theirs, name)


class GuardedStage(RestCurried):
    """A stage whose handler gets no `OptionError`: it is an error of the program, and skipping it would lose every sample."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__(f)
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        """Return the stage with these arguments."""
        given = inspect.signature(self.f).bind(None, *args, **kw)
        if "handler" in given.arguments:
            handler = functools.partial(goes_on, handler=given.arguments["handler"])
            given.arguments["handler"] = handler
        return FilterFunction(self.f, *given.args[1:], **given.kwargs)


map = GuardedStage(_theirs._map)
map_dict = GuardedStage(_theirs._map_dict)
map_tuple = GuardedStage(_theirs._map_tuple)
rename = GuardedStage(_theirs._rename)
to_tuple = GuardedStage(_theirs._to_tuple)


def _decode(
    data: Items, *args: Any, handler: Handler = reraise_exception, **kw: Any
) -> Iterator[Any]:
    """Yield decoded samples; arguments as in `autodecode.Decoder`, image names as text."""
    handlers = [autodecode.imagehandler(one) if isinstance(one, str) else one for one in args]
    decoder = autodecode.Decoder(handlers, **kw)
    for sample in data:
        try:
            decoded = decoder(sample)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if goes_on(error, handler):
                continue
            break
        yield decoded


decode = pipelinefilter(_decode)


def decode_pickle(stream: Any) -> Any:
    """Refuse a pickle."""
    return autodecode.unpickle_loads(stream.read())


default_decoders: list[tuple[str, Any]] = [
    ("*.bin", decode_bin),
    ("*.txt", decode_text),
    ("*.pyd", decode_pickle),
]


def _xdecode(
    source: Items, *args: tuple[str, Any], defaults: Any = default_decoders, **kw: Any
) -> Iterator[Any]:
    """Decode fields by functions of a stream: ``(pattern, function)``, or ``extension=function``; False keeps bytes.

    Raises:
        ValueError: If a field has no decoder, unless ``must_decode=False``.
    """
    return _theirs._xdecode(source, *args, defaults=defaults, **kw)  # type: ignore[no-any-return]


xdecode = pipelinefilter(_xdecode)


class Cached(_theirs.Cached):
    """Keep all samples of the first complete pass in memory, and yield those afterwards."""

    cached: list[Any] | None

    def run(self, source: Items) -> Iterator[Any]:
        """Yield the samples."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []  # webdataset keeps them in the stage: two passes at a time would mix
        for sample in source:
            kept.append(sample)
            yield sample
        self.cached = kept


class LMDBCached(PipelineStage):
    """Refuse WebDataset's cache of samples in LMDB: it holds pickles."""

    def __init__(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        raise UnsafeError(
            "LMDBCached keeps samples as pickles, which could run code when they are read; pass cache_dir= to WebDataset, which "
            "keeps the bytes of remote shards, or use Cached() where the samples fit in memory"
        )
