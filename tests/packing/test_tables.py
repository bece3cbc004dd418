"""Tables: tensors, order, and what is read and held of them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import shardstream as ss
from shardstream.errors import OptionError, SourceError
from shardstream.format import limit_of_rows
from shardstream.packing import RecordEncoder
from shardstream.tasks import LocalExecutor
from tests.limits import set_limits
from tests.pairs import with_slow_rest
from tests.raw_server import Request, raw_server, response
from tests.static_server import serve_files

NUMBERS = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
FLAT = [one.ravel().tolist() for one in NUMBERS]


def ray_column(name: str, metadata: str, column: pa.Array) -> pa.Table:
    """Return a table as Ray writes it, and as it is read where Ray is not imported."""
    extension = {"ARROW:extension:name": f"ray.data.{name}", "ARROW:extension:metadata": metadata}
    return pa.table([column], pa.schema([pa.field("x", column.type, metadata=extension)]))


TENSORS = {
    "fixed": pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(NUMBERS)}),
    "ray": ray_column("arrow_tensor_v2", "[2, 3]", pa.array(FLAT, pa.large_list(pa.float32()))),
    "ray, of variable shape": ray_column(
        "arrow_variable_shaped_tensor",
        "2",
        pa.array(
            [{"data": flat, "shape": [2, 3]} for flat in FLAT],
            pa.struct({"data": pa.list_(pa.float32()), "shape": pa.list_(pa.int64())}),
        ),
    ),
    "nested lists": pa.table({"x": pa.array(NUMBERS.tolist(), pa.list_(pa.list_(pa.float32())))}),
}


@pytest.mark.parametrize("table", TENSORS.values(), ids=TENSORS)
def test_tensors_of_a_parquet_column_keep_their_shape(table: pa.Table, tmp_path: Path) -> None:
    table = table.append_column("key", pa.array(["a", "b"]))
    url = str(tmp_path / "t.parquet")
    parquet.write_table(table, url)
    fields = {"npy": "x", "json": "x"}
    ss.pack(url, tmp_path / "packed", fields=fields)
    ss.pack(url, tmp_path / "plain")
    with ss.ShardWriter(tmp_path / "keys") as writer:
        for key in "ab":
            writer.write({"__key__": key, "cls": 1})
    ss.reshard(ss.join(tmp_path / "keys", {url: fields}, by="key"), tmp_path / "added")
    for name in ("packed", "added"):
        for sample, numbers in zip(
            ss.ShardDataset(str(tmp_path / name), shuffle=False).decode(), NUMBERS, strict=True
        ):
            assert sample["npy"].dtype == np.float32
            assert np.array_equal(sample["npy"], numbers)
            assert sample["json"] == numbers.tolist()
    rows = [
        sample["json"]["x"]
        for sample in ss.ShardDataset(str(tmp_path / "plain"), shuffle=False).decode()
    ]
    assert rows == NUMBERS.tolist()


def test_missing_tensor_is_an_error_of_its_row(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    storage = pa.array([FLAT[0], None], pa.list_(pa.float32(), 6))
    column = pa.ExtensionArray.from_storage(kind, storage)
    parquet.write_table(pa.table({"x": column}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"column 'x' is empty.*row 2"):
        ss.pack(tmp_path / "t.parquet", tmp_path / "out", fields={"npy": "x"})


def test_tensors_in_lists_are_refused(tmp_path: Path) -> None:
    tensors = TENSORS["fixed"].column("x").combine_chunks()
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), tensors)
    parquet.write_table(pa.table({"x": lists}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"'x' holds tensors in list<.*shapes would be lost"):
        ss.pack(tmp_path / "t.parquet", tmp_path / "out", fields={"json": "x"})


PACK = """
import sys
import shardstream as ss

def peak_mb():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1000

