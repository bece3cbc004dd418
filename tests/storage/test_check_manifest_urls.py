"""Test that a remote manifest opens no local files and contacts no other server, and that a URL starts no command."""

from __future__ import annotations

import http.server
import json
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import ManifestError, ShardStreamError
from shardstream.storage import Storage, check_names, locate_shards, publish_bytes
from shardstream.testing import make_shards
from tests.limits import module_of, set_limits
from tests.strategies import make_index, make_shard


def manifest(*urls: str, **more: Any) -> bytes:
    shards = [{"url": url, "nsamples": 2} for url in urls]
    return json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": shards, **more}).encode()


def served(*urls: str) -> str:
    """Write a manifest to a store other than the local disk; return its URL."""
    url = f"memory://other-{uuid.uuid4().hex}/train/index.json"
    publish_bytes(Storage(), url, manifest(*urls))
    return url


@pytest.mark.parametrize(
    "name",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "local:///etc/passwd.tar",
        "../../other/a.tar",
        "more/../../a.tar",
        "http://169.254.169.254/latest/meta-data/a.tar",
        "https://internal/a.tar",
        "s3://other/a.tar",
        "simplecache::file:///etc/passwd",
        "a.tar::file:///etc/passwd",
        "ftp://h/a.tar",
    ],
)
def test_remote_manifest_with_foreign_urls_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match=r"not in its own store; if you trust it, copy it"):
        locate_shards(served("0.tar", name), Storage())


