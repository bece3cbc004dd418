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

folder, out, way = sys.argv[1:]

def make_loader():
    dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("npy", "cls")
    dataset = dataset.select(lambda sample: True) if "unknown" in way else dataset
    return ss.ShardLoader(dataset, batch_size=8)

loader = make_loader()
whole = [[ids.tolist() for _, ids in loader] for _ in range(3)]
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

limits = {"limited": {"limit_train_batches": 5}}

def fit(checkpoint=None):
    saving = ModelCheckpoint(dirpath=out, every_n_train_steps=5, save_top_k=-1)
    model = Model()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[saving], limit_val_batches=0, **quiet, **limits.get(way, {})
    )
    loaders = {"one": make_loader(), "two": make_loader()} if way == "zipped" else make_loader()
    try:
        trainer.fit(model, loaders, ckpt_path=checkpoint, weights_only=False)
    except InterruptedError:
        pass
    return model.seen

logging.disable(logging.CRITICAL)
stop = None
uninterrupted = fit()
resumed = {step: fit(glob.glob(f"{out}/*step={step}.ckpt")[0]) for step in (5, 10, 15) if step < len(uninterrupted)}
print(json.dumps([uninterrupted, resumed, whole]))
"""

LENGTHS = {"whole": 12, "limited": 5, "zipped": 12, "unknown": 12}
"""Batches of an epoch of Lightning."""


@pytest.mark.slow
@pytest.mark.parametrize("way", LENGTHS)
def test_lightning_reads_another_order_in_each_epoch_and_resumes(way: str, tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 90, 20)
    program = SETUP + LIGHTNING
    command: list[Any] = [sys.executable, "-c", program, folder, tmp_path / "out", way]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen, resumed, whole = json.loads(done.stdout.splitlines()[-1])
    length = LENGTHS[way]
    batches = [batch * (1 + (way == "zipped")) for epoch in whole for batch in epoch[:length]]
    assert seen == batches
    assert resumed
    for step, rest in resumed.items():
        assert rest == seen[int(step) :], step
