"""The steps of a chain under the names that WebDataset users know; each returns a new dataset with one more stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from shardstream.errors import OptionError
from shardstream.loader.collation import collate, load_tensors, to_tensor
from shardstream.pipeline import (
    BASIC,
    EXTENSIONS,
    IMAGE_NAMES,
    Batched,
    Compose,
    Decode,
    Decoder,
    GroupBatched,
    Handler,
    ImageDecoder,
    Leftover,
    Map,
    MapDict,
    MapTuple,
    PackSequences,
    Rename,
    Repeat,
    Select,
    Shuffle,
    Slice,
    Stage,
    ToTuple,
    Unbatched,
    check_at_least,
    find_field,
    installed_decoders,
)


class ItemSteps:
    """Steps on single samples: one item out for each."""

    @property
    def _num_stages(self) -> int:
        """Steps so far."""
        raise NotImplementedError

    def then(self, stage: Stage) -> Self:
        """Append a stage of your own: a frozen dataclass with ``open(source, context)``.

        An `ItemStage` has ``bind(context)`` instead, returns one item for each item, and keeps positions exact on any number of ranks
        and workers. See docs/extending.md.

        Args:
            stage: Can be pickled. Its fields are compared when a state is loaded where steps change counts.

        Raises:
            OptionError: If it is no stage, or changes counts in a dataset that is read by number.
        """
        raise NotImplementedError

    def decode(
        self,
        *handlers: str | Handler,
        only: str | Sequence[str] | None = None,
        fields: dict[str, str | Decoder] | None = None,
        max_side: int | None = None,
        upright: bool = False,
        masks: Sequence[str] | None = None,
        threads: int = 0,
    ) -> Self:
        """Decode fields by their last part: txt, cls, json, npy, npz, pt, …; images where a name such as "rgb8" is given.

        Image names: "l8", "rgb8", "rgba8" are uint8 arrays, shape (H, W) or (H, W, C); without the 8 float32 from 0 to 1; with
        "torch" in front tensors, shape (H, W) or (C, H, W); "pil" PIL images. "raw" gives the numbers that the file stores, in
        their own depth; "mask" one whole number for each pixel, shape (H, W). A file whose numbers a name cannot hold, such as
        16 bits or fractions for "rgb8", is a `DecodeError`. Of an animation the first frame is decoded, with an `ImageWarning`.

        Args:
            handlers: One image name, and WebDataset's functions ``handler(".jpg", data)``.
            only: Fields to decode; the others stay bytes.
            fields: Decoders of single fields, by name or last part: an image name, or ``function(data)``.
            max_side: Make larger images smaller, keeping their aspect, so that no side has more pixels. A JPEG is decoded in half
                the time or less where that halves it. Masks and palette images keep their numbers: the nearest pixel is taken.
                So it is with fields decoded as "mask" or "raw"; images with another name in ``fields`` keep their size.
            upright: Turn images as their EXIF orientation says. By default pixels come in the order that is stored, as in
                torchvision and WebDataset: boxes and masks must have been made for the same choice.
            masks: Fields that are masks. By default those with a word such as mask, seg, label or depth before their last part,
                and a png (or another lossless format) beside a jpg of the same name.
            threads: Decode in so many threads, in order; image decoders release the GIL.

        Raises:
            OptionError: If there is no such image name, or something else makes no sense.
        """
        check_at_least(0, threads=threads)
        check_at_least(1, max_side=max_side)
        names = [handler for handler in handlers if isinstance(handler, str)]
        functions = tuple(handler for handler in handlers if not isinstance(handler, str))
        if len(names) > 1:
            raise OptionError(
                f"decode takes one image name, not {names}; name fields: fields={{'seg.png': 'mask'}}"
            )
        table: dict[str, Decoder] = {**BASIC, "pt": load_tensors, "pth": load_tensors}
        # An installed package never changes what a name means that is known here: a jpg stays bytes unless an image name is given.
        ours = table.keys() | set(EXTENSIONS)
        table |= {name: one for name, one in installed_decoders().items() if name not in ours}
        mask_table = dict(table)
        for spec in names:
            decoder = ImageDecoder(
                spec=spec, to_tensor=to_tensor, max_side=max_side, upright=upright
            )
            table |= dict.fromkeys(EXTENSIONS, decoder)
            mask_table |= dict.fromkeys(EXTENSIONS, replace(decoder, is_mask=True))
        single = {
            name: _field_decoder(given, upright, max_side) for name, given in (fields or {}).items()
        }
        for function in functions:
            _check_callable(function)
        given = {"images": names, "max_side": max_side, "upright": upright, "fields": fields}
        stage = Decode(
            table=table | single,
            mask_table=mask_table | single,
            masks=None if masks is None else frozenset(_listed(masks)),
            handlers=functions,
            only=None if only is None else frozenset(_listed(only)),
            threads=threads,
            given={name: value for name, value in given.items() if value} or None,
        )
        return self.then(stage)

    def map(
        self,
        function: Callable[..., Any],
        *,
        rng: bool = False,
        threads: int = 0,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Apply ``function(item)``; with ``rng`` ``function(item, generator)``, a NumPy generator of that sample and epoch.

        Args:
            function: Returns the new item.
            rng: Pass a generator.
            threads: Call it in so many threads, in order.
            name: Where steps change counts, a state is refused if a function has another name than when it was saved. This is
                the name instead of the function's own, for one that was renamed or moved.
            version: Change it when the function does, so that states from before are refused.
        """
        check_at_least(0, threads=threads)
        stage = Map(
            function=function,
            rng=rng,
            purpose=self._num_stages,
            threads=threads,
            name=name,
            version=version,
        )
        return self.then(stage)

    def map_dict(self, **functions: Callable[[Any], Any]) -> Self:
        """Apply functions to single fields: ``map_dict(json=len)``."""
        return self.then(MapDict(functions=functions))

    def map_tuple(self, *functions: Callable[[Any], Any] | None) -> Self:
        """Apply the first function to the first element of each tuple, and so on; None leaves an element as it is."""
        return self.then(MapTuple(functions=functions))

    def rename(self, keep: bool = True, **names: str) -> Self:
        """Give fields new names: ``rename(image="jpg;png", label="cls")``; ``keep=False`` drops the others."""
        return self.then(Rename(names=names, keep=keep))

    def to_tuple(self, *names: str) -> Self:
        """Take fields in order: ``to_tuple("jpg;png", "cls")`` or ``to_tuple("jpg;png cls")``."""
        return self.then(ToTuple(names=tuple(part for name in names for part in name.split())))


