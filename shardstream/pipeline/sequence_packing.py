"""Pack token sequences of different lengths to rows of one length, for training without padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardstream.errors import OptionError, SampleError
from shardstream.format import Sample
from shardstream.order import derive_key
from shardstream.pipeline.rows import RowMaker, RowPart, common_length
from shardstream.pipeline.sample_steps import find_field
from shardstream.pipeline.stage import Context, Run, SourceRun, State
from shardstream.pipeline.stream_steps import BinningRun

Packing = Literal["concat", "first_fit"]
IGNORED = -100
"""Label of tokens without loss, as in ``torch.nn.functional.cross_entropy``."""
_STEP = "pack_sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSequences:
    """Pack one-dimensional fields to rows of ``length`` tokens.

    "concat" joins all sequences and cuts the result into rows; a sequence may continue in the next row. "first_fit" puts each
    whole sequence into the first open row with enough space (Johnson, 1973); rows are filled up with ``pad``.

    A row is a dict: the field, shape (length,), its dtype; ``segments``, shape (length,), int32: 1, 2, … for the sequences of
    the row, 0 for padding; ``positions``, shape (length,), int32: place of each token in its sequence, or in the piece of it that the row
    has, from 0; 0 for padding.

    Args:
        field: Field to pack.
        length: Tokens of a row.
        packing: "concat" or "first_fit", as above.
        pad: Token that fills up rows.
        open_rows: For "first_fit": maximum of open rows; beyond it the fullest row is returned.
        drop_last: For "concat": drop an incomplete last row instead of padding it.
    """

    field: str
    length: int
    packing: Packing = "concat"
    pad: int = 0
    open_rows: int = 64
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or self.open_rows < 1:
            raise OptionError(
                f"length={self.length} and open_rows={self.open_rows} must be at least 1"
            )
        if self.packing not in ("concat", "first_fit"):
            raise OptionError(f"packing is 'concat' or 'first_fit', not {self.packing!r}")

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        return (
            _ConcatRun(source, self, context)
            if self.packing == "concat"
            else _FirstFitRun(source, self, context)
        )


class _ConcatRun(SourceRun):
    """Run of "concat"; its state is the position before the current sequence, and the tokens used of it."""

    def __init__(self, source: Run, stage: PackSequences, context: Context) -> None:
        super().__init__(source)
        self._stage, self._skips = stage, context.skips
        self._state_before = source.state_dict()
        self._used = 0
        self._tokens: np.ndarray[Any, Any] | None = None

    @property
    def number(self) -> int:
        """Number of the row: several rows may end in one sequence, and have random numbers of their own."""
        return derive_key(self.source.number, self._used)

    def __next__(self) -> Sample:
        pieces: list[np.ndarray[Any, Any]] = []
        tokens_left = self._stage.length
        while tokens_left:
            if self._tokens is None or self._used >= len(self._tokens):
                if not self._next_sequence():
                    break
                continue
            piece = self._tokens[self._used : self._used + tokens_left]
            pieces.append(piece)
            self._used += len(piece)
            tokens_left -= len(piece)
        if not pieces or (tokens_left and self._stage.drop_last):
            raise StopIteration
        return make_row(pieces, self._stage.field, self._stage.length, self._stage.pad)

    def _next_sequence(self) -> bool:
        used = self._used if self._tokens is None else 0  # a resume continues inside its sequence
        while True:
            state_before = self.source.state_dict()
            try:
                item = next(self.source)
            except StopIteration:
                return False
            try:
                self._tokens = tokens_of(item, self._stage.field)
            except Exception as error:  # noqa: BLE001  (the skip policy decides)
                self._skips.skip_or_raise(error, item)
                continue
            self._state_before, self._used = state_before, used
            return True

    def state_dict(self) -> State:
        if self._tokens is not None and self._used >= len(self._tokens):
            return {"source": self.source.state_dict(), "used": 0}
        return {"source": self._state_before, "used": self._used}

    def load_state_dict(self, state: State) -> None:
        self._state_before, self._used, self._tokens = state["source"], state["used"], None
        self.source.load_state_dict(self._state_before)


class _FirstFitRun(BinningRun):
    def __init__(self, source: Run, stage: PackSequences, context: Context) -> None:
        super().__init__(source, context.skips, stage.length)
        self._stage = stage
        self._num_rows = 0

    def choose_bin(self, item: Any) -> tuple[Hashable, int] | None:
        size, length = len(tokens_of(item, self._stage.field)), self._stage.length
        if size == 0:
            return None
        if size > length:
            raise SampleError.of(
                item,
                f"a sequence of {size} tokens does not fit a row of {length}; cut it in a map, or use packing='concat'",
                field=self._stage.field,
            )
        row = next((row for row, filled in self.filled.items() if filled + size <= length), None)
        if row is None:
            self._num_rows += 1
            row = self._num_rows
        return row, size

    def is_overflowing(self) -> bool:
        return len(self.filled) > self._stage.open_rows

    def batch(self, items: list[Any]) -> Sample:
        pieces = [tokens_of(item, self._stage.field) for item in items]
        return make_row(pieces, self._stage.field, self._stage.length, self._stage.pad)


def check_packing(packing: str, long: str, *, repack: bool, drop_last: bool) -> None:
    """Check options of rows whose lengths are known before.

    Raises:
        OptionError: If one is unknown, or two exclude each other.
    """
    if packing not in ("best_fit", "concat"):
        raise OptionError(f"with lengths= packing is 'best_fit' or 'concat', not {packing!r}")
    if long not in ("split", "cut", "error"):
        raise OptionError(f"long is 'split', 'cut' or 'error', not {long!r}")
    if packing == "concat" and (repack or long != "split"):
        raise OptionError(
            "packing='concat' cuts all sequences in their order: long= and repack= are for 'best_fit'"
        )
    if packing == "best_fit" and drop_last:
        raise OptionError(
            "drop_last= is for packing='concat': rows of 'best_fit' hold whole sequences, none of which are left out"
        )


def check_row_fields(fields: Sequence[str], *, labels: bool) -> None:
    """Check that the fields of a row have different names.

    Raises:
        OptionError: If two have one name: one would replace the other.
    """
    names = Counter([*fields, "segments", "positions", *["labels"] * labels])
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise OptionError(
            f"{_STEP}: a row would have {', '.join(twice)} twice; give the field another name with rename()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(RowMaker):
    """Makes rows of sequences whose lengths were known when the rows were planned (see `BestFitRows`, `ConcatRows`).

    A row is a dict: each field, shape (length, ...), filled up with ``pad`` (others with 0); ``segments`` and ``positions`` as in
    `PackSequences`, of which `cu_seqlens` computes what attention of variable length takes; ``__key__`` and ``__url__`` are those of its first sample.

    Args:
        fields: Fields that are packed, with one length in each sample, shape (n, ...); the first one has whole numbers, shape (n,).
        length: Tokens of a row.
        keep: Other fields: the row has a list of their values, one for each sequence; those of ``__key__`` are ``__keys__``.
        labels: Whether to add ``labels``, shape (length,), int64: the tokens of the first field, but -100 for padding and the first token of
            each sequence, so that no loss crosses documents (as in transformers' ``DataCollatorWithFlattening``).
        pad: Token that fills up the first field.
    """

    fields: tuple[str, ...]
    length: int
    keep: tuple[str, ...] = ()
    labels: bool = False
    pad: int = 0

    def length_of(self, sample: Any) -> int | None:
        """Return the length of the sequences of a sample; None if no field is packed.

        Raises:
            SampleError: If it lacks one, or they differ.
        """
        if not self.fields:
            return None
        tokens_of(sample, self.fields[0])
        return common_length(sample, self.fields, _STEP)

    def make(self, parts: Sequence[RowPart]) -> Sample:
        """Return the row of some sequences, or of pieces of them."""
        row: Sample = {name: parts[0].sample.get(name) for name in ("__key__", "__url__")}
        if self.fields:
            first = self.fields[0]
            pieces = [tokens_of(part.sample, first)[part.start : part.stop] for part in parts]
            row |= make_row(pieces, first, self.length, self.pad)
            row |= {name: self._joined(parts, name) for name in self.fields[1:]}
            if self.labels:
                is_first = np.diff(row["segments"], prepend=0) != 0
                row["labels"] = np.where(
                    is_first | (row["segments"] == 0), IGNORED, row[first].astype(np.int64)
                )
        for name in self.keep:
            row[f"{name[:-2]}s__" if name.startswith("__") else name] = [
                part.value(find_field(name, part.sample, _STEP)) for part in parts
            ]
        return row

    def _joined(self, parts: Sequence[RowPart], names: str) -> np.ndarray[Any, Any]:
        pieces = [
            np.asarray(part.sample[find_field(names, part.sample, _STEP)])[part.start : part.stop]
            for part in parts
        ]
        joined = np.concatenate(pieces, dtype=_common_dtype(pieces, names))
        rest = np.zeros((self.length - len(joined), *joined.shape[1:]), joined.dtype)
        return np.concatenate([joined, rest])


def tokens_of(item: Any, field: str) -> np.ndarray[Any, Any]:
    """Return a sequence of tokens, shape (n,), of whole numbers.

    Raises:
        SampleError: If it is something else.
    """
    tokens = np.asarray(item[find_field(field, item, _STEP)])
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SampleError.of(
            item,
            f"{_STEP} needs whole numbers of shape (n,), not {tokens.dtype} of shape {tokens.shape}; decode them first",
            field=field,
        )
    return tokens


def make_row(pieces: Sequence[np.ndarray[Any, Any]], field: str, length: int, pad: int) -> Sample:
    """Return a row of sequences, or of pieces of them.

    Raises:
        SampleError: If their integer types have no common one.
        OptionError: If it does not hold ``pad``.
    """
    dtype = _common_dtype(pieces, field)
    limits = np.iinfo(dtype)
    if not limits.min <= pad <= limits.max:
        raise OptionError(
            f"pad={pad} is no {dtype}, the type of {field!r}: it holds {limits.min} to {limits.max}; choose another, or convert tokens in a map"
        )
    row = np.full(length, pad, dtype=dtype)
    segments, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    position = 0
    for number, piece in enumerate(pieces, start=1):
        end = position + len(piece)
        row[position:end], segments[position:end] = piece, number
        # Also of a later piece from 0: transformers finds the sequences of a row by the zeros.
        positions[position:end] = np.arange(len(piece))
        position = end
    return {field: row, "segments": segments, "positions": positions}


def _common_dtype(pieces: Sequence[np.ndarray[Any, Any]], field: str) -> np.dtype[Any]:
    """Return the type of a row of pieces, which holds their whole numbers exactly.

    Raises:
        SampleError: If there is none.
    """
    dtype = np.result_type(*{piece.dtype for piece in pieces})
    if dtype.kind not in "iu" and any(piece.dtype.kind in "iu" for piece in pieces):
        kinds = sorted({str(piece.dtype) for piece in pieces})
        raise SampleError(
            f"sequences of {kinds} have no common integer type; convert them in a map", field=field
        )
    return dtype
