"""Rows of the table: measurements, contestants and targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.case import Case
from benchmarks.setting import Setting
from benchmarks.sizes import Sizes
from benchmarks.targets import (
    OURS,
    Results,
    Target,
    against,
    as_fresh,
    best_peer,
    figure,
    is_alone,
    less_cpu,
    of_limit,
)
from benchmarks.work import Store

_READERS = ("grain", "grain_shards", "spdl", "datasets_parquet", "lancedb", "lance", "dali")
_LOCAL = (OURS, "webdataset", "litdata", "mosaicml", "datasets", "files", "torchdata")
_REMOTE = (OURS, "webdataset", "litdata", "mosaicml", "datasets", "s3torchconnector")
# datasets always decodes npy and json, which is not comparable; mosaicml takes 30 s in one process; in one thread all decode
# photos as fast as the others
_ABSENT = {
    ("small-local", 0): ("datasets", "mosaicml"),
    ("small-local", 2): ("datasets",),
    ("photo-train", 0): ("datasets", "mosaicml", "torchdata", "webshart", *_READERS),
    ("photo-train", 2): ("dali",),  # which has no workers for Pillow
}
_REMOTE_2 = tuple(name for name in _REMOTE if name != "mosaicml")  # it fails, or takes a minute
_NAMED = (OURS, "webdataset", "litdata", "s3torchconnector")
_LOW_RATE = 20_000_000  # at this rate eight connections do not saturate the proxy's CPU
_SHORT = (OURS, "webdataset", "litdata", "tarfile")
_HELD_BYTES = 64 * 2**20 + 1.5 * 64 * 2**20  # prefetch budget, and one and a half windows


def settings(sizes: Sizes) -> Iterator[Setting]:
    """Yield all settings, row by row."""
    yield from _local(sizes)
    yield from _decoded(sizes)
    yield from _cold(sizes)
    yield from _train(sizes)
    yield from _s3(sizes)
    yield from _azure(sizes)
    yield from _starts(sizes)
    yield from _writing(sizes)
    yield from _memory(sizes)
    yield from _scale(sizes)
    yield from _ray(sizes)
    yield from _view(sizes)


def shortened(chosen: Sequence[Setting]) -> Iterator[Setting]:
    """Yield the settings with targets of each row, or all if it has none, with two peers, or none if the targets need none."""
    at_stake = {setting.row for setting in chosen if setting.targets}
    for setting in chosen:
        if setting.targets or setting.row not in at_stake:
            wanted = (OURS,) if setting.targets and is_alone(setting.targets) else _SHORT
            names = tuple(n for n in setting.contestants if n.partition("+")[0] in wanted)
            yield replace(setting, contestants=names)


def _case(sizes: Sizes, **options: object) -> Case:
    blank = Case(contestant="", mode="throughput", location="")
    return replace(blank, **{"min_s": sizes.min_s, "max_s": sizes.max_s} | options)  # type: ignore[arg-type]


def _present(row: str, workers: int) -> tuple[str, ...]:
    absent = _ABSENT.get((row, workers), ())
    more = _READERS if workers else (*_READERS, "webshart")  # which has no workers
    return tuple(name for name in (*_LOCAL, *more) if name not in absent)


def _local(sizes: Sizes) -> Iterator[Setting]:
    for row, corpus, multiple, of_two_workers in (
        ("small-local", sizes.small, 12, ()),
        ("photo-local", sizes.photos, 8, (of_limit(0.5, "limit-pages"),)),
    ):
        for workers in (0, 2):
            yield Setting(
                row=row,
                label=f"{workers} workers",
                case=_case(sizes, workers=workers),
                corpus=corpus,
                contestants=_present(row, workers),
                limits=("limit-pages",) if workers else ("limit-pages", "limit-bytes"),
                repetitions=5,  # of a second each, which other processes may disturb
                targets=(against("webdataset", multiple), against("litdata", 1.4))
                if workers == 0
                else of_two_workers,
            )


def _decoded(sizes: Sizes) -> Iterator[Setting]:
    for workers in (0, 2):
        yield Setting(
            row="small-decoded",
            label=f"{workers} workers",
            case=_case(sizes, workers=workers, task="decoded"),
            corpus=sizes.small,
            contestants=(OURS, "webdataset"),
            limits=("limit-pages",),
            targets=(against("webdataset", 12),),
        )


def _cold(sizes: Sizes) -> Iterator[Setting]:
    for label, corpus in (("small", sizes.small), ("photos", sizes.photos)):
        yield Setting(
            row="cold",
            label=f"{label}, shuffled, 0 workers",
            case=_case(sizes, cold=True, min_s=0.0, max_s=0.0),
            corpus=corpus,
            contestants=(OURS, "webdataset", "litdata"),
            limits=("limit-disk",),
            targets=(of_limit(0.9, "limit-disk"),),
        )


def _train(sizes: Sizes) -> Iterator[Setting]:
    fast = f"{OURS}+fast"  # decodes with simplejpeg and crops with torch; the others, and shardstream without it, use Pillow
    limits = ("limit-decode", "limit-decode+fast")
    wanted = (best_peer(1.1), best_peer(1.3, ours=fast), of_limit(0.95, limits[0]))
    for workers in (0, 2):
        yield Setting(
            row="photo-train",
            label=f"{workers} workers",
            # Whole epochs after a warm-up epoch, because unfinished batches at a stop would distort the result.
            case=_case(
                sizes, workers=workers, task="train", max_s=0.0, warm=workers > 0, prefetch=4
            ),
            corpus=sizes.photos,
            contestants=(OURS, fast, *_present("photo-train", workers)[1:]),
            limits=limits,
            targets=wanted if workers else (),
        )
    yield Setting(
        row="photo-train",
        label="2 workers, each with its own decoder",
        case=_case(sizes, workers=2, task="train", max_s=0.0, warm=True, prefetch=4),
        corpus=sizes.photos,
        contestants=(fast, "spdl+fast", "dali+fast", "datago+fast"),
        limits=("limit-decode+fast",),
        targets=(best_peer(1.0, ours=fast),),
    )
    yield Setting(
        row="photo-train",
        label="2 threads as workers",
        case=_case(
            sizes,
            workers=2,
            worker_method="thread",
            task="train",
            max_s=0.0,
            warm=True,
            prefetch=4,
        ),
        corpus=sizes.photos,
        contestants=(OURS, fast),
        limits=limits,
        targets=(of_limit(0.9, limits[0]), of_limit(0.9, limits[1], ours=fast)),
    )
    yield Setting(
        row="photo-train",
        label="no workers, 2 threads in decode() and map()",
        case=_case(sizes, threads=2, task="train"),
        corpus=sizes.photos,
        contestants=(OURS, fast),
        limits=limits,
    )


def _s3(sizes: Sizes) -> Iterator[Setting]:
    slow_targets = (
        against("webdataset", 8),
        against("s3torchconnector", 6),
        best_peer(1.5),
        of_limit(0.9, "limit-sockets"),
    )
    once = _case(sizes, min_s=0.0, max_s=0.0, workers=1)
    slow = Setting(
        row="s3-slow",
        label="1 worker",
        case=once,
        corpus=sizes.photos,
        store="s3-slow",
        contestants=_REMOTE,
        limits=("limit-sockets",),
        targets=slow_targets,
    )
    two = replace(
        slow, label="2 workers", case=replace(once, workers=2), contestants=_REMOTE_2, targets=()
    )
    yield slow
    yield replace(
        slow,
        label=f"1 worker, {_LOW_RATE // 10**6} MB/s a connection",
        case=replace(once, connections=16),
        rate=_LOW_RATE,
        contestants=_NAMED,
        repetitions=2,  # of 11 s each
    )
    yield two
    fast_targets = (best_peer(1.2), less_cpu(), of_limit(0.8, "limit-sockets"))
    yield replace(slow, row="s3-fast", store="s3-fast", targets=fast_targets)
    yield replace(two, row="s3-fast", store="s3-fast")
    for workers in (1, 2):
        yield Setting(
            row="s3-https",
            label=f"{workers} worker{'s' * (workers > 1)}, after the first epoch",
            case=_case(sizes, max_s=0.0, warm=True, workers=workers, connections=16),
            corpus=sizes.photos,
            store="s3-https",
            contestants=(OURS, "webdataset"),
            limits=("limit-obstore",),
            targets=(of_limit(0.85, "limit-obstore"),),
        )
        yield Setting(
            row="s3-fast",
            # Without the start of the workers, which is a third of the time of one epoch. litdata would read its cache.
            label=f"{workers} worker{'s' * (workers > 1)}, after the first epoch",
            case=_case(sizes, max_s=0.0, warm=True, workers=workers),
            corpus=sizes.photos,
            store="s3-fast",
            contestants=(OURS, "webdataset", "s3torchconnector"),
            limits=("limit-sockets",),
            targets=(of_limit(0.8, "limit-sockets"),),
        )


def _azure(sizes: Sizes) -> Iterator[Setting]:
    for shuffle, workers in ((False, 0), (True, 0), (True, 1)):
        yield Setting(
            row="azure",
            label=f"{'shuffled' if shuffle else 'in order'}, {workers} workers",
            # Whole epochs after a warm-up epoch: Azurite compiles its code during the first requests.
            case=_case(
                sizes, max_s=0.0, warm=True, workers=workers, shuffle=shuffle, connections=16
            ),
            corpus=sizes.photos,
            store="azure",
            contestants=(OURS,),
            limits=("limit-obstore",),
            targets=(of_limit(0.8, "limit-obstore"),),
        )


def _starts(sizes: Sizes) -> Iterator[Setting]:
    stores: tuple[tuple[Store, tuple[str, ...]], ...] = (("local", _LOCAL), ("s3-slow", _REMOTE))
    for store, contestants in stores:
        yield Setting(
            row="first-batch",
            label=store,
            case=_case(sizes, mode="first", workers=int(store != "local")),
            corpus=sizes.photos,
            store=store,
            contestants=contestants,
            limits=("limit-start",),
            targets=(best_peer(1.0),) if store != "local" else (),
            metric="seconds",
        )
    for store, _ in stores:
        yield Setting(
            row="resume",
            label=store,
            case=_case(sizes, mode="resume", workers=1),
            corpus=sizes.photos,
            store=store,
            contestants=(OURS, "litdata", *(("mosaicml",) if store == "local" else ())),
            limits=("limit-start",),
            targets=(as_fresh(1.2),),
            metric="seconds",
        )


def _writing(sizes: Sizes) -> Iterator[Setting]:
    writers = (OURS, "webdataset", "litdata", "mosaicml")
    for label, corpus, multiple, share in (
        ("small", sizes.many, 5, 0.5),
        ("photos", sizes.photos, 3, 0.85),
    ):
        yield Setting(
            row="pack",
            label=f"{label} from memory",
            case=_case(sizes, mode="pack"),
            corpus=corpus,
            contestants=writers,
            limits=("limit-write",),
            targets=(against("webdataset", multiple), of_limit(share, "limit-write")),
            form="tar",
        )
    for processes in (1, 2):
        yield Setting(
            row="pack",
            label=f"photos from files, {processes} process{'es' * (processes > 1)}",
            case=_case(sizes, mode="pack", workers=processes),
            corpus=sizes.photos,
            contestants=(OURS, "webdataset") if processes == 1 else (OURS,),
            limits=("limit-write",),
            targets=(of_limit(0.8, "limit-write"),) if processes == 2 else (),
            form="files",
        )
    for processes in (1, 2):
        yield Setting(
            row="pack",
            label=f"photos scaled down and encoded, {processes} process{'es' * (processes > 1)}",
            case=_case(sizes, mode="pack", max_side=256, workers=processes),
            corpus=sizes.photos,
            limits=("limit-decode",),
            form="files",
        )
    yield Setting(
        row="pack",
        label="photos from memory to s3-fast",
        case=_case(sizes, mode="pack", min_s=0.0, target="s3://bench/packed"),
        corpus=sizes.photos,
        store="s3-fast",
        contestants=(OURS, "webdataset"),
        limits=("limit-put",),
        targets=(of_limit(0.75, "limit-put"),),
        form="tar",
    )
    for label, corpus in (("small", sizes.small), ("photos", sizes.photos)):
        yield Setting(
            row="index",
            label=label,
            case=_case(sizes, mode="index"),
            corpus=corpus,
            contestants=(OURS, "tarfile"),
            limits=("limit-hash",),
            targets=(of_limit(0.9, "limit-hash"),) if label == "photos" else (),
            metric="members/s",
            form="tar",
        )


def _memory(sizes: Sizes) -> Iterator[Setting]:
    yield Setting(
        row="memory",
        label="5 epochs from s3-fast, 1 worker",
        case=_case(sizes, mode="memory", workers=1),
        corpus=sizes.photos,
        store="s3-fast",
        contestants=tuple(
            n for n in _REMOTE if n != "datasets"
        ),  # as slow as all the others together
        limits=("limit-sockets",),
        targets=(
            figure("growth after epoch 1", "growth", 0.02),
            figure("bytes held by a worker", "held_bytes", _HELD_BYTES),
        ),
        repetitions=15,  # each varies by 2 %
    )


def _scale(sizes: Sizes) -> Iterator[Setting]:
    for exponent in (4, 6, 8, 10):
        yield Setting(
            row="scale",
            label=f"plan of 10^{exponent} samples",
            case=_case(sizes, mode="scale", samples=10**exponent),
            corpus=sizes.many,
            metric="seconds",
        )
    for exponent in sizes.exponents:
        yield Setting(
            row="scale",
            label=f"first batch of 10^{exponent} shards, 10^{exponent + 4} samples",
            case=_case(sizes, mode="many-shards", samples=10 ** (exponent + 4)),
            corpus=sizes.many,
            metric="seconds",
        )
    for shards in sizes.shards:
        yield Setting(
            row="scale",
            label=f"{shards} shards",
            case=_case(sizes),
            corpus=sizes.many,
            limits=("limit-pages",),
            form=f"tar-{shards}",
        )


def _ray(sizes: Sizes) -> Iterator[Setting]:
    """Yield the settings of Ray Data: rows a second of a local cluster with two CPUs, after an epoch to warm up."""
    raw = _case(sizes, mode="ray", warm=True)
    decoded = replace(raw, task="train")
    write = replace(raw, mode="ray-write")
    for label, case, corpus, multiple, form in (
        ("small samples", raw, sizes.small, 10.0, "tar"),
        ("samples of 100 kB in 2 tars", raw, sizes.blocks, 2.0, "tar-2"),
        ("photos", raw, sizes.photos, 1.0, "tar"),
        ("photos, decoded", decoded, sizes.photos, 1.0, "tar"),
        ("one field of photos", replace(raw, only="cls"), sizes.photos, 2.0, "tar"),
        ("small samples, written", write, sizes.small, 1.0, "tar"),
        ("photos, written", write, sizes.photos, 1.0, "tar"),
    ):
        yield Setting(
            row="ray",
            label=label,
            case=case,
            corpus=corpus,
            contestants=(OURS, "webdataset"),
            limits=() if case is write else ("limit-pages",),
            targets=(against("webdataset", multiple),),
            form=form,
            repetitions=1,  # of half a minute, most of it the start and the end of the cluster
        )


def _view(sizes: Sizes) -> Iterator[Setting]:
    """Yield the settings of the viewer: many small samples, and photos here and on a slow store."""
    start = figure("s from the start to the first page", "start_s", 2.0)
    page = figure("ms for the JSON of a page of 50", "page_ms", 100)
    epoch = figure("ms for an epoch view of 64 ranks", "epoch_ms", 150)
    for label, corpus, store, targets in (
        ("many samples", sizes.viewed, "local", (start, page, epoch)),
        ("photos", sizes.photos, "local", (start, _shown(500))),
        ("photos", sizes.photos, "s3-slow", (start, _shown(800))),
    ):
        yield Setting(
            row="view",
            label=f"{label}, {store}",
            case=_case(sizes, mode="view"),
            corpus=corpus,
            store=store,  # type: ignore[arg-type]  # a literal
            metric="seconds",
            targets=targets,
            repetitions=1,  # of medians
        )


def _shown(most: float) -> Target:
    """Return a target: a maximum for the median time of the pictures of a page, where Chromium is installed."""

    def reached(results: Results) -> float | None:
        found = [result.extra.get("shown_ms") for result in results.get(OURS, ())]
        known = [one for one in found if one is not None]
        return statistics.median(known) if known else None

    text = "ms until 50 pictures are shown in Chromium"
    return Target(text=text, wanted=most, reached=reached, at_most=True, alone=True)
