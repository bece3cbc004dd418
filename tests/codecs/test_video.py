"""Test video: the frames and sound of FFmpeg, by both libraries, with seeks; lazy and picklable; cut and hostile files are errors."""

from __future__ import annotations

import functools
import importlib
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstream as ss
import shardstream.webdataset as wds
from shardstream.testing import make_shards
from tests.attack import survived
from tests.codecs.sounds import ffmpeg_samples, sound_file
from tests.codecs.videos import HEIGHT, WIDTH, ffmpeg_frames, video_file
from tests.limits import set_limits
from tests.servers import in_ci
from tests.small_datasets import FEW_CORES
from tests.static_server import serve_files

MiB = 1 << 20
FILES: dict[str, bytes] = {
    "mp4": video_file(sound="aac"),
    "faststart.mp4": video_file(options=(("g", "250"), ("bf", "3"), ("movflags", "faststart"))),
    "vfr.mp4": video_file(skipped=frozenset({1, 2, 9, 30, 31, 32})),
    "noedit.mp4": video_file(container_options=(("use_editlist", "0"),)),
    "fragments.mp4": video_file(container_options=(("movflags", "frag_keyframe+empty_moov"),)),
    "refresh.mp4": video_file(options=(("g", "12"), ("intra-refresh", "1"))),
    "mkv": video_file("matroska", sound="flac"),
    "webm": video_file("webm", codec="libvpx-vp9", sound="libopus"),
    "avi": video_file("avi", codec="mjpeg", pixels="yuvj420p", options=()),
    "mov": video_file("mov", codec="mpeg4", options=(("g", "10"), ("bf", "2"))),
}

B_FRAMES = (("g", "12"), ("bf", "3"), ("b_strategy", "0"))
OTHER_FILES: dict[str, bytes] = {  # times of packets are missing, or are those of decoding
    "h264.mpg": video_file("vob", options=B_FRAMES),
    "mpeg2.mpg": video_file("vob", codec="mpeg2video", options=(("g", "12"), ("bf", "2"))),
    "mpeg1.mpg": video_file("mpeg", codec="mpeg1video", options=(("g", "12"), ("bf", "2"))),
    "ts": video_file("mpegts", options=B_FRAMES),
    "refresh.ts": video_file("mpegts", options=(("g", "12"), ("intra-refresh", "1"))),
    "opengop.ts": video_file("mpegts", options=(*B_FRAMES, ("x264-params", "open-gop=1"))),
    "refresh.mkv": video_file("matroska", options=(("g", "12"), ("intra-refresh", "1"))),
    "h264": video_file("h264", options=B_FRAMES),
    "m2v": video_file("mpeg2video", codec="mpeg2video", options=(("bf", "2"),)),
    "h264.avi": video_file("avi", options=B_FRAMES),
    "opengop.avi": video_file("avi", options=(*B_FRAMES, ("x264-params", "open-gop=1"))),
    "mpeg4.avi": video_file("avi", codec="mpeg4", options=(("g", "10"), ("bf", "2"))),
    "mjpeg": video_file("mjpeg", codec="mjpeg", pixels="yuvj420p", options=()),
    "flv": video_file("flv", options=B_FRAMES),
}


@functools.cache
def loads_torchcodec() -> bool:
    """Return whether torchcodec finds an FFmpeg of the system."""
    try:
        importlib.import_module("torchcodec.decoders")
    except RuntimeError:
        return in_ci()  # there it must
    return True


