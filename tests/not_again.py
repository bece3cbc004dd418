"""A plugin, ``pytest -p tests.not_again``: a run with servers leaves out what an earlier one without them has shown.

The first run adds the tests that passed to the file ``PASSED_TO``, the second one reads them from ``PASSED_IN``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Modules that start servers or programs which a bare machine has not, or ask whether this is CI.
WITH_SERVERS = {
    "tests.servers",
    "tests.lossy_proxy",
    "tests.viewer.viewers",
    "tests.torchvision_transforms",
}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that passed. Reports of xdist's processes reach the main one as well: it alone notes them."""
    place = os.environ.get("PASSED_TO")
    if (
        place
        and "PYTEST_XDIST_WORKER" not in os.environ
        and report.when == "call"
        and report.passed
    ):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that passed and would do the same again."""
    if place := os.environ.get("PASSED_IN"):
        passed = {*Path(place).read_text(encoding="utf-8").splitlines()}
        again = [item for item in items if item.nodeid not in passed or _differs_in_ci(item)]
        config.hook.pytest_deselected(items=[*{*items} - {*again}])
        items[:] = again


def _differs_in_ci(item: pytest.Item) -> bool:
    """Return whether a test may use a server, or draws more examples in CI."""
    fixtures = {"s3", "certificate"} & {*getattr(item, "fixturenames", ())}
    is_drawn = hasattr(getattr(item, "obj", None), "hypothesis")
    found = vars(item.module).values() if hasattr(item, "module") else ()
    homes = {
        getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in found
    }
    return bool(fixtures) or is_drawn or not WITH_SERVERS.isdisjoint(homes)
