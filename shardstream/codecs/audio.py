"""Decode sound to samples with libsndfile, what it does not read with PyAV, and resample it with soxr."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardstream.codecs.installed import import_extra
from shardstream.codecs.video_files import container_of
from shardstream.codecs.video_readers import AUDIO_LIMIT_BYTES, RangedFile, read_sound
from shardstream.errors import OptionError

_READ = (
    "wav",
    "flac",
    "mp3",
    "ogg",
    "oga",
    "opus",
    "aif",
    "aiff",
    "aifc",
    "au",
    "caf",
    "w64",
    "rf64",
)
_READ_BY_PYAV = ("aac", "m4a", "wma")
_CONTAINERS = ("aac", "mov", "asf")
"""Those of sound that PyAV reads and libsndfile does not, by FFmpeg's names."""

_CUT = "the file is cut short: "
# libsndfile reads what is there of a cut file, and writes to its log which length the header declares.
_SHORT = re.compile(r"(?:data|SSND|riff|Data Size) *: (\d+) \(should be (\d+)\)")
_SHORT_RF64 = re.compile(
    r"Calculated frame count (\d+) does not match value from 'ds64' chunk of (\d+)"
)
_UNKNOWN_FRAMES = 1 << 62  # of FLAC without a length
_WRITE_AGAIN = "; write it again, e.g. with ffmpeg -i IN -c copy OUT"
_LARGE_HEADER_BYTES = 1 << 14
_BLOCK = 1 << 16  # samples that are read at a time, at least
_MP3_KBITS = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_HALVINGS = (2, 0, 1, 0)  # of the rate, by the bits of the version: 2.5, none, 2, 1
_MP3_DELAY = 3 * 1152  # samples that encoder and decoder add, and a last frame that is cut
_UNKNOWN_LENGTH = 0x7FFF0000  # written by programs that could not seek back: this or more
# The log of an Ogg file without its last page, or with a part of it.
_NO_END = ("lacks an end-of-stream bit", "Junk after the last page")


_STARTS = (
    b"fLaC\0\0\0\x22",
    b"fLaC\x80\0\0\x22",
    b"caff\0\1\0\0desc",
    b"RF64\xff\xff\xff\xffWAVE",
    b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0",  # W64
)
"""First bytes of sound files, long enough not to occur in sound."""


_BY_HEADER = (b"RIFF", b"RF64", b"riff", b"fLaC", b"FORM", b"caff", b".snd")
"""First bytes of sound files whose headers have their length."""


class Audio(NamedTuple):
    """Decoded sound; unpacks as the result of ``torchaudio.load``.

    Attributes:
        samples: float32 from -1 to 1, shape (C, T): channels, samples. An array, or a tensor of "torch_audio".
        rate: Samples a second, in Hz.
    """

    samples: Any
    rate: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioDecoder:
    """Decode sound files to `Audio`.

    Args:
        rate: Resample to this rate, in Hz; None keeps that of the file.
        mono: Average the channels to one.
        to_tensor: Array -> tensor, for "torch_audio"; None returns arrays.

    Raises:
        OptionError: If ``rate`` is below 1.
    """

    rate: int | None = None
    mono: bool = False
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate < 1:
            raise OptionError(f"rate must be 1 Hz or more, not {self.rate}")

    def __call__(self, data: bytes) -> Audio:
        """Decode the bytes of a sound file.

        Raises:
            OptionError: If soundfile (PyAV for aac, m4a and wma), or soxr for another rate, is not installed.
            ValueError: If the file is damaged, cut short, of a format that neither libsndfile nor PyAV reads, or over
                `AUDIO_LIMIT_BYTES` of samples.
        """
        audio = convert_audio(*_read(data), rate_to=self.rate, mono=self.mono)
        return audio if self.to_tensor is None else audio._replace(samples=self.to_tensor(audio[0]))


class SoundHeader(NamedTuple):
    """Length of a sound."""

    frames: int
    """Samples of each channel."""
    rate: int
    """Samples a second, in Hz."""
    channels: int

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.frames / self.rate


def sound_header(file: RangedFile) -> SoundHeader:
    """Return the length of a sound that `AudioDecoder` finds; wav, flac, aiff, au, caf and w64 are read in part.

    Other files are read whole, and decoded if their headers only estimate the length (MP3 without a number of frames) or PyAV reads them.

    Raises:
        OptionError, ValueError: As `AudioDecoder`, as far as it is read.
    """
    if file[: len(_BY_HEADER[0])] in _BY_HEADER:
        with _opened(file) as opened:
            _check_found(opened.frames, len(file))
            return SoundHeader(opened.frames, opened.samplerate, opened.channels)
    data = file.read()
    if not _needs_pyav(data):
        with _opened(data) as opened:
            if opened.format != "MP3" or _declares_length(data):
                return SoundHeader(opened.frames, opened.samplerate, opened.channels)
    samples, rate = _read(data)
    return SoundHeader(samples.shape[1], rate, len(samples))


