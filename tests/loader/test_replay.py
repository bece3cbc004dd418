"""`ss.replay` makes a batch of a training again, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, SampleError, StateError
from shardstream.loader import StreamDataset
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, numbered
from tests.static_server import serve_files

pytestmark = pytest.mark.filterwarnings(
    FEW_CORES,
    "ignore:lanes=",
    "ignore:the state was saved otherwise",
    "ignore:an epoch of this mix",
    "ignore:microbatch",
    "ignore:one rank alone receives no batch",
)
N, BAD = 97, {5, 30, 31, 32, 33, 34, 35, 60}
LENGTHS = [1 + (7 * i) % 11 for i in range(N)]


def augmented(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return sample | {"noise": generator.random(3, dtype=np.float32)}


def seeded(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"global": torch.rand(2), "other": np.random.random()}


def refusing(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] in BAD:
        raise ValueError(sample["cls"])
    return sample


def accepts(sample: dict[str, Any]) -> bool:
    return sample["cls"] not in BAD


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"tokens": np.full(LENGTHS[sample["cls"]], sample["cls"])}


def opened(folder: Path, name: str = "one", **options: Any) -> ss.ShardDataset:
    values: dict[str, Any] = {"shuffle": True, "seed": 3} | options
    return ss.ShardDataset(str(folder / name), **values).decode()


def mixed(folder: Path, place: ss.Placement, **options: Any) -> StreamDataset:
    one, two = (opened(folder, name, placement=place) for name in ("one", "two"))
    parts = {"a": one.map(augmented, rng=True), "b": two.map(dict).map(augmented, rng=True)}
    values: dict[str, Any] = {"weights": {"a": 1, "b": 3}, "samples": 150} | options
    return ss.mix({k: v.map(seeded, rng="torch") for k, v in parts.items()}, **values)


def joined(folder: Path, place: ss.Placement) -> StreamDataset:
    first = ss.ShardDataset(str(folder / "one"), shuffle=True, placement=place)
    other: Any = {str(folder / "two"): {"other": "cls"}}
    return ss.join(first, other, by="key", missing="drop").decode().map(augmented, rng=True)


def skipping(folder: Path, place: ss.Placement, **options: Any) -> StreamDataset:
    budget = ss.SkipBudget(samples=100, refill=options.pop("refill"))
    dataset = opened(folder, placement=place, on_error=budget, **options)
    return dataset.map(refusing).map(augmented, rng=True)


DATASETS: dict[str, Callable[[Path, ss.Placement], StreamDataset]] = {
    "plain": lambda f, p: opened(f, placement=p),
    "stored order": lambda f, p: opened(f, placement=p, shuffle=False).to_tuple("npy", "cls"),
    "augmented": lambda f, p: (
        opened(f, placement=p).map(augmented, rng=True).map(seeded, rng="torch")
    ),
    "fields": lambda f, p: ss.ShardDataset(
        str(f / "one"), shuffle=True, fields=["npy"], placement=p
    ).decode(),
    "keep": lambda f, p: opened(f, placement=p, order=ss.OrderOptions(remainder="keep")),
    "drop": lambda f, p: opened(f, placement=p, order=ss.OrderOptions(remainder="drop")),
    "subset": lambda f, p: opened(f, placement=p, subset=slice(0, None, 2)).map(augmented, rng=True),
    "weights": lambda f, p: opened(
        f, placement=p, weights=[1.0 + i % 4 for i in range(N)]
    ).map(augmented, rng=True),
    "mix": mixed,
    "mix of all": lambda f, p: mixed(f, p, weights=None, samples=None),
    "join": joined,
    "select": lambda f, p: opened(f, placement=p).select(accepts).map(augmented, rng=True),
    "skip": lambda f, p: skipping(f, p, refill=False),
    "refill": lambda f, p: skipping(f, p, refill=True),
    "all bad": lambda f, p: skipping(f, p, refill=False, shuffle=False),
    "nodes": lambda f, p: opened(
        f, placement=p, order=ss.OrderOptions(nodes=2, lanes=4, exchange=0.5)
    ),
    "balance": lambda f, p: opened(
        f, placement=p, order=ss.OrderOptions(balance=ss.Balance(LENGTHS))
    ),
    "rows": lambda f, p: (
        opened(f, placement=p).map(tokens).map(augmented, rng=True)
        .pack_sequences("tokens", 16, lengths=LENGTHS)
    ),
    "batches": lambda f, p: (
        opened(f, placement=p).map(augmented, rng=True).batch_by_cost(LENGTHS, 24)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    numbered(folder / "one", N, 15)
    numbered(folder / "two", 61, 15)
    return folder


def loader_of(
    name: str, folder: Path, rank: int = 0, ranks: int = 1, *, batch_size: int = 4, **options: Any
) -> ss.ShardLoader:
    dataset = DATASETS[name](folder, ss.Placement(rank, ranks))
    return ss.ShardLoader(dataset, None if name == "batches" else batch_size, **options)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes())
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def all_replayed(loader: ss.ShardLoader, state: dict[str, Any], rank: int) -> list[Any]:
    made = list[Any]()
    for step in count():
        try:
            made.append(ss.replay(loader, step, state=state, rank=rank))
        except SampleError as error:
            assert f"all samples of step {step} were left out" in str(error)  # noqa: PT017
        except OptionError as error:
            assert f"there is no step {step}: from here on epoch 0 has" in str(error)  # noqa: PT017
            break
    return made


def moved_on(loader: ss.ShardLoader, batches: int) -> dict[str, Any]:
    for _ in islice(loader, batches):
        pass
    return loader.state_dict()


@pytest.mark.parametrize("name", with_slow_rest([*DATASETS][::2], DATASETS))
def test_batches_of_all_ranks_are_made_again_byte_for_byte(name: str, folder: Path) -> None:
    state = moved_on(loader_of(name, folder, ranks=1, num_workers=0), 2)
    for ranks in (1, 2, 3):
        if name == "nodes" and ranks == 3:
            continue
        on_one_machine = loader_of(name, folder, ranks - 1, ranks)
        for rank in range(ranks):
            run = loader_of(name, folder, rank, ranks)
            run.load_state_dict(state)
            before = on_one_machine.state_dict()
            assert same(all_replayed(on_one_machine, state, rank), list(run)), (ranks, rank)
            assert on_one_machine.state_dict() == before


@pytest.mark.parametrize(
    "name", with_slow_rest(["augmented", "rows"], ["augmented", "mix", "rows", "refill"])
)
def test_batches_of_workers_are_made_again_without_them(name: str, folder: Path) -> None:
    run = loader_of(name, folder, 1, 2, num_workers=2)
    run.set_epoch(3)
    state = dict[str, Any]()
    for step, batch in enumerate(run):
        if step == 2:
            state = run.state_dict()
        asked = loader_of(name, folder, 0, 2, num_workers=2)  # as many lanes
        assert same(ss.replay(asked, step, epoch=3, rank=1), batch)
        if step > 2:  # a state says how many lanes there are
            asked = loader_of(name, folder, 0, 2)
            assert same(ss.replay(asked, step - 3, state=state, rank=1), batch)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(set(DATASETS) - {"nodes", "batches", "all bad"})),
    first=st.tuples(
        st.integers(1, 3), st.sampled_from([2, 4]), st.integers(1, 5), st.integers(0, 3)
    ),
    then=st.integers(1, 3).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
    drop_last=st.booleans(),
)
def test_a_training_that_went_on_elsewhere_is_made_again(
    name: str, first: tuple[int, ...], then: tuple[int, int], *, drop_last: bool, folder: Path
) -> None:
    ranks, batch_size, taken, epoch = first
    begun = loader_of(name, folder, 0, ranks, batch_size=batch_size)
    begun.set_epoch(epoch)
    state = moved_on(begun, taken)
    run = loader_of(name, folder, *then, drop_last=drop_last)
    run.load_state_dict(state)
    batches = list(run)
    asked = loader_of(name, folder, 0, then[1], drop_last=drop_last)
    for step in sorted({0, len(batches) // 2, len(batches) - 1} if batches else ()):
        assert same(ss.replay(asked, step, state=state, rank=then[0]), batches[step])


def test_steps_count_from_the_position_of_the_loader(folder: Path) -> None:
    run, whole = loader_of("augmented", folder), list(loader_of("augmented", folder))
    assert same(ss.replay(run, 5), whole[5])
    moved_on(run, 3)
    assert same(ss.replay(run, 5), whole[8])
    assert same(ss.replay(run, 5, epoch=0), whole[5])
    run.set_epoch(0)
    assert same(next(iter(run)), whole[0])


def test_a_loader_that_is_not_as_the_training_was_is_warned_of(folder: Path) -> None:
    state = loader_of("augmented", folder, 0, 2).state_dict()
    ss.replay(loader_of("augmented", folder, 1, 2, num_workers=2), 0, state=state)
    for loader, match in (
        (loader_of("augmented", folder), r"'ranks': 2, .*'ranks': 1, "),
        (loader_of("augmented", folder, 0, 2, batch_size=8), r"'batch_size': 4, .*'batch_size': 8"),
        (loader_of("augmented", folder, 0, 2, drop_last=True), r"False.*'drop_last': True"),
        (loader_of("plain", folder, 0, 2), r"{'digest': \("),
    ):
        with pytest.warns(UserWarning, match=f"the state was saved otherwise: .*{match}"):
            ss.replay(loader, 0, state=state)


def test_only_the_samples_of_the_batch_are_decoded_and_read(folder: Path) -> None:
    seen = list[int]()

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(sample["cls"])
        return sample

    loader = ss.ShardLoader(opened(folder).map(noted), 4, num_workers=2)
    batch = ss.replay(loader, 7)
    assert seen == batch["cls"].tolist()


def test_a_checkpoint_file_has_the_state(folder: Path, tmp_path: Path) -> None:
    run, whole = loader_of("augmented", folder), list(loader_of("augmented", folder))
    moved_on(run, 3)
    other = loader_of("mix", folder)
    model = torch.nn.Linear(300, 300)
    url = ss.save_checkpoint(
        tmp_path, step=3, model=model, train=run, valid={"loader": other.state_dict()}
    )
    asked = loader_of("augmented", folder)
    assert same(ss.replay(asked, 4, state=url), whole[7])
    assert same(ss.replay(asked, 4, state=Path(url)), whole[7])
    assert same(ss.replay(asked, 4, state=ss.load_checkpoint(url)), whole[7])
    assert same(ss.replay(other, 0, state=url), next(iter(other)))
    with pytest.raises(StateError, match="has 2 states of this dataset"):
        ss.replay(asked, 4, state={"a": run.state_dict(), "b": [run.state_dict()]})
    with pytest.raises(StateError, match="has no states of this dataset"):
        ss.replay(asked, 4, state={"model": {}})
    with pytest.raises(StateError, match="kind of pipeline|fingerprint of the dataset"):
        ss.replay(loader_of("subset", folder), 4, state=url)


def test_a_file_of_json_has_the_state(folder: Path, tmp_path: Path) -> None:
    run = loader_of("augmented", folder)
    state = moved_on(run, 3)
    run.load_state_dict(state)
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"global_step": 3, "stateful_callbacks": {"states": [state]}}))
    loader = loader_of("augmented", folder)
    assert same(ss.replay(loader, 0, state=file), next(iter(run)))
    assert ss.first_use(loader, [file, run.state_dict()], numbers=range(N)).numbers.size == N
    file.write_text("{}")
    with pytest.raises(StateError, match="not a state of a ShardLoader"):
        ss.replay(loader, 0, state=file)


def test_what_cannot_be_made_again_is_an_error(folder: Path) -> None:
    loader = loader_of("plain", folder)
    with pytest.raises(OptionError, match="there is no step -1"):
        ss.replay(loader, -1)
    with pytest.raises(OptionError, match="rank"):
        ss.replay(loader, 0, rank=1)
    with pytest.raises(OptionError, match="state= and epoch="):
        ss.replay(loader, 0, state=loader.state_dict(), epoch=2)
    with pytest.raises(OptionError, match="step must be a whole number"):
        ss.replay(loader, 1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="steps change counts"):
        ss.replay(ss.ShardLoader(opened(folder).shuffle(5), 4), 0)
    single = loader_of("all bad", folder, batch_size=2)  # 32 and 33 are bad
    counted = pytest.warns(UserWarning, match="receives no batch for a step")
    with counted, pytest.raises(SampleError, match="all samples of step 16 were left out"):
        ss.replay(single, 16)


def test_errors_of_a_step_are_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="30"):
        ss.replay(ss.ShardLoader(opened(folder, shuffle=False).map(refusing), 10), 3)
    strict = opened(folder, shuffle=False, on_error=ss.SkipBudget(samples=1)).map(refusing)
    with pytest.raises(ss.errors.SkipBudgetError, match="2 bad samples"):
        ss.replay(ss.ShardLoader(strict, 10), 3)


def test_of_a_remote_dataset_only_the_bytes_of_the_batch_are_read(tmp_path: Path) -> None:
    size = 400_000  # more than the gap that a request may read
    samples = [{"__key__": f"{i:03d}", "bin": bytes([i]) * size, "cls": i} for i in range(60)]
    make_shards(tmp_path, samples=samples, per_shard=20)
    with serve_files(tmp_path) as served:
        dataset = ss.ShardDataset(f"{served.url}/", shuffle=True, order=ss.OrderOptions(block=1))
        loader = ss.ShardLoader(dataset.decode(), 4, num_workers=2)
        served.requests.clear()
        batch = ss.replay(loader, 3)
        ranges = [found for _, path, found in served.requests if path.endswith(".tar")]
        bounds = [[*map(int, str(found).removeprefix("bytes=").split("-"))] for found in ranges]
        assert 4 * size < sum(end - start for start, end in bounds) < 4 * (size + 5000)
    assert [data[0] for data in batch["bin"]] == batch["cls"].tolist()


def test_samples_that_were_deleted_since_are_missing_and_that_is_said(tmp_path: Path) -> None:
    numbered(tmp_path / "one", 20)
    loader = ss.ShardLoader(opened(tmp_path, shuffle=False), 4)
    batches = iter(loader)
    next(batches)
    state, delivered = loader.state_dict(), next(batches)["cls"].tolist()
    ss.delete(str(tmp_path / "one"), numbers=[5])
    with pytest.warns(UserWarning, match=r"deleted since version \[1\] are left out"):
        found = ss.replay(ss.ShardLoader(opened(tmp_path, shuffle=False), 4), 0, state=state)
    assert found["cls"].tolist() == [4, 6, 7]
    first = ss.ShardLoader(opened(tmp_path, shuffle=False, version=1), 4)
    assert ss.replay(first, 0, state=state)["cls"].tolist() == delivered
