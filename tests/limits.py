"""Lower limits of the package, so that small data reach them, and replace public functions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def module_of(owner: Any) -> ModuleType:
    """Return the module that defines an exported function or class, to replace public names in it."""
    return sys.modules[owner.__module__]


def set_limits(monkeypatch: pytest.MonkeyPatch, owner: Any, **limits: float) -> None:
    """Set constants of the module that defines an exported function or class.

    Args:
        monkeypatch: Restores them.
        owner: The function or class that they limit.
        limits: Names of public constants, with their values for this test.
    """
    module = module_of(owner)
    for name, value in limits.items():
        assert name.isupper()
        assert hasattr(module, name), f"{owner.__module__} has no {name}"
        monkeypatch.setattr(module, name, value)
