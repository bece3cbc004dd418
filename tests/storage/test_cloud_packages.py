"""Test Google Cloud Storage and Azure where gcsfs and adlfs are installed next to obstore; .ci/run has an environment with them."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.storage import Storage
from shardstream.testing import check_store
from tests.servers import ServerMissingError, start_azurite, start_gcs_emulator


@pytest.fixture(scope="module", params=["azure", "google", "google-variable"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Any]]]:
    """An empty folder of a store, and the storage options for it."""
    package = "adlfs" if request.param == "azure" else "gcsfs"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    workdir = tmp_path_factory.mktemp(request.param)
    try:
        if request.param == "azure":
            with start_azurite(workdir) as connection_string:
                yield "az://test", {"connection_string": connection_string}
            return
        with pytest.MonkeyPatch.context() as patch, start_gcs_emulator(workdir) as endpoint:
            # gcsfs reads this when it is imported; it would ask the emulator by gRPC for a minute.
            patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            if request.param == "google":
                yield "gs://test", {"token": "anon", "endpoint_url": endpoint}
            else:
                patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
                yield "gs://test", {"token": "anon"}
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def place(folder: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return f"{folder[0]}/{uuid.uuid4().hex}", folder[1]


def test_store_passes_the_contract(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    check_store(Storage(options), url)


@pytest.mark.slow
def test_dataset_is_packed_verified_and_read_by_workers(
    place: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = place
    with ss.ShardWriter(url, max_samples=5, storage_options=options) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    report = ss.verify(url, storage_options=options)
    assert (report.samples, report.problems) == (12, ())
    for cache in (None, tmp_path, tmp_path):
        dataset = ss.ShardDataset(url, storage_options=options, cache_dir=cache, shuffle=True)
        # A spawned worker has no clients of its parent: it reads with obstore where that is possible.
        loader = ss.ShardLoader(
            dataset.decode().to_tuple("cls"),
            batch_size=4,
            num_workers=1,
            multiprocessing_context="spawn",
        )
        found = [int(label) for batch in loader for label in batch[0]]
        assert sorted(found) == list(range(12))
