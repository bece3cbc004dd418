"""Test that empty, truncated or joined tars and tars with links give an error or a warning at every entry point."""

from __future__ import annotations

import gzip
import io
import logging
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import shardstream as ss
from shardstream.format import END_OF_ARCHIVE
from tests.small_tars import samples, tar_bytes
from tests.strategies import make_header, octal, padded

WHOLE = tar_bytes(samples(0, 3))
END = len(WHOLE) - len(END_OF_ARCHIVE)
RECORD = 10_240
LEFTOVER = WHOLE + bytes(RECORD - len(WHOLE) - 512) + b"\x30\0\xf1" + bytes(509)


def linked(*entries: tuple[str, bytes, str]) -> bytes:
    """Return a tar of three samples with entries of another type after the first, as GNU tar and tarfile write them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(3):
            for name, data in samples(number, 1):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            for name, kind, target in entries if number == 0 else ():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, target
                tar.addfile(info)
    return buffer.getvalue()


HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE
LINKS = linked(
    ("0003.bin", HARD, "0000.bin"), ("0003.cls", HARD, "0000.cls"), ("0004.bin", SYMBOLIC, "x")
)

# Defect -> the bytes of a tar, and a part of the message.
REFUSED = {
    "empty": (b"", "the file is empty"),
    "cut in the padding": (WHOLE[: END - 100], "is cut"),
    "joined": (WHOLE + tar_bytes(samples(3, 2)), "data after the end"),
    "joined in the record": (WHOLE + bytes(2048) + tar_bytes(samples(3, 1)), "data after the end"),
    "data after the last record": (LEFTOVER + b"x" * 512, "data after the end"),
    "a file without a name": (
        WHOLE[:END] + make_header(b"", size=octal(3)) + padded(b"123") + END_OF_ARCHIVE,
        "a file without a name",
    ),
    "a continued file": (
        make_header(b"0000.bin", size=octal(3), kind=b"M") + padded(b"123") + WHOLE,
        "continues a file of another volume",
    ),
}
TOLERATED = {
    "links": (LINKS, r"hard links: 2, symbolic links: 1; first: '0003.bin'.*missing: 2"),
    "an unknown type": (linked(("0003.bin", b"Z", "")), "unknown type: 1"),
    "bytes in the last record": (LEFTOVER, "the last record holds bytes"),
    "samples that a stopped download has not written": (
        WHOLE[:END] + bytes(3 * RECORD - END),
        "20480 zeros follow the last record",
    ),
}
NO_END = "the blocks that end an archive are missing"

SUFFIXES: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tar.zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Return a function that writes a tar, compressed by its suffix, to a new folder."""

    def put(suffix: str, data: bytes) -> str:
        path = tmp_path / "in" / f"a{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(SUFFIXES[suffix](data))
        return str(path)

    return put


def stream(url: str) -> int:
    return len(list(ss.ShardDataset(url, read=ss.ReadOptions(index="ignore"))))


