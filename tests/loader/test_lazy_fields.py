"""Test lazy=: fields that are read by ranges where they are used, and videos of which a clip fetches its parts only."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from tests.codecs.test_video import FILES, LIBRARIES, WITH_FFMPEG
from tests.codecs.videos import video_file
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
COUNT, LARGE = 6, 3 << 20
FILE = {
    number: np.random.default_rng(number).bytes(LARGE + 700 * number) for number in range(COUNT)
}
ORDERS = [("bin", "json", "txt"), ("json", "bin", "txt"), ("json", "txt", "bin")]


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A remote store that counts the bytes that are read of tars; may fail."""

    protocol = "counting"
    cachable = False
    read_bytes = 0
    fails = False
    fails_at = 0
    """Number of the read that fails, counted down."""

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        self.fails_at -= 1
        if self.fails or self.fails_at == 0:
            raise PermissionError("no longer")
        data = bytes(super().cat_file(path, start, end, **options))
        if path.endswith(".tar"):
            self.read_bytes += len(data)
        return data


@pytest.fixture
def remote() -> Iterator[CountingFileSystem]:
    filesystem = CountingFileSystem()
    yield filesystem
    filesystem.store.clear()


def write(folder: str, order: tuple[str, ...] = ORDERS[0], filesystem: Any = None) -> str:
    """Write two shards; every second sample has a small file, every third one a long key."""
    with ss.ShardWriter(folder, max_samples=4, filesystem=filesystem) as writer:
        for number in range(COUNT):
            file = FILE[number] if number % 2 == 0 else FILE[number][:1000]
            fields = {"bin": file, "json": {"number": number}, "txt": f"text {number}"}
            key = f"{number:03d}" + "x" * 150 * (number % 3 == 0)
            writer.write({"__key__": key, **{field: fields[field] for field in order}})
    ss.index(folder, members=True, filesystem=filesystem)
    if filesystem is not None:
        filesystem.read_bytes = 0
    return folder


