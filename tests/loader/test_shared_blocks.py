"""Large raw samples are read into memory shared with the main process: equal to those that are read without workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import ChangedError, OptionError
from shardstream.fetch import SharedBlocks, SharedBytes
from shardstream.loader import RingBuffer, open_rings
from shardstream.samples import FetchOptions
from shardstream.storage import ReceiveBuffer, Storage, locate_shards
from shardstream.testing import make_shards
from tests.limits import module_of, set_limits
from tests.servers import S3Server, ShapedS3, new_bucket, nginx_or_skip
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

SAMPLES, MANY = 90, 400
READERS = pytest.mark.parametrize(
    ("client", "context"), [("http", "fork"), ("http", "spawn"), ("s3fs", "fork")]
)


def samples(count: int = SAMPLES, most: int = 300_000) -> list[dict[str, Any]]:
    """Return samples of 10 to 300 kB, with fields around the limits of what is shared."""
    rng = np.random.default_rng(0)
    return [
        {
            "__key__": f"{number:04d}",
            "jpg": rng.bytes(int(rng.integers(10_000, most))),
            "bin": rng.bytes([0, 1, 4095, 4096, 4097][number % 5]),
            "cls": b"%d" % number,
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def proxy(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapedS3]:
    with nginx_or_skip(tmp_path_factory.mktemp("nginx"), s3) as started:
        yield started


@pytest.fixture(scope="module")
def remote(proxy: ShapedS3) -> Iterator[str]:
    with new_bucket(proxy.plain) as bucket:
        options = proxy.plain.storage_options
        make_shards(f"{bucket}/raw", samples=samples(), per_shard=25, storage_options=options)
        yield f"{bucket}/raw"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("raw"))
    make_shards(folder, samples=samples(MANY, 40_000), per_shard=100)
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each message of a worker: whether it has bytes in blocks."""
    really_unpack, found = RingBuffer.unpack, list[bool]()

    def unpack(ring: RingBuffer, message: Any, *arguments: Any) -> Any:
        first_block = module_of(RingBuffer).RING_BYTES
        found.append(any(message.start + start >= first_block for start, _ in message.places))
        return really_unpack(ring, message, *arguments)

    monkeypatch.setattr(RingBuffer, "unpack", unpack)
    return found


def epochs(
    url: str | list[str],
    num_workers: int,
    *,
    count: int = 2,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> list[list[dict[str, Any]]]:
    """Read epochs with one loader; return the batches of each."""
    chosen: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True} | (
        loading or {}
    )
    dataset = ss.ShardDataset(url, **options)
    loader = ss.ShardLoader(dataset, 8, num_workers=num_workers, **(chosen if num_workers else {}))
    found = [list(loader) for _ in range(count)]
    for batch in (batch for batches in found for batch in batches):
        for name in batch.keys() - {"__key__", "__url__"}:
            assert {type(value) for value in batch[name]} <= {bytes}
    return found


def as_rows(epochs_found: list[list[dict[str, Any]]]) -> list[list[tuple[Any, ...]]]:
    """Return the samples of each epoch without their batches, in order of their keys."""
    return [
        sorted(row for batch in batches for row in zip(*batch.values(), strict=True))
        for batches in epochs_found
    ]


ORDERS = [
    {},
    {"shuffle": True},
    {"shuffle": True, "window": 32, "block": 2, "prefetch_bytes": 1},
    {"verify": "sha256", "shuffle": True},
    {"subset": range(0, SAMPLES, 3)},
    {"fields": ["jpg", "cls"], "shuffle": True},
]


@pytest.mark.parametrize("options", ORDERS, ids=str)
@pytest.mark.parametrize("is_local", [True, False])
def test_batches_equal_those_of_one_process(
    options: dict[str, Any],
    is_local: bool,
    local: str,
    remote: str,
    proxy: ShapedS3,
    sent: list[bool],
) -> None:
    url = local if is_local else remote
    if not is_local:
        options = options | {"storage_options": proxy.plain.storage_options}
    alone, shared = epochs(url, 0, **options), epochs(url, 1, **options)
    assert [[list(batch) for batch in batches] for batches in shared] == [
        [list(batch) for batch in batches] for batches in alone
    ]
    assert shared == alone
    assert any(sent) == (not is_local or "subset" not in options)  # few are read one by one
    together = epochs(url, 2, **options)
    assert as_rows(together) == as_rows(alone)


