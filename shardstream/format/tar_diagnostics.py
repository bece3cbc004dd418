"""Record the links that a pass over a tar leaves out, and bytes after the end-of-archive blocks.

A reader by number has only the bytes of one sample, and the target of a link may be in another one. So no reader follows
links, and all readers report links that would have been fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from shardstream.errors import ShardWarning, redact, shown
from shardstream.format.names import is_meta_name, split_member_name

_HARD_LINK, _SYMBOLIC_LINK = b"1", b"2"
_NO_DATA = frozenset((b"5", b"g", b"D", b"N", b"V"))
"""Directories, global headers, and GNU's lists of directories, old long names and volume labels."""
_MAX_NAMES = 100  # of symbolic links that are kept, to bound memory


class Finding(NamedTuple):
    """A problem of a tar that can still be read."""

    what: str
    remedy: str
    offset: int
    """Byte offset in the tar."""
    is_loss: bool
    """Whether fields or samples are certainly missing."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(slots=True)
class TarDiagnostics:
    """Notes of one pass over a tar, filled by `iter_members` and `iter_whole`; complete after the pass."""

    has_end: bool = False
    """Whether the zero blocks that end an archive were found."""
    stop: int = 0
    """Offset of these blocks, or of the end of the tar without them."""
    leftover: int | None = None
    """Offset of the first block with a non-zero byte after the end, if it is in the padding of the last record."""
    hard_links: int = 0
    symbolic_links: int = 0
    other_entries: int = 0
    samples: int = 0
    """Number of samples that these entries belong to."""
    _first_omitted: tuple[str, int] = ("", 0)
    _key: str | None = None
    _names: list[tuple[str, str]] = field(default_factory=list)
    """Key and field of the first symbolic links."""

    def count_omitted(self, kind: bytes, name: str, offset: int) -> None:
        """Count an entry without bytes of its own, if its name is that of a field.

        Args:
            kind: Typeflag of the entry.
            name: Name of the entry.
            offset: Offset of its first header.
        """
        parts = split_member_name(name)
        if kind in _NO_DATA or parts is None or is_meta_name(name):
            return
        if not self.samples:
            self._first_omitted = name, offset
        if parts[0] != self._key:
            self.samples += 1
            self._key = parts[0]
        if kind == _HARD_LINK:
            self.hard_links += 1
        elif kind == _SYMBOLIC_LINK:
            self.symbolic_links += 1
            if len(self._names) < _MAX_NAMES:
                self._names.append(parts)
        else:
            self.other_entries += 1

    def has_links_of_samples(self, keys: Collection[str], fields: Collection[str]) -> bool:
        """Return True if omitted entries belong to samples, and are not just a few links such as ``releases/v1.0 -> v1.0.3``.

        Args:
            keys: Keys of the samples of the tar.
            fields: Fields of these samples.
        """
        if self.samples and not keys:
            return True
        if self.hard_links or self.other_entries or self.symbolic_links > len(self._names):
            return True
        known = frozenset(keys) if self._names else ()
        return any(key in known or name in fields for key, name in self._names)

    def findings(self) -> list[Finding]:
        """Return the findings, the most severe first."""
        found = []
        if self.samples:
            found.append(self._omitted())
        if not self.has_end:
            found.append(
                Finding(
                    "the blocks that end an archive are missing",
                    "it may have been cut between two samples: compare it with its source",
                    self.stop,
                    is_loss=False,
                )
            )
        if self.leftover is not None:
            found.append(
                Finding(
                    "the last record holds bytes after the end of the archive",
                    "AIX tar leaves such bytes; if another tool wrote it, compare it with its source",
                    self.leftover,
                    is_loss=False,
                )
            )
        return found

    def warn(self, shard: str) -> None:
        """Warn of all findings, as `ShardWarning`."""
        for finding in self.findings():
            warnings.warn(shown(f"{redact(shard)}: {finding}"), ShardWarning, stacklevel=2)

    def warn_of_links(self, shard: str) -> None:
        """Warn of counted entries after one sample was read.

        The text is the same for all samples of a shard, so that Python shows it once.
        """
        if self.samples:
            warnings.warn(
                shown(
                    f"{redact(shard)}: links and other entries without data are not read, so samples lack fields or are "
                    "missing; 'shardstream verify' counts them"
                ),
                ShardWarning,
                stacklevel=2,
            )

    def _omitted(self) -> Finding:
        counts = {
            "hard links": self.hard_links,
            "symbolic links": self.symbolic_links,
            "devices or entries of unknown type": self.other_entries,
        }
        kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
        name, offset = self._first_omitted
        return Finding(
            f"entries without data are not read ({kinds}; first: {name!r}), samples that lack fields or are missing: {self.samples}",
            "write the tar again with files in their place (GNU tar: --dereference --hard-dereference)",
            offset,
            is_loss=True,
        )
