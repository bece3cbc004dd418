"""Read frames and sound of a video file, in memory or by ranges, with torchcodec or PyAV; both use FFmpeg.

torchcodec numbers frames by the times of packets, which only MP4, QuickTime, Matroska and WebM are sure to have: PyAV reads the others.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardstream.codecs.video_files import (
    FrameTable,
    Sliceable,
    check_frame_counts,
    check_whole,
    container_of,
    read_frame_table,
)
from shardstream.errors import OptionError, get_logger, how_to_install

_Sound = tuple[Iterator[np.ndarray[Any, Any]], int]
"""Pieces of shape (C, T), and the rate."""

logger = get_logger(__name__)

LIBRARIES = ("torchcodec", "pyav")
"""Libraries that read video, in the order of preference."""
_MODULES = {"torchcodec": "torchcodec.decoders", "pyav": "av"}
_READERS = {"mov": LIBRARIES, "matroska": LIBRARIES}
"""Libraries that read a container; PyAV alone reads all others (docs/formats.md has the table). torchcodec gets those whose first bytes leave
FFmpeg no choice of another one. PyAV also reads the frames that torchcodec refuses, or does not find by its seeks."""

AUDIO_LIMIT_BYTES = 2 << 30
"""Decoded size of a sound, as float32; about 93 minutes of 48 kHz stereo."""
_WITHOUT_TIMES = ("mpegvideo", "m4v", "h264", "hevc", "mjpeg")
_DECODING_TIMES = ("avi", "asf")
"""Containers with the times when packets are decoded, not shown."""


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
    block_bytes: int
    """Bytes that are read at once, at least."""

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
        library: One of `LIBRARIES`; None takes the first that can be imported. PyAV reads what torchcodec does not.

    Raises:
        OptionError: If no library can be imported, or PyAV is needed and cannot.
        ValueError: If the file is none of the containers that are read.
        Exception: Any error of the library, for a file that is not a video.
    """
    container = container_of(data)
    if not isinstance(data, bytes) and container != "mov":
        data = _fetch(data)
    _check(data)
    chosen, module = _choose_library(container, library)
    table = read_frame_table(data)
    if not isinstance(data, bytes) and table is None:
        data = _fetch(data)
    if chosen == "pyav":
        return _PyavReader(module, data, table, container)
    try:
        return _TorchcodecReader(module, data, table, container)
    except (OptionError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  (any refusal)
        return _PyavReader(_pyav_after(error), data, table, container)


class VideoLength(NamedTuple):
    """Length of a video."""

    frames: int
    seconds: float


def read_video_length(data: bytes | RangedFile) -> VideoLength:
    """Return the length of a video; of an MP4 or QuickTime file with tables only these are read, without a library.

    Raises:
        OptionError, ValueError, Exception: As `open_reader`.
    """
    if container_of(data) == "mov":
        _check(data)
        table = read_frame_table(data)
        if table is not None:
            return VideoLength(len(table.times), table.duration_s)
    metadata = open_reader(data, None).metadata
    return VideoLength(metadata.num_frames, metadata.duration_s)


def read_sound(
    data: bytes | RangedFile, library: str | None
) -> tuple[np.ndarray[Any, Any], int] | None:
    """Return the first sound of a video file, shape (C, T), float32, and its rate in Hz; None if there is none.

    Raises:
        OptionError: If no library can be imported, or PyAV is needed and cannot.
        ValueError: If it is over `AUDIO_LIMIT_BYTES`, or the file is none of the containers that are read.
        Exception: Any other error of the library.
    """
    container = container_of(data)
    chosen, module = _choose_library(container, library)
    whole = data if isinstance(data, bytes) else data.read()
    _check(whole)
    if chosen == "torchcodec":
        sound = _torchcodec_sound(module, whole)
    else:
        sound = _pyav_sound(module, whole, container)
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


def _fetch(data: RangedFile) -> bytes:
    logger.info("a video is fetched whole: its frames have no table that can be used")
    return data.read()


def _check(data: Sliceable) -> None:
    """Refuse what FFmpeg would read in part, or for ever."""
    check_whole(data)
    check_frame_counts(data)


def _choose_library(container: str, library: str | None) -> tuple[str, Any]:
    """Return name and module of the library that reads a container."""
    chosen = _load_library(library)
    if chosen[0] not in _READERS.get(container, ("pyav",)):
        return "pyav", _load_pyav(f"reading FFmpeg's format {container!r}")
    return chosen


def _load_pyav(purpose: str) -> Any:
    try:
        return _load_library("pyav")[1]
    except OptionError as error:
        raise OptionError(
            f"{purpose} needs PyAV beside torchcodec: pip install av ({error})"
        ) from error


def _pyav_after(refusal: Exception) -> Any:
    """Return PyAV, for a video that torchcodec refuses; without it the refusal is raised."""
    try:
        module = _load_library("pyav")[1]
    except OptionError:
        raise refusal from None
    logger.info("PyAV decodes a video that torchcodec refuses: %s", refusal)
    return module


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
    """Reads with torchcodec, which without a table scans the packets of the file when it is opened, without decoding them.

    Raises:
        ValueError: If the times of the frames are not known from elsewhere, or are others.
    """

    def __init__(
        self, decoders: Any, data: bytes | RangedFile, table: FrameTable | None, container: str
    ) -> None:
        self._data, self._table, self._container = data, table, container
        ranged = table if not isinstance(data, bytes) else None
        self._decoder = decoders.VideoDecoder(
            data if isinstance(data, bytes) else data.open(),
            dimension_order="NHWC",
            custom_frame_mappings=None if ranged is None else _frame_mappings(ranged),
        )
        times_s = self._other.times_s if table is None else table.times / table.timescale
        found = self._decoder.metadata
        if len(times_s) != found.num_frames:
            raise ValueError(f"it finds {found.num_frames} frames, {len(times_s)} have a time")
        self._times_s = times_s
        self.metadata = VideoMetadata(
            num_frames=found.num_frames,
            # With a table torchcodec takes the rate that the header declares.
            fps=float(found.average_fps or 0.0) if ranged is None else ranged.fps,
            duration_s=float(found.duration_seconds or 0.0)
            if ranged is None
            else ranged.duration_s,
            height=found.height,
            width=found.width,
            codec=found.codec or "",
            pixel_format=found.pixel_format or "",
        )

    def read_frames(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        try:
            found = self._decoder.get_frames_at(list(numbers))
        except RuntimeError as error:  # such as a seek after which there is no frame
            _pyav_after(error)
            return self._other.read_frames(numbers)
        # torchcodec's seeks end after some frames (no edit list, intra refresh).
        expected = self._times_s[list(numbers)]
        tolerance = np.diff(self._times_s).min(initial=np.inf) / 2
        if (np.abs(found.pts_seconds.numpy() - expected) >= tolerance).any():
            logger.info("torchcodec seeks to other frames of a video: PyAV decodes it")
            return self._other.read_frames(numbers)
        frames: np.ndarray[Any, Any] = found.data.numpy()
        return frames

    @cached_property
    def _other(self) -> _PyavReader:
        """The reader of PyAV for the same file."""
        av = _load_pyav("telling the frames of this file apart")
        return _PyavReader(av, self._data, self._table, self._container)


def _frame_mappings(table: FrameTable) -> str:
    """Return the table as torchcodec takes it: as ffprobe prints it."""
    columns = (table.times.tolist(), table.durations.tolist(), table.is_key.tolist())
    frames = [
        {"pts": time, "duration": duration, "key_frame": int(is_key)}
        for time, duration, is_key in zip(*columns, strict=True)
    ]
    return json.dumps({"frames": frames})


class _PyavReader:
    """Reads with PyAV: numbers frames by the times of the packets, and decodes from the last key frame before each.

    Where the times are not sure, frames are counted by decoding from the start.
    """

    def __init__(
        self, av: Any, data: bytes | RangedFile, table: FrameTable | None, container: str
    ) -> None:
        self._av, self._data, self._container = av, data, container
        with self._open() as opened:
            if not opened.streams.video:
                raise ValueError("the file has no video stream")
            stream = opened.streams.video[0]
            packets = (
                [
                    (packet.pts, packet.is_keyframe, packet.duration or 0)
                    for packet in opened.demux(stream)
                    if packet.size and not packet.is_discard
                ]
                if table is None
                else _packets(table, stream.time_base)
            )
            times = [time for time, _, _ in packets]
            reorders = bool(stream.codec_context.has_b_frames)
            self._has_times = _are_times(times, container, reorders=reorders)
            self._times: list[int] = sorted(times) if self._has_times else []
            self._keys = sorted(time for time, is_key, _ in packets if is_key and self._has_times)
            self._stream_facts = (
                stream.time_base,
                stream.codec_context.pix_fmt,
                stream.codec.canonical_name,
            )
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
            if len(waiting) == found:  # the seek did not end at the key frame
                seeks = False
        return frames

    def _key_before(self, number: int) -> int:
        """Return the number of the last key frame up to a frame."""
        place = bisect_right(self._keys, self._times[number])
        return self._number_of(self._keys[place - 1]) if place else 0

    def _number_of(self, time: int) -> int:
        return bisect_right(self._times, time) - 1

    def _decode(self, number: int, *, seeks: bool) -> Iterator[tuple[int, Any]]:
        """Yield frames with their numbers, in order, from the start or from the last key frame before a frame.

        After a seek each frame follows the one before, the key frame first: another frame may be damaged, or have a wrong time, and ends it.
        """
        with self._open() as opened:
            stream = opened.streams.video[0]
            key = self._key_before(number) if seeks else 0
            if key:
                opened.seek(self._times[key], stream=stream)
            expected = key
            for count, frame in enumerate(opened.decode(stream)):
                if not self._has_times:
                    yield count, frame
                elif frame.pts is not None and frame.pts >= self._times[key]:
                    found = self._number_of(frame.pts)
                    is_next = self._times[found] == frame.pts and found >= expected
                    if key and (not is_next or found > expected):
                        return
                    if not is_next:
                        raise ValueError(
                            f"a frame has the time {frame.pts}, which no packet after frame {expected - 1} has"
                        )
                    yield found, frame
                    expected = found + 1

    def _open(self) -> Any:
        """Open the file as the container that it is, without leave to open another file or host."""
        data = self._data
        return self._av.open(
            io.BytesIO(data) if isinstance(data, bytes) else data.open(),
            "r",
            **_bound_to(self._container),
        )


def _bound_to(container: str) -> dict[str, Any]:
    """Return the arguments of `av.open` for a container whose data name no other file or host that is opened."""
    return {"format": container, "options": {"protocol_whitelist": "none"}}


def _are_times(times: list[int | None], container: str, *, reorders: bool) -> bool:
    """Return whether all packets have the times when their frames are shown."""
    if container in _WITHOUT_TIMES or None in times or len(set(times)) != len(times):
        return False
    known = [time for time in times if time is not None]
    return not (container in _DECODING_TIMES and reorders and known == sorted(known))


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
    # the header may declare less than the file has
    limit_s = AUDIO_LIMIT_BYTES / (4 * rate * channels) + 1
    samples = decoder.get_samples_played_in_range(start_s, start_s + limit_s)
    return iter([samples.data.numpy()]), samples.sample_rate


def _pyav_sound(av: Any, data: bytes, container: str) -> _Sound | None:
    bounds = _bound_to(container)
    with av.open(io.BytesIO(data), "r", **bounds) as opened:
        if not opened.streams.audio:
            return None
        rate = opened.streams.audio[0].rate

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        resampler = av.AudioResampler(format="fltp", rate=rate)
        with av.open(io.BytesIO(data), "r", **bounds) as opened:
            for frame in opened.decode(audio=0):
                for part in resampler.resample(frame):
                    yield part.to_ndarray()
        for part in resampler.resample(None):
            yield part.to_ndarray()

    return pieces(), rate
