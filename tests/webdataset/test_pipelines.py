"""What is refused, what errors say, and what no pipeline loses in silence."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardstream as ss
import shardstream.webdataset as wds
from tests.image_files import png_of
from tests.servers import S3Server, new_bucket
from tests.webdataset import upstream
from tests.webdataset.upstream import write_tar


def shard(path: Path, keys: str = "abc", **fields: bytes) -> str:
    """Write a shard with one sample for each letter."""
    named = fields or {"txt": b"text", "cls": b"1"}
    write_tar(path, {f"{key}.{name}": data for key in keys for name, data in named.items()})
    return str(path)


def read(url: Any, **options: Any) -> list[dict[str, Any]]:
    return list(wds.WebDataset(url, shardshuffle=False, **options))


def keys(url: Any, **options: Any) -> str:
    return "".join(sample["__key__"] for sample in read(url, **options))


def cut(path: Path, size: int) -> str:
    path.write_bytes(path.read_bytes()[:size])
    return str(path)


def closed(dataset: Any) -> None:
    dataset.close()
    iter(dataset)


REFUSED: dict[str, tuple[Callable[[str], object], str]] = {
    "command": (lambda u: wds.WebDataset(f"pipe:cat {u}", shardshuffle=False), "never does; name the file itself"),
    "command in a list": (lambda u: read([f"pipe:cat {u}"], handler=wds.ignore_and_continue), "name the file itself"),
    "command to gopen": (lambda u: wds.gopen(f"pipe:cat {u}"), "name the file itself"),
    "command to write": (lambda u: wds.TarWriter(f"pipe:cat > {u}"), "name the file itself"),
    "joined command": (lambda u: wds.SimpleShardList(f"{u}::pipe:cat {u}"), "name the file itself"),
    "pickle": (
        lambda u: list(wds.WebDataset(u, shardshuffle=False).decode(handler=wds.ignore_and_continue)),
        "a pickle could run code; repack the field",
    ),
    "LMDB": (lambda u: wds.WebDataset(u, shardshuffle=False).lmdb_cached("x"), "pass cache_dir="),
    "YAML": (lambda _: wds.WebDataset("spec.yaml", shardshuffle=False), "pass a pattern or a list of URLs"),
    "folder": (lambda u: wds.WebDataset(f"{Path(u).parent}/", shardshuffle=False), "wait for more of them without end"),
    "bzip2": (lambda u: wds.TarWriter(f"{u}.bz2"), "use compress='gz'"),
    "unset variable": (lambda _: wds.SimpleShardList("${NOWHERE}/a.tar"), "export WDS_NOWHERE"),
    "no shards": (lambda _: wds.SimpleShardList([]), "the list of URLs is empty"),
    "own cache names": (lambda u: wds.WebDataset(u, shardshuffle=False, url_to_name=str), "leave it out"),
    "missing cache": (lambda u: wds.WebDataset(u, shardshuffle=False, cache_dir=f"{u}.d"), "create it, for this user"),
    "wrong weights": (lambda u: wds.RandomMix([wds.SimpleShardList(u)] * 2, [1]), "a weight above 0 for each of 2 datasets"),
    "closed": (lambda u: closed(wds.WebDataset(u, shardshuffle=False)), "was closed"),
    "one name for all shards": (wds.ShardWriter, "write a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_to_do(name: str, tmp_path: Path) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ss.errors.OptionError, match=message):
        function(shard(tmp_path / "a.tar", pyd=pickle.dumps({})))


def test_pickle_is_decoded_by_a_function_of_the_caller(tmp_path: Path) -> None:
    url = shard(tmp_path / "a.tar", "a", pyd=pickle.dumps({"a": 1}), cls=b"2")
    dataset = wds.WebDataset(url, shardshuffle=False)
    (sample,) = dataset.decode(wds.handle_extension("pyd", pickle.loads))
    assert sample["pyd"] == {"a": 1}
    (sample,) = dataset.decode(only="cls")
    assert (sample["cls"], sample["pyd"]) == (2, pickle.dumps({"a": 1}))


class Code:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_tensors_are_read_without_the_code_of_their_pickle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = io.BytesIO(), io.BytesIO()
    torch.save([torch.arange(3)], good)
    torch.save(Code(), bad)
    url = shard(tmp_path / "a.tar", "a", pth=good.getvalue())
    (sample,) = wds.WebDataset(url, shardshuffle=False).decode()
    assert sample["pth"][0].tolist() == [0, 1, 2]
    url = shard(tmp_path / "b.tar", "a", pth=bad.getvalue())
    with pytest.raises(wds.UnsafeError, match="needs the code of its pickle; store tensors"):
        list(wds.WebDataset(url, shardshuffle=False).decode(handler=wds.ignore_and_continue))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("size", [512, 700, 1500, 3000])
def test_cut_shard_is_an_error_and_a_handler_loses_at_most_its_last_sample(
    size: int, tmp_path: Path
) -> None:
    first, last = shard(tmp_path / "0.tar", "ab"), shard(tmp_path / "2.tar", "de")
    middle = cut(Path(shard(tmp_path / "1.tar", "bc")), size)
    with pytest.raises(tarfile.ReadError, match="cut"):
        read([first, middle, last])
    errors: list[Exception] = []

    def note(error: Exception) -> bool:
        errors.append(error)
        return True

    samples = read([first, middle, last], handler=note)
    assert len(errors) == 1
    names = "".join(sample["__key__"] for sample in samples)
    assert names in ("abde", "abbde")
    assert all({"txt", "cls"} <= sample.keys() for sample in samples)


def test_shard_without_its_end_is_read_with_a_warning(tmp_path: Path) -> None:
    url = cut(Path(shard(tmp_path / "0.tar", "ab")), 4096)
    with pytest.warns(ss.errors.ShardWarning, match="may have been cut between two samples"):
        assert keys(url) == "ab"


def test_cut_compressed_shard_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    path.write_bytes(gzip.compress(Path(shard(tmp_path / "a.tar")).read_bytes())[:-20])
    with pytest.raises(tarfile.ReadError, match=r"damaged or cut.*a\.tgz"):
        read(str(path))
    shard(tmp_path / "plain.tar")
    whole = tmp_path / "compressed.tar"  # compression is seen in the bytes, not in the name
    whole.write_bytes(gzip.compress((tmp_path / "plain.tar").read_bytes()))
    assert keys(str(whole)) == "abc"


def test_two_tars_in_one_file_are_an_error(tmp_path: Path) -> None:
    one = Path(shard(tmp_path / "a.tar"))
    both = tmp_path / "both.tar"
    both.write_bytes(one.read_bytes() * 2)
    with pytest.raises(wds.tariterators.TarError, match="after the end of the archive"):
        read(str(both))


def test_samples_of_two_shards_with_one_key_stay_apart(tmp_path: Path) -> None:
    first = shard(tmp_path / "0.tar", "a", txt=b"0")
    second = shard(tmp_path / "1.tar", "a", cls=b"1")
    assert [sorted(sample) for sample in read([first, second])] == [
        ["__key__", "__local_path__", "__url__", "txt"],
        ["__key__", "__local_path__", "__url__", "cls"],
    ]


def test_field_twice_is_an_error_or_left_to_the_handler(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.txt", "a.TXT", "b.txt"):
            archive.addfile(tarfile.TarInfo(name))
    url = str(tmp_path / "a.tar")
    with pytest.raises(ValueError, match="duplicate file name in tar file"):
        read(url)
    assert keys(url, handler=wds.ignore_and_continue) == "ab"


def test_missing_shard_is_skipped_or_ends_the_epoch(tmp_path: Path) -> None:
    urls = [shard(tmp_path / "0.tar", "a"), str(tmp_path / "1.tar"), shard(tmp_path / "2.tar", "b")]
    with pytest.raises(FileNotFoundError, match=r"1\.tar"):
        read(urls)
    assert keys(urls, handler=wds.ignore_and_continue) == "ab"
    assert keys(urls, handler=wds.ignore_and_stop) == "a"
    with pytest.warns(UserWarning, match="NotFoundError"):
        assert keys(urls, handler=wds.warn_and_continue) == "ab"
    with pytest.warns(UserWarning, match="NotFoundError"):
        assert keys(urls, handler=wds.warn_and_stop) == "a"


def test_worker_without_shards_is_an_error(tmp_path: Path) -> None:
    url = shard(tmp_path / "0.tar")
    with pytest.raises(ValueError, match="fewer shards than workers"):
        list(wds.WebLoader(wds.WebDataset(url, shardshuffle=False), batch_size=None, num_workers=2))
    dataset = wds.WebDataset(url, shardshuffle=False, empty_check=False)
    assert len(list(wds.WebLoader(dataset, batch_size=None, num_workers=2))) == 3


def test_variables_braces_and_joins_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        shard(tmp_path / f"{name}.tar", name)
    monkeypatch.setenv("WDS_ROOT", str(tmp_path))
    monkeypatch.setenv("WDS_HERE", "${ROOT}")
    assert keys("${HERE}/{a,b}.tar::${ROOT}/c.tar") == "abc"
    monkeypatch.setenv("GOPEN_REWRITE", f"mine:/=file://{tmp_path}")
    with wds.gopen("mine://a.tar") as stream:
        assert stream.read(5) == b"a.txt"


def test_images_that_would_lose_numbers_are_errors(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((2, 2), 1000, np.uint16)).save(stream, "PNG")
    url = shard(tmp_path / "a.tar", "a", png=stream.getvalue())
    with pytest.raises(wds.DecodingError, match=r"field 'png'.*8 bits; .*handle_extension\('png'"):
        list(wds.WebDataset(url, shardshuffle=False).decode("l8"))
    scale = wds.handle_extension(
        "png", lambda data: ss.decode_sample({"png": data}, "l8", scale_16_bits=True)["png"]
    )
    (sample,) = wds.WebDataset(url, shardshuffle=False).decode(scale, "l8")
    assert sample["png"].tolist() == [[3, 3], [3, 3]]
    colours = shard(tmp_path / "c.tar", "a", png=png_of(np.full((2, 2, 3), 1000, np.uint16)))
    with pytest.raises(wds.DecodingError, match="would lose its numbers"):  # Pillow keeps 8 bits
        list(wds.WebDataset(colours, shardshuffle=False).decode("rgb8"))
    with pytest.raises(wds.DecodingError, match="not an image of a format"):
        list(
            wds.WebDataset(
                shard(tmp_path / "b.tar", "a", eps=b"%!PS-Adobe"), shardshuffle=False
            ).decode("pil")
        )


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "a"}, "must contain a __key__"),
        ({"__key__": "a"}, "without fields would be lost"),
        ({"__key__": "a.b", "txt": "a"}, "under another key"),
        ({"__key__": "a", "x": 3}, "no handler found for x"),
        ({"__key__": "a", "png": np.full((2, 2), 3.0)}, "out of range"),
        ({"__key__": "a", "png": np.full((2, 2), np.nan)}, "out of range"),
        ({"__key__": "a", "jpg": np.zeros((2, 2), np.uint16)}, "as JPEG; use a field png"),
        ({"__key__": "a", "png": np.zeros((2, 2, 3), np.uint16)}, r"not uint16 of \(2, 2, 3\)"),
    ],
)
def test_sample_that_cannot_be_written_is_refused_whole(
    sample: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.tar")
    with wds.TarWriter(path) as sink:
        with pytest.raises(ValueError, match=message):
            sink.write(sample)
        sink.write({"__key__": "good", "txt": "a"})
    assert keys(path) == "good"


def test_tar_of_a_failed_program_does_not_appear(tmp_path: Path) -> None:
    def write() -> None:
        with wds.ShardWriter(f"{tmp_path}/%d.tar", maxcount=1) as sink:
            sink.write({"__key__": "a", "txt": "a"})
            sink.write({"__key__": "b", "txt": "b"})
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]


def test_log_says_how_a_pipeline_is_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardstream")
    read(shard(tmp_path / "a.tar"))
    (record,) = [one.getMessage() for one in caplog.records if "WebDataset" in one.getMessage()]
    assert "one after the other, as webdataset does" in record


def test_dataset_with_a_length_stays_itself_in_a_spawned_worker(tmp_path: Path) -> None:
    dataset = wds.WebDataset(shard(tmp_path / "a.tar"), shardshuffle=False).with_length(
        3, silent=True
    )
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert (len(again), len(list(again))) == (3, 3)
    with pytest.raises(TypeError):
        len(wds.WebDataset(shard(tmp_path / "b.tar"), shardshuffle=False))


def test_remote_shards_are_written_read_and_cached(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    with new_bucket(s3) as bucket:
        url = f"{bucket}/a.tar"
        stream = wds.gopen(url, "wb", storage_options=s3.storage_options)
        with wds.TarWriter(stream) as sink:
            sink.write({"__key__": "a", "cls": 7})
        stream.close()
        options = {"storage_options": s3.storage_options, "cache_dir": tmp_path / "cache"}
        for _ in range(2):
            assert [sample["cls"] for sample in read(url, **options)] == [b"7"]
        assert any((tmp_path / "cache").rglob("*"))
        with pytest.raises(FileNotFoundError, match="not found"):
            read(f"{bucket}/b.tar", **options)


class Failing(io.BytesIO):
    """A stream that breaks after a number of bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() >= 1500:
            raise ConnectionResetError("the connection broke")
        return super().read(500 if size is None else min(size, 500))

    def seekable(self) -> bool:
        return False


