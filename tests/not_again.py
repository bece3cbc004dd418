"""A plugin, ``pytest -p tests.not_again``: a run with servers leaves out what an earlier one without them has shown.

The first run adds the tests that passed to the file ``PASSED_TO``, the second one reads them from ``PASSED_IN``.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.servers import S3Server, ShapedS3

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
    """Return whether a test may use a server. (One that draws examples draws as many in the first run.)"""
    fixtures = {"s3", "certificate"} & {*getattr(item, "fixturenames", ())}
    return bool(fixtures) or (hasattr(item, "module") and _may_use_servers(item.module))


@functools.cache
def _may_use_servers(module: ModuleType) -> bool:
    """Return whether a module has names of `WITH_SERVERS` that are no annotations, or asks for fixtures by name."""
    homes = {
        getattr(value, "__module__", None) or getattr(value, "__name__", None)
        for value in vars(module).values()
        if value is not S3Server and value is not ShapedS3
    }
    return not WITH_SERVERS.isdisjoint(homes) or "getfixturevalue" in inspect.getsource(module)
