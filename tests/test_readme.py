"""Test that every block of the README runs, in order, and that its tables are correct."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

import shardstream as ss
from shardstream.format import Manifest, ShardInfo, encode_manifest_files
from tests.servers import S3Server, new_bucket
from tests.torchvision_transforms import install_torchvision

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs").glob("[rt]*/*.md"))
# text: output, and what cannot run here; console: examples of --help, with a prompt
LANGUAGES = {"bash", "console", "json", "python", "text", "toml", "yaml"}
# Pages whose blocks run in order, as a reader would. Others run in tests of their own: recipes and extending below, ray and
# webdataset in tests/ray and tests/webdataset. The one of clouds names a repository that does not exist: tests/storage/test_hub.py runs it
# against a server of its own.
RUN = (
    README,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "index", "cheatsheet", "install", "packing", "training", "decoding", "gpu", "resume", "which-sample", "loose-files", "subsets", "rows", "tuning", "faults",
            "minio", "cache", "in-place", "ranks", "trainers", "jobs", "order", "viewer", "versions", "from-torch", "from-s3-connector",
        )
    ),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
)  # fmt: skip
# Pages of formats whose packages are no part of [dev]: .ci/run installs them.
FOREIGN = {
    "from-huggingface": "datasets",
    "from-litdata": "litdata",
    "from-mds": "streaming",
    "grain": "grain",
}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_FILE = re.compile(r"# (\S+\.py)\n")
_BUCKET = "bucket"  # the README's name for it
_CLASSES = ("cat", "dog")
_PER_CLASS = 20

pytestmark = [
    # Warnings of this machine and of Python 3.12 and later, which users may see as well.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    code: str
    where: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(match[1], match[2], f"{path.name}:{line}")


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with the data that the README assumes."""
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(_CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(_PER_CLASS):
            path = tmp_path / "photos" / name / f"{number:03d}.jpg"
            path.write_bytes(jpeg(label * _PER_CLASS + number))
        (tmp_path / "new_photos" / name).mkdir(parents=True)
        (tmp_path / "new_photos" / name / "900.jpg").write_bytes(jpeg(900 + label))
    (tmp_path / "takedown.txt").write_text("cat/003\nno such key\n")
    with (tmp_path / "captions.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("path", "caption"))
        rows.writerows((f"photos/cat/{n:03d}.jpg", f"cat number {n}") for n in range(5))
    (tmp_path / "old").mkdir()
    for shard in range(3):
        with tarfile.open(tmp_path / "old" / f"{shard:03d}.tar", "w") as tar:
            for number in range(4):
                for field, data in (("jpg", jpeg(number)), ("cls", b"1")):
                    member = tarfile.TarInfo(f"{shard}_{number}.{field}")
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def readme_bucket(s3: S3Server, s3_env: None) -> Iterator[None]:  # sets AWS_*
    with new_bucket(s3, _BUCKET):
        yield


def run_block(block: Block, namespace: dict[str, Any], folder: Path) -> None:
    """Run a block as a reader would: shell in a shell, Python in one session, a named file into that file."""
    if block.language == "bash":
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],  # noqa: S607
            cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.where}: {done.stdout}\n{done.stderr}"
    elif named := _FILE.match(block.code):
        (folder / named[1]).write_text(block.code)
    else:
        exec(compile(block.code, block.where, "exec"), namespace)  # noqa: S102  (our own README)


