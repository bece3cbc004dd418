"""Test ``fields=``: samples with some of their fields only."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import OptionError, SampleError, StateError
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, picture, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

COUNT = 60
LARGE_BYTES = 40_000  # samples that are found in mapped shards before they are copied


def write(folder: Path, *, body_bytes: int = 100, count: int = COUNT) -> str:
    samples = [
        {"__key__": f"{n:04d}", "bin": b"%04d" % n + bytes(body_bytes), "cls": n, "txt": f"no {n}"}
        for n in range(count)
    ]
    return make_shards(folder, samples=samples, per_shard=25)


@pytest.fixture(scope="module", params=[100, LARGE_BYTES], ids=["small", "large"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("fields"), body_bytes=request.param)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples of which every fifth lacks ``txt``; pictures are jpg or png."""
    samples = [
        {"__key__": f"{n:04d}", "cls": n, "jpg" if n % 2 else "png": b"picture %d" % n}
        | ({"txt": "text"} if n % 5 else {})
        for n in range(COUNT)
    ]
    return make_shards(tmp_path_factory.mktemp("uneven"), samples=samples, per_shard=25)


def rows(dataset: Any, *, batch_size: int = 8, num_workers: int = 0) -> list[dict[str, Any]]:
    batches = ss.ShardLoader(dataset, batch_size, num_workers=num_workers, collate_fn=list)
    return [sample for batch in batches for sample in batch]


