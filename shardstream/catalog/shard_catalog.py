"""Map sample numbers to byte ranges of tar shards, by their indexes, and open the samples of a dataset as its version says."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.catalog.columns import read_all_columns, read_column_names, scan_keys
from shardstream.catalog.integrity import VerifiedReader, Verify, check_manifests
from shardstream.catalog.member_indexes import MIN_MEAN_BYTES, Layout, MemberIndexes
from shardstream.errors import IndexMismatchError, OptionError, plural
from shardstream.fetch import FAR_READ_RATIO, Catalog, Extents, IndexChunk
from shardstream.format import (
    BLOCK_BYTES,
    KEY_COLUMN,
    OFFSET_BYTES,
    Buffer,
    Offsets,
    ReadAt,
    Sample,
    ShardInfo,
    TarDiagnostics,
    check_end,
    check_extent,
    check_index_size,
    checksum,
    decode_index,
    empty_tar,
    fingerprint,
    has_usual_end,
    read_sample,
    scan_shard,
)
from shardstream.process import new_lock
from shardstream.samples import Join, JoinPart, Numbers, Samples, WithoutDeleted, check_numbers
from shardstream.storage import (
    AdaptiveLimit,
    FieldPlaces,
    FileVersions,
    LazyShards,
    LocatedShards,
    MmapPool,
    Storage,
    check_map,
    folder_of_manifest,
    hints_of,
    is_compressed,
    join_url,
    locate_shards,
    map_file,
    read_numbers,
)

if TYPE_CHECKING:
    import pyarrow as pa

OFFSETS_KEPT_BYTES = 64 << 20
OFFSETS_SENT_BYTES = 1 << 20  # maximum that is pickled for a spawned worker
INDEX_CHUNK_SAMPLES = 8192
"""Samples whose offsets are read together: 64 KiB. Indexes of more samples are read in chunks."""
_MAX_CHUNKS = 1 << 24  # of a shard: a tar of 2**37 samples would have 70 TB
_INDEX_TRIES = 4
_lock = new_lock()  # guards the kept offsets of all catalogs


class ShardCatalog(Catalog):
    """Samples of tar shards by number (0 to n - 1, in the order of the shards).

    Counts are known when the catalog is opened, or those of a large manifest when one of the shards is needed. The offsets of a
    shard are read at the first access, of a large one in chunks of 8,192 samples, and the least recently used are evicted. Picklable
    and thread-safe.

    Args:
        located: Shards with their counts and sizes; a local tar without an index is scanned now.
        storage: Storage of the shards.
        verify: "sha256" compares all bytes read with the manifest's checksums (see `VerifiedReader`).
        fields: Fetch these fields only, where that is known to save time (see `MemberIndexes`); others may be fetched, too.
        places: Fetch only the places of large members of some fields, which `OpenFields` opens.

    Raises:
        OptionError: If a shard cannot be read by number (see `lacks_index`), ``verify`` finds no checksum for it, or ``places`` no
            index of members.
        ShardError: If a local tar that is scanned is damaged.
    """

    shards: Sequence[ShardInfo]
    """The shards, with counts and sizes."""
    total_bytes: int = 0
    """Bytes of all tars."""

    def __init__(
        self,
        located: LocatedShards,
        storage: Storage,
        verify: Verify | None = None,
        fields: Collection[str] = (),
        places: FieldPlaces | None = None,
    ) -> None:
        self._storage = storage
        self._scanned: dict[int, Offsets] = {}
        self._manifests, self._are_listed = located.manifests, located.manifest_url is not None
        self._fields = located.fields
        self._are_lazy = isinstance(located.shards, LazyShards)  # also where some were chosen
        if isinstance(located.shards, LazyShards):
            self.shards = located.shards
            self.is_local = storage.local_path(located.shards.manifest_url) is not None
            self._files = FileVersions(located.shards.local_path)
            self._nsamples = located.shards.manifest.nsamples
            self.total_bytes = located.shards.manifest.total_bytes
        else:
            paths, shards, firsts = list[str | None](), list[ShardInfo](), [0]
            for number, listed in enumerate(located.shards):
                path, shard = storage.local_path(listed.url), self._count(number, listed, located)
                # The URL's own object where it is the path: it is pickled once.
                paths.append(listed.url if path == listed.url else path)
                shards.append(shard)
                firsts.append(firsts[-1] + (shard.nsamples or 0))
                self.total_bytes += shard.filesize or 0
            self.is_local = None not in paths
            self._files = FileVersions(paths)
            self.shards = tuple(shards)
            self._firsts = np.array(firsts, dtype=np.int64)
            self._nsamples = firsts[-1]
        self._verified_reader = None if verify is None else VerifiedReader(self.shards, storage)
        self._kept: OrderedDict[IndexChunk, Offsets] = OrderedDict()
        self._kept_bytes = 0
        self._mmap_pool = MmapPool()
        can_leave_out = places is not None or bool(fields)
        self._members = self._open_members(fields, places) if can_leave_out else None

    def __getstate__(self) -> dict[str, Any]:
        with _lock:  # another thread may be reading
            kept, nbytes = self._kept.copy(), self._kept_bytes
        if nbytes > OFFSETS_SENT_BYTES:
            kept, nbytes = OrderedDict(), 0
        return self.__dict__ | {"_kept": kept, "_kept_bytes": nbytes}

    def __len__(self) -> int:
        return self._nsamples

    @property
    def storage(self) -> Storage:
        """The storage of the shards."""
        return self._storage

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset."""
        shards = self.shards
        return (
            shards.manifest.fingerprint if isinstance(shards, LazyShards) else fingerprint(shards)
        )

    @cached_property
    def checksums(self) -> list[str | None]:
        """16 hex digits that change with the sha256 of the shards; None if the manifest lacks one."""
        shards = self.shards
        return [shards.manifest.checksum if isinstance(shards, LazyShards) else checksum(shards)]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields that samples have, by the manifest; None if it does not list them."""
        return self._fields

    def restrict_to(self, numbers: Numbers) -> ShardCatalog:
        """Return the shards of some samples, which keep their numbers, as a catalog that is smaller when it is pickled.

        Its shards are numbered from 0; ``len`` and `total_bytes` stay those of the whole dataset. With ``verify`` it starts without digests.
        """
        kept = self.shards_of(numbers)
        part = copy.copy(self)
        part.__dict__.pop("fingerprint", None)
        part.__dict__.pop("checksums", None)
        part.shards = tuple([self.shards[shard] for shard in kept])
        # Nothing is compared with it then, but by `check_manifests`.
        if self.is_local and self._verified_reader is None and not self._are_lazy:
            part.shards = tuple([replace(shard, sha256=None) for shard in part.shards])
        part._files = self._files.restrict_to(kept)
        places = {shard: place for place, shard in enumerate(kept)}
        part._scanned = {places[n]: offsets for n, offsets in self._scanned.items() if n in places}
        if self._verified_reader is not None:
            part._verified_reader = VerifiedReader(part.shards, self._storage)
        part._firsts = np.append(self.first_samples(kept), self._nsamples)  # with gaps
        part._kept, part._kept_bytes = OrderedDict(), 0
        part._mmap_pool = MmapPool()
        return part

    def first_samples(self, shards: Sequence[int]) -> Numbers:
        """Return the number of the first sample of each shard, shape (n,)."""
        if isinstance(self.shards, LazyShards):
            return self.shards.first_samples(shards)
        firsts: Numbers = self._firsts[shards]
        return firsts

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        return self.shards[shard].url

    def map_shard(self, shard: int) -> Buffer:
        """Return a local shard, mapped to memory.

        Raises:
            StorageError: If it cannot be opened.
            ShardError: If it is empty, or does not match its checksum, with ``verify``.
            ChangedError: If it has another length than the manifest says, or was cut since it was mapped.
            IndexMismatchError: If it goes on after the end of its index, where no manifest tells its length.
        """
        kept, url = self._mmap_pool.get(shard), self.shards[shard].url
        if kept is not None and self._verified_reader is None:
            check_map(kept, url)
            return kept
        path = self._storage.local_path(url) or url
        if (
            kept is not None
            and self._verified_reader is not None
            and self._verified_reader.knows_file(shard, path)
        ):
            return kept
        self._files.version(shard)
        info = self.shards[shard]
        # A new map: the kept one may be of the file before a replacement.
        tar = map_file(path, url, info.filesize if self._verified_reader is None else None)
        is_known = shard in self._scanned or (self._are_listed and info.filesize is not None)
        if not is_known:  # only its index tells its end
            at = OFFSET_BYTES * (info.nsamples or 0)
            end = self._storage.read(info.index_url, at, at + OFFSET_BYTES)
            check_end(_reader_of(tar), int.from_bytes(end, "little"), len(tar), url)
        if self._verified_reader is not None:
            self._verified_reader.check_file(shard, path, tar)
        self._mmap_pool.keep(shard, tar)
        return tar

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Check that local shards are unchanged since the dataset was opened; called after their bytes were copied.

        Raises:
            ChangedError: If one was overwritten.
            IndexMismatchError: If one no longer matches its checksum, with ``verify``.
        """
        if self._verified_reader is None:
            self._files.check(shards)
            return
        for shard in shards:
            self.map_shard(shard)

    def check_manifests(self) -> None:
        """Check that remote manifests still list these shards; called at the end of an epoch.

        Raises:
            ChangedError: If the dataset was replaced.
        """
        if self._manifests:
            check_manifests(self._manifests, self.shards, self._storage, are_lazy=self._are_lazy)

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        """Read some bytes of a shard, with retries.

        Raises:
            StorageError: If they cannot be read, or the file is not that of the manifest.
            IndexMismatchError: If they do not match their checksum, with ``verify``.
        """
        if self._verified_reader is not None:
            return self._verified_reader.read(shard, start, end, concurrency)
        info = self.shards[shard]
        hints = hints_of(concurrency) | {"size": info.filesize}
        self._files.version(shard)
        if self._members is None:
            data = self._storage.read_view(info.url, start, end, **hints)
        else:
            layout = self._layout(shard, self._members)
            data = layout.read(start, end, partial(self._storage.read_view, info.url, **hints))
        self._files.check([shard])
        return data

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples, in the order given.

        Raises:
            IndexError: If there is no such sample.
            IndexMismatchError: If the index of a shard does not match it.
        """
        wanted = np.asarray(numbers, dtype=np.int64)
        check_numbers(wanted, len(self))
        shards, within = self._find(wanted)
        starts, ends = np.empty_like(wanted), np.empty_like(wanted)
        chunks = shards * _MAX_CHUNKS + within // INDEX_CHUNK_SAMPLES
        by_chunk = np.argsort(chunks, kind="stable")
        sorted_chunks, within = chunks[by_chunk], within[by_chunk] % INDEX_CHUNK_SAMPLES
        runs = np.flatnonzero(np.diff(sorted_chunks, prepend=-1)).tolist()
        for first, last in itertools.pairwise([*runs, len(wanted)]):
            chunk = divmod(int(sorted_chunks[first]), _MAX_CHUNKS)
            offsets, mine = self._offsets_of(IndexChunk(*chunk)), within[first:last]
            places = by_chunk[first:last]
            starts[places], ends[places] = offsets[mine], offsets[mine + 1]
        if self._members is not None:
            for shard in np.unique(shards).tolist():
                mine = np.flatnonzero(shards == shard)
                ends[mine] = self._layout(shard, self._members).ends_of(starts[mine])
        return Extents(shards, starts, ends)

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""
        return self._find(numbers % max(1, len(self)))[0]

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:
        """Return the parts of indexes that `extents` needs for some samples."""
        shards, within = self._find(numbers)
        chunks = np.unique(shards * _MAX_CHUNKS + within // INDEX_CHUNK_SAMPLES).tolist()
        return [IndexChunk(*divmod(chunk, _MAX_CHUNKS)) for chunk in chunks]

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first shard; none if there are no columns next to it."""
        has_columns = bool(self.shards) and self._storage.exists(self.shards[0].columns_url)
        return read_column_names(self.shards[0], self._storage) if has_columns else []

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples; row i is sample i.

        Raises:
            OptionError: If a shard has no columns, lacks one, or columns of two shards have different types.
            IndexMismatchError: If columns were made of another shard.
            ManifestError: If a file of columns is damaged.
            StorageError: If one cannot be read.
        """
        if scans and names == [KEY_COLUMN] and not self.column_names():
            return scan_keys(self.shards, self._storage, self.map_shard if self.is_local else None)
        return read_all_columns(self.shards, self._storage, names)

    def load_index(self, chunk: IndexChunk) -> None:
        """Read a part of an index."""
        self._offsets_of(chunk)
        if self._members is not None:
            self._layout(chunk.shard, self._members)

    def _layout(self, shard: int, members: MemberIndexes) -> Layout:
        """Return what is fetched of the samples of a shard."""
        return members.load(
            self.shards[shard],
            lambda: self.offsets(shard),
            lambda: self._files.version(shard),
        )

    def _open_members(
        self, fields: Collection[str], places: FieldPlaces | None
    ) -> MemberIndexes | None:
        """Return the indexes of members if large ones are left out; that is known of the first shard."""
        is_large = self.total_bytes >= MIN_MEAN_BYTES * max(1, len(self))
        can_save = is_large and not self.is_local and self._verified_reader is None
        if places is None and not can_save:
            return None
        if not self.shards or not self._storage.exists(self.shards[0].members_url):
            if places is None:
                return None
            raise OptionError(
                "lazy= needs the index of members: run 'shardstream index --members' on the dataset",
                shard=self.shards[0].url if self.shards else None,
            )
        self.is_local = False  # members are left out of bytes that are copied
        self.max_read_ratio = FAR_READ_RATIO
        return MemberIndexes(self._storage, fields, places)

    def offsets(self, shard: int) -> Offsets:
        """Return the whole index of a shard, shape (n + 1,).

        Raises:
            IndexMismatchError: If it does not match the shard.
        """
        info = self.shards[shard]
        if shard in self._scanned or (info.nsamples or 0) > INDEX_CHUNK_SAMPLES:
            return self._scanned[shard] if shard in self._scanned else self._read_index(info)
        return self._offsets_of(IndexChunk(shard, 0))

    def read_sample(self, number: int) -> Sample:
        """Read one sample with one range read.

        Raises:
            ShardError: If its bytes are damaged, or the index does not match.
            StorageError: If they cannot be read.
        """
        shard, start, end = (int(column[0]) for column in self.extents([number]))
        return read_sample(self.fetch(shard, start, end), start, start, end, self.shards[shard].url)

    def _find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of each sample, and the sample's number in it."""
        if isinstance(self.shards, LazyShards):
            return self.shards.find_samples(numbers)
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        return shards, numbers - self._firsts[shards]

    def _offsets_of(self, chunk: IndexChunk) -> Offsets:
        """Return the offsets of some samples of a shard, and the end of the last of them."""
        if chunk.shard in self._scanned:
            return self._scanned[chunk.shard][_chunk_slice(chunk)]
        with _lock:
            if chunk in self._kept:
                self._kept.move_to_end(chunk)
                return self._kept[chunk]
        info = self.shards[chunk.shard]
        is_large = (info.nsamples or 0) > INDEX_CHUNK_SAMPLES
        offsets = self._read_index(info, _chunk_slice(chunk) if is_large else None)
        with _lock:
            if chunk not in self._kept:
                self._kept[chunk] = offsets
                self._kept_bytes += offsets.nbytes
            while self._kept_bytes > OFFSETS_KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return offsets

    def _read_index(self, shard: ShardInfo, places: slice | None = None) -> Offsets:
        """Read an index, or a part of a large one; one that does not match is read again, as it may have been damaged in transfer."""
        _check_count(shard)
        url, size = shard.index_url, OFFSET_BYTES * ((shard.nsamples or 0) + 1)
        start, end = 0, None
        hints: Any = {"max_bytes": size + OFFSET_BYTES + 1}
        if places is not None:
            if not self._storage.is_s3(url):  # whose responses have the size
                check_index_size(self._storage.info(url).size, size, url)
            start, end = OFFSET_BYTES * places.start, min(OFFSET_BYTES * places.stop, size)
            hints = {"size": size}
        for attempts_left in reversed(range(_INDEX_TRIES)):
            data = self._storage.read(url, start, end, **hints)
            try:
                offsets = _checked(data, shard, is_whole=places is None)
            except IndexMismatchError:
                if not attempts_left:
                    raise
                self._storage.forget(url, start, end)
                continue
            has_end = places is None or end == size
            if has_end and not (self.is_local or self._are_listed):
                self._check_end(shard, int(offsets[-1]))
            return offsets
        raise AssertionError  # for the type checker: the last attempt returns or raises

    def _check_end(self, shard: ShardInfo, end: int) -> None:
        """Look for samples after the end of an index, where the size in a listing leaves room for some; `map_shard` looks in each local tar."""
        size = shard.filesize or 0
        if not has_usual_end(end, size):
            read = self._storage.read
            check_end(
                lambda at, length: read(shard.url, at, min(at + length, size), size=size),
                end,
                size,
                shard.url,
            )

    def _count(self, number: int, shard: ShardInfo, located: LocatedShards) -> ShardInfo:
        """Return a shard with its count and size; scan a local tar that has no index."""
        if shard.filesize == 0:
            raise empty_tar(shard.url)
        if shard.url in located.indexed and shard.nsamples is not None:
            _check_count(shard)
            return shard
        path = None if is_compressed(shard.url) else self._storage.local_path(shard.url)
        if path is None:
            raise OptionError(
                "this shard has no index, so that it cannot be read by number; run 'shardstream index' on plain tars, and 'shardstream pack' on "
                "compressed ones",
                shard=shard.url,
            )
        tar = map_file(path, shard.url)
        diagnostics = TarDiagnostics()
        scan = scan_shard(_reader_of(tar), end=len(tar), shard=shard.url, diagnostics=diagnostics)
        diagnostics.warn(shard.url)
        nsamples, filesize = len(scan.keys), len(tar)
        if shard.nsamples not in (None, nsamples):
            raise IndexMismatchError(
                f"the tar holds {plural(nsamples, 'sample')}, the manifest says {shard.nsamples}; run 'shardstream index' again",
                shard=shard.url,
            )
        self._scanned[number] = scan.offsets
        return ShardInfo(url=shard.url, nsamples=nsamples, filesize=filesize, sha256=shard.sha256)


