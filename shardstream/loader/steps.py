"""Dataset methods with WebDataset's names; each returns a new dataset with one more stage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import get_worker_info

from shardstream.errors import OptionError
from shardstream.loader.collation import collate
from shardstream.loader.decoding import DecodeStep, as_list
from shardstream.order import (
    BatchLimits,
    BestFitRows,
    ConcatRows,
    CostBatches,
    Long,
    RowPlan,
    WindowRows,
)
from shardstream.pipeline import (
    Batched,
    Batches,
    Compose,
    GroupBatched,
    IndexedSource,
    Map,
    MapDict,
    MapTuple,
    PackedRows,
    Packing,
    PackSequences,
    Rename,
    Repeat,
    RowMaker,
    SampleWindows,
    Select,
    Shuffle,
    Slice,
    ToTuple,
    Unbatched,
    Windows,
    check_at_least,
    check_packing,
    check_row_fields,
    find_field,
    whole_number,
)
from shardstream.samples import (
    CostFunction,
    Lengths,
    costs_of,
    lengths_of,
    run_lengths,
)


class ItemSteps(DecodeStep):
    """Steps that yield one item per item, or none of it."""

    @property
    def _num_stages(self) -> int:
        """Number of stages so far."""
        raise NotImplementedError

    def _refuse_transform(self, _transform: object) -> None:
        raise OptionError(
            "a transform that is set on a dataset is not called; append it with map or map_tuple (docs/trainers.md, timm); a class of your own that calls one "
            "stores it under another name"
        )

    transform = property(None, _refuse_transform)  # torchvision's datasets have one that can be set

    def map(
        self,
        function: Callable[..., Any],
        *,
        rng: bool | Literal["torch"] = False,
        threads: int = 0,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Apply ``function(item)`` to each item; with ``rng=True``, ``function(item, generator)``.

        Args:
            function: Returns the new item.
            rng: True passes a NumPy generator, seeded by sample and epoch. "torch" calls ``function(item)`` with the global generators
                of torch, NumPy and Python seeded so, for functions that draw from these (torchvision's transforms), and restores
                them afterwards.
            threads: Number of threads that call it, in order.
            name: Replaces the function's own name, for a function that was renamed or moved: if steps change counts, a state is
                refused when a function's name differs from the saved one.
            version: Change it when the function changes, so that older states are refused.

        Raises:
            OptionError: If ``rng`` is "torch" with threads, which share the global generators, or an argument is invalid.
        """
        check_at_least(0, threads=threads)
        seeded = _seeding(rng)
        if rng == "torch" and threads:
            raise OptionError(
                "map(rng='torch') works without threads, because they share the global generators; use more workers"
            )
        stage = Map(
            function=seeded(function),
            rng=bool(rng),
            purpose=self._num_stages,
            threads=threads,
            name=name,
            version=version,
        )
        return self.then(stage)

    def map_dict(self, **functions: Callable[[Any], Any]) -> Self:
        """Apply functions to single fields: ``map_dict(json=len)``."""
        return self.then(MapDict(functions=functions))

    def map_tuple(
        self, *functions: Callable[..., Any] | None, rng: bool | Literal["torch"] = False
    ) -> Self:
        """Apply the first function to the first element of each tuple, and so on; None leaves an element as it is.

        ``rng`` is as in `map`: the functions of a tuple draw in order, each its own numbers.
        """
        seeded = _seeding(rng)
        chosen = tuple(None if one is None else seeded(one) for one in functions)
        return self.then(MapTuple(functions=chosen, rng=bool(rng), purpose=self._num_stages))

    def rename(self, keep: bool = True, **names: str) -> Self:
        """Give fields new names: ``rename(image="jpg;png", label="cls")``; ``keep=False`` drops the others."""
        return self.then(Rename(names=names, keep=keep))

    def to_tuple(self, *names: str) -> Self:
        """Take fields in order: ``to_tuple("jpg;png", "cls")`` or ``to_tuple("jpg;png cls")``."""
        return self.then(ToTuple(names=tuple(part for name in names for part in name.split())))

    def select(
        self,
        predicate: Callable[[Any], bool],
        *,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Keep the items that ``predicate`` accepts.

        A refused sample leaves a hole: the order, the steps of a `ShardLoader` and its state count it, so a resume works on any number of
        ranks and workers, and ``len`` of the dataset is an upper bound. A batch is shorter by its refused samples. Where none is left, one
        rank alone gets no batch for that step, and of several ranks each draws an accepted sample of the epoch instead. With
        ``on_error=ss.SkipBudget(refill=True)`` all batches are filled so. ``loader.stats()`` counts refused samples, and ``by_number()``
        raises an error for them. To read none of them, and to know their number, choose with ``where=`` or ``subset=``.

        After a step that changes counts, such as ``batched``, the next items fill the batches, as without numbers.

        Args:
            predicate: Returns whether to keep an item.
            name: As in `map`.
            version: As in `map`.

        Raises:
            OptionError: If the predicate returns objects that are always true.
        """
        return self.then(Select(predicate=predicate, name=name, version=version))


class StreamSteps(ItemSteps):
    """All steps, also those that change counts or order; these keep a position per worker."""

    def shuffle(self, window: int) -> Self:
        """Shuffle runs of ``window`` items of each worker; 0 is no shuffle. Not needed with ``ShardDataset(shuffle=True)``."""
        if window == 0:
            return self
        return self.then(Shuffle(window=window, purpose=self._num_stages))

    def batched(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] = collate,
        *,
        drop_last: bool = False,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Collate items to batches within each worker, for a loader with ``batch_size=None``; ``drop_last`` drops a short last one."""
        return self.then(
            Batched(
                size=batch_size,
                collate=collate_fn,
                drop_last=drop_last,
                name=name,
                version=version,
            )
        )

    def unbatched(self) -> Self:
        """Split batches into items; after ``map(to_list)`` it is a flat-map with cheap resume."""
        return self.then(Unbatched())

    def map_batches(
        self,
        function: Callable[[Any], Any],
        batch_size: int,
        *,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Collate ``batch_size`` items, apply ``function(batch)``, and split the result into items."""
        return self.batched(batch_size).map(function, name=name, version=version).unbatched()

    def group_batched(  # noqa: PLR0913  (the public door)
        self,
        group: str | Callable[[Any], Any],
        batch_size: int,
        *,
        buffer: int = 1000,
        collate_fn: Callable[[list[Any]], Any] = collate,
        drop_last: bool = False,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Batch items of equal group: a field, or the result of ``group(item)`` (a shape, …); see `GroupBatched`."""
        function = _FieldGetter(group) if isinstance(group, str) else group
        return self.then(
            GroupBatched(
                group=function,
                size=batch_size,
                buffer=buffer,
                collate=collate_fn,
                drop_last=drop_last,
                name=name,
                version=version,
            )
        )

    def _with_rows(
        self, make_plan: Callable[[IndexedSource], RowPlan], maker: RowMaker, step: str
    ) -> Self:
        """Return a dataset of rows that are made of the samples so far.

        Args:
            make_plan: Source of the samples -> the parts of each row.
            maker: Makes a row of its parts.
            step: Name of the step, for errors.
        """
        raise NotImplementedError

    def pack_sequences(  # noqa: PLR0913  (the public door)
        self,
        field: str | Sequence[str],
        length: int,
        *,
        lengths: Lengths | None = None,
        packing: Packing | Literal["best_fit"] | None = None,
        long: Long = "split",
        keep: str | Sequence[str] = (),
        labels: bool = False,
        repack: bool = False,
        pad: int = 0,
        open_rows: int = 64,
        drop_last: bool = False,
    ) -> Self:
        """Pack token sequences into rows of ``length`` tokens, for training without padding; see `PackedRows` and `PackSequences` for a row.

        With ``lengths`` the rows are planned before anything is read: their number is known, and order, states, splits and
        ``len`` are as exact as those of samples, on any ranks and workers. Sequences go to rows by best fit, within groups of neighbouring
        samples (over 99 % of the tokens of rows are filled if a row holds ten sequences in the mean). From here on, sizes in ``order=`` count rows.
        Without ``lengths`` each worker packs its own stream: a state continues on the same ranks and workers only, and ``len`` is not known.

        Args:
            field: Field to pack, of whole numbers, shape (n,); with ``lengths`` several of one length in each sample, such as ids and masks,
                or none: then rows only hold ``keep``.
            length: Tokens of a row.
            lengths: Tokens of each sample after the steps before: a column (``shardstream index URL --columns n=npy.len``), or one
                number for each sample. A sample of another length is an error.
            packing: "best_fit", the default with ``lengths``; "concat", the default without: all sequences one after the other, cut into rows;
                "first_fit", without ``lengths`` only: whole sequences into the first of some open rows.
            long: For "best_fit": what happens to a sequence longer than a row: "split" into several rows, "cut" after one row, or "error".
            keep: Fields whose values a row has as lists, one value for each sequence: pictures, keys (of ``"__key__"``, as ``__keys__``). Needs ``lengths``.
            labels: Add labels that do not cross documents. Needs ``lengths``.
            repack: For "best_fit": sequences meet others in each epoch, of the same neighbouring samples.
            pad: Token that fills up rows.
            open_rows: For "first_fit": maximum of open rows.
            drop_last: For "concat": drop an incomplete last row instead of padding it.

        Raises:
            OptionError: If an option is invalid, or the lengths are: null, negative, not one for each sample.
        """
        fields = tuple(as_list(field))
        kept = tuple(as_list(keep))
        check_at_least(1, length=length, open_rows=open_rows)
        check_row_fields((*fields, *kept), labels=labels)
        whole_number("pad", pad)
        if lengths is None:
            if len(fields) != 1 or kept or labels or repack or packing == "best_fit":
                raise OptionError(
                    "several fields, keep=, labels=, repack= and packing='best_fit' need lengths=: a column of the samples' lengths "
                    "(shardstream index URL --columns n=npy.len, then lengths='n')"
                )
            stage = PackSequences(
                field=fields[0],
                length=length,
                packing=packing or "concat",
                pad=pad,
                open_rows=open_rows,
                drop_last=drop_last,
            )
            return self.then(stage)
        packing = packing or "best_fit"
        check_packing(packing, long, repack=repack, drop_last=drop_last)
        if not fields and not kept:
            raise OptionError("pack_sequences needs a field to pack, or fields to keep=")

        def make_plan(source: IndexedSource) -> RowPlan:
            if not fields:  # else samples of other lengths are errors
                source.check_numbers(lengths, "lengths=", stacklevel=6)
            found = lengths_of(source.samples, lengths, "lengths=")
            if packing == "concat":
                return ConcatRows(found, length=length, drop_last=drop_last)
            return BestFitRows(
                found, length=length, long=long, is_new_each_epoch=repack, seed=source.seed
            )

        maker = PackedRows(fields=fields, length=length, keep=kept, labels=labels, pad=pad)
        return self._with_rows(make_plan, maker, "pack_sequences")

    def windows(
        self,
        field: str | Sequence[str] | None = None,
        *,
        size: int,
        stride: int | None = None,
        lengths: Lengths | None = None,
        group: str | None = None,
        drop_last: bool = False,
    ) -> Self:
        """Cut long samples, or runs of samples, into windows: each is a row, so ``len``, order and states are exact.

        ``windows("npy", size=16, stride=8, lengths="n")`` cuts a field: of an array its rows, of a decoded video its frames, of sound its
        samples, of a lazy field (``read=ss.ReadOptions(lazy=...)``) of a npy, wav or flac file only the bytes that are needed. A row is the
        sample with a part of the field, and ``__start__``. ``windows(size=16, group="episode")`` takes samples that follow each other, such as the
        steps of an episode: a row has the values of each field stacked, or as a list.

        Args:
            field: Field to cut, or several of one length.
            size: Elements of a window.
            stride: Elements between the starts of neighbouring windows; by default ``size``.
            lengths: Elements of each sample after the steps before: a column, or one number for each sample.
            group: Column that is the same for all samples of a run, which follow each other.
            drop_last: Leave out the elements after the last full window of a sample or run; else a last window is shorter.

        Raises:
            OptionError: If an option is invalid, or the lengths are: null, negative, not one for each sample; or samples of a group do not
                follow each other.
        """
        check_at_least(1, size=size, stride=stride)
        fields = () if field is None else tuple(as_list(field))
        if bool(fields) != (lengths is not None) or bool(fields) == (group is not None):
            raise OptionError(
                "windows takes a field with lengths=, or group= for windows of samples that follow each other"
            )

        def make_plan(source: IndexedSource) -> RowPlan:
            if lengths is not None:
                found = lengths_of(source.samples, lengths, "lengths=")
            else:
                found = run_lengths(source.samples, str(group))
            return WindowRows(
                found,
                size=size,
                stride=stride or size,
                drop_last=drop_last,
                of_runs=group is not None,
            )

        maker = Windows(fields=fields) if fields else SampleWindows()
        return self._with_rows(make_plan, maker, "windows")

    def batch_by_cost(  # noqa: PLR0913  (the public door)
        self,
        costs: Lengths,
        max_cost: float,
        *,
        cost: CostFunction | None = None,
        max_samples: int | None = None,
        padded: bool = True,
        multiple: int = 64,
        collate_fn: Callable[[list[Any]], Any] = collate,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Batch samples of similar length so that no batch costs more than ``max_cost``, such as padded tokens.

        The batches are planned before anything is read, so their number, order and states are exact. Read them with
        ``ShardLoader(dataset, batch_size=None)``: all ranks have the same number of steps. A batch holds samples of a group of neighbours; where
        the dataset shuffles, they meet others of their group in each epoch.

        Args:
            costs: Length or cost of each sample: a column (``shardstream index URL --columns n=npy.len``), or one number for each sample.
            max_cost: Maximum of a batch.
            cost: Function of these numbers, an array of shape (n,), to the costs, of the same shape: attention may cost ``n + n * n / 8192``.
            max_samples: Maximum of samples of a batch.
            padded: Whether a batch costs as if each of its samples were the longest; else the sum of their costs.
            multiple: The number of batches is a multiple of it, by halving some: so each sample comes once on any number of ranks that divides it.
            collate_fn: Makes a batch of a list of samples; sequences are padded here.
            name: As in `map`, of ``collate_fn``.
            version: As in `map`.

        Raises:
            OptionError: If an option is invalid, costs are null, negative, not finite or not one for each sample, or a sample
                alone costs too much.
        """
        check_at_least(1, max_samples=max_samples, multiple=multiple)
        limits = BatchLimits(
            max_cost=max_cost, max_samples=max_samples, padded=padded, multiple=multiple
        )

        def make_plan(source: IndexedSource) -> RowPlan:
            source.check_numbers(costs, "costs=", stacklevel=6)
            return CostBatches(
                costs_of(source.samples, costs, "costs", cost),
                limits,
                is_new_each_epoch=source.shuffle,
                seed=source.seed,
            )

        maker = Batches(collate=collate_fn, name=name, version=version)
        return self._with_rows(make_plan, maker, "batch_by_cost")

    def slice(self, *bounds: int | None) -> Self:
        """Slice the items of each worker by ``stop``, or ``start``, ``stop`` and ``step``, as ``itertools.islice``."""
        bounds_slice = slice(*bounds)
        start, step = bounds_slice.start or 0, 1 if bounds_slice.step is None else bounds_slice.step
        if start < 0 or step < 1 or (bounds_slice.stop is not None and bounds_slice.stop < 0):
            raise OptionError(
                f"slice{bounds}: start and stop of a stream must be at least 0, step at least 1"
            )
        return self.then(Slice(start=start, stop=bounds_slice.stop, step=step))

    def repeat(self, times: int | None = None) -> Self:
        """Repeat the epoch ``times`` times; None repeats without end."""
        return self.then(Repeat(times=times))

    def with_epoch(self, items: int) -> Self:
        """Set the epoch of each worker to exactly ``items`` items, by repeating or cutting."""
        return self.then(Repeat(items=items))

    def compose(
        self,
        *functions: Callable[[Iterator[Any]], Iterable[Any]],
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Apply functions from iterator to iterator; a resume reruns them from the epoch's start."""
        changed = self
        for function in functions:
            changed = changed.then(Compose(function=function, name=name, version=version))
        return changed


@dataclass(frozen=True, slots=True)
class SeededFunction:
    """Seed the global generators of torch (CPU), NumPy and Python from the sample's, call a function, and restore them.

    torchvision's transforms draw from torch's. Other threads of the process must not draw while the function runs.
    """

    function: Callable[[Any], Any]

    @property
    def __wrapped__(self) -> Callable[[Any], Any]:
        return self.function

    def __call__(self, item: Any, generator: np.random.Generator) -> Any:
        """Return ``function(item)``.

        Raises:
            OptionError: In a worker that is a thread.
        """
        if getattr(get_worker_info(), "worker_method", "") == "thread":
            raise OptionError(
                "rng='torch' seeds generators that all threads of the process share; use worker_method='multiprocessing', or "
                "rng=True, with which the function gets a generator of its own"
            )
        torch_seed, python_seed, numpy_seed = generator.integers(1 << 63, size=3).tolist()
        python_state = random.getstate()
        bit_generator = mtrand.get_bit_generator()
        # The generator is exchanged, as set_state takes 0.15 ms; that forgets the second number of a pair of Gaussians.
        numpy_state: Any = np.random.get_state(legacy=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                torch_seed
            )  # torch.manual_seed would seed GPUs, too
            mtrand.set_bit_generator(np.random.MT19937(numpy_seed))
            random.seed(python_seed)
            try:
                return self.function(item)
            finally:
                mtrand.set_bit_generator(bit_generator)
                if numpy_state["has_gauss"]:
                    np.random.set_state(numpy_state)
                random.setstate(python_state)


def _seeding(rng: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what changes the function of a step with ``rng``.

    Raises:
        OptionError: If ``rng`` is unknown.
    """
    if rng not in (True, False, "torch"):
        raise OptionError(f"rng must be True, False or 'torch', not {rng!r}")
    return SeededFunction if rng == "torch" else lambda function: function


@dataclass(frozen=True, slots=True)
class _FieldGetter:
    """Group function that returns a field; a class, so that it is picklable."""

    field: str

    def __call__(self, sample: Any) -> Any:
        return sample[find_field(self.field, sample, "group_batched")]
