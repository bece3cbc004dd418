"""Map sample numbers to loose files, and return each sample as the tar that `pack` would write."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import ChangedError, OptionError, plural
from shardstream.fetch import Catalog, Extents
from shardstream.format import (
    KEY_COLUMN,
    canonical_field,
    encode_member,
    import_parquet,
    key_array,
    member_bytes,
    split_member_name,
)
from shardstream.samples import Numbers, check_numbers, places_in
from shardstream.storage import (
    AdaptiveLimit,
    ListedFile,
    Storage,
    TruncatedResponseError,
    hints_of,
    retry_call,
    sample_members,
)

if TYPE_CHECKING:
    import pyarrow as pa

_Unsigned = npt.NDArray[np.unsignedinteger[Any]]

_MD5 = re.compile(r'ETag "?([0-9a-f]{32})"?')  # the format of `version_of`

LabelFunction = Callable[[str], Any]
"""A file's path under the prefix -> its class: a name, or a number."""


class ObjectCatalog(Catalog):
    """Samples of loose files by number (0 to n - 1, sorted by key).

    Files that share a key (``a.jpg`` and ``a.json``) are one sample. Each sample is returned as its own tar, as `shardstream
    pack` would write it, so that readers need no second code path. There are as many "shards" as samples.

    Names are stored in one bytes object, sizes as numbers: about 50 bytes per file. Picklable and thread-safe.

    Args:
        root: URL of the folder.
        files: Files under the folder; at least one.
        storage: Storage of the files.

    Raises:
        SourceError: If none of the files has an extension, or two would be the same field of a sample.
        OptionError: If the files are tar shards.
    """

    can_coalesce = False
    is_local = False
    """Local files are prefetched, too: opening a small file may take as long as a request."""
    threads = 32
    max_prefetch_samples = 1024

    def __init__(self, root: str, files: Sequence[ListedFile], storage: Storage) -> None:
        self._storage = storage
        self._root = files[0].url.removesuffix(files[0].path)
        if any(file.url != self._root + file.path for file in files):
            raise OptionError("file URLs do not consist of the folder's URL and a path", shard=root)
        members = sample_members(root, files)
        names = [file.path.encode("utf-8", "surrogateescape") for _, _, file in members]
        self._names = b"".join(names)
        self._name_ends = _compact([0, *np.cumsum([len(name) for name in names]).tolist()])
        self._sizes = _compact([file.size for _, _, file in members])
        keys = [key for key, _, _ in members]
        starts = [0] + [i for i, (one, other) in enumerate(pairwise(keys), 1) if one != other]
        self._firsts = _compact([*starts, len(members)])
        self._checksum = _checksum(members)
        self._kept: Numbers | None = None  # numbers of the samples, if they are not all
        self._nsamples = len(starts)
        self._labels: npt.NDArray[np.int64] | None = None
        self.classes: tuple[str, ...] | None = None
        """Names of the classes, in the order of their labels; None if labels are numbers, or there are none."""

    def __len__(self) -> int:
        return self._nsamples

    @property
    def storage(self) -> Storage:
        """The storage of the files."""
        return self._storage

    @property
    def num_shards(self) -> int:
        """Number of samples: each is a shard."""
        return len(self)

    @property
    def summary(self) -> str:
        """Number of files and samples, for ``repr``."""
        return f"{plural(len(self._sizes), 'file')}, {plural(len(self), 'sample')}"

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._sizes.sum(dtype=np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the names under the folder, the sizes and the labels.

        The folder's own URL is not included, so that a copy can resume the states of its original.
        """
        digest = hashlib.sha256(self._names)
        for column in (self._name_ends, self._sizes, self._firsts):
            digest.update(column.astype("<u8").tobytes())
        if self._labels is not None:
            digest.update(self._labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits that change with the bytes of the files, if the store returns an MD5 of each; else None."""
        return [self._checksum]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Fields that samples have, sorted."""
        found = {_key_and_field(self._path(member))[1] for member in range(len(self._sizes))}
        return tuple(sorted(found | ({"cls"} if self._labels is not None else set())))

    def restrict_to(self, numbers: Numbers) -> ObjectCatalog:
        """Return some samples under the same numbers, as a catalog that is smaller when it is pickled.

        ``len`` and `total_bytes` stay those of the whole dataset.
        """
        kept = np.unique(numbers % len(self))
        places = [self._place(number) for number in kept.tolist()]
        members = [range(int(self._firsts[at]), int(self._firsts[at + 1])) for at in places]
        paths = [self._path(n).encode("utf-8", "surrogateescape") for one in members for n in one]
        part = copy.copy(self)
        part.__dict__ |= {"total_bytes": self.total_bytes, "fields": self.fields}
        part.__dict__.pop("fingerprint", None)
        part._checksum, part._kept = None, kept
        part._names = b"".join(paths)
        part._name_ends = _compact([0, *np.cumsum([len(path) for path in paths]).tolist()])
        part._sizes = self._sizes[[n for one in members for n in one]]
        part._firsts = _compact([0, *np.cumsum([len(one) for one in members]).tolist()])
        part._labels = None if self._labels is None else self._labels[places]
        return part

    def set_labels(self, label: LabelFunction, classes: Sequence[str] | None = None) -> None:
        """Add a field ``cls`` to each sample: the label that a function returns for the path of its first file.

        Names become numbers, in the order of ``classes``, by default sorted (see `classes`).

        Raises:
            OptionError: If a label is neither a name nor a number, or not among the classes, or samples have this field already.
        """
        labels = []
        for number in range(len(self)):
            path, fields = self._path(int(self._firsts[number])), self._fields(number)
            if "cls" in fields:
                raise OptionError(
                    "this sample already has a file for 'cls'; remove label=",
                    key=self._key(number),
                )
            try:
                labels.append(label(path))
            except Exception as error:
                error.add_note(f"in label= on {path!r} in {self._root}")
                raise
        if all(isinstance(one, str) for one in labels):
            self.classes = tuple(sorted(set(labels)) if classes is None else classes)
            places = {name: place for place, name in enumerate(self.classes)}
            unknown = next((name for name in labels if name not in places), None)
            if unknown is not None or len(places) < len(self.classes):
                problem = "has a name twice" if unknown is None else f"lacks {unknown!r}"
                raise OptionError(f"classes {problem}; give each name once", shard=self._root)
            labels = [places[name] for name in labels]
        elif not all(isinstance(one, int | np.integer) for one in labels):
            kinds = sorted({type(one).__name__ for one in labels})
            raise OptionError(f"label= must return names or numbers, not {', '.join(kinds)}")
        elif classes is not None:
            raise OptionError("label= returns numbers, but classes= needs names; remove classes=")
        self._labels = np.array(labels, dtype=np.int64)
        self.__dict__.pop("fields", None)

    def url_of(self, shard: int) -> str:
        """Return the URL of a sample's first file."""
        return self._root + self._path(int(self._firsts[self._place(shard)]))

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples: each sample is a whole shard.

        Raises:
            IndexError: If there is no such sample.
        """
        wanted = np.asarray(numbers, dtype=np.int64)
        check_numbers(wanted, len(self))
        ends = [self._tar_bytes(number) for number in wanted.tolist()]
        return Extents(wanted, np.zeros_like(wanted), np.array(ends, dtype=np.int64))

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the sample numbers: each sample is a shard."""
        return np.asarray(numbers, dtype=np.int64) % len(self)

    def column_names(self) -> list[str]:
        """Return the name of the column of keys, which are in the names of the files."""
        return [KEY_COLUMN]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the keys of all samples as a table.

        Raises:
            OptionError: If others are wanted.
            SampleError: If a key is not UTF-8.
        """
        if names is not None and [*names] != self.column_names():
            return super().read_columns(names, scans=scans)
        pa, _ = import_parquet()
        keys = [self._key(number) for number in range(len(self))]
        return pa.table({KEY_COLUMN: key_array(keys, self._root)})

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes:
        """Read the files of a sample, and return them as a tar.

        Raises:
            NotFoundError: If a file is missing.
            ChangedError: If the length of a file differs from the listing.
            StorageError: If a file cannot be read.
        """
        pieces: list[bytes | memoryview] = []
        for name, member in self._members(shard):
            data = self._label(shard)
            if member is not None:
                url, size = self._root + self._path(member), int(self._sizes[member])
                data = self._read(url, size, concurrency)
            pieces += encode_member(name, data)
        return b"".join(pieces)[start:end]

    def _read(self, url: str, size: int, concurrency: AdaptiveLimit | None) -> bytes:
        """Read a file and check that its length is that of the listing."""
        # S3 returns the length with a range; elsewhere only a read of the whole file shows that it has grown.
        end = size if self._storage.is_s3(url) else None

        def read_file() -> bytes:
            try:
                data = self._storage.read(url, 0, end, **(hints_of(concurrency) | {"size": size}))
            except ChangedError as error:
                raise _changed_error(url) from error
            if len(data) != size:
                if self._storage.info(url).size != size:
                    raise _changed_error(url)
                raise TruncatedResponseError(f"got {len(data)} of {size} bytes")
            return data

        return retry_call(self._storage, url, read_file)

    def _members(self, number: int) -> list[tuple[str, int | None]]:
        """Return (name in the tar, number of the file) sorted by field; None stands for the label."""
        key = self._key(number)
        found: dict[str, int | None] = dict(self._fields(number))
        if self._labels is not None:
            found["cls"] = None
        return [(f"{key}.{field}", found[field]) for field in sorted(found)]

    def _fields(self, number: int) -> dict[str, int]:
        """Return field -> number of the file."""
        place = self._place(number)
        members = range(int(self._firsts[place]), int(self._firsts[place + 1]))
        return {_key_and_field(self._path(member))[1]: member for member in members}

    def _tar_bytes(self, number: int) -> int:
        return sum(
            member_bytes(
                name, len(self._label(number)) if member is None else int(self._sizes[member])
            )
            for name, member in self._members(number)
        )

    def _label(self, number: int) -> bytes:
        return b"" if self._labels is None else b"%d" % self._labels[self._place(number)]

    def _key(self, number: int) -> str:
        return _key_and_field(self._path(int(self._firsts[self._place(number)])))[0]

    def _place(self, number: int) -> int:
        """Return the row of a sample in the columns."""
        if self._kept is None:
            return number
        return int(places_in(self._kept, np.array([number]))[0])

    def _path(self, member: int) -> str:
        start, end = int(self._name_ends[member]), int(self._name_ends[member + 1])
        return self._names[start:end].decode("utf-8", "surrogateescape")


def folder_label(path: str) -> str:
    """Return the first folder of a path as the name of the class.

    Raises:
        OptionError: If the file is not in a folder.
    """
    folder, slash, _ = path.partition("/")
    if not slash:
        raise OptionError(
            f"{path} is not in a folder of a class (CLASS/{path}); pass label= a function of the path"
        )
    return folder


def _checksum(members: Sequence[tuple[str, str, ListedFile]]) -> str | None:
    digest = hashlib.sha256()
    for _, _, file in members:
        match = _MD5.fullmatch(file.version or "")
        if match is None:  # a multipart ETag, or a time: a copy would have another
            return None
        digest.update(match[1].encode())
    return digest.hexdigest()[:16]


def _key_and_field(path: str) -> tuple[str, str]:
    parts = split_member_name(path)
    assert parts is not None  # noqa: S101  (`sample_members` leaves out other files)
    return parts[0], canonical_field(parts[1])


def _changed_error(url: str) -> ChangedError:
    return ChangedError("the file changed after it was listed; open the dataset again", shard=url)


def _compact(numbers: Sequence[int]) -> _Unsigned:
    """Return numbers in the smallest unsigned type that holds all."""
    column = np.array(numbers, dtype=np.uint64)
    return column.astype(np.min_scalar_type(int(column.max(initial=0))))
