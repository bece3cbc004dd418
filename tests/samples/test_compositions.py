"""Random compositions of views, orders and topologies against the promise: each sample once, in the plan's order, with the tar's bytes.

What must come is computed by tarfile and plain Python: the fields of all samples of a composition, in order. Of the package only the
plan's numbers are used, and those are checked to be each number once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import choose_samples
from shardstream.errors import OptionError
from shardstream.loader import CatalogDataset
from tests.samples.made import (
    Made,
    Row,
    concat,
    join,
    open_files,
    open_shards,
    read_tars,
    subset,
    write_shards,
)
from tests.small_datasets import grouped

pytestmark = pytest.mark.filterwarnings(
    "ignore:lanes=", "ignore:This DataLoader will create", "ignore:an epoch of this mix has"
)

Draw = Any


@dataclass(frozen=True, kw_only=True)
class Node:
    """A composition, and what may be done with it."""

    made: Made
    has_cls: bool = True
    """Whether it has the columns ``__key__`` and ``cls``."""
    is_joined: bool = False


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    root = tmp_path_factory.mktemp("compositions")
    shuffled = np.random.default_rng(0).permutation(60).tolist()
    folders = {
        "small": write_shards(root / "small", range(23), "txt"),
        "other": write_shards(root / "other", range(30, 41), "txt"),
        "large": write_shards(root / "large", range(50, 59), "bin", size=30_000),
        "joined": write_shards(root / "joined", shuffled[:45], "wav", has_cls=False),
    }
    made = {name: Made(open_shards(at), read_tars(at)) for name, at in folders.items()}
    files = root / "files"
    files.mkdir()
    for key in range(40, 47):
        (files / f"{key:04d}.png").write_bytes(bytes(key))
    rows: list[Row] = [
        {"__key__": path.stem, "png": path.read_bytes()} for path in sorted(files.iterdir())
    ]
    return made | {"files": Made(open_files(str(files)), rows)}


def node(draw: Draw, leaves: dict[str, Made], depth: int) -> Node:
    """Draw a composition of at most ``depth`` views."""
    kind = draw(st.sampled_from(["leaf", "subset", "where", "keys", "concat", "join"]))
    if depth == 0 or kind == "leaf":
        name = draw(st.sampled_from(["small", "other", "large", "files"]))
        return Node(made=leaves[name], has_cls=name != "files")
    inner = node(draw, leaves, depth - 1)
    samples, rows = inner.made
    if kind == "concat":
        other = node(draw, leaves, depth - 1)
        return Node(
            made=concat(inner.made, other.made),
            has_cls=inner.has_cls and other.has_cls,
            is_joined=inner.is_joined or other.is_joined,
        )
    if kind == "join" and not inner.is_joined:
        missing = draw(st.sampled_from(["keep", "drop"]))
        known = {row["__key__"] for row in leaves["joined"].rows}
        assume(any(row["__key__"] in known for row in rows))
        joined = join(inner.made, leaves["joined"], missing=missing)
        return Node(made=joined, has_cls=inner.has_cls, is_joined=True)
    if kind == "where" and inner.has_cls:
        found = [n for n, row in enumerate(rows) if row["cls"] == b"1"]
        assume(found)
        chosen = choose_samples(samples, where="cls = 1")
        return Node(
            made=Made(chosen, [rows[n] for n in found]), has_cls=True, is_joined=inner.is_joined
        )
    numbers = draw(st.permutations(range(len(rows))))[: draw(st.integers(1, len(rows)))]
    if kind == "keys" and inner.has_cls and len({row["__key__"] for row in rows}) == len(rows):
        keys = [str(rows[n]["__key__"]) for n in numbers]
        chosen = choose_samples(samples, keys)
        return Node(
            made=Made(chosen, [rows[n] for n in numbers]), has_cls=True, is_joined=inner.is_joined
        )
    return Node(made=subset(inner.made, numbers), has_cls=inner.has_cls, is_joined=inner.is_joined)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset as each rank opens it, and what an epoch of it must be."""

    parts: list[tuple[Made, dict[str, Any]]]
    order: dict[str, Any]
    mix: dict[str, Any] | None
    epoch: int

    def open(self, rank: int, ranks: int) -> Any:
        placement = ss.Placement(rank, ranks)
        order = {} if self.mix is not None else self.order
        datasets = [
            CatalogDataset(made.samples, **grouped(placement=placement, **order, **options))
            for made, options in self.parts
        ]
        [dataset] = (
            datasets
            if self.mix is None
            else [
                ss.mix(
                    datasets,
                    **grouped(**self.mix, **{k: v for k, v in self.order.items() if k in _MIX}),
                )
            ]
        )
        dataset.set_epoch(self.epoch)
        return dataset

    def rows(self) -> list[dict[str, object]]:
        """Return the samples of all parts, in order."""
        return [
            {
                name: value
                for name, value in row.items()
                if "fields" not in options or name in ("__key__", *options["fields"])
            }
            for made, options in self.parts
            for row in made.rows
        ]

    def numbers(self, dataset: Any) -> np.ndarray[Any, Any]:
        """Return the numbers of an epoch by its plan, after checks of how often each comes."""
        source, count = dataset.pipeline.indexed_source, len(self.rows())
        order = source.order(batch=self.order["microbatch"], lanes=1, epoch=self.epoch)
        numbers = source.plan(order, self.epoch).rest(0)
        counts = np.bincount(numbers % count, minlength=count)
        if self.mix is not None and self.mix.get("weights") is not None:
            is_drawn = any("weights" in options for _, options in self.parts)
            if self.mix["stop"] == "first_exhausted" and not is_drawn:
                assert counts.max(initial=0) <= 1
        elif self.mix is None and "weights" in self.parts[0][1]:
            options = self.parts[0][1]
            weights = np.array(options["weights"], dtype=float)
            shares = options["num_samples"] * weights / weights.sum()
            assert (np.abs(counts - shares) < 1 + 1e-6).all()
            assert counts.sum() == options["num_samples"]
        else:
            assert (counts == 1).all()
            if not self.order["shuffle"] and self.mix is None:
                assert (numbers == np.arange(count)).all()
        found: np.ndarray[Any, Any] = numbers % count
        return found


