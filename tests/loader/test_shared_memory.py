"""Batches pass from workers to the main process through shared memory unchanged."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import operator
import os
import pickle
import random
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.loader import (
    MAX_TENSOR_BYTES,
    RingBuffer,
    RingMessage,
)
from tests.limits import module_of, set_limits

_LEAST = 4096  # bytes of a field that is not pickled

batches = st.recursive(
    st.one_of(
        st.binary(max_size=20),
        st.integers(),
        st.text(max_size=5),
        st.none(),
        st.builds(
            lambda size, fill: bytes([fill]) * size,
            st.integers(_LEAST - 2, 3 * _LEAST),
            st.integers(0, 255),
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@given(st.lists(st.tuples(batches, st.integers(0, 3)), max_size=12))
def test_packed_messages_are_unpacked_in_order(sent: list[tuple[Any, int]]) -> None:
    ring = RingBuffer()
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, RingBuffer, RING_BYTES=8 * _LEAST)  # full after a few messages
        on_way: deque[tuple[Any, Any]] = deque()
        for batch, received in sent:
            on_way.append((batch, ring.pack(batch)))
            for _ in range(min(received, len(on_way))):
                came, packed = on_way.popleft()
                assert ring.unpack(packed) == came
        for came, packed in on_way:
            assert ring.unpack(packed) == came


def test_full_ring_falls_back_to_the_pipe_until_space_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = RingBuffer()
    set_limits(monkeypatch, RingBuffer, RING_BYTES=2 * _LEAST + 220)  # and the pickled part
    set_limits(monkeypatch, RingBuffer, RING_STEP_BYTES=1)
    batch = {"jpg": [b"x" * _LEAST]}
    first, second, third = (ring.pack(batch) for _ in range(3))
    assert third.pieces is not None
    for message in (third, first, second):
        assert (message.pieces is None) == (message is not third)
        assert ring.unpack(message) == batch
    half, rest = [b"y" * (_LEAST + _LEAST // 2)], [b"z" * _LEAST]
    packed = ring.pack(half)
    assert packed.pieces is None
    assert ring.pack(rest).pieces is not None
    assert ring.unpack(packed) == half
    assert ring.unpack(ring.pack([b"x" * 3 * _LEAST])) == [b"x" * 3 * _LEAST]


def test_a_message_takes_a_place_of_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, batch = RingBuffer(), [b"x" * _LEAST]
    size = ring.pack(batch).nbytes
    ring.reset(give_back=False)
    set_limits(monkeypatch, RingBuffer, RING_BYTES=2 * size, RING_STEP_BYTES=1)
    first, second = ring.pack(batch), ring.pack(batch)
    assert (first.start, second.start, ring.pack(batch).pieces) == (0, size, [batch[0], ANY])
    assert ring.unpack(first) == batch
    third = ring.pack(batch)
    assert (third.start, third.is_in_ring) == (0, True)
    assert ring.unpack(second) == ring.unpack(third) == batch


def test_reset_frees_the_places_of_messages_that_were_not_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, RingBuffer, RING_BYTES=3 * _LEAST)
    ring, batch = RingBuffer(), [b"x" * 2 * _LEAST]
    for give_back in (False, True, False):
        message = ring.pack(batch)
        assert message.is_in_ring
        assert not ring.pack(batch).is_in_ring
        ring.reset(give_back=give_back)
    assert ring.unpack(ring.pack(batch)) == batch


@pytest.mark.parametrize(("most", "room"), [(3 << 18, 1 << 20), (3 << 20, 3 << 20)])
def test_messages_of_similar_size_reuse_the_same_pages(most: int, room: int) -> None:
    ring, rng = RingBuffer(), random.Random(0)
    on_way: deque[Any] = deque()
    for _ in range(100):
        message = ring.pack([b"x" * rng.randrange(most * 5 // 6, most)])
        on_way.append(message)
        assert message.start + message.nbytes <= 3 * room
        if len(on_way) == 3:
            ring.unpack(on_way.popleft())


def test_ring_returns_memory_when_requested() -> None:
    ring = RingBuffer()
    batch = [b"x" * (1 << 20)]
    message = ring.pack(batch)
    for give_back in (False, True):
        ring.reset(give_back=give_back)
        assert (os.fstat(ring._handle).st_blocks * 512 < len(batch[0])) == give_back
    # The memory of a message that is never received is zeroed.
    assert bytes(ring._memory[message.start + 4096 :][:99]) == bytes(99)
    assert ring.unpack(ring.pack(batch)) == batch


def rings_of(loader: ss.ShardLoader) -> list[Any]:
    """Return the rings of the loader's persistent workers."""
    assert loader._pool is not None
    return [worker.channel for worker in loader._pool.workers]


