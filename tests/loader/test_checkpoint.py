"""Checkpoints are atomic, rotated, and never run code, on local disks and on S3."""

from __future__ import annotations

import collections
import copy
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardstream as ss
from shardstream.storage import Storage, publish_bytes
from tests.servers import ShapedS3
from tests.small_datasets import flat, labels, loader, numbered, take

VALUES: dict[str, Any] = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "numbers": [1, 2.5, True, None, 1j, (3, {4})],
    "text": {"name": "run", 7: b"bytes"},
    "kinds": (torch.float16, torch.Size([1, 2]), torch.device("cpu")),
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "empty": torch.empty(0),
}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory:/{tmp_path}/run"


def names(folder: str) -> list[str]:
    return [file.url.rpartition("/")[2] for file in Storage().list_folder(folder)[0]]


def assert_equal(found: dict[str, Any], saved: dict[str, Any]) -> None:
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


# -- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one.pt", "deep/er/one.pth"])
def test_values_round_trip(folder: str, name: str) -> None:
    url = ss.save_checkpoint(f"{folder}/{name}", **VALUES)
    assert url == f"{folder}/{name}"
    assert_equal(ss.load_checkpoint(url), VALUES)


def test_models_optimizers_and_schedulers_are_saved_by_their_state(folder: str) -> None:
    model, optimizer = trained(0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    ss.save_checkpoint(folder, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    found = ss.load_checkpoint(folder)
    assert found["step"] == 3
    other, its = trained(1)
    other.load_state_dict(found["model"])
    its.load_state_dict(found["optimizer"])
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert str(its.state_dict()) == str(optimizer.state_dict())
    assert found["scheduler"]["total_steps"] == 10


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_loader_continues_with_the_next_sample(tmp_path: Path, num_workers: int) -> None:
    data = numbered(tmp_path / "data", 50)
    one = loader(data, shuffle=True, num_workers=num_workers)
    seen = labels(take(one, 3))
    ss.save_checkpoint(tmp_path / "run", step=np.int64(3), loader=one)
    two = loader(data, shuffle=True)
    two.load_state_dict(ss.load_checkpoint(tmp_path / "run")["loader"])
    assert sorted(flat(seen) + flat(labels(two))) == list(range(50))


def test_files_are_interchangeable_with_torch_save_and_load(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "ours.pt", **VALUES)
    assert_equal(torch.load(tmp_path / "ours.pt", weights_only=True), VALUES)
    torch.save(VALUES, tmp_path / "theirs.pt")
    assert_equal(ss.load_checkpoint(tmp_path / "theirs.pt"), VALUES)


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_latest_step_is_loaded_and_keep_files_stay(folder: str) -> None:
    for step in (2, 10, 9_999_999, 123_456_789):
        ss.save_checkpoint(folder, step=step, keep=3, value=step)
    assert names(folder) == ["step-00000010.pt", "step-09999999.pt", "step-123456789.pt"]
    assert ss.load_checkpoint(folder) == {"value": 123_456_789, "step": 123_456_789}
    assert ss.load_checkpoint(f"{folder}/step-00000010.pt")["value"] == 10


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True),
    keep=st.integers(1, 8),
    growing=st.booleans(),
)
def test_only_checkpoints_before_the_latest_ones_are_deleted(
    steps: list[int], keep: int, growing: bool
) -> None:
    steps, there = sorted(steps) if growing else steps, set[int]()
    folder, memory = "memory://keep-as-many/run", fsspec.filesystem("memory")
    if memory.exists(folder):
        memory.rm(folder, recursive=True)
    for step in steps:
        ss.save_checkpoint(folder, step=step, keep=keep, value=step)
        earlier = sorted(other for other in there if other < step)
        there = there - set(earlier[::-1][keep - 1 :]) | {step}
        assert names(folder) == [f"step-{one:08d}.pt" for one in sorted(there)]
    if growing:
        assert len(there) == min(keep, len(steps))


def test_later_steps_and_other_files_are_never_deleted(folder: str) -> None:
    for name in ("best.pt", "step-notes.txt", "step-1.pt.bak"):
        publish_bytes(Storage(), f"{folder}/{name}", b"")
    for step in (5, 6, 1, 2):
        ss.save_checkpoint(folder, step=step, keep=1)
    assert names(folder) == [
        *("best.pt", "step-00000002.pt", "step-00000006.pt", "step-1.pt.bak", "step-notes.txt"),
    ]


