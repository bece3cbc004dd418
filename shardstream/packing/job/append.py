"""Append shards to a dataset: they are written to a folder of their own in that of the dataset, and listed by its next version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from shardstream.catalog import Classes, ShardCatalog, read_classes
from shardstream.errors import ManifestError, NotFoundError, OptionError, StorageError
from shardstream.format import (
    CLASSES_NAME,
    MANIFEST_NAME,
    Column,
    DatasetVersion,
    Manifest,
    ShardInfo,
    columns_in_file,
    decode_classes,
    decode_manifest,
    encode_classes,
    extend_binary,
)
from shardstream.packing.job.key_hashes import KnownSamples, NewKeys
from shardstream.packing.shards.part_writer import WriterOptions
from shardstream.storage import (
    AllIndexed,
    LazyShards,
    LocatedShards,
    Storage,
    absolute_url,
    change_folder,
    dataset_of_change,
    folder_of_manifest,
    join_url,
    locate_shards,
    publish_bytes,
    read_deleted,
    update_file,
)
from shardstream.versions import AnyManifest, next_version, publish_version, this_writer

OPERATION = "append"
_RECENT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A dataset that shards are appended to; picklable.

    Args:
        url: URL of its folder.
        classes: Names of its classes, if it has some.
        columns: Columns of its shards, if they have some.
    """

    url: str
    classes: Classes | None
    columns: tuple[Column, ...] | None

    def columns_for(self, asked: tuple[Column, ...] | None) -> tuple[Column, ...] | None:
        """Return the columns of the new shards: those of the dataset.

        Args:
            asked: The user's choice; None for those of the dataset.

        Raises:
            OptionError: If the user wants others, or must give the function of one.
        """
        if asked is None:
            computed = [one.name for one in self.columns or () if one.is_computed]
            if computed:
                raise OptionError(
                    f"the column {computed[0]!r} of the dataset is made by a function: give all columns to ShardWriter(columns={{...}}), or "
                    "reshard the dataset without it",
                    shard=self.url,
                )
            return self.columns
        mine, theirs = (
            {one.name: one.source for one in some or ()} for some in (asked, self.columns)
        )
        if mine.keys() != theirs.keys() or any(
            mine[name] != theirs[name] and not theirs[name].endswith("()") for name in mine
        ):
            raise OptionError(
                f"the dataset has {_listed(self.columns)}, not {_listed(asked)}; leave columns= (--columns) out to write the same, or write "
                "those of the dataset again first, by 'shardstream reshard'",
                shard=self.url,
            )
        return asked

    def limits_for(self, asked: WriterOptions) -> WriterOptions:
        """Return the limits of the new shards, with columns and the number of classes of the dataset (see `columns_for`)."""
        num_classes = None if self.classes is None else len(self.classes)
        return replace(asked, columns=self.columns_for(asked.columns), num_classes=num_classes)

    def folder_for(self, token: str) -> str:
        """Return the URL of the folder of the new shards."""
        return join_url(self.url, change_folder(OPERATION, token))


def read_base(url: str, storage: Storage) -> Base:
    """Look at the dataset that shards are appended to.

    Raises:
        OptionError: If there is none, or a shard has no index or an unknown number of samples.
        ManifestError: If a file of it is damaged.
        StorageError: If it cannot be read.
    """
    url = absolute_url(url)
    try:
        located = locate_shards(url, storage)
    except NotFoundError as error:
        raise OptionError(
            "there is no dataset to append to; pack without append=True (--append) first", shard=url
        ) from error
    if located.manifest_url != join_url(url, MANIFEST_NAME):
        raise OptionError(
            "append needs the folder of a dataset with an index.json; write one by 'shardstream index'",
            shard=url,
        )
    some = () if isinstance(located.shards, LazyShards) else located.shards
    unknown = [one.url for one in some if one.nsamples is None or one.url not in located.indexed]
    if unknown:
        raise OptionError(
            "a shard has no index, or no known number of samples; run 'shardstream index' on the dataset first",
            shard=unknown[0],
        )
    first = located.shards[0].columns_url
    columns = columns_in_file(storage.read(first), url=first) if storage.exists(first) else None
    return Base(url=url, classes=read_classes(url, storage, located.version), columns=columns)


