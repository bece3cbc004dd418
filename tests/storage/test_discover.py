from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import (
    ManifestError,
    NotFoundError,
    OptionError,
    ShardStreamError,
    StorageError,
    UnfinishedError,
)
from shardstream.format import Manifest, ShardInfo, encode_manifest
from shardstream.storage import (
    FileInfo,
    LocatedShards,
    Storage,
    expand_urls,
    find_tars,
    is_compressed,
    is_tar,
    locate_shards,
    publish_bytes,
)
from shardstream.testing import make_shards
from tests.strategies import make_index, make_shard

TARS = {f"{number:02d}.tar": make_shard(number + 1) for number in range(3)}


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> str:
    """URL of an empty folder on each kind of storage."""
    if request.param == "local":
        return str(request.getfixturevalue("tmp_path"))
    if request.param == "memory":
        return f"memory://test-{uuid.uuid4().hex}"
    request.getfixturevalue("s3_env")
    return f"{request.getfixturevalue('bucket')}/data"


def put(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        publish_bytes(Storage(), f"{folder}/{name}", data)


def put_tars(folder: str, *, indexed: tuple[str, ...] = ()) -> None:
    put(folder, TARS | {f"{name}.idx": make_index(TARS[name]) for name in indexed})


def names(located: LocatedShards) -> list[str]:
    return [shard.url.rsplit("/", 1)[-1] for shard in located.shards]


MANIFEST = encode_manifest(
    Manifest(
        shards=tuple(
            ShardInfo(url=name, nsamples=int(name[:2]) + 1, filesize=len(TARS[name]))
            for name in ("02.tar", "00.tar")
        )
    )
)


# --- on each kind of storage


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["00.tar", "01.tar", "02.tar"]),
        ("/", ["00.tar", "01.tar", "02.tar"]),
        ("/*.tar", ["00.tar", "01.tar", "02.tar"]),
        ("/0[12].tar", ["01.tar", "02.tar"]),
        ("/{02..01}.tar", ["02.tar", "01.tar"]),
        ("/{00,02}.tar", ["00.tar", "02.tar"]),
        ("/01.tar", ["01.tar"]),
    ],
)
def test_shards_are_found_with_their_sizes_and_counts(
    folder: str, pattern: str, found: list[str]
) -> None:
    put_tars(folder, indexed=("01.tar", "02.tar"))
    storage = Storage()
    located = locate_shards(folder + pattern, storage)
    assert names(located) == found
    assert located.manifest_url is None
    for shard, name in zip(located.shards, found, strict=True):
        nsamples = None if name == "00.tar" else int(name[:2]) + 1
        assert (shard.filesize, shard.nsamples) == (len(TARS[name]), nsamples)
        assert (shard.url in located.indexed) == (name != "00.tar")
        assert storage.read(shard.url) == TARS[name]  # the URL opens the same file


