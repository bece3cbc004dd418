"""What becomes of bad samples: one policy for the whole chain, and an account of what it passed over."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from shardstream.errors import (
    IndexMismatchError,
    OptionError,
    SkipBudgetError,
    StorageError,
    plural,
    shown,
)
from shardstream.pipeline.bad_sample_report import BadSample

_log = logging.getLogger(__name__)
_LISTED = 10_000  # in each worker and epoch; more are counted only
_FATAL = (OptionError, StorageError, IndexMismatchError, SkipBudgetError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipBudget:
    """How many bad samples may be passed over.

    Args:
        samples: At most that many in each loader worker and epoch; one more is an error.
        warn: Log each one as a warning.
        report: Path or URL of a file where a `ShardLoader` lists them, a line of JSON each: shard, offset, number, key, field,
            error. With several ranks its name needs ``{rank}``. What an earlier run listed there stays.
            Written with the dataset's storage options where its protocol is that of the shards; where it cannot be written, a
            `ReportWarning` says so and training goes on.
        refill: A `ShardLoader` puts other good samples of the epoch in the places of bad ones, so that all batches keep their size on
            all ranks, as losses over gathered batches need. Those come twice in the epoch; `ShardLoader.refilled` counts them.
            Without it, batches get smaller by what is bad, and ranks may differ at a step. A `ShardLoader` refuses it with
            batch_size=None and after steps that change counts; a dataset that is read without a `ShardLoader` refills nothing.
    """

    samples: int = 100
    warn: bool = False
    report: str | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise OptionError(f"a budget of {self.samples} samples makes no sense")


OnError = Literal["raise", "warn", "skip"] | SkipBudget


class SkipTracker:
    """Bad samples so far.

    Args:
        on_error: "raise" stops at the first; "skip" and "warn" pass over up to 100; a `SkipBudget` says how many.
    """

    def __init__(self, on_error: OnError = "raise") -> None:
        if on_error not in ("raise", "warn", "skip") and not isinstance(on_error, SkipBudget):
            raise OptionError(
                f"on_error is 'raise', 'warn', 'skip' or ss.SkipBudget(samples=…), not {on_error!r}"
            )
        self.budget: SkipBudget | None = None
        if isinstance(on_error, SkipBudget):
            self.budget = on_error
        elif on_error != "raise":
            self.budget = SkipBudget(warn=on_error == "warn")
        self.counts: Counter[str] = Counter()
        self.samples_per_dataset: Counter[str] = Counter()
        """Not bad, but counted beside them: samples of each part of a mix."""
        self.refilled = 0
        """Samples that stood in for bad ones."""
        self.bad: list[BadSample] = []
        """Bad samples since the last `drain_bad_samples`."""

    def drain_bad_samples(self) -> list[BadSample]:
        """Return the bad samples since the last call."""
        bad, self.bad = self.bad, []
        return bad

    def skip_or_raise(self, error: Exception, item: Any = None, number: int | None = None) -> None:
        """Count a bad sample, or raise its error again.

        Args:
            error: What is wrong.
            item: What it was found in, if that is known; a sample tells its key and shard.
            number: Of the sample in the dataset, if that is known.

        Raises:
            Exception: The error itself if nothing may be skipped, or if it is no fault of the sample: a wrong option, a store out
                of reach, an index that does not fit.
            SkipBudgetError: If the budget is spent.
        """
        if isinstance(error, StopIteration):  # raised on, it would end the epoch without a word
            text = "a function of the pipeline raised StopIteration"
            raise RuntimeError(text) from error  # noqa: TRY004  (as PEP 479 does)
        if self.budget is None or isinstance(error, _FATAL):
            raise error
        self.counts[type(error).__name__] += 1
        if self.counts.total() <= _LISTED:
            self.bad.append(BadSample.of(error, item, number))
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = shown(f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else ""))
        _log.log(
            logging.WARNING if self.budget.warn else logging.INFO, "skipped a sample: %s", text
        )
        if self.counts.total() > self.budget.samples:
            raise SkipBudgetError(
                f"{plural(self.counts.total(), 'bad sample')}, {self.budget.samples} are allowed ({dict(self.counts)}); mend the data, "
                f"or allow more with on_error=ss.SkipBudget(samples=…); the last one: {text}"
            ) from error
