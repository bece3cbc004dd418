"""What Ray's guide "Working with PyTorch" shows works on the rows of `ss.ray.read`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
import torch
from ray.data.collate_fn import NumpyBatchCollateFn

import shardstream as ss
from shardstream.testing import make_shards
from tests.ray.cluster import MARKS
from tests.torchvision_transforms import import_transforms, install_torchvision

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    given = [
        {
            "__key__": f"{n:03d}",
            "png": rng.integers(0, 256, (4, 5, 3), dtype=np.uint8),
            "cls": n % 3,
            "txt": f"number {n}",
            "npy": np.full(6, n, np.float32),
        }
        for n in range(50)
    ]
    return make_shards(tmp_path_factory.mktemp("torch") / "data", samples=given, per_shard=20)


def numbers(folder: str, **options: Any) -> ray.data.Dataset:
    """Return rows with tensors only."""
    rows = ss.ray.read(ss.ShardDataset(folder).decode(), fields=["cls", "npy"], **options)
    return rows.drop_columns(["__key__"])


def test_batches_are_tensors_of_the_columns_dtypes(folder: str, in_order: None) -> None:
    batches = list(numbers(folder).iter_torch_batches(batch_size=8, device="cpu"))
    assert [len(batch["cls"]) for batch in batches] == [8] * 6 + [2]
    assert (batches[0]["cls"].dtype, batches[0]["npy"].dtype) == (torch.int64, torch.float32)
    assert batches[0]["npy"].shape == (8, 6)
    assert torch.cat([batch["npy"][:, 0] for batch in batches]).tolist() == [*range(50)]


def test_dtypes_are_set_for_all_or_by_column(folder: str) -> None:
    (batch,) = numbers(folder).iter_torch_batches(batch_size=50, dtypes=torch.float64)
    assert {column.dtype for column in batch.values()} == {torch.float64}
    by_column = {"cls": torch.int32, "npy": torch.float16}
    (batch,) = numbers(folder).iter_torch_batches(batch_size=50, dtypes=by_column)
    assert {name: column.dtype for name, column in batch.items()} == by_column


def test_last_batches_are_dropped_and_batches_prefetched(folder: str) -> None:
    batches = numbers(folder).iter_torch_batches(batch_size=8, drop_last=True, prefetch_batches=3)
    assert [len(batch["cls"]) for batch in batches] == [8] * 6


def test_a_local_shuffle_is_repeatable(folder: str, in_order: None) -> None:
    def epoch(seed: int) -> list[float]:
        batches = numbers(folder).iter_torch_batches(
            batch_size=10, local_shuffle_buffer_size=25, local_shuffle_seed=seed
        )
        return torch.cat([batch["npy"][:, 0] for batch in batches]).tolist()

    assert epoch(1) == epoch(1) != epoch(2)
    assert sorted(epoch(1)) == [*range(50)] != epoch(1)


def test_a_collate_function_of_the_user_is_called(folder: str) -> None:
    class Summed(NumpyBatchCollateFn):  # type: ignore[misc]
        def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor:
            return torch.as_tensor(batch["npy"].sum(axis=1))

    batches = numbers(folder).iter_torch_batches(batch_size=25, collate_fn=Summed())
    assert sum(float(batch.sum()) for batch in batches) == 6 * sum(range(50))


def test_keys_and_text_do_not_stop_batches(folder: str, in_order: None) -> None:
    rows = ss.ray.read(ss.ShardDataset(folder).decode("rgb8"))
    with pytest.raises(Exception, match="numpy.str_"):  # Ray's own function
        list(rows.iter_torch_batches(batch_size=8))
    first = next(iter(rows.iter_torch_batches(batch_size=8, collate_fn=ss.ray.Collate())))
    assert first["__key__"] == [f"{n:03d}" for n in range(8)]
    assert first["txt"] == [f"number {n}" for n in range(8)]
    assert first["png"].shape == (8, 4, 5, 3)
    assert first["cls"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    raw = next(
        iter(ss.ray.read(folder).iter_torch_batches(batch_size=3, collate_fn=ss.ray.Collate()))
    )
    assert raw["cls"] == [b"0", b"1", b"2"]


def test_collate_keeps_what_is_no_tensor() -> None:
    ragged = np.empty(2, dtype=object)
    ragged[:] = [np.ones((1, 2), np.float32), np.ones((2, 2), np.float32)]
    batch = {
        "n": np.array([1, 2]), "t": np.array(["a", "b"]), "b": np.array([b"a", None], dtype=object),
        "r": ragged, "f": np.array([True, False]), "s": np.array([{"a": 1}, None], dtype=object),
    }  # fmt: skip
    collate = pickle.loads(pickle.dumps(ss.ray.Collate(torch.float64)))  # noqa: S301
    found = collate(batch)
    assert (found["n"].dtype, found["f"].dtype) == (torch.float64, torch.bool)
    assert found["t"] == ["a", "b"]
    assert found["b"] == [b"a", None]
    assert found["s"] == [{"a": 1}, None]
    assert [one.shape for one in found["r"]] == [(1, 2), (2, 2)]
    assert found["r"][0].dtype == torch.float64
    by_column = ss.ray.Collate({"n": torch.int8}, device="cpu")(batch)
    assert (by_column["n"].dtype, by_column["r"][0].dtype) == (torch.int8, torch.float32)
    with pytest.raises(
        ss.errors.OptionError, match="dtypes names 'x', but the columns are n, t, b"
    ):
        ss.ray.Collate({"x": torch.int8})(batch)
    with pytest.raises(ss.errors.OptionError, match="'t', which is not a column of numbers"):
        ss.ray.Collate({"t": torch.int8})(batch)
    read_only = np.arange(3)
    read_only.flags.writeable = False
    ss.ray.Collate()({"n": read_only})["n"][0] = 5
    assert read_only[0] == 0


def test_maps_take_and_return_tensors_one_after_the_other(folder: str, in_order: None) -> None:
    def to_tensor(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "x": torch.from_numpy(row["png"].copy()).permute(2, 0, 1).float(),
            "cls": row["cls"],
        }

    def brighten(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"x": torch.as_tensor(batch["x"]) / 255}

    rows = ss.ray.read(ss.ShardDataset(folder).decode("rgb8"))
    mapped = rows.map(to_tensor).map_batches(brighten, batch_size=16)
    first = next(iter(mapped.iter_torch_batches(batch_size=10)))
    assert first["x"].shape == (10, 3, 4, 5)
    assert 0 <= float(first["x"].min()) < float(first["x"].max()) <= 1
    assert mapped.count() == 50


@pytest.mark.slow
def test_transforms_of_torchvision_are_applied(folder: str, tmp_path: Path) -> None:
    place = install_torchvision(tmp_path)
    v2 = import_transforms(place)
    compose = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.CenterCrop(4)]

    def apply(row: dict[str, Any]) -> dict[str, Any]:
        v2 = import_transforms(place)
        steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.CenterCrop(4)]
        return {"x": v2.Compose(steps)(row["png"]), "cls": row["cls"]}

    rows = ss.ray.read(ss.ShardDataset(folder).decode("pil")).map(apply)
    first = next(iter(rows.iter_torch_batches(batch_size=5)))
    image = ss.ShardDataset(folder).by_number().decode("pil")[0]["png"]
    assert first["x"].shape == (5, 3, 4, 4)
    assert torch.equal(first["x"][0], v2.Compose(compose)(image).as_subclass(torch.Tensor))


class Predictor:
    """A model that each actor loads once."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(6, 2)
        torch.nn.init.constant_(self.model.weight, 0.5)

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        with torch.inference_mode():
            scores = self.model(torch.as_tensor(batch["npy"]))
        return {"__key__": batch["__key__"], "scores": scores.numpy()}


