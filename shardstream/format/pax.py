"""Parse extended headers (pax, and the long names of GNU tar) of the member after them.

If such headers contradict each other, some readers take the first and some the last. Ambiguous headers are refused, so
that all readers see the same files in a shard.
"""

from __future__ import annotations

from shardstream.errors import ShardError

SIZE_LIMIT_BYTES = 1 << 60
"""Maximum size of one member; sums of offsets stay below 2**63."""

_NAME_LIMIT = 1 << 16  # characters; Linux accepts paths of 4,096 bytes


def records_of(kind: bytes, text: bytes, position: int, shard: str) -> dict[str, str]:
    """Return the records of an extended header for the member after it."""
    if kind == b"K":  # the target of a link
        return {}
    if kind == b"L":
        return {"path": text.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    records = _pax_records(text, position, shard)
    if kind == b"g":
        _refuse_for_all(records, position, shard)
        return {}
    return records


def _pax_records(text: bytes, position: int, shard: str) -> dict[str, str]:
    """Parse records ``LENGTH KEYWORD=VALUE`` with a line feed; the length counts the whole record."""
    records: dict[str, str] = {}
    at = 0
    while at < len(text) and text[at] != 0:
        blank = text.find(b" ", at, at + 20)
        length = int(text[at:blank]) if blank > 0 and text[at:blank].isdigit() else 0
        record = text[blank + 1 : at + length]
        if length <= 0 or at + length > len(text) or record[-1:] != b"\n" or record.find(b"=") < 1:
            raise ShardError("a pax header has a malformed record", shard=shard, offset=position)
        keyword, value = record[:-1].split(b"=", 1)
        records[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records


def _refuse_for_all(records: dict[str, str], position: int, shard: str) -> None:
    """Refuse a global header that sets the name or size of all members after it: readers interpret it differently."""
    for keyword in records:
        if keyword in ("path", "size") or keyword.startswith("GNU.sparse."):
            raise ShardError(
                f"a global pax header gives all members a {keyword!r}",
                remedy="write the shard again",
                shard=shard,
                offset=position,
            )


def extend(known: dict[str, str], more: dict[str, str], position: int, shard: str) -> None:
    """Add the records of another header; refuse a second, different name or size."""
    for keyword in ("path", "size"):
        if keyword in more and known.get(keyword, more[keyword]) != more[keyword]:
            raise ShardError(
                f"two extended headers of one member give it different values of {keyword!r}",
                remedy="write the shard again",
                shard=shard,
                offset=position,
            )
    known |= more


def extended_name(name: str, position: int, shard: str) -> str:
    """Return the name of a file in an extended header, if all readers interpret it equally."""
    if not name or "\0" in name or name.endswith("/") or len(name) > _NAME_LIMIT:
        raise ShardError(
            f"an extended header gives a file the invalid name {name[:80]!r} ({len(name)} characters)",
            remedy="write the shard again",
            shard=shard,
            offset=position,
        )
    return name


def extended_size(text: str, position: int, shard: str) -> int:
    """Return the size in a pax header; leading zeros are padding."""
    digits = text.lstrip("0") or text[-1:]
    if not (
        digits.isascii()
        and digits.isdigit()
        and len(digits) < 20
        and int(digits) < SIZE_LIMIT_BYTES
    ):
        raise ShardError(
            f"a pax header gives the invalid size {text[:40]!r}", shard=shard, offset=position
        )
    return int(digits)
