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
        data = storage.read(url, 1, 3).decode()
        return data, type(storage._clients.reader(url, reads_whole_file=False)[0]).__name__

    if __name__ == "__main__":
        url, method, parent_client, own = sys.argv[1:]
        if own == "own":
            import obstore
            from obstore.store import S3Store
            bucket, _, key = url.partition("://")[2].partition("/")
            obstore.get(S3Store(bucket, client_options={"allow_http": True}), key).bytes()
        # the reader of plain HTTP does not know this option
        options = {} if parent_client == "http" else {"requester_pays": True}
        known = {} if parent_client in ("any", "http") else {"s3_client": parent_client}
        parent, storage = Storage(options | known), Storage(options)
        parent.read(url, 0, 2)
        parent.list_folder(url.rpartition("/")[0])
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            found = pool.submit(read, storage, url).result(timeout=200)
        print(json.dumps([found, read(parent, url)]))
"""


OBSTORE_ALONE = """
    sys.modules.update(dict.fromkeys(("s3fs", "aiobotocore", "botocore", "boto3")))  # as if not installed
    from concurrent.futures import ProcessPoolExecutor
    import shardstream as ss
    from shardstream.storage import Storage
    from shardstream.storage import publish_bytes, remove

    def read(storage, url):
        try:
            return storage.read(url, 1, 3).decode()
        except ss.OptionError as error:
            return str(error)

    if __name__ == "__main__":
        folder, storage = sys.argv[1], Storage()
        for name in ("a.tar", "b.tar", "sub/c.tar"):
            publish_bytes(storage, f"{folder}/{name}", b"1234")
        names = lambda files: [file.url.removeprefix(folder + "/") for file in files]
        files, folders = storage.list_folder(folder)
        found = [names(files), folders, names(storage.find(folder)), names(storage.glob(f"{folder}/[b-z]*.tar"))]
        remove(storage, f"{folder}/b.tar")
        remove(storage, f"{folder}/b.tar")
        found.append([storage.exists(f"{folder}/{name}") for name in ("a.tar", "b.tar", "sub")])
        with storage.open(f"{folder}/a.tar") as stream:
            found.append(stream.read().decode())
        found.append(read(storage, f"{folder}/a.tar"))
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            found.append(pool.submit(read, storage, f"{folder}/a.tar").result(timeout=200))
        print(json.dumps(found))
"""


CHOSEN = """
    from concurrent.futures import ProcessPoolExecutor
    import shardstream as ss
    from shardstream.storage import Storage

    def read(storage, url):
        try:
            return storage.read(url, 1, 3).decode()
        except ss.OptionError as error:
            return str(error)

    if __name__ == "__main__":
        url, storage = sys.argv[1], Storage({"s3_client": "obstore"})
        storage.read(url, 0, 2)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            print(json.dumps(pool.submit(read, storage, url).result(timeout=200)))
"""


LOADERS = """
    import shardstream as ss

    def look(sample):
        from shardstream.storage import has_lost_obstore_threads
        return sample["__key__"], has_lost_obstore_threads(), "shardstream.storage.obstore_client" in sys.modules

    if __name__ == "__main__":
        url, method, look_bytes, *order = sys.argv[1:]
        from shardstream.storage import Clients
        Clients.small_reads_bytes = int(look_bytes)
        found = []
        for num_workers in map(int, order):
            # the reader of plain HTTP does not know this option
            dataset = ss.ShardDataset(url, shuffle=True, storage_options={"requester_pays": True}).map(look)
            workers = {"num_workers": 2, "multiprocessing_context": method, "timeout": 200} if num_workers else {}
            batches = ss.ShardLoader(dataset, batch_size=4, collate_fn=list, **workers)
            keys, without, obstore = zip(*(sample for batch in batches for sample in batch))
            found.append([len(set(keys)), any(without), all(obstore)])
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
    ("method", "parent_client", "own", "readers"),
    [
        ("fork", "s3fs", "", ["ObstoreReader", "S3fsReader"]),
        (
            "fork",
            "any",
            "",
            ["ObstoreReader", "S3fsReader"],
        ),  # listing alone starts no threads
        ("fork", "obstore", "", ["S3fsReader", "ObstoreReader"]),
        ("fork", "s3fs", "own", ["S3fsReader", "S3fsReader"]),
        ("spawn", "obstore", "", ["ObstoreReader", "ObstoreReader"]),
        ("fork", "http", "", ["S3HttpReader", "S3HttpReader"]),
        ("fork", "http", "own", ["S3HttpReader", "S3HttpReader"]),
    ],
)
def test_forked_child_reads_after_any_use_in_the_parent(
    method: str, parent_client: str, own: str, readers: list[str], bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/data/a.tar"
    publish_bytes(Storage(), url, b"1234")
    found = run(CHILDREN, tmp_path, url, method, parent_client, own)
    assert found == [["23", reader] for reader in readers]


def test_obstore_error_does_not_advise_an_installed_package(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/data/a.tar"
    publish_bytes(Storage(), url, b"1234")
    output = run(CHOSEN, tmp_path, url)
    assert (
        "leave s3_client='obstore' out, so that s3fs reads it, or start workers with multi"
        in output
    )
    assert "install" not in output


def test_obstore_without_s3fs_lists_reads_and_writes(bucket: str, tmp_path: Path) -> None:
    *found, forked = run(OBSTORE_ALONE, tmp_path, f"{bucket}/data")
    assert found == [
        ["a.tar", "b.tar"],
        ["sub"],
        ["a.tar", "b.tar", "sub/c.tar"],
        ["b.tar"],
        [True, False, True],
        "1234",
        "23",
    ]
    assert "install s3fs, or start workers with multiprocessing_context='spawn'" in forked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "look_bytes", "epochs"),
    [
        # workers, the main process, workers: as training, validation, training
        ("fork", 1 << 20, {"2": (False, True), "0": (False, False), " 2": (False, True)}),
        ("fork", 0, {"0": (False, True), "2": (True, True)}),
        ("spawn", 0, {"0": (False, True), "2": (False, True)}),
    ],
)
def test_workers_read_an_epoch_after_any_read_of_the_parent(
    method: str, look_bytes: int, epochs: dict[str, tuple[bool, bool]], bucket: str, tmp_path: Path
) -> None:
    url = numbered(f"{bucket}/data", nsamples=32, per_shard=8)
    found = run(LOADERS, tmp_path, url, method, str(look_bytes), *epochs)
    assert found == [[32, without, obstore] for without, obstore in epochs.values()]
