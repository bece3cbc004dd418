"""Test sound: the samples of FFmpeg, in workers and batches; cut and hostile files are errors."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

import shardstream as ss
import shardstream.webdataset as wds
from shardstream.codecs import AudioDecoder
from shardstream.testing import make_shards
from tests.attack import survived
from tests.codecs.sounds import RATE, ffmpeg_samples, sound_file, tone
from tests.limits import set_limits
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES

MiB = 1 << 20
FILES = {
    "wav": ("WAV", "PCM_16"),
    "x.wav": ("WAV", "FLOAT"),
    "y.wav": ("WAVEX", "PCM_24"),
    "flac": ("FLAC", None),
    "aiff": ("AIFF", None),
    "au": ("AU", None),
    "w64": ("W64", None),
    "caf": ("CAF", None),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", None),
}
pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def file_of(name: str) -> bytes:
    form, subtype = FILES[name]
    return sound_file(form, subtype=subtype, rate=48_000 if name == "opus" else RATE)


@pytest.mark.parametrize("name", FILES)
def test_samples_are_those_of_ffmpeg(name: str) -> None:
    data = file_of(name)
    samples, rate = ss.decode_sample({name: data}, "audio")[name]
    assert (samples.dtype, rate) == (np.float32, 48_000 if name == "opus" else RATE)
    assert samples.shape == (2, rate)
    expected = ffmpeg_samples(data)
    assert expected.shape == samples.shape
    np.testing.assert_allclose(samples, expected, atol=1e-5)


def test_samples_are_resampled_and_averaged() -> None:
    low = sound_file("FLAC", rate=48_000)
    samples, rate = AudioDecoder(rate=16_000, mono=True)(low)
    assert (samples.shape, rate) == ((1, 16_000), 16_000)
    expected = tone(rate=16_000).mean(
        axis=1
    )  # tones below 8 kHz survive, half of the noise does not
    assert np.corrcoef(samples[0], expected)[0, 1] > 0.95
    assert AudioDecoder(rate=48_000)(low).samples.shape == (2, 48_000)
    with pytest.raises(ss.errors.OptionError, match="rate must be 1 Hz or more, not 0"):
        AudioDecoder(rate=0)


def test_names_decode_their_fields_only() -> None:
    flac = sound_file()
    sample = {"flac": flac, "left.wav": flac, "txt": b"a", "bin": flac}  # a FLAC in a wav field
    plain = ss.decode_sample(sample)
    assert (plain["flac"], plain["left.wav"]) == (flac, flac)
    decoded = ss.decode_sample(
        sample, "audio", "rgb8", fields={"bin": ss.codecs.AudioDecoder(mono=True)}
    )
    assert isinstance(decoded["flac"], ss.codecs.Audio)
    assert decoded["left.wav"].samples.shape == (2, RATE)
    assert decoded["bin"].samples.shape == (1, RATE)
    assert decoded["txt"] == "a"
    tensors = ss.decode_sample(sample, fields={"flac": "torch_audio"})["flac"]
    assert torch.equal(tensors.samples, torch.from_numpy(decoded["flac"].samples))
    options = ss.decode_sample(sample, ss.codecs.AudioDecoder(rate=8000), only="flac")
    assert options["flac"].rate == 8000


def test_webdatasets_handler_returns_waveform_and_rate() -> None:
    waveform, rate = wds.torch_audio(".flac", sound_file())
    assert (waveform.shape, waveform.dtype, rate) == ((2, RATE), torch.float32, RATE)
    assert wds.torch_audio(".jpg", b"") is None


OF_PYAV = {"aac": "adts", "m4a": "ipod", "wma": "asf"}


def file_of_pyav(name: str) -> bytes:
    """Return 1 s of stereo in a format that libsndfile does not read."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=OF_PYAV[name]) as container:
        out = container.add_stream(
            "wmav2" if name == "wma" else "aac", rate=RATE, layout="stereo", bit_rate=128_000
        )
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone().T), "fltp", "stereo")
        frame.sample_rate = RATE
        for packet in [*out.encode(frame), *out.encode(None)]:
            container.mux(packet)
    return stream.getvalue()