def test_predictions_of_an_actor_pool_are_written(folder: str, tmp_path: Path) -> None:
    rows = ss.ray.read(ss.ShardDataset(folder).decode(), fields=["npy"], num_cpus=0.25)
    scores = rows.map_batches(
        Predictor, batch_size=16, num_cpus=0.5, compute=ray.data.ActorPoolStrategy(size=2)
    ).materialize()
    scores.write_parquet(str(tmp_path / "parquet"))
    table = pq.read_table(tmp_path / "parquet", columns=["__key__"])
    assert sorted(table["__key__"].to_pylist()) == [f"{n:03d}" for n in range(50)]
    scores.write_numpy(str(tmp_path / "npy"), column="scores")
    parts = [np.load(path) for path in (tmp_path / "npy").glob("*.npy")]
    assert np.concatenate(parts).shape == (50, 2)


def test_our_torch_datasets_are_taken_by_from_torch(folder: str) -> None:
    by_number = ss.ShardDataset(folder).by_number().decode().rename(cls="cls", keep=False)
    items = ray.data.from_torch(by_number).take_all()
    assert [row["item"]["cls"] for row in items] == [n % 3 for n in range(50)]
    stream = ss.ShardDataset(folder).decode().rename(cls="cls", keep=False)
    items = ray.data.from_torch(stream).take_all()
    assert [row["item"]["cls"] for row in items] == [n % 3 for n in range(50)]
