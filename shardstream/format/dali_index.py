"""Write DALI's text index of a shard, ``NAME.idx``, as its tool ``wds2idx`` does.

Format (v1.2): a line ``v1.2 N``, then one line for each of the N samples with ``extension offset size name`` for each of
its members, separated by single spaces. Offsets are those of the bytes, not of the header.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardstream.errors import SampleError
from shardstream.format.names import is_meta_name, split_member_name
from shardstream.format.tar_reader import Member

WDS2IDX_SUFFIX = ".idx"


def encode_wds2idx(members: Sequence[Member], *, shard: str = "") -> bytes:
    """Return the bytes of a DALI index for the members of a tar, which `iter_groups` has checked.

    >>> members = [("a.jpg", 0, 512, 9), ("a.cls", 1024, 1536, 1), ("b.jpg", 2048, 2560, 7)]
    >>> print(encode_wds2idx(members).decode(), end="")
    v1.2 2
    jpg 512 9 a.jpg cls 1536 1 a.cls
    jpg 2560 7 b.jpg

    Raises:
        SampleError: If a name has a space, which this format cannot hold.
    """
    lines: list[list[str]] = []
    last: str | None = None
    for name, header, body, size in members:
        parts = split_member_name(name)
        if parts is None or is_meta_name(name):
            continue
        key = parts[0]
        if len(name.split()) != 1 or not name.isprintable():
            raise SampleError(
                "DALI's index cannot hold a name with spaces",
                remedy="rename the member, or leave out wds2idx",
                shard=shard,
                offset=header,
                key=key,
            )
        if key != last:
            lines.append([])
            last = key
        # The extension keeps its case: DALI's reader has an option for case sensitivity.
        lines[-1].append(f"{name[len(key) + 1 :]} {body} {size} {name}")
    text = "".join(f"{' '.join(line)}\n" for line in lines)
    return f"v1.2 {len(lines)}\n{text}".encode()
