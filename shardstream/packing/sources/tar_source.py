"""Read records from existing tars, to pack them again."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import BinaryIO, cast

from shardstream.catalog import StoredClassNames
from shardstream.errors import (
    AccessDeniedError,
    IndexMismatchError,
    NotFoundError,
    get_logger,
    plural,
    redact,
    shown,
)
from shardstream.format import (
    CLASSES_NAME,
    ForwardReader,
    Group,
    Offsets,
    Sample,
    ShardInfo,
    TarDiagnostics,
    check_extent,
    decode_index,
    encode_classes,
    iter_samples,
    open_decompressed,
)
from shardstream.packing.sources.source import Record, SequentialSource, fingerprint_of
from shardstream.storage import (
    RangeStream,
    Storage,
    is_compressed,
    locate_shards,
    parent_url,
    refuse_deleted,
)

_log = get_logger(__name__)

_RANGE_BYTES = 8 << 20  # of one range read
_CONCURRENT_REQUESTS = 16
_INDEX_LIMIT_BYTES = 1 << 30


class TarSource(SequentialSource):
    """The samples of existing shards, in their order; compressed tars too.

    Where a tar has an index, reading begins at any of its samples, and those that are read are compared with the index.

    Args:
        urls: A tar, a pattern, a folder or its ``index.json``, or a list of these.
        storage: Storage of the tars.
        key: Template of the keys, from ``index``, ``key`` and ``stem`` (its last part); by default the key stays.

    Raises:
        StorageError: If no tar is found.
    """

    def __init__(
        self, urls: str | Sequence[str], storage: Storage, *, key: str | None = None
    ) -> None:
        located = locate_shards(urls, storage)
        refuse_deleted(located, "reading its tars")
        title = urls if isinstance(urls, str) else ", ".join(urls[:3])
        super().__init__(
            f"{plural(len(located.shards), 'tar')} of {title}",
            key or "{key}",
            [shard.url for shard in located.shards],
            storage,
        )
        self._shards = located.shards
        self._class_names = StoredClassNames(located, storage)
        self._last_index: tuple[int, Offsets | None] = (-1, None)
        self.reads_remote = any(storage.local_path(shard.url) is None for shard in self._shards)
        self.folders = frozenset(parent_url(shard.url) for shard in self._shards)

    @property
    def length(self) -> int | None:
        """Number of samples, if manifests or indexes have it."""
        return self._firsts[-1] if len(self._firsts) > len(self._shards) else None

    @cached_property
    def _firsts(self) -> Sequence[int]:
        """Number of the first sample of each tar, and of all samples, as far as the tars before it are counted."""
        counts = (shard.nsamples for shard in self._shards)
        counted = itertools.takewhile(lambda count: count is not None, counts)
        return [0, *itertools.accumulate(count or 0 for count in counted)]

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all tars; None if some are compressed."""
        if any(is_compressed(shard.url) for shard in self._shards):
            return None
        return sum(map(self._size, self._shards))

    @property
    def extras(self) -> Mapping[str, str]:
        """``classes.json``, if the tars have one: their class numbers stay.

        Raises:
            OptionError: If the tars of several folders number their classes differently.
        """
        names = self._class_names.checked_names
        return {} if names is None else {CLASSES_NAME: encode_classes(names)}

    @property
    def fingerprint(self) -> str:
        """Hash of names and counts, with the sha256 in a manifest, else sizes and times or ETags."""
        with ThreadPoolExecutor(
            _CONCURRENT_REQUESTS, thread_name_prefix="shardstream-look"
        ) as pool:
            versions = list(pool.map(self._file_version, self._shards))
        names = [shard.url.rsplit("/", 1)[-1] for shard in self._shards]
        counts = [shard.nsamples for shard in self._shards]
        return fingerprint_of("tars", itertools.chain(*zip(names, counts, versions, strict=True)))

    def _file_version(self, shard: ShardInfo) -> str:
        if shard.sha256 is not None:
            return shard.sha256
        file = self._storage.info(shard.url)
        return f"{file.size} {file.version}"

    def _size(self, shard: ShardInfo) -> int:
        return shard.filesize or self._storage.info(shard.url).size

    def _begin(self, first: int) -> int:
        """Return the number of the sample itself if its tar has an index, else of the first of the tar."""
        place = self._tar_of(first)
        jumps = place == len(self._shards) or self._index_of(place) is not None
        return first if jumps else self._firsts[place]

    def _tar_of(self, first: int) -> int:
        """Return the number of the tar where reading begins to reach a sample: all before it are counted."""
        place = bisect_right(self._firsts, first) - 1
        while place and self._shards[place - 1].nsamples == 0:  # read it, to see that it is empty
            place -= 1
        return place

    def _index_of(self, place: int) -> Offsets | None:
        """Return the index of a tar, if it has one; the last that was read is kept."""
        kept, offsets = self._last_index  # one object: other threads may replace it
        if kept == place:
            return offsets
        shard, offsets = self._shards[place], None
        if shard.nsamples and not is_compressed(shard.url):
            # Without one the tar is read from its beginning.
            with suppress(NotFoundError, AccessDeniedError):
                data = self._storage.read_bounded(shard.index_url, _INDEX_LIMIT_BYTES)
                offsets = decode_index(data, url=shard.index_url)
                size = self._size(shard)
                check_extent(offsets, filesize=size, nsamples=shard.nsamples, url=shard.url)
        self._last_index = (place, offsets)
        return offsets

    def _read_from(self, first: int) -> Iterator[tuple[int, Sample]]:
        begin = self._tar_of(first)
        number = self._firsts[begin]
        for place, shard in enumerate(self._shards[begin:], start=begin):
            skipped = 0
            if number < first and self._index_of(place) is not None:
                skipped = min(first - number, shard.nsamples or 0)
            number += skipped
            for sample in self._samples(place, skipped):
                yield number, sample
                number += 1

    def _samples(self, place: int, first: int) -> Iterator[Sample]:
        """Yield the samples of a tar from a number on.

        Raises:
            ShardError: If the tar is damaged, or is another one than its index or manifest describes.
            ChangedError: If it was replaced.
        """
        shard, offsets = self._shards[place], self._index_of(place)
        url, size = shard.url, self._size(shard)
        stream = cast("BinaryIO", RangeStream(self._storage, url, size))
        start = 0 if offsets is None or not first else int(offsets[first])
        end = None if is_compressed(url) else size
        diagnostics, checked, count = TarDiagnostics(), -1, first
        with open_decompressed(stream, shard=url) as tar:
            read = ForwardReader(tar, chunk_bytes=_RANGE_BYTES)
            found = iter_samples(read, start=start, end=end, shard=url, diagnostics=diagnostics)
            # Each is compared before it is used: another process, or a resumed pack, may begin after it.
            pairs = itertools.pairwise(itertools.chain(found, [None]))
            for count, (one, after) in enumerate(pairs, start=first + 1):
                group, sample = cast("tuple[Group, Sample]", one)
                if read.position != checked:  # new bytes were read
                    self._versions.check([place])
                    checked = read.position
                if _differs(count, shard.nsamples, is_last=after is None):
                    raise _mismatch(shard, count + (after is not None) + sum(1 for _ in found))
                next_start = group.end if after is None else after[0].start
                if offsets is not None and offsets[count] != next_start:
                    raise IndexMismatchError(
                        f"the tar has a sample at byte {next_start}, its index says {offsets[count]}; "
                        "run 'shardstream index' on it",
                        shard=url,
                    )
                yield sample
        if shard.nsamples not in (None, count):  # there was none to compare
            raise _mismatch(shard, count)
        for finding in diagnostics.findings():
            _log.warning("%s", shown(f"{redact(url)}: {finding}"))

    def _record(self, number: int, item: Sample) -> Record:
        key = str(item.pop("__key__"))
        where = f"sample {key} of {item.pop('__url__')}"
        new = self._make_key(index=number, key=key, stem=key.rpartition("/")[2])
        return Record(new, item, where)


def _differs(count: int, expected: int | None, *, is_last: bool) -> bool:
    """Return whether a tar has more or fewer samples than are expected, as far as ``count`` of them tell."""
    return expected is not None and (count > expected or is_last != (count == expected))


def _mismatch(shard: ShardInfo, found: int) -> IndexMismatchError:
    return IndexMismatchError(
        f"the tar holds {plural(found, 'sample')}, its index or manifest says {shard.nsamples}; "
        "fetch or write the shard again, or run 'shardstream index'",
        shard=shard.url,
    )
