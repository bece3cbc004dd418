from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch

import shardstream as ss
from shardstream.errors import SampleError
from shardstream.loader import collate, load_tensors, to_tensor
from shardstream.pipeline import Context, MapTuple, split_batch
from shardstream.testing import ListRun
from tests.small_datasets import numbered

PICTURE = PIL.Image.new("RGB", (2, 2))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, -2], torch.int64),
        ([1.5, 2.0], torch.float64),
        ([True, False], torch.bool),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.uint8(1), np.uint8(2)], torch.uint8),
        ([np.int16(1), np.int16(2)], torch.int16),
        ([np.bool_(1), np.bool_(0)], torch.bool),
        ([np.zeros((2, 3), np.float16)] * 2, torch.float16),
        ([np.zeros((2, 3), ">i4")] * 2, torch.int32),
        ([np.zeros(())] * 2, torch.float64),
        ([np.zeros((3, 2))[::-1]] * 2, torch.float64),
        ([np.zeros((3, 2), order="F")] * 2, torch.float64),
        ([np.frombuffer(b"abc", np.uint8)] * 2, torch.uint8),
        ([torch.zeros(2, 2)] * 2, torch.float32),
        ([torch.tensor(1)] * 2, torch.int64),
    ],
)
def test_numbers_and_arrays_of_equal_type_are_stacked(
    values: list[Any], dtype: torch.dtype
) -> None:
    batch = collate([{"x": value} for value in values])["x"]
    assert batch.dtype == dtype
    assert batch.shape == (2, *np.shape(values[0]))
    assert batch.tolist() == [np.asarray(value).tolist() for value in values]


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a", b"b"],
        [None, None],
        [{"a": 1}, {"b": 2}],
        [[1], [2, 3]],
        [PICTURE, PICTURE],
        [1, 2.0],
        [1, None],
        [1, True],
        [1 << 70, 1],
        [1, -(1 << 63) - 1],
        [np.array(["a"]), np.array(["b"])],
        [np.array(["2020-01-01"], "M8[D]")] * 2,
        [np.str_("a"), np.str_("b")],
        [np.datetime64(1, "s"), np.datetime64(2, "s")],
        [(1, 2), (3, 4)],
    ],
)
def test_other_values_become_lists(values: list[Any]) -> None:
    batch = collate([{"x": value} for value in values])["x"]
    assert type(batch) is list
    assert all(found is value for found, value in zip(batch, values, strict=True))


class Pair(NamedTuple):
    image: Any
    label: Any


def test_named_tuples_stay_named() -> None:
    batch = collate([Pair(np.zeros(2), 1), Pair(np.ones(2), 2)])
    assert isinstance(batch, Pair)
    assert (batch.image.shape, batch.label.tolist()) == ((2, 2), [1, 2])
    items = list(split_batch(Pair(["a", "b"], [1, 2])))
    assert items == [Pair("a", 1), Pair("b", 2)]
    assert all(isinstance(item, Pair) for item in items)
    mapped = MapTuple(functions=(str.upper,)).open(ListRun(items), Context())
    assert [item.image for item in mapped] == ["A", "B"]


def test_samples_tuples_and_values_are_collated() -> None:
    assert collate([(1, "a"), (2, "b")])[0].tolist() == [1, 2]
    assert collate([(1, "a"), (2, "b")])[1] == ["a", "b"]
    assert collate([3, 4]).tolist() == [3, 4]
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([[1], [2, 3]]) == [[1], [2, 3]]
    keys = collate([{"__key__": "a", "x": 1}, {"x": 2, "__key__": "b"}])
    assert (keys["__key__"], keys["x"].tolist()) == (["a", "b"], [1, 2])


def sample(key: str, **fields: Any) -> dict[str, Any]:
    return {"__key__": key, **fields}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([sample("a", x=1), sample("b")], r"different fields .*\['x'\] of 'a' and 'b'; choose fields"),
        ([sample("a", x=np.zeros(2)), sample("b", x=np.zeros(3))],
         r"x: \(2,\) float64 and \(3,\) float64 \(sample 'b'\) cannot be stacked.*field 'x'"),
        ([sample("a", x=np.zeros(2)), sample("b", x=np.zeros(2, np.float32))], "give them one shape and dtype in a"),
        ([(np.zeros(2),), (np.zeros(3),)], "element 0: "),
        ([np.zeros(2), np.zeros(3)], "items: "),
        ([(1,), (1, 2)], r"tuples of different lengths, \[1, 2\], cannot be one batch"),
        ([(1,), {"x": 1}], "items of the types dict, tuple cannot be one batch"),
        ([None, {"x": 1}], r"NoneType, dict cannot .* leave samples out with select\(\) instead of None"),
        ([(1,), None], "NoneType, tuple cannot"),
    ],
)  # fmt: skip
def test_unstackable_values_raise_with_field_and_sample(items: list[Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        collate(items)


def test_stack_owns_its_memory() -> None:
    array = np.zeros(3)
    batch = collate([{"x": array}, {"x": array}])["x"]
    batch += 1
    assert array.tolist() == [0, 0, 0]


def test_tensor_shares_the_memory_of_its_array() -> None:
    array = np.zeros(3)
    to_tensor(array)[0] = 5
    assert array[0] == 5


def test_saved_tensors_are_loaded_without_running_code() -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.arange(3)}, stream)
    assert load_tensors(stream.getvalue())["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_on_the_cpu_whatever_the_default_device_is(
    num_workers: int, tmp_path: Path
) -> None:
    folder = numbered(tmp_path / "set", 12, 6)
    with torch.device("meta"):
        dataset = ss.ShardDataset(folder, shuffle=True).decode()
        steps = dataset.map(lambda sample: sample | {"half": 0.5, "number": np.float32(1)})
        batches = list(ss.ShardLoader(steps, 4, num_workers=num_workers))
        kinds = {
            value.device.type
            for batch in batches
            for value in batch.values()
            if torch.is_tensor(value)
        }
    assert kinds == {"cpu"}
    assert sorted(n for batch in batches for n in batch["cls"].tolist()) == list(range(12))
