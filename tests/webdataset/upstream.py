"""Run webdataset's own tests, from its source package, against ``shardstream.webdataset``.

The package lacks the tests' ``conftest.py`` and data, so both are made here, with the properties that the tests expect. Its remote
shards are served from a local server.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
from PIL import Image

import shardstream

VERSION = "1.0.2"
ROOT = Path(shardstream.__file__).parent.parent

SHIM = Path(__file__).with_name("shim.py")
"""Program that puts shardstream's modules in the place of webdataset's."""

STUBS = {
    "imageio/v3.py": """
import numpy, PIL.Image

def imread(stream):
    return numpy.asarray(PIL.Image.open(stream))
""",
    "imageio/__init__.py": "",
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": """
import numpy, torch

class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, value):
        for step in self.steps:
            value = step(value)
        return value

class RandomResizedCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize((self.size, self.size))

class RandomHorizontalFlip:
    def __call__(self, image):
        return image

class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255

class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(value)[:, None, None] for value in (mean, std))

    def __call__(self, tensor):
        return (tensor - self.mean) / self.std
""",
}

CONFTEST = '''
import http.server, os, threading
from pathlib import Path
import pytest

class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve testdata, also by ranges."""

    def send_head(self):
        path = Path("testdata") / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return None
        size, stream = path.stat().st_size, path.open("rb")
        wanted = self.headers.get("Range")
        start, end = 0, size - 1
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or end), end)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(end - start + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        stream.seek(start)
        self.left = end - start + 1
        return stream

    def copyfile(self, source, outputfile):
        outputfile.write(source.read(self.left))

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
local_data = "testdata/imagenet-000000.tgz"
compressed = "testdata/compressed.tar"
remote_loc = f"http://127.0.0.1:{server.server_port}/"
remote_shard = "openimages-train-000000.tar"
remote_shards = "openimages-train-{000000..000003}.tar"
remote_sample = remote_loc + "sample.tgz"

def pytest_configure(config):
    config.addinivalue_line("markers", "quick: a quick test")

def count_samples_tuple(source, *args, n=10000):
    count = 0
    for i, sample in enumerate(iter(source)):
        if i >= n:
            break
        assert isinstance(sample, (tuple, dict, list)), (type(sample), sample)
        for f in args:
            assert f(sample)
        count += 1
    return count
'''


NEEDS_INTERNET = (
    "test_cache.py::TestStreamingOpen::test_remote_file",
    "test_cache.py::TestFileCache::test_remote_file",
    "test_handlers.py::test_missing_throws2",
    "test_security.py::TestEnforceSecurity::test_safe_urls_still_work_when_security_enabled",
)
"""Tests that are not run, because they read from servers on the internet."""


def download(folder: Path) -> Path | None:
    """Return the unpacked tests of webdataset; None if its package cannot be fetched."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
    ]
    command += ["--no-build-isolation", "--dest", str(folder), f"webdataset=={VERSION}"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    (package,) = folder.glob("webdataset-*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    return folder / package.name.removesuffix(".tar.gz") / "tests"


def prepare(tests: Path, folder: Path, *, with_shim: bool = True) -> None:
    """Write the tests, their data and their imports to a folder."""
    shutil.copytree(tests, folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    shim = SHIM.read_text(encoding="utf-8") if with_shim else ""
    (folder / "tests" / "conftest.py").write_text(shim + CONFTEST, encoding="utf-8")
    for name, text in STUBS.items():
        path = folder / "imports" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    write_data(folder / "testdata")


def run(folder: Path, *arguments: str) -> dict[str, str]:
    """Run the tests of a folder; return test -> "passed", "skipped" or the message of its failure."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--junitxml=report.xml",
    ]
    command += [f"--deselect=tests/{name}" for name in NEEDS_INTERNET]
    paths = [str(folder / "imports"), str(folder), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    subprocess.run(
        [*command, *(arguments or ("tests",))],
        cwd=folder, env=environment, check=False, capture_output=True, timeout=550,
    )  # fmt: skip
    results = {}
    for case in ET.parse(folder / "report.xml").getroot().iter("testcase"):  # noqa: S314  (written by pytest)
        module, *classes = case.get("classname", "").removeprefix("tests.").split(".")
        name = "::".join((module, *classes, case.get("name", "")))
        bad = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        results[name] = "passed" if bad is None else f"{bad.tag}: {bad.get('message')}"
    return results


def png(height: int, width: int) -> bytes:
    """Return an image of noise, which is as large as a photo."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar, compressed if its name ends in gz."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_data(folder: Path) -> None:
    """Write the shards that the tests read."""
    from webdataset import tenbin  # noqa: PLC0415  (the real one, so that its bytes are read)

    folder.mkdir()
    small = png(40, 30)
    local: dict[str, bytes] = {}
    for number in range(47):
        image = png(793, 600) if number == 0 else small
        fields = {"cls": b"%d" % number, "png": image, "wnid": b"n0", "xml": b"<a/>"}
        local |= {f"{number + 10}.{name}": data for name, data in fields.items()}
    write_tar(folder / "imagenet-000000.tgz", local)
    write_tar(folder / "sample.tgz", {"10.cls": b"0", "10.png": small})
    write_tar(folder / "compressed.tar", {"a.txt.gz": gzip.compress(b"hello\n")})
    arrays = [np.zeros((28, 28)), np.ones((28, 28))]
    write_tar(
        folder / "tendata.tar",
        {f"{n}.ten": bytes(tenbin.encode_buffer(arrays)) for n in range(100)},
    )
    stream = io.BytesIO()
    Image.open(io.BytesIO(small)).save(stream, "JPEG")
    for shard in range(4):
        members: dict[str, bytes] = {}
        for number in range(40):
            members |= {
                f"{shard}-{number}.jpg": stream.getvalue(),
                f"{shard}-{number}.json": json.dumps([number]).encode(),
            }
        write_tar(folder / f"openimages-train-{shard:06}.tar", members)
