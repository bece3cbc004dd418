"""Ray Train on a real local cluster: every sample once an epoch, also after a killed worker and on other numbers of workers.

Every worker appends a line of JSON a step to a file of its attempt and rank; the tests compare these lines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

import shardstream as ss
from tests.ray.cluster import MARKS
from tests.small_datasets import numbered

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster", "fast_control")]

SAMPLES = 101  # the last step of an epoch is short, and uneven on two ranks
GLOBAL_BATCH = 8
SAVE_EVERY = 2
Steps = dict[tuple[int, int], dict[int, dict[int, list[int]]]]  # ids by position, attempt and rank


@pytest.fixture
def fast_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's controller takes one report of a worker each time it looks, by default every 2 s."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    # How long it waits for the places on a node that has just died, by default 60 s.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("train") / "data", SAMPLES)


def train(config: dict[str, Any]) -> None:
    """Train as a user would: the order of samples depends on GLOBAL_BATCH only, not on the number of workers."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    dataset = ss.ShardDataset(
        config["url"],
        shuffle=True,
        seed=1,
        order=ss.OrderOptions(lanes=4, microbatch=GLOBAL_BATCH // 2, remainder="keep"),
    )
    assert dataset.placement == ss.Placement(rank, world_size)
    loader = ss.ShardLoader(
        dataset.decode().to_tuple("cls"),
        batch_size=GLOBAL_BATCH // world_size,
        num_workers=config.get("num_workers", 0),
    )
    model = torch.nn.Linear(1, 1)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved_in:
            saved = ss.load_checkpoint(saved_in)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    attempt = [time.time_ns()]
    dist.broadcast_object_list(attempt)
    log = Path(config["out"], f"{attempt[0]}-{world_size}-{rank}.jsonl")
    attempts = len(list(log.parent.glob(f"*-{rank}.jsonl")))
    steps = 0
    for epoch in range(loader.epoch, config["epochs"]):
        loader.set_epoch(epoch)
        for (ids,) in loader:
            train_step(model, ids)
            position = [epoch, loader.state_dict()["consumed"]]
            with log.open("a") as lines:
                lines.write(json.dumps([*position, ids.tolist()]) + "\n")
            steps += 1
            if steps % SAVE_EVERY == 0:
                report(rank, model=model, loader=loader, step=steps)
            if not attempts and [rank, *position] == config.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if steps == config.get("stop"):
                return
            if [attempts, steps] in config.get("hangs", []):
                time.sleep(300)  # Ray ends it


def train_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Synchronise the ranks as DDP does, without the 2 CPU seconds of its imports."""
    model(ids[:, None].float()).mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def report(rank: int, **objects: Any) -> None:
    """Report with a checkpoint; the state of the loader is the same on all ranks, so one saves it."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = None
        if rank == 0:
            ss.save_checkpoint(scratch, **objects)
            checkpoint = ray.train.Checkpoint.from_directory(scratch)
        ray.train.report({"step": objects["step"]}, checkpoint=checkpoint)


def fit(
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    scaling: ray.train.ScalingConfig,
    *,
    storage: Path,
    max_failures: int = 0,
    **options: Any,
) -> ray.train.Result:
    """Run a trainer; a run in a storage with checkpoints continues after the last of them."""
    trainer = ray.train.torch.TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=scaling,
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
        **options,
    )
    return trainer.fit()


def workers(number: int) -> ray.train.ScalingConfig:
    return ray.train.ScalingConfig(num_workers=number, resources_per_worker={"CPU": 0.5})


def read_steps(out: Path) -> Steps:
    """Return the samples of each step, and check that attempts that made the same step had the same samples."""
    steps: Steps = defaultdict(lambda: defaultdict(dict))
    world_sizes = {}
    for log in out.glob("*.jsonl"):
        attempt, world_size, rank = map(int, log.stem.split("-"))
        world_sizes[attempt] = world_size
        for line in log.read_text().splitlines():
            epoch, consumed, ids = json.loads(line)
            steps[epoch, consumed][attempt][rank] = ids
    for position, attempts in steps.items():
        last = max(attempts)
        assert len(attempts[last]) == world_sizes[last], position
        for attempt, ranks in attempts.items():
            if world_sizes[attempt] == world_sizes[last]:
                assert ranks.items() <= attempts[last].items(), position
            elif len(ranks) == world_sizes[attempt]:
                assert Counter(flat(ranks)) == Counter(flat(attempts[last])), position
    return steps


