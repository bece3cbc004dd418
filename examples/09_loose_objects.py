"""Train on loose files before they are packed.

You learn: ``ObjectDataset.from_prefix`` makes a sample of each file under a prefix, with the label from its path, and splits,
shuffles, decodes and resumes as ``ShardDataset`` does. Each sample costs one request, so packed data are read several times as
fast; nothing else in the program changes.

The example starts its own S3 server.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import s3fs
from embedded_s3 import embedded_s3
from PIL import Image

import shardstream as ss

CLASSES = ("circle", "square", "triangle")


def upload(url: str) -> None:
    """Write 60 small images to one prefix per class, as in an unpacked bucket."""
    rng = np.random.default_rng(0)
    s3 = s3fs.S3FileSystem()
    for number in range(60):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
        s3.pipe_file(f"{url}/{CLASSES[number % 3]}/{number:03d}.png", stream.getvalue())


def train(dataset: ss.ObjectDataset | ss.ShardDataset) -> list[str]:
    """Return the keys of an epoch, in place of a training."""
    samples = dataset.decode("rgb8").to_tuple("png", "cls", "__key__")
    return [
        key for _, _, keys in ss.ShardLoader(samples, batch_size=8, num_workers=2) for key in keys
    ]


def main() -> None:
    """Read loose images, stop, resume, pack them, and read the shards."""
    with embedded_s3("example") as bucket, tempfile.TemporaryDirectory() as scratch:
        url = f"{bucket}/pictures"
        upload(url)

        # The name of the folder directly under the prefix is the class; a function of the path works too.
        loose = ss.ObjectDataset.from_prefix(f"{url}/", label="folder", shuffle=True)
        assert loose.classes == CLASSES
        print(loose, "classes:", ", ".join(loose.classes))
        assert len(set(train(loose))) == 60

        # It resumes as a dataset of shards does.
        loader = ss.ShardLoader(
            loose.decode("rgb8").to_tuple("png", "cls", "__key__"), batch_size=8
        )
        begun = iter(loader)
        seen = [*next(begun)[2], *next(begun)[2]]
        checkpoint = f"{scratch}/checkpoint.pt"
        ss.save_checkpoint(checkpoint, loader=loader)
        resumed = ss.ShardLoader(
            loose.decode("rgb8").to_tuple("png", "cls", "__key__"), batch_size=8
        )
        resumed.load_state_dict(ss.load_checkpoint(checkpoint)["loader"])
        rest = [key for _, _, keys in resumed for key in keys]
        assert sorted(seen + rest) == sorted(set(seen + rest)), "a sample came twice"
        print(f"{len(seen)} samples, then {len(rest)} after a resume: each once")

        # Later: pack them. (On the command line: shardstream pack s3://example/pictures/ s3://example/packed/)
        ss.pack(f"{url}/", f"{bucket}/packed/", kind="images", key="{path}")
        packed = ss.ShardDataset(f"{bucket}/packed/", shuffle=True)
        assert sorted(train(packed)) == sorted(train(loose))
        print(f"packed to {packed}: the same samples")
        assert Path(scratch).is_dir()


if __name__ == "__main__":
    main()
