"""Stages: functions ``stage(source, …)`` that yield items, and their curried forms for pipelines."""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch

from shardstream.errors import OptionError
from shardstream.webdataset import autodecode, utils
from shardstream.webdataset.handlers import (
    Handler,
    UnsafeError,
    apply_each,
    goes_on,
    reraise_exception,
)

Items = Iterable[Any]


class FilterFunction:
    """A stage with its arguments; called with the source.

    Args:
        f: Function ``f(source, …)`` that returns an iterator.
        args: Its further arguments.
        kw: Its keyword arguments.
    """

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f = f
        self.args = args
        self.kw = kw

    def __call__(self, data: Any) -> Any:
        """Run the stage on a source."""
        return self.f(data, *self.args, **self.kw)

    def __repr__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args} {self.kw}>"


class RestCurried:
    """A function that takes all arguments of a stage but its source, and returns a `FilterFunction`."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        """Return the stage with these arguments."""
        return FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Any]) -> RestCurried:
    """Turn a function ``f(source, …)`` into one that is called without the source."""
    return RestCurried(f)


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    """Pass a source through stages."""
    for stage in args:
        source = stage(source)
    return source


def getfirst(
    a: Mapping[str, Any],
    keys: str | Sequence[str],
    default: Any = None,
    missing_is_error: bool = True,
) -> Any:
    """Return the value of the first key that a sample has; keys are a list, or joined by ";".

    Raises:
        ValueError: If there is none and ``missing_is_error``.
    """
    names = keys.split(";") if isinstance(keys, str) else keys
    for name in names:
        if name in a:
            return a[name]
    if missing_is_error:
        raise ValueError(f"didn't find {list(names)} in {list(a)}")
    return default


def transform_with(
    sample: Sequence[Any], transformers: Sequence[Callable[[Any], Any] | None] | None
) -> Any:
    """Apply one function to each value; None, or no function, leaves a value as it is."""
    if not transformers:
        return sample
    if len(transformers) > len(sample):
        raise OptionError(f"{len(transformers)} functions for {len(sample)} values")
    functions = itertools.chain(transformers, itertools.repeat(None))
    return [value if f is None else f(value) for value, f in zip(sample, functions, strict=False)]


def _info(
    data: Items,
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Any]:
    """Print the first samples, and then every one of so many."""
    stream = stream or sys.stderr
    for number, sample in enumerate(data):
        if number < n or (every > 0 and (number + 1) % every == 0):
            if fmt is not None:
                stream.write(fmt.format(**sample) + "\n")
            else:
                lines = [
                    f"--- {name}",
                    *(f"{key} {value!r}"[: width + len(key) + 1] for key, value in sample.items()),
                ]
                stream.write("\n".join(lines) + "\n")
        yield sample


info = pipelinefilter(_info)


def pick(buf: list[Any], rng: random.Random) -> Any:
    """Remove a random item from a list and return it."""
    number = rng.randint(0, len(buf) - 1)
    buf[number], buf[-1] = buf[-1], buf[number]
    return buf.pop()


def _shuffle(
    data: Items,
    bufsize: int = 1000,
    initial: int = 100,
    rng: random.Random | None = None,
    seed: Any = None,
    handler: Handler | None = None,  # noqa: ARG001  (part of the signature; nothing here can fail)
) -> Iterator[Any]:
    """Yield items in the order of a buffer that is shuffled, the same for equal ``rng`` or ``seed`` as WebDataset's.

    Args:
        data: The items.
        bufsize: Items in the buffer.
        initial: Items to collect before the first is yielded.
        rng: Random generator. Where it stands before a split over workers, each worker must get an equal one.
        seed: Seed of a new generator, instead of ``rng``; without both the order is different each time.
        handler: Never called: nothing here fails.
    """
    if seed is not None and rng is not None:
        raise OptionError("shuffle takes rng or seed, not both")
    if rng is None:
        rng = random.Random(int((os.getpid() + time.time()) * 1e9) if seed is None else seed)
    initial = min(initial, bufsize)
    source, buffer = iter(data), list[Any]()
    for item in source:
        buffer.append(item)
        if len(buffer) < bufsize:  # the buffer grows by one for each item that is yielded
            buffer.extend(itertools.islice(source, 1))
        if len(buffer) >= initial:
            yield pick(buffer, rng)
    while buffer:
        yield pick(buffer, rng)


shuffle = pipelinefilter(_shuffle)


class detshuffle(utils.PipelineStage):
    """Shuffle in an order that depends on a seed and on how often the stage was run in this process."""

    def __init__(
        self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1
    ) -> None:
        self.bufsize = bufsize
        self.initial = initial
        self.seed = seed
        self.epoch = epoch

    def run(self, src: Items) -> Iterator[Any]:
        """Yield the items of the next epoch."""
        self.epoch += 1
        return _shuffle(src, self.bufsize, self.initial, random.Random(self.seed + self.epoch))


def _select(data: Items, predicate: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the samples that a predicate accepts."""
    return (sample for sample in data if predicate(sample))


