"""How much is measured: in full, in two minutes, or only to see that it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.data import Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Args:
        small: The small corpus.
        photos: The photo corpus.
        many: A small corpus for many shards.
        blocks: A corpus of 100 kB samples for few shards.
        shards: Into how many it is cut.
        min_s: Seconds of one local measurement, at least.
        max_s: At most, once a whole epoch has been checked.
        repetitions: Of each contestant where something is at stake, if not as many as its setting says.
    """

    small: Corpus
    photos: Corpus
    many: Corpus
    blocks: Corpus
    shards: tuple[int, ...]
    min_s: float
    max_s: float
    repetitions: int | None = None


FULL = Sizes(
    small=Corpus(kind="small", samples=150_000),
    photos=Corpus(kind="photo", samples=2_048),
    many=Corpus(kind="small", samples=20_000),
    blocks=Corpus(kind="block", samples=10_000),
    shards=(10, 200, 2_000),
    min_s=1.0,
    max_s=2.0,
)
QUICK = Sizes(
    small=Corpus(kind="small", samples=5_000),
    photos=Corpus(kind="photo", samples=300),
    many=Corpus(kind="small", samples=2_000),
    blocks=Corpus(kind="block", samples=500),
    shards=(10, 200),
    min_s=0.1,
    max_s=0.5,
    repetitions=1,
)
TINY = replace(
    QUICK, small=Corpus(kind="small", samples=500), photos=Corpus(kind="photo", samples=70)
)
