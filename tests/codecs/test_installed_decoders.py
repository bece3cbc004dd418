"""Test decoders of installed packages: found by entry point, used when they are named, imported late."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.codecs import installed_decoders
from shardstream.errors import OptionError
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
    dataset = ss.ShardDataset(folder).decode("rev")
    options: dict[str, Any] = {}
    if method is not None:
        options = {"num_workers": 2, "multiprocessing_context": method}
    found = [text for batch in ss.ShardLoader(dataset, 2, **options) for text in batch["seg.rev"]]
    assert found == [f"{n}ba" for n in range(8)]


def test_installed_decoders_are_inactive_until_they_are_named(
    install: Install, folder: str
) -> None:
    code = "def read(data): return 'read'"
    install(
        "grabber", code, rev="grabber:read", jpg="grabber:read", json="grabber:read", l8="no:no"
    )
    fields = ("seg.rev", "jpg", "json")

    def decoded(*names: str, **options: Any) -> list[Any]:
        sample = next(iter(ss.ShardDataset(folder).decode(*names, **options)))
        return [sample[field] for field in fields]

    assert decoded() == [b"ab0", b"\xff\xd8 no", {"n": 0}]
    assert decoded("rev") == ["read", b"\xff\xd8 no", {"n": 0}]
    assert decoded("rev", "jpg") == ["read", "read", {"n": 0}]
    assert decoded(fields={"seg.rev": "json"}) == ["read", b"\xff\xd8 no", {"n": 0}]
    with pytest.raises(
        OptionError, match="no decoder is called 'dcm'.*packages .jpg, json, l8, rev"
    ):
        decoded("dcm")
    with pytest.raises(ss.errors.DecodeError, match="UnidentifiedImage"):  # an image name stays one
        decoded("l8")


def test_decoder_is_imported_on_first_use(install: Install, folder: str) -> None:
    install("broken", "raise ImportError('needs libbroken')", rev="broken:read", other="gone:read")
    dataset = ss.ShardDataset(folder).decode("rev", only="json")
    assert len(list(dataset)) == 8
    with pytest.raises(
        OptionError,
        match=r"the installed decoder of 'rev', broken:read, cannot be imported: needs lib",
    ):
        list(ss.ShardDataset(folder, on_error="skip").decode("rev"))
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
        list(ss.ShardDataset(folder, on_error="skip").decode("rev"))


@pytest.mark.parametrize("target", ["revdec:gone", "revdec:number"])
def test_decoder_that_is_not_callable_is_refused(target: str, install: Install) -> None:
    install("revdec", "number = 3", rev=target)
    decoder = copy.deepcopy(installed_decoders()["rev"])  # as a pickle does
    with pytest.raises(OptionError, match="the installed decoder of 'rev'"):
        decoder(b"1")