# As text it is evaluated when a test runs: torchcodec has a thousand memory areas, which each fork would copy.
WITH_FFMPEG = pytest.mark.skipif(
    f"not sys.modules[{__name__!r}].loads_torchcodec()",  # also in modules that import it
    reason="no FFmpeg for torchcodec",
)
LIBRARIES = (pytest.param("torchcodec", marks=WITH_FFMPEG), "pyav")
# The FFmpeg of the system and that of PyAV's wheel round the inverse transforms of these codecs differently.
TOLERANCES = {("avi", "torchcodec"): 3, ("mov", "torchcodec"): 3}
pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FILES)
def test_frames_are_those_of_ffmpeg_in_any_order(name: str, library: str) -> None:
    expected = ffmpeg_frames(FILES[name]).astype(np.int16)
    video = ss.codecs.Video(FILES[name], library)
    metadata = video.metadata
    assert (len(video), metadata.height, metadata.width) == (len(expected), HEIGHT, WIDTH)
    assert metadata.duration_s == pytest.approx(2.0, abs=0.1)
    tolerance = TOLERANCES.get((name, library), 0)
    everything = video.frames(range(len(video)))
    assert everything.dtype == np.uint8
    np.testing.assert_allclose(everything, expected, atol=tolerance)
    rng = np.random.default_rng(0)
    for count in (1, 3, 40):
        numbers = rng.integers(-len(expected), len(expected), count)
        np.testing.assert_array_equal(video.frames(numbers), everything[numbers])
    assert video.frames([]).shape == (0, HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FILES)
def test_each_frame_alone_is_the_same_frame(name: str, library: str) -> None:
    # torchcodec's own seeks end after some frames of files without an edit list, in fragments, or with intra refresh.
    video = ss.codecs.Video(FILES[name], library)
    everything = video.frames(range(len(video)))
    for number in range(len(video)):
        np.testing.assert_array_equal(video.frames([number])[0], everything[number])


@pytest.mark.parametrize("library", [None, "pyav"])
@pytest.mark.parametrize("name", OTHER_FILES)
def test_files_without_times_of_their_frames_have_those_of_ffmpeg(
    name: str, library: str | None
) -> None:
    expected = ffmpeg_frames(OTHER_FILES[name])
    video = ss.codecs.Video(OTHER_FILES[name], library)
    assert (len(video), len(expected)) == (50, 50)
    assert video.metadata.fps == pytest.approx(25, rel=0.03)
    for number in (0, 1, 2, 3, 11, 12, 13, 14, 25, 26, 36, 47, 48, 49):
        np.testing.assert_array_equal(video.frames([number])[0], expected[number])
    np.testing.assert_array_equal(video.uniform(5), expected[[5, 15, 25, 35, 45]])


@pytest.mark.slow
def test_frames_that_only_pyav_can_number_are_an_error_without_it(tmp_path: Path) -> None:
    code = """if True:
        import sys, pathlib
        sys.modules["av"] = None
        import shardstream as ss
        for name in sys.argv[1:]:
            try:
                ss.codecs.Video(pathlib.Path(name).read_bytes()).frames([7])
            except ss.errors.OptionError as error:
                print("pip install av" in str(error))
    """
    names = ["mkv", "fragments.mp4", "h264.mpg", "ts", "avi"]
    for name in names:
        (tmp_path / name).write_bytes({**FILES, **OTHER_FILES}[name])
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"True"] * len(names)


def dash(url: str) -> bytes:
    kind = 'mimeType="video/mp4" codecs="avc1.4d400a" width="64" height="48"'
    return (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011" '
        'type="static" mediaPresentationDuration="PT2S" minBufferTime="PT1S"><Period><AdaptationSet contentType="video">'
        f'<Representation id="1" bandwidth="100000" {kind}><BaseURL>{url}</BaseURL></Representation></AdaptationSet></Period></MPD>'
    ).encode()


def hls(url: str) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n".encode()


def ffconcat(url: str) -> bytes:
    return f"ffconcat version 1.0\nfile '{url}'\n".encode()


