"""Video files of the tests, written by PyAV, and their frames as FFmpeg decodes them."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np

from tests.codecs.sounds import tone

HEIGHT, WIDTH, RATE = 48, 64, 25


@cache
def video_file(  # noqa: PLR0913  (the kinds of files)
    form: str = "mp4",
    *,
    codec: str = "libx264",
    count: int = 50,
    pixels: str = "yuv420p",
    options: tuple[tuple[str, str], ...] = (("g", "12"), ("bf", "2")),
    skipped: frozenset[int] = frozenset(),
    sound: str | None = None,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    container_options: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return a video with a different picture in each frame; ``skipped`` leaves times without a frame."""
    stream, sound_rate = io.BytesIO(), 48_000 if sound == "libopus" else 44_100
    container: Any
    with av.open(stream, "w", format=form, options=dict(container_options)) as container:
        video = container.add_stream(codec, rate=RATE, options=dict(options))
        video.height, video.width, video.pix_fmt = *size, pixels
        video.codec_context.time_base = Fraction(1, RATE)
        audio = (
            None if sound is None else container.add_stream(sound, rate=sound_rate, layout="mono")
        )
        for number in range(count):
            if number not in skipped:
                frame = av.VideoFrame.from_ndarray(picture(number, size), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, RATE)
                container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            wave = (tone(count / RATE, channels=1, rate=sound_rate).T * 30_000).astype(np.int16)
            part = av.AudioFrame.from_ndarray(wave, format="s16", layout="mono")
            part.sample_rate, part.pts, part.time_base = sound_rate, 0, Fraction(1, sound_rate)
            container.mux(audio.encode(part))
            container.mux(audio.encode(None))
    return stream.getvalue()


def picture(number: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray[Any, Any]:
    """Return the picture of a frame, shape (H, W, 3), uint8: stripes that move."""
    rows, columns = np.indices(size)
    bands = [rows * 5 + number * 3, columns * 4 + number * 5, rows + columns + number * 7]
    return np.stack(bands, axis=2).astype(np.uint8)


def ffmpeg_frames(data: bytes) -> np.ndarray[Any, Any]:
    """Return all frames that FFmpeg decodes, shape (T, H, W, 3), uint8."""
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
