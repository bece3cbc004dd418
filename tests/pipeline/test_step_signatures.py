"""Test signatures of steps and functions: they detect a different one, and are equal in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import StateError
from shardstream.loader import StreamDataset
from shardstream.pipeline import PackSequences, Pipeline, Select, describe, function_name
from tests.limits import module_of
from tests.small_datasets import labels, numbered, take

Sample = dict[str, Any]
Build = Callable[[StreamDataset], StreamDataset]


def is_even(sample: Sample) -> bool:
    return bool(sample["cls"] % 2 == 0)


def is_odd(sample: Sample) -> bool:
    return not is_even(sample)


def below(limit: int) -> Callable[[Sample], bool]:
    return lambda sample: bool(sample["cls"] < limit)


def is_under(sample: Sample, limit: int) -> bool:
    return below(limit)(sample)


@dataclass
class Under:
    limit: int

    def __call__(self, sample: Sample) -> bool:
        return is_under(sample, self.limit)

    def or_even(self, sample: Sample) -> bool:
        return self(sample) or is_even(sample)


class Keeps:
    def even(self, sample: Sample) -> bool:
        return is_even(sample)

    def odd(self, sample: Sample) -> bool:
        return is_odd(sample)

    def __call__(self, sample: Sample) -> bool:
        return is_even(sample) or is_odd(sample)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def by_name(name: str, data: bytes) -> str:
    return name


def by_data(name: str, data: bytes) -> bytes:
    return data


def in_two(items: Any) -> Any:
    yield from items


def as_is(items: Any) -> Any:
    yield from items


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 40, 9)


def open_loader(folder: str, build: Build) -> ss.ShardLoader:
    return ss.ShardLoader(build(ss.ShardDataset(folder, seed=3).decode()), 4)


def over(limit: int) -> Callable[[Sample], bool]:
    def is_over(sample: Sample, *, limit: int = limit) -> bool:
        return bool(sample["cls"] > limit)

    return is_over


DIFFERENT: dict[str, tuple[Build, Build]] = {
    "select": (lambda ds: ds.select(is_even).shuffle(1), lambda ds: ds.select(is_odd).shuffle(1)),
    "lambda": (
        lambda ds: ds.select(lambda sample: sample["cls"] < 5).shuffle(1),
        lambda ds: ds.select(lambda sample: sample["cls"] < 7).shuffle(1),
    ),
    "default of a lambda": (
        lambda ds: ds.select(lambda sample, limit=5: sample["cls"] < limit).shuffle(1),  # type: ignore[misc]
        lambda ds: ds.select(lambda sample, limit=7: sample["cls"] < limit).shuffle(1),  # type: ignore[misc]
    ),
    "default of a function": (lambda ds: ds.select(over(5)).shuffle(1), lambda ds: ds.select(over(7)).shuffle(1)),
    "image name": (
        lambda ds: ds.decode("rgb8").shuffle(1),
        lambda ds: ds.decode("l8").shuffle(1),
    ),
    "max_side": (
        lambda ds: ds.decode("rgb8", max_side=32).shuffle(1),
        lambda ds: ds.decode("rgb8", max_side=64).shuffle(1),
    ),
    "upright": (
        lambda ds: ds.decode("rgb8").shuffle(1),
        lambda ds: ds.decode("rgb8", upright=True).shuffle(1),
    ),
    "builtin decoder of a field": (
        lambda ds: ds.decode(fields={"cls": int}).shuffle(1),
        lambda ds: ds.decode(fields={"cls": bytes}).shuffle(1),
    ),
    "lambda that calls another": (
        lambda ds: ds.select(lambda sample: not is_even(sample)).shuffle(1),
        lambda ds: ds.select(lambda sample: not is_odd(sample)).shuffle(1),
    ),
    "partial": (
        lambda ds: ds.select(partial(is_under, limit=5)).shuffle(1),
        lambda ds: ds.select(partial(is_under, limit=7)).shuffle(1),
    ),
    "dataclass": (lambda ds: ds.select(Under(5)).shuffle(1), lambda ds: ds.select(Under(7)).shuffle(1)),
    "method of a dataclass": (
        lambda ds: ds.select(Under(5).or_even).shuffle(1),
        lambda ds: ds.select(Under(7).or_even).shuffle(1),
    ),
    "method": (lambda ds: ds.select(Keeps().even).shuffle(1), lambda ds: ds.select(Keeps().odd).shuffle(1)),
    "object": (lambda ds: ds.select(Keeps()).shuffle(1), lambda ds: ds.select(Under(5)).shuffle(1)),
    "map": (lambda ds: ds.map(dict).shuffle(1), lambda ds: ds.map(Keeps()).shuffle(1)),
    "map_dict": (
        lambda ds: ds.map_dict(cls=int).shuffle(1),
        lambda ds: ds.map_dict(cls=float).shuffle(1),
    ),
    "map_tuple": (
        lambda ds: ds.to_tuple("cls").map_tuple(int).shuffle(1),
        lambda ds: ds.to_tuple("cls").map_tuple(float).shuffle(1),
    ),
    "rename": (
        lambda ds: ds.rename(a="cls").shuffle(1),
        lambda ds: ds.rename(a="npy").shuffle(1),
    ),
    "to_tuple": (
        lambda ds: ds.to_tuple("cls").shuffle(1),
        lambda ds: ds.to_tuple("npy").shuffle(1),
    ),
    "decode": (lambda ds: ds.decode(only="cls").shuffle(1), lambda ds: ds.decode(only="npy").shuffle(1)),
    "decoder of a field": (
        lambda ds: ds.decode(fields={"cls": half}).shuffle(1),
        lambda ds: ds.decode(fields={"npy": half}).shuffle(1),
    ),
    "handler": (
        lambda ds: ds.decode(by_name).shuffle(1),
        lambda ds: ds.decode(by_data).shuffle(1),
    ),
    "group_batched by field": (
        lambda ds: ds.group_batched("cls", 2),
        lambda ds: ds.group_batched("__key__", 2),
    ),
    "group_batched by function": (
        lambda ds: ds.group_batched(itemgetter("cls"), 2),
        lambda ds: ds.group_batched(itemgetter("__key__"), 2),
    ),
    "collate": (
        lambda ds: ds.batched(4, collate_fn=list).unbatched(),
        lambda ds: ds.batched(4, collate_fn=tuple).unbatched(),
    ),
    "map_batches": (
        lambda ds: ds.map_batches(dict, 4),
        lambda ds: ds.map_batches(Keeps(), 4),
    ),
    "compose": (lambda ds: ds.compose(as_is), lambda ds: ds.compose(in_two)),
    "pack_sequences": (
        lambda ds: ds.pack_sequences("npy", 4, pad=0),
        lambda ds: ds.pack_sequences("npy", 4, pad=1),
    ),
    "version": (
        lambda ds: ds.select(is_even).shuffle(1),
        lambda ds: ds.select(is_even, version=2).shuffle(1),
    ),
    "map in a mix that is shuffled": (
        lambda ds: ss.mix([ds.map(dict)]).shuffle(1),
        lambda ds: ss.mix([ds.map(Keeps())]).shuffle(1),
    ),
    "weights": (
        lambda ds: ss.mix({"a": ds}, lambda epoch: {"a": 1 + epoch // 2}),
        lambda ds: ss.mix({"a": ds}, lambda epoch: {"a": 1 + epoch}),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_state_of_another_function_is_refused(one: Build, other: Build, folder: str) -> None:
    state = json.loads(json.dumps(open_loader(folder, one).state_dict()))
    open_loader(folder, one).load_state_dict(state)
    with pytest.raises(StateError, match="the state says"):
        open_loader(folder, other).load_state_dict(state)


def test_first_step_that_differs_is_named(folder: str) -> None:
    state = open_loader(folder, lambda ds: ds.select(is_even).shuffle(3)).state_dict()
    match = (
        r"step 2 of the pipeline: the state says Select\(predicate=.*test_step_signatures.is_even\), "
        r"here it is Select\(predicate=.*test_step_signatures.is_odd\); use the same steps \(for a renamed function pass its old name as name="
    )
    with pytest.raises(StateError, match=match):
        open_loader(folder, lambda ds: ds.select(is_odd).shuffle(3)).load_state_dict(state)


def test_renamed_function_resumes_with_its_old_name(folder: str) -> None:
    left = open_loader(folder, lambda ds: ds.select(is_even).shuffle(1))
    whole = labels(open_loader(folder, lambda ds: ds.select(is_even).shuffle(1)))
    first = labels(take(left, 2))
    old_name = function_name(is_even)
    again = open_loader(
        folder, lambda ds: ds.select(lambda one: one["cls"] % 2 == 0, name=old_name).shuffle(1)
    )
    again.load_state_dict(left.state_dict())
    assert first + labels(again) == whole


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("augment", [dict, Keeps(), lambda sample: sample])
def test_functions_may_change_if_no_step_changes_counts(
    augment: Any, mixed: bool, folder: str
) -> None:
    def build(ds: StreamDataset) -> StreamDataset:
        return ss.mix([ds]) if mixed else ds

    state = open_loader(folder, build).state_dict()
    open_loader(folder, lambda ds: build(ds.map(augment))).load_state_dict(state)


def test_signatures_omit_values_that_differ_between_runs() -> None:
    assert function_name(below(5)) == function_name(below(7))  # for example a run's folder or time
    assert function_name(Keeps()) == function_name(Keeps())
    assert function_name(partial(print, file=Keeps())) == function_name(
        partial(print, file=Keeps())
    )
    assert "0x" not in function_name(partial(print, object(), end=object()))
    assert len(describe(Select(predicate=partial(max, *range(10_000))))) < 500


SCRIPT = """
import json, sys
from functools import partial
from operator import attrgetter
sys.path.insert(0, sys.argv[1])
from shardstream.loader import StreamDataset
from shardstream.pipeline import function_name
from tests.limits import module_of, module_of
def top(x): return x
class Box:
    def inside(self, x): return x
