"""Steps that are applied to whole columns give the batches, the errors and the skipped samples of single samples."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.format import Columns
from shardstream.pipeline import Context, ItemFunction, ItemStage
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

Steps = Callable[[ss.ShardDataset], ss.ShardDataset]
SAMPLES = 100  # enough that samples are parsed together
DTYPES = ("<f4", ">f4", "<f2", "<i8", ">i2", "u1", "?", "<c8", "<U3", "<M8[s]")
STEPS: dict[str, Steps] = {
    "decode": lambda data: data.decode(),
    "only": lambda data: data.decode(only=["cls", "txt"]),
    "to_tuple": lambda data: data.decode().to_tuple("bin;npy", "cls", "__key__"),
    "rename": lambda data: data.rename(label="id;cls").decode().to_tuple("npy", "label"),
    "rename, keep=False": lambda data: data.decode().rename(x="npy", y="json", keep=False),
    "twice": lambda data: data.decode(only="cls").decode(),
    "raw": lambda data: data.to_tuple("npy", "txt"),
    "own decoder": lambda data: data.decode(fields={"bin": len}),
    "handler": lambda data: data.decode(lambda name, raw: len(raw) if name == ".bin" else None),
    "map_tuple after": lambda data: data.decode().to_tuple("npy", "cls").map_tuple(None, abs),
    "threads": lambda data: data.decode(threads=2),
    "decoder without a hash": lambda data: data.decode(fields={"bin": Unhashable()}),
}  # fmt: skip


@dataclass
class Unhashable:
    def __call__(self, data: bytes) -> int:
        return len(data)


def same(item: Any) -> Any:
    return item


def npy_bytes(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def sample(number: int, array: np.ndarray[Any, Any], **fields: Any) -> dict[str, Any]:
    plain = {"cls": number - 3, "txt": f"é{number}", "json": {"n": number}, "bin": b"%d" % number}
    return {"__key__": f"{number:06d}", "npy": npy_bytes(array)} | plain | fields


def batches(
    folder: str, steps: Steps, *, by_column: bool, **options: Any
) -> tuple[list[Any], dict[str, int], str]:
    """Return the batches of an epoch, the skipped samples, and the error that ended it."""
    budget = options.pop("on_error", "raise")
    dataset = ss.ShardDataset(folder, shuffle=True, seed=1, on_error=budget)
    loader = ss.ShardLoader(steps(dataset if by_column else dataset.map(same)), 16, **options)
    found: list[Any] = []
    try:
        found.extend(loader)
    except ss.ShardStreamError as error:
        return found, loader.skipped, str(error)
    return found, loader.skipped, ""


def assert_equal(one: Any, other: Any) -> None:
    """Compare batches with their types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.is_contiguous()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    else:
        assert one == other


def assert_same_as_single_samples(folder: str, steps: Steps, **options: Any) -> list[Any]:
    by_column = batches(folder, steps, by_column=True, **options)
    one_by_one = batches(folder, steps, by_column=False, **options)
    assert by_column[1:] == one_by_one[1:]
    assert_equal(by_column[0], one_by_one[0])
    return by_column[0]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [sample(n, np.arange(n, n + 6, dtype="<f4").reshape(2, 3)) for n in range(SAMPLES)]
    return make_shards(tmp_path_factory.mktemp("vectors"), samples=samples, per_shard=60)


@pytest.mark.parametrize(
    ("name", "workers"),
    with_slow_rest(
        [(name, 0) for name in STEPS] + [(name, 2) for name in [*STEPS][::4]], STEPS, [0, 2]
    ),
)
def test_batches_are_those_of_single_samples(vectors: str, name: str, workers: int) -> None:
    found = assert_same_as_single_samples(vectors, STEPS[name], num_workers=workers)
    assert len(found) == -(-SAMPLES // 16)


@pytest.mark.slow
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 0, 2), (3000,)]),
    st.sampled_from("CF"),
    st.sampled_from(["", "shape", "dtype", "longer", "cut off", "no array", "pickle"]),
)
def test_arrays_of_any_kind_are_those_of_single_samples(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    shape: tuple[int, ...],
    order: Any,
    odd: str,
) -> None:
    array = np.ones(shape, dtype="i1").astype(dtype, order=order)
    files = [sample(n, array) for n in range(SAMPLES)]
    others: dict[str, bytes] = {
        "shape": npy_bytes(np.ones((4, 1), dtype="f4")),
        "dtype": npy_bytes(np.ones(shape, dtype="u4")),
        "longer": npy_bytes(array) + b"after it",
        "cut off": npy_bytes(array)[:-1],
        "no array": b"x" * len(files[0]["npy"]),
        "pickle": npy_bytes(np.array([None])),
    }
    if odd:
        files[40]["npy"] = others[odd]
    folder = make_shards(tmp_path_factory.mktemp("any"), samples=files, per_shard=SAMPLES)
    assert_same_as_single_samples(folder, STEPS["decode"])
    assert_same_as_single_samples(folder, STEPS["to_tuple"], on_error=ss.SkipBudget(samples=5))


