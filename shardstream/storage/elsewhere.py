"""What a manifest may name: a list from afar shall not make this machine open its own files, or ask other servers."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from shardstream.errors import ManifestError

_BUCKETS = frozenset({"s3", "gs", "abfs", "az", "adl", "oss", "hf", "memory"})
_SAME = {"s3a": "s3", "gcs": "gs"}


def check_names(manifest_url: str, names: Iterable[str]) -> None:
    """Refuse the names of shards that lead out of a remote manifest's own store.

    A manifest on this machine is trusted as the command line is: it may name anything. One that came over the network may name
    what lies beside or below it, and absolute URLs of the same store: the same protocol, and for protocols that name a
    server (http, sftp, ...) the same server.

    >>> check_names("s3://b/train/index.json", ["0.tar", "more/1.tar", "s3://b/2.tar"])

    Raises:
        ManifestError: At the first other name.
    """
    place = manifest_url.rsplit("::", 1)[-1]
    store = _store(place)
    if store is None:
        return
    for name in names:
        leads_out = "::" in name or name.startswith("/") or ".." in name.split("/")
        if leads_out or ("://" in name and _store(name) != store):
            raise ManifestError(
                f"it names {reprlib.repr(name)}, which is not in its own store; if you trust it, "
                "copy it to this machine and name the copy, or list the shards' URLs yourself",
                shard=manifest_url,
            )


def _store(url: str) -> tuple[str, str] | None:
    """Return protocol and server; None on this machine."""
    protocol, separator, rest = url.partition("://")
    protocol = _SAME.get(protocol.lower(), protocol.lower())
    if not separator or protocol in ("file", "local"):
        return None
    server = rest.partition("/")[0].rpartition("@")[2].lower()
    return protocol, "" if protocol in _BUCKETS else server
