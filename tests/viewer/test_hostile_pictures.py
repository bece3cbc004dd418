"""Small fields that are large once decoded: what the viewer and notebooks take to show them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import soundfile

import shardstream as ss
from shardstream.display import npz_statistics, render, statistics
from shardstream.viewer import Session, ViewOptions
from tests.attack import survived
from tests.limits import set_limits
from tests.viewer.viewers import running_viewer

MiB = 1 << 20


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def png(mode: str, side: int) -> bytes:
    stream = io.BytesIO()
    PIL.Image.new(mode, (side, side)).save(stream, "PNG")
    return stream.getvalue()


def flac(frames: int) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((frames, 8), np.int16), 48_000, format="FLAC")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "field", "make"),
    [
        pytest.param("array", "npz", lambda: npz(a=np.zeros(12 * MiB, np.uint8)), id="line"),
        pytest.param("array", "npz", lambda: npz(a=0, b=np.zeros(80 * MiB, np.uint8)), id="second"),
        pytest.param("sound", "flac", lambda: flac(4 * MiB), id="sound"),
        pytest.param("picture", "png", lambda: png("P", 7000), id="palette"),
    ],
)
def test_small_fields_are_drawn_in_little_memory(
    kind: Any, field: str, make: Callable[[], bytes]
) -> None:
    data = make()
    assert len(data) < 300_000
    found = survived(lambda: render(kind, field, data, 128).media_type, memory_bytes=100 * MiB)
    assert found in ("image/png", "image/jpeg")


@pytest.mark.slow
def test_large_pictures_are_decoded_one_after_the_other(tmp_path: Path) -> None:
    with ss.ShardWriter(str(tmp_path / "data")) as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "png": png("RGB", 4200)})  # 70 MB each

    with running_viewer(str(tmp_path / "data")) as viewer:

        def most_kib() -> int:
            status = Path(f"/proc/{viewer.process.pid}/status").read_text(encoding="ascii")
            return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])

        before = most_kib()
        answer = viewer.ask("/api/thumbnails?numbers=0,1,2,3,4,5")
        assert answer.body.count(b"image/jpeg") == 6
        assert most_kib() - before < 180 << 10


def test_numbers_of_arrays_are_counted_in_little_memory() -> None:
    data = npz(a=np.zeros(12 * MiB, np.uint8), b=np.arange(3))
    found = survived(lambda: npz_statistics(data)["a"]["zeros"], memory_bytes=100 * MiB)
    assert found == str(12 * MiB)


@pytest.mark.parametrize("order", ["C", "F"])
def test_statistics_in_pieces_are_those_of_the_whole(order: Any) -> None:
    array = np.random.default_rng(0).normal(size=(1500, 1000)).astype(np.float32, order=order)
    array[3, 3:6] = np.nan, np.inf, 0
    finite = array[np.isfinite(array)].astype(np.float64)
    found = statistics(array)
    assert (found["not_finite"], found["zeros"]) == (2, 1)
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean())
    assert found["std"] == pytest.approx(finite.std())
    assert found["histogram"] == np.histogram(finite, 24)[0].tolist()


def test_an_npz_over_the_limit_of_the_viewer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ss.ShardWriter(str(tmp_path / "data")) as writer:
        writer.write({"__key__": "a", "npz": npz(a=np.zeros(MiB))})
    set_limits(monkeypatch, render, NPZ_LIMIT_BYTES=MiB)
    viewed = Session(ViewOptions(urls=(str(tmp_path / "data"),), storage_options={}))
    assert "the limit is 1048576" in viewed.details(0)["fields"][0]["error"]
    with pytest.raises(ValueError, match="the limit is 1048576"):
        viewed.card_picture(0, 64)