@pytest.mark.parametrize(
    "bad", [{"cls": b"seven"}, {"json": b"{"}, {"txt": b"\xff"}, {"npy": b"no array"}], ids=str
)
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_are_skipped_and_named_as_single_samples(
    tmp_path: Path, bad: dict[str, bytes], workers: int
) -> None:
    samples = [sample(n, np.ones(3)) for n in range(SAMPLES)]
    samples[40] |= bad
    folder = make_shards(tmp_path / "data", samples=samples, per_shard=SAMPLES)
    _, _, error = batches(folder, STEPS["decode"], by_column=True, num_workers=workers)
    assert "000040" in error
    skipping = {"on_error": ss.SkipBudget(samples=1), "num_workers": workers}
    found = assert_same_as_single_samples(folder, STEPS["decode"], **skipping)
    assert sum(len(batch["cls"]) for batch in found) == SAMPLES - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(ItemStage):
    """A stage of a user, with a field that has a common name."""

    columns: tuple[str, ...]

    def bind(self, context: Context) -> ItemFunction:  # noqa: ARG002
        return lambda sample, _: sample | {name: sample[name][:1] for name in self.columns}

    def apply_to_columns(self, columns: Columns) -> Columns:
        cut = {name: [value[:1] for value in columns.columns[name]] for name in self.columns}
        return Columns({**columns.columns, **cut})


def test_stages_of_users_can_work_on_columns(vectors: str) -> None:
    found = assert_same_as_single_samples(vectors, lambda data: data.then(Cut(columns=("txt",))))
    assert found[0]["txt"][0] == "é".encode()[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading(Cut):
    """Takes columns also before stages that do not, in threads."""

    threads = 2
    leads_by_column = True


def test_no_step_with_as_many_threads_is_left_out_after_one_that_takes_columns(
    vectors: str,
) -> None:
    stage = Leading(columns=("txt",))
    dataset = ss.ShardDataset(vectors).then(stage).map(lambda sample: len(sample["txt"]), threads=2)
    first, *_ = ss.ShardLoader(dataset, 16)
    assert first.tolist() == [1] * 16


def test_a_missing_field_is_the_error_of_single_samples(vectors: str) -> None:
    for steps in (
        lambda data: data.to_tuple("jpg"),
        lambda data: data.decode().to_tuple("cls", "jpg;png"),
        lambda data: data.rename(image="jpg"),
    ):
        assert "jpg" in batches(vectors, steps, by_column=True)[2]
        assert_same_as_single_samples(vectors, steps)


def test_a_field_that_is_used_twice_is_two_tensors(vectors: str) -> None:
    dataset = ss.ShardDataset(vectors).decode()
    (one, other), *_ = ss.ShardLoader(dataset.to_tuple("npy", "npy"), 16)
    batch, *_ = ss.ShardLoader(dataset.rename(a="npy", b="npy"), 16)
    for first, second in ((one, other), (batch["a"], batch["b"])):
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()


def test_batches_share_no_memory(vectors: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(vectors).decode(), 16)
    first, second, *_ = loader
    kept = second["npy"].clone()
    first["npy"].fill_(-1)
    assert torch.equal(second["npy"], kept)


def test_own_collate_functions_get_samples_that_own_their_arrays(vectors: str) -> None:
    dataset = ss.ShardDataset(vectors).decode()
    (batch, *_) = ss.ShardLoader(dataset, 16, collate_fn=list)
    assert all(type(item) is dict and item["npy"].base is None for item in batch)
