"""Read values of all samples from the files of columns next to their shards, and choose samples by number, by key, or by a condition on them."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardstream.catalog.class_names import read_classes
from shardstream.errors import (
    IndexMismatchError,
    ManifestError,
    NotFoundError,
    OptionError,
    ShardError,
    StorageError,
    get_logger,
    how_to_install,
    plural,
)
from shardstream.format import (
    KEY_COLUMN,
    Buffer,
    DatasetVersion,
    ForwardReader,
    ReadAt,
    ShardInfo,
    TarDiagnostics,
    decode_column_file,
    import_parquet,
    is_meta_name,
    is_reserved_column,
    iter_members,
    key_array,
    scan_shard,
    split_member_name,
)
from shardstream.samples import Choice, Numbers, Samples, Subset, select_subset
from shardstream.storage import RangeStream, Storage, parent_url

if TYPE_CHECKING:
    import pyarrow as pa


_log = get_logger(__name__)

Where = Any
"""A condition on columns: text in SQL, or a `pyarrow.compute.Expression`."""
Keys = Sequence[str] | str | os.PathLike[str]
"""Keys of samples, or the path or URL of a text file with a key on each line."""
_NUMBER = "__number__"  # column of the numbers of samples
_NAMED = 3  # keys that a message names
_THREADS = 16
_COMPARED = 16  # shards whose first key is compared with that of their columns
_HEADERS_BYTES = 4096
_SCAN_READ_BYTES = 1 << 20
_SCANS = 4  # shards whose keys are read at a time; each takes 150 bytes for each of its samples


def read_all_columns(
    shards: Sequence[ShardInfo], storage: Storage, names: Sequence[str] | None
) -> pa.Table:
    """Return the columns of all samples; row i is sample i.

    Args:
        shards: The shards.
        storage: Their storage.
        names: Columns to read; None for all.

    Raises:
        OptionError: If a shard has no columns, lacks one, or columns of two shards have different types.
        IndexMismatchError: If columns were made of another shard; of up to 16 shards, and of local ones that are newer than their columns, the first
            key is compared.
        ManifestError: If a file of columns is damaged.
        StorageError: If one cannot be read.
    """
    pa, _ = import_parquet()
    compared = {*np.linspace(0, len(shards) - 1, _COMPARED, dtype=int).tolist()}

    def read(place: int) -> Any:
        shard = shards[place]
        data = _read_file(shard, storage)
        if place in compared or _is_newer(shard, storage):
            _compare_first_key(data, shard, storage)
        return decode_column_file(data, shard, names)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-columns") as pool:
        tables = list(pool.map(read, range(len(shards))))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise OptionError(
            f"columns of two shards do not fit together: {error}; run 'shardstream index --columns' on all",
            shard=shards[0].url,
        ) from error


def _is_newer(shard: ShardInfo, storage: Storage) -> bool:
    """Return whether a local shard is newer than its columns: to read the keys of all would take as long as to read the columns."""
    tar, columns = storage.local_path(shard.url), storage.local_path(shard.columns_url)
    if tar is None or columns is None or not os.path.isfile(tar):  # an error where it is read
        return False
    return os.path.getmtime(tar) > os.path.getmtime(columns)


def _compare_first_key(data: bytes, shard: ShardInfo, storage: Storage) -> None:
    """Check that a shard begins with the sample that its columns begin with: it may have been written again, with as many bytes.

    Raises:
        IndexMismatchError: If it begins with another one.
    """
    expected = decode_column_file(data, shard, [KEY_COLUMN])[KEY_COLUMN].slice(0, 1).to_pylist()
    size = shard.filesize or storage.info(shard.url).size
    stream = RangeStream(storage, shard.url, size, min_read_bytes=_HEADERS_BYTES)
    read, found = ForwardReader(stream, chunk_bytes=_HEADERS_BYTES), expected
    with suppress(ShardError, StorageError):  # an error where its samples are read
        names = (name for name, *_ in iter_members(read, end=size, shard=shard.url))
        parts = (split_member_name(name) for name in names if not is_meta_name(name))
        found = [part[0] for part in itertools.islice(filter(None, parts), len(expected))]
    if found != expected:
        raise IndexMismatchError(
            f"the columns begin with the sample {expected[0]!r}, the shard with {', '.join(map(repr, found)) or 'none'}: it was written again "
            "after them",
            remedy="run 'shardstream index --columns' again",
            shard=shard.url,
        )


def read_column_names(shard: ShardInfo, storage: Storage) -> list[str]:
    """Return the names of the columns of a shard, with the errors of `read_all_columns`."""
    names: list[str] = decode_column_file(_read_file(shard, storage), shard, None).column_names
    return names


def _read_file(shard: ShardInfo, storage: Storage) -> bytes:
    try:
        return storage.read_bounded(shard.columns_url)
    except NotFoundError as error:
        raise OptionError(
            "this shard has no columns, which where= and keys in subset= need; run 'shardstream index --columns FIELDS' on its folder, "
            "with fields of numbers or text, or values in JSON (json.NAME); --columns __key__ for the keys alone",
            shard=shard.url,
        ) from error


def scan_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> pa.Table:
    """Return the keys of all samples, in order, from the headers of the shards themselves, as a table.

    Args:
        shards: The shards.
        storage: Their storage.
        map_shard: Returns a local shard as a buffer, by its place; None if they are remote.

    Raises:
        IndexMismatchError: If a shard has another number of samples than its index.
        SampleError: If a key is not UTF-8.
        StorageError: If they cannot be read.
    """
    _log.warning(
        "the keys of %s in %s are read from %s; 'shardstream index --columns __key__' on their folder does so once",
        plural(sum(shard.nsamples or 0 for shard in shards), "sample"), shards[0].url, "their headers" if map_shard else "the shards, all bytes",
    )  # fmt: skip
    pa, _ = import_parquet()
    found = zip(iter_scanned_keys(shards, storage, map_shard), shards, strict=True)
    chunks = [key_array(keys, shard.url) for keys, shard in found]
    return pa.table({KEY_COLUMN: pa.chunked_array(chunks, pa.string())})


def iter_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> Iterator[Sequence[str]]:
    """Yield all keys, some shards at a time, from columns if the first shard has some, else as `scan_keys`."""
    if not storage.exists(shards[0].columns_url):
        yield from iter_scanned_keys(shards, storage, map_shard)
        return
    for first in range(0, len(shards), _THREADS):
        some = shards[first : first + _THREADS]
        yield read_all_columns(some, storage, [KEY_COLUMN])[KEY_COLUMN].to_pylist()


def iter_scanned_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> Iterator[list[str]]:
    """Yield the keys of each shard, in order, from its headers; for the arguments and errors see `scan_keys`."""
    places = range(len(shards))

    def read(place: int) -> list[str]:
        tar = None if map_shard is None else map_shard(place)
        return _scan_shard_keys(shards[place], storage, tar)

    with ThreadPoolExecutor(_SCANS, thread_name_prefix="shardstream-keys") as pool:
        for first in places[::_SCANS]:  # not all at once: results would wait in memory
            yield from pool.map(read, places[first : first + _SCANS])


def _scan_shard_keys(info: ShardInfo, storage: Storage, tar: Buffer | None) -> list[str]:
    """Return the keys of a shard, by the headers of its members."""
    size = info.filesize or storage.info(info.url).size
    read: ReadAt
    if tar is not None:
        read = lambda at, length: bytes(tar[at : at + length])  # pages of headers only
    else:
        stream = RangeStream(storage, info.url, size, min_read_bytes=_SCAN_READ_BYTES)
        read = ForwardReader(stream, chunk_bytes=_SCAN_READ_BYTES)
    keys = scan_shard(read, end=size, shard=info.url, diagnostics=TarDiagnostics()).keys
    if len(keys) != info.nsamples:
        raise IndexMismatchError(
            f"{plural(len(keys), 'sample')} in the tar, {info.nsamples} in its index",
            remedy="run 'shardstream index' again",
            shard=info.url,
        )
    return keys


def choose_samples(
    samples: Samples,
    subset: Choice | Keys | None = None,
    where: Where | None = None,
    version: DatasetVersion | None = None,
) -> Samples:
    """Return the samples that a user chose by number or key, by a condition on columns, or by both; all if by neither.

    Numbers may have been chosen in another version of the dataset than ``version``, if it is given: if they are those of other samples there, it warns.

    Raises:
        OptionError: If an argument is invalid or chooses no sample, or the shards have no columns; see `select_subset`, `find_keys` and
            `find_where`.
        StorageError: If a file cannot be read.
    """
    matching = None if where is None else find_where(samples, where)
    if matching is not None and not len(matching):
        raise OptionError(f"where={str(where)!r} chooses no sample")
    if subset is None:
        return samples if matching is None else Subset(samples, matching)
    if _are_keys(subset):
        subset = find_keys(samples, cast("Keys", subset))
    elif not isinstance(subset, slice):
        warn_of_numbers("subset=", version)
    chosen = select_subset(samples, cast("Choice", subset))
    if matching is None:
        return chosen
    numbers = chosen.numbers[np.isin(chosen.numbers, matching)]
    if not len(numbers):
        raise OptionError(
            f"where={str(where)!r} chooses none of the {plural(len(chosen), 'sample')} of subset="
        )
    return Subset(samples, numbers)


def _are_keys(subset: object) -> bool:
    """Return whether a choice names samples by key: the first one of a list tells; `find_keys` checks the others.

    Raises:
        OptionError: If it is a set, whose order differs between processes, or an iterator, which can be read once only.
    """
    if isinstance(subset, str | os.PathLike):
        return os.fspath(subset).lower().endswith(".txt")
    if isinstance(subset, AbstractSet | Iterator):
        raise OptionError(
            f"subset= takes a list in the order of the samples, not a {type(subset).__name__}"
        )
    try:
        first = next(iter(subset), None)  # type: ignore[call-overload]
    except TypeError:  # a slice, or a number
        return False
    return isinstance(first, str)


def warn_of_numbers(what: str, version: DatasetVersion | None, *, stacklevel: int = 4) -> None:
    """Warn of numbers of samples that may have been found in an earlier version, where other samples had them."""
    if version is not None and version.has_other_numbers:
        warnings.warn(
            f"{what} goes by the numbers of samples, which changed when samples were deleted: here they are those of version {version.number}; for those of "
            "an earlier one pass its version= to the dataset, or use keys or a column",
            UserWarning,
            stacklevel=stacklevel,
        )


def find_keys(samples: Samples, keys: Keys, option: str = "subset=") -> Numbers:
    """Return the numbers of the samples with these keys, in the order of the keys.

    Args:
        samples: The samples.
        keys: At least one.
        option: Name of the option, for errors.

    Raises:
        OptionError: If a key is named twice, no sample has it, or several have it; or as in `Samples.read_columns`.
    """
    wanted = _listed_keys(keys, samples.storage, option)
    numbers, ranks = _find_listed(samples.read_columns([KEY_COLUMN]), wanted)
    counts = np.bincount(ranks, minlength=len(wanted))
    _check_counts(wanted, counts, option)
    return numbers[np.argsort(ranks, kind="stable")]


def samples_with_keys(samples: Samples, keys: Keys) -> tuple[Numbers, list[str]]:
    """Return the numbers of all samples with one of these keys, ascending, and the keys that no sample has, each once.

    Keys are read from the shards where there are no columns of them.

    Raises:
        OptionError: If there are no keys, or not of text.
        StorageError: If a file cannot be read.
    """
    wanted = [*dict.fromkeys(_listed_keys(keys, samples.storage, "keys="))]
    numbers, ranks = _find_listed(samples.read_columns([KEY_COLUMN], scans=True), wanted)
    is_known = np.bincount(ranks, minlength=len(wanted)) > 0
    return numbers, [wanted[place] for place in np.flatnonzero(~is_known).tolist()]


def _listed_keys(keys: Keys, storage: Storage, option: str) -> list[str]:
    """Return keys that are given as a list, or in a file."""
    if isinstance(keys, str | os.PathLike):
        wanted = _read_keys(os.fspath(keys), storage)
    else:
        wanted = [*keys]
    if not wanted:
        raise OptionError(f"{option} chooses no sample")
    kinds = {type(key).__name__ for key in cast("list[object]", wanted) if not isinstance(key, str)}
    if kinds:
        raise OptionError(
            f"{option} takes keys or numbers of samples, not text and {', '.join(sorted(kinds))}"
        )
    return wanted


def _find_listed(table: pa.Table, wanted: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Return the numbers of the samples that have one of some keys, ascending, and the place of the key of each among these."""
    pa, _ = import_parquet()
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    try:
        asked = pa.array(wanted, pa.string())
    except UnicodeEncodeError as error:
        raise OptionError(f"no sample has the key {error.object!r}, which is not UTF-8") from error
    places = pc.index_in(table[KEY_COLUMN].combine_chunks(), value_set=asked)
    numbers = np.flatnonzero(np.asarray(places.is_valid())).astype(np.int64)
    return numbers, np.asarray(places.drop_null(), dtype=np.int64)