@pytest.mark.parametrize(
    ("url", "good", "bad"),
    [
        ("s3://b/t/index.json", ["a.tar", "x/y..z/a.tar", "s3://b/a.tar", "s3a://other/a.tar"], ["gs://b/a.tar"]),
        ("http://h:80/t/index.json", ["a.tar", "http://h:80/other/a.tar"], ["http://h/a.tar", "https://h:80/a.tar", "http://h:80@evil/a.tar"]),
        ("https://u:p@h/index.json", ["https://h/a.tar", "https://U:p@H/a.tar"], ["https://u:p@i/a.tar", "https://v@h/a.tar"]),
        ("http://h/t/index.json", ["http://h/a@b?c#d\\e.tar", "a@b?c#d.tar"], ["http://i?@h/a.tar", "http://i#@h/a.tar", "http://i\\@h/a.tar"]),
        ("http://h/t/index.json", [], ["http://i\t@h/a.tar", "http://h\n/a.tar", "http://\x00h/a.tar", "http://h\u2028/a.tar", "http://h?/a.tar"]),
        ("http://h/t/index.json", ["%41.tar"], ["%2e%2e/a.tar", "http://h/%2E./a.tar", "..\\a.tar", "http:///a.tar", "http://[h/a.tar"]),
        ("sftp://u@h/index.json", ["sftp://u@h/a.tar", "sftp://h/a.tar"], ["sftp://i?@h/a.tar", "sftp://v@h/a.tar"]),
        ("s3://b/t/index.json", [], ["s3://i?@b/a.tar", "s3://b\\c/a.tar", "s3://key:secret@b/a.tar"]),
        ("abfs://c@mine/index.json", ["abfs://c@mine/a.tar", "abfs://d/a.tar"], ["abfs://c@other/a.tar"]),
        ("simplecache::s3://b/index.json", ["s3://b/a.tar"], ["file:///a.tar", "simplecache::s3://b/a.tar"]),
        ("sftp://h/t/index.json", ["sftp://h/a.tar"], ["sftp://i/a.tar", "sftp://h/../a.tar"]),
        ("data/index.json", ["s3://b/a.tar", "/data/a.tar", "../a.tar", "http://h/a.tar"], []),
        ("file:///data/index.json", ["s3://b/a.tar", "/data/a.tar", "../a.tar"], []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_urls_allowed_in_a_remote_manifest(url: str, good: list[str], bad: list[str]) -> None:
    check_names(url, good)
    for name in bad:
        with pytest.raises(ManifestError, match="copy it to this machine"):
            check_names(url, ["a.tar", name])


def test_local_manifest_may_name_any_url(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "data", samples=4)
    (tmp_path / "lists").mkdir()
    here = tmp_path / "lists" / "index.json"
    tar = next(Path(folder).glob("*.tar"))
    here.write_bytes(manifest(f"../data/{tar.name}"))
    assert len(locate_shards(str(here), Storage()).shards) == 1
    here.write_bytes(manifest(str(tar)))
    assert len(locate_shards(str(here), Storage()).shards) == 1


def test_manifest_of_its_own_store_is_read() -> None:
    folder = f"memory://other-{uuid.uuid4().hex}/train"
    tar = make_shard(2)
    publish_bytes(Storage(), f"{folder}/0.tar", tar)
    publish_bytes(Storage(), f"{folder}/0.tar.idx", make_index(tar))
    for name in ("0.tar", f"{folder}/0.tar"):
        publish_bytes(Storage(), f"{folder}/index.json", manifest(name))
        assert len(ss.ShardDataset(f"{folder}/index.json")) == 2


def test_huge_manifests_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    url = served(*(f"{number}.tar" for number in range(100)))
    set_limits(monkeypatch, locate_shards, MANIFEST_LIMIT_BYTES=1000)
    with pytest.raises(ManifestError, match="over the limit of 1000; split the dataset"):
        locate_shards(url, Storage())


def test_manifest_cannot_have_a_million_folders_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, locate_shards, FOLDERS_LIMIT=10)
    with pytest.raises(ManifestError, match="shards in 11 folders, the limit is 10"):
        locate_shards(served(*(f"{number}/a.tar" for number in range(11))), Storage())


@pytest.mark.parametrize("count", [10**15, (1 << 60) - 1])
def test_false_count_is_reported_quickly(count: int) -> None:
    folder = f"memory://other-{uuid.uuid4().hex}/train"
    tar = make_shard(2)
    publish_bytes(Storage(), f"{folder}/0.tar", tar)
    publish_bytes(Storage(), f"{folder}/0.tar.idx", make_index(tar))
    lie = {"url": "0.tar", "nsamples": count, "filesize": len(tar)}
    text = json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": [lie]})
    publish_bytes(Storage(), f"{folder}/index.json", text.encode())
    with pytest.raises(
        ss.errors.IndexMismatchError, match=f"{count} samples, .* do not fit in a tar of"
    ):
        ss.ShardDataset(f"{folder}/index.json", shuffle=True)


def test_index_larger_than_its_tar_allows_is_not_read(tmp_path: Path) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=4))
    os.truncate(folder / "000000.tar.idx", 3 << 30)  # sparse
    (folder / "index.json").unlink()
    with pytest.raises(
        ss.errors.IndexMismatchError, match="402653183 samples, .* do not fit in a tar of"
    ):
        ss.ShardDataset(folder)


def test_index_longer_than_its_manifest_says_is_not_read(tmp_path: Path) -> None:
    folder = Path(make_shards(tmp_path / "data", samples=4))
    os.truncate(folder / "000000.tar.idx", 3 << 30)
    dataset = ss.ShardDataset(folder)
    with pytest.raises(ss.errors.IndexMismatchError, match="the index has more than 4 samples"):
        list(dataset)


def test_folders_of_a_manifest_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    url = served(*(f"{number % 50}/{number}.tar" for number in range(500)))
    folder = url.rpartition("/")[0]
    for number in range(500):
        publish_bytes(Storage(), f"{folder}/{number % 50}/{number}.tar", b"")
    requested: list[str] = []

    def parent_url(url: str) -> str:
        requested.append(url)
        return url.rpartition("/")[0]

    monkeypatch.setattr(module_of(locate_shards), "parent_url", parent_url)
    shards = locate_shards(url, Storage()).shards
    assert [shard.url for shard in shards][:2] == [f"{folder}/0/0.tar", f"{folder}/1/1.tar"]
    assert len(locate_shards([shard.url for shard in shards], Storage()).shards) == 500
    assert len(requested) < 3 * 500