def test_saving_a_step_again_replaces_it(folder: str) -> None:
    ss.save_checkpoint(folder, step=1, value="old")
    ss.save_checkpoint(folder, step=1, value="new", keep=2)
    assert ss.load_checkpoint(folder)["value"] == "new"
    assert names(folder) == ["step-00000001.pt"]


def test_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    for url in (tmp_path, tmp_path / "none", tmp_path / "one.pt"):
        with pytest.raises(ss.errors.NotFoundError, match=str(url)):
            ss.load_checkpoint(url)


# -- atomic writes ------------------------------------------------------------------------------------------------------

_ENDLESS = """
import os, sys, threading, time, torch
import shardstream as ss

def kill():
    folder = sys.argv[1]
    while not any(os.path.getsize(f"{folder}/{name}") > 100_000 for name in os.listdir(folder) if ".part-" in name):
        time.sleep(0.001)
    os.kill(os.getpid(), 9)

threading.Thread(target=kill, daemon=True).start()
ss.save_checkpoint(sys.argv[1], step=2, keep=1, value=[torch.zeros(50_000) for _ in range(800)])
"""


@pytest.mark.slow
def test_kill_during_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ss.save_checkpoint(folder, step=1, value="whole")
    done = subprocess.run([sys.executable, "-c", _ENDLESS, folder], check=False, timeout=120)
    assert done.returncode == -9
    assert len(names(folder)) == 2, "nothing was under way"
    assert ss.load_checkpoint(folder) == {"value": "whole", "step": 1}
    ss.save_checkpoint(folder, step=3, keep=1)
    assert names(folder) == ["step-00000003.pt"], "what the killed one left is in the way"


@pytest.mark.slow
def test_full_disk_is_reported(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path, step=1, value="whole")
    code = (
        "import resource, signal, sys, torch, shardstream as ss\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "ss.save_checkpoint(sys.argv[1], step=2, value=torch.zeros(1_000_000))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert "StorageError: the disk is full" in done.stderr
    assert ss.load_checkpoint(tmp_path)["step"] == 1
    assert names(str(tmp_path)) == ["step-00000001.pt"]


# -- refused values ----------------------------------------------------------------------------------------------------------


class Own:
    def state_dict(self) -> dict[str, Any]:
        return {"lr": [np.float64(0.1)]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Own(), r"value\['lr'\]\[0\] is of numpy.float64"),
        (np.zeros(3), r"value is of numpy.ndarray.*torch.from_numpy"),
        ({"a": print}, r"value\['a'\] is of builtins.builtin_function_or_method"),
        ({Path("a"): 1}, r"a key of value is of pathlib"),
        (collections.defaultdict(int), r"value is of collections.defaultdict"),
        (nn.Linear, "value is of builtins.type"),
    ],
)
def test_values_that_need_code_to_load_are_refused_before_saving(
    value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        ss.save_checkpoint(tmp_path / "run", step=1, value=value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("run", {}, "needs step="),
        ("run", {"step": -1}, "step must be at least 0"),
        ("run", {"step": 1, "keep": 0}, "keep must be at least 1"),
        ("run.pt", {"step": 1, "keep": 1}, "keep= needs a folder"),
    ],
)
def test_invalid_arguments_are_refused(
    name: str, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        ss.save_checkpoint(tmp_path / name, **options)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickle_with_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"value": Bomb()}, "bad.pt")
    with pytest.raises(ss.errors.StateError, match=r"if you trust its source.*\[in bad\.pt\]"):
        ss.load_checkpoint("bad.pt")
    assert not Path("exploded").exists()


def test_every_damaged_byte_of_the_values_is_detected(tmp_path: Path) -> None:
    url = tmp_path / "one.pt"
    ss.save_checkpoint(url, value=torch.arange(100))
    data = url.read_bytes()
    start = data.index(torch.arange(100).numpy().tobytes())
    for place in range(start, start + 800, 97):
        url.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(ss.errors.StateError, match=r"damaged.*checksum.*one\.pt"):
            ss.load_checkpoint(url)
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        url.write_bytes(data[:size])
        with pytest.raises(ss.errors.StateError, match=r"damaged, truncated.*one\.pt"):
            ss.load_checkpoint(url)