def sdp(_: str) -> bytes:
    """Name a port at which FFmpeg waits for a sender, for 20 s."""
    return (
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        b"m=video 0 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    )


# First bytes of containers, after which a text follows: FFmpeg chooses by all bytes, unless it is sure.
DISGUISES = {
    "none": b"",
    "jpeg": b"\xff\xd8\xff\n",
    "ebml": b"\x1a\x45\xdf\xa3\n",
    "matroska": b"\x1a\x45\xdf\xa3\x8b\x42\x82\x88matroska\n",
    "start code": b"\0\0\x01\xb3\n",
    "box": b"\0\0\0\x08mdat\0\0\0\x0cfree\n\n\n\n",
    "ts": b"G" * 600 + b"\n",
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("playlist", [dash, hls, ffconcat, sdp])
def test_a_playlist_reads_no_file_and_reaches_no_host(
    playlist: Callable[[str], bytes], library: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(FILES["fragments.mp4"])
    with serve_files(tmp_path) as served:
        urls = [f"{served.url}/secret.mp4"]
        if playlist is not sdp:
            scheme = f"subfile,,start,0,end,0,,:{secret}"
            urls += [str(secret), f"file:{secret}", scheme, "data:video/mp4;base64,AAAA"]
        for url, (name, head) in itertools.product(urls, DISGUISES.items()):
            video = ss.codecs.Video(head + playlist(url), library)
            for attack in (functools.partial(video.uniform, 1), video.audio):
                with pytest.raises(ss.errors.DecodeError) as raised:
                    attack()
                assert name != "none" or "begins with" in str(raised.value)
            for field in ("wav", "mp3", "ogg", "flac"):
                with pytest.raises(ss.errors.DecodeError):
                    ss.decode_sample({field: head + playlist(url)}, "audio")
    assert served.requests == []


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["mp4", "mkv", "webm"])
def test_sound_is_that_of_ffmpeg(name: str, library: str) -> None:
    samples, rate = ss.codecs.Video(FILES[name], library).audio()
    expected = ffmpeg_samples(FILES[name])
    assert (samples.dtype, rate) == (np.float32, 48_000 if name == "webm" else 44_100)
    assert samples.shape == expected.shape
    np.testing.assert_allclose(samples, expected, atol=1e-5)
    assert ss.codecs.Video(FILES[name], library).audio(rate=16_000, mono=True).rate == 16_000


@pytest.mark.parametrize("library", LIBRARIES)
def test_uniform_frames_and_clips(library: str) -> None:
    video = ss.codecs.Video(FILES["mp4"], library)
    frames = video.frames(range(50))
    np.testing.assert_array_equal(video.uniform(5), frames[[5, 15, 25, 35, 45]])
    np.testing.assert_array_equal(video.uniform(50), frames)
    np.testing.assert_array_equal(video.clip(8), frames[21:29])
    np.testing.assert_array_equal(video.clip(4, stride=3), frames[20:30:3])
    starts = set()
    for seed in range(40):
        clip = video.clip(16, stride=3, rng=np.random.default_rng(seed))
        (start,) = (n for n in range(5) if (frames[n : n + 46 : 3] == clip).all())
        starts.add(start)
    assert starts == {0, 1, 2, 3, 4}
    with pytest.raises(ss.errors.DecodeError, match="it has 50 frames, 51 are needed"):
        video.uniform(51)
    with pytest.raises(ss.errors.DecodeError, match="it has 50 frames, 51 are needed"):
        video.clip(26, stride=2)
    with pytest.raises(ss.errors.DecodeError, match="no frame 50, it has 50"):
        video.frames([50])
    with pytest.raises(ss.errors.OptionError, match="1 or more, not 0"):
        video.clip(0)


@pytest.mark.parametrize("library", LIBRARIES)
def test_rotated_video_is_upright_and_deep_video_warns(library: str) -> None:
    data = bytearray(video_file())
    matrix = data.index(b"tkhd") + 44  # the display matrix of the track: 1 0 0, 0 1 0, 0 0 1
    turned = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(n.to_bytes(4, "big", signed=True) for n in turned)
    video = ss.codecs.Video(bytes(data), library)
    assert (video.metadata.height, video.metadata.width) == (WIDTH, HEIGHT)
    upright = np.rot90(ffmpeg_frames(video_file())[3], -1)
    np.testing.assert_array_equal(video.frames([3])[0], upright)
    with pytest.warns(ss.errors.ImageWarning, match="yuv420p10le loses bits"):
        assert len(ss.codecs.Video(video_file(pixels="yuv420p10le"), library)) == 50


def test_field_is_lazy_picklable_and_located() -> None:
    sample = {
        "__key__": "7",
        "__url__": "s3://b/0.tar",
        "mp4": FILES["mp4"],
        "webm": b"no video",
        "txt": b"a",
    }
    decoded = ss.decode_sample(sample, "video", "rgb8", "audio")
    video = decoded["mp4"]
    assert isinstance(video, ss.codecs.Video)
    first = video.frames([0])
    again = pickle.loads(pickle.dumps(video))  # noqa: S301  (our own)
    np.testing.assert_array_equal(again.frames([0]), first)
    assert len(repr(video)) < 200
    with pytest.raises(
        ss.errors.DecodeError, match=r"cannot be decoded.*s3://b/0.tar.*sample '7', field 'webm'"
    ):
        len(decoded["webm"])
    assert ss.decode_sample(sample)["mp4"] == FILES["mp4"]
    chosen = ss.decode_sample(sample, ss.codecs.VideoDecoder(library="pyav"))["mp4"]
    assert chosen.library == "pyav"
    with pytest.raises(
        ss.errors.OptionError, match="library must be one of torchcodec, pyav, not 'cv2'"
    ):
        ss.codecs.VideoDecoder(library="cv2")


def test_torch_video_is_that_of_torchvision() -> None:
    frames, sound, info = ss.decode_sample({"mp4": FILES["mp4"]}, "torch_video")["mp4"]
    assert (frames.dtype, tuple(frames.shape)) == (torch.uint8, (50, HEIGHT, WIDTH, 3))
    assert (sound.dtype, len(sound), info) == (
        torch.float32,
        1,
        {"video_fps": 25, "audio_fps": 44_100},
    )
    frames, sound, info = wds.torch_video(".mp4", FILES["vfr.mp4"])
    assert (len(frames), tuple(sound.shape), set(info)) == (44, (0, 0), {"video_fps"})
    assert wds.torch_video(".txt", b"") is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_video_without_sound_and_sound_without_video(library: str) -> None:
    with pytest.raises(ss.errors.DecodeError, match="no sound"):
        ss.codecs.Video(FILES["mov"], library).audio()
    sound = ss.codecs.Video(sound_file("WAV"), library)
    assert sound.audio().samples.shape == (2, 44_100)
    with pytest.raises(ss.errors.DecodeError, match="video stream"):
        len(sound)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
def test_cut_files_are_errors_and_never_fewer_frames(name: str, part: float, library: str) -> None:
    data = FILES[name][: int(part * len(FILES[name]))]
    with pytest.raises(ss.errors.DecodeError, match="cannot be decoded"):
        len(ss.codecs.Video(data, library))


JOINED = {
    **dict.fromkeys(("mp4", "fragments.mp4", "mov", "mkv", "webm", "avi", "flv", "wmv"), False),
    **dict.fromkeys(("ts", "mpeg2.mpg", "h264", "m2v", "mjpeg"), True),
}
"""Whether joined files are read whole; else they are an error."""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", JOINED)
def test_joined_files_are_read_whole_or_an_error(name: str, library: str) -> None:
    more = {"wmv": video_file("asf", codec="wmv2", options=())}
    first = (FILES | OTHER_FILES | more)[name]
    video = ss.codecs.Video(first + first, library)
    if JOINED[name]:
        frames = ss.codecs.Video(first, library).frames(range(50))
        np.testing.assert_array_equal(video.frames(range(50, 100)), frames)
        assert len(video) == 100
        return
    for read in (lambda: len(video), video.read_audio):
        with pytest.raises(
            ss.errors.DecodeError, match=f"second file begins at byte {len(first)} of"
        ):
            read()


def test_second_file_after_a_live_recording_is_found() -> None:
    live = without_length(FILES["mkv"])
    with pytest.raises(ss.errors.DecodeError, match=f"second file begins at byte {len(live)} of"):
        len(ss.codecs.Video(live + live))


def test_sound_of_a_cut_file_is_an_error() -> None:
    with pytest.raises(ss.errors.DecodeError, match="the file is cut short"):
        ss.codecs.Video(FILES["mkv"][: len(FILES["mkv"]) * 3 // 4]).read_audio()


def without_length(file: bytes) -> bytes:
    """Return a Matroska file as a live recording, whose segment declares no length."""
    data = bytearray(file)
    place = data.index(b"\x18\x53\x80\x67") + 4
    assert data[place] == 1  # 8 bytes
    data[place : place + 8] = b"\x01" + b"\xff" * 7
    return bytes(data)


def test_live_recordings_declare_no_length_and_are_read() -> None:
    assert len(ss.codecs.Video(without_length(FILES["mkv"]))) == 50


@pytest.mark.parametrize("library", LIBRARIES)
def test_hostile_video_is_a_bad_sample_in_bounded_memory(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, ss.codecs.Video, FRAMES_LIMIT_BYTES=MiB, FRAME_LIMIT_PIXELS=100 * 100)
    large = video_file(size=(128, 128), count=2)
    file = bytearray(FILES["mp4"])
    for box, place, claim in ((b"stts", 12, 1 << 26), (b"stsz", 12, 1 << 26), (b"stsz", 8, 1)):
        at = file.index(box) + place
        file[at : at + 4] = claim.to_bytes(4)
    attacks = {
        "its table names 67108864 frames": lambda: len(ss.codecs.Video(bytes(file), library)),
        "the limit is 1048576": lambda: ss.codecs.Video(FILES["mp4"], library).frames([0] * 1000),
        "frames of 16384 pixels": lambda: len(ss.codecs.Video(large, library)),
        "cut short": lambda: len(ss.codecs.Video(b"\0\xff\xff\xffftyp", library)),
        "cannot be decoded": lambda: len(ss.codecs.Video(b"\0\0\0\1mdat" + b"\0" * 8, library)),
        "decoded: ": lambda: len(ss.codecs.Video(b"\x1a\x45\xdf\xa3\0", library)),
    }
    len(ss.codecs.Video(FILES["mp4"], library))  # import the library here, not within the limit
    for message, attack in attacks.items():
        outcome = survived(attack, memory_bytes=1024 * MiB)
        assert outcome.startswith("DecodeError")
        assert message in outcome


def test_missing_libraries_are_one_error_that_names_the_remedies() -> None:
    code = "import sys; sys.modules['torchcodec'] = None; import shardstream as ss; print(len(ss.codecs.Video(sys.stdin.buffer.read())))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=FILES["mp4"], capture_output=True, check=True
    )
    assert done.stdout.strip() == b"50"  # PyAV
    code = code.replace("import shardstream", "sys.modules['av'] = None; import shardstream")
    done = subprocess.run(
        [sys.executable, "-c", code], input=FILES["mp4"], capture_output=True, check=False
    )
    for words in (
        b"OptionError",
        b"torchcodec: ",
        b"pyav: ",
        b'pip install ".[video]"',
        b"apt-get install ffmpeg",
        b"pip install av",
    ):
        assert words in done.stderr


def take_clip(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"clip": sample["mp4"].clip(8, stride=2, rng=rng), "cls": sample["cls"]}


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_clips_of_a_loader_are_the_same_with_any_workers(
    method: str | None, tmp_path: Path
) -> None:
    samples = [{"mp4": FILES["mp4"], "cls": n} for n in range(8)]
    dataset = ss.ShardDataset(make_shards(tmp_path, samples=samples, per_shard=3))
    clips = dataset.decode("video").map(take_clip, rng=True)
    expected = [batch["clip"] for batch in ss.ShardLoader(clips, batch_size=4)]
    assert expected[0].shape == (4, 8, HEIGHT, WIDTH, 3)
    assert not torch.equal(expected[0][0], expected[0][1])  # another start
    options: dict[str, Any] = {}
    if method is not None:
        options = {"num_workers": 2, "multiprocessing_context": method}
    found = list(ss.ShardLoader(clips, batch_size=4, **options))
    assert [batch["cls"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(torch.equal(a["clip"], b) for a, b in zip(found, expected, strict=True))
    whole = next(iter(ss.ShardLoader(dataset.decode("video"), batch_size=2, **options)))
    np.testing.assert_array_equal(
        whole["mp4"][1].frames([2]), ss.codecs.Video(FILES["mp4"]).frames([2])
    )
