"""Lists of shards, and how they are split over nodes and workers."""

from __future__ import annotations

import glob
import itertools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from webdataset import shardlists as _theirs

from shardstream.errors import OptionError, shown
from shardstream.storage import expand_braces
from shardstream.storage import expand_urls as expand_patterns
from shardstream.webdataset import utils
from shardstream.webdataset.filters import pipelinefilter
from shardstream.webdataset.gopen import refuse_commands
from shardstream.webdataset.utils import substitute_variables

Shards = Iterator[dict[str, Any]]


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Keep every n-th shard of a job with n ranks; all ranks must get the shards in one order."""
    rank, world_size, _, _ = utils.pytorch_worker_info(group=group)
    yield from itertools.islice(src, rank, None, world_size)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Pass on all shards, and refuse a job of several ranks.

    Raises:
        ValueError: If there are several.
    """
    check_single_node(utils.pytorch_worker_info(group=group)[1])
    yield from src


def check_single_node(world_size: int) -> None:
    """Refuse a job of several ranks.

    Raises:
        ValueError: If there are several.
    """
    if world_size > 1:
        raise OptionError(
            f"the job has {world_size} ranks, and each would read all shards: you need to add an explicit nodesplitter to your "
            "input pipeline for multi-node training, such as nodesplitter=wds.split_by_node"
        )


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Keep every n-th shard of a loader with n workers; all workers must get the shards in one order."""
    _, _, worker, num_workers = utils.pytorch_worker_info()
    yield from itertools.islice(src, worker, None, num_workers)


def expand_urls(urls: str) -> list[str]:
    """Expand ``a::b`` joins, ``${X}`` (the environment variable WDS_X) and brace patterns.

    Raises:
        OptionError: If a variable is not set, a brace is not closed, or a URL is a command.
    """
    refuse_commands(urls)
    expanded = expand_patterns(substitute_variables(urls))
    for url in expanded:
        refuse_commands(url)
    return expanded


def expand_source(source: Any, max_urls: int = int(1e9)) -> list[str]:
    """Return the URLs of a pattern, list or iterable.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(source, str):
        return expand_urls(source)
    if not utils.is_iterable(source):
        raise OptionError(
            f"shards must be a URL, a pattern or a list of URLs, not {type(source).__name__}"
        )
    return list(itertools.islice(source, max_urls))


def _check(urls: list[Any]) -> list[str]:
    if not urls:
        raise OptionError("no shards found: the list of URLs is empty")
    wrong = next((url for url in urls if not isinstance(url, str)), None)
    if wrong is not None:
        raise OptionError(f"a URL must be text, not {wrong!r}; pass str(path) for a path")
    return urls


class SimpleShardList(_theirs.SimpleShardList):
    """The shards of a pattern or list, in order, or in one order for a seed.

    Args:
        urls: A pattern or a list of URLs.
        seed: Seed of the order; None keeps the order, True takes one from the clock.
    """

    def __init__(self, urls: str | Iterable[str], seed: Any = None) -> None:
        super().__init__(_check(expand_urls(urls) if isinstance(urls, str) else list(urls)), seed)


