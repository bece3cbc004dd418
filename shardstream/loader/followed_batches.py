"""The batches of one rank of a dataset that is followed: rounds of whole steps, and at the end a last, short one.

A step is the next samples of all ranks, by number, so a rank needs to know nothing of the others, except where the reading ends: a writer may open
while some ranks have seen that all were closed. Rank 0 says to the others how far to read, and where the end is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardstream.errors import OptionError, UnfinishedError, get_logger
from shardstream.loader.batch_dataset import BatchDataset
from shardstream.loader.dataset import StreamDataset
from shardstream.loader.dataset_versions import Follower, FollowSource, Round
from shardstream.loader.rank_consistency import EpochAgreement
from shardstream.order import RangePartition, RangePlan, RankPartition
from shardstream.pipeline import (
    EpochSamples,
    ItemStage,
    LoaderPosition,
    State,
    check_state,
    seal_state,
)

_log = get_logger(__name__)
_TOLD_S = 0.1  # between two looks at what rank 0 says
_ROUND_SAMPLES = 1 << 17  # at most, so that deletions are seen
_GROWS = "a dataset with version=Follow() grows while it is read"
_NO_AGREEMENT = (
    "without torch.distributed ranks cannot agree where a followed dataset ends, and so on its last, short batches; call init_process_group, or "
    "pass drop_last=True: then the last samples wait for the next iteration"
)
_NO_ORIGIN = (
    "the dataset was compacted and gc has removed what says which samples it had before, so without torch.distributed ranks cannot agree how to number "
    "its samples; call init_process_group, or load the same state on all ranks"
)


class _Limit(NamedTuple):
    """How far to read."""

    published: int
    """Number after that of the last sample."""
    is_end: bool = False
    """Whether all writers were closed."""
    prefix: str = ""
    """Fingerprint of the samples up to there, of what rank 0 has said."""


class FollowedBatches(BatchDataset):
    """Batches of one rank, of a dataset that is followed; the arguments are those of `BatchDataset`.

    Raises:
        OptionError: If steps change counts, or there is no batch size.
    """

    def __init__(
        self, dataset: StreamDataset, *, batch_size: int | None, drop_last: bool, **options: Any
    ) -> None:
        source = dataset.pipeline.source
        assert isinstance(source, FollowSource)  # noqa: S101  (chosen by it)
        if batch_size is None or not all(
            isinstance(stage, ItemStage) for stage in dataset.pipeline.stages
        ):
            raise OptionError(
                "version=Follow() needs a batch_size, and steps that yield one item per item: batches are the next samples of all ranks"
            )
        self._given_dataset, self._drops_last = dataset, drop_last
        self._follower: Follower | None = Follower(source)
        self._ends, self._name = 0, ""  # that were reached; of what rank 0 says in this iteration
        begin = self._follower.round(0, 0, is_last=False)
        made = dataset._with_pipeline(replace(dataset.pipeline, source=begin))
        super().__init__(made, batch_size=batch_size, drop_last=False, **options)
        if self.placement.world_size > 1:
            self._follower.begin_with_others()

    def __getstate__(self) -> dict[str, Any]:
        # Workers get each round by its command.
        return super().__getstate__() | {"_follower": None, "_given_dataset": None}

    @property
    def present_dataset(self) -> StreamDataset:
        """The dataset as it was given."""
        return self._given_dataset

    @property
    def _round(self) -> Round:
        assert isinstance(self.indexed_source, Round)  # noqa: S101
        return self.indexed_source

    @property
    def new_source(self) -> Round:  # type: ignore[override]
        """The present round, for workers."""
        return self._round.for_workers()

    @property
    def is_last_read(self) -> bool:  # type: ignore[override]
        """Whether the batches that are read now are the last ones."""
        return self._round.is_last

    def partition(
        self,
        position: LoaderPosition,
        opened: RankPartition | None = None,  # noqa: ARG002
    ) -> RangePartition:
        """Return the steps of this rank in the present round; none at another position than its begin."""
        order = self.order(position.epoch)
        if position.consumed != self._round.first:
            order = replace(order, nsamples=0)
        plan = RangePlan(order, position.epoch, first=position.consumed)
        return RangePartition(plan, self.partition_config, rank=self.placement.rank)

    def move_to(self, position: LoaderPosition) -> None:
        """Begin an iteration at a position: writers may have opened since the last one."""
        self._name = f"follow/{self._ends}/{position.consumed}"
        self.indexed_source = self._followed.round(position.consumed, 0, is_last=False)

    def next_round(self, position: LoaderPosition, agreement: EpochAgreement | None) -> bool:
        """Wait until a step, or the end, is published; return False at the end.

        Raises:
            UnfinishedError: If nothing was published in time while a writer is open.
            OptionError: If ranks cannot agree on the end.
            ChangedError, StorageError: As in `Follower.look`.
        """
        if agreement is None and self.placement.world_size > 1 and not self._drops_last:
            raise OptionError(_NO_AGREEMENT)
        if agreement is None and self.placement.world_size > 1 and not self._followed.is_certain:
            raise OptionError(_NO_ORIGIN)
        consumed, step = position.consumed, self.placement.world_size * (self.batch_size or 1)
        follower, last_limit, until = self._followed, None, 0.0
        while not self._round.is_last or consumed != self._round.end:
            limit = self._limit(consumed, agreement)
            count = limit.published - consumed
            if self._drops_last or not limit.is_end:
                count -= count % step
            if count > 0:
                most = max(1, _ROUND_SAMPLES // step) * step
                is_last = limit.is_end and count <= most
                self.indexed_source = follower.round(consumed, min(count, most), is_last=is_last)
                return True
            if limit.is_end:
                break
            if limit != last_limit:
                last_limit, until = limit, time.monotonic() + follower.source.follow.timeout_s
            is_told = agreement is not None and not agreement.is_first
            if time.monotonic() >= until:
                raise _late_error(follower, is_told=is_told)
            poll_s = follower.source.follow.poll_s
            time.sleep(min(poll_s, _TOLD_S) if is_told else poll_s)
        self._end(consumed, agreement)
        return False

    def epoch_samples(self, position: LoaderPosition) -> EpochSamples:  # noqa: ARG002
        """Refuse it: the samples are not known in advance."""
        raise OptionError(f"no plan says which sample comes when: {_GROWS}")

    def whole_epoch(self, position: LoaderPosition) -> RankPartition | None:  # noqa: ARG002
        """Refuse it: the number of batches is not known in advance."""
        raise TypeError(f"the number of batches is not known: {_GROWS}")

    def state_at(self, position: LoaderPosition, opened: RankPartition | None) -> State:  # noqa: ARG002
        """Return the state of a position, the same on all ranks."""
        follower = self._followed
        return seal_state(
            {
                "kind": "follow",
                "fingerprint": follower.prefix(position.consumed),
                "origin": follower.origin,
                "versions": [follower.origin],  # of which `gc` keeps all later compactions
                "seed": follower.source.seed,
                "epoch": 0,
                "consumed": position.consumed,
            }
        )

    def load(self, state: Mapping[str, Any], epoch: int) -> LoaderPosition:  # noqa: ARG002
        """Return the position of a state.

        Raises:
            StateError: If it is not one of this dataset.
        """
        follower = self._followed
        check_state(state, expected={"kind": "follow", "seed": follower.source.seed})
        follower.move_to(state["origin"], state["consumed"], state["fingerprint"])
        return LoaderPosition(consumed=state["consumed"])

    def _end(self, consumed: int, agreement: EpochAgreement | None) -> None:
        """End an iteration; say so if no writer has been waited for: users may have expected one."""
        is_first = agreement is None or agreement.is_first
        if is_first and not (self._ends or self._followed.saw_writer):
            _log.warning(
                "%s: no writer was open, so the reading ends after %d samples; readers wait only for writers with publish_s=, and are started after these",
                self._followed.url,
                consumed,
            )
        self._ends += 1
        if agreement is not None:
            agreement.end_together(self._name, self.placement.world_size)

    def _limit(self, consumed: int, agreement: EpochAgreement | None) -> _Limit:
        """Return how far to read: what is published, or of it what rank 0 has said.

        Raises:
            OptionError: If rank 0 has read another dataset.
        """
        follower = self._followed
        if agreement is None or agreement.is_first:
            follower.look()
            limit = _Limit(follower.published, not follower.writers)
            if agreement is not None:
                limit = limit._replace(prefix=follower.prefix(limit.published))
                agreement.tell(self._name, json.dumps(limit))
            return limit
        told = agreement.told(self._name)
        if told is None:
            return _Limit(consumed)
        limit = _Limit(*json.loads(told))
        if limit.published > consumed:
            follower.look()  # stores show what was published at once, but some mirrors do not
        if follower.published < limit.published:
            return _Limit(consumed)
        if follower.prefix(limit.published) != limit.prefix:
            raise OptionError(
                f"rank 0 follows another dataset, whose first {limit.published:,} samples are others; follow the same one on all ranks, and begin several in "
                "the same order",
                shard=follower.url,
            )
        return limit

    @property
    def _followed(self) -> Follower:
        assert self._follower is not None  # noqa: S101  (in the main process)
        return self._follower


def _late_error(follower: Follower, *, is_told: bool) -> UnfinishedError:
    writers = ", ".join(map(str, follower.writers))
    what = "rank 0 has said of no new samples" if is_told else "nothing was published"
    why = (
        f"and these writers are open: {writers}; continue them, close those that were killed by 'shardstream close URL --writer TOKEN' "
        "(ss.versions.close_writers), or wait longer with version=ss.loader.Follow(timeout_s=)"
        if writers
        else "and no writer is open; all ranks break out of the loader after the same batch, and begin again together"
    )
    return UnfinishedError(
        f"{what} for {follower.source.follow.timeout_s:g} s, {why}", shard=follower.url
    )
