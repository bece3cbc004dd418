"""Videos that are decoded where they are used: a few frames, a clip, the sound."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardstream.codecs.audio import Audio, convert_audio
from shardstream.codecs.video_readers import (
    LIBRARIES,
    RangedFile,
    VideoMetadata,
    VideoReader,
    open_reader,
    read_sound,
)
from shardstream.errors import DecodeError, ImageWarning, OptionError
from shardstream.format import Sample

VIDEO_EXTENSIONS = frozenset(
    ["mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "ogv", "wmv", "h264", "mjpeg"]
)
"""Last parts of the names of video fields."""

_T = TypeVar("_T")

FRAMES_LIMIT_BYTES = 4 << 30
"""Decoded frames of one call."""
FRAME_LIMIT_PIXELS = 1 << 27
"""Pixels of a frame; 8K has a quarter."""
_DEEP = ("p10", "p12", "p14", "p16", "gray10", "gray12", "gray16")
"""In the names of pixel formats with more than 8 bits."""
_OTHER_LIBRARY = (
    "PyAV (pip install av) may read it; else repack this sample, or skip it with on_error"
)


class VideoClip(NamedTuple):
    """All frames and the sound of a video, as ``torchvision.io.read_video`` returns them.

    Args:
        frames: uint8 tensor, shape (T, H, W, 3).
        audio: float32 tensor, shape (C, T); (0, 0) without sound.
        info: ``video_fps``, and ``audio_fps`` if there is sound.
    """

    frames: Any
    audio: Any
    info: dict[str, float]


@dataclass(frozen=True, eq=False)
class Video:
    """A video file that is decoded when its frames are asked for; picklable, by its bytes or by their place.

    Frames are numbered from 0 in the order of their times, and rotated as the file says. An error names the sample.

    Args:
        data: The file, or a `FieldFile` of it: then of an MP4 or QuickTime file only the tables and the parts with the frames are fetched.
        library: "torchcodec" or "pyav"; None takes the first that can be imported.
        key: Key of the sample, for errors.
        shard: URL of the shard, for errors.
        field: Field of the video, for errors.
    """

    data: bytes | RangedFile = dataclasses.field(repr=False)
    library: str | None = None
    key: str | None = None
    shard: str | None = None
    field: str | None = None

    def located(self, sample: Sample, field: str) -> Video:
        """Return the video with its place."""
        return dataclasses.replace(
            self, key=sample.get("__key__"), shard=sample.get("__url__"), field=field
        )

    def __len__(self) -> int:
        """Return the number of frames."""
        return self.metadata.num_frames

    @property
    def metadata(self) -> VideoMetadata:
        """Number of frames, size, mean rate, codec. Reads a file in memory once, without decoding it.

        Raises:
            DecodeError: If it is no video.
            StorageError: If parts of it cannot be fetched; also by the other methods.
        """
        return self._reader.metadata

    def frames(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return frames by number, shape (N, H, W, 3), uint8, RGB. Only frames from the last key frame on are decoded.

        Args:
            numbers: Any order; negative numbers count from the end; a number may repeat.

        Raises:
            DecodeError: If a number is not that of a frame, a frame is damaged, or they take over `FRAMES_LIMIT_BYTES`.
        """
        metadata = self.metadata
        wanted = [int(number) for number in numbers]
        chosen = [n + metadata.num_frames if n < 0 else n for n in wanted]
        for given, number in zip(wanted, chosen, strict=True):
            if not 0 <= number < metadata.num_frames:
                raise self._error(f"there is no frame {given}, it has {metadata.num_frames}")
        size = 3 * len(chosen) * metadata.height * metadata.width
        if size > FRAMES_LIMIT_BYTES:
            raise self._error(
                f"{len(chosen)} frames of {metadata.width} x {metadata.height} are {size} bytes, the limit is {FRAMES_LIMIT_BYTES}; "
                "take fewer, with clip, uniform or frames"
            )
        if not chosen:
            return np.empty((0, metadata.height, metadata.width, 3), np.uint8)
        return self._run(lambda: self._reader.read_frames(chosen))

    def uniform(self, count: int) -> np.ndarray[Any, Any]:
        """Return the middle frames of ``count`` equal parts, shape (N, H, W, 3), uint8.

        Raises:
            DecodeError: As `frames`, and if the video has fewer frames.
        """
        self._check_length(count)
        return self.frames([(2 * n + 1) * len(self) // (2 * count) for n in range(count)])

    def clip(
        self, count: int, *, stride: int = 1, rng: np.random.Generator | None = None
    ) -> np.ndarray[Any, Any]:
        """Return ``count`` frames, each ``stride`` after the one before, shape (N, H, W, 3), uint8.

        Args:
            count: Number of frames.
            stride: 1 takes frames that follow each other.
            rng: Generator that draws the first frame, as in ``map(function, rng=True)``; None takes the middle of the video.

        Raises:
            DecodeError: As `frames`, and if the video is too short.
        """
        span = (count - 1) * stride + 1
        self._check_length(span)
        last = len(self) - span
        start = last // 2 if rng is None else int(rng.integers(last + 1))
        return self.frames(range(start, start + span, stride))

    def audio(self, *, rate: int | None = None, mono: bool = False) -> Audio:
        """Return the first sound stream.

        Args:
            rate: Resample to this rate, in Hz; needs the extra ``audio``.
            mono: Average the channels to one.

        Raises:
            DecodeError: If there is none, or it is damaged.
        """
        audio = self.read_audio(rate=rate, mono=mono)
        if audio is None:
            raise self._error("it has no sound")
        return audio

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}

    @cached_property
    def _reader(self) -> VideoReader:
        return self._run(self._open)

    def _open(self) -> VideoReader:
        reader = open_reader(self.data, self.library)
        metadata = reader.metadata
        pixels = metadata.height * metadata.width
        if not 0 < pixels <= FRAME_LIMIT_PIXELS:
            raise ValueError(f"frames of {pixels} pixels, the limit is {FRAME_LIMIT_PIXELS}")
        if any(depth in metadata.pixel_format for depth in _DEEP):
            warnings.warn(
                f"video of {metadata.pixel_format} loses bits: frames have 8 bits per channel",
                ImageWarning,
                stacklevel=2,
            )
        return reader

    def read_audio(self, *, rate: int | None = None, mono: bool = False) -> Audio | None:
        """Return what `audio` returns, None for a video without sound."""

        def read() -> Audio | None:
            sound = read_sound(self.data, self.library)
            return None if sound is None else convert_audio(*sound, rate_to=rate, mono=mono)

        return self._run(read)

    def _check_length(self, count: int) -> None:
        if count < 1:
            raise OptionError(f"the number of frames must be 1 or more, not {count}")
        if count > len(self):
            raise self._error(
                f"it has {len(self)} frames, {count} are needed; take fewer, or repeat some with frames([...])"
            )

    def _run(self, function: Callable[[], _T]) -> _T:
        """Call a function of a library; its errors name the sample, those of the store are raised as they are."""
        ranged = None if isinstance(self.data, bytes) else self.data
        if ranged is not None:
            ranged.failure = None
        try:
            result = function()
        except (OptionError, DecodeError, MemoryError):
            raise
        except Exception as error:
            if ranged is not None and ranged.failure is not None:
                raise ranged.failure from error
            text = str(error).strip().partition("\n")[0]
            is_of_library = isinstance(error, RuntimeError) and self.library != "pyav"
            raise self._error(
                f"cannot be decoded: {type(error).__name__}: {text}",
                _OTHER_LIBRARY if is_of_library else "",
            ) from error
        if ranged is not None and ranged.failure is not None:  # which FFmpeg hides
            raise ranged.failure
        return result

    def _error(self, message: str, remedy: str = "") -> DecodeError:
        return DecodeError(message, remedy=remedy, shard=self.shard, key=self.key, field=self.field)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoDecoder:
    """Decode video fields to `Video`, or at once to a `VideoClip`.

    Args:
        library: "torchcodec" or "pyav"; None takes the first that can be imported.
        to_tensor: Array -> tensor: return all frames and the sound, for "torch_video".

    Raises:
        OptionError: If the library is unknown.
    """

    library: str | None = None
    to_tensor: Callable[[np.ndarray[Any, Any]], Any] | None = None

    def __post_init__(self) -> None:
        if self.library not in (None, *LIBRARIES):
            raise OptionError(
                f"library must be one of {', '.join(LIBRARIES)}, not {self.library!r}"
            )

    def __call__(self, data: bytes | RangedFile) -> Video | VideoClip:
        """Return the video; nothing is decoded before it is used, unless there is ``to_tensor``."""
        video = Video(data=data, library=self.library)
        if self.to_tensor is None:
            return video
        frames, audio = self.to_tensor(video.frames(range(len(video)))), video.read_audio()
        info = {"video_fps": video.metadata.fps}
        if audio is None:
            return VideoClip(frames, self.to_tensor(np.empty((0, 0), np.float32)), info)
        return VideoClip(frames, self.to_tensor(audio.samples), info | {"audio_fps": audio.rate})
