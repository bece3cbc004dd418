"""Check that remote manifests and tables name files of their own place only: no local files and no other servers."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from shardstream.errors import ManifestError
from shardstream.storage.store import absolute_url

_BUCKETS = frozenset({"s3", "gs", "abfs", "az", "adl", "oss", "hf", "memory"})
_SAME = {"s3a": "s3", "gcs": "gs"}
# Clients disagree on where the server's name ends in an authority with one of these.
_AMBIGUOUS = re.compile(r"[?#@\\\s\x00-\x20\x7f-\x9f]")


def check_names(manifest_url: str, names: Iterable[str]) -> None:
    """Refuse names of shards outside the store of a remote manifest.

    A local manifest is trusted like the command line: it may name anything. A remote one may name relative paths in or below
    its folder, and absolute URLs of the same store: the same protocol, and for protocols with a server name (http, sftp, ...)
    the same server.

    >>> check_names("s3://b/train/index.json", ["0.tar", "more/1.tar", "s3://b/2.tar"])

    Raises:
        ManifestError: At the first other name.
    """
    place = manifest_url.rsplit("::", 1)[-1]
    protocol, authority = _split(place)
    if protocol in ("", "file", "local"):
        return
    for name in names:
        if not (_is_in_store(name, protocol, authority) if "://" in name else _is_below(name)):
            raise ManifestError(
                f"it names {reprlib.repr(name)}, which is not in its own store; if you trust it, "
                "copy it to this machine and name the copy, or list the shards' URLs yourself",
                shard=manifest_url,
            )


def is_under(url: str, prefix: str) -> bool:
    """Return whether every client resolves a URL to a place under another URL, such as a folder, a server or ``https://``.

    >>> is_under("s3://b/train/a.jpg", "s3://b/train"), is_under("s3://b/train/../x.jpg", "s3://b/train")
    (True, False)
    >>> is_under("/data/a.jpg", "/data/"), is_under("https://host@other/a.jpg", "https://host")
    (True, False)
    """
    url, prefix = (_without_file_protocol(one) for one in (url, prefix))
    if "://" not in prefix:
        if "://" in url or "::" in url:
            return False
        url, prefix = absolute_url(url), absolute_url(prefix)  # resolves ".."
    folder = prefix if prefix.endswith("/") else f"{prefix}/"
    return url.startswith(folder) and _is_below(url[len(folder) :].lstrip("/"))


def _without_file_protocol(url: str) -> str:
    return url.removeprefix("file://").removeprefix("local://")


def _is_below(name: str) -> bool:
    """Return whether a relative name stays in its folder, also where a client decodes "%2e%2e"."""
    decoded = unquote(name).replace("\\", "/")
    return not ("::" in name or decoded.startswith("/") or ".." in decoded.split("/"))


def _is_in_store(url: str, protocol: str, authority: str) -> bool:
    """Return whether all clients resolve a URL to this store."""
    manifest_protocol, manifest_authority = _split(url)
    if manifest_protocol != protocol or not _is_below(url.partition("://")[2]):
        return False
    if manifest_authority == authority:  # the server that the user named
        return True
    try:  # urllib must parse it to the same server
        if (
            _AMBIGUOUS.search(manifest_authority)
            or urlsplit(url).netloc.lower() != manifest_authority
        ):
            return False
    except ValueError:
        return False
    return protocol in _BUCKETS or manifest_authority == authority.rpartition("@")[2]


def _split(url: str) -> tuple[str, str]:
    """Return protocol and authority; the protocol of a path is empty."""
    protocol, separator, rest = url.partition("://")
    protocol = protocol.lower()
    return (
        (_SAME.get(protocol, protocol), rest.partition("/")[0].lower()) if separator else ("", "")
    )
