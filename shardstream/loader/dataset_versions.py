"""Other versions of a dataset than the present one: those of a state, to finish its epoch; later ones, while writers publish.

Samples of a dataset that is followed keep the numbers that they had in the version where the reading began, the origin: an append adds numbers
at the end, a deletion leaves a hole, and what a compaction removes stays a hole. So all readers of one origin number all samples alike,
whatever version each of them sees. The samples that are new are read as rounds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.distributed import WorkerInfo
from shardstream.errors import (
    ChangedError,
    ManifestError,
    NotFoundError,
    OptionError,
    StateError,
    get_logger,
)
from shardstream.format import MANIFEST_NAME
from shardstream.order import EpochOrder, RangePlan
from shardstream.pipeline import (
    Context,
    Run,
    SamplesSource,
    Source,
    refuse_options,
)
from shardstream.samples import DeletedSince, Numbers, Samples, Subset, deleted_since
from shardstream.storage import (
    LazyShards,
    LocatedShards,
    Storage,
    Urls,
    absolute_urls,
    count_samples,
    expand_urls,
    folder_of_manifest,
    is_tar,
    join_url,
    locate_shards,
)

if TYPE_CHECKING:
    from shardstream.loader.dataset import StreamDataset

Versions = Iterator[int | None]
"""The version of each `ShardDataset` that a dataset is made of, in order; None for one that has none."""
_FINISH = (
    "finish its epoch with that version (version=), then leave out the state and call set_epoch"
)
_log = get_logger(__name__)
_ENDS = 1 << 62
_NONE: Numbers = np.empty(0, dtype=np.int64)


def dataset_of_state(dataset: StreamDataset, state: Any) -> StreamDataset:
    """Return a dataset of the versions that a state was saved with, without the samples that were deleted since.

    Args:
        dataset: The dataset of the present versions, which is returned if the state names no others.
        state: Any state.

    Raises:
        StateError: If a version is newer than here, was removed, or ``on_new_version`` is "error".
        StorageError: If the dataset cannot be read.
    """
    if not isinstance(state, Mapping) or _is_of(state, dataset.pipeline.source):
        return dataset
    saved, here = state.get("versions"), list(dataset.versions)
    if not isinstance(saved, list) or len(saved) != len(here) or saved == here:
        return dataset
    problem = (
        f"the state was saved with version {_shown(saved)} of the dataset, here it is {_shown(here)}, and the dataset cannot be made of "
        "the earlier one to finish the epoch"
    )
    try:
        made = dataset._of_versions(iter(saved))
    except (OptionError, NotFoundError, ManifestError) as error:
        raise StateError(f"{problem}: {error}", remedy="start without the state") from error
    if list(made.versions) != saved:  # its samples are of another kind, or were changed
        raise StateError(f"{problem}; make it in this process, of one URL for each version")
    return made


def _is_of(state: Mapping[str, Any], source: Source) -> bool:
    """Return whether a state is of the data of a source, as far as is known: shards of replaced fields may have equal names and lengths."""
    saved = state.get("checksums")
    pairs = zip(saved if isinstance(saved, list) else (), source.checksums, strict=False)
    is_other = any(None not in pair and pair[0] != pair[1] for pair in pairs)
    return state.get("fingerprint") == source.fingerprint and not is_other


def reopen(
    open_version: partial[Any],
    on_new_version: str,
    dataset: StreamDataset,
    versions: Versions,
) -> StreamDataset:
    """Return a dataset of one URL in an earlier version, without the samples that were deleted since.

    Args:
        open_version: Opens it by ``version=``; the argument is its URL.
        on_new_version: As in `ReadOptions`.
        dataset: The present one.
        versions: The next one is that of this dataset.

    Raises:
        StateError: If the version is newer than that of the present one, or ``on_new_version`` is "error".
        OptionError: If the version was removed.
    """
    (here,), number = dataset.versions, next(versions)
    if here is None or number in (here, None):
        return dataset
    if type(number) is not int or number > here:
        raise StateError(
            f"the state was saved with version {number!r}, which is newer than version {here} here; open that one or a later one"
        )
    if on_new_version == "error":
        raise StateError(
            f"the state was saved with version {number}, here it is {here}, and on_new_version is 'error'; {_FINISH}"
        )
    earlier: StreamDataset = open_version(version=number)
    source = earlier.pipeline.source
    if not isinstance(source, SamplesSource):
        return earlier
    deleted = _deleted_between(open_version.args[0], source.samples.storage, number, here)
    if not len(deleted):
        return earlier
    samples = _with_holes(source.samples, deleted)
    return earlier._with_pipeline(
        replace(earlier.pipeline, source=replace(source, samples=samples))
    )


def _deleted_between(urls: Urls, storage: Storage, number: int, until: int) -> Numbers:
    """Return the samples of an earlier version that were deleted until a later one, by their numbers in a dataset of the earlier one."""
    earlier, later = locate_shards(urls, storage, number), locate_shards(urls, storage, until)
    compacted = () if later.version is None else later.version.compacted_since(number)
    removed = [deleted_in(locate_shards(urls, storage, one)) for one in compacted]
    found = deleted_since(deleted_in(later), removed, count_samples(earlier.shards))
    before = deleted_in(earlier)
    found = np.setdiff1d(found, before, assume_unique=True)
    return found - np.searchsorted(before, found)


def deleted_in(located: LocatedShards) -> Numbers:
    """Return the deleted samples of the dataset of one manifest, by their numbers in its shards, ascending."""
    return located.deleted[0][1] if located.deleted else np.empty(0, dtype=np.int64)


def _with_holes(samples: Samples, deleted: Numbers) -> Samples:
    """Return all samples of a dataset, or those that were chosen, of which some were deleted since."""
    if isinstance(samples, Subset):
        return samples.with_inner([DeletedSince(samples.whole, deleted)])
    return DeletedSince(samples, deleted)


def _shown(versions: list[Any]) -> str:
    return str(versions[0] if len(versions) == 1 else versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """How a dataset is read while writers append to it, as ``version=`` of `ShardDataset`.

    Args:
        poll_s: Seconds from one look at ``index.json`` to the next, while the reader waits.
        timeout_s: Seconds without a publication after which a reader that waits for an open writer, or for the dataset, raises.

    Raises:
        OptionError: If one is not over 0.
    """

    poll_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not (self.poll_s > 0 and self.timeout_s > 0):
            raise OptionError(
                f"poll_s and timeout_s are over 0, not {self.poll_s} and {self.timeout_s}"
            )

    def wait_for(self, urls: Urls, storage: Storage) -> LocatedShards:
        """Return the shards of a dataset, which a writer may have to publish first.

        Raises:
            NotFoundError: If it is not published in time.
            OptionError: If it is not the folder of one dataset.
        """
        folder, *others = expand_urls(absolute_urls(urls))
        if others or is_tar(folder):
            raise OptionError(f"version=Follow() needs the folder of one dataset, not {urls}")
        url = folder if folder.endswith(".json") else join_url(folder, MANIFEST_NAME)
        until, storage = time.monotonic() + self.timeout_s, storage.uncached()
        if not storage.exists(url):  # the name may be wrong
            _log.warning("%s is not there; waiting for it up to %g s", url, self.timeout_s)
        while not storage.exists(url):
            if time.monotonic() >= until:
                raise NotFoundError(
                    f"nobody has published a dataset in the {self.timeout_s:g} s that version=Follow() has waited for it",
                    shard=url,
                )
            time.sleep(self.poll_s)
        return locate_shards(folder_of_manifest(url), storage)


@dataclass(frozen=True, slots=True)
class FollowSource(Source):
    """A dataset that is followed: its samples have no numbers before a loader reads them.

    Args:
        located: Its shards when it was opened.
        follow: How it is followed.
        open_samples: Returns the samples of its shards.
        ordered: Makes a source of its samples, with the user's options.
        seed: Seed of ``map(rng=True)``.
        shuffle: False: samples come in the order of their publication.
    """

    located: LocatedShards
    follow: Follow
    open_samples: partial[Samples]
    ordered: partial[SamplesSource]
    seed: int
    shuffle: bool = False

    @property
    def storage(self) -> Storage:
        """The storage of the shards."""
        storage: Storage = self.open_samples.keywords["storage"]
        return storage

    @property
    def lacks_numbers(self) -> str:
        """Why its samples have no numbers."""
        return "a dataset with version=Follow() grows while it is read, and is read by a ShardLoader alone; open it without version= for anything else"

    @property
    def summary(self) -> str:
        """Size of the dataset when it was opened, for ``repr``."""
        return f"followed from {count_samples(self.located.shards):,} samples on"

    @property
    def fingerprint(self) -> str:
        """The same for all: it grows (see `Follower.prefix`)."""
        return "followed"

    @property
    def checksums(self) -> list[str | None]:
        """None: it grows."""
        return [None]

    def place(self) -> tuple[Storage, str]:
        """Return the storage, and the URL of the first shard."""
        return self.storage, self.located.shards[0].url

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:  # noqa: ARG002
        """Refuse to be read without a loader."""
        raise OptionError(self.lacks_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(SamplesSource):
    """Some samples in a row of a dataset that is followed.

    Args:
        first: Number of the first one.
        count: How many they are.
        is_last: Whether the writers have been closed after them.
        substitutes: Number of a sample that is repeated where a rank has deleted ones only and draws no other: one of the round, if any is left.
    """

    first: int = 0
    count: int = 0
    is_last: bool = False
    substitutes: tuple[int, ...] = ()

    @property
    def nsamples(self) -> int:
        """Samples of the round."""
        return self.count

    @property
    def end(self) -> int:
        """Number after that of the last sample."""
        return self.first + self.count

    @property
    def fingerprint(self) -> str:
        """That of the source."""
        return "followed"

    def plan(self, order: EpochOrder, epoch: int) -> RangePlan:
        """Return the batches of the round."""
        return RangePlan(order, epoch, first=self.first)

    def for_workers(self) -> Round:
        """Return the round with the shards that it needs only."""
        numbers = np.arange(self.first, self.end, dtype=np.int64)
        return self.restrict_to(np.union1d(numbers, np.array(self.substitutes, dtype=np.int64)))


def locate_followed(
    follow: Follow,
    urls: Urls,
    storage: Storage,
    needs: Mapping[str, object],
    ordered: partial[SamplesSource],
) -> LocatedShards:
    """Return the shards of a dataset that is to be followed, as soon as it is there.

    Args:
        follow: How long to wait for it.
        urls: Its folder.
        storage: Where it is.
        needs: Options that cannot be followed, by name; None where the user did not give them.
        ordered: Makes a source with the user's shuffle and options of the order.

    Raises:
        OptionError: If an option is given, or it is not the folder of one dataset with an ``index.json``.
        NotFoundError, UnfinishedError: If it is not published in time.
    """
    needs = {**needs, "shuffle": ordered.keywords["shuffle"] or None}
    given = [f"{name}=" for name, value in needs.items() if value is not None]
    if given:
        raise OptionError(
            f"{' and '.join(given)}: version=Follow() reads all samples in the order of their publication; choose or shuffle them when the dataset is complete"
        )
    order = ordered.keywords["options"]
    refuse_options(order, [one.name for one in fields(order)], "with version=Follow()")
    refuse_options(ordered.keywords["reading"], ["on_new_version"], "with version=Follow()")
    return follow.wait_for(urls, storage)


@dataclass(slots=True)
class Follower:
    """Looks at a dataset that is followed.

    Args:
        source: The dataset.
    """

    source: FollowSource
    located: LocatedShards = field(init=False)
    """Its present shards."""
    origin: int = field(init=False)
    """Version whose numbers the samples have."""
    saw_writer: bool = field(init=False)
    """Whether a writer was open at one of the looks."""
    is_certain: bool = field(init=False, default=True)
    """Whether readers that begin at another time have the same origin."""
    _removed: dict[int, LocatedShards] = field(default_factory=dict)
    """Versions before a compaction."""
    _seen: str | None = field(init=False, default=None)
    """ETag of the manifest that was read last, on S3."""

    def __post_init__(self) -> None:
        self.located = self.source.located
        self.origin = max(self._version.renumbered, default=1)
        self.saw_writer = bool(self.writers)

    def begin_with_others(self) -> None:
        """Number samples as in the first version, if all that compactions have removed is known: other readers may begin before or after one."""
        version = self._version
        self.is_certain = all(map(version.has, version.compacted_since(1)))
        self.origin = 1 if self.is_certain else self.origin

    @property
    def _version(self) -> Any:
        assert self.located.version is not None  # noqa: S101  (checked by `Follow.wait_for`)
        return self.located.version

    @property
    def url(self) -> str:
        """URL of its manifest."""
        assert self.located.manifest_url is not None  # noqa: S101
        return self.located.manifest_url

    @property
    def writers(self) -> tuple[Any, ...]:
        """Writers that go on to append."""
        found: tuple[Any, ...] = self._version.writers
        return found

    @property
    def published(self) -> int:
        """Number after that of the last sample."""
        return count_samples(self.located.shards) + len(self._gone())

    def look(self) -> bool:
        """Read the manifest; return whether it has changed.

        Raises:
            ChangedError: If another dataset has replaced the one that was read.
            StorageError: If it cannot be read.
        """
        storage = self.source.storage.uncached()
        # It may have a megabyte. Other stores may have versions that do not change with each write, as times do not.
        version = storage.info(self.url).version if storage.is_s3(self.url) else None
        if version == self._seen and str(version).startswith("ETag "):
            return False
        digest = hashlib.sha256(storage.read(self.url)).hexdigest()
        if digest == self.located.manifests[self.url].sha256:
            self._seen = version
            return False
        before, count, old = self.prefix(_ENDS), self.published, self.located
        number = self._version.number
        self.located = locate_shards(folder_of_manifest(self.url), storage)
        is_later = self.located.version is not None and self._version.number >= number
        if not is_later or self.prefix(count) != before:
            self.located = old
            raise ChangedError(
                "another dataset has replaced the one that is followed", shard=self.url
            )
        self.saw_writer = self.saw_writer or bool(self.writers)
        return True

    def move_to(self, origin: int, consumed: int, fingerprint: str) -> None:
        """Follow from the position of a state on.

        Raises:
            StateError: If the dataset is another one, or has fewer samples.
        """
        self.look()
        if origin > self._version.number:
            raise StateError(
                f"the state is of version {origin} of the dataset, here it is {self._version.number}"
            )
        self.origin, self.is_certain = origin, True
        self._removed.clear()
        if self.published < consumed or self.prefix(consumed) != fingerprint:
            raise StateError(
                f"this is not the dataset of the state: it does not begin with the same {consumed:,} samples; use the same dataset, or start "
                "without the state",
                shard=self.url,
            )

    def prefix(self, count: int) -> str:
        """Return 16 hex digits of the shards that have the first samples: of the first and the last of them, and their number.

        An append changes no shard, so there is no need to look at those between.
        """
        located = next(iter(self._compacted()), self.located)
        shards, total = located.shards, count_samples(located.shards)
        last = max(0, min(count, total) - 1)
        if isinstance(shards, LazyShards):
            place = int(shards.find_samples(np.array([last]))[0][0])
        else:
            ends = np.cumsum([one.nsamples or 0 for one in shards])
            place = int(np.searchsorted(ends, last, side="right"))
        start = len(folder_of_manifest(self.url))
        values = [(one.url[start:], one.nsamples, one.sha256) for one in (shards[0], shards[place])]
        text = json.dumps([values, place])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def round(self, first: int, count: int, *, is_last: bool) -> Round:
        """Return some samples in a row, by their numbers."""
        source = self.source
        whole = source.open_samples(replace(self.located, deleted=()))
        gone = self._gone()
        all_holes = deleted_since(deleted_in(self.located), self._removed_numbers(), _ENDS)
        holes = all_holes[(all_holes >= first) & (all_holes < first + count)]
        left = np.delete(np.arange(first, first + count), holes - first)
        if count and not len(left):
            left = np.setdiff1d(np.arange(self.published), all_holes)
        samples = DeletedSince(whole, holes, gone) if len(holes) or len(gone) else whole
        return Round(
            samples=samples,
            seed=source.seed,
            reading=source.ordered.keywords["reading"],
            first=first,
            count=count,
            is_last=is_last,
            substitutes=tuple(left[-1:].tolist()),
        )

    def _gone(self) -> Numbers:
        """Return the numbers of the samples that compactions have removed, ascending."""
        return deleted_since(_NONE, self._removed_numbers(), _ENDS)

    def _removed_numbers(self) -> list[Numbers]:
        return [deleted_in(one) for one in self._compacted()]

    def _compacted(self) -> list[LocatedShards]:
        """Return the versions before each compaction since the origin.

        Raises:
            ChangedError: If `gc` has removed one.
        """
        for number in self._version.compacted_since(self.origin):
            if number not in self._removed:
                folder, storage = folder_of_manifest(self.url), self.source.storage.uncached()
                try:
                    self._removed[number] = locate_shards(folder, storage, number)
                except (OptionError, NotFoundError) as error:
                    raise ChangedError(
                        f"the dataset was compacted while it was followed, and version {number}, which says what was removed, is gone; finish the reading "
                        "before gc, or tag that version",
                        shard=self.url,
                    ) from error
        return [self._removed[number] for number in self._version.compacted_since(self.origin)]