class StreamSteps(ItemSteps):
    """And steps that change counts or order: positions are then kept per worker."""

    def select(
        self,
        predicate: Callable[[Any], bool],
        *,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Keep the items that ``predicate`` says yes to; ``name`` and ``version`` as in `map`."""
        return self.then(Select(predicate=predicate, name=name, version=version))

    def shuffle(self, window: int) -> Self:
        """Shuffle runs of ``window`` items of each worker, 0 for none; ``ShardDataset(shuffle=True)`` needs no such step."""
        if window == 0:
            return self
        return self.then(Shuffle(window=window, purpose=self._num_stages))

    def batched(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] = collate,
        partial: bool = True,
        *,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Collate items to batches within each worker; then use the loader with ``batch_size=None``."""
        return self.then(
            Batched(
                size=batch_size, collate=collate_fn, partial=partial, name=name, version=version
            )
        )

    def unbatched(self) -> Self:
        """Take batches apart again; after ``map(to_list)`` it is a flat-map that resumes at once."""
        return self.then(Unbatched())

    def map_batches(
        self,
        function: Callable[[Any], Any],
        batch_size: int,
        *,
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Collate ``batch_size`` items, apply ``function(batch)``, and take what it returns apart again."""
        return self.batched(batch_size).map(function, name=name, version=version).unbatched()

    def group_batched(  # noqa: PLR0913  (the public door)
        self,
        group: str | Callable[[Any], Any],
        batch_size: int,
        *,
        buffer: int = 1000,
        collate_fn: Callable[[list[Any]], Any] = collate,
        leftover: Leftover = "keep",
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Batch items that share a group: a field, or what ``group(item)`` returns (a shape, a length rounded up, …)."""
        function = _FieldOf(group) if isinstance(group, str) else group
        return self.then(
            GroupBatched(
                group=function,
                size=batch_size,
                buffer=buffer,
                collate=collate_fn,
                leftover=leftover,
                name=name,
                version=version,
            )
        )

    def pack_sequences(self, field: str, length: int, **options: Any) -> Self:
        """Pack token sequences to rows of ``length`` tokens: ``packing="concat"`` or ``"first_fit"``; see `PackSequences`."""
        return self.then(PackSequences(field=field, length=length, **options))

    def slice(self, *bounds: int | None) -> Self:
        """Take ``stop`` items, or those from ``start`` to ``stop`` by ``step``, of each worker, as ``itertools.islice``."""
        cut = slice(*bounds)
        start, step = cut.start or 0, 1 if cut.step is None else cut.step
        if start < 0 or step < 1 or (cut.stop is not None and cut.stop < 0):
            raise OptionError(f"slice{bounds} makes no sense: bounds of a stream are not negative")
        return self.then(Slice(start=start, stop=cut.stop, step=step))

    def repeat(self, times: int | None = None) -> Self:
        """Go through the epoch ``times`` times, or for ever."""
        return self.then(Repeat(times=times))

    def with_epoch(self, items: int) -> Self:
        """Let an epoch of each worker have exactly ``items`` items, by repeating or cutting."""
        return self.then(Repeat(items=items))

    def compose(
        self,
        *functions: Callable[[Iterator[Any]], Iterable[Any]],
        name: str | None = None,
        version: int | str | None = None,
    ) -> Self:
        """Put the stream through functions from iterator to iterator; a resume runs them from the epoch's start."""
        changed = self
        for function in functions:
            changed = changed.then(Compose(function=function, name=name, version=version))
        return changed


def _field_decoder(given: object, upright: bool, max_side: int | None) -> Decoder:
    """Return the decoder of a single field: an image name asks for this image, so a mask must not turn grey in silence."""
    if isinstance(given, str):
        decoder = ImageDecoder(spec=given, to_tensor=to_tensor, upright=upright)
        fits = max_side if decoder.keeps_numbers else None
        return replace(decoder, is_mask=decoder.makes_grey, max_side=fits)
    _check_callable(given)
    return given  # type: ignore[return-value]


def _check_callable(given: object) -> None:
    if not callable(given):
        raise OptionError(
            f"decode takes image names ({', '.join(IMAGE_NAMES)}) and functions, not {given!r}; "
            "decode() alone decodes text, numbers, JSON and arrays"
        )


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


@dataclass(frozen=True, slots=True)
class _FieldOf:
    """A group by the value of a field; a class, so that it can be pickled."""

    field: str

    def __call__(self, sample: Any) -> Any:
        return sample[find_field(self.field, sample, "group_batched")]
