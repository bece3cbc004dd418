"""Combinations of options: a few in each run, which have each pair of options, and all others in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def with_slow_rest(chosen: Iterable[Any], *options: Iterable[Any]) -> list[Any]:
    """Return combinations of options, and all others marked as slow.

    Args:
        chosen: Combinations for each run: tuples, or values if there is one option.
        options: Values of each option.
    """
    wanted = [one if len(options) > 1 else (one,) for one in chosen]
    every = list(product(*options))
    assert all(one in every for one in wanted), "a combination that does not exist"
    rest = [one for one in every if one not in wanted]
    slow = (pytest.param(*one, marks=pytest.mark.slow) for one in rest)
    return [*(pytest.param(*one) for one in wanted), *slow]
