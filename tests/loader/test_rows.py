"""Rows of samples, by the public door: packed sequences, windows, batches of bounded cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, SampleError
from shardstream.loader import CatalogDataset, StreamDataset, cu_seqlens
from shardstream.loader import ShardDataset as Dataset
from shardstream.samples import Fetcher, Numbers, Samples

N = 230
LENGTHS = np.maximum(1, np.random.default_rng(0).lognormal(3, 0.9, N).astype(int))
pytestmark = pytest.mark.filterwarnings("ignore:lanes=", "ignore:an epoch of this mix")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents: document i has ``LENGTHS[i]`` tokens ``1000 * i, 1000 * i + 1, ...``, and belongs to episode ``i // 7``."""
    folder = tmp_path_factory.mktemp("tokens")
    with ss.ShardWriter(folder, max_samples=50, columns=["json.episode"]) as writer:
        for number, length in enumerate(LENGTHS.tolist()):
            writer.write(
                {
                    "__key__": f"{number:04d}",
                    "npy": 1000 * number + np.arange(length, dtype=np.int64),
                    "mask.npy": np.full((length, 2), number % 2, dtype=np.float32),
                    "json": {"episode": number // 7},
                }
            )
    return str(folder)


def opened(url: str, **options: Any) -> Dataset:
    return ss.ShardDataset(url, **options).decode()


def test_rows_hold_each_token_once_with_documents_and_positions(tokens: str) -> None:
    dataset = opened(tokens, shuffle=True, seed=1).pack_sequences(
        ("npy", "mask.npy"), 64, lengths=LENGTHS, keep="__key__", labels=True, pad=-1
    )
    rows = list(dataset)
    assert len(rows) == len(dataset) == len(ss.ShardLoader(dataset, batch_size=1))
    seen: list[int] = []
    for row in rows:
        real = row["segments"] > 0
        assert (row["npy"][~real] == -1).all()
        assert (row["mask.npy"][~real] == 0).all()
        documents = row["npy"][real] // 1000
        for segment in range(1, row["segments"].max() + 1):
            places, mine = np.flatnonzero(row["segments"] == segment), row["segments"] == segment
            assert (row["positions"][mine] == places - places[0]).all()
            assert (np.diff(row["npy"][mine]) == 1).all()
        assert (row["mask.npy"][real] == documents[:, None] % 2).all()
        keys = [row["__keys__"][segment - 1] for segment in row["segments"][real]]
        assert [int(key) for key in keys] == documents.tolist()
        is_first = np.diff(row["segments"], prepend=0) != 0
        assert (row["labels"] == np.where(is_first | ~real, -100, row["npy"])).all()
        seen += row["npy"][real].tolist()
    expected = [1000 * n + place for n, length in enumerate(LENGTHS) for place in range(length)]
    assert sorted(seen) == expected


def test_ends_of_sequences_are_what_variable_length_attention_takes(tokens: str) -> None:
    dataset = opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS)
    batch = next(iter(ss.ShardLoader(dataset, batch_size=4)))
    ends, longest = cu_seqlens(batch["segments"])
    assert ends[0] == 0
    assert ends[-1] == 4 * 64
    assert ends.dtype == torch.int32
    assert longest == ends.diff().max()
    flat = torch.stack([batch["segments"], torch.arange(4)[:, None].expand(4, 64)]).flatten(1)
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        assert (flat[:, first:last] == flat[:, first : first + 1]).all()
    assert len(ends) - 1 == len(torch.unique(flat, dim=1)[0])


def test_concat_rows_are_the_stream_cut_into_rows(tokens: str) -> None:
    rows = opened(tokens).pack_sequences(
        "npy", 50, lengths=LENGTHS, packing="concat", drop_last=True
    )
    streamed = opened(tokens).pack_sequences("npy", 50, drop_last=True)
    assert len(rows) == LENGTHS.sum() // 50
    for row, expected in zip(rows, streamed, strict=True):
        assert all(np.array_equal(row[name], expected[name]) for name in expected)


