"""Test hf:// on a server that answers like the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import ChangedError, NotFoundError
from shardstream.storage import Storage
from shardstream.testing import check_reader, make_shards
from tests.pairs import with_slow_rest
from tests.static_server import Served, serve_hub

COUNT = 60
URL = "hf://datasets/org/name"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the dataset "packed", and "tars" without indexes and manifest."""
    folder = tmp_path / "repository"
    make_shards(folder / "packed", samples=COUNT, per_shard=25)
    make_shards(folder / "tars", samples=COUNT, per_shard=25)
    for path in (folder / "tars").iterdir():
        if path.suffix != ".tar":
            path.unlink()
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Served]:
    with serve_hub(repository) as served:
        yield served


def options(hub: Served, **more: Any) -> dict[str, Any]:
    return {"endpoint": hub.url, "token": "hf_secret", **more}


def numbers(dataset: ss.ShardDataset) -> list[int]:
    loader = ss.ShardLoader(dataset.decode().to_tuple("cls"), batch_size=7, num_workers=1)
    return [int(label) for batch in loader for label in batch[0]]


@pytest.mark.parametrize(
    ("path", "revision"),
    with_slow_rest(
        [("packed", "@main"), ("packed/index.json", ""), ("packed/{000000..000002}.tar", "@main")],
        ["packed", "packed/index.json", "packed/{000000..000002}.tar"],
        ["", "@main"],
    ),
)
def test_dataset_with_a_manifest_has_exact_epochs(path: str, revision: str, hub: Served) -> None:
    url = f"{URL}{revision}/{path}"
    dataset = ss.ShardDataset(url, shuffle=True, storage_options=options(hub))
    assert len(dataset) == COUNT
    found = numbers(dataset)
    assert sorted(found) == list(range(COUNT)) != found


def test_ranges_are_read_as_asked(hub: Served, repository: Path) -> None:
    data = (repository / "packed" / "000000.tar").read_bytes()
    check_reader(Storage(options(hub)), f"{URL}/packed/000000.tar", data)
    hub.requests.clear()
    Storage(options(hub)).read(f"{URL}/packed/000000.tar", 512, 612)
    asked = [wanted for _, path, wanted in hub.requests if path.startswith("/cdn/")]
    assert asked == ["bytes=512-611"]


def test_file_that_changes_between_reads_is_an_error(hub: Served, repository: Path) -> None:
    storage, path = Storage(options(hub)), repository / "packed" / "000000.tar"
    storage.read(f"{URL}/packed/000000.tar", 0, 10)
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ChangedError, match="changed"):
        storage.read(f"{URL}/packed/000000.tar", 10, 20)


@pytest.mark.parametrize(
    ("url", "more", "message"),
    [
        (f"{URL}/packed/none.tar", {}, "not found; check the URL"),
        (f"{URL}@other/packed/000000.tar", {}, "the repository or its revision is not found"),
        ("hf://datasets/org/other/a.tar", {}, "the repository or its revision is not found"),
        (f"{URL}/packed/000000.tar", {"token": "hf_wrong"}, "set HF_TOKEN if the repository"),
    ],
)
def test_missing_file_repository_or_token_is_named(
    url: str, more: dict[str, Any], message: str, hub: Served
) -> None:
    with pytest.raises(NotFoundError, match=message) as raised:
        Storage(options(hub, **more)).read(url, 0, 5)
    assert "hf_wrong" not in f"{raised.value!r} {raised.value.__cause__!r}"


@pytest.mark.slow
def test_tars_of_a_repository_are_indexed_here_by_the_command(hub: Served, tmp_path: Path) -> None:
    """The variables of the Hub are read by its own package, in each process."""
    mine = tmp_path / "mine"
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
    page = (Path(__file__).parents[2] / "docs" / "clouds.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^shardstream (index hf://.*)$", page, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "shardstream", *command.split()],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = numbers(ss.ShardDataset(mine, shuffle=True, storage_options=options(hub)))
    assert sorted(found) == list(range(COUNT)) != found
    assert ss.verify(mine, storage_options=options(hub)).problems == ()
