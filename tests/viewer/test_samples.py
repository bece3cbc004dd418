"""What the viewer shows is what the dataset yields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.packing import index
from shardstream.viewer import Choice, Session, ViewOptions
from tests.small_tars import flip, make_dataset, samples, tar_bytes
from tests.viewer import datasets


def session(*urls: str, **options: Any) -> Session:
    return Session(ViewOptions(urls=urls, storage_options={}, **options))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return datasets.pictures(tmp_path_factory.mktemp("shapes"), 120)


def test_each_sample_is_that_of_the_dataset(shapes: str) -> None:
    viewed, dataset = session(shapes), ss.ShardDataset(shapes).by_number()
    assert len(viewed.samples) == len(dataset)
    for number in (0, 49, 50, 77, 119):
        details, sample = viewed.details(number), dataset[number]
        assert details["key"] == sample["__key__"]
        assert details["shard"] == sample["__url__"]
        names = [one["name"] for one in details["fields"]]
        assert names == [name for name in sample if not name.startswith("__")]
        for place, one in enumerate(details["fields"]):
            found, name, size = viewed.part(number, place)
            assert viewed.samples.read_field(found, name) == sample[name]
            assert size == len(sample[name]) == one["size"]
            with open(details["shard"], "rb") as tar:
                tar.seek(one["offset"])
                assert tar.read(one["size"]) == sample[name]


@pytest.mark.parametrize("first", [0, 48, 100, 119, 10**12])
def test_a_page_has_the_samples_from_its_start(shapes: str, first: int) -> None:
    page = session(shapes).page(first, 50)
    expected = range(min(first, 100), min(min(first, 100) + 50, 120))
    assert [one["number"] for one in page["samples"]] == [*expected]
    assert [one["key"] for one in page["samples"]] == [f"shape-{n:06d}" for n in expected]
    assert page["total"] == 120


@pytest.mark.parametrize(
    "where", ["cls = 2", "light > 100 AND cls IN (1, 3)", "cls = 9", "__key__ = 'shape-000007'"]
)
def test_a_condition_chooses_the_samples_of_the_dataset(shapes: str, where: str) -> None:
    page = session(shapes).page(0, 200, Choice(where=where))
    try:
        expected = [
            sample["__key__"] for sample in ss.ShardDataset(shapes, where=where).by_number()
        ]
    except ss.errors.OptionError:  # it chooses no sample
        expected = []
    assert [one["key"] for one in page["samples"]] == expected


def test_an_invalid_condition_names_the_columns(shapes: str) -> None:
    with pytest.raises(ss.errors.OptionError, match="Columns: cls, width, light"):
        session(shapes).page(0, 50, Choice(where="klass = 1"))


@pytest.mark.parametrize("columns", [None, "__key__"])
def test_a_key_is_found_exactly_first(tmp_path: Path, columns: str | None) -> None:
    with ss.ShardWriter(str(tmp_path / "{shard:06d}.tar"), columns=columns, max_samples=4) as out:
        for key in ("ab1", "b1", "c", "xb", "b", "ab"):
            out.write({"__key__": key, "txt": b"x"})
    found = session(str(tmp_path)).page(0, 50, Choice(key="b"))["samples"]
    assert [one["key"] for one in found] == ["b", "ab1", "b1", "xb", "ab"]


def test_a_jump_shows_the_page_of_a_number(shapes: str) -> None:
    viewed = session(shapes)
    assert viewed.page(0, 50, at=77)["first"] == 50
    page = viewed.page(0, 10, Choice(where="cls = 1"), at=77)
    assert 77 in [one["number"] for one in page["samples"]]
    with pytest.raises(ss.errors.OptionError, match="numbered from 0 to 119"):
        viewed.page(0, 50, at=120)
    with pytest.raises(ss.errors.OptionError, match="sample 78 is not among the 30 of this filter"):
        viewed.page(0, 50, Choice(where="cls = 1"), at=78)


@pytest.mark.parametrize("descending", [False, True])
def test_samples_without_a_value_come_last_and_equal_ones_keep_their_order(
    tmp_path: Path, descending: bool
) -> None:
    values = [3, None, 1, 3, float("nan"), 2, None, 1]
    with ss.ShardWriter(
        str(tmp_path / "{shard:06d}.tar"), columns="n=json.n", max_samples=3
    ) as out:
        for number, value in enumerate(values):
            text = "NaN" if value != value else json.dumps(value)  # noqa: PLR0124
            out.write({"__key__": f"{number}", "json": f'{{"n": {text}}}'.encode()})
    viewed = session(str(tmp_path))
    found = viewed.page(0, 50, Choice(sort="n", descending=descending), at=6)["samples"]
    ascending = [2, 7, 5, 0, 3, 4, 1, 6]
    expected = [0, 3, 5, 2, 7, 4, 1, 6] if descending else ascending
    assert [one["number"] for one in found] == expected
    chosen = viewed.page(0, 50, Choice(where="n > 1", sort="n", descending=descending))["samples"]
    assert [one["number"] for one in chosen] == ([0, 3, 5] if descending else [5, 0, 3])
    with pytest.raises(ss.errors.OptionError, match=r"no column 'm'\. Columns: __key__, n"):
        viewed.page(0, 50, Choice(sort="m"))


def test_cards_name_class_caption_and_picture(shapes: str) -> None:
    card = session(shapes).page(0, 1)["samples"][0]
    assert card["class"] == {"number": 0, "name": "circle"}
    assert card["thumbnail"] == {"kind": "picture", "field": "jpg"}
    assert card["text"].startswith("a circle at ")


def test_details_have_boxes_masks_and_the_command(shapes: str) -> None:
    details = session(shapes).details(5)
    _, _, box = datasets.drawing(5)
    assert details["boxes"] == [{"box": box, "form": "xywh", "label": "square"}]
    assert details["masks"] == ["seg.png"]
    assert details["cat"] == f"shardstream cat {shapes} --number 5"


def test_exact_histograms_count_all_samples(shapes: str) -> None:
    found = session(shapes).histograms()
    assert found["exact"] and found["of"] == 120  # noqa: PT018
    by_name = {one["name"]: one for one in found["histograms"]}
    assert [bar["count"] for bar in by_name["cls"]["bars"]] == [30, 30, 30, 30]
    light = ss.catalog.read_columns(shapes)["light"].to_numpy()
    assert sum(bar["count"] for bar in by_name["light"]["bars"]) == len(light)
    viewed = session(shapes)
    for bar in by_name["light"]["bars"]:  # a click shows as many samples as the bar counts
        assert viewed.page(0, 200, Choice(where=bar["where"]))["total"] == bar["count"]


@pytest.mark.slow
def test_a_bar_counts_the_samples_of_its_condition(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "tenths": (np.arange(300) / 10).tolist(),
        "rounded": np.round(rng.normal(size=300), 1).tolist(),
        "tiny": (rng.normal(size=300) * 1e-7).tolist(),
        "large": (rng.normal(size=300) * 1e300).tolist(),
        "years": rng.integers(1990, 2100, 300).tolist(),
        "ids": rng.integers(-(2**62), 2**62, 300).tolist(),
    }
    names = ",".join(f"{name}=json.{name}" for name in columns)
    with ss.ShardWriter(str(tmp_path / "{shard:06d}.tar"), columns=names) as writer:
        for number in range(300):
            row = {name: values[number] for name, values in columns.items()}
            writer.write({"__key__": f"{number}", "json": json.dumps(row).encode()})
    viewed = session(str(tmp_path))
    found = {one["name"]: one["bars"] for one in viewed.histograms()["histograms"]}
    for bars in found.values():
        assert len(bars) <= 26
        assert sum(bar["count"] for bar in bars) == 300
        for bar in bars:
            assert viewed.page(0, 1, Choice(where=bar["where"]))["total"] == bar["count"], bar
    assert found["tenths"][1]["label"] == "2 to 4"
    assert found["years"][0]["label"] == "1,990 to 1,994"


def test_histograms_without_columns_say_of_how_many(tmp_path: Path) -> None:
    datasets.pictures(tmp_path, 250, columns=None)
    found = session(str(tmp_path)).histograms()
    assert (found["exact"], found["of"], found["total"]) == (False, 200, 250)
    assert {"cls", "json.width", "size in bytes"} <= {one["name"] for one in found["histograms"]}
    assert "--columns" in found["reason"]


def test_a_damaged_sample_has_the_message_of_the_dataset(tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    index(str(tmp_path), sha256=False)
    offset = int(np.fromfile(tmp_path / "train-000000.tar.idx", "<u8")[2])
    flip(tmp_path / "train-000000.tar", offset + 100)
    viewed, dataset = session(str(tmp_path)), ss.ShardDataset(str(tmp_path)).by_number()
    cards = viewed.page(0, 50)["samples"]
    assert ["error" in one for one in cards] == [False, False, True, False]
    with pytest.raises(ss.errors.ShardError) as caught:
        dataset[2]
    assert cards[2]["error"].partition(";")[0] == str(caught.value).partition(";")[0]
    assert viewed.details(2)["error"] == cards[2]["error"]


def test_fields_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    members = [("0.json", b"{1}"), ("1.cls", b"dog"), ("2.txt", b"\xff"), ("3.txt", b"ok")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    cards = session(str(tmp_path)).page(0, 9)["samples"]
    errors = [one.get("error", "") for one in cards]
    assert [bool(one) for one in errors] == [True, True, True, False]
    assert errors[1] == "cls: the class is not a number: 'dog'"


def test_large_samples_are_read_by_their_headers(tmp_path: Path) -> None:
    body = np.random.default_rng(0).bytes(3 << 20)
    members = [
        (f"{n}.{name}", data)
        for n in range(8)
        for name, data in (("bin", body), ("txt", b"t%d" % n))
    ]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    viewed = session(str(tmp_path))
    assert [one["text"] for one in viewed.page(0, 8)["samples"]] == [f"t{n}" for n in range(8)]
    found, name, _ = viewed.part(3, 0)
    assert viewed.samples.read_field(found, name) == body


def test_compressed_tars_show_their_first_samples(tmp_path: Path) -> None:
    import gzip  # noqa: PLC0415

    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_bytes(samples(0, 300))))
    viewed = session(str(tmp_path))
    assert len(viewed.samples) == 200
    assert "the first 200 samples" in viewed.dataset()["hint"]
    assert [one["key"] for one in viewed.page(100, 3)["samples"]] == ["0100", "0101", "0102"]
    with pytest.raises(ss.errors.OptionError, match="without an index"):
        viewed.epoch({})


def test_the_report_of_bad_samples_finds_its_samples(tmp_path: Path) -> None:
    folder, report = tmp_path / "data", tmp_path / "bad.jsonl"
    members = [(f"{n:04d}.json", b"{" if n % 3 == 1 else b"{}") for n in range(9)]
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_bytes(members))
    dataset = ss.ShardDataset(
        str(folder), subset=[8, 7, 4, 0], on_error=ss.SkipBudget(report=str(report))
    )
    assert len(list(ss.ShardLoader(dataset.decode(), 4))) == 1
    viewed = session(str(folder), bad=(str(report),))
    listed = viewed.bad()
    assert sorted(row["number"] for row in listed["rows"]) == [4, 7]  # not those of the subset
    cards = viewed.page(0, 9)["samples"]
    assert [bool(one["reported"]) for one in cards] == [n in (4, 7) for n in range(9)]


def test_another_file_is_no_report(tmp_path: Path, shapes: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": 1}))
    with pytest.raises(ss.errors.OptionError, match="line 1 is no entry of a report"):
        session(shapes, bad=(str(tmp_path / "x.jsonl"),))


def test_values_of_the_users_function_are_shown(shapes: str) -> None:
    viewed = session(shapes, decode=lambda sample: {"tiny": np.eye(4), "key": sample["__key__"]})
    decoded = viewed.details(3)["decoded"]
    assert [(one["name"], one["is_picture"]) for one in decoded] == [("tiny", True), ("key", False)]
    assert decoded[1]["text"] == "shape-000003"
    card = viewed.card_picture(3, 64)
    assert not isinstance(card, str)
    assert card.media_type == "image/png"
    assert session(shapes, decode=lambda _: {"size": 5}).card_picture(3, 64) == "size: 5"


@pytest.mark.parametrize("number", range(8))
def test_each_kind_of_field_has_details_and_a_picture_or_text(tmp_path: Path, number: int) -> None:
    viewed = session(datasets.kinds(tmp_path))
    card = viewed.page(0, 50)["samples"][number]
    assert "error" not in card
    details = viewed.details(number)
    assert not [one for one in details["fields"] if "error" in one]
    if card["thumbnail"]["field"] is None:
        assert card["text"]
        return
    picture = viewed.card_picture(number, 128)
    assert not isinstance(picture, str)
    assert picture.media_type in ("image/png", "image/jpeg")
    assert picture.data[:4] in (b"\x89PNG", b"\xff\xd8\xff\xe0")


def test_an_overwritten_shard_is_an_error_and_not_an_old_sample(tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    index(str(tmp_path))
    viewed = session(str(tmp_path))
    viewed.page(0, 4)
    path = tmp_path / "train-000000.tar"
    path.write_bytes(path.read_bytes().replace(b"0001.cls", b"0009.cls"))
    with pytest.raises(ss.errors.ChangedError):
        viewed.page(0, 4)
