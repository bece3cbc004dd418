"""Answer the questions of the page about one dataset: the room's functions, with the dataset that is open."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardstream.catalog import Classes, StoredClassNames
from shardstream.display import (
    Picture,
    choose_thumbnail,
    extension,
    image_size,
    kinds_of,
    render,
    render_value,
)
from shardstream.errors import OptionError, ShardStreamError, describe_error, get_logger, redact
from shardstream.order import StepBalance
from shardstream.pipeline import (
    BASIC,
    BadSample,
    Balance,
    IndexedSource,
    OrderOptions,
    SamplesSource,
    balance_of,
)
from shardstream.samples import Numbers
from shardstream.storage import LazyShards, Storage
from shardstream.viewer import page
from shardstream.viewer.columns import (
    NO_COLUMNS,
    Histogram,
    Selections,
    histograms_of_samples,
    histograms_of_table,
)
from shardstream.viewer.epoch_view import Stored, Training, continued, read_state, view_epoch
from shardstream.viewer.samples import (
    BrokenSample,
    FoundSample,
    IndexedSamples,
    Shown,
    ViewedSamples,
    open_samples,
)

_log = get_logger(__name__)

PAGE_SAMPLES = 50
"""Samples of a page, unless the page asks for another number."""
MAX_PAGE = 200
"""Most samples of a page."""
_COUNTED = 200  # samples that are read for histograms without columns
_CLASSES_SENT = 2000
_MAX_LISTED = 10_000  # bad samples
_BAD_NAMES = frozenset(field.name for field in fields(BadSample))

UserDecode = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A sample as bytes by field, with ``__key__`` and ``__url__`` -> values to show by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """What is shown.

    Args:
        urls: The dataset.
        storage_options: ``storage_options`` of fsspec.
        version: Number or tag of a version of the dataset; None for the current one.
        bad: Reports of bad samples.
        decode: The user's function; None for none.
        training: Source of the dataset whose epochs are shown; None for all samples, or those of a condition.
    """

    urls: tuple[str, ...]
    storage_options: Mapping[str, Any]
    version: int | str | None = None
    bad: tuple[str, ...] = ()
    decode: UserDecode | None = None
    training: IndexedSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Samples that the grid shows, and their order.

    Args:
        where: A condition on columns; "" chooses all.
        key: Part of a key; "" chooses all.
        sort: Column that orders them; "" keeps the order of the dataset, or of the search by key.
        descending: Whether the largest value comes first.
    """

    where: str = ""
    key: str = ""
    sort: str = ""
    descending: bool = False


ALL = Choice()
"""All samples in their order."""


