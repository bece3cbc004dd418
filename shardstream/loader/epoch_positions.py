"""Decide where the next iteration of a loader begins, and which position its state holds."""

from __future__ import annotations

from shardstream.errors import StateError
from shardstream.loader.lightning import Fetched
from shardstream.loader.rank_consistency import EpochAgreement
from shardstream.pipeline import LoaderPosition


class EpochPositions:
    """Positions of a loader: of its current iteration, and where the next one begins.

    An iteration whose first batch has been handed out makes the next one an epoch of its own. So does one that came to its
    end. `place` sets both, after which an iteration that is still open counts no more.

    Args:
        epoch: The first epoch.
    """

    def __init__(self, epoch: int) -> None:
        self.iteration = 0
        """Number of the current iteration."""
        self.agreement: EpochAgreement | None = None
        """Comparison with other ranks, until the user chooses an epoch."""
        self._step = 1
        self.place(LoaderPosition(epoch=epoch))

    def place(self, position: LoaderPosition) -> None:
        """Let the next iteration begin at a position."""
        self.next = self.current = self._start = self._before_last = position
        self.iteration += 1

    def set_epoch(self, epoch: int) -> bool:
        """Let the next iteration read an epoch; return whether it is another one than that of the current position.

        A position of that epoch at which no iteration has begun, as after loading a state, is kept.
        """
        self.agreement = None
        is_other = epoch != self.current.epoch
        if is_other:
            self.place(LoaderPosition(epoch=epoch))
        elif self.next is not self._start:
            self.next = LoaderPosition(epoch=epoch)
        return is_other

    def begin(self, *, repeats: bool) -> LoaderPosition:
        """Begin an iteration; return its position.

        Args:
            repeats: Whether the iteration after it reads the same epoch again.
        """
        self._step = 0 if repeats else 1
        self.place(self.next)
        return self.current

    def move_to(self, position: LoaderPosition, *, is_handed_out: bool, is_last: bool) -> None:
        """Move the current iteration after a batch.

        Args:
            position: The position after it.
            is_handed_out: False if all its samples were bad.
            is_last: Whether it is known to be the last one.

        Raises:
            OptionError: If another rank reads another epoch.
        """
        if is_handed_out:
            is_first = self.next is self._start
            if is_first:
                self.next = LoaderPosition(epoch=position.epoch + self._step)
            if self.agreement is not None:
                self.agreement.add_batch(position.epoch, is_first=is_first, is_last=is_last)
            self._before_last = self.current
        self.current = position

    def check_ranks(self) -> None:
        """Check before a further batch that the other ranks read the same epoch.

        Raises:
            OptionError: If one does not.
        """
        if self.agreement is not None:
            self.agreement.check()

    def end(self) -> None:
        """End the current iteration."""
        if self.agreement is not None:
            self.agreement.end()
        after = LoaderPosition(epoch=self.current.epoch + self._step)
        self.next = self._start = self.current = after

    def saved(self, fetched: Fetched) -> LoaderPosition:
        """Return the position of a state: after the last batch that the training has received.

        Args:
            fetched: Batches that a trainer has taken and not used yet.

        Raises:
            StateError: If there are several.
        """
        if fetched.ahead > 1:
            raise StateError(
                f"Lightning holds {fetched.ahead} batches for later steps, which a state would lose; let it fetch one ahead, or set the "
                "length with .with_length(n), so that it fetches none"
            )
        if fetched.ahead:
            return self._before_last
        return self.next if fetched.is_last else self.current