@pytest.mark.parametrize("is_packed", [True, False], ids=["compressed", "overlapping"])
def test_checkpoint_that_unpacks_to_more_than_it_holds_is_refused(
    tmp_path: Path, is_packed: bool
) -> None:
    url = ss.save_checkpoint(tmp_path / "one.pt", weight=torch.zeros(1 << 16))
    with zipfile.ZipFile(url) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    kind = zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(url, "w", kind) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        if not is_packed:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            for number in range(9):
                again = copy.copy(largest)
                again.filename = f"{number}"
                archive.filelist.append(again)
    with pytest.raises(ss.errors.StateError, match=r"damaged.*bytes in a file of.*one\.pt"):
        ss.load_checkpoint(url)


def test_damaged_latest_checkpoint_is_not_skipped(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path, step=1)
    (tmp_path / "step-00000002.pt").write_bytes(b"cut")
    with pytest.raises(ss.errors.StateError, match=r"load an older one.*step-00000002"):
        ss.load_checkpoint(tmp_path)


def test_file_with_other_content_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ss.errors.StateError, match="holds a list"):
        ss.load_checkpoint(tmp_path / "list.pt")


# -- S3 ------------------------------------------------------------------------------------------------------------------------


def test_checkpoint_on_s3_round_trips(
    bucket: str, s3_env: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(
        0
    )  # before: the first optimizer of a process imports what makes a folder
    monkeypatch.setattr("tempfile.tempdir", "/no/local/file")
    big = torch.arange(5_000_000)  # 40 MB: several parts, several ranges
    for step in (1, 2, 3):
        ss.save_checkpoint(
            f"{bucket}/run/", step=step, keep=2, model=model, optimizer=optimizer, big=big
        )
    assert names(f"{bucket}/run") == ["step-00000002.pt", "step-00000003.pt"]
    found = ss.load_checkpoint(f"{bucket}/run")
    assert torch.equal(found["big"], big)
    assert found["model"].keys() == model.state_dict().keys()
    with pytest.raises(ss.errors.NotFoundError, match="none"):
        ss.load_checkpoint(f"{bucket}/none/")


@pytest.mark.slow
def test_faulty_server_gives_a_complete_checkpoint_or_an_error(
    bucket: str, s3_env: None, shaped_s3: ShapedS3
) -> None:
    options = shaped_s3.chaos.storage_options
    value = torch.arange(1_500_000)  # 12 MB: two ranges
    ss.save_checkpoint(f"{bucket}/run", step=0, value=value)
    for seed in range(3):
        shaped_s3.control(
            f"/set?profile=chaos&slow=0.2&reset=0.1&trunc=0.1&short=0.1&stall=0&seed={seed}"
        )
        try:
            ss.save_checkpoint(f"{bucket}/run", step=seed + 1, value=value, storage_options=options)
            error_text = None
        except ss.errors.StorageError as error:
            error_text = str(error)
        there = f"step-{seed + 1:08d}.pt" in names(f"{bucket}/run")
        assert there or error_text is not None, "it was said to be saved, and is not there"
        assert torch.equal(ss.load_checkpoint(f"{bucket}/run")["value"], value)
        try:
            found = ss.load_checkpoint(f"{bucket}/run", storage_options=options)
        except ss.errors.StorageError:
            continue
        assert torch.equal(found["value"], value)


@pytest.mark.slow
def test_kill_during_upload_leaves_the_previous_checkpoint(bucket: str, s3_env: None) -> None:
    ss.save_checkpoint(f"{bucket}/run", step=1, value="whole")
    code = (
        "import os, sys, threading, torch, shardstream as ss\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()\n"
        "for step in range(2, 100): ss.save_checkpoint(sys.argv[1], step=step, value=torch.zeros(8_000_000))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{bucket}/run"], check=False, timeout=120)
    assert done.returncode == -9
    for url in fsspec.filesystem("s3").ls(f"{bucket}/run"):
        assert "value" in ss.load_checkpoint(f"s3://{url}")
