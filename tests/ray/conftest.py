"""One local Ray cluster for all tests of this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray
import ray.data


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Start Ray with two CPUs and 200 MB for objects, quietly, and stop it after this folder: an idle one costs CPU time."""
    ray.init(
        num_cpus=2,
        resources={"place": 1},  # of a test that adds a node
        object_store_memory=200_000_000,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def in_order(cluster: None) -> Iterator[None]:
    """Let Ray hand on rows in the order of the tasks."""
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True
    yield
    options.preserve_order = False