def test_repacked_rows_differ_between_epochs_and_are_the_same_again(tokens: str) -> None:
    dataset = opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS, repack=True)
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append([row["npy"].tobytes() for row in dataset])
    assert epochs[0] == epochs[2]
    assert len(set(epochs[0]) & set(epochs[1])) < len(epochs[0]) / 2
    by_number = dataset.by_number()
    for epoch in (0, 1):
        by_number.set_epoch(epoch)
        assert [row["npy"].tobytes() for row in by_number] == epochs[epoch]


def test_rows_without_packed_fields_hold_lists(tokens: str) -> None:
    dataset = opened(tokens).pack_sequences((), 64, lengths=LENGTHS, keep=("npy", "json"))
    row = next(iter(dataset))
    assert sum(map(len, row["npy"])) <= 64
    assert len(row["json"]) == len(row["npy"])


def test_windows_of_a_field_are_copies_of_its_parts(tokens: str) -> None:
    dataset = opened(tokens).windows("npy", size=16, stride=8, lengths=LENGTHS, drop_last=True)
    found = [(int(one["__key__"]), one["__start__"], one["npy"].copy()) for one in dataset]
    expected = [
        (number, start)
        for number, length in enumerate(LENGTHS.tolist())
        for start in range(0, length - 15, 8)
    ]
    assert [(number, start) for number, start, _ in found] == expected
    for number, start, part in found:
        assert np.array_equal(part, 1000 * number + start + np.arange(16))


def _spoil(window: dict[str, Any]) -> dict[str, Any]:
    assert window["npy"][0] % 1000 == window["__start__"]
    assert "x" not in window["json"]
    window["npy"] *= -1
    window["json"]["x"] = 1
    return window


def test_a_step_that_changes_a_window_does_not_change_others(tokens: str) -> None:
    dataset = opened(tokens).windows("npy", size=16, stride=4, lengths=LENGTHS).map(_spoil)
    loader = ss.ShardLoader(dataset, batch_size=32, collate_fn=list)
    assert sum(map(len, loader)) == len(dataset)


def _elements(sample: dict[str, Any]) -> dict[str, Any]:
    values: list[dict[str, int]] = [{} for _ in sample["npy"]]
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return {"list": values, "array": array}


def _mark(window: dict[str, Any]) -> dict[str, Any]:
    for element in [*window["list"], *window["array"]]:
        assert not element
    window["list"][0]["x"] = window["array"][0]["x"] = 1
    return window


def test_windows_share_no_elements_of_lists_and_arrays(tokens: str) -> None:
    dataset = opened(tokens).map(_elements)
    windows = dataset.windows(("list", "array"), size=4, stride=2, lengths=LENGTHS)
    loader = ss.ShardLoader(windows.map(_mark), batch_size=32, collate_fn=list)
    assert sum(map(len, loader)) == len(windows)


def _count(sample: dict[str, Any]) -> dict[str, Any]:
    sample["turns"] = sample.get("turns", 0) + 1
    return sample


def test_steps_change_the_samples_of_copies_of_a_row_once(tokens: str) -> None:
    dataset = ss.ShardDataset(tokens).map(_count)
    rows = dataset.pack_sequences((), 64, lengths=LENGTHS, keep="turns")
    for row in rows.by_number().__getitems__([3, 3, 3]):
        assert set(row["turns"]) == {1}


