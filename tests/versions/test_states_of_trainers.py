"""Trainers that count batches refuse a state of an earlier version where epochs of the present one have other lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_datasets import numbered

pytestmark = pytest.mark.slow
# In processes of their own, because trainers set process-wide state and warn about unrelated things.
SETUP = """
import glob, json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import torch
import shardstream as ss

def dataset():
    return ss.ShardDataset(url, shuffle=True).decode()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, cls, labels=None):
        self.seen.append(cls.tolist())
        return {"loss": self.layer(cls[:, None].float()).mean(), "logits": cls}
"""
RUN = """
found = []
for url, out, deleted in json.loads(sys.argv[1]):
    first = fit(3)
    ss.delete(url, numbers=deleted)
    try:
        found.append([first, fit(1000)])
    except ss.errors.StateError as error:
        found.append([first, str(error)])
print(json.dumps(found))
"""
LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Model(lightning.LightningModule):
    def __init__(self, stop):
        super().__init__()
        self.net, self.stop = Net(), stop

    def training_step(self, batch, index):
        if self.trainer.global_step == self.stop:
            raise InterruptedError
        return self.net(batch["cls"])["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

def fit(stop):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(dirpath=out, every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[saving], limit_val_batches=0, **quiet)
    model, checkpoint = Model(stop), [*glob.glob(f"{out}/*step=3.ckpt"), None][0]
    try:
        trainer.fit(model, ss.ShardLoader(dataset(), 4), ckpt_path=checkpoint, weights_only=False)
    except InterruptedError:
        pass
    return model.net.seen
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from shardstream.integrations.hf import LoaderStateCallback, TrainerLoader

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_save = control.should_training_stop = True

def fit(stop):
    def rows(sample):
        return {"cls": int(sample["cls"]), "labels": 0}

    loader = TrainerLoader(ss.ShardLoader(dataset().map(rows), 4))
    class Own(Trainer):
        def get_train_dataloader(self):
            return loader
    arguments = TrainingArguments(output_dir=out, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        save_strategy="no", num_train_epochs=2, per_device_train_batch_size=4, remove_unused_columns=False)
    stopping = [Stop()] if stop == 3 else []
    trainer = Own(Net(), arguments, callbacks=[*stopping, LoaderStateCallback()])
    trainer.train(resume_from_checkpoint=stop != 3)
    return trainer.model.seen
"""


@pytest.mark.parametrize(("name", "program"), [("lightning", LIGHTNING), ("transformers", TRAINER)])
def test_trainers_finish_the_epoch_of_an_earlier_version_or_refuse(
    name: str, program: str, tmp_path: Path
) -> None:
    pytest.importorskip(name)

    runs = [
        (
            numbered(tmp_path / folder, 62, 9, columns=["cls"]),
            str(tmp_path / f"{folder}-out"),
            deleted,
        )
        for folder, deleted in (("same", [5]), ("fewer", [*range(30)]))
    ]
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program + RUN, json.dumps(runs)],
        capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (first, rest), (_, refused) = json.loads(done.stdout.splitlines()[-1])
    # The same: 16 batches before and after.
    read = [number for batch in [*first, *rest][:16] for number in batch]
    assert sorted({*read, 5}) == list(range(62))
    assert len(read) in (61, 62)
    assert sorted(number for batch in rest[13:] for number in batch) == sorted({*range(62)} - {5})
    assert "16 batches" in refused
