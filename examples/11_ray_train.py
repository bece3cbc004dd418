"""Train with Ray Train: a ``ShardLoader`` in every worker, and its position in Ray's checkpoints.

You learn: a ``ShardLoader`` in the training function finds its rank; nothing else is needed. Save ``loader.state_dict()`` with every
``ray.train.report``: if a worker dies, or the run goes on with another number of workers, training continues with the next sample. For
that, the order of samples must not depend on the number of workers: set ``lanes`` and ``microbatch`` of ``ss.OrderOptions``, and divide one global batch.
The last part trains on rows of Ray Data (``ss.ray.read``), for preprocessing on other machines: Ray hands each worker the rows that
are ready first, so which worker gets which row differs between runs, and a resume starts the epoch again.

The example starts Ray on this machine; on a cluster, ``ray.init()`` connects to it. It needs the extra: pip install ".[ray]" in a clone.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

# Ray Train takes one report of a worker each time it looks, every 2 s. Training reports every few minutes; this example each 5 steps.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"

import numpy as np
import ray
import ray.data
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

import shardstream as ss

SAMPLES = 400
EPOCHS = 2
MAX_WORKERS = 2
GLOBAL_BATCH = 16


def train(config: dict[str, Any]) -> None:
    """Run one worker of Ray Train."""
    context = ray.train.get_context()
    dataset = ss.ShardDataset(
        config["url"],
        shuffle=True,
        seed=0,
        order=ss.OrderOptions(lanes=4, microbatch=GLOBAL_BATCH // MAX_WORKERS),
    )
    loader = ss.ShardLoader(
        dataset.decode().to_tuple("__key__", "npy", "cls"),
        batch_size=GLOBAL_BATCH // context.get_world_size(),
        num_workers=1,
    )
    model = ray.train.torch.prepare_model(nn.Linear(4, 2))
    bare_model = getattr(model, "module", model)  # without DistributedDataParallel
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = ss.load_checkpoint(folder)
        bare_model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])

    log = Path(config["log"], f"{context.get_world_size()}-{context.get_world_rank()}.txt")
    step = 0
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for keys, values, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(values), labels)
            loss.backward()
            optimizer.step()
            with log.open("a") as lines:  # only to show what was read
                lines.writelines(f"{epoch} {key}\n" for key in keys)
            step += 1
            if step % 5 == 0:
                report(loss.item(), step=step, model=bare_model, optimizer=optimizer, loader=loader)
            if step == config["stop_after"]:
                return


def report(loss: float, **objects: Any) -> None:
    """Report with a checkpoint; the state of the loader is the same on every rank, so one saves it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            ss.save_checkpoint(folder, **objects)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)


def train_on_rows(config: dict[str, Any]) -> None:
    """Run one worker of Ray Train that gets its rows from Ray Data."""
    rows = ray.train.get_dataset_shard("train")
    keys: list[str] = []
    for batch in rows.iter_torch_batches(batch_size=8, collate_fn=ss.ray.Collate()):
        keys += batch["__key__"]
    Path(config["log"], f"rows-{ray.train.get_context().get_world_rank()}.txt").write_text(
        "\n".join(keys)
    )
    ray.train.report({"rows": len(keys)})


def fit(function: Any, num_workers: int, config: dict[str, Any], **options: Any) -> None:
    """Run a training; in the same storage and with the same name it continues after the last checkpoint."""
    TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": 0.5}
        ),
        run_config=ray.train.RunConfig(
            name=function.__name__,
            storage_path=f"{config['log']}/storage",
            failure_config=ray.train.FailureConfig(max_failures=1),  # replaces dead workers
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
        **options,
    ).fit()


def main() -> None:
    """Train on two workers, continue on one, and train on rows of Ray Data."""
    with tempfile.TemporaryDirectory() as scratch:
        rng = np.random.default_rng(0)
        with ss.ShardWriter(f"{scratch}/data", max_samples=50) as writer:
            for number in range(SAMPLES):
                values = rng.standard_normal(4).astype(np.float32)
                writer.write({"__key__": f"{number:04d}", "npy": values, "cls": int(values[0] > 0)})

        ray.init(
            num_cpus=2,
            object_store_memory=100_000_000,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=f"{scratch}/ray",
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            config = {"url": f"{scratch}/data", "log": scratch, "stop_after": 35}
            fit(train, 2, config)  # ends in the middle of the second epoch
            fit(train, 1, config | {"stop_after": None})
            seen = [
                line
                for log in Path(scratch).glob("?-?.txt")
                for line in log.read_text().splitlines()
            ]
            every = [
                f"{epoch} {number:04d}" for epoch in range(EPOCHS) for number in range(SAMPLES)
            ]
            assert sorted(seen) == every
            ends = [
                len(log.read_text().splitlines()) for log in sorted(Path(scratch).glob("?-?.txt"))
            ]
            print(f"one worker took {ends[0]} samples, after two had taken {ends[1]} and {ends[2]}")
            print(f"each of {SAMPLES} samples came once in each of {EPOCHS} epochs")

            rows = ss.ray.read(ss.ShardDataset(f"{scratch}/data", shuffle=True).decode())
            fit(train_on_rows, 2, {"log": scratch}, datasets={"train": rows})
            parts = [
                Path(scratch, f"rows-{rank}.txt").read_text().splitlines() for rank in range(2)
            ]
            assert sorted(parts[0] + parts[1]) == [f"{number:04d}" for number in range(SAMPLES)]
            print(f"Ray Data gave the two workers {len(parts[0])} and {len(parts[1])} rows")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