def test_windows_of_samples_stay_within_their_group(tokens: str) -> None:
    dataset = opened(tokens, fields=("json",)).windows(
        size=3, stride=2, group="episode", drop_last=True
    )
    found = [(one["__key__"], [value["episode"] for value in one["json"]]) for one in dataset]
    expected = [
        (f"{start:04d}", [start // 7] * 3)
        for first in range(0, N, 7)
        for start in range(first, min(first + 7, N) - 2, 2)
    ]
    assert found == expected


def test_windows_of_samples_bridge_no_gap_and_no_end_of_a_dataset(tokens: str) -> None:
    def keys(dataset: StreamDataset) -> list[list[str]]:
        windows = dataset.windows(size=3, stride=1, group="episode", drop_last=True)
        return [[one["__key__"], *map(str, one["json"])] for one in windows]

    chosen = ss.ShardDataset(tokens, subset=[0, 1, 2, 4, 5, 6, 7, 8, 9], fields=("json",))
    assert [found[0] for found in keys(chosen)] == ["0000", "0004", "0007"]
    parts = [
        ss.ShardDataset(tokens, subset=range(first, first + 4), fields=("json",))
        for first in (0, 3)
    ]
    assert len(keys(ss.mix(parts))) == 4


def test_group_whose_samples_do_not_follow_each_other_is_refused(tokens: str) -> None:
    dataset = ss.ShardDataset(tokens, subset=[0, 1, 20, 2])
    with pytest.raises(OptionError, match="0 in the column 'episode' do not follow each other"):
        dataset.windows(size=2, group="episode")


def _refuse(batch: Any) -> Any:
    raise ValueError(len(batch))


def test_batches_by_cost_have_one_number_of_steps_on_all_ranks(tokens: str) -> None:
    seen: list[str] = []
    for rank in range(4):
        dataset = opened(tokens, shuffle=True, placement=ss.Placement(rank, 4)).batch_by_cost(
            LENGTHS, 400, multiple=8, collate_fn=list
        )
        loader = ss.ShardLoader(dataset, batch_size=None)
        batches = list(loader)
        assert len(batches) == len(loader) == len(dataset)
        for batch in batches:
            assert len(batch) * max(len(one["npy"]) for one in batch) <= 400
            seen += [one["__key__"] for one in batch]
    assert sorted(seen) == [f"{number:04d}" for number in range(N)]


def test_pad_that_is_no_token_is_an_error_and_no_bad_sample(tokens: str) -> None:
    """It is met at a row with padding."""
    dataset = opened(tokens, on_error="skip").map(
        lambda sample: sample | {"npy": sample["npy"].astype(np.uint16)}
    )
    for lengths in (LENGTHS, None):
        rows = dataset.pack_sequences("npy", 64, lengths=lengths, pad=-1)
        with pytest.raises(OptionError, match="pad=-1 is no uint16, the type of 'npy': it holds 0"):
            list(rows)


def test_bad_batches_by_cost_are_skipped(tokens: str) -> None:
    dataset = ss.ShardDataset(tokens, on_error="skip").decode().batch_by_cost(LENGTHS, 400)
    loader = ss.ShardLoader(dataset.map(_refuse), batch_size=None)
    with pytest.warns(UserWarning, match="left out all samples of this epoch"):
        assert list(loader) == []
    assert {type(bad.key) for bad in loader.bad_samples} == {str}


def test_cost_function_gets_all_numbers_and_bounds_batches(tokens: str) -> None:
    dataset = opened(tokens).batch_by_cost(
        LENGTHS, 150_000, cost=lambda n: n + n * n, padded=False, collate_fn=list
    )
    for batch in dataset:
        assert sum(len(one["npy"]) * (1 + len(one["npy"])) for one in batch) <= 150_000


Make = Callable[[str, ss.Placement], StreamDataset]
ORDER = ss.OrderOptions(lanes=8, microbatch=1)


def _rows_of(kind: str, dataset: Dataset, numbers: np.ndarray[Any, Any]) -> Dataset:
    found = LENGTHS[numbers]
    match kind:
        case "best_fit" | "repack" | "cut":
            return dataset.pack_sequences(
                "npy",
                64,
                lengths=found,
                long="cut" if kind == "cut" else "split",
                repack=kind == "repack",
            )
        case "concat":
            return dataset.pack_sequences("npy", 64, lengths=found, packing="concat")
        case "windows":
            return dataset.windows("npy", size=16, stride=9, lengths=found, drop_last=True).map(
                _without_masks
            )
        case _:
            return dataset.batch_by_cost(found, 400, collate_fn=_first_tokens)


def _without_masks(window: dict[str, Any]) -> dict[str, Any]:
    return {"npy": window["npy"]}


def _first_tokens(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"npy": np.array([int(one["npy"][0]) for one in samples])}


def _make(kinds: list[str], base: str, url: str, placement: ss.Placement) -> StreamDataset:
    """Return one dataset of rows, or a mix of several."""
    parts = []
    for place, kind in enumerate(kinds):
        numbers, chosen = np.arange(N), dict[str, Any]()
        if base == "subset":
            numbers = np.random.default_rng(place).permutation(N)[: 120 + place]
            chosen = {"subset": numbers}
        elif base == "where":
            numbers = np.flatnonzero(np.arange(N) // 7 % 3 > 0)
            chosen = {"where": "episode % 3 > 0"}
        dataset = opened(
            url,
            shuffle=True,
            seed=place,
            order=ORDER if len(kinds) == 1 else None,
            placement=placement,
            **chosen,
        )
        parts.append(_rows_of(kind, dataset, numbers))
    if len(parts) == 1:
        return parts[0]
    weights = [1.0 + place for place in range(len(parts))] if base == "weights" else None
    return ss.mix(parts, weights, order=ORDER)


def _global_rows(
    make: Callable[[ss.Placement], StreamDataset],
    ranks: int,
    workers: int,
    state: dict[str, Any] | None = None,
    stop: int | None = None,
) -> tuple[list[bytes], dict[str, Any]]:
    """Return the rows of steps of 8 in the order of steps and ranks, and the state after them."""
    found: dict[tuple[int, int], list[bytes]] = {}
    states = []
    for rank in range(ranks):
        loader = ss.ShardLoader(
            make(ss.Placement(rank, ranks)),
            batch_size=8 // ranks,
            num_workers=workers,
            collate_fn=list,
            drop_last=True,
        )
        if state is not None:
            loader.load_state_dict(state)
        if stop != 0:
            for step, batch in enumerate(loader):
                found[step, rank] = [np.asarray(one["npy"]).tobytes() for one in batch]
                if step + 1 == stop:
                    break
        states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    return [row for _, rows in sorted(found.items()) for row in rows], states[0]


topologies = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 0, 0, 2]))


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["alone", "subset", "where", "mix", "weights"]),
    st.sampled_from(["best_fit", "repack", "cut", "concat", "windows", "cost"]),
    st.sampled_from(["best_fit", "repack", "windows"]),
    st.lists(topologies, min_size=3, max_size=3),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 2),
)
def test_rows_are_equal_on_any_ranks_and_workers_and_after_two_resumes_elsewhere(  # noqa: PLR0913, PLR0917
    tokens: str,
    base: str,
    kind: str,
    other: str,
    places: list[tuple[int, int]],
    first: int,
    second: int,
    epoch: int,
) -> None:
    kinds = [kind, other] if base in ("mix", "weights") and kind != "cost" else [kind]

    def make(placement: ss.Placement) -> StreamDataset:
        dataset = _make(kinds, base, tokens, placement)
        dataset.set_epoch(epoch)
        return dataset

    expected, _ = _global_rows(make, 1, 0)
    joined, state = _global_rows(make, *places[0], stop=first)
    for place, stop in ((places[1], second), (places[2], None)):
        if state["epoch"] == epoch:  # it has not ended
            rows, state = _global_rows(make, *place, state=state, stop=stop)
            joined += rows
    assert joined == expected


