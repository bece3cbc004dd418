"""Skip or raise bad samples by one policy for the whole chain, and count the skipped ones and those that a step refuses."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from shardstream.errors import (
    IndexMismatchError,
    OptionError,
    SampleError,
    SkipBudgetError,
    StorageError,
    describe_error,
    get_logger,
    plural,
    shown,
)
from shardstream.pipeline.bad_sample_report import BadSample
from shardstream.samples import RefusedError

_log = get_logger(__name__)
_LISTED = 10_000  # in each worker and epoch; further ones are only counted
_FATAL = (OptionError, StorageError, IndexMismatchError, SkipBudgetError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipBudget:
    """Limit of bad samples to skip.

    Args:
        samples: Maximum in each loader worker and epoch; one more is an error.
        warn: Log each skipped sample as a warning.
        report: Path or URL of a file in which a `ShardLoader` lists them, one line of JSON each: shard, offset, number, key, field,
            error. With several ranks its name needs ``{rank}``. Lines of earlier runs stay.
            Written with the dataset's storage options if its protocol is that of the shards. If it cannot be written, a
            `ReportWarning` is issued and training continues.
        refill: A `ShardLoader` replaces bad samples, and those that ``select`` refuses, by other good samples of the epoch, so that all
            batches keep their size on all ranks, as losses over gathered batches need. Replacements appear twice in the epoch;
            `ShardLoader.refilled` counts them.
            Without it, batches shrink by the number of these samples, and ranks may differ at a step. A `ShardLoader` refuses it with
            batch_size=None and after steps that change counts; it has no effect without a `ShardLoader`.
    """

    samples: int = 100
    warn: bool = False
    report: str | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise OptionError(f"SkipBudget: samples must be at least 0, not {self.samples}")


OnError = Literal["raise", "warn", "skip"] | SkipBudget


class SkipTracker:
    """Apply a skip policy and count the bad samples.

    Args:
        on_error: "raise" stops at the first; "skip" and "warn" skip up to 100; a `SkipBudget` sets the limit.
        can_refuse: Whether steps may refuse items; else a refused item is an error.
    """

    def __init__(self, on_error: OnError = "raise", *, can_refuse: bool = True) -> None:
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
        """All samples of each part of a mix, not only bad ones."""
        self.refilled = 0
        """Number of samples that replaced bad or refused ones."""
        self.refused = 0
        """Number of items that steps refused, and of samples that were deleted since."""
        self._can_refuse = can_refuse
        self.drained: list[BadSample] = []
        """Bad samples since the last `drain_bad_samples`."""

    def drain_bad_samples(self) -> list[BadSample]:
        """Return the bad samples since the last call."""
        drained, self.drained = self.drained, []
        return drained

    def skip_or_raise(self, error: Exception, item: Any = None, number: int | None = None) -> None:
        """Count a bad or refused sample, or raise its error again.

        Args:
            error: Error of the sample.
            item: Item that caused it, if known; a sample contains its key and shard.
            number: Number of the sample in the dataset, if known.

        Raises:
            Exception: The error itself if the policy is "raise", or if the sample is not the cause: a wrong option, a storage
                error, an index that does not match.
            SampleError: If it is refused and none may be.
            SkipBudgetError: If the budget is exceeded.
        """
        if isinstance(error, RefusedError):
            if not self._can_refuse:
                sample = item if isinstance(item, dict) else {}
                raise SampleError(
                    f"{error} refuses this sample, but here each number has a sample",
                    remedy="choose samples with where= or subset=, or leave by_number() out",
                    shard=sample.get("__url__"),
                    key=sample.get("__key__"),
                ) from None
            self.refused += 1
            return
        if isinstance(error, StopIteration):  # would silently end the epoch
            text = "a function of the pipeline raised StopIteration"
            raise RuntimeError(text) from error  # noqa: TRY004  (as PEP 479 does)
        if self.budget is None or isinstance(error, _FATAL):
            raise error
        self.counts[type(error).__name__] += 1
        if self.counts.total() <= _LISTED:
            self.drained.append(BadSample.of(error, item, number))
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = shown(describe_error(error) + (f" ({notes})" if notes else ""))
        _log.log(
            logging.WARNING if self.budget.warn else logging.INFO, "skipped a sample: %s", text
        )
        if self.counts.total() > self.budget.samples:
            raise SkipBudgetError(
                f"skip budget exceeded: {plural(self.counts.total(), 'bad sample')}, limit {self.budget.samples} ({dict(self.counts)}); "
                f"fix the data, or allow more with on_error=ss.SkipBudget(samples=…) (docs/faults.md); last error: {text}"
            ) from error
