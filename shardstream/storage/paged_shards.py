"""The shards of a dataset whose manifest is written in pages; a page is read when one of its shards is needed.

A process keeps `PAGES_KEPT` pages, so its memory does not grow with the number of shards.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardstream.errors import ChangedError, IndexMismatchError, NotFoundError
from shardstream.format import (
    MANIFEST_NAME,
    ManifestPage,
    PagedManifest,
    ShardInfo,
    checksum,
    decode_manifest,
    decode_page,
    encode_page,
    fingerprint,
)
from shardstream.storage.fork_safety import new_lock
from shardstream.storage.store import Storage
from shardstream.storage.urls import join_url, parent_url

PAGES_KEPT = 128  # of 1,024 shards each: about 16 MB
_TRIES = 4
_THREADS = 16
_lock = new_lock()  # guards the kept pages of all datasets; not held while a page is read

Numbers = npt.NDArray[np.int64]


class PagedShards(Sequence[ShardInfo]):
    """Shards with absolute URLs, in the order of the dataset; picklable (without the pages) and thread-safe.

    Args:
        manifest: The decoded ``index.json``.
        url: Its URL.
        storage: Storage of the pages.
    """

    def __init__(self, manifest: PagedManifest, url: str, storage: Storage) -> None:
        self.manifest = manifest
        self.manifest_url = url
        self._storage = storage
        self._folder = join_url(parent_url(url), "x")[:-1]
        self._kept: OrderedDict[int, ManifestPage] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def __len__(self) -> int:
        return self.manifest.num_shards

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardInfo, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | tuple[ShardInfo, ...]:
        if isinstance(number, slice):
            return tuple([self[one] for one in range(*number.indices(len(self)))])
        if not -len(self) <= number < len(self):
            raise IndexError(f"shard {number} of {len(self)}")
        page, place = divmod(int(number) % len(self), self.manifest.page_shards)
        return self._page(page).shard(place, self._folder)

    def __iter__(self) -> Iterator[ShardInfo]:
        for number in range(len(self.manifest.digests)):
            page = self._kept.get(number) or self._read(number)  # not kept: others are in use
            for place in range(len(page)):
                yield page.shard(place, self._folder)

    @property
    def nsamples(self) -> int:
        """Samples in all shards."""
        return int(self.manifest.firsts[-1])

    @property
    def folder(self) -> str:
        """The folder of all shards, without a slash at its end."""
        return parent_url(self.manifest_url)

    def find_samples(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of each sample, and the sample's number in it; pages that are not kept are read concurrently.

        Args:
            numbers: Numbers of samples that exist, shape (n,).

        Returns:
            Two arrays of shape (n,).
        """
        pages = np.searchsorted(self.manifest.firsts, numbers, side="right") - 1
        shards, within = np.empty_like(numbers), np.empty_like(numbers)
        found = np.unique(pages).tolist()
        for number, page in zip(found, self._pages(found), strict=True):
            mine = pages == number
            ends = np.cumsum(page.nsamples)
            inside = numbers[mine] - self.manifest.firsts[number]
            places = np.searchsorted(ends, inside, side="right")
            shards[mine] = places + number * self.manifest.page_shards
            within[mine] = inside - (ends - page.nsamples)[places]
        return shards, within

    def first_samples(self, shards: Sequence[int]) -> Numbers:
        """Return the number of the first sample of each shard, shape (n,)."""
        firsts = np.empty(len(shards), dtype=np.int64)
        for place, shard in enumerate(shards):
            number, within = divmod(shard, self.manifest.page_shards)
            before = int(self._page(number).nsamples[:within].sum())
            firsts[place] = before + int(self.manifest.firsts[number])
        return firsts

    def find_names(self, names: Iterable[str]) -> dict[str, ShardInfo]:
        """Return the shards of some file names; names that are not listed are left out."""
        wanted = set(names)
        if not self.manifest.is_sorted:
            found = ((shard.url[len(self._folder) :], shard) for shard in self)
            return {name: shard for name, shard in found if name in wanted}
        result: dict[str, ShardInfo] = {}
        for name in sorted(wanted):
            number = bisect_right(self.manifest.first_names, name) - 1
            page = self._page(max(0, number))
            if name in page.names:
                result[name] = page.shard(page.names.index(name), self._folder)
        return result

    def has_same_beginning(self, other: PagedShards) -> bool:
        """Return whether another manifest of the folder begins with these shards, so that shards were added at most."""
        mine, theirs = self.manifest, other.manifest
        if mine.page_shards != theirs.page_shards or len(other) < len(self):
            return False
        *whole, last = mine.digests
        if list(theirs.digests[: len(whole)]) != whole:
            return False
        if theirs.digests[len(whole)] == last:
            return True
        return _digest(encode_page(other._page(len(whole)).first(self._count(len(whole))))) == last

    def _has_page(self, number: int, page_shards: int) -> bool:
        """Return whether there is a page of that number, in pages of so many shards."""
        return self.manifest.page_shards == page_shards and number < len(self.manifest.digests)

    def _count(self, number: int) -> int:
        """Return the shards of a page."""
        size = self.manifest.page_shards
        return min(size, len(self) - number * size)

    def _page(self, number: int) -> ManifestPage:
        with _lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        page = self._read(number)
        with _lock:
            self._kept[number] = page
            while len(self._kept) > PAGES_KEPT:
                self._kept.popitem(last=False)
        return page

    def _pages(self, numbers: Sequence[int]) -> list[ManifestPage]:
        missing = sum(number not in self._kept for number in numbers)
        if missing < 2 or self._storage.local_path(self.manifest_url) is not None:
            return [self._page(number) for number in numbers]
        with ThreadPoolExecutor(min(missing, _THREADS), "shardstream-pages") as pool:
            return list(pool.map(self._page, numbers))

    def _read(self, number: int) -> ManifestPage:
        """Read a page; bytes that do not match its checksum are read again, as they may have been damaged in transfer.

        Raises:
            ChangedError: If the dataset was replaced.
            IndexMismatchError: If the page does not match the manifest.
        """
        manifest = self.manifest
        url = self._folder + manifest.pages_name
        start, end = manifest.ends[number : number + 2].tolist()
        for _ in range(_TRIES):
            try:
                data = self._storage.read(url, start, end, size=int(manifest.ends[-1]))
            except NotFoundError as error:
                return self._read_replaced(number, error)
            if _digest(data) == manifest.digests[number]:
                return decode_page(
                    data,
                    nshards=self._count(number),
                    nsamples=int(manifest.firsts[number + 1] - manifest.firsts[number]),
                    url=url,
                    bounds=manifest.bounds(number),
                )
            self._storage.forget(url, start, end)
        raise IndexMismatchError(
            f"page {number} of the manifest does not match its checksum in {MANIFEST_NAME}",
            remedy="fetch the dataset again, or run 'shardstream index' to write the manifest again",
            shard=url,
            offset=start,
        )

    def _read_replaced(self, number: int, error: NotFoundError) -> ManifestPage:
        """Read a page of a manifest that was written again since it was opened; shards may have been added.

        Raises:
            NotFoundError: If the manifest is the same, so that its pages are missing.
            ChangedError: If the page is another one, or there are no pages any more.
        """
        url = self.manifest_url
        # Not from a cache, which may have the manifest from before.
        now = decode_manifest(self._storage.uncached().read(url), url=url)
        other = PagedShards(now, url, self._storage) if isinstance(now, PagedManifest) else None
        if other is not None and other.manifest.pages_name == self.manifest.pages_name:
            raise error
        if other is not None and other._has_page(number, self.manifest.page_shards):
            page = other._read(number)
            mine = page.first(self._count(number))
            if _digest(encode_page(mine)) == self.manifest.digests[number]:
                return mine
        raise ChangedError(
            "the dataset was replaced since it was opened: its manifest lists other shards",
            remedy="open the dataset again and start the epoch again; write a new dataset to a folder of its own",
            shard=self.manifest_url,
        ) from error


class LocalPaths:
    """The local path of each shard; None if they are remote."""

    def __init__(self, shards: PagedShards, storage: Storage) -> None:
        self._shards = shards
        self._storage = storage
        self._are_local = storage.local_path(shards.manifest_url) is not None

    def __getitem__(self, number: int) -> str | None:
        return self._storage.local_path(self._shards[number].url) if self._are_local else None


def fingerprint_of_shards(shards: Sequence[ShardInfo]) -> str:
    """Return the `fingerprint` of shards, which a manifest in pages has ready."""
    return shards.manifest.fingerprint if isinstance(shards, PagedShards) else fingerprint(shards)


def checksum_of_shards(shards: Sequence[ShardInfo]) -> str | None:
    """Return the `checksum` of shards, which a manifest in pages has ready."""
    return shards.manifest.checksum if isinstance(shards, PagedShards) else checksum(shards)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