class Session:
    """One dataset that is open; thread-safe.

    Args:
        options: What is shown.

    Raises:
        ShardStreamError: If the dataset or a report cannot be read.
    """

    def __init__(self, options: ViewOptions) -> None:
        self.options = options
        self.samples: ViewedSamples = open_samples(
            options.urls, options.storage_options, options.version
        )
        self._reported = read_reports(options.bad, options.storage_options)
        found = self.samples
        self._selections = None
        if isinstance(found, IndexedSamples):
            self._selections = Selections(found)
        self._last_balance: tuple[tuple[str, str], OrderOptions, StepBalance] | None = None

    def warm_up(self) -> None:
        """Read the first page, so that clients are open and indexes known when the browser asks."""
        try:
            self.page(0, PAGE_SAMPLES)
        except Exception as error:  # noqa: BLE001  (the page will show it)
            _log.debug("the first page cannot be read yet: %s", error)

    @cached_property
    def classes(self) -> Classes | None:
        """Names of the classes; None if there are none, or datasets differ."""
        try:
            return StoredClassNames(self.samples.located, self.samples.storage).names
        except ShardStreamError as error:
            _log.warning("the class names are unknown: %s", error)
            return None

    @cached_property
    def _bad(self) -> list[tuple[int | None, BadSample]]:
        """The reports of bad samples, each with its number in the dataset, None if it is not in these shards."""
        return [(self._number_of(one), one) for one in self._reported]

    @cached_property
    def _bad_of(self) -> dict[int, list[BadSample]]:
        found: dict[int, list[BadSample]] = {}
        for number, one in self._bad:
            if number is not None:
                found.setdefault(number, []).append(one)
        return found

    def _number_of(self, one: BadSample) -> int | None:
        """Find a bad sample by shard and offset: its number may be that of a subset."""
        if one.shard is None or one.offset is None:
            return None
        return self.samples.number_at(one.shard, one.offset)

    def bad(self) -> dict[str, Any]:
        """Return the list of bad samples that the page shows."""
        rows = [asdict(one) | {"number": number} for number, one in self._bad[:_MAX_LISTED]]
        return {"total": len(self._bad), "rows": rows}

    def dataset(self) -> dict[str, Any]:
        """Return what the page shows of the dataset."""
        located, catalog = self.samples.located, self.samples.catalog
        return {
            "urls": [redact(url) for url in self.options.urls],
            "samples": len(self.samples),
            "shards": len(located.shards),
            "bytes": None if catalog is None else catalog.total_bytes,
            "is_indexed": catalog is not None,
            "hint": self.samples.hint or self._scan_hint(),
            "columns": [] if self._selections is None else self._selections.names(),
            "classes": list(self.classes or ())[:_CLASSES_SENT],
            "num_classes": len(self.classes or ()),
            "bad": len(self._reported),
        }

    def _scan_hint(self) -> str:
        located = self.samples.located
        if isinstance(located.shards, LazyShards) or located.manifest_url is not None:
            return ""
        if all(shard.url in located.indexed for shard in located.shards):
            return ""
        return "The tars have no index and were scanned: run 'shardstream index' on the folder, so that this starts at once."

    def page(
        self, first: int, count: int, choice: Choice = ALL, *, at: int | None = None
    ) -> dict[str, Any]:
        """Return the cards of a page.

        Args:
            first: Place of the first sample among the chosen ones.
            count: Number of samples.
            choice: The samples, and their order.
            at: Show the page with the sample of this number instead.

        Raises:
            ShardStreamError: If the samples cannot be read, or a choice is invalid.
        """
        chosen, note = self._choose(choice)
        total = len(self.samples) if chosen is None else len(chosen)
        count = max(1, min(count, MAX_PAGE))
        if at is not None:
            self._check_number(at)
            places = np.array([at]) if chosen is None else np.flatnonzero(chosen == at)
            if not len(places):
                raise OptionError(f"the sample {at} is not among the {total:,} of this filter")
            first = int(places[0]) // count * count
        first = max(0, min(first, (max(total, 1) - 1) // count * count))
        shown = range(first, min(first + count, total))
        numbers = list(shown) if chosen is None else chosen[first : shown.stop].tolist()
        cards = [
            page.card_of(one, self.classes, self._bad_of.get(one.place.number, ()))
            for one in self.samples.find(numbers)
        ]
        return {
            "total": total,
            "first": first,
            "count": count,
            "note": note,
            "has_decode": self.options.decode is not None,
            "samples": cards,
        }

    def subset(self, choice: Choice) -> bytes:
        """Return the numbers of the chosen samples, in their order, as a ``.npy`` file that ``ShardDataset(subset=)`` reads.

        Raises:
            OptionError: If the choice is invalid, chooses none, or a search by key did not find all.
        """
        chosen, note = self._choose(choice)
        if note:
            raise OptionError(f"these are not all samples with this key, so none are saved: {note}")
        numbers = np.arange(len(self.samples)) if chosen is None else chosen
        if not len(numbers):
            raise OptionError("no sample fulfils the condition")
        stream = io.BytesIO()
        np.save(stream, numbers.astype(np.int64), allow_pickle=False)
        return stream.getvalue()

    def details(self, number: int) -> dict[str, Any]:
        """Return the details of a sample."""
        sample = self._find(number)
        cat = self._command("cat", "--number", str(number))
        if isinstance(sample, BrokenSample):
            return page.broken_details(sample, cat)
        found = page.details_of(
            sample,
            lambda name: self.samples.read_field(sample, name),
            self.classes,
            cat,
            self._bad_of.get(number, ()),
        )
        if self.options.decode is not None:
            found["decoded"] = self._decoded_details(sample)
        return found

    def histograms(self) -> dict[str, Any]:
        """Return the histograms of the columns of all samples, or of samples that are spread over the data."""
        total, reason = len(self.samples), ""
        if self._selections is not None:
            try:
                bars = histograms_of_table(self._selections.columns(), self.classes)
                return _counted(bars, exact=True, of=total, total=total)
            except OptionError as error:
                reason = str(error)
        numbers = np.unique(np.linspace(0, max(0, total - 1), min(total, _COUNTED)).astype(int))
        found = self.samples.find(numbers.tolist()) if total else []
        bars = histograms_of_samples(found, self.classes)
        is_exact = len(numbers) == total and self._selections is not None
        return _counted(bars, exact=is_exact, of=len(numbers), total=total, reason=reason)

    def epoch(self, values: Mapping[str, str], where: str = "") -> dict[str, Any]:
        """Return what each rank of a training reads at a step.

        Args:
            values: Fields of the form, see `Training`, and ``balance``, the column of the cost.
            where: The condition of ``ShardDataset(where=)``.
        """
        source, values = self._source(where, values)
        return self._view(Training.parse(values, source), source)

    def resume(self, state: str, values: Mapping[str, str], where: str = "") -> dict[str, Any]:
        """Return what comes after a saved state, on the topology that the page shows.

        Args:
            state: The state as JSON.
            values: Fields of the form; those of the order are replaced by the state's.
            where: The condition of ``ShardDataset(where=)``.
        """
        source, values = self._source(where, values)
        shown = Training.parse(values, source)
        source = source.with_options(nodes=shown.nodes, exchange=shown.exchange)
        training, source = read_state(state, source)
        return self._view(continued(training, shown), source)

    def _view(self, training: Training, source: IndexedSource) -> dict[str, Any]:
        assert self._selections is not None  # noqa: S101  (checked by `_source`)
        classes = self._selections.classes_of()
        stored = Stored(partial(self.samples.numbers_of, source.samples), classes, self.classes)
        found = view_epoch(training, source, stored)
        shown = {field.name: getattr(training, field.name) for field in fields(training)}
        balance = source.options.balance
        if self.options.training is None and isinstance(balance, Balance):
            shown["balance"] = balance.costs
        hint = "" if classes is not None else f"Classes are unknown: {NO_COLUMNS}."
        is_given = self.options.training is not None
        is_of_all = source.samples is self.samples.samples and source.balance is None
        if is_of_all and (arguments := training.plan_arguments()):
            found["command"] = self._command("plan", *arguments)
        more = {"training": shown, "hint": hint, "of_samples": len(self.samples)}
        return found | more | {"is_given": is_given}

    def _command(self, name: str, *arguments: str) -> str:
        version = self.options.version
        chosen = [] if version is None else ["--version", str(version)]
        words = [name, *self.options.urls, *arguments, *chosen]
        return page.command_line(words, self.options.storage_options)

    def _source(
        self, where: str, values: Mapping[str, str]
    ) -> tuple[IndexedSource, Mapping[str, str]]:
        """Return the samples of a training with the options of their order, and the fields of the form that it does not have."""
        column = values.get("balance", "").strip()
        values = {name: value for name, value in values.items() if name != "balance"}
        if self._selections is None:
            raise OptionError(
                "without an index shards are dealt out to workers, and no plan says which sample comes when; run 'shardstream index'"
            )
        if not len(self.samples):
            raise OptionError("the dataset has no samples")
        if self.options.training is None:
            samples = self._selections.samples(where)
            source = SamplesSource(samples=samples, shuffle=True)
            return (self._balanced(source, where, column) if column else source), values
        if where or column:
            raise OptionError(
                "the dataset of --dataset chooses its samples and their order; leave where and balance empty"
            )
        return self.options.training, values

    def _balanced(self, source: SamplesSource, where: str, column: str) -> SamplesSource:
        """Return a source with ``balance=``; the costs of the last one are kept, as pages ask for many steps."""
        kept = self._last_balance
        if kept is None or kept[0] != (where, column):
            options = OrderOptions(balance=column)
            costs = balance_of(options.balance, source.samples, shuffle=True)
            self._last_balance = kept = ((where, column), options, costs)
        return replace(source, options=kept[1], balance=kept[2])

    def picture(self, number: int, place: int, side: int, *, overlay: bool = False) -> Picture:
        """Return the picture of a field.

        Args:
            number: Number of the sample.
            place: Place of the field in the sample.
            side: Maximum of both sides, in pixels.
            overlay: As in `render`.
        """
        sample, name = self._field(number, place)
        kind = kinds_of(tuple(sample.fields))[name]
        return render(kind, name, self.samples.read_field(sample, name), side, overlay=overlay)

    def card_picture(self, number: int, side: int) -> Picture | str:
        """Return the picture of a card: of the user's function, or of the field that `choose_thumbnail` chooses; text if it has none.

        Args:
            number: Number of the sample.
            side: Maximum of both sides, in pixels.
        """
        if self.options.decode is not None:
            return self.decoded_picture(number, None, side)
        names = tuple(self._good(number).fields)
        chosen = choose_thumbnail(names).field
        return "" if chosen is None else self.picture(number, names.index(chosen), side)

    def card_layers(self, number: int, side: int) -> dict[str, Any]:
        """Return what lies over the picture of a card: masks, boxes, and the size in pixels that these count in.

        Args:
            number: Number of the sample.
            side: Maximum of both sides of a mask, in pixels.

        Returns:
            Nothing if the card has no picture, or one of the user's function. "problems" has the errors of masks and boxes.
        """
        sample = self._good(number)
        kinds = kinds_of(tuple(sample.fields))
        chosen = choose_thumbnail(tuple(sample.fields))
        if self.options.decode is not None or chosen.kind != "picture" or chosen.field is None:
            return {}
        found: dict[str, Any] = {"masks": [], "boxes": [], "problems": []}
        masks = page.masks_of(kinds)
        for name, kind in kinds.items():
            if name not in masks and not page.has_boxes(name, kind):
                continue
            try:
                data = self.samples.read_field(sample, name)
                if name in masks:
                    found["masks"].append((name, render(kind, name, data, side, overlay=True)))
                else:
                    found["boxes"] += page.boxes_of(BASIC[extension(name)](data))
            except Exception as error:  # noqa: BLE001  (decoders raise any error; the card shows it)
                found["problems"].append(f"{name}: {page.message_of(error)}")
        if found["boxes"]:
            found |= image_size(self.samples.read_field(sample, chosen.field))
        return found

    def decoded_picture(self, number: int, name: str | None, side: int) -> Picture | str:
        """Return the picture of a value of the user's function, or the values as text if there is none.

        Args:
            number: Number of the sample.
            name: Name of the value; None takes the first that has a picture.
            side: Maximum of both sides, in pixels.
        """
        values = self._decoded(self._good(number))
        for one, value in values.items():
            if name in (None, str(one)):
                picture = render_value(value, side)
                if picture is not None:
                    return picture
        return "\n".join(
            f"{one}: {page.describe_value(v).get('text', v)}" for one, v in values.items()
        )

    def part(self, number: int, place: int) -> tuple[FoundSample, str, int]:
        """Return a sample, the name of one of its fields, and the size of that."""
        sample, name = self._field(number, place)
        return sample, name, sample.fields[name][1]

    def _decoded(self, sample: FoundSample) -> Mapping[str, Any]:
        assert self.options.decode is not None  # noqa: S101  (asked by the callers)
        content = {name: self.samples.read_field(sample, name) for name in sample.fields}
        values = self.options.decode(
            {"__key__": sample.key, "__url__": sample.place.url, **content}
        )
        if not isinstance(values, Mapping):
            raise OptionError(
                f"the function of --decode returned {type(values).__name__}; it must return a dict of values by name"
            )
        return values

    def _decoded_details(self, sample: FoundSample) -> list[dict[str, Any]]:
        try:
            values = self._decoded(sample)
        except Exception as error:  # noqa: BLE001  (the user's code raises any error)
            return [{"name": "", "error": describe_error(error)}]
        return [
            {"name": str(name), "is_picture": render_value(value, 16) is not None}
            | ({} if isinstance(value, bytes) else page.describe_value(value))
            for name, value in values.items()
            if not str(name).startswith("__")
        ]

    def _choose(self, choice: Choice) -> tuple[Numbers | None, str]:
        """Return the numbers of the chosen samples, None for all, and what the user should know about them."""
        if choice == ALL:
            return None, ""
        if self._selections is None:
            raise OptionError(f"samples are chosen by their columns; {NO_COLUMNS}")
        numbers, note = self._selections.choose(choice.where) if choice.where else None, ""
        if choice.key:
            found, note = self._selections.search(choice.key)
            keyed = np.array(found, dtype=np.int64)
            numbers = keyed if numbers is None else keyed[np.isin(keyed, numbers)]
        if choice.sort:
            numbers = self._selections.sort(numbers, choice.sort, descending=choice.descending)
        return numbers, note

    def _check_number(self, number: int) -> None:
        if not 0 <= number < len(self.samples):
            raise OptionError(
                f"there is no sample {number}: they are numbered from 0 to {len(self.samples) - 1}"
            )

    def _find(self, number: int) -> Shown:
        self._check_number(number)
        return self.samples.find([number])[0]

    def _good(self, number: int) -> FoundSample:
        sample = self._find(number)
        if isinstance(sample, BrokenSample):
            raise OptionError(sample.message)
        return sample

    def _field(self, number: int, place: int) -> tuple[FoundSample, str]:
        sample = self._good(number)
        names = list(sample.fields)
        if not 0 <= place < len(names):
            raise OptionError(f"the sample has {len(names)} fields, not {place + 1}")
        return sample, names[place]


def _counted(
    histograms: list[Histogram], *, exact: bool, of: int, total: int, reason: str = ""
) -> dict[str, Any]:
    return {"exact": exact, "of": of, "total": total, "reason": reason, "histograms": histograms}


def read_reports(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> list[BadSample]:
    """Return the entries of reports of bad samples, each once.

    Args:
        urls: Paths or URLs of the reports, which ``SkipBudget(report=)`` writes.
        storage_options: ``storage_options`` of fsspec.

    Raises:
        OptionError: If a file is no such report.
        StorageError: If one cannot be read.
    """
    found: dict[BadSample, None] = {}
    for url in urls:
        storage = Storage(storage_options if "://" in url else None)
        found.update(dict.fromkeys(parse_report(storage.read_bounded(url), url)))
    return list(found)


def parse_report(data: bytes, url: str) -> list[BadSample]:
    """Return the entries of a report of bad samples.

    Raises:
        OptionError: If it is no such report.
    """
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not {"error", "message"} <= values.keys() <= _BAD_NAMES:
            raise OptionError(
                f"line {number} is no entry of a report of bad samples, as SkipBudget(report=) writes it; give another file",
                shard=url,
            )
        found.append(BadSample(**values))
    return found