def test_sample_of_a_stream_that_breaks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(shard(tmp_path / "a.tar", "ab")).read_bytes()

    def opened(url: str, mode: str, bufsize: int) -> Failing:
        return Failing(data)

    monkeypatch.setitem(wds.gopen_schemes, "mine", opened)
    urls = ["mine://a.tar", shard(tmp_path / "b.tar", "c")]
    with pytest.raises(ConnectionResetError):
        read(urls)
    assert keys(urls, handler=wds.ignore_and_continue) == "c"


@pytest.mark.parametrize(
    "stage",
    [
        wds.map(lambda _: wds.gopen("pipe:true"), wds.ignore_and_continue),
        wds.map_dict(handler=wds.ignore_and_continue, txt=wds.autodecode.unpickle_loads),
    ],
)
def test_no_handler_skips_what_is_refused(stage: Any, tmp_path: Path) -> None:
    dataset = wds.WebDataset(shard(tmp_path / "a.tar"), shardshuffle=False)
    with pytest.raises(ss.errors.OptionError):
        list(dataset.compose(stage))


def test_two_passes_over_a_cache_at_a_time_do_not_mix(tmp_path: Path) -> None:
    dataset = wds.WebDataset(shard(tmp_path / "a.tar"), shardshuffle=False).mcached()
    first, second = iter(dataset), iter(dataset)
    next(first)
    assert len(list(second)) == len(list(first)) + 1 == len(list(dataset)) == 3


