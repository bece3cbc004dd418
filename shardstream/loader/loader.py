"""ShardLoader: a torch ``DataLoader`` that resumes exactly from a saved state."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardstream.distributed import (
    Placement,
    WorkerInfo,
    accelerate_loader,
    is_called_by_accelerate,
    warn_without_ranks,
)
from shardstream.errors import OptionError, StateError
from shardstream.loader.batch_dataset import BatchDataset, as_is
from shardstream.loader.batch_transfer import new_tensor
from shardstream.loader.collation import collate
from shardstream.loader.dataset import SAY_LEFT_OUT, StreamDataset, refuse_own_iteration
from shardstream.loader.dataset_versions import FollowSource
from shardstream.loader.device_transfer import (
    PinnedMemory,
    check_device,
    check_same_device,
    open_pinned_memory,
    place_batches,
)
from shardstream.loader.epochs import (
    LOOP_MODULES,
    epoch_of_reloading_lightning,
    is_overfit_by_lightning,
    received_position,
)
from shardstream.loader.followed_batches import FollowedBatches
from shardstream.loader.option_checks import check_options, unwrap_rebuilt, warn_of_lanes
from shardstream.loader.progress import Cursor, Opened, Progress, Stopwatch
from shardstream.loader.rank_consistency import compare_ranks
from shardstream.loader.stats import LoaderStats
from shardstream.loader.worker import WorkerBatch, sum_values
from shardstream.loader.worker_pool import PoolIteration, WorkerPool
from shardstream.loader.workers import ThreadContext, WorkerSetup
from shardstream.order import derive_key
from shardstream.pipeline import (
    BadSample,
    EpochSamples,
    LoaderPosition,
    SkipTracker,
    State,
    check_at_least,
    check_epoch,
    default_partition,
    whole_number,
)
from shardstream.process import keep_freed_memory


class ShardLoader(DataLoader[Any]):
    """Batches of a `ShardDataset`, with an exact length and a small state.

    Takes the arguments of ``torch.utils.data.DataLoader``. Each iteration reads the next epoch, in a new order if the dataset
    shuffles, however many batches were taken from the one before. It continues in the middle of an epoch only after
    `load_state_dict` or `skip`, and reads the epoch of `set_epoch` after that. An iteration without any batch does not count.

    Args:
        dataset: Dataset to read; its placement selects the rank.
        batch_size: Samples of a batch of this rank; None yields single items (such as those of ``batched``).
        shuffle: For drop-in use; must equal the dataset's, which defines the order.
        num_workers: Worker processes; 0 reads in the main process.
        worker_method: "multiprocessing", or "thread" for workers that are threads of the main process: they start at once and copy no
            batch between processes, but only steps that release the interpreter's lock run in parallel, and all share the global random
            generators with the training (see docs/tuning.md).
        collate_fn: Makes a batch of a list of items; by default arrays are stacked to tensors, the rest becomes lists.
        drop_last: Drop a last batch of less than full size.
        device: Yield batches on this device ("cuda", "cuda:1", …): tensors are copied from pinned memory on a stream of their own
            while the device computes; other values stay as they are. "cpu" and None copy nothing. Dicts, lists, tuples and
            dataclasses are searched for tensors; other objects with ``to(device)`` are moved when they are yielded.
        prefetch_to_device: Batches on the device at most, with the one that is yielded next; only batches that workers have
            ready are copied ahead. They do not count in `state_dict`.
        options: Those of ``DataLoader``: pin_memory, timeout, prefetch_factor, persistent_workers, … Where cores are shared, ``prefetch_factor=4``
            instead of 2 lets a fast worker get further ahead of a slow one, for the memory of two more batches per worker. Small batches count in part: a worker
            may be at most 64 times as many ahead. With ``pin_memory=True`` tensors are pinned when they leave the shared memory of their worker, without torch's thread.

    Raises:
        OptionError: If an argument is invalid here, or the device is not available.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        dataset: StreamDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        num_workers: int = 0,
        worker_method: str = "multiprocessing",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        device: str | int | torch.device | None = None,
        prefetch_to_device: int = 2,
        **options: Any,
    ) -> None:
        dataset, collate_fn = unwrap_rebuilt(dataset, collate_fn, options)
        batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        own = {
            "drop_last": drop_last,
            "prefetch_to_device": prefetch_to_device,
            "worker_method": worker_method,
        }
        check_options(dataset, batch_size, shuffle, options | own)
        refuse_own_iteration(dataset)
        self.worker_method = worker_method
        self.device = None if device is None else check_device(device)
        self.prefetch_to_device = prefetch_to_device
        continues = isinstance(dataset.pipeline.source, FollowSource)
        self._batches = (FollowedBatches if continues else BatchDataset)(
            dataset,
            batch_size=batch_size,
            collate_fn=collate_fn or collate,
            num_workers=num_workers,
            drop_last=drop_last,
        )
        self._chosen = dataset._epochs.chosen  # by the last call of its `set_epoch` that was seen
        self._is_compared = self._serves_accelerate = False
        self._pool: WorkerPool | None = None  # of persistent workers
        if continues and num_workers:  # not started again for each round
            options["persistent_workers"] = True
        cursor = Cursor(continues=continues).at(LoaderPosition(epoch=self._chosen[0]))
        self._progress = Progress(
            batches=self._batches,
            cursor=cursor,
            stopwatch=Stopwatch(cursor.position.epoch, num_workers),
            report=dataset.pipeline.open_report(dataset.placement),
            keeps_workers=bool(options.get("persistent_workers")),
        )
        warn_of_lanes(self._batches, cursor.position)
        # Without a generator torch would draw the workers' seeds from the global one.
        self._seeds_workers = options.get("generator") is None
        options["generator"] = options.get("generator") or torch.Generator("cpu")
        super().__init__(
            self._batches, batch_size=None, num_workers=num_workers, collate_fn=as_is, **options
        )
        # For readers of the loader; torch gets None and False, because the workers make the batches.
        vars(self).update(batch_size=batch_size, drop_last=drop_last)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # torch's error would be about the size of a file
            raise OptionError(
                "a ShardLoader cannot be sent to another process; pass its dataset, and make the loader there"
            )
        return self.__dict__ | {"_pool": None, "_progress": copy.copy(self._progress)}

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between iterations; from 0."""
        self._follow_dataset()
        return self._progress.cursor.position.epoch

    @property
    def placement(self) -> Placement:
        """Rank of the batches, and number of ranks."""
        return self._batches.placement

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True if read by ``accelerator.prepare``, which then keeps the loader unwrapped; switches to Accelerate mode."""
        self._serves_accelerate = self._serves_accelerate or is_called_by_accelerate()
        return self._serves_accelerate

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._serves_accelerate = prepared

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether ``accelerator.save_state`` and ``load_state`` include the state of the prepared loader.

        Raises:
            StateError: If Accelerate reads it, but each rank has its own position: Accelerate saves one for all ranks.
        """
        is_same = (
            self._batches.indexed_source is not None or self._batches.placement.world_size == 1
        )
        if not is_same and is_called_by_accelerate():
            raise StateError(
                "Accelerate saves one loader state for all ranks, but the steps of this pipeline change counts, so each rank has "
                "its own; save loader.state_dict() to one file per rank and do not pass the loader to accelerator.prepare()"
            )
        return is_same

    @property
    def skipped(self) -> dict[str, int]:
        """Bad samples skipped in this epoch, by kind of error."""
        return sum_values(counts.skipped for counts in self._progress.counts.values())

    @property
    def refilled(self) -> int:
        """Number of repeated samples that replaced bad ones in this iteration (see `SkipBudget`)."""
        return sum(counts.refilled for counts in self._progress.counts.values())

    @property
    def bad_samples(self) -> list[BadSample]:
        """The bad samples skipped so far, in all epochs, each once; up to 10,000 per worker and epoch."""
        return [] if self._progress.report is None else self._progress.report.samples

    @property
    def samples_per_dataset(self) -> dict[str, int]:
        """Samples per dataset of a mix, also of nested mixes, in this iteration and rank."""
        return sum_values(counts.per_dataset for counts in self._progress.counts.values())

    def stats(self) -> LoaderStats:
        """Return timings of the current or last epoch; ``print`` them, or log `as_dict`. Of a dataset that is followed, waiting for writers does not count."""
        return self._progress.stopwatch.stats()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        It is read from its start, unless a state in the middle of it has just been loaded: that position is kept. After a
        ``break`` the current epoch can be set again, to restart it.
        """
        progress = self._progress
        progress.cursor = progress.cursor.in_epoch(check_epoch(epoch))
        progress.agreement = progress.agreement if progress.cursor.continues else None

    def skip(self, batches: int) -> None:
        """Begin the next iteration so many batches after the position of `state_dict`, without reading them: after a loss spike.

        They count as read. All ranks must skip as many; at most the rest of the epoch is skipped.

        Raises:
            OptionError: If there are fewer batches, or steps change counts, so that batches are not known before they are read.
        """
        self._follow_dataset()
        cursor = self._progress.cursor
        cursor.refuse_followed("batches cannot be skipped")
        check_at_least(0, batches=batches)
        position = cursor.position
        rest = self._batches.partition(position)
        if rest is not None and not rest.max_steps:  # after the last batch
            rest = self._batches.partition(LoaderPosition(epoch=position.epoch + 1))
        if rest is None:
            raise OptionError("batches cannot be skipped without reading them: steps change counts")
        self._progress.cursor = cursor.past(batches, rest)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Give the datasets of a mix other weights from here on; return the first sample of the training that has them.

        They hold from the next batch on, also in the iteration that runs: batches that were prefetched are dropped, and read again with
        the new weights by new workers. They hold until the next call, and replace those of the mix for all later epochs. They are part of the
        state, so a resume on any number of ranks and workers reads the same samples.

        Under ``torch.distributed`` all ranks must call it after the same batch; it waits up to 30 s for them.

        Args:
            weights: Share of each dataset, by name; 0 for none.

        Returns:
            Epoch times ``samples`` of the mix, plus the samples of the epoch that all ranks have received, as in `WeightSchedule`.

        Raises:
            OptionError: If the dataset is not a mix with ``weights`` and ``samples``, it has a ``balance`` or steps that change counts, the
                weights are invalid, or another rank differs or does not call it. The weights then stay as they are.
        """
        self._follow_dataset()
        cursor, batches = self._progress.cursor, self._batches
        position = cursor.position
        changed = batches.with_weights(weights, position)
        source = batches.source_dataset.pipeline.source
        numbers = {
            "position": [position.epoch, position.consumed],
            "weights": changed.changes[-1][1],
        }
        compare_ranks(
            f"{source.fingerprint}/weights", numbers, batches.placement, call="set_weights"
        )
        batches.set_source(changed)
        if cursor.partition is not None:  # the iteration sees that it is another one
            partition = batches.partition(position)
            self._progress.cursor = replace(cursor, partition=partition)
        self._pool = None  # as in `load_state_dict`
        return int(changed.changes[-1][0])

    def plan(self, epoch: int | None = None) -> EpochSamples:
        """Return which samples all ranks read at each step of an epoch, and when a sample comes; nothing of the data is read.

        Args:
            epoch: From 0, read from its start; None is the rest after `state_dict` (after a ``break`` the next iteration reads the next epoch instead).

        Raises:
            OptionError: If that is not known before they are read: steps change counts, or shards have no index.
        """
        self._follow_dataset()
        position = self._progress.cursor.position
        if epoch is not None:
            position = LoaderPosition(epoch=check_epoch(epoch))
        return self._batches.epoch_samples(position)

    def _follow_dataset(self) -> None:
        """Adopt the epoch of the dataset's `set_epoch`, if it was called since the last check, and the ranks."""
        cursor = self._progress.cursor
        if cursor.partition is None and self._batches.follow_ranks(cursor.next_position):
            self._pool, self._is_compared = None, False
            dataset = self._batches.source_dataset
            self._progress.report = dataset.pipeline.open_report(dataset.placement)
        chosen = self._batches.source_dataset._epochs.chosen
        if chosen != self._chosen:
            self._chosen = chosen
            self.set_epoch(chosen[0])

    @property
    def batches_left(self) -> int:
        """Batches left after the position of `state_dict`, in this iteration or after a resume.

        Raises:
            OptionError: If the number is unknown, because steps change counts.
        """
        self._follow_dataset()
        cursor = self._progress.cursor
        cursor.refuse_followed("the number of batches left is not known")
        partition = self._batches.partition(cursor.position, cursor.partition)
        if partition is None:
            raise OptionError("the number of batches left is not known: steps change counts")
        return partition.num_steps

    def __repr__(self) -> str:
        batches = self._batches
        return (
            f"{type(self).__name__}({batches.source_dataset!r}, batch_size={batches.batch_size}, "
            f"num_workers={self.num_workers}, rank {batches.placement.rank} of {batches.placement.world_size})"
        )

    def __len__(self) -> int:
        # Always of a whole epoch, even after a resume in the middle: trainers count batches from the epoch's start.
        dataset, size = self._batches.source_dataset, self._batches.batch_size or 1
        if dataset._length is None:
            self._follow_dataset()
            if (partition := self._batches.whole_epoch(self._progress.cursor.position)) is not None:
                return partition.num_steps
            source = dataset.pipeline.indexed_source
            if source is not None:
                worker_info = WorkerInfo(dataset.placement, 0, max(1, self.num_workers))
                return default_partition(source, worker_info, self.epoch).num_samples
        length = len(dataset)
        return length // size if self._batches.partition_config.drop_last else -(-length // size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator
        if self._batches.placement.world_size > 1:
            self._refuse_second_split()
        elif not self._batches.source_dataset._has_given_placement:
            warn_without_ranks(stacklevel=2)
        progress = self._progress
        progress.cursor = replace(progress.cursor, partition=None)
        self._follow_dataset()
        is_new = progress.cursor.iteration == 1  # neither read nor at a state
        if is_new and _has_lightning() and (made_in := epoch_of_reloading_lightning()):
            progress.cursor = progress.cursor.in_epoch(made_in)
        begin = progress.cursor.next_position
        if self._batches.following is not None:
            self._pool = None  # its workers read the earlier versions
            self._batches.move_to(begin)
        elif progress.cursor.continues:
            self._batches.move_to(begin)
        cursor = replace(
            progress.cursor.at(begin),
            partition=self._batches.partition(begin),
            epochs_ahead=0 if _has_lightning() and is_overfit_by_lightning() else 1,
        )
        progress.begin(cursor)
        if self._batches.placement.world_size > 1 and not self._is_compared:
            self._compare_ranks()
        if self._serves_accelerate:
            return self._serve_accelerate()
        return progress.yield_batches(self._open_batches, self._open_batches(), cursor)

    def _open_batches(self) -> Opened:
        """Begin to read at the position of the cursor."""
        copies_to_cuda = self.device is not None and self.device.type == "cuda"
        pinned_memory = open_pinned_memory() if self.pin_memory or copies_to_cuda else None
        if pinned_memory is None and self.pin_memory:
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found that uses pinned memory, so batches are not pinned",
                UserWarning,
                stacklevel=3,
            )
        begin = self._progress.cursor.position
        received = self._open_iteration(begin, pinned_memory) if self.num_workers else None
        batches: Iterator[WorkerBatch] = received or self._batches.read(begin)
        if pinned_memory is not None or self.device is not None:
            is_ready = (lambda: False) if received is None else received.is_ready
            batches = place_batches(
                batches, self.device, pinned_memory, self.prefetch_to_device, is_ready
            )
        return batches, received

    def _open_iteration(
        self, begin: LoaderPosition, pinned_memory: PinnedMemory | None
    ) -> PoolIteration:
        """Begin an iteration of the persistent workers, or of new ones."""
        if self._seeds_workers:
            seed = self._batches.source_dataset.pipeline.source.seed
            self.generator.manual_seed(
                derive_key(seed, begin.epoch, self._batches.placement.rank) >> 1
            )
        pool = self._pool
        if pool is None or not pool.is_usable:
            pool = self._start_workers()
        if self.persistent_workers:
            self._pool = pool
        keep_freed_memory()  # of the batches that come out of rings
        source = self._batches.indexed_source
        return PoolIteration(
            pool,
            begin,
            self._progress.cursor.partition,
            None if source is None else source.samples,
            new_tensor if pinned_memory is None else pinned_memory.new_tensor,
        )

    def _start_workers(self) -> WorkerPool:
        self.check_worker_number_rationality()  # torch's warning
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
        setup = WorkerSetup(
            dataset=self._batches,
            num_workers=self.num_workers,
            base_seed=int(seed),
            init_fn=self.worker_init_fn,
            prefetch_factor=self.prefetch_factor or 1,
            uses_threads=self.worker_method == "thread",
        )
        context = self.multiprocessing_context or torch.multiprocessing.get_context()
        return WorkerPool(setup, ThreadContext if setup.uses_threads else context, self.timeout)

    def _serve_accelerate(self) -> Iterator[Any]:
        from shardstream.loader.accelerate import PreparedEpoch, check_data_parallel  # noqa: PLC0415  (it imports Accelerate)

        check_data_parallel(self.placement)
        check_same_device(self.device, PreparedEpoch.device(), "Accelerate")
        prepared = PreparedEpoch(non_blocking=self.pin_memory)

        def open_batches() -> Opened:
            worker_batches, received = self._open_batches()
            if self._batches.is_last_read:
                worker_batches = prepared.mark_last_batch(
                    worker_batches, self._progress.cursor.partition
                )
            return worker_batches, received

        progress = self._progress
        batches = progress.yield_batches(open_batches, open_batches(), progress.cursor)
        return prepared.move_to_device(batches)

    def _refuse_second_split(self) -> None:
        """Refuse to be read by an Accelerate loader, which would split the batches over ranks again."""
        placement = self._batches.placement
        if accelerate_loader() is not None:
            raise OptionError(
                f"this ShardLoader reads the part of rank {placement.rank}, but an Accelerate loader would split that part "
                "again; pass the ShardLoader itself to accelerator.prepare(), or a ShardDataset in a DataLoader"
            )

    def _compare_ranks(self) -> None:
        """Compare the order options with the other ranks, once, if the placement is that of torch.distributed."""
        batches, dataset = self._batches, self._batches.source_dataset
        progress = self._progress
        if progress.cursor.partition is None:
            numbers = batches.topology(self.epoch) | {"epoch": self.epoch}
            del numbers["rank"]
            if dataset.pipeline.may_leave_out:
                warnings.warn(SAY_LEFT_OUT, stacklevel=3)
        else:
            numbers = self.state_dict() | asdict(batches.partition_config)
            # A local copy has the same order, and steps may differ.
            for name in ("state_checksum", "digest", "past", "versions", "whole_lanes"):
                numbers.pop(name, None)
            budget = SkipTracker(dataset.pipeline.on_error).budget
            numbers["refill"] = budget is not None and budget.refill
        opened = None if progress.cursor.continues else dataset._opened  # followed at any version
        progress.agreement = compare_ranks(
            dataset.pipeline.source.fingerprint, numbers, batches.placement, opened=opened
        )
        self._is_compared = True

    def state_dict(self) -> State:
        """Return the position after the last yielded batch, in JSON values; prefetched batches do not count.

        If every step of the pipeline yields one item per item, the state is the same on every rank and resumes on any number of
        ranks and workers; else it holds a position for each worker of this rank.
        """
        self._follow_dataset()
        cursor = self._progress.cursor
        position = cursor.position
        if _has_lightning():
            position = received_position(self, position, cursor.before, cursor.next_position)
        return self._batches.state_at(position, cursor.partition)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; no samples are read before the next iteration. For one of an earlier version see ``on_new_version`` of `ReadOptions`.

        Raises:
            StateError: If an exact resume is impossible: data, seed or steps differ; if steps change counts, also the number of ranks or workers.
        """
        cursor = self._progress.cursor
        position = self._batches.load(state, cursor.position.epoch)
        warn_of_lanes(self._batches, position)
        self._progress.cursor = cursor.at(position)
        self._pool = None  # ends persistent workers, which cannot receive a new order
        self._is_compared = False
        # The state overrides earlier calls of `set_epoch`.
        self._chosen = self._batches.source_dataset._epochs.chosen


def _has_lightning() -> bool:
    """Return whether a loop of Lightning may have called: only the call stack shows what it does."""
    return not sys.modules.keys().isdisjoint(LOOP_MODULES)
