"""Datasets to look at: all kinds of fields, a broken sample, and one that tries to run scripts."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw

import shardstream as ss
from tests.codecs.sounds import sound_file

CLASSES = ("circle", "square", "stripe", "dot")
SCRIPT = "window.pwned=1;fetch('/api/pwned')"
MARKUP = f'<script>{SCRIPT}</script><img src=x onerror="{SCRIPT}">'


def drawing(number: int, side: int = 160) -> tuple[PIL.Image.Image, PIL.Image.Image, list[int]]:
    """Return a picture of a shape, the mask of the shape, and its box as x, y, width, height."""
    rng = np.random.default_rng(number)
    ground = np.linspace(60, 200, side)[:, None, None] * rng.uniform(0.4, 1, 3)
    image = PIL.Image.fromarray(np.broadcast_to(ground, (side, side, 3)).astype(np.uint8))
    mask = PIL.Image.new("L", image.size)
    size = int(rng.integers(40, 90))
    x, y = (int(place) for place in rng.integers(5, side - size - 5, 2))
    colour = tuple(int(one) for one in rng.integers(90, 255, 3))
    shape = (x, y, x + size, y + size)
    for target, fill in ((image, colour), (mask, number % 3 + 1)):
        draw = PIL.ImageDraw.Draw(target)
        (draw.rectangle if number % 4 == 1 else draw.ellipse)(shape, fill=fill)
    return image, mask, [x, y, size, size]


def encoded(image: PIL.Image.Image, form: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


def pictures(folder: str | Path, count: int = 120, **options: Any) -> str:
    """Write pictures with masks, boxes, captions and classes; with columns."""
    options = {"columns": "__key__,cls,width=json.width,light=json.light"} | options
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar", max_samples=50, **options) as writer:
        for number in range(count):
            image, mask, box = drawing(number)
            kind = number % 4
            about = {
                "width": image.width,
                "light": round(float(np.asarray(image).mean()), 2),
                "annotations": [{"bbox": box, "category_name": CLASSES[kind]}],
            }
            writer.write(
                {
                    "__key__": f"shape-{number:06d}",
                    "jpg": encoded(image, "JPEG"),
                    "seg.png": encoded(mask, "PNG"),
                    "json": json.dumps(about).encode(),
                    "txt": f"a {CLASSES[kind]} at {box[0]}, {box[1]}".encode(),
                    "cls": str(kind).encode(),
                }
            )
    name_classes(folder, CLASSES)
    return str(folder)


def name_classes(folder: str | Path, names: Sequence[str]) -> None:
    """Write the names of the classes next to the shards; of a remote folder, by the tests of S3."""
    if "://" not in str(folder):
        (Path(folder) / "classes.json").write_text(json.dumps(list(names)))


def kinds(folder: str | Path) -> str:
    """Write one sample of each kind of field."""
    grid = np.hypot(*np.mgrid[-3:3:64j, -3:3:64j])
    samples: list[dict[str, Any]] = [
        {"flac": sound_file("FLAC"), "txt": b"a tone"},
        {"npy": np.sin(grid * 3).astype(np.float32)},
        {"npy": np.linspace(0, 20, 500) ** 2},
        {"embedding.npy": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float16)},
        {"json": {"a": [1, 2, 3], "b": None}},
        {"txt": "gr\u00fc\u00dfe, \u4f60\u597d, \u202e right to left"},
        {"bin": bytes(range(200))},
        {"png": encoded(PIL.Image.new("RGBA", (40, 90), (200, 80, 20, 128)), "PNG")},
    ]
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar") as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"kind-{number}", **sample})
    return str(folder)


def hostile(folder: str | Path) -> str:
    """Write samples whose keys, names of fields, classes and contents try to run scripts."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" onload="{SCRIPT}"><script>{SCRIPT}</script></svg>'
    )
    samples: list[dict[str, Any]] = [
        {"html": MARKUP.encode(), "cls": b"0"},
        {"svg": svg.encode(), "txt": MARKUP.encode()},
        {
            "json": json.dumps(
                {MARKUP: MARKUP, "boxes": [[0, 0, 5, 5]], "labels": [MARKUP]}
            ).encode()
        },
        {"jpg": svg.encode(), "txt": b"a picture that is markup"},
        {"mp4": MARKUP.encode(), "mp3": MARKUP.encode()},
        {f"{MARKUP.replace('/', '')}.js": SCRIPT.encode(), "png": b"\x89PNG\r\n\x1a\nno"},
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar") as writer:
        for number, sample in enumerate(samples):
            key = f"<img src=x onerror={SCRIPT.replace('/', '').replace('.', '')}>{number}"
            writer.write({"__key__": key, **sample})
    name_classes(folder, [MARKUP])
    return str(folder)
