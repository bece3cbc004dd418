"""Combinations of options: a few in each run, which have each pair of options, and all others in the slow one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def with_slow_rest(chosen: Sequence[tuple[Any, ...]], *options: Iterable[Any]) -> list[Any]:
    """Return combinations of options, and all others marked as slow.

    Args:
        chosen: Combinations for each run.
        options: Values of each option.
    """
    rest = [one for one in product(*options) if one not in chosen]
    return [*chosen, *(pytest.param(*one, marks=pytest.mark.slow) for one in rest)]
