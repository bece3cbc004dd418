"""Lower the limits of the package, so that small data reach them."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def set_limits(monkeypatch: pytest.MonkeyPatch, owner: Any, **limits: float) -> None:
    """Set constants of the module that defines an exported function or class, wherever that module is.

    Args:
        monkeypatch: Restores them.
        owner: What they limit.
        limits: Names of public constants, with their values for this test.
    """
    module = sys.modules[owner.__module__]
    for name, value in limits.items():
        assert name.isupper()
        assert hasattr(module, name), f"{owner.__module__} has no {name}"
        monkeypatch.setattr(module, name, value)