def _check_counts(wanted: Sequence[str], counts: np.ndarray[Any, Any], option: str) -> None:
    """Check that each key has one sample; ``counts`` are zero for keys that repeat an earlier one."""
    first: dict[str, int] = {}
    for number, key in enumerate(wanted):
        if first.setdefault(key, number) != number:
            raise OptionError(f"{option} has the key {key!r} more than once; name each once")
    missing = [wanted[place] for place in np.flatnonzero(counts == 0).tolist()]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise OptionError(
            f"no sample has the key {', '.join(map(repr, missing[:_NAMED]))}{more}; 'shardstream cat' prints the keys of a shard"
        )
    repeated = np.flatnonzero(counts > 1).tolist()
    if repeated:
        raise OptionError(
            f"{counts[repeated[0]]} samples have the key {wanted[repeated[0]]!r}; choose them by number"
        )


def _read_keys(url: str, storage: Storage) -> list[str]:
    try:
        lines = storage.read_bounded(url).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"not a text file in UTF-8: {error}", shard=url) from error
    return [line.removesuffix("\r") for line in lines if line.removesuffix("\r")]


def find_where(samples: Samples, where: Where) -> Numbers:
    """Return the numbers of the samples whose columns fulfil a condition, ascending.

    Args:
        samples: The samples.
        where: A condition in SQL, e.g. ``"cls in (3, 9) and width >= 512"``, which DuckDB evaluates; or a `pyarrow.compute.Expression`.
            A sample without a value, or with NaN, does not fulfil a comparison with it.

    Raises:
        OptionError: If the condition is invalid, or DuckDB is not installed; or as in `Samples.read_columns`.
    """
    pa, _ = import_parquet()
    if isinstance(where, str) and not where.strip():
        raise OptionError("where= is an empty condition; leave it out to read all samples")
    has_keys = KEY_COLUMN in str(where)  # the largest column is left out where it can be
    available = samples.column_names()
    names = [name for name in available if has_keys or name != KEY_COLUMN]
    if not names:
        raise OptionError(
            f"there {'is a column of keys only' if available else 'are no columns'}, which where= cannot compare; run 'shardstream index "
            "--columns FIELDS' on the folder, with fields of numbers or text, or values in JSON (json.NAME)",
            shard=samples.url_of(0),
        )
    _check_column_names(names, samples, is_sql=isinstance(where, str))
    table = _without_nan(samples.read_columns(_named_in(str(where).lower(), names)))
    table = table.append_column(_NUMBER, pa.array(np.arange(table.num_rows)))
    choose = _query if isinstance(where, str) else _filter
    try:
        found = choose(table, where, names)
    except OptionError as error:
        if numbers := _class_numbers(str(where), samples):
            raise OptionError(f"{error}. Classes are stored as numbers: {numbers}") from error
        raise
    if len(np.intersect1d(found, np.arange(table.num_rows))) < len(found):
        raise OptionError(
            f"where={str(where)!r} chooses samples more than once, or others than there are; "
            "use a condition on columns alone"
        )
    if isinstance(where, str) and not np.array_equal(
        np.sort(found), np.sort(_query(table, where, names))
    ):
        raise OptionError(
            f"where={where!r} chooses other samples each time, so ranks would read different ones; "
            "use a condition on columns alone, or subset="
        )
    return cast("Numbers", np.sort(found.astype(np.int64)))


