"""DeepSpeed's checkpoints hold the state of a loader. Skipped where it is not installed; it compiles an operator at its first start."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardstream.testing import make_shards

PROGRAM = """
import json, sys
import deepspeed, torch
import shardstream as ss

folder, out, file = sys.argv[1:]
dataset = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("cls")
loader = ss.ShardLoader(dataset, batch_size=4)  # made before the ranks are known
deepspeed.init_distributed(dist_backend="gloo")

def read(loader, steps):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 4}
    )
    if steps is None:
        _, client_state = engine.load_checkpoint(out)
        loader.load_state_dict(client_state["loader"])
    seen = []
    for (labels,) in loader:
        seen.append(labels.tolist())
        engine.backward(engine(labels.float()[:, None]).mean())
        engine.step()
        if len(seen) == steps:
            engine.save_checkpoint(out, client_state={"loader": loader.state_dict()})
            break
    return seen

seen = [read(loader, 5), read(ss.ShardLoader(dataset, batch_size=4), None)]
with open(file, "w") as stream:
    json.dump(seen, stream)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no deepspeed")
def test_deepspeed_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    url = make_shards(tmp_path / "data", samples=50, per_shard=15)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, tmp_path / "run", tmp_path / "seen.json"],
        env=os.environ | ranks | {"DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, rest = json.loads((tmp_path / "seen.json").read_text())
    assert len(first) == 5
    assert sorted(number for batch in first + rest for number in batch) == list(range(50))
