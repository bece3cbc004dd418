"""Pipelines give the items that webdataset gives, in its order, with the same names and arguments."""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

import shardstream.webdataset as wds
from tests.pairs import with_slow_rest
from tests.webdataset.upstream import write_tar

# webdataset leaves its files to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SHARDS, SAMPLES = 6, 7
Make = Callable[[Any, str], Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    stream = io.BytesIO()
    Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).save(stream, "PNG")
    for shard in range(SHARDS):
        members: dict[str, bytes] = {}
        for number in range(SAMPLES):
            key, text = f"s{shard}/{number:03}", b"%d" % (shard * SAMPLES + number)
            members |= {
                f"{key}.cls": text,
                f"{key}.PNG": stream.getvalue(),
                f"{key}.json": b'{"n":%b}' % text,
            }
        write_tar(folder / f"{shard}.tar", members)
    return f"{folder}/{{0..{SHARDS - 1}}}.tar"


def odd(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 2 == 1


def fail_at_seven(sample: dict[str, Any]) -> dict[str, Any] | None:
    number = int(sample["cls"])
    if number % 7 == 0:
        raise ValueError(number)
    return None if number % 5 == 0 else {"n": number}


def rename_json(name: str) -> str:
    return name.replace("json", "meta.json")


def half(w: Any) -> Any:
    return w.map(fail_at_seven, handler=w.ignore_and_continue)


PIPELINES: dict[str, Make] = {
    "plain": lambda w, u: w.WebDataset(u, shardshuffle=False),
    "shards shuffled": lambda w, u: w.WebDataset(u, shardshuffle=3, seed=5),
    "detshuffle": lambda w, u: w.WebDataset(u, shardshuffle=3, detshuffle=True, seed=5).repeat(2),
    "shuffle by seed": lambda w, u: w.WebDataset(u, shardshuffle=False).shuffle(9, initial=4, seed=3),
    "shuffle by rng": lambda w, u: w.WebDataset(u, shardshuffle=False).shuffle(9, rng=random.Random(1)),
    "decode": lambda w, u: w.WebDataset(u, shardshuffle=False).decode("rgb").to_tuple("png cls json"),
    "decode one": lambda w, u: w.WebDataset(u, shardshuffle=False).decode("torchl8", only="png"),
    "handlers": lambda w, u: w.DataPipeline(w.SimpleShardList(u), w.tarfile_to_samples(), half(w)),
    "stop": lambda w, u: w.WebDataset(u, shardshuffle=False).select(odd).map(fail_at_seven, handler=w.ignore_and_stop),
    "select and rename": lambda w, u: w.WebDataset(u, shardshuffle=False).select(odd).rename(y="txt;cls", keep=False),
    "rename, others stay": lambda w, u: w.WebDataset(u, shardshuffle=False).rename(y="txt;cls"),
    "rename keys": lambda w, u: w.WebDataset(u, shardshuffle=False).rename_keys(x="*.png", y="cls", must_match=False),
    "extract": lambda w, u: w.WebDataset(u, shardshuffle=False).extract_keys("*.png;*.jpg", "cls"),
    "batched": lambda w, u: w.WebDataset(u, shardshuffle=False).decode().to_tuple("cls", "json").batched(4),
    "batched whole": lambda w, u: w.WebDataset(u, shardshuffle=False).to_tuple("cls").batched(4, partial=False),
    "unbatched": lambda w, u: w.WebDataset(u, shardshuffle=False).to_tuple("cls", "json").batched(4).unbatched(),
    "listed": lambda w, u: w.WebDataset(u, shardshuffle=False).listed(4).unlisted(),
    "epoch": lambda w, u: w.WebDataset(u, shardshuffle=False).with_epoch(50),
    "repeat": lambda w, u: w.WebDataset(u, shardshuffle=False).repeat(3, 100),
    "slice": lambda w, u: w.WebDataset(u, shardshuffle=False).slice(3, 30, 4),
    "files": lambda w, u: w.WebDataset(
        u, shardshuffle=False, select_files=lambda name: not name.endswith("PNG"), rename_files=rename_json
    ),
    "resampled": lambda w, u: w.DataPipeline(
        w.ResampledShards(u, 9, seed=4, deterministic=True), w.tarfile_to_samples()
    ),
    "list of shards": lambda w, u: w.DataPipeline(w.SimpleShardList(u, seed=9), w.split_by_node, w.split_by_worker),
    "round robin": lambda w, u: w.RoundRobin([w.WebDataset(u, shardshuffle=False), w.MockDataset({"a": 1}, 9)], longest=True),
    "stages of one's own": lambda w, _: w.DataPipeline(
        lambda: iter(range(9)), lambda source: (x + 1 for x in source), w.map(str), w.Cached()
    ),
    "map_tuple": lambda w, u: w.WebDataset(u, shardshuffle=False).to_tuple("cls", "json").map_tuple(int, None),
    "map_dict": lambda w, u: w.WebDataset(u, shardshuffle=False).map_dict(cls=int),
    "xdecode": lambda w, u: w.WebDataset(u, shardshuffle=False).xdecode(("*.cls", lambda s: int(s.read())), must_decode=False),
    "associate": lambda w, u: w.DataPipeline(
        w.SimpleShardList(u), w.tarfile_to_samples(), w.associate({"s1/003": {"extra": 1}})
    ),
}  # fmt: skip


def plain(item: Any) -> Any:
    """Return a value that can be compared: arrays as text."""
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items() if name != "__local_path__"}
    if isinstance(item, list | tuple):
        return type(item)(map(plain, item))
    return repr(item)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_gives_the_items_of_webdataset(name: str, shards: str) -> None:
    ours, theirs = (
        [plain(item) for item in itertools.islice(PIPELINES[name](w, shards), 200)]
        for w in (wds, webdataset)
    )
    assert ours
    assert ours == theirs