def _int_or_uint(sample: dict[str, Any]) -> dict[str, Any]:
    is_odd = int(sample["__key__"]) % 2
    return sample | {"ids": sample["npy"].astype(np.uint64 if is_odd else np.int64)}


def test_packed_fields_keep_their_numbers(tokens: str) -> None:
    dataset = opened(tokens).map(_int_or_uint)
    for fields in ("ids", ("npy", "ids")):
        with pytest.raises(SampleError, match="'uint64'. have no common integer type"):
            list(dataset.pack_sequences(fields, 64, lengths=LENGTHS))
    for fields, keep in ((("npy", "segments"), ()), ("npy", "npy"), ("npy", ("labels",))):
        with pytest.raises(OptionError, match="a row would have .* twice"):
            opened(tokens).pack_sequences(fields, 64, lengths=LENGTHS, keep=keep, labels=True)
    with pytest.raises(OptionError, match="pad must be a whole number"):
        opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS, pad=0.5)  # type: ignore[arg-type]


def test_a_sample_of_another_length_than_planned_is_named(tokens: str) -> None:
    wrong = LENGTHS.copy()
    wrong[5] += 3
    for rows in (
        opened(tokens).pack_sequences("npy", 64, lengths=wrong),
        opened(tokens).windows("npy", size=4, lengths=wrong),
    ):
        with pytest.raises(
            SampleError, match=rf"has {LENGTHS[5]} elements, but lengths= says {wrong[5]}.*'0005'"
        ):
            list(rows)