def _named_in(text: str, names: Sequence[str]) -> Sequence[str]:
    """Return the columns that a condition in lower case may name, of a table whose texts may be large; all where it stands for others, too."""
    if any(sign in text for sign in ("*", "#", "columns", "samples", "fieldpath")):
        return names
    spelled = [(name, name.lower(), name.lower().replace('"', '""')) for name in names]
    found = [name for name, plain, quoted in spelled if plain in text or quoted in text]
    return found or names


def _class_numbers(where: str, samples: Samples) -> str:
    """Format the numbers of the classes that a condition names; "" if it names none, or the classes cannot be read."""
    quoted = set(re.findall(r"""['"]([^'"]+)['"]""", where))
    if not quoted:
        return ""
    try:
        classes = read_classes(parent_url(samples.url_of(0)), samples.storage) or ()
    except (ManifestError, StorageError):  # the condition is the user's problem
        return ""
    found = [f"{name!r} is {number}" for number, name in enumerate(classes) if name in quoted]
    return ", ".join(found[:_NAMED])


def _check_column_names(names: Sequence[str], samples: Samples, *, is_sql: bool) -> None:
    """Refuse names that would stand for another column: reserved ones, and in SQL those that differ only in case."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower() if is_sql else name, name)
        is_reserved = name != KEY_COLUMN and is_reserved_column(name)
        if is_reserved or other != name:
            what = (
                f"the column {name} has a reserved name"
                if is_reserved
                else f"the columns {other} and {name} differ only in case, which SQL does not distinguish"
            )
            raise OptionError(
                f"{what}; write it under another name, with NAME=SOURCE of 'shardstream index --columns'"
                + ("" if is_reserved else ", or use a pyarrow.compute expression"),
                shard=samples.url_of(0),
            )


def _without_nan(table: pa.Table) -> pa.Table:
    """Return a table without values where it has NaN: DuckDB takes NaN for the largest number, Arrow for none."""
    pa, _ = import_parquet()
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    for number, name in enumerate(table.column_names):
        column = table[name]
        if pa.types.is_floating(column.type):
            numbers = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
            table = table.set_column(number, name, numbers)
    return table


def _query(table: pa.Table, where: str, names: Sequence[str]) -> Numbers:
    try:
        import duckdb  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise OptionError(
            f"where= as text needs one more package: {how_to_install('columns')}; a pyarrow.compute expression does not"
        ) from error
    with duckdb.connect(config={"enable_external_access": "false"}) as connection:
        connection.register("samples", table)
        try:
            rows = connection.execute(f"SELECT {_NUMBER} FROM samples WHERE ({where}\n)")  # noqa: S608  (the user's own condition, without access to files)
            return cast("Numbers", rows.fetchnumpy()[_NUMBER])
        except duckdb.Error as error:
            raise _invalid(where, names, error) from error


def _filter(table: pa.Table, where: Any, names: Sequence[str]) -> Numbers:
    pa, _ = import_parquet()
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    if not isinstance(where, pc.Expression):
        raise OptionError(
            f"where= takes a condition in SQL as text, or a pyarrow.compute expression, not {type(where).__name__}"
        )
    try:
        return cast("Numbers", table.filter(where)[_NUMBER].to_numpy())
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, KeyError) as error:
        raise _invalid(str(where), names, error) from error


def _invalid(where: str, names: Sequence[str], error: Exception) -> OptionError:
    reason = "; ".join(itertools.islice(filter(None, map(str.strip, str(error).splitlines())), 2))
    return OptionError(f"where={where!r} is invalid: {reason}. Columns: {', '.join(names)}")