def copied(value: Any) -> Any:
    """Return what another process gets."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301  (made in the same line)


def expected(number: int) -> bytes:
    return FILE[number] if number % 2 == 0 else FILE[number][:1000]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_only_the_parts_in_use_are_fetched(
    remote: CountingFileSystem, order: tuple[str, ...]
) -> None:
    folder = write("/data", order, remote)
    dataset = ss.ShardDataset(
        folder, read=ss.ReadOptions(filesystem=remote, lazy=["bin"]), shuffle=True
    ).decode()
    samples = sorted(dataset, key=lambda sample: sample["json"]["number"])
    assert remote.read_bytes < 50_000
    for number, sample in enumerate(samples):
        assert [*sample] == ["__key__", "__url__", *order]
        assert (sample["json"], sample["txt"]) == ({"number": number}, f"text {number}")
        file, whole = sample["bin"], expected(number)
        assert len(file) == len(whole)
        assert file[-3:] == whole[-3:]
        assert file[100:200] == whole[100:200]
        assert remote.read_bytes < (number // 2 + 1) * 3_000_000
    for number, sample in enumerate(samples):
        assert sample["bin"].read() == expected(number)
        assert sample["bin"][:0] == b""
    before = remote.read_bytes
    with samples[2]["bin"].open() as stream:
        stream.seek(-10, os.SEEK_END)
        assert stream.read() == expected(2)[-10:]
        stream.seek(5)
        assert stream.read(7) == expected(2)[5:12]
    assert remote.read_bytes == before  # blocks are kept


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_hand_files_out_and_orders_and_states_are_the_same(
    tmp_path: Path, method: str | None
) -> None:
    folder = write(str(tmp_path / "data"))

    def loader(method: str | None, **options: Any) -> ss.ShardLoader:
        dataset = ss.ShardDataset(folder, **grouped(shuffle=True, seed=3, **options))
        return ss.ShardLoader(
            dataset,
            1,
            num_workers=0 if method is None else 2,
            multiprocessing_context=method,
            collate_fn=list,
        )

    whole = [sample for batch in loader(method and "fork") for sample in batch]
    first = loader(method, lazy=("bin",))
    iterator = iter(first)
    found = [*next(iterator), *next(iterator)]
    rest = loader(method, lazy=("bin",))
    rest.load_state_dict(first.state_dict())
    found += [sample for batch in rest for sample in batch]
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in whole]
    for one, other in zip(found, whole, strict=True):
        assert isinstance(one["bin"], ss.storage.FieldFile)
        assert one["bin"].read() == other["bin"]
        assert copied(one["bin"])[1:9] == other["bin"][1:9]


def test_other_readers_and_decoders(tmp_path: Path) -> None:
    folder = write(str(tmp_path / "data"))
    by_number = ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"])).by_number()
    assert by_number[4]["bin"].read() == FILE[4]
    assert "bytes in" in repr(by_number[4]["bin"])
    decoded = by_number.decode(fields={"bin": len})  # a decoder of one's own gets the bytes
    assert [sample["bin"] for sample in decoded] == [len(expected(n)) for n in range(COUNT)]
    some = ss.ShardDataset(
        folder, read=ss.ReadOptions(lazy=["bin"]), fields=["bin", "txt"]
    ).by_number()
    assert [*some[0]] == ["__key__", "__url__", "bin", "txt"]
    part = ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"]), subset=[4, 2])
    assert [sample["bin"][:5] for sample in part] == [FILE[4][:5], FILE[2][:5]]
    mixed = ss.mix({"a": part, "b": ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"]))})
    assert all(isinstance(s["bin"], ss.storage.FieldFile) for s in mixed.slice(8))


def test_augmentations_stay_the_same(tmp_path: Path) -> None:
    folder = write(str(tmp_path / "data"))

    def drawn(**options: Any) -> list[Any]:
        dataset = ss.ShardDataset(folder, **grouped(shuffle=True, seed=1, **options))
        draws = dataset.map(lambda _, rng: int(rng.integers(1 << 60)), rng=True)
        return list(draws.map(lambda number, rng: (number, rng.random()), rng=True))

    assert drawn(lazy=["bin"]) == drawn(lazy=["bin"], fields=["bin"]) == drawn()


def test_a_store_that_fails_is_not_a_bad_sample(remote: CountingFileSystem) -> None:
    folder = write("/data", filesystem=remote)
    dataset = ss.ShardDataset(
        folder, read=ss.ReadOptions(filesystem=remote, lazy=["bin"]), on_error="skip"
    )

    def read_bytes(sample: dict[str, Any]) -> bytes:
        remote.fails = True
        return bytes(sample["bin"][:9])

    with pytest.raises(ss.errors.AccessDeniedError, match="no longer"):
        list(dataset.map(read_bytes))


def overwrite(tar: Path, change: Callable[[bytes], bytes]) -> None:
    status = tar.stat()
    tar.write_bytes(change(tar.read_bytes()))
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_replaced_shard_is_noticed(tmp_path: Path) -> None:
    folder = write(str(tmp_path / "data"))
    tar = Path(folder) / "000000.tar"
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"])).by_number()
    first, third = dataset[0]["bin"], dataset[2]["bin"]
    assert third[:4] == FILE[2][:4]
    whole = tar.read_bytes()
    overwrite(tar, lambda data: data.replace(b"002.bin", b"009.bin"))
    with pytest.raises(ss.errors.ChangedError, match=r"replaced.*002\.bin is no longer"):
        copied(third).read()
    other = tar.with_name("other")
    other.write_bytes(whole)
    os.utime(other, ns=(tar.stat().st_atime_ns, tar.stat().st_mtime_ns))
    other.replace(tar)  # of equal size and time
    with pytest.raises(ss.errors.ChangedError, match="replaced"):
        first.read()
    with pytest.raises(ss.errors.ChangedError):
        third[-4:]


def test_names_with_capitals(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(3):
            for field in ("Left.BIN", "TXT"):
                member = tarfile.TarInfo(f"{number}{'ä' * (number == 2)}.{field}")
                data = FILE[number] if "BIN" in field else b"text"
                member.size, member.pax_headers = len(data), {"comment": "x" * 600 * number}
                tar.addfile(member, io.BytesIO(data))
    ss.index(str(tmp_path), members=True)
    dataset = ss.ShardDataset(str(tmp_path), read=ss.ReadOptions(lazy=["left.bin"])).by_number()
    assert [sample["left.bin"].read() for sample in dataset] == [FILE[n] for n in range(3)]
    assert [sample["txt"] for sample in dataset] == [b"text"] * 3


@pytest.mark.parametrize(
    ("options", "change"),
    with_slow_rest(
        [
            ({"fields": ["bin", "txt"]}, ("txt", "bin")),
            ({"lazy": ["bin"]}, ("pdf", "bin")),
            ({"fields": ["bin"], "lazy": ["bin"]}, ("bin", "txt", "small")),
        ],
        [{"fields": ["bin", "txt"]}, {"lazy": ["bin"]}, {"fields": ["bin"], "lazy": ["bin"]}],
        [("txt", "bin"), ("pdf", "bin"), ("bin", "txt", "small")],
    ),
)
def test_an_index_of_members_of_another_tar_is_an_error(
    remote: CountingFileSystem, options: dict[str, Any], change: tuple[str, ...]
) -> None:
    def write_again(fields: tuple[str, ...], size: int) -> None:
        noise = np.random.default_rng(1).bytes(1 << 20)
        with ss.ShardWriter("/data", filesystem=remote, overwrite=True) as writer:
            for number in range(4):
                values = {"bin": noise[:size], "pdf": noise, "txt": "text"}
                kept = {name: values[name] for name in fields if name in values}
                writer.write({"__key__": str(number), **kept})

    write_again(("bin", "pdf", "txt"), 1 << 20)
    ss.index("/data", members=True, filesystem=remote)
    index = remote.cat_file("/data/000000.idx")
    write_again((*change, *{"bin", "pdf", "txt"}.difference(change)), 1 << 20 - ("small" in change))
    ss.index("/data", filesystem=remote)
    remote.pipe_file("/data/000000.idx", index)
    dataset = ss.ShardDataset("/data", **grouped(filesystem=remote, on_error="skip", **options))
    with pytest.raises((ss.errors.IndexMismatchError, ss.errors.ChangedError)):
        [bytes(sample["bin"]) for sample in dataset]


def test_options_that_exclude_it(tmp_path: Path) -> None:
    folder = write(str(tmp_path / "data"))
    for options, message in (
        ({"lazy": "bin"}, "lazy= must be a list"),
        ({"lazy": ["mp4"]}, "no field 'mp4'; its fields are"),
        ({"lazy": ["bin"], "fields": ["txt"]}, "'bin', which fields= leaves out"),
        ({"lazy": ["bin"], "verify": "sha256"}, "verify="),
        ({"lazy": ["bin"], "index": "ignore"}, "lazy= need shards that are read by number"),
    ):
        with pytest.raises(ss.errors.OptionError, match=message):
            ss.ShardDataset(folder, **grouped(**options))
    with pytest.raises(ss.errors.OptionError, match="lazy= cannot be joined"):
        ss.join(ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"])), folder)
    for index in Path(folder).glob("*.idx"):
        if not index.name.endswith(".tar.idx"):
            index.unlink()
    with pytest.raises(ss.errors.OptionError, match="shardstream index --members"):
        ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"]))


def test_a_field_cannot_pretend_to_be_a_place(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    with ss.ShardWriter(folder) as writer:
        writer.write({"__key__": "a", "bin": bytes(16) + struct.pack("<5Q", 0, 0, 1 << 40, 0, 0)})
    ss.index(folder, members=True)
    assert (
        len(ss.ShardDataset(folder, read=ss.ReadOptions(lazy=["bin"])).by_number()[0]["bin"]) == 56
    )


@pytest.fixture(scope="module")
def long_video() -> bytes:
    """A video of 9 MB with a key frame every 5 frames and its tables at the end."""
    options = (("g", "5"), ("bf", "2"), ("qp", "1"), ("preset", "ultrafast"))
    return video_file(count=60, options=options, size=(720, 960), sound="aac")


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_clip_fetches_its_part_of_a_video(
    remote: CountingFileSystem, long_video: bytes, library: str
) -> None:
    assert len(long_video) > 6 << 20
    with ss.ShardWriter("/videos", filesystem=remote) as writer:
        for number in range(2):
            writer.write({"__key__": str(number), "mp4": long_video, "cls": number})
    ss.index("/videos", members=True, filesystem=remote)
    remote.read_bytes = 0
    dataset = ss.ShardDataset("/videos", read=ss.ReadOptions(filesystem=remote, lazy=["mp4"]))
    for sample in dataset.decode(ss.codecs.VideoDecoder(library=library)):
        video = sample["mp4"]
        assert video.metadata == ss.codecs.Video(long_video, library).metadata
        clip = video.clip(4)
        np.testing.assert_array_equal(clip, ss.codecs.Video(long_video, library).clip(4))
        assert remote.read_bytes < (sample["cls"] + 1) * 0.6 * len(long_video)
        sound = copied(video).audio()
        np.testing.assert_array_equal(
            sound.samples, ss.codecs.Video(long_video, library).audio().samples
        )
        remote.read_bytes = 0


@pytest.mark.slow
def test_windows_of_lazy_fields_read_their_parts_only(
    remote: CountingFileSystem, long_video: bytes
) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 99, (4000, 5, 11)).astype(np.int64) for _ in range(2)]
    sounds = [rng.uniform(-1, 1, (400_000, 2)).astype(np.float32) for _ in range(2)]
    with ss.ShardWriter("/long", filesystem=remote) as writer:
        for number, (array, sound) in enumerate(zip(arrays, sounds, strict=True)):
            file = io.BytesIO()
            soundfile.write(file, sound, 16_000, format="WAV", subtype="FLOAT")
            writer.write(
                {"__key__": f"{number}", "npy": array, "wav": file.getvalue(), "mp4": long_video}
            )
    ss.index("/long", members=True, filesystem=remote)
    options = ss.ReadOptions(filesystem=remote, lazy=["npy", "wav", "mp4"])
    dataset = ss.ShardDataset("/long", read=options)
    remote.read_bytes = 0
    for window in dataset.windows("npy", size=100, stride=1300, lengths=[4000, 4000]):
        start = window["__start__"]
        expected = arrays[int(window["__key__"])][start : start + 100]
        np.testing.assert_array_equal(window["npy"], expected)
        window["npy"] += 1  # it is a copy
    assert remote.read_bytes < 8 * (100 * 440 + 60_000)
    remote.read_bytes = 0
    for window in dataset.windows("wav", size=8000, stride=130_000, lengths=[400_000, 400_000]):
        start = window["__start__"]
        samples = sounds[int(window["__key__"])][start : start + 8000].T
        np.testing.assert_array_equal(window["wav"].samples, samples)
    assert remote.read_bytes < 8 * (8000 * 8 + 100_000)
    remote.read_bytes = 0
    clips = dataset.decode("video").windows("mp4", size=4, stride=30, lengths=[60, 60])
    whole = ss.codecs.Video(long_video)
    for window in clips:
        start = window["__start__"]
        np.testing.assert_array_equal(window["mp4"], whole.frames(range(start, start + 4)))
    assert remote.read_bytes < len(clips) * 0.6 * len(long_video)


@WITH_FFMPEG
def test_an_outage_during_decoding_is_an_error_of_the_store(
    remote: CountingFileSystem, long_video: bytes
) -> None:
    with ss.ShardWriter("/videos", filesystem=remote) as writer:
        writer.write({"__key__": "a", "mp4": long_video})
    ss.index("/videos", members=True, filesystem=remote)
    for library in ("torchcodec", "pyav"):
        dataset = ss.ShardDataset("/videos", read=ss.ReadOptions(filesystem=remote, lazy=["mp4"]))
        [sample] = dataset.decode(ss.codecs.VideoDecoder(library=library))
        assert sample["mp4"].metadata.num_frames == 60
        remote.fails = True
        with pytest.raises(ss.errors.AccessDeniedError):
            sample["mp4"].uniform(10)
        remote.fails = False
        # FFmpeg reads on after an error, and may hide it.
        for number in range(1, 100):
            [sample] = dataset.decode(ss.codecs.VideoDecoder(library=library))
            remote.fails_at = number
            try:
                sample["mp4"].frames([5, 40])
            except ss.errors.AccessDeniedError:
                continue
            assert remote.fails_at > 0, f"read {number} failed in silence"
            break
        assert number > 2


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FILES)
def test_frames_of_a_file_are_those_of_its_bytes(name: str, library: str) -> None:
    whole, ranged = (
        ss.codecs.Video(FILES[name], library),
        ss.codecs.Video(ss.storage.FieldFile(FILES[name]), library),
    )
    assert ranged.metadata == whole.metadata
    numbers = [-1, 0, 17, 17, 3, *range(len(whole))]
    np.testing.assert_array_equal(ranged.frames(numbers), whole.frames(numbers))


def boxes_with(path: tuple[bytes, ...], change: Callable[[bytes], bytes]) -> bytes:
    """Return the test file with one box changed, by its place in the boxes."""
    data = FILES["faststart.mp4"]
    start, end = 0, len(data)
    for name in path:
        start = data.index(name, start, end) + 4
        end = start - 8 + int.from_bytes(data[start - 8 : start - 4], "big")
    changed = change(data[start:end])
    assert len(changed) == end - start
    return data[:start] + changed + data[end:]


STBL = (b"moov", b"mdia", b"minf", b"stbl")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ((*STBL, b"stts"), lambda data: data[:8] + b"\xff" * 4 + data[12:]),
        ((*STBL, b"stsz"), lambda data: data[:8] + b"\0\0\0\x07" + data[12:]),
        ((*STBL, b"stsz"), lambda data: data[:52] + bytes(4) + data[56:]),  # no frame 10
        ((*STBL, b"stss"), lambda data: data[:8] + b"\0\0\xff\xff" + data[12:]),
        ((*STBL, b"ctts"), lambda data: data[:8] + b"\0\0\0\x09" + data[12:]),
        ((b"moov", b"mdia", b"mdhd"), lambda data: data[:12] + bytes(4) + data[16:]),
        ((b"moov", b"elst"), lambda data: data[:7] + b"\x02" + data[8:]),
        ((b"moov", b"elst"), lambda data: data[:8] + b"\0\0\0\x05" + data[12:]),
    ],
)
def test_tables_that_do_not_tell_the_times_are_not_used(
    path: tuple[bytes, ...],
    change: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "shardstream")
    data = boxes_with(path, change)

    def frames(video: ss.codecs.Video) -> Any:
        try:
            return video.frames(range(len(video))).tobytes()
        except ss.errors.DecodeError:
            return "refused"

    assert frames(ss.codecs.Video(ss.storage.FieldFile(data), "pyav")) == frames(
        ss.codecs.Video(data, "pyav")
    )
    assert "fetched whole" in caplog.text
    caplog.clear()
    assert len(ss.codecs.Video(ss.storage.FieldFile(FILES["faststart.mp4"]), "pyav")) == 50
    assert "fetched whole" not in caplog.text
