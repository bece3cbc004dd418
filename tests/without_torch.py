"""A plugin, ``pytest -p tests.without_torch``: where torch is not installed, tests that come to need it are skipped."""

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """Skip a test that imports torch."""
    return (yield from _skipped_without_torch())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, Any, Any]:
    """Skip the tests of a fixture that imports torch."""
    return (yield from _skipped_without_torch())


def _skipped_without_torch() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip("torch is not installed")