@pytest.mark.usefixtures("s3_env")
@pytest.mark.parametrize("is_local", [True, False])
def test_ring_returns_memory_between_epochs_of_remote_data(
    is_local: bool, photos: str, bucket: str
) -> None:
    url = photos
    if not is_local:
        url = f"{bucket}/photos"
        write_photos(url)
    loader = ss.ShardLoader(
        ss.ShardDataset(url), batch_size=8, num_workers=1, persistent_workers=True
    )
    assert sum(len(right(batch)) for batch in loader) == 64
    [ring] = rings_of(loader)
    last = module_of(RingBuffer).RING_BYTES
    ring._memory[last] = 1  # as after it was full once
    assert sum(len(right(batch)) for batch in loader) == 64
    assert rings_of(loader) == [ring]
    assert ring._memory[last] == is_local


TENSORS = [
    torch.arange(12, dtype=dtype).reshape(3, 4)
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64)
] + [
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 4j]),
    torch.tensor(7),
    torch.empty(0, 5),
    torch.arange(12).reshape(3, 4).T,
    torch.arange(12)[::3],
    torch.arange(12)[3:5],
    torch.zeros(3, 4).to_sparse(),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(1).expand(5),
    torch.arange(10).reshape(2, 5)[:1, 0],
    torch.arange(24).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    torch.nn.Parameter(torch.ones(3)),
    torch.ones(3, requires_grad=True),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda one: f"{one.dtype}-{tuple(one.shape)}")
def test_tensors_round_trip(
    tensor: torch.Tensor, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_full:
        set_limits(monkeypatch, RingBuffer, RING_BYTES=0)
    ring = RingBuffer()
    batch = {"odd": b"x" * (_LEAST + 1), "x": tensor, "again": [tensor]}
    back = ring.unpack(pickle.loads(pickle.dumps(ring.pack(batch))))  # noqa: S301  (our own)
    assert (back["x"].dtype, back["x"].shape) == (tensor.dtype, tensor.shape)
    assert back["x"].requires_grad == tensor.requires_grad
    assert torch.equal(back["x"].to_dense(), tensor.to_dense())
    assert back["again"][0] is back["x"]


def test_tensors_own_aligned_memory() -> None:
    ring = RingBuffer()
    messages = [ring.pack([b"y" * (_LEAST + 1), torch.full((5,), n)]) for n in range(3)]
    ones = [ring.unpack(message)[1] for message in messages]
    ring.pack([torch.full((5,), 9)])
    assert [one.tolist() for one in ones] == [[n] * 5 for n in range(3)]
    assert all(one.data_ptr() % 64 == 0 and not one.is_shared() for one in ones)


def test_very_large_tensor_is_left_to_torch() -> None:
    ring = RingBuffer()
    tensor = torch.zeros(MAX_TENSOR_BYTES + 1, dtype=torch.uint8)
    message = ring.pack(tensor)
    assert isinstance(message, RingMessage)
    assert message.nbytes < 10_000
    [left] = message.rest
    tensor[0] = 1  # a step uses its memory again
    assert ring.unpack(message) is left
    assert left[0] == 0
    shared = tensor.share_memory_()  # type: ignore[no-untyped-call]
    assert ring.pack(shared).rest[0] is shared
    assert ring.pack(tensor[1:].clone()).rest == []


def test_objects_that_torch_sends_keep_their_places() -> None:
    ring = RingBuffer()
    sent = [torch.full((2,), n).to_sparse() for n in range(1, 4)]
    assert [one.to_dense().tolist() for one in ring.unpack(ring.pack(sent))] == [
        [n, n] for n in range(1, 4)
    ]


_LARGE, _SMALL = b"x" * _LEAST, b"x" * (_LEAST - 1)


@pytest.mark.parametrize(
    ("value", "large"),
    [
        (_LARGE, 1),
        (_SMALL, 0),
        ({"jpg": _LARGE, "cls": _SMALL}, 1),
        ([_LARGE, _SMALL, _LARGE], 2),
        ((_LARGE, _LARGE + b"y"), 2),
        ([_LARGE, None], 1),
        ([{"jpg": _LARGE}, {"jpg": _SMALL, "cls": 1}], 1),
        ([{"jpg": [_LARGE] * 3}], 3),
    ],
)
def test_large_bytes_are_not_pickled_wherever_they_are(value: Any, large: int) -> None:
    ring = RingBuffer()
    message = ring.pack(value)
    assert len(message.places) == large + 1
    assert ring.unpack(message) == value


def test_memory_format_of_tensors_is_kept() -> None:
    ring = RingBuffer()
    for tensor in (
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4).permute(2, 0, 1),
    ):
        assert ring.unpack(ring.pack(tensor)).stride() == tensor.stride()