select = pipelinefilter(_select)


def _log_keys(data: Items, logfile: str | None = None) -> Iterator[Any]:
    """Append number, worker, rank and key of each sample to a file."""
    if not logfile:
        yield from data
        return
    with open(logfile, "a", buffering=1, encoding="utf-8") as stream:
        for number, sample in enumerate(data):
            # One write of a line to a file in append mode: workers do not mix their lines.
            names = ("__worker__", "__rank__", "__key__")
            stream.write(
                "\t".join((str(number), *(str(sample.get(name)) for name in names))) + "\n"
            )
            yield sample


log_keys = pipelinefilter(_log_keys)


def _decode(
    data: Items, *args: Any, handler: Handler = reraise_exception, **kw: Any
) -> Iterator[Any]:
    """Yield decoded samples; arguments as in `autodecode.Decoder`, image names as text."""
    handlers = [autodecode.imagehandler(one) if isinstance(one, str) else one for one in args]
    return apply_each(data, autodecode.Decoder(handlers, **kw), handler)


decode = pipelinefilter(_decode)


def _map(
    data: Items, f: Callable[[Any], Any], handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Yield ``f(sample)``; None leaves a sample out, and a dict keeps the key of its sample."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as error:  # noqa: BLE001  (the handler decides)
            if goes_on(error, handler):
                continue
            break
        if result is None:
            continue
        if isinstance(sample, dict) and isinstance(result, dict):
            result["__key__"] = sample.get("__key__")
        yield result


map = pipelinefilter(_map)


def _rename(
    data: Items, handler: Handler = reraise_exception, keep: bool = True, **kw: Any
) -> Iterator[Any]:
    """Rename fields: ``new="old;or_old"``; other fields stay if ``keep``."""
    old = {
        name
        for names in kw.values()
        for name in (names.split(";") if isinstance(names, str) else names)
    }

    def renamed(sample: dict[str, Any]) -> dict[str, Any]:
        result = {name: value for name, value in sample.items() if name not in old} if keep else {}
        return result | {new: getfirst(sample, names) for new, names in kw.items()}

    return apply_each(data, renamed, handler)


rename = pipelinefilter(_rename)


def _associate(data: Items, associator: Any, **kw: Any) -> Iterator[Any]:  # noqa: ARG001  (WebDataset ignores them, too)
    """Add the entries that a function or dict has for the key of each sample."""
    for sample in data:
        key = sample["__key__"]
        sample.update(associator(key) if callable(associator) else associator.get(key, {}))
        yield sample


associate = pipelinefilter(_associate)


def _map_dict(
    data: Items, handler: Handler = reraise_exception, **kw: Callable[[Any], Any]
) -> Iterator[Any]:
    """Replace fields by ``function(value)``."""
    if not kw or not all(map_callable(kw.values())):
        raise OptionError(f"map_dict takes at least one field=function, not {kw}")

    def mapped(sample: dict[str, Any]) -> dict[str, Any]:
        for name, f in kw.items():
            sample[name] = f(sample[name])
        return sample

    return apply_each(data, mapped, handler)


map_dict = pipelinefilter(_map_dict)


def map_callable(values: Iterable[Any]) -> Iterator[bool]:
    """Yield for each value whether it is callable."""
    return (callable(value) for value in values)


def _to_tuple(
    data: Items,
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Iterator[Any]:
    """Yield tuples of fields; names are separate arguments, or one text separated by spaces."""
    if none_is_error is None:
        none_is_error = missing_is_error
    names = args[0].split() if len(args) == 1 and isinstance(args[0], str) else args

    def taken(sample: dict[str, Any]) -> tuple[Any, ...]:
        result = tuple(getfirst(sample, name, missing_is_error=missing_is_error) for name in names)
        if none_is_error and any(value is None for value in result):
            raise ValueError(f"to_tuple {names}: a value is None in {list(sample)}")
        return result

    return apply_each(data, taken, handler)


to_tuple = pipelinefilter(_to_tuple)


def _map_tuple(data: Items, *args: Any, handler: Handler = reraise_exception) -> Iterator[Any]:
    """Apply one function to each part of a tuple; None leaves a part as it is."""
    if not all(f is None or callable(f) for f in args):
        raise OptionError(f"map_tuple takes functions or None, not {args}")

    def mapped(sample: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(transform_with(sample, args[: len(sample)]))

    return apply_each(data, mapped, handler)


map_tuple = pipelinefilter(_map_tuple)


def combine_values(
    b: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True
) -> Any:
    """Combine the values of one field: numbers to an array, arrays and tensors stacked, others to a list."""
    first = b[0]
    if isinstance(first, int | float):
        return np.array(list(b)) if combine_scalars else b
    if isinstance(first, torch.Tensor | np.ndarray):
        if not combine_tensors:
            return b
        shapes = {tuple(value.shape) for value in b}
        if len(shapes) > 1:
            raise AssertionError(
                f"all shapes must be equal in collation, got {shapes}; resize them, or pass collation_fn="
            )
        return torch.stack(list(b)) if isinstance(first, torch.Tensor) else np.array(list(b))
    return list(b)


def default_collation_fn(
    samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True
) -> Any:
    """Combine samples, which are dicts or tuples of equal fields, to one of batches.

    Raises:
        AssertionError: If fields or shapes differ.
    """
    rows = [row if isinstance(row, dict) else dict(enumerate(row)) for row in samples]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise AssertionError(
            "keys don't match in different samples; use to_tuple, or pass collation_fn="
        )
    result = {
        name: combine_values([row[name] for row in rows], combine_tensors, combine_scalars)
        for name in rows[0]
    }
    return tuple(result.values()) if isinstance(samples[0], list | tuple) else result


def _batched(
    data: Items,
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """Yield batches; a shorter last one if ``partial``."""
    batch: list[Any] = []
    for sample in data:
        batch.append(sample)
        if len(batch) >= batchsize:
            yield batch if collation_fn is None else collation_fn(batch)
            batch = []
    if batch and partial:
        yield batch if collation_fn is None else collation_fn(batch)


batched = pipelinefilter(_batched)


def _unlisted(data: Items) -> Iterator[Any]:
    """Yield the samples of lists."""
    for batch in data:
        if not isinstance(batch, list):
            raise OptionError(f"unlisted takes lists, not {type(batch).__name__}; use unbatched")
        yield from batch


unlisted = pipelinefilter(_unlisted)


def _unbatched(data: Items) -> Iterator[Any]:
    """Yield the samples of batches, which are tuples or dicts of equally long parts."""
    for batch in data:
        if isinstance(batch, list | tuple):
            for number in range(len(batch[0])):
                yield tuple(part[number] for part in batch)
        elif isinstance(batch, dict):
            lengths = {len(part) for part in batch.values()}
            if len(lengths) != 1:
                raise OptionError(f"the parts of a batch have different lengths {sorted(lengths)}")
            for number in range(lengths.pop()):
                yield {name: part[number] for name, part in batch.items()}
        else:
            raise ValueError(f"unbatched takes tuples and dicts, not {type(batch).__name__}")


unbatched = pipelinefilter(_unbatched)


def _rsample(data: Items, p: float = 0.5) -> Iterator[Any]:
    """Keep each sample with a probability."""
    if not 0.0 <= p <= 1.0:
        raise OptionError(f"rsample: p must be from 0 to 1, not {p}")
    return (sample for sample in data if random.uniform(0.0, 1.0) < p)


rsample = pipelinefilter(_rsample)

slice = pipelinefilter(itertools.islice)


def _extract_keys(
    source: Items, *patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False
) -> Iterator[Any]:
    """Yield tuples of the values whose names match patterns, such as ``"*.png;*.jpg"``.

    Raises:
        ValueError: If a pattern matches several names, or none.
    """
    for sample in source:
        result = []
        for given in patterns:
            pattern = given.split(";") if isinstance(given, str) else given
            found = [
                x for x in sample if any(fnmatch(f".{x}", p) or fnmatch(x, p) for p in pattern)
            ]
            if not found and not ignore_missing:
                raise ValueError(f"cannot find {pattern} in sample keys {list(sample)}")
            if len(found) > 1 and duplicate_is_error:
                raise ValueError(f"several sample keys of {list(sample)} match {pattern}")
            result += [sample[name] for name in found[:1]]
        yield tuple(result)


extract_keys = pipelinefilter(_extract_keys)


def _rename_keys(
    source: Items,
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Iterator[Any]:
    """Rename entries by pattern: ``("new", pattern)`` or ``new=pattern``; the last that matches counts.

    Raises:
        ValueError: If two entries get one name, or a pattern matches none.
    """
    renamings = [*args, *kw.items()][::-1]
    for sample in source:
        renamed: dict[str, Any] = {}
        matched: set[str] = set()
        for path, value in sample.items():
            base = path.rpartition("/")[2].lower()
            new, pattern = next(((n, p) for n, p in renamings if fnmatch(base, p)), (None, ""))
            if new is None:
                renamed |= {path: value} if keep_unselected else {}
                continue
            matched.add(pattern)
            if new not in renamed:
                renamed[new] = value
            elif duplicate_is_error:
                raise ValueError(f"several entries of {list(sample)} are renamed to {new!r}")
        missing = {pattern for _, pattern in renamings} - matched
        if must_match and missing:
            raise ValueError(f"the patterns {sorted(missing)} match no entry of {list(sample)}")
        yield renamed


rename_keys = pipelinefilter(_rename_keys)


def decode_bin(stream: Any) -> bytes:
    """Read all bytes."""
    return bytes(stream.read())


def decode_text(stream: Any) -> str:
    """Read UTF-8 text."""
    return decode_bin(stream).decode("utf-8")


def decode_pickle(stream: Any) -> Any:
    """Refuse a pickle."""
    return autodecode.unpickle_loads(stream.read())


default_decoders: list[tuple[str, Any]] = [
    ("*.bin", decode_bin),
    ("*.txt", decode_text),
    ("*.pyd", decode_pickle),
]


def find_decoder(decoders: Sequence[tuple[str, Any]], path: str) -> Any:
    """Return the decoder of the last pattern that matches a name; None without one."""
    name = re.sub(r".*/", "", path)
    if name.startswith("__"):
        return utils.identity
    name = name.lower()
    return next(
        (f for p, f in reversed(decoders) if fnmatch(name, p) or fnmatch(f".{name}", p)), None
    )


def _xdecode(
    source: Items,
    *args: tuple[str, Any],
    must_decode: bool = True,
    defaults: Any = default_decoders,
    **kw: Any,
) -> Iterator[Any]:
    """Decode fields by functions of a stream: ``(pattern, function)``, or ``extension=function``; False keeps bytes.

    Raises:
        ValueError: If a field has no decoder and ``must_decode``.
    """
    decoders = [*defaults, *args, *((f"*.{name}", f) for name, f in kw.items())]
    for sample in source:
        decoded: dict[str, Any] = {}
        for path, data in sample.items():
            decoder = utils.identity if path.startswith("__") else find_decoder(decoders, path)
            if decoder is None and must_decode:
                raise ValueError(f"no decoder found for {path}; pass one, or must_decode=False")
            is_read = not path.startswith("__") and decoder and isinstance(data, bytes)
            decoded[path] = decoder(io.BytesIO(data) if is_read else data) if decoder else data
        yield decoded


xdecode = pipelinefilter(_xdecode)


class Cached(utils.PipelineStage):
    """Keep all samples of the first complete pass in memory, and yield those afterwards."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Items) -> Iterator[Any]:
        """Yield the samples."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            kept.append(sample)
            yield sample
        self.cached = kept


class LMDBCached(utils.PipelineStage):
    """Refuse WebDataset's cache of samples in LMDB: it holds pickles."""

    def __init__(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        raise UnsafeError(
            "LMDBCached keeps samples as pickles, which could run code when they are read; pass cache_dir= to WebDataset, which "
            "keeps the bytes of remote shards, or use Cached() where the samples fit in memory"
        )