def test_listed_leaves_out_the_rest_if_asked(shards: str) -> None:
    lists = [*wds.WebDataset(shards, shardshuffle=False).listed(4, partial=False)]
    assert [len(one) for one in lists] == [4] * (SHARDS * SAMPLES // 4)


@pytest.mark.parametrize("initial", [0, 1, 5, 100])
@pytest.mark.parametrize("bufsize", [1, 2, 7, 100])
def test_shuffle_draws_as_webdataset_does(bufsize: int, initial: int) -> None:
    ours, theirs = (
        list(w.filters._shuffle(iter(range(50)), bufsize, initial, random.Random(3)))
        for w in (wds, webdataset)
    )
    assert ours == theirs
    assert sorted(ours) == list(range(50))


def numbers(dataset: Any) -> list[int]:
    return [int(sample["cls"]) for sample in dataset]


def identity(batch: list[Any]) -> list[Any]:
    return batch


def readers(
    shards: str, stages: Callable[[], list[Any]], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Yield the samples that the workers of all ranks read."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        dataset = wds.DataPipeline(
            wds.SimpleShardList(shards),
            *stages(),
            wds.split_by_node,
            wds.split_by_worker,
            wds.tarfile_to_samples(),
        )
        for batch in wds.WebLoader(dataset, batch_size=4, num_workers=2, collate_fn=identity):
            yield from numbers(batch)


class Reshuffle(wds.PipelineStage):  # type: ignore[misc]
    """A stage of a training program: an order by seed and epoch."""

    def run(self, source: Any) -> Iterator[Any]:
        return wds.filters._shuffle(source, 100, 100, random.Random(42))  # type: ignore[no-any-return]


STAGES: dict[str, Callable[[], list[Any]]] = {
    "in order": list,
    "rng": lambda: [wds.shuffle(100, rng=random.Random(7))],
    "seed": lambda: [wds.shuffle(5, seed=7)],
    "own stage": lambda: [Reshuffle()],
    "detshuffle": lambda: [wds.detshuffle(9)],
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    with_slow_rest(
        [(name, 3 if place % 2 else 1) for place, name in enumerate(STAGES)], STAGES, [1, 3]
    ),
)
def test_ranks_and_workers_take_each_sample_once(
    name: str, world_size: int, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(readers(shards, STAGES[name], world_size, monkeypatch)) == list(
        range(SHARDS * SAMPLES)
    )


def test_several_ranks_need_a_node_splitter(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="explicit nodesplitter"):
        next(iter(wds.WebDataset(shards, shardshuffle=False)))
    dataset = wds.WebDataset(shards, shardshuffle=False, nodesplitter=wds.split_by_node)
    assert len(numbers(dataset)) == SHARDS * SAMPLES // 2


@pytest.mark.slow
def test_spawned_workers_of_a_rank_know_the_rank(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = wds.DataPipeline(wds.SimpleShardList(shards), wds.split_by_node, wds.split_by_worker)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    iterator = iter(loader)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert [Path(shard["url"]).name for shard in iterator] == ["1.tar", "3.tar", "5.tar"]


@pytest.mark.parametrize("samples", [10, 42, pytest.param(100, marks=pytest.mark.slow)])
def test_epoch_of_a_loader_has_the_given_length(samples: int, shards: str) -> None:
    dataset = wds.WebDataset(shards, shardshuffle=False)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).with_epoch(samples)
    for _ in range(2):
        found = numbers(loader)
        assert len(found) == samples
        assert len(set(found)) == min(samples, SHARDS * SAMPLES)


def test_arrays_are_written_as_webdataset_writes_them(tmp_path: Path) -> None:
    depth = np.arange(0, 65_536, 16, dtype=np.uint16).reshape(64, 64)
    sample = {
        "__key__": "a",
        "npz": {"zeros": np.zeros((256, 256)), "mask": depth > 9},
        "depth.png": depth,
        "depth.tiff": depth,
        "depth.ppm": depth,
        "mask.png": depth > 9,
    }
    written: list[dict[str, Any]] = []
    for w in (wds, webdataset):
        with w.TarWriter(path := str(tmp_path / f"{w.__name__}.tar")) as sink:
            sink.write(sample)
        written += wds.WebDataset(path, shardshuffle=False)
    ours, theirs = ({name: one[name] for name in sample if name != "__key__"} for one in written)
    assert ours == theirs
    assert len(ours["npz"]) < 5000


def test_tar_is_read_by_webdataset_and_tarfile(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    sample = {
        "__key__": "a/b",
        "cls": 3,
        "txt": "é",
        "json": {"a": [1]},
        "npy": array,
        "ten": array,
        "txt.gz": "x" * 99,
    }
    for name in ("plain.tar", "packed.tar.gz"):
        path = str(tmp_path / name)
        for _ in range(2):
            with wds.TarWriter(path) as sink:
                assert sink.write(sample) > 0
                assert not Path(path).exists() or _ == 1
        with tarfile.open(path) as archive:
            assert archive.getnames() == [
                "a/b.cls",
                "a/b.json",
                "a/b.npy",
                "a/b.ten",
                "a/b.txt",
                "a/b.txt.gz",
            ]
        (ours,), (theirs,) = (
            list(w.WebDataset(path, shardshuffle=False).decode()) for w in (wds, webdataset)
        )
        assert plain(ours) == plain(theirs)
        assert ours["json"] == {"a": [1]}
        assert np.array_equal(ours["ten"][0], array)


def test_shard_writer_splits_as_webdataset_does(tmp_path: Path) -> None:
    found = []
    for w, folder in ((wds, tmp_path / "ours"), (webdataset, tmp_path / "theirs")):
        folder.mkdir()
        finished: list[str] = []
        with w.ShardWriter(
            f"{folder}/%03d.tar",
            maxcount=4,
            maxsize=25,
            post=finished.append,
            start_shard=2,
            verbose=0,
        ) as sink:
            for number in range(11):
                sink.write({"__key__": str(number), "txt": "x" * number})
        found.append(
            [
                (
                    Path(name).name,
                    [s["__key__"] for s in webdataset.WebDataset(name, shardshuffle=False)],
                )
                for name in finished
            ]
        )
    assert found[0] == found[1]