def test_numpy_arrays_are_writable_as_with_torch() -> None:
    ring = RingBuffer()
    array = np.frombuffer(bytes(99), dtype=np.uint8)
    ring.unpack(ring.pack(array))[0] = 1


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (TypeError("cannot pickle it"), "convert unpicklable values to arrays"),
        (RuntimeError("unable to allocate shared memory(shm)"), r"docker run --shm-size"),
        (RuntimeError("storage is gone"), "convert unpicklable values to arrays"),
        (OSError(errno.EMFILE, "Too many open files"), r"ulimit -n"),
    ],
)
def test_unpicklable_value_raises_at_once(error: Exception, remedy: str) -> None:
    class Unsendable:
        def __reduce__(self) -> str:
            raise error

    with pytest.raises(ss.errors.SampleError, match=rf"cannot be sent to the main .*{remedy}"):
        RingBuffer().pack({"x": Unsendable()})


def test_packing_creates_no_reference_cycles() -> None:
    """Otherwise batches of many megabytes would live until the next garbage collection."""
    ring, data = RingBuffer(), [bytes([n]) * (2 * _LEAST) for n in range(3)]
    tensor = torch.zeros(5000)
    gc.disable()
    try:
        counts = [sys.getrefcount(one) for one in (*data, tensor)]
        assert ring.unpack(ring.pack({"jpg": data, "x": tensor}))["jpg"] == data
        assert [sys.getrefcount(one) for one in (*data, tensor)] == counts
    finally:
        gc.enable()


def test_rings_close_their_file_descriptors() -> None:
    gc.collect()  # those of other tests
    before = len(os.listdir("/proc/self/fd"))
    rings = [RingBuffer() for _ in range(3)]
    del rings
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_ring_closes_its_descriptor_during_interpreter_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ring = RingBuffer()
    with monkeypatch.context() as at_exit:
        at_exit.setattr(module_of(RingBuffer), "os", None)
        del ring
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("photos"))
    write_photos(folder)
    return folder


def write_photos(url: str) -> None:
    """Write 64 samples of 10 to 73 kB in four shards."""
    with ss.ShardWriter(url, max_samples=16) as writer:
        for number in range(64):
            writer.write(
                {"__key__": f"{number:03}", "jpg": bytes([number]) * (10_000 + 1000 * number)}
            )


def right(batch: dict[str, list[Any]]) -> list[int]:
    for key, data in zip(batch["__key__"], batch["jpg"], strict=True):
        assert data == bytes([int(key)]) * (10_000 + 1000 * int(key))
    return [int(key) for key in batch["__key__"]]


