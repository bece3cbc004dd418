"""Read records from existing tars, to pack them again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

from shardstream.catalog import ClassNames, find_difference
from shardstream.errors import IndexMismatchError, SourceError, get_logger, plural, redact, shown
from shardstream.format import (
    CLASSES_NAME,
    ForwardReader,
    Sample,
    ShardInfo,
    TarDiagnostics,
    encode_classes,
    iter_samples,
    open_decompressed,
)
from shardstream.packing.sources.keys import KeyMaker
from shardstream.packing.sources.source import Record, Source, fingerprint_of
from shardstream.storage import RangeStream, Storage, is_compressed, locate_shards, parent_url

_log = get_logger(__name__)

_RANGE_BYTES = 8 << 20  # of one range read
_CONCURRENT_REQUESTS = 16


class TarSource(Source):
    """The samples of existing shards, in their order; compressed tars too.

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
        self._storage = storage
        self._key = key or "{key}"
        located = locate_shards(urls, storage)
        self._shards = located.shards
        self._class_names = ClassNames(located, storage)
        self._urls = urls if isinstance(urls, str) else ", ".join(urls[:3])
        self.name = f"{plural(len(self._shards), 'tar')} of {self._urls}"
        self.folders = frozenset(parent_url(shard.url) for shard in self._shards)
        self.may_repeat_keys = not KeyMaker(self._key, source=self._urls).is_unique

    @property
    def length(self) -> int | None:
        """Number of samples, if manifests or indexes have it."""
        counts = [shard.nsamples for shard in self._shards]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def extras(self) -> Mapping[str, bytes]:
        """``classes.json``, if the tars have one: their class numbers stay.

        Raises:
            SourceError: If the tars of several folders number their classes differently.
        """
        difference = find_difference(self._class_names.found)
        if difference is not None:
            raise SourceError(
                f"class numbers differ among these tars: {difference}; pack each folder separately",
                shard=self._urls,
            )
        names = self._class_names.names
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
        return fingerprint_of("tars", *itertools.chain(*zip(names, counts, versions, strict=True)))

    def _file_version(self, shard: ShardInfo) -> str:
        if shard.sha256 is not None:
            return shard.sha256
        file = self._storage.info(shard.url)
        return f"{file.size} {file.version}"

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on; tars before it whose samples are counted are not read.

        Raises:
            ShardError: If a tar is damaged.
            SourceError: If a key is repeated among the records that are read.
        """
        make_key = KeyMaker(self._key, source=self._urls)
        index = 0
        for shard in self._shards:
            if shard.nsamples and index + shard.nsamples <= first:
                index += shard.nsamples
                continue
            begin, samples = index, self._samples(shard)
            for sample in samples:
                key = str(sample.pop("__key__"))
                where = f"sample {key} of {sample.pop('__url__')}"
                sample_key = make_key(where, index=index, key=key, stem=key.rpartition("/")[2])
                count = index + 1 - begin
                if shard.nsamples is not None and count >= shard.nsamples:
                    # Before its last record: another process, or a resumed pack, may begin after it.
                    _check_count(shard, count + sum(1 for _ in samples))
                if index >= first:
                    yield Record(sample_key, sample, where)
                index += 1
            _check_count(shard, index - begin)

    def _samples(self, shard: ShardInfo) -> Iterator[Sample]:
        url = shard.url
        size = shard.filesize or self._storage.info(url).size
        stream = cast("BinaryIO", RangeStream(self._storage, url, size))
        end = None if is_compressed(url) else size
        with open_decompressed(stream, shard=url) as tar:
            read = ForwardReader(tar, chunk_bytes=_RANGE_BYTES)
            diagnostics = TarDiagnostics()
            for _, sample in iter_samples(read, end=end, shard=url, diagnostics=diagnostics):
                yield sample
        for finding in diagnostics.findings():
            _log.warning("%s", shown(f"{redact(url)}: {finding}"))


def _check_count(shard: ShardInfo, found: int) -> None:
    if shard.nsamples not in (None, found):
        raise IndexMismatchError(
            f"the tar holds {plural(found, 'sample')}, its index or manifest says {shard.nsamples}; "
            "fetch or write the shard again, or run 'shardstream index'",
            shard=shard.url,
        )