SHADOWED = """
import runpy, sys
import webdataset.gopen, webdataset.multi
runpy.run_path({shim!r})
from webdataset.gopen import gopen
import webdataset as wds
names = [name for name in sys.modules if name.startswith("webdataset.") and "/shardstream/" not in sys.modules[name].__file__]
print(*sorted(names))
for open_command in (gopen, wds.gopen, wds.WebDataset):
    try:
        open_command("pipe:true")
    except wds.UnsafeError:
        print("refused")
"""


@pytest.mark.slow
def test_shim_leaves_nothing_of_webdataset_that_opens_commands() -> None:
    program = SHADOWED.format(shim=str(upstream.SHIM))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["webdataset.multi webdataset.pytorch", *["refused"] * 3, ""]


OLD_VERSIONS = {
    "0.1": {"__init__": "", "filters": ""},
    "0.2": {  # has the names that are imported, but lacks some that are asked for
        "__init__": "",
        "filters": "FilterFunction = RestCurried = decode_bin = decode_text = pipelinefilter = object",
        "autodecode": "Continue = call_extension_handler = handle_extension = imagespecs = object",
    },
}


@pytest.mark.parametrize("version", ["missing", *OLD_VERSIONS])
def test_error_without_webdataset_names_the_extra(version: str, tmp_path: Path) -> None:
    if version in OLD_VERSIONS:
        (tmp_path / "webdataset").mkdir()
        for name, text in OLD_VERSIONS[version].items():
            (tmp_path / "webdataset" / f"{name}.py").write_text(text, encoding="utf-8")
    else:
        (tmp_path / "webdataset.py").write_text("raise ImportError", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "import shardstream.webdataset"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(upstream.ROOT)))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "OptionError: shardstream.webdataset runs the stages of webdataset 1.0" in done.stderr
    assert '".[webdataset]"' in done.stderr