_MIX = ("seed", "lanes", "microbatch", "window", "remainder")


def case(draw: Draw, leaves: dict[str, Made]) -> Case:
    microbatch = draw(st.integers(1, 4))
    order = {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(-2, 9)),
        "microbatch": microbatch,
        "lanes": draw(st.integers(1, 5)),
        "window": microbatch * draw(st.integers(1, 6)),
        "block": draw(st.integers(1, 9)),
        "remainder": draw(st.sampled_from(["pad", "drop", "keep"])),
    }
    mix = None
    count = draw(st.sampled_from([1, 1, 2, 3]))
    if count > 1:
        mix = {"weights": None}
        if draw(st.booleans()):
            weights = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
            stop = draw(st.sampled_from(["first_exhausted", "all_exhausted"]))
            mix = {"weights": weights, "stop": stop}
    parts = []
    for _ in range(count):
        made = node(draw, leaves, draw(st.integers(0, 3))).made
        options: dict[str, Any] = {}
        common = set.intersection(*(set(row) for row in made.rows)) - {"__key__"}
        if common and draw(st.integers(0, 3)) == 0:
            options["fields"] = draw(
                st.lists(st.sampled_from(sorted(common)), min_size=1, unique=True)
            )
        if draw(st.integers(0, 3)) == 0 and (mix is None or mix["weights"] is not None):
            weights = draw(
                st.lists(st.integers(0, 4), min_size=len(made.rows), max_size=len(made.rows))
            )
            assume(any(weights))
            options["weights"] = weights
            options["num_samples"] = draw(st.integers(1, 2 * len(made.rows)))
        parts.append((made, options))
    return Case(parts=parts, order=order, mix=mix, epoch=draw(st.integers(0, 3)))


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str) else bytes(v) for k, v in sample.items() if k != "__url__"}