url, dest, shuffle = sys.argv[1:]
ss.pack(url + ".small.parquet", dest + "/small", fields={"bin": "x"}, shuffle=bool(shuffle))
before = peak_mb()
assert ss.pack(url, dest + "/large", fields={"bin": "x"}, shuffle=bool(shuffle)).samples == 800
print(peak_mb() - before)
"""


@pytest.mark.parametrize("shuffle", with_slow_rest([""], ["", "shuffled"]))
def test_packing_parquet_holds_a_part_of_it(shuffle: str, tmp_path: Path) -> None:
    url = str(tmp_path / "t.parquet")
    random = np.random.default_rng(0)
    rows = pa.table({"x": [random.bytes(100_000) for _ in range(800)]})
    parquet.write_table(rows, url, row_group_size=80, use_dictionary=False)
    parquet.write_table(rows[:10], url + ".small.parquet")
    done = subprocess.run(
        [sys.executable, "-c", PACK, url, str(tmp_path / "out"), shuffle],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 120  # 65; 240 if the file of 80 MB is held


def test_small_parquet_that_grows_without_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "t.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["a" * 100_000])
    parquet.write_table(pa.table({"x": texts}), url, compression="zstd", store_schema=False)
    assert url.stat().st_size < 10_000
    set_limits(monkeypatch, limit_of_rows, PARQUET_BASE_BYTES=1 << 20)
    with pytest.raises(SourceError, match=r"its rows hold \d+ MiB or more, the limit .* is 1 MiB"):
        ss.pack(url, tmp_path / "out", fields={"txt": "x"}, on_error="skip")
    assert not (tmp_path / "out/index.json").exists()
    # These are seen in the metadata.
    numbers = pa.table({"x": pa.array([[0] * 1000] * 1000, pa.list_(pa.int64()))})
    parquet.write_table(numbers, url)
    with pytest.raises(SourceError, match=r"its rows hold 7 MiB or more"):
        ss.pack(url, tmp_path / "out", fields={"npy": "x"})
    pages = pa.table({"x": ["a" * 100_000] * 100})
    parquet.write_table(pages, url, compression="zstd", use_dictionary=False)
    with pytest.raises(SourceError, match=r"its rows hold 9 MiB or more"):
        ss.pack(url, tmp_path / "out", fields={"txt": "x"})


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_shuffled_table_has_the_order_of_its_seed(name: str, tmp_path: Path) -> None:
    table = pa.table({"n": list(range(8)), "file": [f"{number % 7}.txt" for number in range(8)]})
    if name == "t.csv":
        lines = [f"{row['n']},{row['file']}\n" for row in table.to_pylist()]
        (tmp_path / name).write_text("n,file\n" + "".join(lines))
    else:
        parquet.write_table(table, tmp_path / name, row_group_size=3)
    for number in range(6):  # that of row 7 is missing
        (tmp_path / f"{number}.txt").write_text(str(number))
    packed = ss.pack(
        tmp_path / name,
        tmp_path / "out",
        fields={"cls": "n", "bin": "file"},
        shuffle=True,
        seed=1,
        on_error="skip",
    )
    samples = [*ss.ShardDataset(str(tmp_path / "out"), shuffle=False).decode()]
    assert [sample["cls"] for sample in samples] == [2, 1, 7, 5, 4, 0, 3]
    assert [sample["bin"] for sample in samples] == [b"%d" % n for n in (2, 1, 0, 5, 4, 0, 3)]
    (skipped,) = packed.skipped
    assert "row 7" in skipped.where


def test_rows_that_cannot_be_encoded_are_skipped_when_shuffled(tmp_path: Path) -> None:
    rows = [{"x": [1, 2]}, {"x": [[1], [2, 3]]}, {"x": None}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reasons = [
        [skip.reason for skip in sorted(ss.pack(tmp_path / "t.jsonl", tmp_path / f"{shuffle}", fields={"npy": "x"}, shuffle=shuffle, on_error="skip").skipped)]
        for shuffle in (True, False)
    ]  # fmt: skip
    assert reasons[0] == reasons[1]
    assert len(reasons[0]) == 2


SPLIT = {"train": 0.5, "val": 0.25, "test": 0.25}


def table_text(name: str, rows: int) -> str:
    if name.endswith(".csv"):
        return "txt\n" + "".join(f"caption {number}\n" for number in range(rows))
    return "".join(f'{{"txt": "caption {number}"}}\n' for number in range(rows))


@pytest.mark.parametrize(
    ("name", "split", "key", "executor"),
    with_slow_rest(
        [  # each pair of options
            ("t.csv", None, None, LocalExecutor()),
            ("t.csv", SPLIT, "txt", None),
            ("t.jsonl", None, "txt", None),
            ("t.jsonl", SPLIT, None, LocalExecutor()),
            ("t.jsonl", SPLIT, "txt", LocalExecutor()),
            ("t.parquet", None, "txt", LocalExecutor()),
            ("t.parquet", SPLIT, None, None),
        ],
        ["t.csv", "t.jsonl", "t.parquet"],
        [None, SPLIT],
        [None, "txt"],
        [None, LocalExecutor()],
    ),
)
def test_parts_of_a_table_read_it_a_few_times_in_all(
    name: str, split: Any, key: str | None, executor: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    if name == "t.parquet":
        rows = pa.table({"txt": [f"caption {number}" for number in range(400)]})
        parquet.write_table(rows, tmp_path / "in" / name, row_group_size=50)
    else:
        (tmp_path / "in" / name).write_text(table_text(name, 400))
    with serve_files(tmp_path / "in") as served:
        packed = ss.pack(
            f"{served.url}/{name}",
            tmp_path / "out",
            fields={"txt": "txt"},
            key=key,
            split=split,
            max_samples=10,
            executor=executor,
        )
        reads = [asked for method, _, asked in served.requests if method == "GET"]
    assert packed.shards == 40
    # Here: once to count the rows, if there are splits, and once for all splits together; Parquet by row groups.
    most_here = {"t.csv": 3, "t.jsonl": 5, "t.parquet": 10}[name]
    assert len(reads) <= (30 if executor else most_here)
    texts = [
        sample["txt"]
        for one in packed.splits
        for sample in ss.ShardDataset(one.url, shuffle=False).decode()
    ]
    assert sorted(texts) == sorted(f"caption {number}" for number in range(400))
    if split is None:
        assert texts == [f"caption {number}" for number in range(400)]


def png() -> bytes:
    out = io.BytesIO()
    Image.new("L", (2, 2)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder.png", "a folder is there, not a file"),
        ("x" * 300 + ".png", "no file can have this name"),
        ("x/" * 3000 + "y.png", "no file can have this name"),
        ("a\0b.png", "no file can have this name"),
        ("1.png/2.png", "no file can have this name"),
        ("loop.png", "the link leads back to itself"),
        ("fifo.png", "a FIFO, a socket or a device"),
    ],
)
@pytest.mark.parametrize("executor", [None, LocalExecutor()], ids=["", "executor"])
def test_row_whose_file_cannot_be_one_is_skipped_alone(
    name: str, reason: str, executor: Any, tmp_path: Path
) -> None:
    (tmp_path / "1.png").write_bytes(png())
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "fifo.png")
    rows = [{"p": one} for one in ("1.png", name, "1.png")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"fields": {"png": "p"}, "executor": executor}
    with pytest.raises(SourceError, match=rf"{reason}.*row 2"):
        ss.pack(tmp_path / "t.jsonl", tmp_path / "out", **options)
    # The same command goes on where it was stopped.
    packed = ss.pack(tmp_path / "t.jsonl", tmp_path / "out", on_error="skip", **options)
    assert packed.samples == 2
    (skipped,) = packed.skipped
    assert reason in skipped.reason


def pack_links(folder: Path, links: Sequence[str], **options: float) -> ss.packing.PackReport:
    """Pack a table of links to pictures, without those that fail."""
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"p": link}) for link in links))
    (folder / "1.png").write_bytes(png())
    return ss.pack(
        folder / "t.jsonl",
        folder / "out",
        fields={"png": "p"},
        on_error="skip",
        storage_options={"retry_timeout_s": 0.3, **options},
    )


def test_links_that_fail_are_skipped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their server answers, or if there is none."""
    set_limits(monkeypatch, RecordEncoder, REMOTE_FILE_LIMIT_BYTES=100_000)
    reasons = {
        "200": "over 100,000 bytes",
        "302": "redirects in a circle",
        "400": "rejects this request",
        "401": "access refused",
        "403": "access refused",
        "404": "not found",
        "410": "not found",
        "429": "throttles",
        "500": "the server failed",
    }

    def answer(request: Request) -> bytes:
        status = int(request.target.strip("/"))
        return response(status, bytes(100_001 * (status == 200)), Location=request.target)

    with raw_server(answer) as server:
        links = [f"{server.url}/{status}" for status in reasons]
        links += ["http://127.0.0.1:9/a.png", "http://no-such-host.invalid/a.png"]
        packed = pack_links(tmp_path, ["1.png", *links, "1.png"])
    assert packed.samples == 2
    wanted = [*reasons.values(), *["check the URL and the network"] * 2]
    for reason, skipped in zip(wanted, packed.skipped, strict=True):
        assert reason in skipped.reason


