"""Hypothesis strategies shared by the tests: member names, samples, and tars of other writers."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import strategies as st

from shardstream.format import END_OF_ARCHIVE, encode_index, encode_member, scan_shard

TarFormat = Literal["ustar", "pax", "gnu"]
TAR_FORMATS: tuple[TarFormat, ...] = ("ustar", "pax", "gnu")
BLOCK_BYTES = 512

_FORMAT_NUMBERS: dict[TarFormat, int] = {
    "ustar": tarfile.USTAR_FORMAT,
    "pax": tarfile.PAX_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
}
_NOT_IN_NAMES = "\0/\n"
_OTHER_KINDS = (
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a tar: a regular file, or another kind."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    records: dict[str, str] = field(default_factory=dict)
    """Pax records to write before it; other formats ignore them."""
    base_256: bool = False
    """Write the size in GNU's binary form, which GNU uses from 8 GiB on."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Archive:
    """A tar, and the entries that were written to it."""

    form: TarFormat
    entries: tuple[Entry, ...]
    data: bytes

    def __repr__(self) -> str:
        names = [(entry.name[:20], entry.kind, len(entry.data)) for entry in self.entries]
        return f"<{self.form} tar of {len(self.data)} bytes: {names}>"


# --- names and samples


def path_parts() -> st.SearchStrategy[str]:
    """Generate parts of member names: short and plain, with many dots, of any script, or long."""
    return st.one_of(
        st.text("abAB01_-", min_size=1, max_size=6),
        st.text("aA_. ", min_size=1, max_size=5),
        st.text(
            st.characters(codec="utf-8", exclude_characters=_NOT_IN_NAMES),
            min_size=1,
            max_size=8,
        ),
        st.integers(90, 300).map(lambda length: "n" * length),
    ).filter(lambda part: part not in (".", ".."))


def member_names() -> st.SearchStrategy[str]:
    """Generate names of files in tars, with or without a field, up to three folders deep."""
    plain = st.builds("{}.{}".format, st.text("abc", min_size=1, max_size=3), _plain_fields())
    return plain | st.lists(path_parts(), min_size=1, max_size=4).map("/".join)


def keys() -> st.SearchStrategy[str]:
    """Generate keys that samples can be written with."""
    last = path_parts().map(lambda part: part.replace(".", "_") or "_")
    return (
        st.tuples(st.lists(path_parts(), max_size=2), last)
        .map(lambda parts: "/".join([*parts[0], parts[1]]))
        .filter(lambda key: not key.startswith("__"))
    )


def fields() -> st.SearchStrategy[str]:
    """Generate fields that a sample can be written with: lower case, dots inside."""
    strange = path_parts().map(str.lower).filter(lambda name: name == name.lower())
    return (_plain_fields() | strange).filter(lambda name: name not in ("__key__", "__url__"))


def raw_samples(*, max_samples: int = 6) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Generate samples with fields of bytes and unique keys."""
    one = st.tuples(
        keys(), st.dictionaries(fields(), st.binary(max_size=1100), min_size=1, max_size=3)
    )
    return st.lists(one, max_size=max_samples, unique_by=lambda pair: pair[0]).map(
        lambda pairs: [{"__key__": key, **values} for key, values in pairs]
    )


def _plain_fields() -> st.SearchStrategy[str]:
    return st.sampled_from(["jpg", "cls", "json", "seg.png", "txt"])


# --- tars


def entries(form: TarFormat) -> st.SearchStrategy[Entry]:
    """Generate regular files, with folders, links, devices and pipes between them."""
    bodies = st.binary(max_size=64) | st.integers(500, 1100).map(lambda size: b"b" * size)
    files = st.builds(Entry, name=member_names(), data=bodies, base_256=st.just(form == "gnu"))
    others = st.builds(Entry, name=member_names(), kind=st.sampled_from(_OTHER_KINDS))
    choices = [files, st.builds(Entry, name=member_names(), data=bodies), others]
    if form == "pax":
        choices += [
            st.builds(Entry, name=member_names(), data=bodies, records=_records()),
            bodies.flatmap(
                lambda data: st.builds(
                    Entry,
                    name=member_names(),
                    data=st.just(data),
                    records=st.just({"size": str(len(data))}),
                )
            ),
        ]
    return st.one_of(choices)


@st.composite
def archives(draw: st.DrawFn, *, forms: tuple[TarFormat, ...] = TAR_FORMATS) -> Archive:
    """Generate tars that Python's ``tarfile`` writes, in any of its formats."""
    form = draw(st.sampled_from(forms))
    globals_ = draw(st.none() | _records()) if form == "pax" else None
    # tarfile refuses a tar that it wrote: a global header at the end
    put = draw(st.lists(entries(form), min_size=1 if globals_ else 0, max_size=6))
    return make_archive(put, form=form, global_records=globals_)


