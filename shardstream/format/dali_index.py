"""Read and write DALI's text index of the members of a shard, ``NAME.idx``, as its tool ``wds2idx`` writes it.

Format (v1.2): a line ``v1.2 N``, then one line for each of the N samples with ``extension offset size name`` for each of
its members, separated by single spaces. Offsets are those of the bytes, not of the header.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardstream.errors import IndexMismatchError, SampleError
from shardstream.format.names import is_meta_name, split_member_name
from shardstream.format.tar_reader import Member


def encode_member_index(members: Sequence[Member], *, shard: str = "") -> bytes:
    """Return the bytes of a DALI index for the members of a tar, which `iter_groups` has checked.

    >>> members = [("a.jpg", 0, 512, 9), ("a.cls", 1024, 1536, 1), ("b.jpg", 2048, 2560, 7)]
    >>> print(encode_member_index(members).decode(), end="")
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
                remedy="rename the member, or leave out members (--members)",
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


def decode_member_index(data: bytes, *, url: str = "") -> list[list[tuple[str, int, int, str]]]:
    r"""Return the members of each sample as field, offset and size of its bytes, and name, in order.

    >>> decode_member_index(b"v1.2 1\njpg 512 9 a.jpg cls 1536 1 a.cls\n")
    [[('jpg', 512, 9, 'a.jpg'), ('cls', 1536, 1, 'a.cls')]]

    Raises:
        IndexMismatchError: If it is not such an index.
    """
    try:
        return _parse(data.decode())
    except ValueError as error:
        raise IndexMismatchError(
            f"not an index of members: {error}",
            remedy="run 'shardstream index --members' again",
            shard=url,
        ) from error


def _parse(text: str) -> list[list[tuple[str, int, int, str]]]:
    title, *lines = text.removesuffix("\n").split("\n")
    samples = []
    end = 0
    for line in lines:
        words = line.split(" ")
        fields, offsets, sizes, names = (words[first::4] for first in range(4))
        if len(names) != len(fields):
            raise ValueError(f"{len(words)} words in a line, not 4 for each member")
        samples.append([*zip(fields, map(int, offsets), map(int, sizes), names, strict=True)])
        for _, offset, size, _ in samples[-1]:
            if offset < end or size < 0:
                raise ValueError("members that overlap")
            end = offset + size
    if title != f"v1.2 {len(samples)}":
        raise ValueError(f"{len(samples)} samples under the title {title!r}")
    return samples