def resampled_(src: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    """Yield items that are drawn with replacement, in another order each time."""
    rng = random.Random(os.urandom(20))
    items = list(src)
    if not items:
        raise OptionError(
            "resampled: there is no shard to draw from; check the pattern, and the number of shards per worker"
        )
    for _ in range(n):
        yield rng.choice(items)


resampled = pipelinefilter(resampled_)


def non_empty(
    src: Iterable[Any],
    message: str = "pipeline stage received no data at all and this was declared as an error",
) -> Iterator[Any]:
    """Pass on all items, and refuse an empty source.

    Raises:
        OptionError: If there is no item.
    """
    count = 0
    for item in src:
        yield item
        count += 1
    if not count:
        raise OptionError(message)


class ResampledShards(_theirs.ResampledShards):
    """Shards that are drawn with replacement, by each worker in its own order.

    Args:
        urls: A pattern or a list of URLs.
        nshards: Shards of one iteration.
        seed: Part of the seed.
        worker_seed: Function that returns a number that differs between workers; by default by rank and worker.
        deterministic: Whether equal seeds give equal orders; else the order is another one each time.
        max_urls: URLs that are taken of an iterable.
        empty_check: Kept for compatibility: no shards are always an error.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        nshards: int = sys.maxsize,
        seed: Any = 0,
        worker_seed: Callable[[], int] | None = None,
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,
    ) -> None:
        checked = _check(expand_source(urls, max_urls))
        # Python salts other hashes by process
        number = seed if isinstance(seed, int) else utils.make_seed(seed)
        by_reader = worker_seed or utils.pytorch_worker_seed
        super().__init__(checked, nshards, number, by_reader, deterministic, max_urls, empty_check)


ResampledShardList = ResampledShards


def check_pid_is_running(pid: int) -> bool:
    """Return whether there is a process of this machine with a number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


class DirectoryShardList(_theirs.DirectoryShardList):
    """Shards of a local folder that other processes fill, each claimed by renaming it.

    Args:
        path: The folder, with a slash at its end.
        pattern: Pattern of names; braces are expanded.
        poll: Seconds between two looks at an empty folder; None ends the iteration instead.
        timeout: Seconds after which the iteration ends.
        mode: What becomes of a shard that was read: "resample" puts it back, "keep" renames it to ``…._done_``, "unlink" deletes it.
        select: "random" or "oldest".
        fate: Ignored, as in WebDataset.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "*.{tar,tgz,tar.tgz}",
        poll: float | None = 1,
        timeout: float = 1e12,
        mode: str = "resample",
        select: str = "random",
        fate: Any = None,
    ) -> None:
        if not path.endswith("/") or not os.path.isdir(path):
            raise OptionError(
                f"path must be a local folder with a slash at its end, not {shown(path)!r}"
            )
        if mode not in ("resample", "keep", "unlink") or select not in ("random", "oldest"):
            raise OptionError(
                f"mode must be resample, keep or unlink, and select random or oldest, not {mode!r} and {select!r}"
            )
        super().__init__(path, pattern, poll, timeout, mode, select, fate)

    def cleanup_files_without_processes(self) -> None:
        """Recycle the shards of processes of this machine that have ended."""
        for name in glob.glob(os.path.join(glob.escape(self.path), "*._*_")):
            pid = _theirs.get_pid_from_filename(name)
            if pid is not None and not check_pid_is_running(pid):
                self.recycle(name)

    def _candidates(self) -> list[str]:
        patterns = expand_braces(self.pattern)
        return sorted(
            {name for one in patterns for name in glob.glob(glob.escape(self.path) + one)}
        )

    def __iter__(self) -> Shards:
        start = time.monotonic()
        while time.monotonic() - start < self.timeout:
            names = self._candidates()
            if not names:
                if self.poll is None:
                    return
                time.sleep(self.poll)
                continue
            name = (
                random.choice(names)
                if self.select == "random"
                else min(names, key=os.path.getmtime)
            )
            active = f"{name}._{os.getpid()}_"
            try:
                os.rename(name, active)
            except FileNotFoundError:  # another process was faster
                continue
            yield {"url": active}
            self.recycle(active)
            self.cleanup_files_without_processes()


def shardspec(spec: str) -> SimpleShardList:
    """Return the shards of a pattern."""
    refuse_specification(spec)
    return SimpleShardList(spec)


def refuse_specification(spec: str) -> None:
    """Refuse a YAML or JSON file of datasets.

    Raises:
        OptionError: If it is one.
    """
    if spec.endswith((".yaml", ".yml", ".json")):
        raise OptionError(
            f"{shown(spec)}: specifications of shards are not read (webdataset calls them obsolete); pass a pattern or a list of URLs, "
            "mix datasets with RandomMix, or read an index.json with shardstream.ShardDataset"
        )
