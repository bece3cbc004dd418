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

folder, out = sys.argv[1:]

def make_loader():
    dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("npy", "cls")
    return ss.ShardLoader(dataset, batch_size=8)

whole = [ids.tolist() for _, ids in make_loader()]
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
        self.seen.append(batch[1].tolist())
        return self.layer(batch[0].float().flatten(1)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

def fit(checkpoint=None):
    saving = ModelCheckpoint(dirpath=out, every_n_train_steps=5, save_top_k=-1)
    model = Model()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[saving], **quiet)
    try:
        trainer.fit(model, make_loader(), ckpt_path=checkpoint, weights_only=False)
    except InterruptedError:
        pass
    return model.seen

logging.disable(logging.CRITICAL)
stop = 7
seen = fit()[:5]
stop = None
seen += fit(glob.glob(out + "/*step=5.ckpt")[0])
print(json.dumps([seen, whole]))
"""


@pytest.mark.slow
def test_lightning_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 90, 20)
    program = SETUP + LIGHTNING
    command: list[Any] = [sys.executable, "-c", program, folder, tmp_path / "out"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen, whole = json.loads(done.stdout.splitlines()[-1])
    assert seen == whole
    assert len(whole) == 12
