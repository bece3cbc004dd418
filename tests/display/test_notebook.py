"""Test what a notebook shows: complete, escaped, without scripts, under 100 kB."""

from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

import shardstream as ss
from tests.small_datasets import FEW_CORES, numbered, picture

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'
TAGS = {"div", "b", "i", "table", "tr", "td", "img", "span", "br"}


class Page(HTMLParser):
    """Text and pictures of a page; checks its tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.pictures = "", list[PIL.Image.Image]()
        assert len(page.encode()) < 100_000
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        for name, value in attrs:
            assert name in {"style", "src", "title"}
            if name == "src":
                head, _, data = str(value).partition(";base64,")
                assert head in {"data:image/png", "data:image/jpeg"}
                self.pictures.append(PIL.Image.open(io.BytesIO(base64.b64decode(data))))

    def handle_data(self, data: str) -> None:
        self.text += data


def write(folder: Path, count: int = 100) -> str:
    with ss.ShardWriter(folder, max_samples=40) as writer:
        for number in range(count):
            png = picture() if number else b"no picture"
            fields = {"png": png, "txt": EVIL, "cls": number, "npy": np.eye(3) * number}
            writer.write({"__key__": f"{number:03d}{EVIL.replace('/', '')}", **fields})
    return str(folder)


def page_of(value: Any) -> Page:
    return Page(value._repr_html_())


@pytest.mark.parametrize("steps", [False, True])
def test_dataset_shows_counts_and_samples_from_everywhere(tmp_path: Path, steps: bool) -> None:
    folder = write(tmp_path)
    dataset: Any = ss.ShardDataset(folder, shuffle=True)
    by_number: Any = ss.ShardDataset(folder).by_number()
    for one in (dataset, by_number):
        page = page_of(one.decode("rgb8") if steps else one)
        assert "samples100shards3" in page.text
        assert "cls, npy, png, txt" in page.text
        assert len(page.pictures) == 23  # and a broken one
        assert "UnidentifiedImageError" in page.text
        assert " at 0x" not in page.text
        assert EVIL[:8] in page.text  # as text
        assert ("Decode" in page.text) == steps
        assert "\n" not in repr(one)
    assert "samples10" in page_of(by_number[90:]).text
    part = page_of(ss.ShardDataset(folder, subset=[50, 7]))
    assert "samples2" in part.text
    assert len(part.pictures) == 2


def test_datasets_without_numbers_samples_or_store(tmp_path: Path) -> None:
    folder = Path(numbered(tmp_path / "data", 20, 10))
    streamed = ss.ShardDataset(str(folder), read=ss.ReadOptions(index="ignore"))
    assert "shardstream index" in page_of(streamed).text
    assert "samples0" in page_of(ss.ShardDataset(str(folder)).by_number()[:0]).text
    dataset = ss.ShardDataset(str(folder))
    for tar in folder.glob("*.tar"):
        tar.unlink()
    assert "NotFoundError" in page_of(dataset).text


def test_sample_shows_its_fields_and_stays_a_dict(tmp_path: Path) -> None:
    folder = write(tmp_path)
    raw, decoded = (
        ss.ShardDataset(folder).by_number(),
        ss.ShardDataset(folder).by_number().decode("rgb8"),
    )
    for sample in (raw[5], decoded[5]):
        page = page_of(sample)
        assert len(page.pictures) == 2
        assert EVIL in page.text
    assert "no picture" not in page_of(raw[0]).text
    assert raw[5] == dict(raw[5])
    assert repr(raw[5]) == repr(dict(raw[5]))
    numbers = decoded.to_tuple("cls")
    assert default_collate([numbers[1], numbers[2]])[0].tolist() == [1, 2]
    batch = next(iter(DataLoader(Subset(decoded, [3, 4]), batch_size=2)))
    assert batch["cls"].tolist() == [3, 4]
    assert ss.loader.collate([decoded[3], decoded[4]])["cls"].tolist() == [3, 4]


def test_batches_and_timings_are_shown(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(write(tmp_path), subset=range(1, 100)).decode("torchrgb")
    loader = ss.ShardLoader(dataset, 11, num_workers=1)
    batch = next(iter(loader))
    page = page_of(ss.show(batch))
    assert "batch of 11" in page.text
    assert "torch" not in page.text
    assert "float32 11x3x9x13" in page.text
    assert len(page.pictures) == 11
    for other in (tuple(batch.values()), [1, 2, 3], {"number": torch.zeros(2)}, {}, [], "text"):
        page_of(ss.show(other))
    assert "waiting for batches" in page_of(loader.stats()).text
    assert len(page_of(ss.show(ss.ShardDataset(str(tmp_path)).by_number()[3])).pictures) == 2
    assert repr(ss.show(batch)) == "<batch>"


def test_large_pictures_and_long_texts_stay_small(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    sample = {f"{number}.npy": noise for number in range(100)} | {"txt": "x" * 10**6}
    page = page_of(ss.show({"__key__": "a", **sample}))
    assert "too many pictures" in page.text
    assert "more fields" in page.text


class Hostile:
    """A value whose methods all raise."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class HostileMapping(dict[Any, Any]):
    """A batch that cannot be read."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def items(self) -> Any:
        raise RuntimeError("no items")


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def objects() -> Any:
    array = np.empty(2, object)
    array[0] = array[1] = Hostile()
    return array


def failing_column() -> Any:
    class Column:
        shape = (3,)

        def __getitem__(self, number: int) -> Any:
            raise HostileError

    return Column()


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most bytes that Python's objects took at the same time, inside of this block."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_names() -> dict[str, Any]:
    return {f"{number}-" + "'" * 20_000: np.zeros(2) for number in range(40)}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (long_names, "batch of 2"),
        (lambda: {"__key__": "a"} | long_names(), "and 1 more field"),
        (
            lambda: {f"column {n}": torch.zeros(30) for n in range(20_000)},
            "and 19,960 more columns",
        ),
        (lambda: tuple(torch.zeros(3) for _ in range(20_000)), "and 19,960 more columns"),
        (
            lambda: (
                {"__key__": "a", "x": "'" * 10**7} | {f"{n}.txt": "'" * 10**6 for n in range(60)}
            ),
            "more",
        ),
        (lambda: {"list": [{"x": '"' * 100} for _ in range(99)]}, "batch of 99"),
    ],
    ids=["names", "sample", "columns", "tuple", "texts", "items"],
)
def test_pages_of_large_values_are_made_in_little_memory(
    make: Callable[[], Any], text: str
) -> None:
    value = make()
    with traced() as peak:
        page = page_of(ss.show(value))
        assert peak() < 20_000_000
    assert text in page.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: [7] * 10**7,
        lambda: {"nested": [dict.fromkeys(range(3 * 10**6), 0)]},
        lambda: set(range(10**6)),
        lambda: np.zeros(10**8, np.uint8),
    ],
    ids=["list", "dict", "set", "line"],
)
def test_huge_values_are_written_only_as_far_as_shown(make: Callable[[], Any]) -> None:
    value = make()
    with traced() as peak:
        page = page_of(ss.show({"__key__": "a", "x": value}))
        assert peak() < 2_000_000
    assert len(page.text) < 1000


@pytest.mark.parametrize(
    ("value", "size", "pictures"),
    [
        (torch.rand(3, 4, requires_grad=True), "float32 3x4", 1),
        (torch.rand(3, 4).to(torch.bfloat16), "bfloat16 3x4", 1),
        (torch.eye(3).to_sparse(), "float32 3x3", 0),
        (torch.empty(3, 4, device="meta"), "float32 3x4", 0),
        (objects(), "object 2", 0),
        (Hostile(), "Hostile", 0),
        ([1, Hostile()], "list of 2", 0),
        (np.ndarray, "class ndarray", 0),
        (10**5000, "int", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_value_is_shown(value: Any, size: str, pictures: int) -> None:
    page = page_of(ss.show({"__key__": "a", "x": value, 7: value}))
    assert page.text.count(size) >= 2
    assert "RuntimeError" not in page.text
    assert len(page.pictures) == 2 * pictures
    for batch in ({"x": value, 1: value}, (value,), [value, value], value):
        page = page_of(ss.show(batch))
        assert "Error" not in page.text
    if isinstance(value, torch.Tensor) and pictures:
        assert len(page_of(ss.show({"x": value})).pictures) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: 2}, "batch of 0"),
        ([{1: 2}], "1: 2"),
        (ss.ShardDataset, "class ShardDataset"),
        (HostileMapping(a=1), "RuntimeError: no items"),
        (HostileMapping(__key__="a"), "RuntimeError: no items"),
        ({"x": failing_column()}, "HostileError"),
        ([HostileError()], "HostileError"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_show_never_raises(value: Any, text: str) -> None:
    page = page_of(ss.show(value))
    assert text in page.text


def test_dataset_with_many_long_fields_stays_small(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a"} | {f"{n:03d}{'x' * 5000}.txt": "a" for n in range(50)})
    for dataset in (ss.ShardDataset(str(tmp_path)), ss.ShardDataset(str(tmp_path)).by_number()):
        assert "samples1shards1" in page_of(dataset).text
