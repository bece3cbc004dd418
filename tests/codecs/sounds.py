"""Sound files of the tests, and their samples as FFmpeg decodes them."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import soundfile

RATE = 44_100


def tone(seconds: float = 1.0, *, channels: int = 2, rate: int = RATE) -> np.ndarray[Any, Any]:
    """Return a tone with noise, shape (T, C), float32."""
    steps = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).normal(0, 0.05, (len(steps), channels))
    waves = [0.5 * np.sin(2 * np.pi * 440 * (n + 1) * steps) for n in range(channels)]
    return (np.stack(waves, 1) + noise).astype(np.float32)


def sound_file(
    form: str = "FLAC", *, subtype: str | None = None, rate: int = RATE, **options: Any
) -> bytes:
    """Return the bytes of a sound file of a libsndfile format."""
    stream = io.BytesIO()
    soundfile.write(stream, tone(rate=rate, **options), rate, format=form, subtype=subtype)
    return stream.getvalue()


def ffmpeg_samples(data: bytes) -> np.ndarray[Any, Any]:
    """Return the samples that FFmpeg decodes, shape (C, T), float32."""
    with av.open(io.BytesIO(data), "r") as container:
        resampler = av.AudioResampler(format="fltp")
        frames = [
            part.to_ndarray()
            for frame in container.decode(audio=0)
            for part in resampler.resample(frame)
        ]
    return np.concatenate(frames, axis=1)