def make_archive(
    put: list[Entry], *, form: TarFormat, global_records: dict[str, str] | None = None
) -> Archive:
    """Write a tar; entries that the format cannot hold are omitted."""
    buffer = io.BytesIO()
    kept: list[Entry] = []
    with tarfile.open(
        fileobj=buffer,
        mode="w",
        format=_FORMAT_NUMBERS[form],
        encoding="utf-8",
        pax_headers=global_records or {},
    ) as tar:
        for entry in put:
            start = buffer.tell()
            try:
                tar.addfile(_tar_info(entry), io.BytesIO(entry.data))
            except ValueError:  # ustar: "name is too long"
                continue
            kept.append(entry)
            if entry.base_256 and entry.kind == tarfile.REGTYPE:
                _write_size_in_base_256(buffer, start, len(entry.data))
    return Archive(form=form, entries=tuple(kept), data=buffer.getvalue())


def read_with_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    """Return names and bodies of the regular files, as Python's ``tarfile`` sees them."""
    found: list[tuple[str, bytes]] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as tar:
        for info in tar:
            if info.isreg():
                body = tar.extractfile(info)
                assert body is not None
                found.append((info.name, body.read()))
    return found


# --- shards


def make_shard(num_samples: int, *, first: int = 0, body_bytes: int = 10) -> bytes:
    """Return a tar of samples with the keys 0000, 0001, ... and one field ``x`` that begins with its key."""
    pieces = [
        bytes(piece)
        for number in range(first, first + num_samples)
        for piece in encode_member(f"{number:04d}.x", b"%04d" % number + bytes(body_bytes))
    ]
    return b"".join([*pieces, END_OF_ARCHIVE])


def make_index(tar: bytes) -> bytes:
    """Return the ``.idx`` of a tar."""
    scan = scan_shard(lambda at, size: tar[at : at + size], end=len(tar), shard="a.tar")
    return encode_index(scan.offsets)


# --- headers by hand


def make_header(
    name: bytes = b"a.txt",
    *,
    size: bytes = b"00000000000\0",
    kind: bytes = b"0",
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
) -> bytes:
    """Return a header block with the right checksum, also for invalid fields."""
    block = b"".join(
        (
            name.ljust(100, b"\0")[:100],
            b"0000644\x000000000\x000000000\0",
            size.ljust(12, b"\0")[:12],
            b"00000000000\0",
            b" " * 8,
            kind,
            bytes(100),
            magic.ljust(8, b"\0"),
            bytes(80),
            prefix.ljust(155, b"\0")[:155],
            bytes(12),
        )
    )
    return with_checksum(block)


def with_checksum(block: bytes) -> bytes:
    """Return a block with the checksum of its other bytes."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def octal(size: int) -> bytes:
    """Return a size field."""
    return b"%011o\0" % size


def base_256(size: int) -> bytes:
    """Return a size field as GNU tar writes sizes that octal cannot hold, and negative ones."""
    return (b"\x80" if size >= 0 else b"\xff") + (size % (1 << 88)).to_bytes(11, "big")


def padded(data: bytes) -> bytes:
    """Pad with zeros to whole blocks."""
    return data + bytes(-len(data) % BLOCK_BYTES)


def _tar_info(entry: Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.type = entry.kind
    info.size = len(entry.data)
    info.mtime = 1_700_000_000
    info.pax_headers = dict(entry.records)
    if entry.kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = entry.name
    return info


def _write_size_in_base_256(buffer: io.BytesIO, start: int, size: int) -> None:
    # The entry's last header is right before its body, which ends the buffer.
    end = buffer.tell()
    header = end - len(padded(bytes(size))) - BLOCK_BYTES
    assert header >= start
    block = buffer.getvalue()[header : header + BLOCK_BYTES]
    patched = with_checksum(block[:124] + base_256(size) + block[136:])
    buffer.seek(header)
    buffer.write(patched)
    buffer.seek(end)


def _records() -> st.SearchStrategy[dict[str, str]]:
    keywords = st.sampled_from(["comment", "SCHILY.xattr.user.note", "mtime", "uname"])
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    return st.dictionaries(keywords, text, max_size=2).map(
        lambda records: {k: "1.5" if k == "mtime" else v for k, v in records.items()}
    )