def pack(url: str) -> int:
    return ss.pack(url, str(Path(url).parent.parent / "out")).samples


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", REFUSED)
def test_ambiguous_tar_is_refused_by_all_readers(
    kind: str, suffix: str, place: Callable[[str, bytes], str]
) -> None:
    data, message = REFUSED[kind]
    url = place(suffix, data)
    by_number: list[Callable[[str], object]] = [
        ss.index,
        lambda one: ss.ShardDataset(one).by_number(),
    ]
    for door in (stream, pack, *(by_number if suffix == ".tar" else [])):
        with pytest.raises(ss.errors.ShardError, match=message):
            door(url)
    (problem,) = ss.verify(url).errors
    assert message in problem.what


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", TOLERATED)
def test_doubtful_tar_is_read_with_a_warning_by_all_readers(
    kind: str,
    suffix: str,
    place: Callable[[str, bytes], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, message = TOLERATED[kind]
    check_warned(place(suffix, data), message, caplog)


def check_warned(url: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(ss.errors.ShardWarning, match=message):
        assert stream(url) == 3
    with caplog.at_level(logging.WARNING):
        assert pack(url) == 3
    assert re.search(message, caplog.text)
    if url.endswith(".tar"):
        with pytest.warns(ss.errors.ShardWarning, match=message):
            assert len(ss.ShardDataset(url).by_number()) == 3  # a scan, because there is no index
        (warning,) = ss.index(url).warnings
        assert re.search(message, warning)
    assert any(re.search(message, problem.what) for problem in ss.verify(url).problems)


@pytest.mark.parametrize(
    ("name", "kind", "is_error"),
    [
        ("d/v1.0", SYMBOLIC, False),
        ("d/v1.bin", SYMBOLIC, True),  # others have this field
        ("0002.depth", SYMBOLIC, True),  # there is such a sample
        ("d/v1.0", HARD, True),
    ],
)
def test_link_outside_samples_is_not_an_error(
    name: str, kind: bytes, is_error: bool, place: Callable[[str, bytes], str]
) -> None:
    report = ss.verify(place(".tar", linked((name, kind, "d"))))
    assert len([one for one in report.problems if name in one.what]) == 1
    assert bool(report.errors) is is_error


def test_plain_tar_cut_between_samples_is_read_with_a_warning(
    place: Callable[[str, bytes], str], caplog: pytest.LogCaptureFixture
) -> None:
    check_warned(place(".tar", WHOLE[:END]), NO_END, caplog)


def zstd_cut_in_its_frame() -> bytes:
    """Return a frame that is cut between two blocks, where the decoder reports no error."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(WHOLE[:END]) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".tar.gz", gzip.compress(WHOLE[:END])),
        (
            ".tar.gz",
            gzip.compress(WHOLE[: END - 2560]) + gzip.compress(b""),
        ),  # several members, as pigz writes
        (".tar.zst", zstandard.compress(WHOLE[:END])),
        (".tar.zst", zstd_cut_in_its_frame()),
    ],
    ids=range(4),
)
def test_compressed_tar_must_have_its_end(suffix: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in" / f"a{suffix}"
    path.parent.mkdir()
    path.write_bytes(data)
    for door in (stream, pack):
        with pytest.raises(ss.errors.ShardError, match=NO_END):
            door(str(path))
    assert NO_END in ss.verify(str(path)).errors[0].what


def test_sample_that_may_lack_fields_is_not_returned(
    place: Callable[[str, bytes], str],
) -> None:
    url = place(".tar.gz", WHOLE[: END - 1024])  # the third sample lacks its class
    found: list[str] = []
    with pytest.raises(ss.errors.ShardError, match=NO_END):
        found.extend(
            sample["__key__"]
            for sample in ss.ShardDataset(url, read=ss.ReadOptions(index="ignore"))
        )
    assert found == ["0000", "0001"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty_shard_next_to_valid_ones_is_refused(
    suffix: str, place: Callable[[str, bytes], str], tmp_path: Path
) -> None:
    good, empty = place(suffix, WHOLE), tmp_path / f"b{suffix}"
    empty.write_bytes(b"")
    with pytest.raises(ss.errors.ShardError, match="the file is empty"):
        list(ss.ShardDataset([good, str(empty)], read=ss.ReadOptions(index="ignore")))


def test_empty_shard_with_an_index_is_refused(
    place: Callable[[str, bytes], str], tmp_path: Path
) -> None:
    good, empty = place(".tar", WHOLE), tmp_path / "in" / "b.tar"
    ss.index(good)
    empty.write_bytes(b"")
    empty.with_name("b.tar.idx").write_bytes(bytes(8))  # not part of samples
    with pytest.raises(ss.errors.ShardError, match=r"the file is empty.*b\.tar"):
        ss.ShardDataset([good, str(empty)])


def test_reads_by_number_warn_of_links(place: Callable[[str, bytes], str]) -> None:
    url = place(".tar", LINKS)
    ss.index(url)
    with pytest.warns(
        ss.errors.ShardWarning, match="links and other entries without data"
    ) as caught:
        assert len(list(ss.ShardDataset(url))) == 3
    assert len({str(warning.message) for warning in caught}) == 1


def test_links_that_are_not_fields_are_no_loss(
    place: Callable[[str, bytes], str], recwarn: pytest.WarningsRecorder
) -> None:
    url = place(".tar", linked(("README", SYMBOLIC, "x"), ("__meta__/a.txt", HARD, "0000.bin")))
    assert stream(url) == 3
    assert not recwarn.list
    assert not ss.index(url).warnings


def test_shard_that_lost_samples_since_the_state_was_taken_is_an_error(
    place: Callable[[str, bytes], str],
) -> None:
    url = place(".tar.gz", b"")

    def put(count: int) -> ss.ShardLoader:
        """Write this number of samples to a file of constant size, and open it."""
        tar = tar_bytes(samples(0, count)).ljust(RECORD, b"\0")
        Path(url).write_bytes(gzip.compress(tar, 0))
        return ss.ShardLoader(
            ss.ShardDataset(url, read=ss.ReadOptions(index="ignore")), batch_size=1
        )

    loader = put(3)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    again = put(1)
    again.load_state_dict(state)
    with pytest.raises(
        ss.errors.ChangedError, match="1 of the 2 samples read before the resume are missing"
    ):
        list(again)
