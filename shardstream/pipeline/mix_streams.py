"""Mix datasets as streams where a part changes its number of items: each worker mixes its own streams and keeps their positions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardstream.distributed import WorkerInfo
from shardstream.order import MixSchedule, derive_key
from shardstream.pipeline.mix import EPOCHS_PER_PASS, MixRecipe
from shardstream.pipeline.source import Source
from shardstream.pipeline.stage import Context, Run, State
from shardstream.storage import Storage

_MIX_STREAM = 6  # purpose of the random key


@dataclass(frozen=True, slots=True, kw_only=True)
class MixStreamSource(Source):
    """A mix whose parts are streams.

    Args:
        recipe: Parts, weights and stop rule.
        seed: Seed of the order.
        shuffle: Whether each epoch has a different order; always true for a mix.
    """

    recipe: MixRecipe
    seed: int = 0
    shuffle: bool = True

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with any of the datasets."""
        parts = "\n".join(
            f"{name}\0{part.source.fingerprint}" for name, part in self.recipe.parts.items()
        )
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""
        return [one for part in self.recipe.parts.values() for one in part.source.checksums]

    def describe(self, *, steps: bool) -> State:
        """Return the values of the mix that must equal those of a state."""
        return {"mix": self.recipe.describe(steps=steps)}

    def place(self) -> tuple[Storage, str]:
        """Return the storage and the URL of the first shard of the first part."""
        return next(iter(self.recipe.parts.values())).source.place()

    def open(self, worker_info: WorkerInfo, context: Context) -> Run:
        """Open the stream of one loader worker."""
        return MixStreamRun(self.recipe, worker_info, context)


class MixStreamRun:
    """Items of several runs, by weight."""

    def __init__(self, recipe: MixRecipe, worker_info: WorkerInfo, context: Context) -> None:
        self.number = -1
        self._recipe, self._worker_info, self._context = recipe, worker_info, context
        weights = recipe.weights_of(context.epoch)
        self._reads_all_parts = weights is None  # each part is read once, whatever its length
        key = derive_key(context.seed, context.epoch, _MIX_STREAM)
        self._schedule = MixSchedule(weights or [1.0] * len(recipe.parts), key)
        self._limit = None
        if recipe.samples is not None:
            per_worker, more = divmod(recipe.samples, worker_info.num_global_workers)
            self._limit = per_worker + (worker_info.global_worker < more)
        self._names = list(recipe.parts)
        self._place = 0  # in the schedule
        self._taken = 0
        self._passes = [0] * len(recipe.parts)
        self._ended = [False] * len(recipe.parts)
        self._items_in_pass = [0] * len(recipe.parts)  # items in this pass
        self._empty = [False] * len(recipe.parts)  # a part without items: its places are skipped
        self._runs = [self._open(part) for part in range(len(recipe.parts))]
        self._pattern: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> MixStreamRun:
        return self

    def __next__(self) -> Any:
        if self._limit is not None and self._taken >= self._limit:
            raise StopIteration
        while not self._is_over():
            part = self._part_at(self._place)
            if self._empty[part] or (self._reads_all_parts and self._ended[part]):
                self._place += 1
                continue
            for item in self._runs[part]:
                self.number = derive_key(part, self._passes[part], self._runs[part].number)
                self._place, self._taken = self._place + 1, self._taken + 1
                self._items_in_pass[part] += 1
                self._context.skips.samples_per_dataset[self._names[part]] += 1
                return item
            self._end(part)
        raise StopIteration

    def _is_over(self) -> bool:
        ended = [ended for ended, empty in zip(self._ended, self._empty, strict=True) if not empty]
        if self._limit is not None:
            return not ended
        return (
            any(ended)
            if ended and self._recipe.stop == "first_exhausted" and not self._reads_all_parts
            else all(ended)
        )

    def _end(self, part: int) -> None:
        """Mark a part as ended, and restart it unless the mix is over."""
        self._ended[part] = True
        self._empty[part] = self._items_in_pass[part] == 0
        if not self._reads_all_parts and not self._empty[part] and not self._is_over():
            self._runs[part].close()
            self._passes[part] += 1
            self._items_in_pass[part] = 0
            self._runs[part] = self._open(part)

    def _part_at(self, place: int) -> int:
        pattern, slot = divmod(place, self._schedule.length)
        if self._pattern[0] != pattern:
            places = pattern * self._schedule.length + np.arange(
                self._schedule.length, dtype=np.int64
            )
            sources, _ = self._schedule.assign_sources(
                places, np.full_like(places, self._worker_info.global_worker)
            )
            self._pattern = pattern, sources.tolist()
        return self._pattern[1][slot]

    def _open(self, part: int) -> Run:
        pipeline = list(self._recipe.parts.values())[part]
        epoch, pass_number = self._context.epoch, self._passes[part]
        context = replace(
            self._context, seed=pipeline.source.seed, epoch=epoch + pass_number * EPOCHS_PER_PASS
        )
        return pipeline.open(self._worker_info, context)

    def state_dict(self) -> State:
        """Return the place in the mix, and the position of each part."""
        return {
            "place": self._place,
            "taken": self._taken,
            "passes": list(self._passes),
            "got": list(self._items_in_pass),
            "ended": list(self._ended),
            "empty": list(self._empty),
            "parts": [run.state_dict() for run in self._runs],
        }

    def load_state_dict(self, state: State) -> None:
        """Move to a place, and each part to its position."""
        self.close()
        self._place, self._taken = state["place"], state["taken"]
        self._passes, self._items_in_pass = list(state["passes"]), list(state["got"])
        self._ended, self._empty = list(state["ended"]), list(state["empty"])
        self._runs = [self._open(part) for part in range(len(self._runs))]
        for run, position in zip(self._runs, state["parts"], strict=True):
            run.load_state_dict(position)

    def close(self) -> None:
        """Close all parts."""
        for run in self._runs:
            run.close()
