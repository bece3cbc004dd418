"""Compute random permutations of any size without memory, equal on every machine and NumPy version.

A Feistel network over ``a x b`` cells (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3): two
half-words of mixed radix, each shifted in turn by a hash of the other; results beyond the size are encrypted again ("cycle
walking"). The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Made once: small arrays take no longer than to make such numbers.
_FIRST, _SECOND, _ADDED = map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, _GOLDEN))
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_ROUNDS = [
    (np.uint64((number + 1) * _GOLDEN & _MASK), np.uint64((number + 2) * _GOLDEN & _MASK))
    for number in range(0, 8, 2)
]


def derive_key(*parts: int) -> int:
    """Mix whole numbers to one 64-bit key; the order of the parts matters.

    >>> derive_key(0, 1) != derive_key(1, 0)
    True
    """
    key = 0
    for part in parts:
        key = _mix_int(key ^ (part & _MASK))
    return key


def derive_keys(key: int, *parts: Ints) -> UInts:
    """Mix arrays to keys: ``derive_keys(derive_key(a), [b])`` is ``[derive_key(a, b)]``."""
    keys = np.asarray(key, dtype=np.uint64)
    for part in parts:
        keys = mix_bits(keys ^ part.astype(np.uint64))
    return keys


def permute(index: Ints, size: Ints | int, key: UInts | int, *, inverse: bool = False) -> Ints:
    """Return the image of each index under a random permutation of 0 to ``size - 1``.

    Args:
        index: Shape (n,), each from 0 to its size - 1.
        size: Size of the permutation, for all or for each index, at least 1.
        key: Key of the permutation, for all or for each index.
        inverse: Return the index of each image instead.

    Returns:
        Shape (n,), int64. Over all indices of one size and key, each number below the size occurs once.

    Raises:
        IndexError: If an index is outside its range and its cycle would have to be walked, perhaps for ever; others are not looked for.

    >>> moved = permute(np.arange(5), 5, derive_key(7))
    >>> sorted(moved.tolist()), permute(moved, 5, derive_key(7), inverse=True).tolist()
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """
    encrypt = _feistel_inverse if inverse else _feistel
    sizes, keys = (np.atleast_1d(np.asarray(one, dtype=np.uint64)) for one in (size, key))
    if len(sizes) > 1 and (sizes == sizes[0]).all():
        sizes = sizes[:1]  # NumPy divides by one number in a tenth of the time
    # float64 may err by one ulp for huge sizes, so that a * b could be too small: one more column covers all cells
    a = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64) + np.uint64(1)
    b = sizes // a + np.uint64(1)
    values = encrypt(index.astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(values >= sizes)
    if outside.size:
        a, b, keys, sizes = (np.broadcast_to(one, index.shape) for one in (a, b, keys, sizes))
        wrong = outside[index[outside].astype(np.uint64) >= sizes[outside]]
        if wrong.size:
            raise IndexError(
                f"a permutation of {sizes[wrong[0]]} has no place {index[wrong[0]]}: they are numbered from 0"
            )
    while outside.size:
        values[outside] = encrypt(values[outside], a[outside], b[outside], keys[outside])
        outside = outside[values[outside] >= sizes[outside]]
    return values.astype(np.int64)


def _feistel(values: UInts, a: UInts, b: UInts, keys: UInts) -> UInts:
    left = values // b
    right = values - left * b
    for of_left, of_right in _ROUNDS:
        left += _hash_below(right, keys + of_left, a)
        np.minimum(left, left - a, out=left)  # the remainder: below 0 wraps around
        right += _hash_below(left, keys + of_right, b)
        np.minimum(right, right - b, out=right)
    return left * b + right


def _feistel_inverse(values: UInts, a: UInts, b: UInts, keys: UInts) -> UInts:
    left = values // b
    right = values - left * b
    for of_left, of_right in reversed(_ROUNDS):
        right -= _hash_below(left, keys + of_right, b)
        np.minimum(right, right + b, out=right)
        left -= _hash_below(right, keys + of_left, a)
        np.minimum(left, left + a, out=left)
    return left * b + right


def _hash_below(half: UInts, keys: UInts, size: UInts) -> UInts:
    """Return a hash of each half-word from 0 to size - 1."""
    found = mix_bits(half ^ keys)
    found -= found // size * size  # faster than %, see `permute`
    return found


def mix_bits(values: UInts) -> UInts:
    """Return a hash of each number: the finaliser of SplitMix64."""
    values = values + _ADDED
    values ^= values >> _SHIFTS[0]
    values *= _FIRST
    values ^= values >> _SHIFTS[1]
    values *= _SECOND
    values ^= values >> _SHIFTS[2]
    return values


def _mix_int(value: int) -> int:
    value = value + _GOLDEN & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
