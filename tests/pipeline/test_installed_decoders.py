"""Test decoders of installed packages: found by entry point, imported late, never replacing a known name."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import OptionError
from shardstream.pipeline import installed_decoders
from shardstream.testing import make_shards

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with entry points and a module, as pip leaves them."""

    def install(package: str, code: str, **decoders: str) -> None:
        site = tmp_path / f"site-{package}"
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in decoders.items()]
        (info / "entry_points.txt").write_text("\n".join(["[shardstream.decoders]", *lines]))
        (site / f"{package}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(site)
        installed_decoders.cache_clear()

    yield install
    installed_decoders.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    samples = [
        {"__key__": f"{n:02d}", "seg.rev": b"ab%d" % n, "json": {"n": n}, "jpg": b"\xff\xd8 no"}
        for n in range(8)
    ]
    return make_shards(tmp_path / "set", samples=samples)


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_installed_package_decodes_its_field(
    method: str | None, install: Install, folder: str
) -> None:
    install("revdec", "def reverse(data): return data[::-1].decode()", rev="revdec:reverse")
    dataset = ss.ShardDataset(folder).decode()
    options: dict[str, Any] = {}
    if method is not None:
        options = {"num_workers": 2, "multiprocessing_context": method}
    found = [text for batch in ss.ShardLoader(dataset, 2, **options) for text in batch["seg.rev"]]
    assert found == [f"{n}ba" for n in range(8)]


def test_installed_decoders_do_not_override_known_names(install: Install, folder: str) -> None:
    code = "def taken(data): raise AssertionError"
    install("grabber", code, json="grabber:taken", jpg="grabber:taken", npy="grabber:taken")
    sample = next(iter(ss.ShardDataset(folder).decode()))
    assert (sample["json"], sample["jpg"]) == ({"n": 0}, b"\xff\xd8 no")


def test_decoder_is_imported_on_first_use(install: Install, folder: str) -> None:
    install("broken", "raise ImportError('needs libbroken')", rev="broken:read", other="gone:read")
    dataset = ss.ShardDataset(folder).decode(only="json")
    assert len(list(dataset)) == 8
    with pytest.raises(
        OptionError,
        match=r"the installed decoder of 'rev', broken:read, cannot be imported: needs lib",
    ):
        list(ss.ShardDataset(folder, on_error="skip").decode())
    own = ss.ShardDataset(folder).decode(fields={"rev": len})
    assert next(iter(own))["seg.rev"] == 3


def test_two_packages_for_one_name_are_an_error_that_names_both(
    install: Install, folder: str
) -> None:
    for name in ("one", "two"):
        install(name, "def read(data): return data", rev=f"{name}:read")
    with pytest.raises(
        OptionError, match=r"several installed packages decode 'rev': (one|two):read, .*fields="
    ):
        list(ss.ShardDataset(folder, on_error="skip").decode())


@pytest.mark.parametrize("target", ["revdec:gone", "revdec:number"])
def test_decoder_that_is_not_callable_is_refused(target: str, install: Install) -> None:
    install("revdec", "number = 3", rev=target)
    decoder = copy.deepcopy(installed_decoders()["rev"])  # as a pickle does
    with pytest.raises(OptionError, match="the installed decoder of 'rev'"):
        decoder(b"1")