@pytest.mark.parametrize("name", OF_PYAV)
def test_what_libsndfile_lacks_is_read_by_pyav(name: str) -> None:
    data = file_of_pyav(name)
    samples, rate = ss.decode_sample({name: data}, "audio")[name]
    assert (samples.dtype, samples.shape[0], rate) == (np.float32, 2, RATE)
    assert RATE - 4096 <= samples.shape[1] <= RATE + 4096  # the delay of the encoder
    np.testing.assert_allclose(samples, ffmpeg_samples(data), atol=1e-5)
    options = AudioDecoder(rate=16_000, mono=True)
    assert ss.decode_sample({"bin": data}, fields={"bin": options})["bin"].samples.shape[0] == 1


@pytest.mark.parametrize("name", OF_PYAV)
def test_cut_files_that_pyav_reads_are_errors(name: str) -> None:
    data = file_of_pyav(name)
    places = [int(part * len(data)) for part in (0.02, 0.3, 0.5, 0.7, 0.9, 0.97)] + [len(data) - 1]
    for end in places:
        with pytest.raises(ss.errors.DecodeError):
            ss.decode_sample({name: data[:end]}, "audio")
    if name != "aac":  # frames without a header, one after the other: the parts are one stream
        with pytest.raises(ss.errors.DecodeError, match="second file"):
            ss.decode_sample({name: data + data}, "audio")


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PYAV)
def test_without_pyav_its_formats_are_an_error_that_says_what_to_do(
    name: str, tmp_path: Path
) -> None:
    data = file_of_pyav(name)
    folder = make_shards(tmp_path, samples=[{"__key__": "0", name: data}])
    code = (
        "import sys; sys.modules['av'] = None; import shardstream as ss\n"
        f"next(iter(ss.ShardDataset({folder!r}, on_error='skip').decode('audio')))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "OptionError" in ended.stderr
    assert "libsndfile does not read aac, m4a, wma; PyAV does: pip install av" in ended.stderr


@pytest.mark.parametrize("name", [name for name in FILES if name != "caf"])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.97])
def test_cut_files_are_errors_and_never_fewer_samples(name: str, part: float) -> None:
    data = file_of(name)
    with pytest.raises(ss.errors.DecodeError, match="cut short|libsndfile"):
        ss.decode_sample({name: data[: int(part * len(data))]}, "audio")


def test_lengths_that_a_program_could_not_write_are_accepted() -> None:
    data = bytearray(file_of("wav"))
    place = data.index(b"data") + 4
    data[4:8] = data[place : place + 4] = b"\xff" * 4  # as ffmpeg writes to a pipe
    assert AudioDecoder()(bytes(data)).samples.shape == (2, RATE)


def wav_header(*, rate: int = RATE, channels: int = 1, size: int = 2000) -> bytes:
    layout = struct.pack("<HHIIHH", 1, channels, rate, 0, 2 * channels, 16)
    data = b"data" + struct.pack("<I", size) + bytes(2000)
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVEfmt \x10\0\0\0" + layout + data


def flac_of(frames: int) -> bytes:
    data = bytearray(sound_file())
    data[21] = data[21] & 0xF0 | frames >> 32  # 36 bits of STREAMINFO
    data[22:26] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