COMMANDS = [
    "pipe:touch {mark}",
    "pipe://touch {mark}",
    "PIPE:touch {mark}",
    "simplecache::pipe:touch {mark}",
    "pipe:touch {mark}::a.tar",
    "| touch {mark}",
    "|touch {mark}.tar",
    "a.tar; touch {mark}",
    "$(touch {mark}).tar",
    "`touch {mark}`.tar",
    "file:///tmp/$(touch {mark}).tar",
    "s3://$(touch {mark})/a.tar",
    "http://127.0.0.1:9/$(touch {mark}).tar",
    "shell:touch {mark}",
    "ssh:touch {mark}",
    "gopen:touch {mark}",
    "file:|touch {mark}",
]


@pytest.mark.parametrize("url", COMMANDS)
def test_no_url_starts_a_command(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    mark = tmp_path / "ran"
    url = url.format(mark=mark)
    listed = tmp_path / "index.json"
    listed.write_bytes(manifest(url))
    options = {"retry_timeout_s": 0.2}
    for urls in (url, [url], str(listed)):
        with pytest.raises((ShardStreamError, OSError)):
            list(
                ss.ShardDataset(urls, read=ss.ReadOptions(index="ignore"), storage_options=options)
            )
    for write in (ss.index, ss.verify):
        with pytest.raises((ShardStreamError, OSError)):
            write(url, storage_options=options)
    assert not mark.exists()


class Site(http.server.ThreadingHTTPServer):
    """A web server on loopback; it redirects unknown files to ``redirect_to`` and records its requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirect_to = ""
        self.requested: list[str] = []
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        body = self.server.files.get(self.path)
        if body is None and self.server.redirect_to:
            self.send_response(302)
            self.send_header("Location", self.server.redirect_to)
        else:
            self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET  # noqa: N815  (as http.server looks it up)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def sites() -> Iterator[tuple[Site, Site]]:
    """Start a public and an internal web server."""
    with Site() as public, Site() as internal:
        threads = [
            threading.Thread(target=site.serve_forever, args=(0.02,)) for site in (public, internal)
        ]
        for thread in threads:
            thread.start()
        yield public, internal
        for site, thread in zip((public, internal), threads, strict=True):
            site.shutdown()
            thread.join()


def read_all(url: str, **options: Any) -> None:
    """Read a dataset; its errors are expected."""
    options |= {"retry_timeout_s": 0.2}
    with pytest.raises(ShardStreamError):
        list(ss.ShardDataset(url, read=ss.ReadOptions(index="ignore"), storage_options=options))


@pytest.mark.parametrize(
    "name",
    [
        "http://{internal}?@{public}/x.tar",
        "http://{internal}#@{public}/x.tar",
        "http://{internal}\\@{public}/x.tar",
        "http://{internal}/x.tar?@{public}/x.tar",
        "http:\t//{internal}/x.tar",
        "\thttp://{internal}/x.tar",
        "//{internal}/x.tar",
        "%2f%2f{internal}/x.tar",
        "http://{public}@{internal}/x.tar",
    ],
)
def test_no_spelling_of_a_name_reaches_another_server(name: str, sites: tuple[Site, Site]) -> None:
    public, internal = sites
    name = name.format(public=public.place, internal=internal.place)
    public.files["/d/index.json"] = manifest(name)
    read_all(f"http://{public.place}/d/index.json")
    assert "/d/index.json" in public.requested
    assert internal.requested == []


@pytest.mark.parametrize("follows", [True, False])
def test_redirects_are_followed_unless_disabled(sites: tuple[Site, Site], *, follows: bool) -> None:
    public, internal = sites
    shard = {"url": "x.tar", "nsamples": 1, "filesize": 2048}
    text = json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": [shard]})
    public.files["/d/index.json"] = text.encode()
    public.redirect_to = f"http://{internal.place}/secret"
    read_all(f"http://{public.place}/d/index.json", allow_redirects=follows)
    assert any("secret" in path for path in internal.requested) is follows