def flat(ranks: dict[int, list[int]]) -> list[int]:
    return [number for ids in ranks.values() for number in ids]


def check_epochs(steps: Steps, epochs: int) -> None:
    """Check that the steps that count, the last of each position, have every sample once an epoch."""
    for epoch in range(epochs):
        seen = [
            number
            for (of, _), attempts in steps.items()
            for number in flat(attempts[max(attempts)])
            if of == epoch
        ]
        assert sorted(seen) == [*range(SAMPLES)]
    assert {epoch for epoch, _ in steps} == {*range(epochs)}


def out_folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.slow
def test_killed_worker_and_other_numbers_of_workers_continue_exactly(
    folder: str, tmp_path: Path
) -> None:
    kill = [1, 0, 11 * GLOBAL_BATCH]  # rank 1 in epoch 0, after the third step of two workers
    config = {"url": folder, "out": str(out_folder(tmp_path)), "epochs": 2, "num_workers": 1}
    runs: list[tuple[int, dict[str, Any]]] = [(1, {"stop": 8}), (2, {"kill": kill})]
    for number, options in runs:
        result = fit(train, config | options, workers(number), storage=tmp_path, max_failures=1)
        assert result.error is None
    steps = read_steps(tmp_path / "out")
    replayed = [position for position, attempts in steps.items() if len(attempts) > 1]
    assert (0, 11 * GLOBAL_BATCH) in replayed
    assert len(replayed) < 5  # from a checkpoint, not from the start
    assert {len(ids) for ids in batches_of(steps, workers=1)} == {GLOBAL_BATCH}
    assert {len(ids) for ids in batches_of(steps, workers=2)} == {GLOBAL_BATCH // 2, 2, 3}
    check_epochs(steps, 2)


def batches_of(steps: Steps, workers: int) -> Iterator[list[int]]:
    """Yield the batches of steps of this number of workers."""
    for attempts in steps.values():
        for ranks in attempts.values():
            if len(ranks) == workers:
                yield from ranks.values()


@contextmanager
def second_node() -> Iterator[None]:
    """Join a node with a place for one worker to the cluster; kill it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="ss-", ignore_cleanup_errors=True) as scratch:
        address = ray.get_runtime_context().gcs_address
        command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={address}"]
        # In its own folder: in the usual one it would tell every later ray.init() to join this cluster.
        command += [f"--temp-dir={scratch}", "--object-store-memory=100000000", "--num-cpus=1"]
        command += ['--resources={"place": 1}', "--block"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
        ) as node:
            try:
                yield
            finally:
                os.killpg(node.pid, signal.SIGKILL)  # SIGTERM would announce it 30 s before


def wait_for_step(out: Path, pattern: str) -> None:
    """Wait until a rank has made the step after its first checkpoint."""
    deadline = time.monotonic() + 240
    while not any(len(log.read_text().splitlines()) > SAVE_EVERY for log in out.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_elastic_workers_follow_the_nodes(folder: str, tmp_path: Path) -> None:
    """A node joins and leaves in the middle of a run: 1, 2 and again 1 worker."""
    out = out_folder(tmp_path)
    config = {"url": folder, "out": str(out), "epochs": 2}
    config |= {"hangs": [[0, SAVE_EVERY + 1], [1, SAVE_EVERY + 1]]}  # until the nodes change
    scaling = ray.train.ScalingConfig(
        num_workers=(1, 2),
        resources_per_worker={"CPU": 0.5, "place": 1},
        elastic_resize_monitor_interval_s=1,
    )

    def change_nodes() -> None:
        wait_for_step(out, "*-1-0.jsonl")
        with second_node():
            wait_for_step(out, "*-2-1.jsonl")

    with ThreadPoolExecutor() as pool:
        changes = pool.submit(change_nodes)
        result = fit(train, config, scaling, storage=tmp_path, max_failures=-1)
        changes.result()
    assert result.error is None
    attempts = sorted(tuple(map(int, log.stem.split("-"))) for log in out.glob("*-0.jsonl"))
    sizes = [world_size for _, world_size, _ in attempts]
    assert sizes[:2] == [1, 2]
    assert sizes[-1] == 1  # Ray may try two once more before it sees that the node is gone
    check_epochs(read_steps(out), 2)