ATTACKS = {
    "flac of 10 hours": (flac_of(10 * 3600 * RATE), None, "the limit is"),
    "flac of more samples than are there": (flac_of(2 * RATE), None, "cut short|libsndfile"),
    "wav of 1 Hz, resampled to 2 GHz": (wav_header(rate=1), 2_000_000_000, "the limit is"),
    "wav without channels": (wav_header(channels=0), None, "libsndfile"),
    "wav without rate": (wav_header(rate=0), None, "libsndfile"),
    "wav of 1000 bytes that says 2 GB": (wav_header(size=0x7FFE0000), None, "cut short"),
    "text": (b"no sound at all", None, "libsndfile: Format not recognised"),
    "nothing": (b"", None, "libsndfile"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_sound_is_a_bad_sample_in_bounded_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, AudioDecoder, AUDIO_LIMIT_BYTES=64 * MiB)
    data, rate, message = ATTACKS[name]
    decoder = AudioDecoder(rate=rate)
    outcome = survived(
        lambda: ss.decode_sample({"__key__": "7", "wav": data}, decoder), memory_bytes=300 * MiB
    )
    assert outcome.startswith("DecodeError: cannot be decoded: ValueError")
    assert any(part in outcome for part in message.split("|")), outcome


def test_sound_of_a_missing_package_is_one_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = sound_file()
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ss.errors.OptionError, match=r"resampling to 8000 Hz needs .*\[audio\]"):
        ss.decode_sample({"flac": data}, ss.codecs.AudioDecoder(rate=8000))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ss.errors.OptionError, match=r"decoding sound needs .*\[audio\]"):
        ss.decode_sample({"flac": data}, "audio")


def folder_of(tmp_path: Path, *lengths: float) -> str:
    samples = [
        {"__key__": f"{n:03d}", "flac": sound_file(seconds=length, rate=8000), "cls": n}
        for n, length in enumerate(lengths)
    ]
    return make_shards(tmp_path / "sounds", samples=samples, per_shard=4)


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["audio", "torch_audio"])
def test_sound_of_one_length_is_a_batch(method: str | None, name: str, tmp_path: Path) -> None:
    dataset = ss.ShardDataset(folder_of(tmp_path, *[0.1] * 8)).decode(name)
    options: dict[str, Any] = {}
    if method is not None:
        options = {"num_workers": 2, "multiprocessing_context": method}
    batches = list(ss.ShardLoader(dataset, batch_size=4, **options))
    expected, rate = AudioDecoder()(sound_file(seconds=0.1, rate=8000))
    for batch in batches:
        assert batch["flac"].samples.shape == (4, 2, 800)
        assert batch["flac"].rate.tolist() == [rate] * 4
        np.testing.assert_array_equal(batch["flac"].samples[3], expected)
    assert [n for batch in batches for n in batch["cls"].tolist()] == list(range(8))


def test_sounds_of_several_lengths_or_rates_are_an_error_that_names_the_field(
    tmp_path: Path,
) -> None:
    dataset = ss.ShardDataset(folder_of(tmp_path, 0.1, 0.2)).decode("audio")
    with pytest.raises(
        ss.errors.SampleError, match=r"\(2, 800\).*\(2, 1600\).*'001'.*pad.*field 'flac'"
    ):
        list(ss.ShardLoader(dataset, batch_size=2))
    samples = [{"flac": sound_file(rate=rate)} for rate in (8000, 16_000)]
    folder = make_shards(tmp_path / "rates", samples=samples)
    with pytest.raises(ss.errors.SampleError, match=r"8000 Hz and 16000 Hz .*AudioDecoder\(rate="):
        list(ss.ShardLoader(ss.ShardDataset(folder).decode("audio"), batch_size=2))


def test_bad_sounds_are_skipped_within_the_budget(tmp_path: Path) -> None:
    samples = [{"__key__": str(n), "wav": b"RIFF" if n == 2 else file_of("wav")} for n in range(4)]
    folder = make_shards(tmp_path, samples=samples)
    loader = ss.ShardLoader(ss.ShardDataset(folder, on_error="skip").decode("audio"), batch_size=2)
    assert [key for batch in loader for key in batch["__key__"]] == ["0", "1", "3"]
    assert [bad.key for bad in loader.bad_samples] == ["2"]


