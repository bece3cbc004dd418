from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import IndexMismatchError
from shardstream.storage import Storage, publish_bytes, remove
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, take

COUNT, LARGE = 12, 700_000


def write(folder: str, order: tuple[str, ...] = ("mp4", "txt", "json"), count: int = COUNT) -> str:
    noise = np.random.default_rng(0).bytes(LARGE)
    with ss.ShardWriter(folder, max_samples=5) as writer:
        for number in range(count):
            fields = {"mp4": noise, "txt": f"text {number}", "json": {"number": number}}
            key = f"{number:03d}" + "x" * 150 * (number % 3 == 0)  # a long name has two headers
            writer.write({"__key__": key, **{field: fields[field] for field in order}})
    return folder


def read(folder: str, *fields: str, **options: Any) -> tuple[list[dict[str, Any]], float]:
    """Return the samples, and the bytes that were read."""
    dataset = ss.ShardDataset(folder, **grouped(fields=fields, **options)).decode()
    loader = ss.ShardLoader(dataset, 4, num_workers=1, collate_fn=list)
    samples = [sample for batch in loader for sample in batch]
    return samples, float(loader.stats().as_dict()["read_bytes"])


ORDERS = [("mp4", "txt", "json"), ("txt", "mp4", "json"), ("txt", "json", "mp4")]


@pytest.mark.parametrize("order", with_slow_rest(ORDERS[:1], ORDERS), ids=str)
def test_only_wanted_members_of_large_samples_are_fetched(
    s3_env: None, bucket: str, order: tuple[str, ...]
) -> None:
    folder = write(f"{bucket}/data", order)
    whole, all_bytes = read(folder, "txt", "json", shuffle=True, seed=2)
    assert all_bytes > COUNT * LARGE
    ss.index(folder, members=True)
    for fields in (("txt",), ("json",), ("txt;cap", "json")):
        samples, nbytes = read(folder, *fields, shuffle=True, seed=2)
        names = [name.partition(";")[0] for name in fields]
        assert samples == [
            {name: one[name] for name in ("__key__", "__url__", *names)} for one in whole
        ]
        assert nbytes < COUNT * 10_000
    by_number = ss.ShardDataset(folder, fields=["txt"]).by_number()
    assert [sample["txt"] for sample in by_number] == [b"text %d" % n for n in range(COUNT)]
    assert len(read(folder, "mp4")[0][0]["mp4"]) == LARGE


@pytest.mark.filterwarnings(FEW_CORES)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_and_states_do_not_depend_on_the_index(
    s3_env: None, bucket: str, method: str
) -> None:
    folder = write(f"{bucket}/data")

    def loader(method: str) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, fields=["txt"], shuffle=True, subset=range(1, COUNT))
        return ss.ShardLoader(
            dataset.decode().to_tuple("txt"), 2, num_workers=2, multiprocessing_context=method
        )

    expected = [texts for (texts,) in loader("fork")]
    first = loader(method)
    begun = [texts for (texts,) in take(first, 2)]
    ss.index(folder, members=True)
    rest = loader(method)
    rest.load_state_dict(first.state_dict())
    assert begun + [texts for (texts,) in rest] == expected


def test_a_shard_without_the_index_is_read_whole(s3_env: None, bucket: str) -> None:
    folder = write(f"{bucket}/data")
    ss.index(folder, members=True)
    remove(Storage(), f"{folder}/000001.idx")
    samples, nbytes = read(folder, "txt")
    assert [sample["txt"] for sample in samples] == [f"text {n}" for n in range(COUNT)]
    assert 5 * LARGE < nbytes < 6 * LARGE


def test_index_elsewhere_has_the_members(s3_env: None, bucket: str, tmp_path: Path) -> None:
    folder = write(f"{bucket}/data")
    ss.index(folder, to=tmp_path / "mine", members=True, sha256=False)
    samples, nbytes = read(str(tmp_path / "mine"), "txt")
    assert [sample["txt"] for sample in samples] == [f"text {n}" for n in range(COUNT)]
    assert nbytes < 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "not an index of members"),
        pytest.param(
            lambda text: text.replace(b"v1.2 5", b"v1.2 6"),
            "5 samples under the title",
            marks=pytest.mark.slow,
        ),
        (lambda text: text.replace(b" 700000 ", b" 900000 "), "members that overlap"),
        pytest.param(
            lambda text: text.replace(b"mp4 ", b""),
            "not an index of members",
            marks=pytest.mark.slow,
        ),
        (lambda text: b"v1.2 1\n" + text.split(b"\n")[1] + b"\n", "does not match the index"),
        pytest.param(
            lambda _: b"v1.2 1\ntxt 512 5000000 a.txt\n",
            "does not match the index",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda _: b"v1.2 1\ntxt 99999999 5 a.txt\n",
            "does not match the index",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_indexes_of_members_are_errors(
    s3_env: None, bucket: str, change: Any, message: str
) -> None:
    folder = write(f"{bucket}/data", count=5)
    ss.index(folder, members=True)
    storage, url = Storage(), f"{folder}/000000.idx"
    publish_bytes(storage, url, change(storage.read(url)))
    with pytest.raises(IndexMismatchError, match=message):
        read(folder, "txt", on_error="skip")