def _frozen(row: dict[str, Any]) -> frozenset[tuple[str, object]]:
    return frozenset(row.items())


def check_phase(
    batches: list[list[list[Any]]], rest: list[Any], width: int, remainder: str, *, drop_last: bool
) -> int:
    """Check the batches of all ranks against what is left of the epoch; return how many samples they have consumed."""
    ranks, at = len(batches), 0
    for step in zip_longest(*batches, fillvalue=[]):
        got = [plain(sample) for batch in step for sample in batch]
        left = rest[at : at + ranks * width]
        at += len(left)
        if len(left) == ranks * width:
            assert got == left
            continue
        assert not drop_last or all(len(batch) in (0, width) for batch in step)
        counts, expected = Counter(map(_frozen, got)), Counter(map(_frozen, left))
        if remainder == "keep" and not drop_last:
            assert counts == expected
        elif remainder == "pad" and not drop_last:
            assert counts.keys() == expected.keys()
            assert counts.total() - expected.total() < ranks
            assert len({len(batch) for batch in step}) == 1
        else:
            assert counts.keys() <= expected.keys()
    return at


def check(draw: Draw, leaves: dict[str, Made]) -> None:
    """Draw a composition, an order and up to three topologies, and compare an epoch with the promise."""
    drawn, drop_last = case(draw, leaves), draw(st.booleans())
    try:
        numbers = drawn.numbers(drawn.open(0, 1))
        ss.ShardLoader(drawn.open(0, 1), drawn.order["microbatch"])
    except OptionError as error:  # a mix with fewer samples than lanes
        assume("lanes" not in str(error))
        raise
    rows = drawn.rows()
    sequence = [rows[number] for number in numbers.tolist()]
    state, at = None, 0
    for phase in range(3):
        ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        workers = draw(st.sampled_from([0] * 16 + [1, 2]))
        how = draw(st.sampled_from(["fork"] * 6 + ["thread"] * 3 + ["spawn"])) if workers else None
        width = drawn.order["microbatch"] * microbatches
        steps = (len(sequence) - at) // (ranks * width)
        stop = draw(st.integers(0, steps)) if phase < 2 else steps + 1
        is_over = at + stop * ranks * width == len(sequence)
        if is_over or (stop == steps and (drop_last or drawn.order["remainder"] == "drop")):
            stop = steps + 1  # the epoch ends here, and the state is that of the next one
        loaders = [
            ss.ShardLoader(
                drawn.open(rank, ranks),
                width,
                num_workers=workers,
                drop_last=drop_last,
                collate_fn=list,
                worker_method="thread" if how == "thread" else "multiprocessing",
                multiprocessing_context=None if how == "thread" else how,
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        batches = [list(islice(loader, None if stop > steps else stop)) for loader in loaders]
        at += check_phase(
            batches, sequence[at:], width, drawn.order["remainder"], drop_last=drop_last
        )
        if stop > steps:
            return
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)


# Not shrunk: a failing composition may take minutes.
GENERATE = [Phase.explicit, Phase.reuse, Phase.generate]


@settings(max_examples=12, phases=GENERATE)
@given(data=st.data())
def test_random_compositions_keep_the_promise(leaves: dict[str, Made], data: st.DataObject) -> None:
    check(data.draw, leaves)


@pytest.mark.slow
@settings(max_examples=100, phases=GENERATE)  # a thousand take two minutes
@given(data=st.data())
def test_a_hundred_compositions_keep_the_promise(
    leaves: dict[str, Made], data: st.DataObject
) -> None:
    check(data.draw, leaves)


def test_a_wrong_composition_is_noticed() -> None:
    rows = [{"__key__": "a"}, {"__key__": "b"}, {"__key__": "c"}]
    for batches in ([[[rows[1]], [rows[0]]]], [[[rows[0]], [rows[1]], [rows[1]]]]):
        with pytest.raises(AssertionError):
            check_phase(batches, rows, 1, "keep", drop_last=False)
