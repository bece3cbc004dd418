"""Detect remote datasets that were replaced during an epoch, by their manifests.

A store returns the version of a file with each response, so a process detects a shard that changes between two of its reads. It cannot
detect a shard that it reads for the first time after another dataset replaced this one: a process that reads in order would
return old samples and then new ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from shardstream.errors import (
    ChangedError,
    ManifestError,
    NotFoundError,
    StorageError,
    get_logger,
    plural,
)
from shardstream.format import Manifest, ShardInfo
from shardstream.storage import (
    FileInfo,
    LazyShards,
    SeenManifest,
    Storage,
    folder_of_manifest,
    join_url,
    read_manifest,
    version_url,
)

_log = get_logger(__name__)

_ATTEMPTS = 4
_RETRY_S = 5.0  # short, because training with all data in the cache must not stop for a server that is down


def check_manifests(
    manifests: Mapping[str, SeenManifest],
    shards: Sequence[ShardInfo],
    storage: Storage,
    *,
    are_lazy: bool,
) -> None:
    """Check that the remote manifests of a dataset still list its shards; warn if a server does not respond.

    A manifest of a later version of the dataset is accepted where this version is kept. Local manifests are not read, except binary ones: local shards are compared
    by their file versions, which those of a binary manifest have from their first use only.

    Args:
        manifests: URL of each manifest -> how it was when the dataset was opened.
        shards: Shards of the dataset when it was opened.
        storage: Storage of the manifests.
        are_lazy: Whether they are `LazyShards`, or some of them.

    Raises:
        ChangedError: If a manifest is missing, or its entry for a shard has changed.
    """
    reading = storage.uncached(max_retry_s=_RETRY_S)
    for url, seen in manifests.items():
        if storage.local_path(url) is not None and not are_lazy:
            continue
        try:
            manifest = _read_changed(url, seen.sha256, reading)
            if manifest is not None:
                manifest = _read_kept(manifest, url, seen.version, reading)
        except NotFoundError as error:
            raise _replaced_error("its manifest is missing", url) from error
        except StorageError as error:
            warnings.warn(
                f"cannot check whether the dataset was replaced during this epoch: {error}",
                UserWarning,
                stacklevel=2,
            )
            continue
        if manifest is None:
            continue
        change = _find_change(shards, manifest, folder_of_manifest(url))
        if change is not None:
            raise _replaced_error(change, url)


def _read_changed(url: str, old_digest: str, storage: Storage) -> Manifest | None:
    """Return a manifest whose bytes have changed; None if they have not.

    Changed bytes are accepted when they are read twice: a single response may have been damaged in transfer.

    Raises:
        ManifestError: If it cannot be parsed in several attempts.
        StorageError: If it is missing or cannot be read.
    """
    file = FileInfo(url=url, size_or_none=None)
    digests_seen: set[str] = set()
    manifest: Manifest | None = None
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            manifest, digest = read_manifest(file, storage)
        except ManifestError:
            if not attempts_left:
                raise
            continue
        if digest == old_digest:
            return None
        if digest in digests_seen:
            return manifest
        digests_seen.add(digest)
    return manifest


def _read_kept(manifest: Manifest, url: str, version: int, storage: Storage) -> Manifest:
    """Return the manifest of the version that was read, if the current one is later and it is kept; else the current one.

    The number alone does not say that it is the same dataset: another one may have replaced it, and have versions of its own.

    Raises:
        StorageError: If it is missing or cannot be read.
    """
    current = manifest.dataset_version
    if current.number <= version or not current.has(version):
        return manifest
    _log.info(
        "%s: version %d was published, this epoch has read version %d",
        url,
        current.number,
        version,
    )
    kept = version_url(folder_of_manifest(url), current, version)
    return read_manifest(FileInfo(url=kept, size_or_none=None), storage)[0]


def _find_change(shards: Sequence[ShardInfo], manifest: Manifest, folder: str) -> str | None:
    """Describe how the shards under a folder differ from a manifest; shards that never had an entry have no sha256."""
    if isinstance(shards, LazyShards) and isinstance(manifest.shards, LazyShards):
        same = shards.has_same_beginning(manifest.shards)
        return None if same else "its manifest lists other shards"
    # Those in the folder, and those of others whose indexes are in it.
    mine = [shard for shard in shards if shard.index_url.startswith(f"{folder}/")]
    if isinstance(manifest.shards, LazyShards):
        found = manifest.shards.find_names(shard.url.rpartition("/")[2] for shard in mine)
        named = {shard.url: shard for shard in found.values()}
    else:
        named = {join_url(folder, shard.url): shard for shard in manifest.shards}
    others = [shard.url for shard in mine if _has_changed(shard, named.get(shard.url))]
    if not others:
        return None
    return f"{plural(len(others), 'shard')} changed in its manifest, such as {others[0]}"


def _has_changed(old_digest: ShardInfo, now: ShardInfo | None) -> bool:
    if now is None:
        return old_digest.sha256 is not None
    if (old_digest.nsamples, old_digest.filesize) != (now.nsamples, now.filesize):
        return True
    return None not in (old_digest.sha256, now.sha256) and old_digest.sha256 != now.sha256


def _replaced_error(change: str, url: str) -> ChangedError:
    return ChangedError(
        f"the dataset was replaced during this epoch, so the samples read may be of both datasets: {change}",
        remedy="open the dataset again and start the epoch again; write a new dataset to a folder of its own",
        shard=url,
    )