@pytest.mark.parametrize("pattern", ["", "/*.tar", "/0[12].tar"])
def test_tar_that_is_missing_beside_its_index_is_an_error_without_a_manifest(
    folder: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of the folder was copied, or the tar was deleted alone."""
    put(folder, {name: TARS[name] for name in ("00.tar", "02.tar")})
    put(folder, {f"{name}.idx": make_index(data) for name, data in TARS.items()})
    with pytest.raises(NotFoundError, match=r"1 shard missing, by the indexes.*01\.tar"):
        locate_shards(folder + pattern, Storage())
    with pytest.raises(NotFoundError, match="1 shard missing"):
        locate_shards([f"{folder}/0[01].tar", f"{folder}/*2.tar"], Storage())
    assert names(locate_shards(f"{folder}/0[02].tar", Storage())) == ["00.tar", "02.tar"]
    ss.index(folder)
    assert "1 shard missing, by the indexes" in caplog.text


@pytest.mark.parametrize("pattern", ["", "/*.tar"])
def test_deleted_samples_are_not_read_where_the_manifest_is_missing(
    folder: str, pattern: str
) -> None:
    ss.pack([{"__key__": key, "txt": key} for key in "ab"], folder)
    ss.delete(folder, keys=["a"])
    Storage().resolve(folder)[0].rm(f"{folder}/index.json")
    with pytest.raises(ManifestError, match=r"no index\.json, without which deleted samples"):
        locate_shards(folder + pattern, Storage())


def test_manifest_decides_shards_and_order(folder: str) -> None:
    put_tars(folder, indexed=("00.tar",))
    put(folder, {"index.json": MANIFEST})
    for url in (folder, f"{folder}/", f"{folder}/index.json"):
        located = locate_shards(url, Storage())
        assert names(located) == ["02.tar", "00.tar"]
        assert [shard.nsamples for shard in located.shards] == [3, 1]
        assert (located.manifest_url or "").endswith("/index.json")
        assert located.indexed == {located.shards[1].url}


def test_named_tars_use_their_manifest_entries(folder: str) -> None:
    put_tars(folder)
    put(folder, {"index.json": MANIFEST})
    located = locate_shards(f"{folder}/{{00..01}}.tar", Storage())
    assert [shard.nsamples for shard in located.shards] == [1, None]


def test_joins_and_lists_keep_their_order(folder: str) -> None:
    put_tars(folder)
    joined = f"{folder}/02.tar::{folder}/00.tar"
    assert names(locate_shards(joined, Storage())) == ["02.tar", "00.tar"]
    assert names(locate_shards([f"{folder}/01.tar", joined], Storage())) == [
        "01.tar",
        "02.tar",
        "00.tar",
    ]


@pytest.mark.parametrize(
    "urls",
    [
        ["{folder}/00.tar", "{folder}/00.tar"],
        ["{folder}/0*.tar", "{folder}/00.tar"],
        ["{folder}", "{folder}/02.tar"],
        ["{folder}", "{folder}/"],
        "{folder}/00.tar::{folder}/{{00..01}}.tar",
    ],
    ids=str,
)
def test_shard_that_is_named_twice_is_refused(urls: str | list[str], folder: str) -> None:
    put_tars(folder)
    urls = urls.format(folder=folder) if isinstance(urls, str) else [u.format(folder=folder) for u in urls]  # fmt: skip
    with pytest.raises(
        ss.errors.OptionError, match=r"named twice.* weights= or use ss.mix.*/0\d\.tar"
    ):
        ss.ShardDataset(urls)


def test_copies_of_a_dataset_cause_a_warning(tmp_path: Path) -> None:
    first, other, copy = (tmp_path / name for name in ("first", "other", "copy"))
    for number, folder in enumerate((first, other)):
        with ss.ShardWriter(folder) as writer:
            writer.write({"cls": number})
    shutil.copytree(first, copy)
    assert len(ss.ShardDataset([str(first), str(other)])) == 2
    with pytest.warns(ss.errors.ShardWarning, match=r"first/.*copy/.* have the same bytes"):
        assert len(ss.ShardDataset([str(first), str(other), str(copy)])) == 3


def test_spellings_of_a_path_name_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tars(f"{tmp_path}/a")
    monkeypatch.chdir(tmp_path)
    for other in ("./a/00.tar", f"{tmp_path}/a/00.tar", f"file://{tmp_path}/a/00.tar", "a/../a/00.tar"):  # fmt: skip
        with pytest.raises(ss.errors.OptionError, match="named twice"):
            ss.ShardDataset(["a/00.tar", other], read=ss.ReadOptions(index="ignore"))


@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_names_of_a_protocol_name_one_shard(folder: str) -> None:
    put_tars(folder)
    with pytest.raises(ss.errors.OptionError, match="named twice"):
        ss.ShardDataset(
            [f"{folder}/00.tar", f"s3a{folder[2:]}/00.tar"], read=ss.ReadOptions(index="ignore")
        )


@pytest.mark.parametrize("folder", ["local", "s3"], indirect=True)  # fsspec's memory takes a chain
def test_colons_in_names_are_no_chain(folder: str) -> None:
    put(folder, {"::/x::0.txt": b"a", "b::c/1.txt": b"b"})
    samples = list(ss.ObjectDataset(folder, label="folder"))
    assert [(one["__key__"], one["txt"], one["cls"]) for one in samples] == [
        ("::/x::0", b"a", b"0"),
        ("b::c/1", b"b", b"1"),
    ]


def test_folder_with_colons_in_its_name_is_no_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cls::1").mkdir()
    Path("cls::1/a.txt").write_bytes(b"a")
    ss.pack("cls::1", "out::v1", kind="files")
    for url in ("out::v1", f"{tmp_path}/out::v1/", "out::v1/*.tar", "out::v1/{000000..000000}.tar"):
        assert [sample["txt"] for sample in ss.ShardDataset(url)] == [b"a"]


def test_folders_can_be_joined(folder: str) -> None:
    put_tars(f"{folder}/a", indexed=("00.tar",))
    put_tars(f"{folder}/b")
    located = locate_shards([f"{folder}/a", f"{folder}/b"], Storage())
    assert names(located) == sorted(TARS) * 2
    assert len({shard.url for shard in located.shards}) == 6
    assert located.indexed == {located.shards[0].url}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("/{00..03}.tar", r"the shard is missing; check .* the pattern's range .*/03\.tar"),
        ("/x.tar", r"the shard is missing.*/x\.tar"),
        ("/x*.tar", r"no shard matches this pattern.*end in \.tar"),
        ("/*.txt", r"no shard matches this pattern"),
        ("/x/a.tar", r"not found; check the (URL|path)|the shard is missing"),
        ("/x", r"not found; check the (URL|path)"),
        ("/sub", r"no index\.json and no \.tar here \(found: deeper/, notes\.txt\)"),
        ("/x/index.json", r"not found"),
        ("/empty.json", r"names no shards: the dataset is empty"),
    ],
)
def test_missing_urls_are_reported(folder: str, pattern: str, message: str) -> None:
    put_tars(folder)
    put(folder, {"sub/notes.txt": b"1", "sub/deeper/00.tar": TARS["00.tar"]})
    put(folder, {"empty.json": encode_manifest(Manifest(shards=()))})
    with pytest.raises(StorageError, match=message) as raised:
        locate_shards(folder + pattern, Storage())
    assert (raised.value.shard or "").startswith(folder)


def test_tars_in_folders_of_a_folder_are_named_by_a_warning(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_tars(folder)
    put(folder, {"notes/a.txt": b"1"})
    assert len(locate_shards(folder, Storage()).shards) == len(find_tars(folder, Storage())) == 3
    assert not caplog.messages
    put(folder, {"validation/00.tar": TARS["00.tar"]})
    for find in (locate_shards, find_tars):
        caplog.clear()
        find(folder, Storage())
        assert f"not those in its folders, such as {folder}/validation" in caplog.text


def test_looking_for_tars_in_folders_lists_a_page_of_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class LargeFolder(Storage):
        def folder_pages(self, url: str) -> Iterator[tuple[list[FileInfo], list[str]]]:
            yield from islice(super().folder_pages(url), 1)
            assert not url.endswith("photos"), "a second page"

    put_tars(str(tmp_path))
    put(str(tmp_path), {"photos/a.jpg": b"1", "validation/00.tar": TARS["00.tar"]})
    assert len(find_tars(str(tmp_path), LargeFolder())) == 3
    assert f"such as {tmp_path}/validation" in caplog.text


def test_folder_without_a_name_is_not_taken_for_one_with_more_tars(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Store(Storage):
        def folder_pages(self, url: str) -> Iterator[tuple[list[FileInfo], list[str]]]:
            """As on S3, where a key has two slashes."""
            for files, folders in super().folder_pages(url):
                yield files, [*folders, ""]

    put_tars(str(tmp_path))
    assert len(find_tars(str(tmp_path), Store())) == 3
    assert not caplog.messages


def test_invalid_manifest_is_reported(folder: str) -> None:
    put(folder, {**TARS, "index.json": b"{"})
    with pytest.raises(ManifestError, match=r"not JSON.*'shardstream index'.*index\.json"):
        locate_shards(folder, Storage())


# --- local and in memory


@pytest.mark.parametrize("url", ["data", "./data", "data/", "data/index.json", "./data/*.tar"])
def test_relative_paths_find_the_indexes_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tars(str(tmp_path / "data"), indexed=tuple(TARS))
    put(str(tmp_path / "data"), {"index.json": MANIFEST})
    monkeypatch.chdir(tmp_path)
    located = locate_shards(url, Storage())
    indexed = [shard.url in located.indexed for shard in located.shards]
    assert indexed == [True] * (3 if "*" in url else 2)


def test_empty_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no index\.json and no \.tar here \(found: nothing\)"):
        locate_shards(str(tmp_path), Storage())


def test_file_other_than_a_tar_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(StorageError, match=r"not a shard: its name does not end in \.tar"):
        locate_shards(str(tmp_path / "a.parquet"), Storage())


def test_partial_files_of_a_killed_writer_are_not_shards(tmp_path: Path) -> None:
    put(
        str(tmp_path),
        {
            "00.tar": b"",
            "02.tar.part-aa": b"",
            "01.tar.part-0123456789ab": b"",
            "00.tar.idx.part-0123456789ab": b"",
        },
    )
    assert names(locate_shards(f"{tmp_path}/00.tar", Storage())) == ["00.tar"]
    for url in (str(tmp_path), f"{tmp_path}/*"):
        with pytest.raises(
            UnfinishedError, match=r"01\.tar\.part-0123456789ab is a half-written tar"
        ):
            locate_shards(url, Storage())
    (
        tmp_path / "01.tar.part-0123456789ab"
    ).unlink()  # a partial index does not make the tars unfinished
    assert names(locate_shards(str(tmp_path), Storage())) == ["00.tar"]


def test_file_url_is_a_local_path(tmp_path: Path) -> None:
    put_tars(str(tmp_path), indexed=("00.tar",))
    located = locate_shards(f"file://{tmp_path}", Storage())
    assert [shard.url for shard in located.shards] == [
        f"file://{tmp_path}/{n}" for n in sorted(TARS)
    ]
    assert located.indexed == {located.shards[0].url}


def test_shards_of_a_manifest_may_be_in_other_folders(tmp_path: Path) -> None:
    put_tars(str(tmp_path / "a" / "b"), indexed=("00.tar",))
    memory = f"memory://test-{uuid.uuid4().hex}"
    put_tars(memory)
    urls = ("b/00.tar", f"{memory}/00.tar", f"{tmp_path}/a/b/01.tar")
    shards = tuple(ShardInfo(url=url, nsamples=1) for url in urls)
    put(str(tmp_path / "a"), {"index.json": encode_manifest(Manifest(shards=shards))})
    located = locate_shards(str(tmp_path / "a"), Storage())
    assert [shard.url for shard in located.shards] == [f"{tmp_path}/a/b/00.tar", *urls[1:]]
    assert located.indexed == {f"{tmp_path}/a/b/00.tar"}


def test_chain_of_fsspec_is_one_url(tmp_path: Path) -> None:
    folder = f"memory://test-{uuid.uuid4().hex}"
    put_tars(folder)
    storage = Storage({"simplecache": {"cache_storage": str(tmp_path)}})
    for url in (f"simplecache::{folder}/{{00..01}}.tar", f"simplecache::{folder}/0[01].tar"):
        located = locate_shards(url, storage)
        assert [shard.url for shard in located.shards] == [
            f"simplecache::{folder}/{name}" for name in ("00.tar", "01.tar")
        ]
        assert storage.read(located.shards[0].url) == TARS["00.tar"]
    assert any(tmp_path.iterdir())


# --- no I/O


@pytest.mark.parametrize(
    ("urls", "expanded"),
    [
        ("a.tar", ["a.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("{008..010}.tar", ["008.tar", "009.tar", "010.tar"]),
        ("a.tar::{b,c}.tar", ["a.tar", "b.tar", "c.tar"]),
        ("simplecache::s3://b/a.tar::c.tar", ["simplecache::s3://b/a.tar", "c.tar"]),
        ("data", ["data"]),  # also a protocol name of fsspec
        ("a.tar::memory", ["a.tar", "memory"]),
        (["b.tar", "a.tar", "b.tar"], ["b.tar", "a.tar", "b.tar"]),
    ],
)
def test_urls_expand_in_order(urls: str | list[str], expanded: list[str]) -> None:
    assert expand_urls(urls) == expanded


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "the list of URLs is empty"),
        ("pipe:cat a.tar", "a URL must not start a command"),
        ("pipe:aws s3 cp s3://b/a.tar -", "a URL must not start a command"),
        ("pipe:touch {marker}; cat {00..02}.tar", "a URL must not start a command"),
        ("a-{00..", r"braces.*\{000000\.\.000099\}"),
        ("nosuch://b/a.tar", "Protocol not known: nosuch"),
    ],
)
def test_invalid_urls_are_refused(urls: str | list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        locate_shards(urls, Storage())


def test_pipe_url_in_a_manifest_starts_no_command(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    shards = (ShardInfo(url=f"pipe:touch {marker}; cat a.tar"), ShardInfo(url=f"pipe://touch {marker}.tar"))  # fmt: skip
    for shard in shards:
        put(str(tmp_path), {"index.json": encode_manifest(Manifest(shards=(shard,)))})
        with pytest.raises(ShardStreamError):
            ss.ShardDataset(str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "tar", "compressed"),
    [
        ("a.tar", True, False),
        ("A.TAR", True, False),
        ("a.tgz", True, True),
        ("a.tar.gz", True, True),
        ("a.tar.zst", True, True),
        ("a.tar.idx", False, False),
        ("a.tar.part-1", False, False),
        ("a.zip", False, False),
        ("https://h/a.tar?sig=1.json", True, False),
        ("https://h/a.tar.gz?sig=1", True, True),
    ],
)
def test_shards_are_recognised_by_name(name: str, *, tar: bool, compressed: bool) -> None:
    assert (is_tar(name), is_compressed(name)) == (tar, compressed)


# --- over HTTP


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def http_folder(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_http_shards_are_looked_up_one_by_one(http_folder: str, tmp_path: Path) -> None:
    put_tars(str(tmp_path), indexed=("01.tar",))
    located = locate_shards(f"{http_folder}/{{00..01}}.tar", Storage())
    assert [shard.nsamples for shard in located.shards] == [None, 2]
    assert located.indexed == {f"{http_folder}/01.tar"}


def test_signed_url_is_read_but_never_shown(http_folder: str, tmp_path: Path) -> None:
    put_tars(str(tmp_path), indexed=("00.tar",))
    signature = "?X-Amz-Signature=1f3&X-Amz-Credential=me"
    located = locate_shards(f"{http_folder}/00.tar{signature}", Storage())
    assert [shard.filesize for shard in located.shards] == [len(TARS["00.tar"])]
    assert located.indexed == set()  # the signature is valid for one file only
    assert Storage().read(located.shards[0].url) == TARS["00.tar"]
    url = f"{http_folder}/none.tar{signature}"
    for failing in (lambda: locate_shards(url, Storage()), lambda: Storage().read(url)):
        with pytest.raises(StorageError, match=re.escape(f"{http_folder}/none.tar?…")) as raised:
            failing()
        assert "1f3" not in str(raised.value)


def test_manifest_on_a_host_without_listings_is_read_by_number(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "set", samples=7, per_shard=3)

    class NoListing(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=folder)

        def list_directory(self, path: str | os.PathLike[str]) -> None:  # noqa: ARG002
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoListing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        storage = Storage()
        found = locate_shards(f"http://127.0.0.1:{server.server_port}/index.json", storage)
        assert [shard.nsamples for shard in found.shards] == [3, 3, 1]
        assert found.indexed == {shard.url for shard in found.shards}
        assert ShardCatalog(found, storage).extents([6]).shards.tolist() == [2]
        server.shutdown()


def test_misspelt_storage_option_is_named(s3_env: None, bucket: str) -> None:
    with pytest.raises(OptionError, match="storage options: .*'endpoint'"):
        locate_shards(f"{bucket}/", Storage({"endpoint": "http://127.0.0.1:9"}))


@pytest.mark.parametrize("pattern", ["/x.tar", "/x*.tar", "/x", "/x/a.tar", "/x/index.json"])
def test_missing_dataset_is_the_same_error_for_all_url_forms(folder: str, pattern: str) -> None:
    put_tars(folder)
    with pytest.raises(FileNotFoundError) as raised:
        ss.ShardDataset(folder + pattern)
    assert type(raised.value) is NotFoundError


def test_fields_are_known_if_manifests_list_all_shards(folder: str) -> None:
    storage = Storage()
    one = make_shards(f"{folder}/one", samples=4, per_shard=2)
    other = make_shards(f"{folder}/other", samples=[{"txt": "a"}])
    assert locate_shards(one, storage).fields == ("cls",)
    assert locate_shards([one, other], storage).fields == ("cls", "txt")
    assert locate_shards(f"{one}/000001.tar", storage).fields == ("cls",)
    tars = [f"{one}/000001.tar", f"{other}/000000.tar"]
    assert locate_shards(tars, storage).fields == ("cls", "txt")
    put_tars(f"{folder}/plain")
    for urls in ([one, f"{folder}/plain"], f"{folder}/plain", [f"{folder}/plain/00.tar", one]):
        assert locate_shards(urls, storage).fields is None
