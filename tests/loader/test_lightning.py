"""Lightning saves and restores a loader's state. (Accelerate and the Hugging Face Trainer: tests/distributed.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.small_datasets import numbered

# In a separate process, because Lightning sets process-wide state and warns about unrelated things.
SETUP = """
import glob, json, logging, sys, warnings
warnings.simplefilter("ignore")
import torch
import shardstream as ss

folder, results, *ways = sys.argv[1:]

def make_loader():
    dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("npy", "cls")
    dataset = dataset.shuffle(1) if "unknown" in way else dataset
    return ss.ShardLoader(dataset, batch_size=8)

def plain_loader():
    dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("npy", "cls")
    return torch.utils.data.DataLoader(dataset, batch_size=8)
"""
LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(6, 1), []

    def training_step(self, batch, index):
        if self.trainer.global_step == stop:
            raise InterruptedError
        first = batch["one"] if way == "zipped" else batch
        self.seen.append(first[1].tolist() + (batch["two"][1].tolist() if way == "zipped" else []))
        return self.layer(first[0].float().flatten(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

    def train_dataloader(self):
        return make_loader() if way == "reloaded" else plain_loader()

reloading = {"reload_dataloaders_every_n_epochs": 1}
limits = {"limited": {"limit_train_batches": 5}, "reloaded": reloading, "reloaded plain": reloading}

def fit(checkpoint=None):
    saving = ModelCheckpoint(dirpath=out, every_n_train_steps=5, save_top_k=-1)
    model = Model()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[saving], limit_val_batches=0, **quiet, **limits.get(way, {})
    )
    loaders = {"one": make_loader(), "two": make_loader()} if way == "zipped" else make_loader()
    loaders = None if "reloaded" in way else loaders
    try:
        trainer.fit(model, loaders, ckpt_path=checkpoint, weights_only=False)
    except InterruptedError:
        pass
    return model.seen

logging.disable(logging.CRITICAL)
stop, found = None, {}
for way in ways:
    out, loader = f"{results}/{way}", make_loader()
    whole = [[ids.tolist() for _, ids in loader] for _ in range(3)]
    uninterrupted = fit()
    steps = () if way == "reloaded plain" else (5, 10, 15)  # has no state
    resumed = {step: fit(glob.glob(f"{out}/*step={step}.ckpt")[0]) for step in steps if step < len(uninterrupted)}
    found[way] = [uninterrupted, resumed, whole]
print(json.dumps(found))
"""

LENGTHS = {
    "whole": 12,
    "limited": 5,
    "zipped": 12,
    "unknown": 12,
    "reloaded": 12,
    "reloaded plain": 12,
}
"""Batches of an epoch of Lightning."""


@pytest.mark.slow
def test_lightning_reads_another_order_in_each_epoch_and_resumes(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 90, 20)
    program = SETUP + LIGHTNING
    command: list[Any] = [sys.executable, "-c", program, folder, tmp_path / "out", *LENGTHS]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for way, (seen, resumed, whole) in json.loads(done.stdout.splitlines()[-1]).items():
        length = LENGTHS[way]
        if way == "reloaded plain":
            # Lightning begins an iteration twice, and a plain loader counts both
            orders = [seen[first : first + length] for first in (0, length, 2 * length)]
            assert orders[0] != orders[1] != orders[2] != orders[0]
            continue
        batches = [batch * (1 + (way == "zipped")) for epoch in whole for batch in epoch[:length]]
        assert seen == batches, way
        assert resumed, way
        for step, rest in resumed.items():
            assert rest == seen[int(step) :], (way, step)


PLAIN = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
import lightning
import torch
from torch.utils.data import DataLoader
import shardstream as ss

folder, out, _ = sys.argv[1:]
logging.disable(logging.CRITICAL)

def shard_loader(workers):
    return ss.ShardLoader(dataset(), 8, num_workers=workers, collate_fn=collate)

def plain_loader(num_workers, **options):
    return DataLoader(dataset(), 8, num_workers=num_workers, collate_fn=collate, **options)

def dataset():
    return ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=8)).decode().to_tuple("cls")

def collate(samples):
    return torch.tensor([number for (number,) in samples])

class Model(lightning.LightningModule):
    def __init__(self, make=None):
        super().__init__()
        self.layer, self.seen, self.make = torch.nn.Linear(1, 1), [[]], make

    def train_dataloader(self):  # where Lightning keeps the arguments of the loader
        return self.make()

    def training_step(self, batch, index):
        self.seen[-1].append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def on_train_epoch_end(self):
        self.seen.append([])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

def fit(make, in_hook, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, enable_checkpointing=False, **quiet, **options
    )
    model = Model(make)
    trainer.fit(model) if in_hook else trainer.fit(model, make())
    return model.seen[:-1]

def main():
    ways = {
        "shard loader": lambda: shard_loader(0),
        "with workers": lambda: shard_loader(2),
        "plain loader": lambda: plain_loader(0),
        "with persistent workers": lambda: plain_loader(2, persistent_workers=True),
    }
    found = {
        way: {"overfit": fit(make, False, overfit_batches=2), "whole": fit(make, True)}
        for way, make in ways.items()
    }
    in_hook = {"overfit": fit(ways["shard loader"], True, overfit_batches=2)}
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    found["spawned"] = {"overfit": fit(lambda: plain_loader(**spawned), True, overfit_batches=2)}
    print(json.dumps(found | {"made in a hook": in_hook}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_lightning_overfits_the_same_batches_and_else_reads_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a file, for spawned workers
    program.write_text(PLAIN)
    folder = numbered(tmp_path / "set", 80, 20)
    command: list[Any] = [sys.executable, program, folder, tmp_path / "out", ""]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for way, found in json.loads(done.stdout.splitlines()[-1]).items():
        epochs = found["overfit"]
        assert [len(epoch) for epoch in epochs] == [2, 2, 2], way
        assert epochs[0] == epochs[1] == epochs[2], way
        if whole := found.get("whole"):
            orders = [[number for batch in epoch for number in batch] for epoch in whole]
            assert [sorted(order) for order in orders] == [list(range(80))] * 3, way
            assert orders[0] != orders[1] != orders[2], way
