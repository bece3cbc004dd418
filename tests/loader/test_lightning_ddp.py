"""Lightning's own launcher of two ranks: each sample once an epoch, and a resume from its checkpoint on every rank.

The launcher starts the program again for the second rank, which then knows LOCAL_RANK and WORLD_SIZE, but not RANK; and
torch.distributed is initialised inside of ``fit``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardstream.testing import make_shards

SAMPLES = 102
PROGRAM = """
import glob, json, sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
import shardstream as ss

folder, out, way, checkpoint = sys.argv[1:]

def make_loader():
    dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("cls")
    return ss.ShardLoader(dataset, batch_size=4, num_workers=1)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch, index):
        self.seen.append([self.trainer.current_epoch, batch[0].tolist()])
        return self.layer(batch[0].float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

class HookModel(Model):
    def train_dataloader(self):
        return make_loader()

saving = ModelCheckpoint(dirpath=out, every_n_train_steps=5, save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[saving],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
model = HookModel() if way == "hook" else Model()
try:
    trainer.fit(
        model, None if way == "hook" else make_loader(), weights_only=False,
        ckpt_path=glob.glob(f"{out}/*step={checkpoint}.ckpt")[0] if checkpoint else None,
    )
finally:
    with open(f"{out}/seen-{trainer.global_rank}.json", "w") as stream:
        json.dump(model.seen, stream)
"""

Seen = list[list[tuple[int, list[int]]]]


def fit(folder: Path, way: str, *, checkpoint: int | str = "") -> Seen:
    """Train on two ranks; return epoch and samples of each step of each rank."""
    out = folder / "out"
    for path in out.glob("seen-*.json"):
        path.unlink()
    out.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)  # the launcher starts it again by its name
    command: list[Any] = [sys.executable, "program.py", folder / "data", out, way, str(checkpoint)]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    done = subprocess.run(
        command, env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Starting with 2 processes" in done.stderr, done.stderr[-3000:]
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_lightning_see_each_sample_once_and_resume(tmp_path: Path) -> None:
    make_shards(tmp_path / "data", samples=SAMPLES, per_shard=15)
    whole = fit(tmp_path, "loader")
    assert {len(rank) for rank in whole} == {3 * 13}
    for epoch in range(3):
        found = Counter(n for rank in whole for at, batch in rank if at == epoch for n in batch)
        assert found == dict.fromkeys(range(SAMPLES), 1)
    for rank in whole:
        assert len({str([batch for at, batch in rank if at == epoch]) for epoch in range(3)}) == 3
    # In the middle of the second epoch; and of the first, so that the hook makes the loader of a whole epoch, too.
    for way, step in (("loader", 20), ("hook", 5)):
        assert fit(tmp_path, way, checkpoint=step) == [rank[step:] for rank in whole]
