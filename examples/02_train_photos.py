"""Train on photos with custom augmentation.

You learn: how transforms get their randomness. ``map(function, rng=True)`` calls ``function(sample, generator)`` with a NumPy
generator that depends only on the seed, the epoch and the sample. So a sample is augmented in the same way on any number of
workers and ranks and after a resume, and differently in the next epoch. No global seed is set or read.

The data are crops of the two photos that come with scikit-learn, a temple and a flower. The network trains on crops of the left
part of each photo and is tested on crops of the right part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import shardstream as ss

Image = npt.NDArray[np.uint8]
SIZE = 48  # side of the network's input, in pixels
MEAN = np.array([0.45, 0.42, 0.36], dtype=np.float32)
STD = np.array([0.27, 0.26, 0.28], dtype=np.float32)


class RandomErasing:
    """Fill a random rectangle with noise (Zhong et al., "Random Erasing Data Augmentation", 2017).

    Args:
        probability: Probability that an image is changed.
        area: Smallest and largest part of the image, 0 to 1.
        aspect: Smallest and largest height over width.
    """

    def __init__(
        self,
        probability: float = 0.5,
        area: tuple[float, float] = (0.02, 0.25),
        aspect: tuple[float, float] = (0.3, 3.3),
    ) -> None:
        self.probability, self.area, self.aspect = probability, area, aspect

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the image, shape (C, H, W), float32, with a rectangle filled."""
        if rng.random() >= self.probability:
            return image
        channels, height, width = image.shape
        area = rng.uniform(*self.area) * height * width
        aspect = np.exp(rng.uniform(*np.log(self.aspect)))
        h = min(height, max(1, round(float(np.sqrt(area * aspect)))))
        w = min(width, max(1, round(float(np.sqrt(area / aspect)))))
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        erased = image.clone()
        noise = rng.standard_normal((channels, h, w), dtype=np.float32)
        erased[:, top : top + h, left : left + w] = torch.from_numpy(noise)
        return erased


class Augment:
    """Random crop, flip, normalise, random erasing; a class at the top of a module, so that spawned workers find it too."""

    def __init__(self) -> None:
        self.erase = RandomErasing()

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[Tensor, int]:
        """Return an image, shape (3, SIZE, SIZE), float32, and its label."""
        image: Image = sample["jpg"]
        top = int(rng.integers(image.shape[0] - SIZE + 1))
        left = int(rng.integers(image.shape[1] - SIZE + 1))
        image = image[top : top + SIZE, left : left + SIZE]
        if rng.random() < 0.5:
            image = image[:, ::-1]
        return self.erase(normalise(image), rng), sample["cls"]


def centre(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the centre crop of an image and its label, for testing."""
    image: Image = sample["jpg"]
    top, left = (image.shape[0] - SIZE) // 2, (image.shape[1] - SIZE) // 2
    return normalise(image[top : top + SIZE, left : left + SIZE]), sample["cls"]


def normalise(image: Image) -> Tensor:
    """Return shape (3, H, W), float32, mean 0 and deviation 1 over these photos."""
    scaled = (image.astype(np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def crops(count: int, *, left: float, right: float, seed: int) -> Iterator[dict[str, object]]:
    """Cut crops of 64 x 64 pixels out of a part of each photo, alternating between the two."""
    rng = np.random.default_rng(seed)
    photos = load_sample_images().images  # two arrays, (427, 640, 3), uint8
    for _ in range(count // 2):
        for label, photo in enumerate(photos):
            first, last = int(left * photo.shape[1]), int(right * photo.shape[1]) - 64
            x, y = int(rng.integers(first, last)), int(rng.integers(photo.shape[0] - 64))
            yield {"jpg": photo[y : y + 64, x : x + 64], "cls": label}


def train(loader: ss.ShardLoader, epochs: int) -> nn.Module:
    """Return a small network that was trained on the batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is tiny, and the workers need the other cores
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        total = 0.0
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}")
    return model


def main() -> None:
    """Pack crops, train on augmented crops, and test."""
    with tempfile.TemporaryDirectory() as scratch:
        ss.pack(crops(480, left=0, right=0.65, seed=0), f"{scratch}/train", max_samples=100)
        ss.pack(crops(160, left=0.65, right=1, seed=1), f"{scratch}/val", max_samples=100)

        # lanes: the order of the samples is the same with 1 and 2 workers
        photos = ss.ShardDataset(
            f"{scratch}/train", shuffle=True, seed=0, order=ss.OrderOptions(lanes=2)
        ).decode("rgb8")
        augmented = photos.map(Augment(), rng=True)

        # Equal augmented batches on any number of workers.
        here = list(ss.ShardLoader(augmented, batch_size=32))
        there = list(ss.ShardLoader(augmented, batch_size=32, num_workers=2))
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(here, there, strict=True))

        model = train(ss.ShardLoader(augmented, batch_size=32, num_workers=2), epochs=6)

        known = count = 0
        test = ss.ShardDataset(f"{scratch}/val").decode("rgb8").map(centre)
        with torch.no_grad():
            for images, labels in ss.ShardLoader(test, batch_size=64):
                known += int((model(images).argmax(1) == labels).sum())
                count += len(labels)
        print(f"accuracy on {count} crops of unseen parts: {known / count:.1%}")
        assert known / count > 0.8


if __name__ == "__main__":
    main()