def test_host_that_never_answers_is_asked_once(tmp_path: Path) -> None:
    ended = threading.Event()

    def answer(_: Request) -> Iterator[bytes]:
        ended.wait(60)
        yield b""

    with raw_server(answer) as server:
        links = [f"{server.url}/{number}.png" for number in range(100)]
        packed = pack_links(tmp_path, [*links, "1.png"], read_timeout_s=0.3)
        ended.set()
    assert (packed.samples, len(packed.skipped)) == (1, 100)
    assert len(server.requests) <= 3 * 16  # of the rows that are read at the same time
    assert "did not answer a moment ago" in packed.skipped[-1].reason


def test_long_cell_of_a_csv_is_read(tmp_path: Path) -> None:
    text = "long, " * 100_000
    (tmp_path / "t.csv").write_text(f'txt,cls\nshort,0\n"{text}",1\n')
    ss.pack(tmp_path / "t.csv", tmp_path / "out", fields={"txt": "txt", "cls": "cls"})
    found = [s["txt"] for s in ss.ShardDataset(str(tmp_path / "out"), shuffle=False).decode()]
    assert found == ["short", text]


ROWS = [["img/1.jpg", "a, cat", "0"], ["img/2.jpg", "a dog", "1"]]


def test_a_column_of_keys_is_named_by_key_not_by_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,caption\nx,one\n")
    pack: Any = lambda **options: ss.pack(str(tmp_path / "a.csv"), tmp_path / "out", **options)
    with pytest.raises(OptionError, match=r"key='\{id\}' \(--key '\{id\}'\)"):
        pack(fields={"__key__": "id", "txt": "caption"})
    pack(fields={"txt": "caption"}, key="{id}")
    assert [sample["__key__"] for sample in ss.ShardDataset(tmp_path / "out")] == ["x"]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("executor", [None, LocalExecutor()], ids=["", "executor"])
