"""Read shards with Ray Data: transform, score and batch them on all CPUs of a cluster.

You learn: ``ss.ray.read`` returns a Ray dataset whose rows are the samples of a ``ShardDataset``, after its decoding and mapping steps. It
knows its counts from the index, shuffles globally by the plan of an epoch, and ``ss.ray.Collate`` keeps keys and text as lists.

The example starts Ray on this machine; on a cluster, ``ray.init()`` connects to it. It needs the extra: pip install ".[ray]" in a clone.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import numpy as np
import ray
import ray.data
import torch

import shardstream as ss


class Brightness:
    """Stands for a model: each actor loads it once."""

    def __init__(self) -> None:
        self.weights = torch.full((3,), 1 / 3)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a score for each image."""
        means = torch.as_tensor(batch["png"]).float().mean(dim=(1, 2))
        return {"__key__": batch["__key__"], "score": (means @ self.weights).numpy()}


def main() -> None:
    """Pack pictures, and read them in three ways."""
    with tempfile.TemporaryDirectory() as scratch:
        rng = np.random.default_rng(0)
        with ss.ShardWriter(f"{scratch}/pictures", max_samples=50) as writer:
            for number in range(200):
                image = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                name = f"picture {number}"
                writer.write({"__key__": f"{number:04d}", "png": image, "txt": name})

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
            dataset = ss.ShardDataset(f"{scratch}/pictures", shuffle=True).decode("rgb8")
            rows = ss.ray.read(dataset, epoch=0)
            print(rows.count(), "rows, before anything was read")

            batches = rows.iter_torch_batches(batch_size=64, collate_fn=ss.ray.Collate())
            sizes = [(tuple(batch["png"].shape), batch["txt"][0]) for batch in batches]
            print(len(sizes), "batches, the first of shape", sizes[0][0])
            assert sum(shape[0] for shape, _ in sizes) == 200

            pool = ray.data.ActorPoolStrategy(size=1)
            images = ss.ray.read(dataset, fields=["png"])
            scores = images.map_batches(Brightness, batch_size=32, compute=pool).take_all()
            best = max(scores, key=lambda row: row["score"])
            print(f"the brightest of {len(scores)} is {best['__key__']}")
            assert len({row["__key__"] for row in scores}) == 200
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