def _chunk_slice(chunk: IndexChunk) -> slice:
    """Return the places of a chunk's offsets in those of its shard; the last is the end of its last sample."""
    first = chunk.number * INDEX_CHUNK_SAMPLES
    return slice(first, first + INDEX_CHUNK_SAMPLES + 1)


def _reader_of(tar: Buffer) -> ReadAt:
    return lambda at, size: bytes(tar[at : at + size])


def _check_count(shard: ShardInfo) -> None:
    """Check that a tar is large enough for its sample count, before an index of that size is read.

    Raises:
        IndexMismatchError: If a sample would have less than the 512 bytes of a header.
    """
    nsamples, filesize = shard.nsamples or 0, shard.filesize
    if filesize is not None and nsamples > filesize // BLOCK_BYTES:
        raise IndexMismatchError(
            f"{nsamples} samples, by the index or the manifest, do not fit in a tar of {filesize} bytes; "
            "run 'shardstream index' again",
            shard=shard.url,
        )


def _checked(data: bytes, shard: ShardInfo, *, is_whole: bool) -> Offsets:
    url, nsamples = shard.index_url, shard.nsamples or 0
    # With one offset too many the error says so.
    if is_whole and len(data) > OFFSET_BYTES * (nsamples + 2):
        raise IndexMismatchError(
            f"the index has more than {plural(nsamples, 'sample')}, the count by the manifest or by its size in a listing; "
            "run 'shardstream index' again",
            shard=url,
        )
    offsets = decode_index(data, url=url)
    filesize = shard.filesize or int(offsets[-1])
    check_extent(offsets, filesize=filesize, nsamples=shard.nsamples if is_whole else None, url=url)
    return offsets