@READERS
def test_every_client_fills_blocks(
    client: str, context: str, remote: str, proxy: ShapedS3, sent: list[bool]
) -> None:
    options: dict[str, Any] = {
        "storage_options": proxy.plain.storage_options | {"s3_client": client}
    }
    found = epochs(remote, 2, shuffle=True, loading={"multiprocessing_context": context}, **options)
    assert sent
    assert all(sent)
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for rows in as_rows(found):
        assert [(key, jpg, data, number) for key, _, jpg, data, number in rows] == expected


def test_cached_shards_fill_blocks(
    remote: str, proxy: ShapedS3, tmp_path: Path, sent: list[bool]
) -> None:
    options: dict[str, Any] = {
        "storage_options": proxy.plain.storage_options,
        "cache_dir": tmp_path / "cache",
    }
    found = epochs(remote, 1, shuffle=True, **options)
    assert all(sent)
    assert as_rows(found)[0] == as_rows(found)[1] == as_rows(epochs(remote, 0, **options))[0]


def test_local_and_remote_shards_together(local: str, remote: str, proxy: ShapedS3) -> None:
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options}
    [alone], [shared] = (as_rows(epochs([local, remote], n, count=1, **options)) for n in (0, 2))
    assert shared == alone
    assert len(shared) == SAMPLES + MANY


FAULTS = ("slow", "reset", "trunc", "stall", "short", "flip")


@pytest.mark.parametrize(
    "faults", [{"reset": 0.3, "trunc": 0.2}, {"stall": 0.1, "stall_s": 0.5}, {"slow": 0.3}], ids=str
)
def test_faults_of_the_server_leave_no_foreign_bytes(
    faults: dict[str, float], remote: str, proxy: ShapedS3, sent: list[bool]
) -> None:
    knobs = dict.fromkeys(FAULTS, 0.0) | {"seed": 3} | faults
    proxy.control("/set?profile=chaos&" + "&".join(f"{k}={v}" for k, v in knobs.items()))
    proxy.control("/clear")
    options = proxy.chaos.storage_options | {"s3_client": "http", "read_timeout_s": 3}
    try:
        found = epochs(
            remote, 2, shuffle=True, block=2, window=16, hedge=True, storage_options=options
        )
        faulty = json.loads(proxy.control("/stats"))["chaos"]
    finally:
        proxy.control("/clear")
    assert all(faulty[name] for name in faults if name in FAULTS), faulty
    assert any(sent)
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for rows in as_rows(found):
        assert [(key, jpg, data, number) for key, _, jpg, data, number in rows] == expected


@pytest.mark.parametrize("blocks_bytes", [0, 100_000, 2_000_000])
def test_too_little_memory_for_all_blocks(
    blocks_bytes: int, local: str, remote: str, proxy: ShapedS3, sent: list[bool]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, RingBuffer, BLOCKS_BYTES=blocks_bytes)
        for url, options in ((local, {}), (remote, proxy.plain.storage_options)):
            reads: dict[str, Any] = {"shuffle": True, "storage_options": options}
            found = epochs(url, 2, **reads)
            assert any(sent) == bool(blocks_bytes)
            assert as_rows(found) == as_rows(epochs(url, 0, **reads))
            sent.clear()


def kinds(items: list[dict[str, Any]]) -> list[str]:
    return sorted({type(value).__name__ for item in items for value in item.values()})


def kinds_of_sample(sample: dict[str, Any]) -> str:
    return " ".join(kinds([sample]))


def test_steps_and_collate_functions_get_bytes(
    local: str, remote: str, proxy: ShapedS3, sent: list[bool]
) -> None:
    dataset = ss.ShardDataset([local, remote], storage_options=proxy.plain.storage_options)
    loading: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    for changed, collate_fn in ((dataset, kinds), (dataset.map(kinds_of_sample), None)):
        chosen: dict[str, Any] = {} if collate_fn is None else {"collate_fn": collate_fn}
        batches = list(ss.ShardLoader(changed, 8, **loading, **chosen))
        names = {name for batch in batches for one in batch for name in one.split()}
        assert names == {"bytes", "str"}
    assert not any(sent)


