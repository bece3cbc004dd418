"""Read frames and sound of a video file, in memory or by ranges, with torchcodec or PyAV; both use FFmpeg."""

from __future__ import annotations

import io
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from shardstream.codecs.audio import AUDIO_LIMIT_BYTES
from shardstream.codecs.mp4_frames import FrameTable, Sliceable, read_frame_table
from shardstream.errors import OptionError, how_to_install

_Sound = tuple[Iterator[np.ndarray[Any, Any]], int]
"""Pieces of shape (C, T), and the rate."""

logger = logging.getLogger(__name__)

LIBRARIES = ("torchcodec", "pyav")
"""Libraries that read video, in the order of preference."""
_MODULES = {"torchcodec": "torchcodec.decoders", "pyav": "av"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoMetadata:
    """Properties of the video stream of a file.

    Args:
        num_frames: Number of frames, counted in the file without decoding it.
        fps: Mean number of frames a second; 0 if the file has no times.
        duration_s: Time from the first frame to the end of the last, in seconds.
        height: Height of a frame in pixels, after its rotation.
        width: Width of a frame in pixels, after its rotation.
        codec: FFmpeg's name of the codec, such as "h264".
        pixel_format: FFmpeg's name of the stored pixels, such as "yuv420p".
    """

    num_frames: int
    fps: float
    duration_s: float
    height: int
    width: int
    codec: str
    pixel_format: str


class RangedFile(Sliceable, Protocol):
    """A file that is read by ranges, such as a `FieldFile`."""

    failure: Exception | None
    """The last error of a read, until it is set to None."""

    def read(self) -> bytes:
        """Return all bytes."""

    def open(self) -> io.BufferedReader:
        """Return a file that reads and seeks."""


class VideoReader(Protocol):
    """Reads one file; used by one thread at a time."""

    @property
    def metadata(self) -> VideoMetadata:
        """Properties of the video stream."""

    def read_frames(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return frames by number in the order of their times, shape (N, H, W, 3), uint8."""


def open_reader(data: bytes | RangedFile, library: str | None) -> VideoReader:
    """Open the frames of a file.

    Args:
        data: A video file; one that is not in memory is read whole if only that tells the times of its frames.
        library: One of `LIBRARIES`; None takes the first that can be imported.

    Raises:
        OptionError: If no library can be imported.
        Exception: Any error of the library, for a file that is not a video.
    """
    chosen, module = _load_library(library)
    table = None
    if not isinstance(data, bytes):
        table = read_frame_table(data)
        if table is None:
            logger.info("a video is fetched whole: its frames have no table that can be used")
            data = data.read()
    reader = _TorchcodecReader if chosen == "torchcodec" else _PyavReader
    return reader(module, data, table)


def read_sound(
    data: bytes | RangedFile, library: str | None
) -> tuple[np.ndarray[Any, Any], int] | None:
    """Return the first sound of a video file, shape (C, T), float32, and its rate in Hz; None if there is none.

    Raises:
        OptionError: If no library can be imported.
        ValueError: If it is over `AUDIO_LIMIT_BYTES`.
        Exception: Any other error of the library.
    """
    chosen, module = _load_library(library)
    whole = data if isinstance(data, bytes) else data.read()
    sound = (_torchcodec_sound if chosen == "torchcodec" else _pyav_sound)(module, whole)
    if sound is None:
        return None
    pieces, rate = sound
    kept, size = [], 0
    for piece in pieces:
        size += piece.nbytes
        if size > AUDIO_LIMIT_BYTES:
            raise ValueError(f"its sound is over {AUDIO_LIMIT_BYTES} bytes as float32, the limit")
        kept.append(piece)
    if not kept:
        raise ValueError("its sound has no samples")
    return np.concatenate(kept, axis=1), rate


@cache
def _load_library(library: str | None) -> tuple[str, Any]:
    """Import a library; return its name and module."""
    if library not in (None, *LIBRARIES):
        raise OptionError(f"library must be one of {', '.join(LIBRARIES)}, not {library!r}")
    failed = []
    for name in LIBRARIES if library is None else (library,):
        try:
            module = import_module(_MODULES[name])
        except Exception as error:  # noqa: BLE001  (torchcodec raises RuntimeError if no FFmpeg fits)
            first_line = str(error).strip().partition("\n")[0]
            failed.append(f"{name}: {type(error).__name__}: {first_line}")
            continue
        logger.info("video is decoded by %s", name)
        return name, module
    raise OptionError(
        f"no library that decodes video can be imported ({'; '.join(failed)}): {how_to_install('video')}. torchcodec also "
        "needs FFmpeg 4 to 8 of the system (apt-get install ffmpeg) and a torch that fits; PyAV has its own FFmpeg (pip install av)"
    )


class _TorchcodecReader:
    """Reads with torchcodec, which without a table scans the packets of the file when it is opened, without decoding them."""

    def __init__(self, decoders: Any, data: bytes | RangedFile, table: FrameTable | None) -> None:
        self._data, self._table = data, table
        self._decoder = decoders.VideoDecoder(
            data if isinstance(data, bytes) else data.open(),
            dimension_order="NHWC",
            custom_frame_mappings=None if table is None else _frame_mappings(table),
        )
        found = self._decoder.metadata
        self.metadata = VideoMetadata(
            num_frames=found.num_frames or 0,
            # With a table torchcodec takes the rate that the header declares.
            fps=float(found.average_fps or 0.0) if table is None else table.fps,
            duration_s=float(found.duration_seconds or 0.0) if table is None else table.duration_s,
            height=found.height,
            width=found.width,
            codec=found.codec or "",
            pixel_format=found.pixel_format or "",
        )

    def read_frames(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        found = self._decoder.get_frames_at(list(numbers))
        if not self._are_right(numbers, found.pts_seconds.numpy()):
            logger.info("torchcodec seeks to other frames of a video: PyAV decodes it")
            return self._other.read_frames(numbers)
        frames: np.ndarray[Any, Any] = found.data.numpy()
        return frames

    def _are_right(self, numbers: Sequence[int], times_s: np.ndarray[Any, Any]) -> bool:
        """Return whether frames have the times of their numbers: torchcodec's seeks end after some frames (no edit list, intra refresh)."""
        if len(self._times_s) != self.metadata.num_frames:
            return bool((np.diff(times_s[np.argsort(numbers)]) >= 0).all())
        expected = self._times_s[list(numbers)]
        tolerance = np.diff(self._times_s).min(initial=np.inf) / 2
        return bool((np.abs(times_s - expected) < tolerance).all())

    @cached_property
    def _times_s(self) -> np.ndarray[Any, Any]:
        """Times of all frames in seconds, by the tables of the file or its packets; none if they are unknown."""
        table = self._table
        if table is None and isinstance(self._data, bytes):
            table = read_frame_table(self._data)
        if table is not None:
            return table.times / table.timescale
        try:
            return self._other.times_s
        except OptionError:  # PyAV is not installed
            return np.empty(0)

    @cached_property
    def _other(self) -> _PyavReader:
        """The reader of PyAV for the same file."""
        _, av = _load_library("pyav")
        return _PyavReader(av, self._data, self._table)


def _frame_mappings(table: FrameTable) -> str:
    """Return the table as torchcodec takes it: as ffprobe prints it."""
    columns = (table.times.tolist(), table.durations.tolist(), table.is_key.tolist())
    frames = [
        {"pts": time, "duration": duration, "key_frame": int(is_key)}
        for time, duration, is_key in zip(*columns, strict=True)
    ]
    return json.dumps({"frames": frames})


class _PyavReader:
    """Reads with PyAV: numbers frames by the times of the packets, and decodes from the last key frame before each."""

    def __init__(self, av: Any, data: bytes | RangedFile, table: FrameTable | None) -> None:
        self._av = av
        self._data = data
        with self._open() as container:
            if not container.streams.video:
                raise ValueError("the file has no video stream")
            stream = container.streams.video[0]
            packets = (
                [
                    (packet.pts, packet.is_keyframe, packet.duration or 0)
                    for packet in container.demux(stream)
                    if packet.size and not packet.is_discard
                ]
                if table is None
                else _packets(table, stream.time_base)
            )
            times = [time for time, _, _ in packets]
            # Old files (AVI) have no times of their own: frames are then counted by decoding from the start.
            self._has_times = None not in times and len(set(times)) == len(times)
            self._times: list[int] = sorted(times) if self._has_times else []
            self._keys = sorted(time for time, is_key, _ in packets if is_key and self._has_times)
            self._stream_facts = stream.time_base, stream.codec_context.pix_fmt, stream.codec.name
            last = (
                max((time + length for time, _, length in packets), default=0)
                if times and self._has_times
                else 0
            )
            self._length = float((last - self._times[0]) * stream.time_base) if last else 0.0
            self._rate = float(stream.average_rate or 0)

    @cached_property
    def metadata(self) -> VideoMetadata:
        """Properties of the video stream; the first frame is decoded for its size."""
        first = next(self._decode(0, seeks=False), None)
        if first is None:
            raise ValueError("it has no frame")
        num_frames = (
            len(self._times) if self._has_times else sum(1 for _ in self._decode(0, seeks=False))
        )
        height, width = (first[1].height, first[1].width)[:: -1 if first[1].rotation % 180 else 1]
        duration_s = self._length or (num_frames / self._rate if self._rate else 0.0)
        return VideoMetadata(
            num_frames=num_frames,
            fps=num_frames / duration_s if duration_s else 0.0,
            duration_s=duration_s,
            height=height,
            width=width,
            codec=self._stream_facts[2],
            pixel_format=self._stream_facts[1] or "",
        )

    @property
    def times_s(self) -> np.ndarray[Any, Any]:
        """Times of all frames in seconds; none if the file has no times."""
        return np.array(self._times) * float(self._stream_facts[0])

    def read_frames(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        shape = self.metadata.height, self.metadata.width, 3
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        frames = np.empty((len(numbers), *shape), np.uint8)
        waiting, seeks = sorted(places), self._has_times
        while waiting:
            found = len(waiting)
            for number, frame in self._decode(waiting[0], seeks=seeks):
                if number == waiting[0]:
                    frames[places[waiting.pop(0)]] = _pixels(frame, shape)
                    if not waiting or (seeks and self._key_before(waiting[0]) > number):
                        break
                elif number > waiting[0]:
                    break
            if len(waiting) == found and not seeks:
                raise ValueError(f"frame {waiting[0]} cannot be decoded")
            if len(waiting) == found:  # in an MPEG program stream a seek may end after the frame
                seeks = False
        return frames

    def _key_before(self, number: int) -> int:
        """Return the number of the last key frame up to a frame."""
        place = bisect_right(self._keys, self._times[number])
        return self._number_of(self._keys[place - 1]) if place else 0

    def _number_of(self, time: int) -> int:
        return bisect_right(self._times, time) - 1

    def _decode(self, number: int, *, seeks: bool) -> Iterator[tuple[int, Any]]:
        """Yield frames with their numbers, in order, from the start or from the last key frame before a frame."""
        with self._open() as container:
            stream = container.streams.video[0]
            key = self._key_before(number) if seeks else 0
            if key:
                container.seek(self._times[key], stream=stream)
            for count, frame in enumerate(container.decode(stream)):
                if not self._has_times:
                    yield count, frame
                elif frame.pts is not None and frame.pts >= self._times[key]:
                    found = self._number_of(frame.pts)
                    if self._times[found] != frame.pts:
                        raise ValueError(f"a frame has the time {frame.pts}, which no packet has")
                    yield found, frame

    def _open(self) -> Any:
        data = self._data
        return self._av.open(io.BytesIO(data) if isinstance(data, bytes) else data.open(), "r")


def _packets(table: FrameTable, time_base: Fraction) -> list[tuple[int, bool, int]]:
    """Return times, key frames and durations as PyAV gives them."""
    if time_base != Fraction(1, table.timescale):
        raise ValueError(f"the stream counts {time_base} s, its table 1/{table.timescale} s")
    columns = table.times.tolist(), table.is_key.tolist(), table.durations.tolist()
    return list(zip(*columns, strict=True))


def _pixels(frame: Any, shape: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Return the pixels of a frame of PyAV, rotated as the file says, shape (H, W, 3), uint8."""
    size = (frame.height, frame.width)[:: -1 if frame.rotation % 180 else 1]
    if size != shape[:2]:
        raise ValueError(
            f"a frame has {size[1]} x {size[0]} pixels, the first {shape[1]} x {shape[0]}"
        )
    return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def _torchcodec_sound(decoders: Any, data: bytes) -> _Sound | None:
    try:
        decoder = decoders.AudioDecoder(data)
    except ValueError as error:
        if "audio stream is unknown" in str(error):  # its words for a file without sound
            return None
        raise
    rate, channels = decoder.metadata.sample_rate, decoder.metadata.num_channels
    start_s = decoder.metadata.begin_stream_seconds or 0.0
    limit_s = (
        AUDIO_LIMIT_BYTES / (4 * rate * channels) + 1
    )  # the header may declare less than the file has
    samples = decoder.get_samples_played_in_range(start_s, start_s + limit_s)
    return iter([samples.data.numpy()]), samples.sample_rate


def _pyav_sound(av: Any, data: bytes) -> _Sound | None:
    with av.open(io.BytesIO(data), "r") as container:
        if not container.streams.audio:
            return None
        rate = container.streams.audio[0].rate

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        resampler = av.AudioResampler(format="fltp", rate=rate)
        with av.open(io.BytesIO(data), "r") as container:
            for frame in container.decode(audio=0):
                for part in resampler.resample(frame):
                    yield part.to_ndarray()
        for part in resampler.resample(None):
            yield part.to_ndarray()

    return pieces(), rate