def test_a_bad_document_of_several_rows_counts_once(tokens: str) -> None:
    wrong = LENGTHS.copy()
    wrong[5] += 1
    dataset = opened(tokens, on_error="skip", shuffle=True).windows("npy", size=2, lengths=wrong)
    loader = ss.ShardLoader(dataset, batch_size=1)
    assert len(list(loader)) == len(dataset) - -(-wrong[5] // 2)
    assert loader.skipped == {"SampleError": 1}


def test_bad_documents_are_skipped_and_their_rows_are_shorter(tokens: str) -> None:
    wrong = LENGTHS.copy()
    wrong[5] += 1
    dataset = opened(tokens, on_error="skip").pack_sequences(
        "npy", 64, lengths=wrong, keep="__key__"
    )
    loader = ss.ShardLoader(dataset, batch_size=4, collate_fn=list)
    expected = {f"{number:04d}" for number in range(N) if number != 5}
    assert {key for batch in loader for row in batch for key in row["__keys__"]} == expected
    assert [one.key for one in loader.bad_samples] == ["0005"]
    for read in (dataset, ss.mix([dataset, dataset])):
        assert {key for row in read for key in row["__keys__"]} == expected


def _refuse_30(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] == "0030":
        raise ValueError("bad")
    return sample


def test_windows_with_a_bad_sample_are_left_out(tokens: str) -> None:
    dataset = opened(tokens, on_error="skip", fields=("json",)).map(_refuse_30)
    windows = dataset.windows(size=3, stride=1, group="episode", drop_last=True)
    keys = [window["__key__"] for window in windows]
    assert {len(window["json"]) for window in windows} == {3}
    assert len(keys) == len(windows) - 3
    assert not {"0028", "0029", "0030"} & set(keys)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("nothing", "nothing"),
        (LENGTHS[:-1], "229 numbers, but there are 230 samples"),
        (-LENGTHS, "sample 0 has -"),
        (LENGTHS + 0.5, "lengths are whole numbers"),
        (LENGTHS * np.nan, "lengths are whole numbers"),
        (LENGTHS * np.inf, "lengths are from 0 to"),
        (np.full(N, 2**64 - 1, np.uint64), "lengths are from 0 to"),
        ([[1, 2], [3]], "one list of numbers"),
        (["a"] * N, "one number for each sample"),
        (np.zeros(N, int), "0 rows of 64 tokens"),
    ],
)
def test_wrong_lengths_are_refused(tokens: str, lengths: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        opened(tokens).pack_sequences("npy", 64, lengths=lengths)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda n: n[1:], r"of shape \(229,\) for an array of shape \(230,\)"),
        (lambda n: n * np.nan, "sample 0 has nan"),
        (lambda n: -n, "sample 0 has -"),
        (lambda n: n * 1e9, "costs .*, more than max_cost=400"),
    ],
)
def test_wrong_costs_are_refused(tokens: str, cost: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        opened(tokens).batch_by_cost(LENGTHS, 400, cost=cost)


def test_what_cannot_be_planned_is_refused(tokens: str) -> None:
    drawn = ss.ShardDataset(tokens, weights=np.ones(N)).decode()
    makers: list[Callable[[], StreamDataset]] = [
        lambda: drawn.pack_sequences("npy", 64, lengths=LENGTHS),
        lambda: drawn.batch_by_cost(LENGTHS, 400),
        lambda: drawn.windows(size=2, group="episode"),
    ]
    for rows_of in makers:
        with pytest.raises(OptionError, match=r"several samples into a row.*ss\.mix\(datasets, w"):
            rows_of()
    with pytest.raises(OptionError, match="weights of this mix draw them anew"):
        ss.mix([opened(tokens)], [1]).windows("npy", size=2, lengths=LENGTHS)
    with pytest.raises(OptionError, match="the step Batched changes how many items there are"):
        opened(tokens).batched(2).windows("npy", size=2, lengths=LENGTHS)
    with pytest.raises(OptionError, match="need lengths="):
        opened(tokens).pack_sequences("npy", 64, repack=True)
    with pytest.raises(OptionError, match="a field with lengths=, or group="):
        opened(tokens).windows("npy", size=4)
    rows = opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS, repack=True)
    with pytest.raises(OptionError, match="put repack=True and batch_by_cost after windows"):
        rows.windows("npy", size=32, lengths=np.full(len(rows), 64))
    batches = opened(tokens).batch_by_cost(LENGTHS, 400)
    with pytest.raises(OptionError, match="makes batches already.* use batch_size=None"):
        ss.ShardLoader(batches)
    rows = opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS)
    with pytest.raises(OptionError, match="no columns"):
        rows.windows(size=2, group="episode")