def test_bad_samples_are_skipped_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    make_shards(folder, samples=samples(MANY, 40_000), per_shard=100)
    tar = folder / "000001.tar"
    data = bytearray(tar.read_bytes())
    data[data.index(b"0130.jpg") + 150] ^= 1  # its checksum
    tar.write_bytes(data)
    for url in (str(folder), f"file://{folder}"):
        alone, shared = (
            as_rows(epochs(url, workers, on_error="skip", shuffle=True)) for workers in (0, 1)
        )
        assert shared == alone
        assert {len(rows) for rows in shared} == {MANY - 1}
        refilled = epochs(url, 1, on_error=ss.SkipBudget(refill=True), shuffle=True)
        assert [len(row) for row in as_rows(refilled)] == [MANY, MANY]


def test_many_small_samples_between_large_ones(proxy: ShapedS3) -> None:
    sizes = [*[100] * 3000, *[1_000_000] * 60]
    many = [
        {"__key__": f"{number:05d}", "bin": bytes([number % 251]) * size}
        for number, size in enumerate(sizes)
    ]
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options}
    with new_bucket(proxy.plain) as bucket:
        make_shards(f"{bucket}/mixed", samples=many, per_shard=len(many), **options)
        [rows] = as_rows(epochs(f"{bucket}/mixed", 1, count=1, **options))
    assert [row[::2] for row in rows] == [(one["__key__"], one["bin"]) for one in many]


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("taken", [1, 20])
def test_an_iteration_whose_workers_serve_another_is_an_error(
    taken: int, is_local: bool, local: str, remote: str, proxy: ShapedS3
) -> None:
    options: dict[str, Any] = {}
    if not is_local:
        options = {"storage_options": proxy.plain.storage_options}
    dataset = ss.ShardDataset(local if is_local else remote, **options)
    loader = ss.ShardLoader(dataset, 4, num_workers=2, persistent_workers=True)
    first = iter(loader)
    for _ in range(taken):
        next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(OptionError, match="another iteration of this loader has taken over"):
        next(first)
    rest = sum(len(batch["__key__"]) for batch in second)
    assert rest == (MANY if is_local else SAMPLES) - 4  # its workers were not ended


class ShortCatalog(ShardCatalog):
    """Returns fewer bytes than asked for, as no store should."""

    def fetch_into(self, buffer: ReceiveBuffer, *place: Any) -> None:
        buffer.fill(self.fetch(*place)[:-700])


def test_bytes_that_did_not_arrive_are_not_those_of_an_earlier_sample() -> None:
    url, [ring] = f"memory://{time.time_ns()}", open_rings(1)
    make_shards(url, samples=samples(10), per_shard=10)
    storage = Storage()
    catalog = ShortCatalog(locate_shards(url, storage), storage)
    numbers = np.arange(10)
    fetcher = catalog.open_fetcher(
        [numbers], FetchOptions(prefetch_bytes=64 << 20, blocks=ring.blocks)
    )
    with closing(fetcher):
        [*found] = fetcher.samples(numbers)
    assert {type(one) for one in found} == {ChangedError}
    assert all("shorter than its index says" in str(one) for one in found)


def test_an_epoch_that_was_left_early_leaves_no_bytes_to_the_next(
    remote: str, proxy: ShapedS3
) -> None:
    options: dict[str, Any] = {"storage_options": proxy.plain.storage_options, "shuffle": True}
    loader = ss.ShardLoader(
        ss.ShardDataset(remote, **options), 8, num_workers=2, persistent_workers=True
    )
    expected = sorted((s["__key__"], s["jpg"], s["bin"], s["cls"]) for s in samples())
    for taken in (1, 3, 7):
        for number, _ in enumerate(loader):
            if number == taken:
                break
        [rows] = as_rows([list(loader)])
        assert [(key, *fields) for key, _, *fields in rows] == expected


