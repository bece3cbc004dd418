"""The cursor of a loader: a frozen value that `ShardLoader.__iter__` advances and states hold the position of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardstream.errors import OptionError
from shardstream.order import RankPartition
from shardstream.pipeline import LoaderPosition

_START = LoaderPosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a loader is, and where its next iteration begins.

    An iteration whose first batch has been handed out makes the next one an epoch of its own. So does one that came to its end.

    Args:
        position: Position after the last batch of the iteration.
        before: Position before the last batch that was handed out.
        next_position: Position where the next iteration begins.
        is_left: Whether a batch was handed out, so that the next iteration does not begin where this one did.
        partition: Steps of the iteration, if they are known.
        iteration: Number of the iteration. Whatever sets the position ends it: then further batches of it do not count.
        epochs_ahead: Epochs from this iteration to the next: 0 if it repeats, else 1.
        continues: Whether the next iteration begins where this one ends, as in a dataset that is followed, which has one epoch.
    """

    position: LoaderPosition = _START
    before: LoaderPosition = _START
    next_position: LoaderPosition = _START
    is_left: bool = False
    partition: RankPartition | None = None
    iteration: int = 0
    epochs_ahead: int = 1
    continues: bool = False

    def at(self, position: LoaderPosition) -> Cursor:
        """Return a cursor whose next iteration begins at a position."""
        iteration = self.iteration + 1
        return Cursor(
            position=position,
            before=position,
            next_position=position,
            iteration=iteration,
            continues=self.continues,
        )

    def in_epoch(self, epoch: int) -> Cursor:
        """Return a cursor whose next iteration reads an epoch.

        A position of that epoch at which no iteration has begun, as after loading a state, is kept.
        """
        if self.continues:
            return self
        if epoch != self.position.epoch:
            return self.at(LoaderPosition(epoch=epoch))
        return replace(self, next_position=LoaderPosition(epoch=epoch)) if self.is_left else self

    def after_batch(self, position: LoaderPosition, *, is_handed_out: bool) -> Cursor:
        """Return the cursor after a batch.

        Args:
            position: The position after it.
            is_handed_out: False if all its samples were bad.
        """
        if not is_handed_out:
            return replace(self, position=position)
        following = LoaderPosition(epoch=position.epoch + self.epochs_ahead)
        next_position = self.next_position if self.is_left else following
        next_position = position if self.continues else next_position
        return replace(
            self,
            position=position,
            before=self.position,
            next_position=next_position,
            is_left=True,
        )

    def at_end(self) -> Cursor:
        """Return the cursor after the last batch of the iteration."""
        position = LoaderPosition(epoch=self.position.epoch + self.epochs_ahead)
        position = self.position if self.continues else position
        return replace(
            self, position=position, next_position=position, is_left=False, partition=None
        )

    def past(self, batches: int, rest: RankPartition) -> Cursor:
        """Return the cursor after so many batches that are not read.

        Args:
            batches: Number of batches.
            rest: Steps of this rank from the position on.

        Raises:
            OptionError: If fewer are left.
        """
        # With remainder="keep" another rank may have a batch more; all ranks come to the next epoch together.
        epoch, steps = rest.plan.epoch, rest.max_steps
        if batches > steps:
            raise OptionError(f"cannot skip {batches} batches: {steps} are left of epoch {epoch}")
        if batches == steps:
            return self.at(LoaderPosition(epoch=epoch + 1))
        return self.at(LoaderPosition(epoch=epoch, consumed=rest.consumed_after(batches)))
