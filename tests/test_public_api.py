from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import shardstream as ss
from shardstream import testing

ROOMS = ("catalog", "codecs", "errors", "ray", "tasks", "versions")


def test_names_are_few_sorted_and_listed_once() -> None:
    assert ss.__all__ == sorted(set(ss.__all__))
    assert len(ss.__all__) <= 36
    assert dir(ss) == ss.__all__


def test_a_dataset_has_few_options() -> None:
    assert len(inspect.signature(ss.ShardDataset).parameters) <= 13  # the URLs and 12 options


@pytest.mark.parametrize("name", ss.__all__)
def test_each_public_name_exists_and_has_a_docstring(name: str) -> None:
    found = getattr(ss, name)
    assert found.__name__ == (f"shardstream.{name}" if name in ROOMS else name)
    assert len(inspect.getdoc(found) or "") > 20
    assert "__init__" not in vars(found) or inspect.getdoc(found) != inspect.getdoc(Exception)


@pytest.mark.parametrize("name", ss.__all__)
def test_each_public_method_has_a_docstring(name: str) -> None:
    found = getattr(ss, name)
    if not inspect.isclass(found):
        return
    missing = [
        method
        for method, value in vars(found).items()
        if not method.startswith("_") and callable(value) and not inspect.getdoc(value)
    ]
    assert not missing


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardstream' has no attribute 'ShardReader'"):
        ss.ShardReader  # noqa: B018


@pytest.mark.parametrize("module", ["shardstream", "shardstream.testing", "shardstream.cli"])
def test_import_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize("room", ["storage", "pipeline", "packing", "loader"])
def test_importing_a_room_does_not_import_optional_packages(room: str) -> None:
    optional = ["obstore", "s3fs", "botocore", "aiohttp", "accelerate", "transformers", "pyarrow"]
    code = f"import sys, shardstream.{room}; print(sorted({{*{optional}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_every_error_inherits_from_the_base_class() -> None:
    found = [value for name, value in vars(ss.errors).items() if name.endswith("Error")]
    assert len(found) > 10
    assert all(issubclass(error, ss.ShardStreamError) for error in found)


@pytest.mark.parametrize(
    "name",
    [
        "ListRun",
        "assert_resumes_exactly",
        "check_catalog",
        "check_samples",
        "check_reader",
        "check_store",
        "make_shards",
    ],
)
def test_testing_helpers_are_public(name: str) -> None:
    assert len(inspect.getdoc(getattr(testing, name)) or "") > 20