def audio_decoders(decoder: AudioDecoder) -> dict[str, Callable[[bytes], Any]]:
    """Return the decoders of sound fields by the last part of their names."""
    return dict.fromkeys((*_READ, *_READ_BY_PYAV), decoder)


def convert_audio(
    samples: np.ndarray[Any, Any], rate: int, *, rate_to: int | None, mono: bool
) -> Audio:
    """Average the channels and resample.

    Args:
        samples: float32, shape (C, T).
        rate: Rate of the samples, in Hz.
        rate_to: Rate of the result; None keeps it.
        mono: Average the channels to one.

    Raises:
        ValueError: If the result is over `AUDIO_LIMIT_BYTES`.
    """
    if mono and len(samples) > 1:
        samples = samples.mean(axis=0, keepdims=True)
    if rate_to is not None and rate_to != rate:
        check_audio_size(samples.shape[1] * rate_to // rate, len(samples))
        soxr = import_extra("soxr", extra="audio", purpose=f"resampling to {rate_to} Hz")
        resampled = soxr.resample(np.ascontiguousarray(samples.T), rate, rate_to, quality="HQ")
        samples, rate = resampled.T, rate_to
    return Audio(np.ascontiguousarray(samples), rate)


def check_audio_size(frames: int, channels: int) -> None:
    """Check a decoded size before memory is taken for it.

    Raises:
        ValueError: If it is over `AUDIO_LIMIT_BYTES`.
    """
    size = 4 * frames * channels
    if size > AUDIO_LIMIT_BYTES:
        raise ValueError(
            f"{frames} samples of {channels} channels are {size} bytes as float32, the limit is {AUDIO_LIMIT_BYTES}"
        )


def sound_peaks(data: bytes, count: int) -> np.ndarray[Any, Any]:
    """Return the minimum and maximum of each of ``count`` parts of a sound, or fewer.

    The channels are averaged; one part is in memory at a time.

    Returns:
        Shape (2, n).

    Raises:
        OptionError, ValueError: As `AudioDecoder`.
    """
    if _needs_pyav(data):
        samples, _ = _read_with_pyav(data)
        return _peaks(samples.mean(axis=0), max(1, -(-samples.shape[1] // count)))
    with _opened(data) as file:
        length = max(1, -(-file.frames // count))
        found, frames = [], 0
        for block in file.blocks(
            length * max(1, _BLOCK // length), dtype="float32", always_2d=True
        ):
            frames += len(block)
            found.append(_peaks(block.mean(axis=1), length))
        _check_read(file, data, frames)
        return np.concatenate(found, axis=1) if found else np.zeros((2, 1), np.float32)


def _peaks(mono: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    starts = np.arange(0, len(mono), length)
    return np.stack([np.minimum.reduceat(mono, starts), np.maximum.reduceat(mono, starts)])


def _read(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Return the samples of a file, shape (C, T), float32, and its rate."""
    if _needs_pyav(data):
        return _read_with_pyav(data)
    with _opened(data) as file:
        samples = file.read(dtype="float32", always_2d=True)
        _check_read(file, data, len(samples))
        return samples.T, file.samplerate


def _needs_pyav(data: bytes) -> bool:
    """Return whether a file has a format that libsndfile does not read, by its first bytes."""
    try:
        return container_of(data) in _CONTAINERS
    except ValueError:  # none of FFmpeg's containers that are read: libsndfile's
        return False


def _read_with_pyav(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    try:
        sound = read_sound(data, "pyav")
    except OptionError as error:
        raise OptionError(
            f"libsndfile does not read {', '.join(_READ_BY_PYAV)}; PyAV does: pip install av. Or convert these fields to flac, mp3 or "
            "opus, leave them as bytes with decode(only=[...]), or pass a function of bytes: decode(fields={'m4a': function})"
        ) from error
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # FFmpeg's errors have many types
        raise ValueError(f"PyAV: {error}") from error
    if sound is None:
        raise ValueError("the file has no sound")
    return sound


@contextmanager
def _opened(data: bytes | RangedFile) -> Iterator[Any]:
    """Open a sound file, after checks of its headers and its decoded size."""
    soundfile = import_extra("soundfile", extra="audio", purpose="decoding sound")
    source = io.BytesIO(data) if isinstance(data, bytes) else data.open()
    try:
        with soundfile.SoundFile(source) as file:
            _check_whole(file.extra_info)
            if isinstance(data, bytes) and data[:4] == b"OggS":
                _check_one_stream(data)
            if file.frames >= _UNKNOWN_FRAMES:  # libsndfile cannot read it
                raise ValueError(
                    f"a FLAC file without its length, as programs write it to a pipe{_WRITE_AGAIN}"
                )
            check_audio_size(file.frames, file.channels)
            yield file
    except soundfile.LibsndfileError as error:  # its text has the address of the BytesIO
        raise ValueError(f"libsndfile: {error.error_string}") from error


def _check_read(file: Any, data: bytes, frames: int) -> None:
    """Refuse a file of which libsndfile read another number of samples than it has."""
    missing = file.frames - frames
    if file.format == "MP3":
        _check_mp3(data, frames)
    _check_one_file(data)
    if missing and (file.format != "MP3" or _declares_length(data)):  # else it is estimated
        raise ValueError(f"{_CUT}{missing} of {missing + frames} samples are missing")
    _check_found(frames, len(data))


def _check_found(frames: int, size_bytes: int) -> None:
    if not frames and size_bytes > _LARGE_HEADER_BYTES:
        raise ValueError(f"libsndfile finds no samples in {size_bytes} bytes")


def _check_one_stream(data: bytes) -> None:
    """Refuse an Ogg file with another stream after its end, of which libsndfile reads the first only.

    Pages: RFC 3533, section 6.
    """
    at, has_ended = 0, False
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        flags, segments = data[at + 5], data[at + 26]
        if flags & 2 and has_ended:
            raise ValueError(
                "an Ogg file of several streams one after the other, of which only the first would be read"
            )
        has_ended = has_ended or bool(flags & 4)
        at += 27 + segments + sum(data[at + 27 : at + 27 + segments])


def _check_one_file(data: bytes) -> None:
    """Refuse files that are joined, of which libsndfile reads the first only, or the header of the second as sound."""
    is_joined = any(data.startswith(start) and data.find(start, 8) > 0 for start in _STARTS)
    if data[:4] == b".snd":  # its header has offset and length of the sound
        end = int.from_bytes(data[4:8], "big") + int.from_bytes(data[8:12], "big")
        is_joined = data[end : end + 4] == b".snd"
    if is_joined:
        raise ValueError(
            "several files one after the other, of which only the first would be read; store each as a field, or join them with ffmpeg"
        )


def _check_mp3(data: bytes, samples: int) -> None:
    """Refuse an MP3 that has more frames than libsndfile reads: joined files, or no length and a bit rate that changes."""
    whole = _count_mp3_samples(data)
    if whole > samples + _MP3_DELAY:
        is_declared = _declares_length(data)
        why = "" if is_declared else "the bit rate changes and "
        why += "the header declares less" if is_declared else "the header has no length"
        raise ValueError(f"libsndfile reads {samples} of {whole} samples, as {why}{_WRITE_AGAIN}")


def _count_mp3_samples(data: bytes) -> int:
    """Return the samples of each channel in the frames of an MP3, from their headers (ISO/IEC 11172-3, 2.4.2.3)."""
    at, total = _mp3_start(data), 0
    while at + 4 <= len(data):
        if data[at : at + 3] == b"ID3":  # of a file that was joined to the one before
            at += _mp3_start(data[at : at + 10])
            continue
        header = int.from_bytes(data[at : at + 4], "big")
        version, rate, place = header >> 19 & 3, header >> 10 & 3, header >> 12 & 15
        is_layer_3 = header >> 21 == 0x7FF and version != 1 and header >> 17 & 3 == 1
        if not is_layer_3 or rate == 3 or place in (0, 15):
            break  # a tag, or another format
        frame_samples = 1152 if version == 3 else 576
        bits = _MP3_KBITS[version == 3][place] * 1000
        at += frame_samples // 8 * bits // (_MP3_RATES[rate] >> _MP3_HALVINGS[version])
        at += header >> 9 & 1
        total += frame_samples
    return total


def _check_whole(log: str) -> None:
    for found, declared in _SHORT_RF64.findall(log):
        if int(found) < int(declared):
            raise ValueError(f"{_CUT}{found} of {declared} samples are there")
    for declared, found in _SHORT.findall(log):
        if int(found) < int(declared) < _UNKNOWN_LENGTH:
            raise ValueError(f"{_CUT}{found} of {declared} bytes are there")
    if any(words in log for words in _NO_END):
        raise ValueError(f"{_CUT}the last page of an Ogg file is missing or incomplete")


def _mp3_start(data: bytes) -> int:
    """Return the offset of the first frame, after an ID3 tag."""
    if data[:3] != b"ID3":
        return 0
    # Its length has 7 bits in each byte.
    return 10 + sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))


def _declares_length(data: bytes) -> bool:
    """Return whether the first frame of an MP3 has the number of frames; else libsndfile estimates it."""
    start = _mp3_start(data)
    first = data[start : start + 256]
    return b"Xing" in first or b"Info" in first