def test_rows_are_no_samples_of_other_datasets(tokens: str, tmp_path: Path) -> None:
    rows = opened(tokens).pack_sequences("npy", 64, lengths=LENGTHS)
    with pytest.raises(OptionError, match="rows are made of parts of samples"):
        ss.loader.CatalogDataset(rows.samples)
    with pytest.raises(OptionError, match="a mix or rows cannot be joined"):
        ss.join(rows, opened(tokens))
    with pytest.raises(OptionError, match="rows are made of parts of samples"):
        ss.reshard(rows, tmp_path / "rows")


def test_costs_of_rows_that_change_are_refused(tokens: str) -> None:
    rows = opened(tokens, shuffle=True).pack_sequences("npy", 64, lengths=LENGTHS, repack=True)
    order = ss.OrderOptions(balance=np.ones(2 * N))
    with pytest.raises(OptionError, match="balance.*made anew in each epoch"):
        ss.mix([rows, rows], order=order)
    with pytest.raises(OptionError, match="balance.*makes other rows in each epoch"):
        opened(tokens, shuffle=True, order=ss.OrderOptions(balance=LENGTHS)).batch_by_cost(
            LENGTHS, 400
        )


def _attention(row: dict[str, Any]) -> float:
    if "segments" in row:
        return float((np.bincount(row["segments"])[1:] ** 2).sum())
    return float(len(row["npy"]) ** 2)


@pytest.mark.parametrize("kind", ["best_fit", "cut", "concat", "windows", "mix"])
def test_balance_counts_the_parts_of_rows(tokens: str, kind: str) -> None:
    costs = ss.Balance(np.tile(LENGTHS, 2 if kind == "mix" else 1), cost=np.square, steps=8)
    order = ss.OrderOptions(lanes=4, microbatch=1, balance=costs)
    if kind == "mix":
        parts = [
            _rows_of(one, opened(tokens, shuffle=True), np.arange(N)) for one in ("cut", "windows")
        ]
        rows: StreamDataset = ss.mix(parts, order=order)
    else:
        rows = _rows_of(kind, opened(tokens, shuffle=True, order=order), np.arange(N))
    source = rows.pipeline.indexed_source
    assert source is not None
    assert source.balance is not None
    by_number = rows.by_number()
    found = np.array([_attention(row) for row in by_number], dtype=np.float32)
    np.testing.assert_allclose(source.balance.costs, found / found.max(), rtol=1e-6)
    steps = [
        [_attention(row) for row in batch] for batch in ss.ShardLoader(rows, 4, collate_fn=list)
    ]
    assert sorted(cost for step in steps for cost in step) == sorted(found.tolist())
    busy = [np.mean(step) / np.max(step) for step in steps[:-1]]
    assert np.mean(busy) > 0.9


