"""The package without extras: what is installed with it alone packs, writes and reads local shards."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardstream

ROOT = Path(shardstream.__file__).parent.parent
PROGRAM = """
import json, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    names = frozenset(json.loads(sys.argv[1]))
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import io
import PIL.Image
import shardstream as ss

def picture(number):
    stream = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(stream, "PNG")
    return stream.getvalue()

folder = sys.argv[2]
with ss.ShardWriter(folder + "/written/{shard:06d}.tar", max_samples=4) as writer:
    for number in range(10):
        writer.write({"__key__": f"{number}", "png": picture(number), "cls": number, "json": {"n": number}})
for number in range(10):
    import pathlib
    place = pathlib.Path(folder, "files", f"kind{number % 2}", f"{number}.png")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(picture(number))
ss.pack(folder + "/files", folder + "/packed")
ss.index(folder + "/packed")
ss.verify(folder + "/packed")
dataset = ss.ShardDataset(folder + "/written", shuffle=True, subset=range(8)).decode()
loader = ss.ShardLoader(dataset, batch_size=4)
batches = iter(loader)
first = next(batches)["cls"].tolist()
state = json.loads(json.dumps(loader.state_dict()))
again = ss.ShardLoader(dataset, batch_size=4)
again.load_state_dict(state)
rest = [one for batch in again for one in batch["cls"].tolist()]
packed = [sample["cls"] for sample in ss.ShardDataset(folder + "/packed").decode()]
print(json.dumps([sorted(first + rest), sorted(packed)]))
"""


def base_packages() -> set[str]:
    """Return the packages that `pip install shardstream` installs, with those that they need."""
    found, waiting = set[str](), ["shardstream"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        waiting += [
            canonicalize_name(one.name)
            for one in needed
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


def test_local_shards_need_nothing_but_the_base(tmp_path: Path) -> None:
    base = base_packages()
    absent = [
        module
        for module, packages in packages_distributions().items()
        if not {canonicalize_name(package) for package in packages} & base
    ]
    assert {"s3fs", "pyarrow", "duckdb", "av", "soundfile", "starlette", "ray"} <= {*absent}
    assert not {"torch", "numpy", "fsspec", "shardstream"} & {*absent}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(absent), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[*range(8)], [0] * 5 + [1] * 5]