def test_table_without_names_takes_those_that_are_given(
    separator: str, executor: Any, tmp_path: Path
) -> None:
    url = tmp_path / ("t.tsv" if separator == "\t" else "t.csv")
    cells = [[f'"{cell}"' for cell in row] for row in ROWS]
    url.write_text("".join(separator.join(row) + "\n" for row in cells))
    packed = ss.pack(
        url,
        tmp_path / "out",
        header=["path", "caption", "label"],
        fields={"txt": "caption", "cls": "label"},
        split={"train": 0.5, "val": 0.5},
        executor=executor,
    )
    assert packed.samples == 2
    samples = [s for one in packed.splits for s in ss.ShardDataset(one.url).decode()]
    assert sorted((s["txt"], s["cls"]) for s in samples) == [("a dog", 1), ("a, cat", 0)]


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        ("img/1.jpg,a cat", {}, r"may be a row, .*'img/1\.jpg'; name the columns with header="),
        ("0001,img/1.jpg", {}, r"may be a row, .*'img/1\.jpg'; name the columns with header="),
        ("https://h/1,a cat", {}, r"may be a row, .*'https://h/1'; name the columns"),
        ("1.jpg,a cat", {"fields": {"jpg": "path"}}, r"no column 'path'.*if its first line is a row"),
        ("1,1", {}, r"two columns are named '1'; .*if the first line is a row.*--header"),
        ("a,b", {"header": ["a", "a"]}, "two columns are named 'a'"),
        ("a,b", {"header": ["a"]}, r"2 cells, the header 1 \(line 1\)"),
    ],
)  # fmt: skip
def test_first_line_that_is_a_row_is_an_error(
    first: str, options: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(f"{first}\nimg/2.jpg,a dog\n")
    with pytest.raises(SourceError, match=message):
        ss.pack(tmp_path / "t.csv", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("first", "name"),
    [("1.jpg,a cat", "1.jpg"), ("0001,a cat", "0001"), ("0,1", ""), (",0", ""), ("a,b c", "")],
)
def test_first_line_that_may_be_a_row_is_named(
    first: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_text(f"{first}\n2.jpg,a dog\n")
    ss.pack(tmp_path / "t.csv", tmp_path / "out")
    assert (f"may be a row, not the names of the columns: {name!r}" in caplog.text) == bool(name)
    ss.pack(tmp_path / "t.csv", tmp_path / "out2", fields={"txt": first.rpartition(",")[2]})
    assert caplog.text.count("may be a row") == bool(name)


def test_names_are_given_to_csv_and_tsv_only(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1}')
    with pytest.raises(OptionError, match=r"header \(--header\) names the columns of CSV and TSV"):
        ss.pack(tmp_path / "t.jsonl", tmp_path / "out", header=["b"])


JOIN = """
import sys
import shardstream as ss

url, dest, table = sys.argv[1:]
try:
    ss.reshard(ss.join(url, {table: {"txt": "caption"}}, by="key"), dest)
except ss.errors.OptionError as error:
    print(error)
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(line.split()[1]) // 1000)
"""


def test_keys_of_a_joined_parquet_that_grow_without_limit_are_refused(tmp_path: Path) -> None:
    url = tmp_path / "t.parquet"
    kind = pa.dictionary(pa.int32(), pa.string())
    with parquet.ParquetWriter(
        url,
        pa.schema([("key", kind), ("caption", pa.string())]),
        compression="zstd",
        store_schema=False,
    ) as writer:
        for group in range(9):  # of which four are looked at before
            keys = pa.array([f"{group}-{n}" for n in range(20_000)]).dictionary_encode()
            if group == 4:
                zeros = pa.array(np.zeros(20_000, np.int32))
                keys = pa.DictionaryArray.from_arrays(zeros, ["a" * 100_000])
            captions = pa.array(["x"] * 20_000)
            writer.write_table(pa.table({"key": keys.cast(kind), "caption": captions}))
    with ss.ShardWriter(tmp_path / "keys") as shards:
        shards.write({"__key__": "0-1", "cls": 1})
    done = subprocess.run(
        [sys.executable, "-c", JOIN, str(tmp_path / "keys"), str(tmp_path / "out"), str(url)],
        capture_output=True,
        text=True,
        check=True,
    )
    message, peak_mb = done.stdout.splitlines()
    assert "the rows take 1907 MiB or more in memory" in message
    assert int(peak_mb) < 1000
