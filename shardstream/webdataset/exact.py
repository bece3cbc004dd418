"""Source of samples in the order of an epoch plan: exact over ranks and workers, for shards that all have an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from torch.utils.data import IterableDataset

from shardstream.errors import OptionError
from shardstream.loader import ShardDataset, WorkerIterator, begin_epoch, current_worker_info
from shardstream.pipeline import OnError, OrderOptions
from shardstream.webdataset import handlers, shardlists
from shardstream.webdataset.cache import islocal
from shardstream.webdataset.environment import variable
from shardstream.webdataset.gopen import rewrite_url

_POLICIES: tuple[tuple[Callable[[Exception], Any], OnError], ...] = (
    (handlers.reraise_exception, "raise"),
    (handlers.warn_and_continue, "warn"),
    (handlers.ignore_and_continue, "skip"),
)


class ExactSource(IterableDataset[Any]):
    """Samples of shards, each once in an epoch, whatever the number of ranks, workers and shards.

    Args:
        urls: A pattern, folder or list of URLs.
        options: Options of `ShardDataset`.
        is_split_by_node: Whether several ranks are allowed.

    Raises:
        OptionError: If a shard has no index.
        StorageError: If the shards cannot be listed.
    """

    def __init__(self, urls: Any, options: Mapping[str, Any], *, is_split_by_node: bool) -> None:
        super().__init__()
        expanded = shardlists.expand_source(urls)
        self.dataset = ShardDataset(
            [rewrite_url(url) for url in expanded],
            order=OrderOptions(remainder="keep"),
            **options,
        )
        self.is_split_by_node = is_split_by_node
        self._epoch: int | None = None
        self._passes = 0

    def begin(self) -> None:
        """Make the next pass the first one of an iteration, so that all workers read the same epochs."""
        self._epoch = None

    def __iter__(self) -> Iterator[Any]:
        placement = self.dataset.placement
        if not self.is_split_by_node:
            shardlists.check_single_node(placement.world_size)
        if variable("NUM_WORKERS") is not None:
            raise OptionError(
                "exact=True splits over torch's workers; unset WORKER and NUM_WORKERS"
            )
        if self._epoch is None:
            self._epoch, self._passes = begin_epoch(self.dataset, placement), 0
        epoch = self._epoch + self._passes
        self._passes += 1
        return self._read(
            WorkerIterator(self.dataset.pipeline, current_worker_info(self, placement), epoch)
        )

    def _read(self, iterator: WorkerIterator) -> Iterator[Any]:
        try:
            for sample in iterator:
                url = sample["__url__"]
                if islocal(url):
                    sample["__local_path__"] = url2pathname(urlparse(url).path)
                yield sample
        finally:
            iterator.close()


def check_exact(arguments: Mapping[str, Any], is_resampled: bool) -> OnError:
    """Return the policy for bad samples, and refuse options of WebDataset that a plan cannot follow.

    Raises:
        OptionError: If there is one.
    """
    policy = next((name for one, name in _POLICIES if one is arguments["handler"]), None)
    splitters = (shardlists.split_by_node, shardlists.single_node_only)
    reasons = {
        "resampled=True": is_resampled,
        "nodesplitter=, unless it is wds.split_by_node": arguments["nodesplitter"] not in splitters,
        "workersplitter=": arguments["workersplitter"] is not shardlists.split_by_worker,
        "select_files=": arguments["select_files"] is not None,
        "rename_files=": arguments["rename_files"] is not None,
        "a handler= of one's own": policy is None,
    }
    wrong = [name for name, is_wrong in reasons.items() if is_wrong]
    if wrong or policy is None:
        raise OptionError(f"exact=True does not go with {', '.join(wrong)}; leave one of them out")
    return policy
