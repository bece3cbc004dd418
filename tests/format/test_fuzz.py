"""Run the fuzz target of ``tools/fuzz_tar.py`` on inputs of Hypothesis and on inputs that earlier runs found."""

from __future__ import annotations

import io
import random
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from fuzz_tar import check, read_with_tarfile, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_mutations import mutate, seeds

from shardstream.errors import ShardError
from shardstream.format import END_OF_ARCHIVE, iter_members
from tests.strategies import Archive, archives, make_header, octal, padded

SEEDS = seeds()


def pax(*records: tuple[str, str], kind: bytes = b"x") -> bytes:
    text = b"".join(
        next(r for n in range(900) if len(r := f"{n} {key}={value}\n".encode()) == n)
        for key, value in records
    )
    return make_header(b"././@PaxHeader", size=octal(len(text)), kind=kind) + padded(text)


def long_name(text: bytes, size: int | None = None) -> bytes:
    size = len(text) if size is None else size
    return make_header(b"././@LongLink", size=octal(size), kind=b"L") + padded(text)


FILE = make_header(b"a.x", size=octal(3)) + padded(b"123")
LINK = make_header(b"l", kind=b"2")
OLD_FOLDER = pax(("path", "d/a.x")) + make_header(b"d/", kind=b"\0") + FILE
compared = pytest.mark.skipif(
    read_with_tarfile(OLD_FOLDER + END_OF_ARCHIVE) == [("d/a.x", b""), ("a.x", b"123")],
    reason="tarfile of this Python (3.11.2) takes a folder of an old tar for a file",
)


@pytest.mark.slow
@compared
@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32), tar=st.sampled_from(SEEDS), rounds=st.integers(1, 4))
def test_mutated_tars_have_one_meaning_or_none(seed: int, tar: bytes, rounds: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        tar = mutate(tar, rng)
    check(tar)


@compared
@settings(max_examples=40)
@given(archive=archives(), seed=st.integers(0, 1 << 32))
def test_mutated_tarfile_output_has_one_meaning_or_none(archive: Archive, seed: int) -> None:
    check(archive.data)
    check(mutate(archive.data, random.Random(seed)))


def test_run_counts_the_outcomes_of_its_inputs() -> None:
    outcomes = run(SEEDS, seconds=60, seed=3, inputs=40)
    assert outcomes.total() == 40
    assert set(outcomes) <= {"both", "refused", "ours alone", "theirs alone"}


def test_target_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz_tar.read_with_tarfile", lambda _: [("other", b"")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="tarfile reads something else"):
        run(SEEDS[:1], seconds=30, seed=0)
    (finding,) = tmp_path.glob("finding-*.tar")
    with pytest.raises(AssertionError, match="tarfile reads something else"):
        check(finding.read_bytes())


# Refused, because Python, GNU tar and others read different names or sizes.
AMBIGUOUS = {
    "two pax names": pax(("path", "b.x")) + pax(("path", "c.x")) + FILE,
    "two pax sizes": pax(("size", "3")) + pax(("size", "4")) + FILE,
    "a long name, then a pax name": long_name(b"b.x\0") + pax(("path", "c.x")) + FILE,
    "a pax name, then a long name": pax(("path", "c.x")) + long_name(b"b.x\0") + FILE,
    "a long name that goes on behind its size": long_name(b"nnnnnnnn.x\0", 4) + FILE,
    "pax records behind their size": make_header(b"p", size=octal(12), kind=b"x")
    + padded(b"12 path=b.x\n12 path=c.x\n")
    + FILE,
    "a size for all": pax(("size", "1"), kind=b"g") + FILE,
    "a name for all": pax(("path", "b.x"), kind=b"g") + FILE,
    "all are sparse": pax(("GNU.sparse.major", "1"), kind=b"g") + FILE,
    "no name": pax(("path", "")) + FILE,
    "no name in a plain header": make_header(b"", size=octal(4)) + padded(b"1234"),
    "no name in an old header": make_header(b"", size=octal(4), kind=b"\0") + padded(b"1234"),
    "no long name": long_name(b"") + FILE,
    "NUL in a name": pax(("path", "a\0b.x")) + FILE,
    "a file called like a folder": pax(("path", "a.x/")) + FILE,
    "a record without a keyword": make_header(b"p", size=octal(12), kind=b"x")
    + padded(b"12 =path=bx\n")
    + FILE,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_tars_with_ambiguous_meaning_are_refused(name: str) -> None:
    data = AMBIGUOUS[name] + END_OF_ARCHIVE
    with pytest.raises(ShardError, match=r"write the shard again|malformed|invalid") as raised:
        list(iter_members(lambda at, size: data[at : at + size], end=len(data), shard="a.tar"))
    assert raised.value.offset is not None
    assert check(data) in ("refused", "theirs alone")


@pytest.mark.parametrize(
    "data",
    [
        pax(("path", "b.x")) + pax(("path", "b.x")) + FILE,
        long_name(b"b.x\0") + pax(("path", "b.x"), ("mtime", "1.5")) + FILE,
        pax(("comment", "of git"), kind=b"g") + FILE,
        make_header(b"d/", kind=b"\0", size=octal(9)) + FILE,  # folders of old tars have no body
        pytest.param(OLD_FOLDER, marks=compared),
        LINK + FILE,
    ],
    ids=range(6),
)
def test_tars_with_one_meaning_are_read(data: bytes) -> None:
    assert check(data + END_OF_ARCHIVE) == "both"


def test_seeds_cover_the_formats_of_common_tools() -> None:
    kinds: Counter[bytes] = Counter()
    for data in SEEDS:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            kinds.update(info.type for info in tar)
        assert check(data) == "both"
    assert {b"0", b"\0", b"1", b"2", b"5"} <= set(kinds)