@pytest.mark.parametrize(
    ("context", "num_workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)]
)
def test_large_bytes_arrive_from_forked_and_spawned_workers(
    photos: str, context: str, num_workers: int
) -> None:
    dataset = ss.ShardDataset(photos, shuffle=True)
    loader = ss.ShardLoader(
        dataset,
        batch_size=4,
        num_workers=num_workers,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    for _ in range(3):
        assert sorted(functools.reduce(operator.iadd, map(right, loader), [])) == list(range(64))


def test_undelivered_batch_is_dropped_from_the_ring(
    photos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, RingBuffer, RING_BYTES=600_000)  # room for two or three batches
    loader = ss.ShardLoader(
        ss.ShardDataset(photos, shuffle=True), batch_size=4, num_workers=2, persistent_workers=True
    )
    for _ in range(5):
        right(next(iter(loader)))
    assert sorted(functools.reduce(operator.iadd, map(right, loader), [])) == list(range(64))


def test_concurrent_iterations_do_not_mix(photos: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(photos, shuffle=True), batch_size=4, num_workers=1)
    with pytest.warns(UserWarning, match="iterated again"):
        both = [right(a) + right(b) for a, b in zip(loader, loader, strict=True)]
    assert sorted(functools.reduce(operator.iadd, both, [])) == sorted([*range(64), *range(64)])
    iterator = iter(loader)
    next(iterator)
    next(iter(loader))  # a look at a batch meanwhile: states are those of this iteration
    with pytest.warns(UserWarning, match="iterated again.*only the later one counts in states"):
        assert len([right(batch) for batch in iterator]) == 15


@pytest.mark.parametrize("tensors", [False, True])
def test_batches_bypass_the_pipe(
    photos: str, tensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[RingMessage] = []
    really = RingBuffer.unpack

    def unpack(self: RingBuffer, message: RingMessage, allocate: Any) -> Any:
        messages.append(message)
        return really(self, message, allocate)

    monkeypatch.setattr(RingBuffer, "unpack", unpack)
    dataset = ss.ShardDataset(Path(photos).as_uri())
    if tensors:
        dataset = dataset.map(as_array)
    loader = ss.ShardLoader(dataset, batch_size=8, num_workers=1)
    batches = list(loader)
    assert sum(len(batch["__key__"]) for batch in batches) == 64
    assert [message.number for message in messages] == list(range(1, len(messages) + 1))
    assert all(message.pieces is None for message in messages)
    if tensors:
        assert batches[3]["jpg"].shape == (8, 10_000)
        assert batches[3]["jpg"][0].eq(24).all()
        assert not batches[3]["jpg"].is_shared()


def as_array(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"jpg": np.frombuffer(sample["jpg"], dtype=np.uint8)[:10_000]}


def test_missing_shared_memory_falls_back_to_the_pipe(
    photos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> int:
        raise OSError(errno.ENOSYS, "not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    loader = ss.ShardLoader(ss.ShardDataset(photos), batch_size=8, num_workers=1)
    assert sum(len(right(batch)) for batch in loader) == 64


itself: list[Any] = []
itself.append(itself)


def holding_itself(items: list[Any]) -> dict[str, Any]:
    return {"jpg": [item["jpg"] for item in items], "odd": itself}


def test_self_referencing_batch_round_trips(photos: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(photos), batch_size=32, num_workers=1, collate_fn=holding_itself
    )
    first, _ = loader
    assert first["odd"][0] is first["odd"]
    assert len(first["jpg"]) == 32


def memory_files() -> int:
    """Return the number of ring descriptors of this process."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:shardstream" in str(link) for link in links)


def test_memory_is_returned_when_workers_end(photos: str) -> None:
    gc.collect()  # those of other tests
    before = memory_files()
    loader = ss.ShardLoader(ss.ShardDataset(photos), batch_size=8, num_workers=2)
    batches = iter(loader)
    right(next(batches))
    assert memory_files() > before
    assert sum(len(right(batch)) for batch in batches) == 56
    assert memory_files() == before


@pytest.mark.parametrize("persistent", [False, True])
def test_copied_loader_has_its_own_rings(photos: str, persistent: bool) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(photos), batch_size=8, num_workers=1, persistent_workers=persistent
    )
    right(next(iter(loader)))
    loader.load_state_dict(loader.state_dict())  # this ends the workers
    before = {*threading.enumerate()}
    copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]  # noqa: S301  (our own)
    assert before.issuperset(threading.enumerate())  # no thread that sends descriptors
    for one in [loader, *copies]:
        assert sum(len(right(batch)) for batch in one) == 56