def check_append(*, is_append: bool, is_new: bool, has_defaults: bool) -> None:
    """Refuse options that do not go together.

    Args:
        is_append: Whether shards are to be appended.
        is_new: Whether there are options of a new dataset.
        has_defaults: Whether the options of an append have their defaults.
    """
    if is_append and is_new:
        raise OptionError(
            "append=True (--append) keeps the dataset and its name; leave overwrite and name out"
        )
    if not (is_append or has_defaults):
        raise OptionError(
            "check_keys=False (--no-key-check) and publish_s have an effect with append=True (--append) only"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Finished shards that are to be appended.

    Args:
        folder: URL of their folder, in that of the dataset.
        shards: The shards, with names in this folder.
        fields: Field -> number of samples that have it.
        classes: Name -> number of the classes that their samples have.
        keys: Keys of their samples, without those that are listed; None if they are not compared.
        before: Those of the same writer that the dataset lists already, which are the first ones.
        token: Of a writer that readers which follow the dataset know; "" for others.
        is_last: Whether the writer ends with them.
    """

    folder: str
    shards: Sequence[ShardInfo]
    fields: Mapping[str, int]
    classes: Mapping[str, int]
    keys: NewKeys | None
    before: Addition | None = None
    token: str = ""
    is_last: bool = True

    @property
    def dataset(self) -> str:
        """URL of the folder of the dataset."""
        found = dataset_of_change(self.folder)
        assert found is not None  # noqa: S101  (`Base.folder_for` has made it)
        return found

    @property
    def relative(self) -> tuple[ShardInfo, ...]:
        """The shards, with names in the folder of the dataset."""
        name = self.folder.rpartition("/")[2]
        return tuple([replace(one, url=f"{name}/{one.url}") for one in self.shards])

    def publish(self, storage: Storage) -> None:
        """Publish the next version of the dataset.

        Raises:
            OptionError: If fields, columns or class numbers differ from those of the dataset.
            SourceError: If a key is in the dataset already.
            ChangedError: If other writers published too often meanwhile.
            StorageError: If it cannot be read or written.
        """
        url = join_url(self.dataset, MANIFEST_NAME)
        before = decode_manifest(storage.uncached().read(url), url=url)
        # Before it is known that the version is the current one: to read all keys may take long.
        try:
            made = [self._next(storage, before)]
        except (ManifestError, StorageError):  # `gc` may have removed the version meanwhile
            made = []

        def change(manifest: AnyManifest) -> AnyManifest | None:
            return made[0] if made and manifest == before else self._next(storage, manifest)

        publish_version(self.dataset, storage, change)

    def _next(self, storage: Storage, manifest: AnyManifest) -> AnyManifest | None:
        """Return the manifest with the new shards; None if it has them."""
        url = join_url(self.dataset, MANIFEST_NAME)
        listed = 0 if self.before is None else len(self.before.shards)
        absolute = [replace(one, url=join_url(self.dataset, one.url)) for one in self.relative]
        new = {one.url for one in absolute[listed:]}
        before = _with_absolute_urls(manifest, url, storage)
        recent = before.shards[-_RECENT:]  # those of another process that ends the same job now
        if any(one.url in new for one in recent):
            return None
        self._check_fields(manifest)
        _check_columns(before.shards[0], absolute[listed], storage)
        version = manifest.dataset_version
        changes: dict[str, Any] = {}
        if self.keys is not None:
            known = KnownSamples(
                folder=self.dataset,
                storage=storage,
                version=version,
                shards=before.shards,
                deleted=read_deleted(before, url, storage),
            )
            changes["keys"] = known.add(self.keys, absolute)
        if self.classes:
            changes["class_counts"] = self._extend_classes(version, storage)
        if self.token:
            mine = () if self.is_last else (this_writer(self.token),)
            changes["writers"] = (*version.other_writers(self.token), *mine)
        after = next_version(manifest, OPERATION, **changes)
        fields = Counter(self.fields)
        fields.subtract({} if self.before is None else self.before.fields)
        total = dict(Counter(manifest.fields) + fields) if manifest.fields else {}
        shards = self.relative[listed:]
        if isinstance(after, Manifest):
            return replace(after, shards=(*after.shards, *shards), fields=total)
        assert isinstance(before.shards, LazyShards)  # noqa: S101  (of such a manifest)
        extended, data = extend_binary(after, shards, before.shards.read_chunk)
        publish_bytes(storage, join_url(self.dataset, extended.files[-1].records), data)
        return replace(extended, fields=total)

    def _check_fields(self, manifest: AnyManifest) -> None:
        """Refuse fields that the dataset does not have, and a lack of those that all its samples have."""
        total = sum(one.nsamples or 0 for one in self.shards)
        other = sorted(self.fields.keys() - manifest.fields.keys()) if manifest.fields else []
        missing = sorted(
            name
            for name, count in manifest.fields.items()
            if count == manifest.nsamples and self.fields.get(name) != total
        )
        if other or missing:
            lack = (
                f"lack {', '.join(missing)}, which all samples of the dataset have"
                if missing
                else ""
            )
            have = f"have {', '.join(other)}, which the dataset does not have" if other else ""
            raise OptionError(
                f"new samples {lack}{' and ' * bool(lack and have)}{have}; nothing is published, write the fields of the dataset",
                shard=self.dataset,
            )

    def _extend_classes(
        self, version: DatasetVersion, storage: Storage
    ) -> tuple[tuple[int, int], ...]:
        """Add names to ``classes.json``; return how many earlier versions had.

        Raises:
            OptionError: If another writer has given one of the numbers to another class.
        """
        url, counts = join_url(self.dataset, CLASSES_NAME), [0, 0]

        def change(old: bytes | None) -> bytes | None:
            names = [] if old is None else [*decode_classes(old, url=url)]
            counts[0] = len(names)
            for name, number in sorted(self.classes.items(), key=itemgetter(1)):
                if number == len(names) and name not in names:
                    names.append(name)
                elif names[number : number + 1] != [name]:
                    raise OptionError(
                        f"class {number} is {name!r} in the new samples, but another writer has added classes meanwhile; run the same "
                        "command again, which numbers them anew",
                        shard=url,
                    )
            counts[1] = len(names)
            return encode_classes(names).encode() if counts[1] > counts[0] else None

        update_file(storage, url, change, is_done=lambda found: change(found) is None)
        if counts[0] == counts[1]:
            return version.class_counts
        return (*version.class_counts, (version.number + 1, counts[0]))


def find_appended(folder: str, storage: Storage, *, has_files: bool = True) -> list[ShardInfo]:
    """Return the shards of a folder that its dataset lists, also those that a compaction has written again.

    Args:
        folder: URL of the folder.
        storage: Where it is.
        has_files: Whether it has files; else only a compaction can have left shards of it.

    Raises:
        StorageError: If the dataset cannot be read.
    """
    dataset = dataset_of_change(folder)
    if dataset is None:
        return []
    located = locate_shards(dataset, storage)
    compactions = () if located.version is None else located.version.renumbered
    if not (has_files or compactions):
        return []
    prefix = prefix_of_appended(folder)
    return [
        one
        for one in located.shards
        if one.url.startswith(f"{folder}/")
        or (compactions and one.url.rpartition("/")[2].startswith(prefix))
    ]


def prefix_of_appended(folder: str) -> str:
    """Return how the names of the shards of a folder begin once they are compacted; "" if they were not appended.

    >>> prefix_of_appended("s3://b/train/append-0123456789abcdef"), prefix_of_appended("s3://b/train")
    ('0123456789abcdef-', '')
    """
    is_appended = dataset_of_change(folder) is not None
    operation, _, token = folder.rpartition("/")[2].partition("-")
    return f"{token}-" if is_appended and operation == OPERATION else ""


def _with_absolute_urls(manifest: AnyManifest, url: str, storage: Storage) -> Manifest:
    """Return the manifest at a URL as one that lists its shards with absolute URLs."""
    shards: Sequence[ShardInfo]
    if isinstance(manifest, Manifest):
        folder = folder_of_manifest(url)
        shards = [replace(one, url=join_url(folder, one.url)) for one in manifest.shards]
    else:
        shards = LazyShards(manifest, url, storage)
    return Manifest(shards=shards, dataset_version=manifest.dataset_version)


def _check_columns(first: ShardInfo, new: ShardInfo, storage: Storage) -> None:
    """Compare the columns of two shards.

    Raises:
        OptionError: If their names or types differ.
    """
    both = [
        ShardCatalog(LocatedShards(shards=shards, indexed=AllIndexed()), storage)
        for shards in ([first], [new], [first, new])
    ]
    theirs, mine = (set(one.column_names()) for one in both[:2])
    if theirs != mine:
        raise OptionError(
            f"the columns of new samples are {', '.join(sorted(mine)) or 'none'}, those of the dataset {', '.join(sorted(theirs)) or 'none'}",
            shard=new.url,
        )
    if mine:
        both[2].read_columns(None)  # an error names the types that differ


def _listed(columns: Iterable[Column] | None) -> str:
    """Describe columns."""
    names = ",".join(one.spec for one in columns or ())
    return f"the columns {names}" if names else "no columns"