def test_wrong_option_is_no_bad_sample(tmp_path: Path) -> None:
    url = shard(tmp_path / "a.tar")
    stage = wds.tarfile_to_samples(handler=wds.ignore_and_continue, storage_option={})
    with pytest.raises(ss.errors.OptionError, match="gopen does not take"):
        list(wds.DataPipeline(wds.SimpleShardList(url), stage))


def test_file_that_is_replaced_is_read_again(s3: S3Server) -> None:
    with new_bucket(s3) as bucket:
        url = f"{bucket}/info.json"
        for text in (b"1", b"22"):
            with wds.gopen(url, "wb", storage_options=s3.storage_options) as sink:
                sink.write(text)
            with wds.gopen(url, storage_options=s3.storage_options) as stream:
                assert stream.read() == text


def test_workers_read_remote_shards_that_their_parent_has_read(s3: S3Server) -> None:
    with new_bucket(s3) as bucket:
        urls = [f"{bucket}/{name}.tar" for name in "ab"]
        for url in urls:
            ss.packing.write_shard(
                url, [{"__key__": url[-5], "cls": 1}], storage_options=s3.storage_options
            )
        options: dict[str, Any] = {"storage_options": s3.storage_options}
        assert keys(urls, **options) == "ab"
        for exact in (False, True):
            dataset = wds.WebDataset(urls, shardshuffle=False, exact=exact, **options)
            loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
            assert sorted(sample["__key__"] for sample in loader) == ["a", "b"]
