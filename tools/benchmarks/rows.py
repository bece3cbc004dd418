"""The rows of the table: what is measured, by whom, and what we want of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.case import Case
from benchmarks.data import Corpus
from benchmarks.targets import Target, against, best_peer, of_limit
from benchmarks.work import Work

OURS = "shardstream"
Store = Literal["local", "s3-slow", "s3-fast"]
_FORMATS = {"litdata": "litdata", "mosaicml": "mds", "files": "files", "torchdata": "files"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One table of a row: the same work for all contestants.

    Args:
        row: Name of the row.
        label: What differs from the row's other settings.
        case: What all contestants are asked; contestant and location are filled in.
        kind: Of the corpus.
        store: Where it lies.
        contestants: Who takes part, ourselves included.
        limit: The contestant that shows what the machine allows.
        targets: What we want.
    """

    row: str
    label: str
    case: Case
    kind: str
    store: Store
    contestants: tuple[str, ...]
    limit: str | None = None
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        """Row and label."""
        return f"{self.row}, {self.label}" if self.label else self.row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Args:
        small: Samples of the small corpus.
        photos: Photos of the photo corpus.
        min_s: Seconds of one local measurement.
        repetitions: Of each contestant.
    """

    small: int = 150_000
    photos: int = 1_800
    min_s: float = 1.5
    repetitions: int = 5

    def corpus(self, kind: str) -> Corpus:
        """Return the corpus of a kind."""
        return Corpus(kind=kind, samples=self.small if kind == "small" else self.photos)


FULL = Sizes()
QUICK = Sizes(small=6_000, photos=300, min_s=0.3, repetitions=2)


def settings(sizes: Sizes) -> Iterator[Setting]:
    """Yield all settings, row by row."""
    blank = Case(contestant="", mode="throughput", location="", min_s=sizes.min_s)
    for workers in (0, 2):
        yield Setting(
            row="small-local",
            label=f"{workers} workers",
            case=_with(blank, workers=workers),
            kind="small",
            store="local",
            contestants=(OURS, "webdataset", "litdata", "mosaicml", "files", "torchdata"),
            limit="limit-pages",
            targets=(against("webdataset", 12), against("litdata", 1.4)) if workers == 0 else (),
        )
    for workers in (0, 2):
        yield Setting(
            row="photo-local",
            label=f"{workers} workers",
            case=_with(blank, workers=workers),
            kind="photo",
            store="local",
            contestants=(OURS, "webdataset", "litdata", "mosaicml", "datasets", "files", "torchdata"),
            limit="limit-pages",
            targets=(against("webdataset", 8), against("litdata", 1.4)) if workers == 0 else (),
        )
    once = _with(blank, min_s=0.0)
    for workers in (1, 2):
        yield Setting(
            row="s3-slow",
            label=f"{workers} worker{'s' * (workers > 1)}",
            case=_with(once, workers=workers),
            kind="photo",
            store="s3-slow",
            contestants=(OURS, "webdataset", "litdata", "mosaicml", "datasets", "s3torchconnector"),
            limit="limit-sockets",
            targets=(
                against("webdataset", 8),
                against("s3torchconnector", 6),
                best_peer(1.5),
                of_limit(0.8),
            )
            if workers == 1
            else (),
        )


def _with(case: Case, **changes: object) -> Case:
    from dataclasses import replace  # noqa: PLC0415

    return replace(case, **changes)  # type: ignore[arg-type]


def place(setting: Setting, contestant: str, sizes: Sizes, work: Work) -> Case:
    """Return the case of a contestant, its data made and in place."""
    corpus = sizes.corpus(setting.kind)
    form = _FORMATS.get(contestant, "tar")
    remote = setting.store != "local" and contestant != "limit-decode"
    location = work.upload(corpus, form) if remote else str(work.prepare(corpus, form))
    return _with(
        setting.case,
        contestant=contestant,
        location=location,
        fields=corpus.fields,
        samples=corpus.samples,
        payload_bytes=work.payload_bytes(corpus),
    )
