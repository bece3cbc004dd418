"""Sizes of a run: full, quick (two minutes), or tiny (for tests)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.data import Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of data and repetitions.

    Args:
        small: The small corpus.
        photos: The photo corpus.
        many: A small corpus for many shards.
        viewed: A small corpus for the viewer.
        blocks: A corpus of 100 kB samples for few shards.
        shards: Number of its shards.
        exponents: Shards of the datasets whose first batch is timed, as powers of ten.
        min_s: Seconds of one local measurement, at least.
        max_s: Maximum seconds, after a whole epoch has been checked.
        repetitions: Repetitions of each contestant with a target; None for those of its setting.
    """

    small: Corpus
    photos: Corpus
    many: Corpus
    viewed: Corpus
    blocks: Corpus
    shards: tuple[int, ...]
    exponents: tuple[int, ...]
    min_s: float
    max_s: float
    repetitions: int | None = None


FULL = Sizes(
    small=Corpus(kind="small", samples=150_000),
    photos=Corpus(kind="photo", samples=2_048),
    many=Corpus(kind="small", samples=20_000),
    viewed=Corpus(kind="small", samples=1_000_000),
    blocks=Corpus(kind="block", samples=10_000),
    shards=(10, 200, 2_000),
    exponents=(4, 5, 6),
    min_s=1.0,
    max_s=2.0,
)
QUICK = Sizes(
    small=Corpus(kind="small", samples=5_000),
    photos=Corpus(kind="photo", samples=300),
    many=Corpus(kind="small", samples=2_000),
    viewed=Corpus(kind="small", samples=2_000),
    blocks=Corpus(kind="block", samples=500),
    shards=(10, 200),
    exponents=(4, 5, 6),
    min_s=0.1,
    max_s=0.5,
    repetitions=1,
)
TINY = replace(
    QUICK,
    small=Corpus(kind="small", samples=500),
    photos=Corpus(kind="photo", samples=70),
    exponents=(4,),
)
