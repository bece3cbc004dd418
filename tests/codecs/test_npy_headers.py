"""Headers of npy files are read as NumPy reads them, also damaged ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy_format

from shardstream.codecs import decode_npy, decode_npy_column

TYPES = ["<u2", ">i4", "|b1", "|u1", "<f8", "<f2", "<c8", "<U3", "|S4", "<m8[s]"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 4), (0, 7), (1, 2, 3)]


def saved(dtype: str, shape: tuple[int, ...], order: Any) -> bytes:
    file, count = io.BytesIO(), int(np.prod(shape))
    array = np.arange(count).astype(dtype).reshape(shape)
    np.save(file, np.array(array, order=order))
    return file.getvalue()


def by_numpy(data: bytes) -> Any:
    """Return shape, order and type of a header, or None if NumPy refuses it."""
    stream = io.BytesIO(data)
    try:
        version = npy_format.read_magic(stream)
        read = npy_format.read_array_header_1_0
        return (read if version == (1, 0) else npy_format.read_array_header_2_0)(stream)
    except Exception:  # noqa: BLE001  (of many types)
        return None


@given(st.sampled_from(TYPES), st.sampled_from(SHAPES), st.sampled_from("CF"))
def test_arrays_are_those_of_numpy(dtype: str, shape: tuple[int, ...], order: str) -> None:
    data = saved(dtype, shape, order)
    expected = np.load(io.BytesIO(data))
    found = decode_npy(data)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


@given(
    st.sampled_from(SHAPES),
    st.lists(st.tuples(st.integers(8, 127), st.sampled_from(b"0123456789,() <>|bufi{}'\n:")), min_size=1, max_size=3),
)  # fmt: skip
def test_a_damaged_header_is_refused_where_numpy_refuses_it(
    shape: tuple[int, ...], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(saved("<u2", shape, "C"))
    for place, byte in changes:
        data[place] = byte
    try:
        found = decode_npy(bytes(data))
    except Exception:  # noqa: BLE001  (a bad sample, whatever it is)
        return
    header = by_numpy(bytes(data))
    assert header is not None
    assert (found.shape, found.dtype) == (header[0], header[2])


@pytest.mark.parametrize("samples", [1, 20])
def test_an_array_after_the_first_is_an_error(samples: int) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    one = file.tell()
    np.save(file, np.arange(4))
    with pytest.raises(ValueError, match=f"{len(file.getvalue()) - one} bytes after it"):
        decode_npy_column([file.getvalue()] * samples)