def run_page(path: Path, here: Path) -> dict[str, Any]:
    """Run the blocks of a page, and return the names of its Python session."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks(path):
        if block.language in ("bash", "python"):
            run_block(block, namespace, here)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_every_block_runs(path: Path, here: Path, readme_bucket: None) -> None:
    if path.parent.name == "tutorials":  # they make their own data
        here = here / "empty"
        here.mkdir()
        os.chdir(here)
    namespace = run_page(path, here)
    if path == ROOT / "docs" / "packing.md":
        assert (here / "packed" / "train" / "classes.json").is_file()
        assert (here / "5.jpg").read_bytes()[:2] == b"\xff\xd8"
    if path == ROOT / "docs" / "faults.md":
        assert namespace["loader"].skipped == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_every_block_about_another_format_runs(name: str, here: Path) -> None:
    pytest.importorskip(FOREIGN[name])
    run_page(ROOT / "docs" / f"{name}.md", here)


def test_every_page_with_blocks_is_run() -> None:
    elsewhere = {"clouds", "extending", "ray", "recipes", "viewer", "webdataset", *FOREIGN}
    for path in DOCS:
        languages = {block.language for block in blocks(path)}
        if languages & {"bash", "python"}:
            assert path in RUN or path.stem in elsewhere, path.name


@pytest.mark.slow
def test_every_block_of_the_extension_guide_runs(here: Path) -> None:
    found = [b.code for b in blocks(ROOT / "docs" / "extending.md") if b.language == "python"]
    (here / "extending.py").write_text("\n".join(found))  # classes need a module
    done = subprocess.run(
        [sys.executable, "extending.py"], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


RECIPES = {
    section.partition("\n")[0]: section
    for section in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("\n## ")[1:]
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_alone(name: str, tmp_path: Path) -> None:
    code = "".join(match[2] for match in _BLOCK.finditer(RECIPES[name]) if match[1] == "python")
    assert "assert " in code
    if "torchvision" in code:  # installed apart: see tests/torchvision_transforms.py
        place = install_torchvision(tmp_path / "torchvision")
        code = f"from tests.torchvision_transforms import import_transforms\nimport_transforms({place!r})\n{code}"
    (tmp_path / "recipe.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "recipe.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_documents_have_blocks_to_run() -> None:
    languages = [block.language for path in RUN for block in blocks(path)]
    assert languages.count("bash") >= 6
    assert languages.count("python") >= 6


@pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)
def test_blocks_have_a_known_language_and_shell_commands_are_tested(path: Path) -> None:
    for block in blocks(path):
        assert block.language in LANGUAGES, block.where
        if block.language == "text":
            assert not re.search(r"^shardstream ", block.code, re.MULTILINE), block.where


def test_readme_contains_the_two_setup_commands() -> None:
    text = README.read_text(encoding="utf-8")
    for extra, command in (("examples", "python examples/quickstart.py"), ("dev", "pytest")):
        environment = "python3 -m venv .venv && . .venv/bin/activate"
        install = f'pip install -e ".[{extra}]" -c constraints.txt'
        assert f"\n{environment} && {install} && {command}\n" in text
    for name in ("examples/quickstart.py", "constraints.txt", "LICENSE", "CHANGELOG.md"):
        assert (ROOT / name).is_file()


def test_extras_exist_have_a_line_of_the_table_and_are_named_in_one_way() -> None:
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    table = (ROOT / "docs" / "install.md").read_text().partition("\n## PyTorch")[0]
    listed = re.findall(
        r"`([a-z0-9]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    )
    assert sorted(listed) == sorted(extras - {"bench", "bench-mosaicml", "docs"})
    sources = [
        path for folder in ("shardstream", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in (README, ROOT / "CONTRIBUTING.md", *DOCS, *sources):
        text = path.read_text(encoding="utf-8").replace('"shardstream[s3] @ git+URL"', "")
        assert "shardstream[" not in text, (
            path.name
        )  # on no index: `how_to_install` says what works
        for named in re.findall(
            r"(?<!\\)\.\[([a-z0-9,-]+)\]|how_to_install\(['\"](\w+)|extra=\"(\w+)\"", text
        ):
            assert set("".join(named).split(",")) <= extras, path.name


@pytest.mark.parametrize("path", [README, *DOCS, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_have_targets(path: Path) -> None:
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_names_of_shardstream_in_the_documents_exist() -> None:
    for path in (README, *DOCS):
        for room, name in set(
            re.findall(r"\bss\.(\w+)(?:\.(\w+))?", path.read_text(encoding="utf-8"))
        ):
            found = getattr(ss, room)
            assert room in ss.__all__ or hasattr(found, name), f"{path.name}: ss.{room}.{name}"


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's open files
def test_methods_documented_as_equal_to_webdatasets_are_equal(here: Path) -> None:
    """The same steps give the same samples, value for value."""
    shards = sorted(map(str, (here / "old").glob("*.tar")))

    def chain(dataset: Any) -> list[Any]:
        steps = dataset.decode("rgb8").rename(image="jpg;png").map_dict(cls=lambda label: label + 1)
        steps = steps.select(lambda sample: sample["__key__"] != "0_1")
        return list(steps.to_tuple("image", "cls").map_tuple(lambda image: image.sum()).slice(7))

    theirs = chain(wds.WebDataset(shards, shardshuffle=False, empty_check=False))
    mine = chain(ss.ShardDataset(shards))
    assert len(mine) == 7
    assert [tuple(map(int, pair)) for pair in mine] == [tuple(map(int, pair)) for pair in theirs]


def test_dataset_of_an_image_folder_equals_imagefolder(here: Path) -> None:
    ss.pack("photos/", "packed/", shuffle=False)
    dataset = ss.ShardDataset("packed/").decode("pil").to_tuple("jpg;png", "cls")
    got = [(image.size, label) for image, label in dataset.map_tuple(lambda image: image)]
    assert got == [((32, 24), label) for label in range(2) for _ in range(_PER_CLASS)]
    assert here.is_dir()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_stateful_dataloader_over_a_dataset_resumes(here: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415  (imports torch)

    ss.index(str(here / "old"))
    dataset = (
        ss.ShardDataset(str(here / "old"), shuffle=True, order=ss.OrderOptions(microbatch=2))
        .decode()
        .to_tuple("__key__")
    )
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=2)
    whole = list(loader)
    dataset.set_epoch(0)
    iterator = iter(loader)
    before = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    resumed = StatefulDataLoader(dataset, batch_size=2, num_workers=2)
    resumed.load_state_dict(state)
    assert before + list(resumed) == whole


def test_shards_are_read_through_an_fsspec_cache(here: Path) -> None:
    ss.index(str(here / "old"))
    dataset = ss.ShardDataset(f"simplecache::file://{here}/old/000.tar", shuffle=True)
    assert len(list(dataset)) == len(dataset) == 4


def test_single_files_on_s3_form_samples_as_documented(readme_bucket: None) -> None:
    for number in range(4):
        with fsspec.open(f"s3://{_BUCKET}/files/{number}.txt", "wb") as stream:
            stream.write(f"text {number}".encode())
    ss.pack(f"s3://{_BUCKET}/files/", f"s3://{_BUCKET}/packed/", kind="files")
    stream = ss.ShardDataset(f"s3://{_BUCKET}/packed/").decode()
    assert [sample["txt"] for sample in stream] == [f"text {number}" for number in range(4)]
    assert ss.ShardDataset(f"s3://{_BUCKET}/packed/").by_number().decode()[2]["txt"] == "text 2"
    assert len(ss.ShardDataset([f"s3://{_BUCKET}/packed/000000.tar"])) == 4
    with fsspec.open(f"s3://{_BUCKET}/checkpoint.pt", "wb") as checkpoint:
        torch.save({"step": 3}, checkpoint)
    with fsspec.open(f"s3://{_BUCKET}/checkpoint.pt", "rb") as checkpoint:
        assert torch.load(checkpoint, weights_only=True) == {"step": 3}


def test_documented_manifests_have_the_written_keys(tmp_path: Path) -> None:
    shown, shown_binary = [
        json.loads(block.code)
        for block in blocks(ROOT / "docs" / "formats.md")
        if block.language == "json"
    ]
    ss.pack([{"cls": 1, "png": np.zeros((2, 2), np.uint8)}], tmp_path, name="digits")
    written = json.loads((tmp_path / "index.json").read_text())
    assert list(shown) == list(written)
    assert list(shown["shardlist"][0]) == list(written["shardlist"][0])
    shards = [ShardInfo(url=f"{n}.tar", nsamples=1, filesize=1024) for n in range(5000)]
    binary = json.loads(encode_manifest_files(Manifest(shards=shards))["index.json"])
    assert list(shown_binary) == list(binary)


def test_readme_names_the_supported_python_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Python :: (3\.\d+)", text)
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert f"Python {versions[0]} to {versions[-1]}" in README.read_text(encoding="utf-8")
    assert sys.version_info >= (3, 11)
