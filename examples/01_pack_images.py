"""Pack a folder of images, one folder for each class.

You learn: how ``ss.pack`` maps a folder tree to samples, how to split and shuffle, which files it writes, and where the class
names are stored. The command line does the same:

    shardstream pack photos/ packed/ --split train=0.8,val=0.2
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import shardstream as ss

CLASSES = ("circle", "square", "triangle")


def draw(folder: Path, *, per_class: int) -> None:
    """Draw images: ``folder/circle/000.jpg`` and so on."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            image = Image.new("RGB", (96, 64), "white")
            pen = ImageDraw.Draw(image)
            x, y, r = int(rng.integers(30, 60)), int(rng.integers(25, 40)), int(rng.integers(8, 20))
            colour = tuple(rng.integers(0, 200, 3).tolist())
            if name == "circle":
                pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
            elif name == "square":
                pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
            else:
                pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
            image.save(folder / name / f"{number:03d}.jpg")


def main() -> None:
    """Pack, then inspect the written files."""
    with tempfile.TemporaryDirectory() as scratch:
        photos, packed = Path(scratch, "photos"), Path(scratch, "packed")
        draw(photos, per_class=50)

        report = ss.pack(
            str(photos),
            packed,  # or "s3://bucket/shapes"
            split={"train": 0.8, "val": 0.2},
            max_samples=40,  # per shard; the default is 256 MB or 10,000 samples
            max_side=48,  # scale larger images down
            image_format="jpg",
            quality=95,
        )
        print(f"{report.samples} images in {report.shards} shards, {report.total_bytes:,} bytes")
        assert [split.samples for split in report.splits] == [120, 30]

        # Shards, an index for each, a manifest, and the class names.
        names = sorted(path.name for path in (packed / "train").iterdir())
        print("packed/train:", *names)
        assert names == [
            "000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "000002.tar", "000002.tar.idx",
            "classes.json", "index.json",
        ]  # fmt: skip
        assert json.loads((packed / "train" / "classes.json").read_text()) == list(CLASSES)

        # The samples were shuffled before packing: each shard holds all classes.
        for split in ("train", "val"):
            for shard in sorted((packed / split).glob("*.tar")):
                labels = {sample["cls"] for sample in ss.ShardDataset(str(shard)).decode()}
                assert labels == {0, 1, 2}, shard

        # An image and its label, as a training loop gets them.
        image, label = next(
            iter(ss.ShardDataset(f"{packed}/train").decode("rgb8").to_tuple("jpg", "cls"))
        )
        print(f"first sample: {image.shape} {image.dtype}, {CLASSES[label]}")
        assert image.shape == (32, 48, 3)

        # Packing never replaces a dataset by mistake.
        try:
            ss.pack(str(photos), packed, split={"train": 0.8, "val": 0.2})
        except ss.errors.OptionError as error:
            print("a second time:", error)
        else:
            raise AssertionError("the dataset was replaced")


if __name__ == "__main__":
    main()