def test_tags_before_the_first_frame_of_an_mp3_do_not_hide_its_length() -> None:
    tag = b"ID3\x04\0\0" + bytes((0, 0, 39, 8)) + bytes(39 * 128 + 8)
    data = tag + file_of("mp3")
    assert AudioDecoder()(data).samples.shape == (2, RATE)
    with pytest.raises(ValueError, match=r"cut short: \d+ of 44100 samples are missing"):
        AudioDecoder()(data[:-3000])


def by_ffmpeg(*options: str) -> bytes:
    """Return what ffmpeg writes to a pipe, where it cannot add the length to the header; 1 s of noise, 9 s of silence."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("needs ffmpeg")
    noise = np.random.default_rng(0).normal(0, 0.3, RATE)
    samples = np.concatenate([noise, np.zeros(9 * RATE)]).astype("<f4").tobytes()
    command = ["ffmpeg", "-v", "error", "-f", "f32le", "-ar", str(RATE), "-ac", "1", "-i", "-"]
    return subprocess.run(
        [*command, *options, "-"], input=samples, capture_output=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("rate", "length"),
    with_slow_rest(
        [(44_100, "0"), (48_000, "1"), (11_025, "0")],
        [44_100, 48_000, 22_050, 11_025],
        ["0", "1"],
    ),
)
def test_streamed_mp3_is_read_whole_or_refused(rate: int, length: str) -> None:
    options = ("-ar", str(rate), "-write_xing", length, "-f", "mp3")
    constant = AudioDecoder()(by_ffmpeg("-b:a", "32k", *options))
    assert 10 * rate <= constant.samples.shape[1] <= 10 * rate + 4 * 1152
    with pytest.raises(ValueError, match="the bit rate changes and the header has no length"):
        AudioDecoder()(by_ffmpeg("-q:a", "2", *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-f", "flac"), "FLAC file without its length"),
        (("-rf64", "always", "-f", "wav"), "finds no samples"),
    ],
)
def test_other_streamed_files_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AudioDecoder()(by_ffmpeg(*options))


@pytest.mark.parametrize("codec", [("-c:a", "libvorbis"), ("-c:a", "libopus")])
def test_ogg_files_one_after_the_other_are_refused(codec: tuple[str, ...]) -> None:
    one = by_ffmpeg(*codec, "-f", "ogg")
    assert AudioDecoder()(one).samples.shape[1] >= 10 * RATE
    with pytest.raises(ValueError, match="several streams"):
        AudioDecoder()(one + one)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "AIFF", "AU", "CAF", "W64", "RF64"])
def test_joined_files_are_refused(form: str) -> None:
    one = sound_file(form)
    assert AudioDecoder()(one).samples.shape == (2, RATE)
    with pytest.raises(ValueError, match=r"several files one after the other|libsndfile: Error"):
        AudioDecoder()(one + one)


@pytest.mark.parametrize("tag", [(), ("-metadata", "title=a")])
@pytest.mark.parametrize("second", ["0", "1"])
def test_joined_mp3_is_refused_where_the_header_is_of_its_first_part(
    second: str, tag: tuple[str, ...], tmp_path: Path
) -> None:
    parts = []
    for number, xing in enumerate(("1", second)):
        path = tmp_path / f"{number}.mp3"
        by_ffmpeg("-write_xing", xing, *tag, "-y", str(path), "-f", "null")
        parts.append(path.read_bytes())
    assert AudioDecoder()(parts[0]).samples.shape == (1, 10 * RATE)
    with pytest.raises(
        ValueError, match="libsndfile reads 441000 of 88.* as the header declares less"
    ):
        AudioDecoder()(b"".join(parts))


def test_cut_rf64_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.wav")
    by_ffmpeg("-rf64", "always", "-y", path, "-f", "null")
    data = Path(path).read_bytes()
    assert AudioDecoder()(data).samples.shape == (1, 10 * RATE)
    with pytest.raises(ValueError, match="of 441000 samples are there"):
        AudioDecoder()(data[: len(data) // 2])
