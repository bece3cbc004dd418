"""Pinned (page-locked) host memory, from which a GPU copies while the CPU goes on.

torch pins batches in a thread of its own, and only tensors that torch has sent. Here a batch is unpacked from the ring of its
worker (`shared_memory`) straight into pinned memory: one copy, no thread. torch's allocator of pinned memory reuses a block only
after the copies to a device that read it have finished, so a batch may be dropped while it is still being copied.
"""

from __future__ import annotations

from typing import Any

import torch

from shardstream.loader.nested_batches import map_nested


class PinnedMemory:
    """Pinned memory of torch's caching allocator, for the current accelerator."""

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def pin(self, value: Any) -> Any:
        """Return a tensor, or an object with ``pin_memory()``, in pinned memory; one that is pinned stays as it is."""
        return value.pin_memory()

    def pin_batch(self, batch: Any) -> Any:
        """Return a batch with all its tensors pinned, also inside containers, as torch does."""
        return map_nested(batch, self._pin_leaf)

    def _pin_leaf(self, value: Any) -> Any:
        return self.pin(value) if hasattr(value, "pin_memory") else None


def open_pinned_memory() -> PinnedMemory | None:
    """Return pinned memory; None without an accelerator that uses it, where torch warns and pins nothing."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # torch < 2.6
        return PinnedMemory() if torch.cuda.is_available() else None
    if not accelerator.is_available() or accelerator.current_accelerator().type == "mps":
        return None
    return PinnedMemory()
