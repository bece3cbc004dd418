"""S3 clients among processes: what a parent has opened must neither hang nor break its children, nor they it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardstream.storage.filesystem import Storage
from shardstream.storage.publish import publish_bytes

pytestmark = pytest.mark.usefixtures("s3_env")


PROGRAM = """
    import faulthandler, json, multiprocessing, sys
    faulthandler.dump_traceback_later(100, exit=True)
    from concurrent.futures import ProcessPoolExecutor
    from shardstream.storage.filesystem import Storage

    def read(storage, url):
        data = storage.read(url, 1, 3).decode()
        return data, type(storage._clients.reader(url, whole=False)[0]).__name__

    if __name__ == "__main__":
        url, method, parent_client, own = sys.argv[1:]
        if own == "own":
            import obstore
            from obstore.store import S3Store
            bucket, _, key = url.partition("://")[2].partition("/")
            obstore.get(S3Store(bucket, client_options={"allow_http": True}), key).bytes()
        parent = Storage({"s3_client": parent_client} if parent_client != "any" else {})
        storage = Storage()
        parent.read(url, 0, 2)
        parent.list_folder(url.rpartition("/")[0])
        found = []
        with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
            for one in (storage, parent):
                found.append(pool.submit(read, one, url).result(timeout=60))
        found.append(read(parent, url))
        print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("method", "parent_client", "own", "readers"),
    [
        ("fork", "s3fs", "", ["ObstoreReader", "S3fsReader", "S3fsReader"]),
        ("fork", "any", "", ["S3fsReader", "S3fsReader", "ObstoreReader"]),
        ("fork", "s3fs", "own", ["S3fsReader", "S3fsReader", "S3fsReader"]),
        ("spawn", "any", "", ["ObstoreReader", "ObstoreReader", "ObstoreReader"]),
    ],
)
def test_a_child_reads_whatever_its_parent_has_opened(
    method: str, parent_client: str, own: str, readers: list[str], bucket: str, tmp_path: Path
) -> None:
    url = f"{bucket}/data/a.tar"
    publish_bytes(Storage(), url, b"1234")
    # a process of its own: what threads this one has is not known
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", url, method, parent_client, own],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["23", reader] for reader in readers]