def only(samples: list[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    names = ("__key__", "__url__", *fields)
    return [{name: sample[name] for name in names} for sample in samples]


@pytest.mark.parametrize(
    ("options", "num_workers"),
    with_slow_rest(
        [({}, 0), ({"shuffle": True, "seed": 4}, 2), ({"index": "ignore"}, 0)],
        [{}, {"shuffle": True, "seed": 4}, {"index": "ignore"}],
        [0, 2],
    ),
)
def test_samples_have_the_fields_that_are_named(
    folder: str, options: dict[str, Any], num_workers: int
) -> None:
    whole = rows(ss.ShardDataset(folder, **grouped(**options)), num_workers=num_workers)
    kept = ss.ShardDataset(folder, **grouped(fields=("txt", "cls"), **options))
    found = rows(kept, num_workers=num_workers)
    assert found == only(whole, "txt", "cls")
    assert all(list(sample) == ["__key__", "__url__", "txt", "cls"] for sample in found)
    decoded = rows(ss.ShardDataset(folder, **grouped(**options)).decode(), num_workers=num_workers)
    assert rows(kept.decode(), num_workers=num_workers) == only(decoded, "txt", "cls")
    if not num_workers:
        assert list(kept) == only(list(ss.ShardDataset(folder, **grouped(**options))), "txt", "cls")


def test_batches_have_the_fields_that_are_named(folder: str) -> None:
    (batch,) = take(ss.ShardLoader(ss.ShardDataset(folder, fields=["cls"]), 50), 1)
    assert list(batch) == ["__key__", "__url__", "cls"]
    assert batch["cls"] == [b"%d" % n for n in range(50)]


def test_no_field_leaves_the_keys(folder: str) -> None:
    (first, *_) = rows(ss.ShardDataset(folder, fields=()))
    assert list(first) == ["__key__", "__url__"]


def test_map_style_and_loose_files_have_the_fields_that_are_named(
    folder: str, tmp_path: Path
) -> None:
    by_number = ss.ShardDataset(folder, fields=("cls",), subset=[5, 9]).by_number().decode()
    assert [by_number[0]["cls"], sorted(by_number[1])] == [5, ["__key__", "__url__", "cls"]]
    (tmp_path / "a.cls").write_text("3")
    (tmp_path / "a.txt").write_text("text")
    (sample,) = rows(ss.ObjectDataset(str(tmp_path), fields=("cls",)))
    assert sorted(sample) == ["__key__", "__url__", "cls"]
    with pytest.raises(OptionError, match="has no field 'jpg'; its fields are cls, txt"):
        ss.ObjectDataset(str(tmp_path), fields=("jpg",))


def test_alternatives_take_the_first_that_a_sample_has(uneven: str) -> None:
    found = rows(ss.ShardDataset(uneven, fields=("jpg;png", "cls")))
    for number, sample in enumerate(found):
        name = "jpg" if number % 2 else "png"
        assert sample[name] == b"picture %d" % number
        assert list(sample) == ["__key__", "__url__", name, "cls"]


@pytest.mark.parametrize("options", [{}, {"index": "ignore"}])
def test_a_sample_without_a_field_is_a_bad_sample(uneven: str, options: dict[str, Any]) -> None:
    message = (
        r"fields=: no field 'txt'; the sample has: cls, png \[in .*000000\.tar, sample '0000'\]"
    )
    with pytest.raises(SampleError, match=message):
        rows(ss.ShardDataset(uneven, **grouped(fields=("cls", "txt"), **options)))
    dataset = ss.ShardDataset(
        uneven, **grouped(fields=("cls", "txt"), on_error=ss.SkipBudget(samples=20), **options)
    )
    assert [int(sample["cls"]) for sample in rows(dataset)] == [n for n in range(COUNT) if n % 5]


def test_other_fields_of_large_samples_are_not_copied(tmp_path: Path) -> None:
    large = write(tmp_path / "large", body_bytes=100_000, count=256)

    def peak_bytes(**options: Any) -> int:
        reader = ss.ShardLoader(ss.ShardDataset(large, **grouped(**options)), 64)
        tracemalloc.start()
        try:
            assert sum(len(batch["cls"]) for batch in reader) == 256
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes() > 6_000_000
    assert peak_bytes(fields=("cls",)) < 2_000_000


def noise(sample: dict[str, Any], generator: np.random.Generator) -> tuple[int, float]:
    return int(sample["cls"]), generator.random()


@pytest.mark.parametrize("options", [{}, {"index": "ignore"}])
def test_orders_and_random_numbers_do_not_depend_on_the_fields(
    folder: str, options: dict[str, Any]
) -> None:
    def items(**fields: Any) -> list[Any]:
        dataset = ss.ShardDataset(folder, **grouped(shuffle=True, **options, **fields))
        return list(dataset.shuffle(20).map(noise, rng=True))

    assert items(fields=("cls",)) == items()
    by_number = [
        list(ss.ShardDataset(folder, fields=fields).by_number().map(noise, rng=True))
        for fields in (None, ("cls",))
    ]
    assert by_number[0] == by_number[1]


def test_states_of_a_plan_continue_with_other_fields(folder: str) -> None:
    def reader(**fields: Any) -> ss.ShardLoader:
        return ss.ShardLoader(ss.ShardDataset(folder, **grouped(shuffle=True, **fields)), 8)

    whole = [batch["__key__"] for batch in reader()]
    first = reader(fields=("cls",))
    assert [batch["__key__"] for batch in take(first, 3)] == whole[:3]
    for fields in ({}, {"fields": ("txt",)}):
        resumed = reader(**fields)
        resumed.load_state_dict(first.state_dict())
        assert [batch["__key__"] for batch in resumed] == whole[3:]


def test_states_of_streams_need_the_same_fields(folder: str) -> None:
    def reader(*fields: str) -> ss.ShardLoader:
        return ss.ShardLoader(ss.ShardDataset(folder, fields=fields).shuffle(10), 8)

    first = reader("cls")
    take(first, 2)
    reader("cls").load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"step 1 .* KeepFields\(names=.*cls.* here it is .*txt"):
        reader("cls", "txt").load_state_dict(first.state_dict())


def test_a_png_stays_a_mask_without_its_jpg(tmp_path: Path) -> None:
    sample = {"__key__": "a", "jpg": picture(fmt="JPEG"), "png": picture("L"), "cls": 1}
    made = make_shards(tmp_path / "masks", samples=[sample])

    def decoded(*, fields: Any = None, masks: Any = None) -> Any:
        dataset = ss.ShardDataset(made, fields=fields).decode("l8", max_side=5, masks=masks)
        return next(iter(dataset))["png"]

    # Masks are shrunk to the nearest pixel.
    assert (decoded(fields=("png",)) == decoded()).all()
    assert (decoded(fields=("png",), masks=[]) != decoded()).any()


def test_masks_that_are_no_images_are_refused(folder: str) -> None:
    for masks in (["pngg"], "seg"):
        with pytest.raises(OptionError, match="masks are fields of images"):
            ss.ShardDataset(folder).decode("rgb", masks=masks)


def test_parts_of_a_mix_keep_fields_of_their_own(folder: str, uneven: str) -> None:
    mixed = ss.mix(
        [ss.ShardDataset(folder, fields=("cls",)), ss.ShardDataset(uneven, fields=("jpg;png",))]
    )
    names = {tuple(sample)[2:] for sample in rows(mixed)}
    assert names == {("cls",), ("jpg",), ("png",)}


def test_datasets_with_fields_are_pickled(folder: str) -> None:
    dataset = ss.ShardDataset(folder, fields=("cls",)).decode()
    assert rows(pickle.loads(pickle.dumps(dataset))) == rows(dataset)  # noqa: S301
    assert repr(dataset).endswith("> KeepFields > Decode")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("jpg",), "the dataset has no field 'jpg'; its fields are bin, cls, txt"),
        (("cls", "jpg;png"), "has no field 'jpg;png'; its fields are"),
        ("cls", r"fields= must be a list of names, such as \['cls'\], not 'cls'"),
        ((1,), r"fields= must be a list of names, such as \['jpg'\], not \(1,\)"),
    ],
)
def test_unknown_fields_are_refused(folder: str, fields: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, fields=fields)
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, fields=fields, read=ss.ReadOptions(index="ignore"))
