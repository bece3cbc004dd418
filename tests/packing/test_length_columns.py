"""Columns of lengths and sizes of files, and of results of functions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest

import shardstream as ss
from shardstream.errors import IndexMismatchError, OptionError, SampleError
from tests.codecs.sounds import sound_file, tone
from tests.codecs.videos import video_file
from tests.static_server import serve_files

PROPERTIES = (
    "n=npy.len,size=npy.bytes,t=txt.len,f=mp4.frames,s=mp4.seconds,h=mp4.height,w=mp4.width,"
    "wf=wav.frames,ws=wav.seconds,wr=wav.rate,wc=wav.channels,ph=jpg.height,pw=jpg.width,qw=left.png.width"
)
COUNT = 6


def picture(width: int, height: int, form: str) -> bytes:
    stream = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned, which stored pixels are not
    PIL.Image.new("RGB", (width, height)).save(stream, form, exif=exif)
    return stream.getvalue()


def samples(count: int = COUNT) -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"k{i}",
            "npy": np.arange(3 * i, dtype=np.int32).reshape(i, 3),
            "txt": "ä" * i,
            "mp4": video_file(count=10 + i),
            "wav": sound_file("WAV", seconds=0.1 * (i + 1), channels=1, rate=8000),
            "jpg": picture(30 + i, 20, "JPEG"),
            "left.png": picture(7 + i, 5, "PNG"),
            "json": {"len": i * 10},
        }
        for i in range(count)
    ]


def write(
    folder: Path | str, rows: list[dict[str, Any]], columns: Any = None, **options: Any
) -> str:
    with ss.ShardWriter(f"{folder}/{{shard}}.tar", columns=columns, max_samples=4) as writer:
        for row in rows:
            writer.write(row)
    return str(folder)


def decoded_lengths(folder: str) -> list[dict[str, Any]]:
    """Return the same properties of the decoded samples."""
    found = []
    for sample in ss.ShardDataset(folder).decode("pil", "video", "audio"):
        video, sound = sample["mp4"], sample["wav"]
        found.append(
            {
                "__key__": sample["__key__"],
                "n": len(sample["npy"]),
                "size": 128 + sample["npy"].nbytes,
                "t": len(sample["txt"]),
                "f": len(video),
                "s": pytest.approx(len(video) / video.metadata.fps),
                "h": video.frames([0]).shape[1],
                "w": video.frames([0]).shape[2],
                "wf": sound.samples.shape[1],
                "ws": sound.samples.shape[1] / sound.rate,
                "wr": sound.rate,
                "wc": sound.samples.shape[0],
                "ph": sample["jpg"].height,
                "pw": sample["jpg"].width,
                "qw": sample["left.png"].width,
            }
        )
    return found


@pytest.mark.parametrize(
    "way",
    [
        "writer",
        "pack",
        "reshard",
        "index",
        "headers",
        pytest.param("processes", marks=pytest.mark.slow),
    ],
)
def test_lengths_are_those_of_the_decoded_samples_however_they_are_written(
    tmp_path: Path, way: str
) -> None:
    folder, rows = str(tmp_path / "data"), samples()
    if way == "writer":
        write(folder, rows, PROPERTIES)
    else:
        write(tmp_path / "plain", rows)
    if way == "pack":
        ss.pack(f"{tmp_path}/plain/*.tar", folder, columns=PROPERTIES, processes=2)
    elif way == "reshard":
        ss.reshard(tmp_path / "plain", folder, columns=PROPERTIES)
    elif way not in ("writer", "pack"):
        folder = str(tmp_path / "plain")
        executor = ss.tasks.LocalExecutor(processes=2) if way == "processes" else None
        ss.index(folder, columns=PROPERTIES, sha256=way != "headers", executor=executor)
    assert ss.catalog.read_columns(folder).to_pylist() == decoded_lengths(folder)
    assert not ss.verify(folder).problems


def test_names_in_json_stay_values_of_the_json(tmp_path: Path) -> None:
    folder = write(tmp_path, samples(3), "json.len")
    assert ss.catalog.read_columns(folder)["len"].to_pylist() == [0, 10, 20]


def mp3_without_length() -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp3", options={"write_xing": "0"}) as container:
        sound = container.add_stream("libmp3lame", rate=44_100, layout="mono")
        wave = (tone(1.5, channels=1).T * 30_000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(wave, format="s16p", layout="mono")
        frame.sample_rate = 44_100
        for packet in (*sound.encode(frame), *sound.encode(None)):
            container.mux(packet)
    assert b"Xing" not in stream.getvalue()
    assert b"Info" not in stream.getvalue()
    return stream.getvalue()


SOUNDS = [("mp3", "MP3", None), ("flac", "FLAC", None), ("ogg", "OGG", "VORBIS"), ("opus", "OGG", "OPUS"), ("aiff", "AIFF", None)]  # fmt: skip


@pytest.mark.parametrize(("field", "form", "subtype"), SOUNDS)
def test_other_sounds_have_the_length_of_their_samples(
    tmp_path: Path, field: str, form: str, subtype: str | None
) -> None:
    rows = [
        {
            "__key__": str(i),
            field: sound_file(form, subtype=subtype, seconds=1 + i / 3, rate=48_000),
        }
        for i in range(3)
    ]
    if field == "mp3":
        rows.append({"__key__": "3", field: mp3_without_length()})
    folder = write(tmp_path, rows, f"n={field}.frames")
    expected = [
        sample[field].samples.shape[1] for sample in ss.ShardDataset(folder).decode("audio")
    ]
    assert ss.catalog.read_columns(folder)["n"].to_pylist() == expected


FRAGMENTS = (("movflags", "frag_keyframe+empty_moov"),)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("mp4", {"container_options": FRAGMENTS}),
        ("mkv", {"form": "matroska"}),
        ("avi", {"form": "avi", "codec": "mpeg4", "options": ()}),
        ("mp4", {"skipped": frozenset([7, 8])}),
    ],
)
def test_other_videos_have_the_number_of_their_frames(
    tmp_path: Path, field: str, options: dict[str, Any]
) -> None:
    write(tmp_path, [{"__key__": "a", field: video_file(**options)}])
    ss.index(tmp_path, columns=f"n={field}.frames", sha256=False)
    (sample,) = ss.ShardDataset(tmp_path).decode("video")
    assert ss.catalog.read_columns(tmp_path)["n"].to_pylist() == [len(sample[field])]


def streamed_rf64() -> bytes:
    """Return a file that says it has no samples, as a program that cannot seek back leaves it."""
    data = bytearray(sound_file("RF64"))
    at = data.index(b"ds64") + 8
    data[at : at + 24] = bytes(24)
    return bytes(data)


def damaged() -> dict[str, tuple[str, bytes]]:
    wav, mp4 = sound_file("WAV"), video_file()
    stream = io.BytesIO()
    np.save(stream, np.arange(100))
    return {
        "npy.len": ("npy", stream.getvalue()[:-8]),
        "npy.len of a number": ("npy", stream.getvalue().replace(b"(100,)", b"()    ")),
        "npy.len of a sound": ("npy", wav),
        "txt.len": ("txt", b"\xff"),
        "wav.frames": ("wav", wav[: len(wav) // 2]),
        "wav.seconds": ("wav", b"RIFF"),
        "mp4.frames": ("mp4", mp4[:-100]),
        "mp4.width": ("mp4", b"#EXTM3U"),
        "jpg.width": ("jpg", b"no picture"),
        "flac.frames": ("flac", b"fLaC" + bytes(100)),
        "wav.channels": ("wav", streamed_rf64()),
    }


@pytest.mark.parametrize("source", damaged())
@pytest.mark.parametrize("sha256", [True, False])
def test_damaged_file_is_an_error_that_names_sample_and_shard(
    tmp_path: Path, source: str, sha256: bool
) -> None:
    field, data = damaged()[source]
    write(tmp_path, [{"__key__": "bad", field: data}])
    with pytest.raises(SampleError, match=r"the column x .*: the value cannot be read") as caught:
        ss.index(tmp_path, columns=f"x={source.partition(' ')[0]}", sha256=sha256)
    assert caught.value.key == "bad"
    assert caught.value.field == field
    assert str(caught.value.shard).endswith("/0.tar")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("n=npy.length", r"files of npy have no property 'length', but bytes, len; correct"),
        ("left.png.depth", r"files of left.png have no property 'depth', but bytes, height, width"),
        ("wav.len", "frames, seconds, rate, channels"),
        ("n=flac.frames", r"no sample has a value for the column n \(flac.frames\)"),
        ("npy", "of lengths and sizes of files, such as npy.len"),
        ({"n": 7}, "is made of 7; give the name of a field, or a function"),
        ("n=keep()", "is made by a function"),
    ],
)
def test_wrong_properties_are_errors(tmp_path: Path, columns: Any, message: str) -> None:
    write(tmp_path, samples(1))
    with pytest.raises((OptionError, SampleError), match=message):
        ss.index(tmp_path, columns=columns)


def test_sample_without_the_field_has_no_length(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"__key__": "a", "npy": np.zeros(3)}, {"__key__": "b", "cls": 1}]
    write(tmp_path, rows)
    report = ss.index(tmp_path, columns="n=npy.len")
    assert report.warnings == ("column n (npy.len): 1 sample of 2 without a value",)
    assert ss.catalog.read_columns(tmp_path)["n"].to_pylist() == [3, None]
    with pytest.raises(OptionError, match=r"sample 1 has no value in the column 'n'"):
        ss.ShardDataset(tmp_path).decode().windows("npy", size=2, lengths="n")


@pytest.mark.slow
def test_remote_headers_of_large_files_are_all_that_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    rows: list[dict[str, Any]] = [
        {
            "__key__": f"k{i}",
            "npy": np.resize(noise, (4 + i, 1 << 20)),
            "wav": sound_file("WAV", seconds=20 + i, rate=48_000),
            "mp4": video_file(count=20 + i)
            + (4 << 20).to_bytes(4, "big")
            + b"free"
            + bytes((4 << 20) - 8),
        }
        for i in range(8)
    ]
    expected = [(4 + i, 48_000 * (20 + i), 20 + i) for i in range(8)]
    write(tmp_path / "data", rows)
    total = sum(path.stat().st_size for path in (tmp_path / "data").glob("*.tar"))
    with serve_files(tmp_path) as server:
        urls = [f"{server.url}/data/{n}.tar" for n in range(2)]
        server.requests.clear()
        ss.index(
            urls,
            to=tmp_path / "index",
            columns="n=npy.len,s=wav.frames,f=mp4.frames",
            sha256=False,
        )
        ranges = [one for method, _, one in server.requests if method == "GET" and one]
        bounds = [one.removeprefix("bytes=").split("-") for one in ranges]
        read = sum(int(end) - int(start) + 1 for start, end in bounds)
        table = ss.catalog.read_columns(tmp_path / "index")
    assert [*zip(*(table[name].to_pylist() for name in "nsf"), strict=True)] == expected
    assert read < total / 10
    assert len(ranges) <= 5 * 8


def test_checksums_of_a_manifest_are_kept_where_tars_are_not_read_whole(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", samples())
    before = json.loads((tmp_path / "data/index.json").read_text())
    ss.index(folder, columns="n=npy.len", sha256=False)
    assert json.loads((tmp_path / "data/index.json").read_text()) == before
    assert not ss.verify(folder).problems
    write(tmp_path / "other", [row | {"__key__": f"o{n}"} for n, row in enumerate(samples()[:4])])
    (tmp_path / "other/0.tar").rename(tmp_path / "data/1.tar")
    ss.index(folder, columns="n=npy.len", sha256=False)
    shards = json.loads((tmp_path / "data/index.json").read_text())["shardlist"]
    assert [("sha256" in shard) for shard in shards] == [True, False]
    assert not ss.verify(folder).problems


def test_columns_of_a_replaced_tar_are_refused_without_a_checksum(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", samples(4)[1:], "n=txt.len")
    write(tmp_path / "other", [row | {"txt": "äa"} for row in samples(4)[1:]])
    size = (tmp_path / "data/0.tar").stat().st_size
    assert (tmp_path / "other/0.tar").replace(tmp_path / "data/0.tar").stat().st_size == size
    ss.index(folder, sha256=False)
    with pytest.raises(IndexMismatchError, match="no checksum of the shard is known"):
        ss.catalog.read_columns(folder)
    ss.index(folder, columns="n=txt.len", sha256=False)
    assert ss.catalog.read_columns(folder)["n"].to_pylist() == [2, 2, 2]


def is_long(sample: dict[str, Any]) -> bool:
    return bool(len(sample["txt"].decode()) >= 3 and sample["__key__"].startswith("k"))


def mean(sample: dict[str, Any]) -> np.float32 | None:
    array = np.load(io.BytesIO(sample["npy"]))
    return array.mean(dtype=np.float32) if array.size else None


@pytest.mark.parametrize(
    "way", ["index", "headers", pytest.param("processes", marks=pytest.mark.slow), "writer"]
)
def test_function_of_a_sample_is_a_column(tmp_path: Path, way: str) -> None:
    columns: dict[str, Any] = {"keep": is_long, "mean": mean, "n": "npy.len"}
    write(tmp_path, samples(), columns if way == "writer" else None)
    if way != "writer":
        executor = ss.tasks.LocalExecutor(processes=2) if way == "processes" else None
        ss.index(tmp_path, columns=columns, sha256=way != "headers", executor=executor)
    table = ss.catalog.read_columns(tmp_path)
    assert table["keep"].to_pylist() == [i >= 3 for i in range(COUNT)]
    assert table["mean"].to_pylist() == [None, *((3 * i - 1) / 2 for i in range(1, COUNT))]
    kept = ss.ShardDataset(tmp_path, where="keep")
    assert [sample["__key__"] for sample in kept] == ["k3", "k4", "k5"]
    assert len(kept) == 3
    assert not ss.verify(tmp_path).problems


def fails(sample: dict[str, Any]) -> bool:
    if sample["__key__"] == "k2":
        raise KeyError("nothing")
    return True


def changes_type(sample: dict[str, Any]) -> Any:
    return 1 if sample["__key__"] != "k2" else "text"


def gives_a_list(sample: dict[str, Any]) -> Any:
    return [sample["__key__"]]


@pytest.mark.parametrize("processes", [0, 2])
def test_function_that_fails_is_an_error_with_its_sample(tmp_path: Path, processes: int) -> None:
    write(tmp_path, samples(4))
    executor = ss.tasks.LocalExecutor(processes=processes) if processes else None
    with pytest.raises(KeyError, match="nothing") as caught:
        ss.index(tmp_path, columns={"x": fails}, executor=executor)
    assert any("in the column x of sample 'k2' in " in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("function", "key", "message"),
    [
        (changes_type, "k2", "the value is text, but that of k0 is numbers"),
        (gives_a_list, "k0", "is a list; a column holds bools, numbers or text"),
    ],
)
def test_results_that_are_no_column_are_errors(
    tmp_path: Path, function: Any, key: str, message: str
) -> None:
    write(tmp_path, samples(4))
    with pytest.raises(SampleError, match=message) as caught:
        ss.index(tmp_path, columns={"x": function})
    assert caught.value.key == key


def test_packs_that_can_be_resumed_refuse_functions(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", samples(1))
    with pytest.raises(OptionError, match=r"then ss.index\(url, columns=\{name: function\}\)"):
        ss.reshard(folder, tmp_path / "other", columns={"keep": is_long})
    with pytest.raises(OptionError, match="is made by a function"):
        ss.pack(f"{folder}/*.tar", tmp_path / "other", columns={"keep": is_long})


def test_lengths_of_all_views_are_columns(tmp_path: Path) -> None:
    a = write(tmp_path / "a", samples(4), "n=npy.len")
    b = write(tmp_path / "b", samples(), {"n": "txt.len", "keep": is_long})
    mixed = ss.mix([ss.ShardDataset(a, subset=[3, 1]), ss.ShardDataset(b, where="keep")])
    assert mixed.samples.read_columns(["n"])["n"].to_pylist() == [3, 1, 3, 4, 5]
    with pytest.raises(OptionError, match=r"there is no column 'keep'.*a/0.tar") as caught:
        mixed.samples.read_columns(["keep"])
    assert "a/0.tar" in str(caught.value)


def test_columns_that_samples_of_a_split_lack_name_the_split(tmp_path: Path) -> None:
    def pack(name: str, count: int) -> ss.PackReport:
        rows = [{"json": {"a": 1, "b": 1} if number < count else {"a": 1}} for number in range(40)]
        split = {"train": 0.5, "val": 0.5}
        return ss.pack(rows, tmp_path / name, split=split, columns=["json.a", "json.b"])

    missing = [line.partition(" (")[0] for line in pack("some", 20).warnings]
    assert missing == ["split train: column b", "split val: column b"]
    with pytest.raises(OptionError, match=r"column b \(json.b\).*val"):
        pack("one", 1)
    assert not list(tmp_path.glob("one/*/index.json"))
