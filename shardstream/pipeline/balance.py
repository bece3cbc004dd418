"""Costs of samples, by which ``balance=`` of `OrderOptions` deals them to the batches of a step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np

from shardstream.errors import OptionError
from shardstream.order import StepBalance
from shardstream.pipeline.stage import check_at_least, whole_number
from shardstream.samples import CostFunction, Lengths, Samples, costs_of


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Costs of samples, for ``balance=`` of `OrderOptions`: at each step all ranks get batches of about equal cost.

        ss.OrderOptions(balance=ss.Balance("n", cost=lambda n: n + n**2 / 8192))

    A round is one batch of each lane. The samples of `steps` rounds stay the same, and are dealt to their batches: large and small ones
    together, so that sums are equal. Only samples that cost more than a mean batch come in rounds of their own.

    Args:
        costs: Cost of each sample: the name of a column (``shardstream index URL --columns n=npy.len``), the path or URL of a ``.npy`` file, or
            one number for each (of ``subset`` and ``where``; in a mix those of all datasets, one after the other).
        cost: Function of all these numbers, shape (n,), float64, to the costs, of the same shape. Each process that opens the dataset calls
            it once; it must return the same on all ranks.
        steps: Rounds whose samples are dealt together. More of them balance better; fewer keep samples nearer to their place.
        group_size: Batches that wait for each other: ranks of a group x microbatches of a step, if only the ranks of one group work on a
            step together. By default all lanes, so that any number of ranks that divides the lanes is balanced.
        padded: A batch costs as its largest sample, as batches that are padded do: samples of similar cost make a batch.

    Raises:
        OptionError: If an option is out of range.
    """

    costs: Lengths
    _: KW_ONLY
    cost: CostFunction | None = None
    steps: int = 64
    group_size: int | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "group_size"):
            value = getattr(self, name)
            if value is not None:  # states hold them as JSON
                object.__setattr__(self, name, whole_number(name, value))
        check_at_least(1, steps=self.steps, group_size=self.group_size)


def balance_of(options: object, samples: Samples, *, shuffle: bool) -> StepBalance:
    """Return the costs of samples for the value of ``balance=`` of `OrderOptions`.

    Raises:
        OptionError: If there is no shuffle, a column is missing, or a cost is not a finite number of at least 0.
        StorageError: If columns or a file cannot be read.
    """
    if not shuffle:
        raise OptionError(
            "balance= deals samples to other batches, but shuffle=False keeps the stored order; pass shuffle=True, or leave balance= out"
        )
    assert isinstance(options, Balance)  # noqa: S101  (made by `OrderOptions`)
    costs = costs_of(samples, options.costs, "balance=", options.cost)
    most = max(float(costs.max(initial=0)), 1e-300)
    return StepBalance(
        # Relative to the largest one, so that neither a cost nor a sum of them is too large for float32.
        costs=np.divide(costs, most, out=np.empty(len(costs), np.float32), casting="same_kind"),
        steps=options.steps,
        group_size=options.group_size,
        padded=options.padded,
    )
