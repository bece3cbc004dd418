"""Test S3 clients and forks: clients of a parent and of its children must not hang or break each other."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shardstream.storage import Storage, publish_bytes
from tests.small_datasets import numbered

pytestmark = pytest.mark.usefixtures("s3_env")


HEAD = """
    import faulthandler, json, multiprocessing, sys
    faulthandler.dump_traceback_later(280, exit=True)
"""
CHILDREN = """
    from concurrent.futures import ProcessPoolExecutor
    from shardstream.storage import Storage

    def read(storage, url):
        return [storage.read(url, 1, 3).decode(), len(storage.list_folder(url.rpartition("/")[0])[0])]

    if __name__ == "__main__":
        url, method, client = sys.argv[1:]
        storage = Storage({"s3_client": client})
        here = read(storage, url)
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            there = pool.submit(read, storage, url).result(timeout=200)
        print(json.dumps([here, there, read(storage, url)]))
"""


LOADERS = """
    import shardstream as ss

    if __name__ == "__main__":
        url, method = sys.argv[1:]
        found = []
        for num_workers in (2, 0, 2):  # as training, validation, training
            dataset = ss.ShardDataset(url, shuffle=True)
            workers = {"num_workers": 2, "multiprocessing_context": method, "timeout": 200} if num_workers else {}
            batches = ss.ShardLoader(dataset, batch_size=4, collate_fn=list, **workers)
            found.append(len({sample["__key__"] for batch in batches for sample in batch}))
        print(json.dumps(found))
"""


def run(program: str, folder: Path, *arguments: str) -> Any:
    """Run a program in a new process, because the threads of this one are unknown."""
    (folder / "program.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, folder / "program.py", *arguments],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("method", "client"),
    [("fork", "s3fs"), ("fork", "http"), pytest.param("spawn", "http", marks=pytest.mark.slow)],
)
def test_child_and_parent_read_after_any_use_in_the_parent(
    method: str, client: str, bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/data/a.tar"
    publish_bytes(Storage(), url, b"1234")
    assert run(CHILDREN, tmp_path, url, method, client) == [["23", 1]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_an_epoch_after_any_read_of_the_parent(
    method: str, bucket: str, tmp_path: Path
) -> None:
    url = numbered(f"{bucket}/data", nsamples=32, per_shard=8)
    assert run(LOADERS, tmp_path, url, method) == [32, 32, 32]
