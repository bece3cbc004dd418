"""`ss.first_use` finds the last checkpoint before samples were used; a training goes on from there without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import NotFoundError, OptionError, StateError
from shardstream.loader import StreamDataset
from tests.small_datasets import numbered
from tests.static_server import serve_files

pytestmark = pytest.mark.filterwarnings(
    "ignore:lanes=", "ignore:the state was saved otherwise", "ignore:an epoch of this mix"
)
N = 97
LENGTHS = [1 + (7 * i) % 11 for i in range(N)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first_use")
    numbered(folder / "one", N, 15)
    numbered(folder / "two", 61, 15)
    ss.index(folder / "one", columns=["__key__"])
    return folder


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"tokens": np.full(LENGTHS[sample["cls"]], 1 + sample["cls"])}


def shifted(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"cls": sample["cls"] + N}


def opened(folder: Path, place: ss.Placement, name: str = "one", **options: Any) -> ss.ShardDataset:
    values: dict[str, Any] = {"shuffle": True, "seed": 3, "placement": place} | options
    return ss.ShardDataset(str(folder / name), **values).decode()


def mixed(folder: Path, place: ss.Placement) -> StreamDataset:
    parts = {"a": opened(folder, place), "b": opened(folder, place, "two").map(shifted)}
    return ss.mix(parts, {"a": 2, "b": 1}, samples=96)


def drawn(folder: Path, place: ss.Placement) -> StreamDataset:
    return opened(folder, place, weights=[0.2 + i % 3 for i in range(N)])


def packed(folder: Path, place: ss.Placement) -> StreamDataset:
    return opened(folder, place).map(tokens).pack_sequences("tokens", 16, lengths=LENGTHS)


# Name -> the dataset, and the labels of the sample of each number.
DATASETS: dict[str, tuple[Callable[[Path, ss.Placement], StreamDataset], range]] = {
    "plain": (opened, range(N)),
    "stored order": (lambda f, p: opened(f, p, shuffle=False), range(N)),
    "subset": (lambda f, p: opened(f, p, subset=slice(0, None, 2)), range(0, N, 2)),
    "drop": (lambda f, p: opened(f, p, order=ss.OrderOptions(remainder="drop")), range(N)),
    "nodes": (lambda f, p: opened(f, p, order=ss.OrderOptions(nodes=2, lanes=4)), range(N)),
    "weights": (drawn, range(N)),
    "mix": (mixed, range(N + 61)),
    "rows": (packed, range(1, N + 1)),
}


def trained(
    name: str, folder: Path, ranks: int, batch_size: int, epochs: int
) -> Iterator[tuple[dict[str, Any], tuple[int, int], list[set[int]]]]:
    """Yield the state before each step, the epoch and step, and the labels that each rank receives at it."""
    make, _ = DATASETS[name]
    run = [ss.ShardLoader(make(folder, ss.Placement(r, ranks)), batch_size) for r in range(ranks)]
    for epoch in range(epochs):
        for loader in run:
            loader.set_epoch(epoch)
        state = run[0].state_dict()
        for step, batches in enumerate(zip(*run, strict=True)):
            fields = [one["tokens" if name == "rows" else "cls"].flatten() for one in batches]
            used = [set(one.tolist()) - ({0} if name == "rows" else set()) for one in fields]
            yield state, (epoch, step), used
            state = run[0].state_dict()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(DATASETS)),
    run=st.tuples(st.sampled_from([1, 2]), st.sampled_from([2, 4]), st.integers(1, 3)),
    asked=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([4, 8])),
    every=st.integers(1, 5),
    numbers=st.sets(st.integers(0, 48), min_size=1, max_size=4),
)
def test_the_checkpoint_is_the_last_before_any_of_the_samples(
    name: str,
    run: tuple[int, int, int],
    asked: tuple[int, int],
    every: int,
    numbers: set[int],
    folder: Path,
) -> None:
    make, labels = DATASETS[name]
    steps = list(trained(name, folder, *run))
    wanted = {labels[number] for number in numbers}
    saved = [
        (place, state) for place, (state, *_) in enumerate(steps) if place % every == every - 1
    ]
    if not saved:
        return
    uses = [place for place, (*_, used) in enumerate(steps) if wanted & set[int]().union(*used)]
    begin = uses[0] if uses else len(steps)
    before = [state for place, state in saved if place <= begin]
    states = [state for _, state in saved]
    for ranks, batch_size in (run[:2], asked):
        loader = ss.ShardLoader(make(folder, ss.Placement(0, ranks)), batch_size)
        found = ss.first_use(loader, states, numbers=sorted(numbers))
        if (ranks, batch_size) == run[:2] or not before:
            assert found.state == (before[-1] if before else None)
        else:  # at most the samples of a step of the other loader earlier
            least = _place(steps[begin][0]) - ranks * batch_size if uses else _place(before[-1])
            certain = [state for state in before if _place(state) <= least]
            assert found.state in ([None, *before])[len(certain) :]


def _place(state: dict[str, Any]) -> int:
    return int(state["epoch"] * 1000 + state["consumed"])


@pytest.mark.parametrize("name", DATASETS)
def test_first_uses_are_those_of_the_training(name: str, folder: Path) -> None:
    make, labels = DATASETS[name]
    first = dict[int, tuple[int, int, int]]()
    states = list[dict[str, Any]]()
    for state, (epoch, step), used in trained(name, folder, 2, 4, 3):
        states.append(state)
        for rank, own in enumerate(used):
            for label in own:
                first.setdefault(label, (epoch, step, rank))
    loader = ss.ShardLoader(make(folder, ss.Placement(0, 2)), 4)
    found = ss.first_use(loader, states, numbers=range(len(labels)))
    columns = (found.numbers, found.epochs, found.steps, found.ranks)
    uses = {
        labels[number]: tuple(use)
        for number, *use in zip(*map(np.ndarray.tolist, columns), strict=True)
    }
    assert uses == first
    assert found.numbers.tolist() == sorted(found.numbers.tolist())


def test_keys_and_a_folder_of_checkpoints(folder: Path, tmp_path: Path) -> None:
    def fresh() -> ss.ShardLoader:
        return ss.ShardLoader(opened(folder, ss.Placement(0, 1)), 8)

    loader, model = fresh(), torch.nn.Linear(100, 100)
    used = list[int]()
    ss.save_checkpoint(tmp_path, step=0, model=model, loader=loader)
    for step, batch in enumerate(loader, start=1):
        used.append(batch["cls"].tolist()[-1])
        ss.save_checkpoint(tmp_path, step=step, model=model, loader=loader)
    for step in (0, 3, 5):
        found = ss.first_use(fresh(), tmp_path, keys=[f"{used[step]:06d}", f"{used[7]:06d}"])
        assert found.checkpoint == f"{tmp_path}/step-{step:08d}.pt"
        assert found.state == ss.load_checkpoint(found.checkpoint)["loader"]
        assert (found.epochs.tolist(), found.ranks.tolist()) == ([0, 0], [0, 0])
        assert set(found.steps.tolist()) == {step, 7}
        assert set(found.numbers.tolist()) == {used[step], used[7]}
    found = ss.first_use(fresh(), [tmp_path / "step-00000004.pt"], numbers=[used[2]])
    assert (found.checkpoint, found.state) == (None, None)
    found = ss.first_use(fresh(), f"{tmp_path}/step-00000004.pt", numbers=[used[6]])
    assert found.checkpoint == f"{tmp_path}/step-00000004.pt"


def test_a_run_that_went_back_and_had_other_weights_is_refused(folder: Path) -> None:
    at, ends = ss.Placement(0, 1), list[dict[str, Any]]()
    for change in ({"a": 1, "b": 0}, {"a": 0, "b": 1}):
        loader = ss.ShardLoader(mixed(folder, at), 8)
        batches = iter(loader)
        list(islice(batches, 3))
        loader.set_weights(change)
        list(islice(batches, 1 + len(ends)))
        ends.append(loader.state_dict())
    begin = ss.ShardLoader(mixed(folder, at), 8).state_dict()
    loader = ss.ShardLoader(mixed(folder, at), 8)
    assert ss.first_use(loader, [begin, ends[1]], numbers=range(N)).state == begin
    with pytest.raises(StateError, match=r"order of the run changed.*'mix.changes'"):
        ss.first_use(loader, ends, numbers=[3])


def test_a_run_that_continued_a_state_of_other_steps_warns_without_it(folder: Path) -> None:
    first = ss.ShardLoader(opened(folder, ss.Placement(0, 1)), 8)
    batches = [batch["cls"].tolist() for batch in islice(first, 3)]
    before = first.state_dict()
    loader = ss.ShardLoader(opened(folder, ss.Placement(0, 1)).map(shifted), 8)
    loader.load_state_dict(before)
    list(islice(loader, 1))
    after = loader.state_dict()
    found = ss.first_use(loader, [before, after], numbers=batches[2])
    with pytest.warns(UserWarning, match="continued a state that is not given"):
        assert ss.first_use(loader, [after], numbers=batches[2]).steps.tolist() == [2] * 8
    assert (found.state, found.steps.tolist()) == (None, [2] * 8)


def test_of_remote_checkpoints_only_the_states_are_read(folder: Path, tmp_path: Path) -> None:
    loader, model = (
        ss.ShardLoader(opened(folder, ss.Placement(0, 1)), 8),
        torch.nn.Linear(3000, 3000),
    )
    batches = [batch["cls"].tolist() for batch in loader]
    loader.set_epoch(0)
    for step, _ in enumerate(islice(loader, 3)):
        ss.save_checkpoint(tmp_path, step=step, model=model, loader=loader)
    with serve_files(tmp_path) as served:
        found = ss.first_use(loader, f"{served.url}/", numbers=[batches[2][0]])
        ranges = [one for *_, one in served.requests if one is not None]
    assert found.checkpoint == f"{served.url}/step-00000001.pt"
    bounds = [[*map(int, one.removeprefix("bytes=").split("-"))] for one in ranges]
    read = sum(end - start for start, end in bounds)
    assert read < 3 * 1_200_000 < model.weight.nbytes


def test_samples_that_never_come_leave_the_last_checkpoint(folder: Path) -> None:
    weights = [0.0 if number == 5 else 1.0 for number in range(N)]
    loader = ss.ShardLoader(opened(folder, ss.Placement(0, 1), weights=weights), 8)
    states = [loader.state_dict() for _ in loader]
    found = ss.first_use(loader, states, numbers=[5])
    assert found.state == states[-1]
    assert len(found.numbers) == len(found.epochs) == len(found.steps) == len(found.ranks) == 0


def test_weights_that_changed_in_the_training_are_those_of_the_last_state(folder: Path) -> None:
    loader = ss.ShardLoader(mixed(folder, ss.Placement(0, 1)), 8)
    states, used = list[dict[str, Any]](), list[set[int]]()
    states.append(loader.state_dict())
    for step, batch in enumerate(loader):
        used.append(set(batch["cls"].tolist()))
        if step == 3:
            loader.set_weights({"a": 0, "b": 1})
        states.append(loader.state_dict())
    asked = ss.ShardLoader(mixed(folder, ss.Placement(0, 1)), 8)
    for place, label in enumerate(sorted(set().union(*used))[::9]):
        begin = next(step for step, own in enumerate(used) if label in own)
        found = ss.first_use(asked, states, numbers=[label])
        assert (found.steps.tolist(), found.state) == ([begin], states[begin]), place


def test_what_is_not_one_run_is_an_error(folder: Path, tmp_path: Path) -> None:
    place = ss.Placement(0, 1)
    loader = ss.ShardLoader(opened(folder, place), 8)
    states = [loader.state_dict() for _ in loader]
    with pytest.raises(
        StateError, match=r"the run went back: a state at sample 8 of epoch 0 follows"
    ):
        ss.first_use(loader, [states[3], states[0]], numbers=[1])
    other = ss.ShardLoader(opened(folder, place, order=ss.OrderOptions(lanes=4)), 8).state_dict()
    with pytest.raises(StateError, match=r"order of the run changed.*'lanes': \(4, 1\)"):
        ss.first_use(loader, [other, states[3]], numbers=[1])
    with pytest.raises(StateError, match="fingerprint of the dataset"):
        ss.first_use(ss.ShardLoader(opened(folder, place, "two"), 8), states, numbers=[1])
    with pytest.raises(OptionError, match="numbers= or keys=, one of them"):
        ss.first_use(loader, states)
    with pytest.raises(OptionError, match="at least one state"):
        ss.first_use(loader, [], numbers=[1])
    with pytest.raises(NotFoundError, match="no checkpoint"):
        ss.first_use(loader, tmp_path, numbers=[1])
    with pytest.raises(OptionError, match="numbered from 0 to 96"):
        ss.first_use(loader, states, numbers=[97])
    with pytest.raises(OptionError, match="takes a list of whole numbers"):
        ss.first_use(loader, states, numbers=[[1]])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="nosuch"):
        ss.first_use(loader, states, keys=["nosuch"])
    streamed = ss.ShardLoader(opened(folder, place).shuffle(4), 8)
    with pytest.raises(OptionError, match="the step Shuffle changes how many items"):
        ss.first_use(streamed, [streamed.state_dict()], numbers=[1])


@pytest.mark.parametrize(
    ("ranks", "refill", "match"),
    [(1, True, "for bad or refused samples"), (2, False, "where all samples of a batch were bad")],
)
def test_replaced_samples_are_warned_of(ranks: int, refill: bool, match: str, folder: Path) -> None:
    place, budget = ss.Placement(0, ranks), ss.SkipBudget(refill=refill)
    loader = ss.ShardLoader(opened(folder, place, on_error=budget), 8)
    with pytest.warns(UserWarning, match=f"{match}.* may have been used earlier than found here"):
        ss.first_use(loader, [loader.state_dict()], numbers=[1])
