"""torchvision's transforms beside any build of torch.

The wheel's compiled operators need the build of torch that they were made for, mostly with CUDA, and its import fails without them, but the
transforms do not use them. It is installed apart from the environment, because other libraries import whatever torchvision they find.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.servers import in_ci

_REQUIREMENT = "torchvision>=0.29,<0.30"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_of_environment = importlib.util.find_spec("torchvision")  # before a folder is added to the path
_libraries: list[Any] = []  # an operator lives as long as its library


def install_torchvision(folder: Path) -> str:
    """Install torchvision alone in a folder and return it, or that of this environment; skip the test if there is no network."""
    if (
        _of_environment is not None and _of_environment.origin
    ):  # two would define their operators twice
        return str(Path(_of_environment.origin).parent.parent)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [*command, _REQUIREMENT], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode and not in_ci():
        pytest.skip(f"pip cannot install {_REQUIREMENT}")
    assert not done.returncode, done.stderr
    return str(folder)


def import_transforms(folder: str) -> Any:
    """Return ``torchvision.transforms.v2`` of a folder, in any process."""
    if folder not in sys.path:
        sys.path.append(folder)
    if not _has_operators(folder) and not _libraries:
        library = cast("Any", torch.library.Library)("torchvision", "DEF")
        for schema in _OPERATORS:
            library.define(schema)
        _libraries.append(library)
    return importlib.import_module("torchvision.transforms.v2")


def _has_operators(folder: str) -> bool:
    """Return whether torch can load the wheel's operators; a build with CUDA may, also where there is no GPU.

    Operators that are defined twice would abort the process.
    """
    try:
        for file in Path(folder, "torchvision").glob("_C*.so"):
            cast("Any", torch.ops).load_library(str(file))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
