"""A training that goes on without a sample from the checkpoint before its first use is one that never had it, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstream as ss
from shardstream.testing import make_shards

# No batch here has refused samples only.
pytestmark = pytest.mark.filterwarnings("ignore:where all samples of a batch were bad")
N, RANKS, BATCH, EPOCHS, SPIKE = 120, 2, 4, 2, 71


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples of which one is a thousand times as large as the others."""
    random = np.random.default_rng(0)
    values = random.standard_normal((N, 6), dtype=np.float32)
    values[SPIKE] *= 1000
    samples = [{"__key__": f"{i:03d}", "cls": i, "npy": values[i]} for i in range(N)]
    return make_shards(tmp_path_factory.mktemp("training"), samples=samples, per_shard=25)


def shaken(sample: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return sample | {"npy": sample["npy"] + generator.standard_normal(6, dtype=np.float32)}


def is_kept(sample: dict[str, Any], without: tuple[int, ...]) -> bool:
    return sample["cls"] not in without


@dataclass
class Training:
    """A small training of two ranks in one process, with a checkpoint after each five steps."""

    folder: str
    run: Path
    without: tuple[int, ...] = ()
    epochs: int = EPOCHS
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.loaders = [self.loader_of(rank) for rank in range(RANKS)]
        self.step = 0

    def loader_of(self, rank: int) -> ss.ShardLoader:
        place = ss.Placement(rank, RANKS)
        dataset = ss.ShardDataset(self.folder, shuffle=True, seed=1, placement=place).decode()
        # The arguments of a partial are part of the digest, variables of a lambda are not.
        dataset = dataset.select(partial(is_kept, without=self.without))
        return ss.ShardLoader(dataset.map(shaken, rng=True), BATCH)

    def load(self, url: str) -> None:
        saved = ss.load_checkpoint(url)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        for loader in self.loaders:
            loader.load_state_dict(saved["loader"])

    def train(self) -> Training:
        self.save()
        for epoch in range(self.loaders[0].epoch, self.epochs):
            for loader in self.loaders:
                loader.set_epoch(epoch)
            for batches in zip(*self.loaders, strict=True):
                self.optimizer.zero_grad()
                loss = torch.stack([self.model(batch["npy"]).square().mean() for batch in batches])
                loss.mean().backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.losses.append(float(loss.detach().max()))
                self.step += 1
                if self.step % 5 == 0:
                    self.save()
        return self

    def save(self) -> None:
        model, optimizer, loader = self.model, self.optimizer, self.loaders[0]
        ss.save_checkpoint(
            self.run, step=self.step, model=model, optimizer=optimizer, loader=loader
        )

    def bits(self) -> list[bytes]:
        moments = [
            one[name]
            for one in self.optimizer.state_dict()["state"].values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return [one.numpy().tobytes() for one in (*self.model.state_dict().values(), *moments)]


@pytest.mark.parametrize("left_out", [(SPIKE,), (3, 77)])
def test_weights_are_those_of_a_training_that_never_had_the_samples(
    left_out: tuple[int, ...], folder: str, tmp_path: Path
) -> None:
    whole = Training(folder, tmp_path / "whole").train()
    found = ss.first_use(whole.loader_of(0), whole.run, numbers=left_out)
    assert found.checkpoint is not None
    assert not found.checkpoint.endswith("step-00000000.pt")  # else nothing is spared
    never = Training(folder, tmp_path / "never", without=left_out).train()
    repaired = Training(folder, tmp_path / "repaired", without=left_out)
    repaired.load(found.checkpoint)
    repaired.train()
    assert repaired.bits() == never.bits()
    assert repaired.losses == never.losses[-len(repaired.losses) :]
    assert repaired.bits() != whole.bits()
    # One checkpoint later the samples are in the weights.
    late = Training(folder, tmp_path / "late", without=left_out)
    name = found.checkpoint.rpartition("step-")[2].removesuffix(".pt")
    late.load(f"{whole.run}/step-{int(name) + 5:08d}.pt")
    assert late.train().bits() != never.bits()
    # Both know that the training has changed.
    states = [ss.load_checkpoint(one.run)["loader"] for one in (whole, never, repaired)]
    assert set(ss.compare_states(states[0], states[1])) == {"steps"}
    assert set(ss.compare_states(states[1], states[2])) == {"past"}


def test_a_sample_that_is_deleted_leaves_the_weights_of_the_epoch(
    folder: str, tmp_path: Path
) -> None:
    data = str(shutil.copytree(folder, tmp_path / "data"))
    whole = Training(data, tmp_path / "whole", epochs=1).train()
    never = Training(data, tmp_path / "never", without=(SPIKE,), epochs=1).train()
    found = ss.first_use(whole.loader_of(0), whole.run, numbers=[SPIKE])
    assert found.checkpoint is not None
    assert not found.checkpoint.endswith("step-00000000.pt")
    ss.delete(data, keys=[f"{SPIKE:03d}"])
    repaired = Training(data, tmp_path / "repaired", epochs=1)
    repaired.load(found.checkpoint)  # of version 1, whose epoch it finishes
    assert repaired.train().bits() == never.bits()
    assert repaired.bits() != whole.bits()


def test_a_spike_of_the_loss_leads_to_its_sample(folder: str, tmp_path: Path) -> None:
    training = Training(folder, tmp_path).train()
    step = int(np.argmax(training.losses))
    epoch, step = divmod(step, len(training.loaders[0]))
    loader = training.loader_of(0)
    planned = loader.plan(epoch).samples(step)
    assert SPIKE in planned.numbers.tolist()
    batches = [ss.replay(loader, step, epoch=epoch, rank=rank) for rank in range(RANKS)]
    assert [*batches[0]["cls"].tolist(), *batches[1]["cls"].tolist()] == planned.numbers.tolist()
    rank = int(np.argmax([float(batch["npy"].abs().max()) for batch in batches]))
    place = int(batches[rank]["npy"].abs().amax(dim=1).argmax())
    assert batches[rank]["cls"][place] == SPIKE
    where = loader.plan(epoch).where(numbers=[SPIKE])
    assert (where.steps[0], where.ranks[0], where.places[0]) == (step, rank, place)