# --- the memory itself


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["hold", "drop", "send", "unpack"]), st.integers(0, 40_000)),
        max_size=60,
    ),
    blocks_bytes=st.sampled_from([0, 30_000, 400_000]),
)
def test_bytes_stay_as_they_are_until_they_are_unpacked(
    steps: list[tuple[str, int]], blocks_bytes: int
) -> None:
    rng = random.Random(len(steps))
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, RingBuffer, BLOCKS_BYTES=blocks_bytes)
        set_limits(patch, SharedBlocks, UNUSED_BYTES=blocks_bytes // 4)
        [ring] = open_rings(1)
        held: deque[tuple[bytes, Any]] = deque()
        on_way: deque[tuple[bytes, Any]] = deque()
        for step, size in steps:
            if step == "hold":
                data = rng.randbytes(size)
                held.append((data, ring.blocks.hold(memoryview(data))))
            elif step == "drop" and held:
                held.popleft()
            elif step == "send" and held:
                data, value = held.popleft()
                on_way.append((data, ring.pack({"jpg": [value], "n": 1})))
                del value
            elif step == "unpack" and on_way:
                data, message = on_way.popleft()
                assert ring.unpack(message) == {"jpg": [data], "n": 1}
        assert [bytes(value) for _, value in held] == [data for data, _ in held]
        for data, message in on_way:
            assert ring.unpack(message) == {"jpg": [data], "n": 1}


def resident_bytes(ring: RingBuffer) -> int:
    return os.fstat(ring._handle).st_blocks * 512


def test_memory_of_unused_blocks_is_used_again_or_returned() -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, RingBuffer, BLOCKS_BYTES=64 << 20)
        [ring] = open_rings(1)
    set_bytes, rng = module_of(SharedBlocks).UNUSED_BYTES, random.Random(0)
    for smallest in (5000, 50_000, 500_000, 20_000):
        held: deque[Any] = deque()
        for _ in range(20_000_000 // smallest):
            data = rng.randbytes(rng.randint(smallest, 2 * smallest))
            held.append((data, ring.blocks.hold(memoryview(data))))
            while sum(len(one) for one, _ in held) > 10_000_000:
                wanted, value = held.popleft()
                assert bytes(value) == wanted
        assert resident_bytes(ring) < 10_000_000 * 1.5 + set_bytes
        value = None
        held.clear()
    assert resident_bytes(ring) < 1.1 * set_bytes
    ring.reset(give_back=True)
    assert type(ring.blocks.hold(memoryview(bytes(60_000)))) is SharedBytes


def test_a_forked_child_returns_no_memory() -> None:
    [ring] = open_rings(1)
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, SharedBlocks, UNUSED_BYTES=0)
        held = [ring.blocks.hold(memoryview(b"x" * 100_000))]
        child = multiprocessing.get_context("fork").Process(target=held.clear)
        child.start()
        child.join()
    assert child.exitcode == 0
    assert bytes(held[0]) == b"x" * 100_000


def test_a_sample_larger_than_all_blocks_is_kept_otherwise() -> None:
    released: list[tuple[int, int]] = []
    memory = memoryview(bytearray(1 << 20))
    blocks = SharedBlocks(memory, 0, lambda start, size: released.append((start, size)))
    assert blocks.take([1 << 40]) is None
    assert blocks.take([1 << 30]) is None
    assert blocks.take([600_000, 600_000]) is None
    assert blocks.take([600_000]) is not None  # the one above was given back
    assert not released


def test_limited_address_space_leaves_rings_without_blocks() -> None:
    program = """
        import resource
        from shardstream.loader import open_rings
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (700 << 20), -1))
        [one, other] = open_rings(2)
        message = one.pack([b"x" * 100_000, one.blocks.hold(memoryview(bytes(100_000)))])
        assert one.unpack(message) == [b"x" * 100_000, bytes(100_000)]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    received=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=20),
)
def test_a_buffer_of_pieces_is_filled_in_order(
    sizes: list[int], received: list[tuple[int, bool]]
) -> None:
    total = sum(sizes)
    data = bytes(range(1, total + 1))
    memory = [bytearray(size) for size in sizes]
    buffer, got = ReceiveBuffer(memoryview(one) for one in memory), 0
    for most, copies in received:
        size = min(most, total - got)
        if copies:
            buffer.fill(data[got : got + size])
        else:
            pieces = buffer.next_pieces(size)
            assert sum(map(len, pieces)) == size
            first = got
            for piece in pieces:
                piece[:] = data[first : first + len(piece)]
                first += len(piece)
            buffer.advance(size)
        got += size
    assert b"".join(memory) == data[:got] + bytes(total - got)
    assert buffer.is_full == (got == total)
