"""One table of a row: contestants, data and location."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.case import Case
from benchmarks.data import WRITERS, Corpus
from benchmarks.sizes import Sizes
from benchmarks.targets import OURS, Metric, Target, is_limit
from benchmarks.work import Store, Work

_FORMATS = {
    "mosaicml": "mds",
    "torchdata": "files",
    "datago": "files",
    "lance": "lancedb",
    **{name: name for name in WRITERS},
}  # others read tars
_LOOSE = 30_000  # samples as loose files; writing more takes longer than the measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One table of a row: the same work for all contestants.

    Args:
        row: Name of the row.
        label: Difference from the row's other settings.
        case: Case of all contestants; contestant and location are filled in.
        corpus: Data.
        store: Location of the data.
        rate: Bytes per second and connection of `s3-slow`, if not those of the command line.
        contestants: Contestants, including shardstream. A name that ends in "+" is a variation of that contestant.
        limits: Contestants that measure a limit of the machine.
        targets: Targets of the setting.
        metric: Compared figure.
        form: Format of the data, if not each contestant's own.
        repetitions: Repetitions of each contestant with a target, unless `Sizes` sets them.
    """

    row: str
    label: str
    case: Case
    corpus: Corpus
    store: Store = "local"
    rate: int | None = None
    contestants: tuple[str, ...] = (OURS,)
    limits: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    metric: Metric = "samples/s"
    form: str | None = None
    repetitions: int = 3

    @property
    def name(self) -> str:
        """Row and label."""
        return f"{self.row}: {self.label}"

    def count_repetitions(self, sizes: Sizes) -> int:
        """Return how often each contestant is measured: once without targets."""
        return (sizes.repetitions or self.repetitions) if self.targets else 1


def place(setting: Setting, contestant: str, work: Work) -> Case:
    """Prepare the data of a contestant; return its case."""
    corpus = setting.corpus
    peer, _, variation = contestant.partition("+")
    form = setting.form or _FORMATS.get(peer, "tar")
    if form == "files" and is_limit(peer):  # which writes finished tars
        form = "tar"
    if form == "files":
        corpus = replace(corpus, samples=min(corpus.samples, _LOOSE))
    case = setting.case
    if variation:
        case = replace(case, decoder=variation)  # type: ignore[arg-type]
    is_remote = setting.store != "local" and case.mode != "pack"
    return replace(
        case,
        contestant=contestant,
        location=work.upload(corpus, form, setting.store)
        if is_remote
        else str(work.prepare(corpus, form)),
        fields=corpus.fields,
        samples=case.samples or corpus.samples,
        payload_bytes=work.payload_bytes(corpus),
    )
