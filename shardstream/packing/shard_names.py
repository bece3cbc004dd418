"""What the shards of a dataset are called."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardstream.errors import OptionError
from shardstream.storage.store import join_url, parent_url

DEFAULT_NAME = "{shard:06d}.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNames:
    """Where a dataset goes and what its shards are called.

    Args:
        folder: URL of the folder, without a slash at its end.
        template: Name of a shard, with ``{shard}`` where its number goes.
    """

    folder: str
    template: str

    @classmethod
    def parse(cls, url: str | os.PathLike[str]) -> ShardNames:
        """Read a pattern such as ``s3://bucket/train/{shard:06d}.tar``, or the URL of a folder.

        >>> ShardNames.parse("s3://bucket/train/").template
        '{shard:06d}.tar'

        Raises:
            OptionError: If the pattern does not give each shard its own name in one folder.
        """
        text = os.fspath(url)
        if "{" not in text and not text.lower().endswith(".tar"):
            return cls(folder=text.rstrip("/") or "/", template=DEFAULT_NAME)
        names = cls(folder=parent_url(text), template=text.rsplit("/", 1)[-1])
        example = f"write {join_url(parent_url(text.partition('{')[0]), DEFAULT_NAME)!r}, say"
        try:
            same = names.name(0) == names.name(1)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise OptionError(
                f"the pattern knows no name but {{shard}} ({error!r}); {example}", shard=text
            ) from error
        if same or "{" in names.folder or not names.template.endswith(".tar"):
            raise OptionError(
                "the name of a shard needs {shard} where its number goes, in its last part, and ends in .tar; "
                + example,
                shard=text,
            )
        return names

    def name(self, shard: int) -> str:
        """Return the name of a shard in its folder.

        >>> ShardNames(folder="x", template="{shard:06d}.tar").name(7)
        '000007.tar'
        """
        return self.template.format(shard=shard)

    def url(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return join_url(self.folder, name)

    def is_ours(self, name: str) -> bool:
        """Tell whether a shard of this pattern may be called so.

        >>> ShardNames(folder="x", template="a-{shard:06d}.tar").is_ours("a-000012.tar")
        True
        """
        start, _, rest = self.template.partition("{")
        end = rest.partition("}")[2]
        number = name[len(start) : len(name) - len(end)]
        return number.isdecimal() and name == self.name(int(number))