def lacks_index(located: LocatedShards, storage: Storage) -> str | None:
    """Return the first shard that can only be read sequentially; None if all can be read by number."""
    if isinstance(located.shards, LazyShards):
        return None
    for shard in located.shards:
        if is_compressed(shard.url):
            return shard.url
        if shard.url not in located.indexed and storage.local_path(shard.url) is None:
            return shard.url
    return None


def open_samples(
    located: LocatedShards,
    storage: Storage,
    verify: Verify | None = None,
    fields: Collection[str] = (),
    places: FieldPlaces | None = None,
) -> Samples:
    """Return the samples of shards by number; for the arguments and errors see `ShardCatalog`.

    Raises:
        OptionError: If the samples of a replacement are not as many as the manifest says.
        ManifestError: If a file of numbers is damaged.
        StorageError: If a replacement cannot be read.
    """
    catalog = ShardCatalog(located, storage, verify, fields, places)
    folder, parts = folder_of_manifest(located.manifest_url or ""), list[JoinPart]()
    for replaced in () if located.version is None else located.version.replaced:
        if fields and not {*fields}.intersection(replaced.fields):
            continue
        url, numbers = join_url(folder, replaced.url), None
        found = ShardCatalog(locate_shards(url, storage), storage, verify)
        if len(found) != replaced.nsamples:
            raise OptionError(
                f"the replaced fields are of {len(found)} samples, not of {replaced.nsamples} as the manifest of the dataset says; restore them",
                shard=found.url_of(0),
            )
        if replaced.numbers is not None:
            url = join_url(folder, replaced.numbers)
            numbers = read_numbers(url, storage, len(found), len(catalog))
        parts.append(
            JoinPart(
                samples=found,
                some=numbers,
                fields={name: name for name in replaced.fields},
                defaults={},
                replaces=True,
                is_strict=True,
            )
        )
    samples: Samples = Join(catalog, parts) if parts else catalog
    if located.deleted:
        samples = WithoutDeleted(samples, deleted_samples(located, catalog))
    return samples


def deleted_samples(located: LocatedShards, catalog: ShardCatalog) -> Numbers:
    """Return the numbers in a catalog of the samples of its shards that are deleted, ascending, shape (n,)."""
    firsts = catalog.first_samples([place for place, _ in located.deleted])
    deleted = zip(firsts, located.deleted, strict=True)
    none = np.empty(0, dtype=np.int64)
    return np.concatenate([none, *(numbers + first for first, (_, numbers) in deleted)])
