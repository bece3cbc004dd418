from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import OptionError
from tests.small_datasets import numbered


@pytest.mark.parametrize(
    "options",
    [
        ss.OrderOptions(lanes=4, remainder="drop"),
        ss.ReadOptions(lazy=("mp4",), cache_dir="cache", cache_bytes="1GB"),
        ss.Weights([1.0, 2.0], num_samples=3),
    ],
    ids=repr,
)
def test_options_are_values_that_name_what_is_not_a_default(options: Any) -> None:
    if not isinstance(options, ss.Weights):
        assert pickle.loads(pickle.dumps(options)) == copy.copy(options) == options  # noqa: S301
        assert type(options)() != options
    assert eval(repr(options), vars(ss)) is not None  # noqa: S307
    with pytest.raises((AttributeError, TypeError)):
        options.lanes = options.values = options.lazy = 1


def test_a_repr_leaves_defaults_out() -> None:
    assert repr(ss.OrderOptions()) == "OrderOptions()"
    assert repr(ss.ReadOptions(hedge=True, index="auto")) == "ReadOptions(hedge=True)"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ss.OrderOptions, {"window": 0}, "window must be at least 1, not 0"),
        (ss.OrderOptions, {"lanes": 1.5}, "lanes must be a whole number, not 1.5"),
        (ss.OrderOptions, {"remainder": "all"}, "remainder is 'pad', 'drop' or 'keep'"),
        (ss.ReadOptions, {"index": "no"}, "index must be 'auto', 'require' or 'ignore'"),
        (ss.ReadOptions, {"verify": "md5"}, "verify is 'sha256' or None, not 'md5'"),
        (ss.ReadOptions, {"lazy": "mp4"}, r"lazy= must be a list of names, such as \['mp4'\]"),
        (ss.ReadOptions, {"cache_bytes": "1GB"}, "cache_bytes is set without cache_dir"),
        (ss.ReadOptions, {"prefetch_bytes": -1}, "prefetch_bytes must be at least 0"),
        (ss.ReadOptions, {"lazy": ["a"], "verify": "sha256"}, "give one of them"),
    ],
)
def test_invalid_options_are_refused_where_they_are_made(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": {"window": 8}}, r"order= takes ss.OrderOptions\(...\), not \{'window': 8\}"),
        ({"order": ss.ReadOptions()}, r"order= takes ss.OrderOptions\(...\), not ReadOptions\(\)"),
        ({"read": "cache"}, r"read= takes ss.ReadOptions\(...\), not 'cache'"),
        ({"read": ss.ReadOptions}, "read= takes ss.ReadOptions"),
    ],
)
def test_other_objects_than_options_are_refused(tmp_path: Any, options: Any, message: str) -> None:
    folder = numbered(tmp_path / "data", 20)
    for door in (ss.ShardDataset, ss.ObjectDataset):
        with pytest.raises(OptionError, match=message):
            door(folder, **options)
    with pytest.raises(OptionError, match=message):
        ss.mix([ss.ShardDataset(folder)], **options)


@pytest.mark.parametrize("options", [{"index": "require"}, {"lazy": ["a"]}, {"verify": "sha256"}])
def test_options_of_shards_are_refused_for_loose_files(tmp_path: Any, options: Any) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(OptionError, match="= has no effect on loose files"):
        ss.ObjectDataset(str(tmp_path), read=ss.ReadOptions(**options))


def test_options_of_datasets_are_refused_in_a_mix_and_on_open_samples(tmp_path: Any) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path / "data", 20))
    with pytest.raises(OptionError, match="block= has no effect in a mix, only in its datasets"):
        ss.mix([dataset], order=ss.OrderOptions(block=3))
    cached = ss.ReadOptions(cache_dir=tmp_path / "cache")
    with pytest.raises(OptionError, match="cache_dir= has no effect in a mix"):
        ss.mix([dataset], read=cached)
    with pytest.raises(OptionError, match="cache_dir= has no effect on samples that are opened"):
        ss.loader.CatalogDataset(dataset.samples, read=cached)


def test_the_samples_of_a_dataset_are_public_but_of_streams(tmp_path: Any) -> None:
    folder = numbered(tmp_path / "data", 20)
    assert len(ss.ShardDataset(folder, subset=[1, 2]).decode().samples) == 2
    whole = ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore"))
    with pytest.raises(OptionError, match="have no numbers; run 'shardstream index'"):
        whole.samples  # noqa: B018


def test_options_of_a_cache_create_no_folder(tmp_path: Path) -> None:
    ss.ReadOptions(cache_dir=tmp_path / "cache", cache_bytes="1GB")
    assert not (tmp_path / "cache").exists()


def test_options_of_a_dataset_are_refused_by_the_loader_with_their_place(tmp_path: Any) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path / "data", 20))
    for options, message in (
        ({"window": 8}, r"pass order=ss.OrderOptions\(window=\) to ShardDataset"),
        ({"cache_dir": "x", "seed": 1}, r"pass read=ss.ReadOptions\(cache_dir=\), seed= to"),
    ):
        with pytest.raises(OptionError, match=message):
            ss.ShardLoader(dataset, 4, **options)


def test_a_mix_takes_datasets_only(tmp_path: Any) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path / "data", 20))
    others: list[Any] = [dataset.by_number(), str(tmp_path)]
    for other in others:
        with pytest.raises(OptionError, match=r"mix takes datasets such as ShardDataset, not a"):
            ss.mix([dataset, other])


@pytest.mark.parametrize(
    "options",
    [
        {"order": ss.OrderOptions(lanes=2)},
        {"order": ss.OrderOptions(remainder="drop")},
        {"read": ss.ReadOptions(index="ignore", hedge=True)},
    ],
    ids=str,
)
def test_options_without_effect_on_whole_shards_are_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    numbered(tmp_path / "data", 4)
    options = {"read": ss.ReadOptions(index="ignore")} | options
    with pytest.raises(OptionError, match="has no effect on shards that are read whole"):
        ss.ShardDataset(tmp_path / "data", **options)