def main():
    def local(x): return x
    functions = [top, local, lambda x: x in {"a", "b", "c"}, lambda x: [y for y in x if y > 2],
                 Box().inside, Box, partial(top, 3), attrgetter("a.b"), len, "a".startswith]
    return [function_name(one) for one in functions]
if __name__ == "__main__":
    print(json.dumps(main()))
"""


@pytest.mark.slow
def test_signatures_are_equal_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(ss.__file__).parents[1])
    seen = {
        subprocess.run(
            [sys.executable, str(script), root], env=os.environ | {"PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True, timeout=300,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
    names = json.loads(seen.pop())
    assert names[:2] == ["__main__.top", "__main__.main.<locals>.local"]
    assert len(names) == len(set(names))


def test_spawned_worker_has_the_signatures_of_the_main_script() -> None:
    def top() -> None: ...

    top.__module__ = "__mp_main__"
    assert function_name(top).startswith("__main__.")


def test_signatures_omit_default_options() -> None:
    concat: Any = str(b"concat", "ascii")  # equal to the default, not identical
    stage = PackSequences(field="npy", length=4, packing=concat)
    assert "packing" not in describe(stage)
    assert "packing='first_fit'" in describe(replace(stage, packing="first_fit"))


def test_signatures_omit_module_paths_of_this_package() -> None:
    from shardstream.loader import collate  # noqa: PLC0415

    assert function_name(collate) == "collate"
    assert function_name(methodcaller("get", "a")) == "operator.methodcaller('get', 'a')"
    assert function_name(lru_cache(is_even)).endswith("test_step_signatures.is_even")


@dataclass
class Counting:
    seen: int = 0
    table: dict[int, int] = field(default_factory=dict)
    cache: dict[int, bool] = field(default_factory=dict, compare=False)
    first: int = field(init=False)

    def __call__(self, sample: Sample) -> bool:
        self.seen += 1
        self.first = self.table[self.seen] = sample["cls"]
        return True


def test_state_is_accepted_for_a_callable_with_changing_fields(folder: str) -> None:
    left = open_loader(folder, lambda ds: ds.select(Counting()).shuffle(1))
    whole = labels(open_loader(folder, lambda ds: ds.select(Counting()).shuffle(1)))
    again = open_loader(folder, lambda ds: ds.select(Counting()).shuffle(1))
    first = labels(take(left, 2))
    again.load_state_dict(json.loads(json.dumps(left.state_dict())))
    assert first + labels(again) == whole


def test_signatures_omit_fields_excluded_from_comparison() -> None:
    assert function_name(Counting(cache={1: True})) == function_name(Counting())
    assert function_name(Counting(seen=1)) != function_name(Counting())


def test_signatures_are_computed_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = open_loader(folder, lambda ds: ds.select(Under(50)).shuffle(1))
    state = loader.state_dict()
    monkeypatch.setattr(module_of(Pipeline), "describe", None)
    assert loader.state_dict() == state


def test_self_referencing_function_can_be_used(folder: str) -> None:
    function = Counting()
    function.table[0] = function  # type: ignore[assignment]
    assert open_loader(folder, lambda ds: ds.select(function).shuffle(1)).state_dict()
