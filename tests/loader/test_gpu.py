"""Pinned batches and copies to a GPU; skipped without a CUDA device."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstream as ss
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES, numbered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(FEW_CORES),
]
SIDE = 64


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> str:
    """800 arrays of 64 KiB, each full of its number."""
    samples = [
        {"__key__": f"{n:06d}", "cls": n, "npy": np.full((SIDE, 4 * SIDE), n, np.int32)}
        for n in range(800)
    ]
    return make_shards(tmp_path_factory.mktemp("arrays"), samples=samples, per_shard=100)


def make_loader(folder: str, num_workers: int, **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    return ss.ShardLoader(dataset, 8, num_workers=num_workers, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned_without_torch_s_thread(num_workers: int, arrays: str) -> None:
    plain = [batch["cls"].tolist() for batch in make_loader(arrays, num_workers)]
    loader = make_loader(arrays, num_workers, pin_memory=True)
    seen = []
    for batch in loader:
        assert batch["npy"].is_pinned()
        assert batch["cls"].is_pinned()
        assert batch["npy"][:, 0, 0].tolist() == batch["cls"].tolist()
        assert not [one.name for one in threading.enumerate() if "pin_memory" in one.name]
        seen.append(batch["cls"].tolist())
    assert seen == plain
    assert loader.pin_memory


@pytest.mark.parametrize("num_workers", [0, 2])
def test_device_batches_equal_those_of_the_cpu(num_workers: int, arrays: str) -> None:
    options: dict[str, Any] = {"persistent_workers": num_workers > 0}
    ours = make_loader(arrays, num_workers, device="cuda", **options)
    plain = make_loader(arrays, num_workers, **options)
    for _ in range(2):
        for batch, wanted in zip(ours, plain, strict=True):
            assert batch["npy"].device == torch.device("cuda", torch.cuda.current_device())
            assert torch.equal(batch["npy"].cpu(), wanted["npy"])
            assert torch.equal(batch["cls"].cpu(), wanted["cls"])
            assert batch["__key__"] == wanted["__key__"]


@pytest.mark.parametrize("own_stream", [False, True])
def test_batches_stay_whole_while_the_gpu_lags_behind(own_stream: bool, arrays: str) -> None:
    """The loop is far ahead of the GPU and drops each batch at once: memory reused too early would change the results."""
    wanted, found = [], []
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            for batch in make_loader(arrays, 4, device="cuda", prefetch_to_device=4):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # about a millisecond
                found.append((batch["npy"].amin((1, 2)), batch["npy"].amax((1, 2))))
                wanted.append([int(key) for key in batch["__key__"]])
                del batch
    torch.cuda.synchronize()
    assert [low.tolist() for low, _ in found] == wanted
    assert [high.tolist() for _, high in found] == wanted


def test_pinned_batches_stay_whole_while_they_are_copied(arrays: str) -> None:
    wanted, found = [], []
    for batch in make_loader(arrays, 4, pin_memory=True):
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # the copy waits for it
        found.append(batch["npy"].to("cuda", non_blocking=True).amax((1, 2)))
        wanted.append([int(key) for key in batch["__key__"]])
        del batch
    assert [high.tolist() for high in found] == wanted


def test_state_in_the_middle_continues_exactly(arrays: str) -> None:
    keys = [batch["__key__"] for batch in make_loader(arrays, 2)]
    loader = make_loader(arrays, 2, device="cuda", prefetch_to_device=4)
    assert [batch["__key__"] for batch in islice(loader, 30)] == keys[:30]
    resumed = make_loader(arrays, 2, device="cuda")
    resumed.load_state_dict(loader.state_dict())
    assert [batch["__key__"] for batch in resumed] == keys[30:]


def test_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ss.errors.OptionError, match="sees [0-9]+ CUDA devices"):
        make_loader(numbered(tmp_path, 8), 0, device=f"cuda:{torch.cuda.device_count()}")