def test_windows_come_as_often_as_weights_say_of_their_samples(tokens: str) -> None:
    weights = np.arange(N) % 3 / 2
    windows = -(-LENGTHS // 16)

    def make(placement: ss.Placement) -> StreamDataset:
        drawn = opened(tokens, shuffle=True, weights=weights, order=ORDER, placement=placement)
        return drawn.windows("npy", size=16, lengths=LENGTHS).map(_without_masks)

    counts = np.zeros((3, N))
    for epoch, count in enumerate(counts):
        dataset = make(ss.Placement())
        dataset.set_epoch(epoch)
        for window in dataset:
            count[window["npy"][0] // 1000] += 1
    expected = weights / weights.mean()
    assert (counts >= np.floor(0.999 * expected) * windows).all()
    assert (counts <= np.ceil(1.001 * expected) * windows).all()
    assert np.abs(counts.sum(axis=1) - (expected * windows).sum()).max() < 1
    whole, _ = _global_rows(make, 1, 0)
    first, state = _global_rows(make, 4, 0, stop=2)
    rest, _ = _global_rows(make, 2, 0, state=state)
    assert first + rest == whole


class _Numbered(Samples):
    """Samples of 2 kB that cannot be read."""

    num_shards, fingerprint, total_bytes = 1, "0" * 16, 500_000 * 2_000

    def __len__(self) -> int:
        return self.total_bytes // 2_000

    def url_of(self, shard: int) -> str:
        return f"{shard}.tar"

    def find_shards(self, numbers: Numbers) -> Numbers:
        return np.zeros_like(numbers)

    def open_fetcher(self, upcoming: Any = None, options: Any = None) -> Fetcher:
        raise NotImplementedError


def test_blocks_of_rows_are_two_groups_unless_they_are_given() -> None:
    lengths = np.random.default_rng(0).lognormal(6.05, 1, 500_000).astype(int)
    for options, expected in ((None, range(245, 260)), (ss.OrderOptions(block=3), [3])):
        samples = CatalogDataset(_Numbered(), shuffle=True, order=options)
        rows = samples.pack_sequences((), 8192, lengths=lengths, keep="x")
        source = rows.pipeline.indexed_source
        assert source is not None
        order = source.order(batch=1, lanes=8, epoch=0)
        assert order.block in expected
        assert order.window >= 8 * order.block


@pytest.mark.parametrize("max_cost", [0, -1, float("nan")])
def test_maximum_of_a_batch_is_above_0(tokens: str, max_cost: float) -> None:
    with pytest.raises(OptionError, match="max_cost must be above 0"):
        opened(tokens).batch_by_cost(LENGTHS, max_cost)


def test_a_state_of_other_rows_is_refused(tokens: str) -> None:
    def loader(length: int) -> ss.ShardLoader:
        rows = opened(tokens).pack_sequences("npy", length, lengths=LENGTHS)
        return ss.ShardLoader(rows, batch_size=2)

    first = loader(64)
    next(iter(first))
    with pytest.raises(ss.ShardStreamError, match="fingerprint"):
        loader(65).load_state_dict(first.state_dict())


@pytest.mark.slow
def test_spawned_workers_read_the_same_rows(tokens: str) -> None:
    rows = opened(tokens, shuffle=True).pack_sequences("npy", 64, lengths=LENGTHS)
    expected = [batch["npy"] for batch in ss.ShardLoader(rows, batch_size=4)]
    loader = ss.ShardLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert all(torch.equal(batch["npy"], one) for batch, one in zip(loader, expected, strict=True))
