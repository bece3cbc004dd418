"""Pack token sequences of different lengths to rows of one length, for training without padding."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardstream.errors import OptionError, SampleError
from shardstream.format import Sample
from shardstream.order import derive_key
from shardstream.pipeline.binning import BinningRun
from shardstream.pipeline.map import find_field
from shardstream.pipeline.stage import Context, Run, SourceRun, State

Packing = Literal["concat", "first_fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSequences:
    """Pack one-dimensional fields to rows of ``length`` tokens.

    "concat" joins all sequences and cuts the result into rows; a sequence may continue in the next row. "first_fit" puts each
    whole sequence into the first open row with enough space (Johnson, 1973); rows are filled up with ``pad``.

    A row is a dict: the field, shape (length,), its dtype; ``segments``, shape (length,), int32: 1, 2, … for the sequences of
    the row, 0 for padding; ``positions``, shape (length,), int32: place of each token in its sequence, 0 for padding.

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
        pieces: list[tuple[np.ndarray[Any, Any], int]] = []
        tokens_left = self._stage.length
        while tokens_left:
            if self._tokens is None or self._used >= len(self._tokens):
                if not self._next_sequence():
                    break
                continue
            piece = self._tokens[self._used : self._used + tokens_left]
            pieces.append((piece, self._used))
            self._used += len(piece)
            tokens_left -= len(piece)
        if not pieces or (tokens_left and self._stage.drop_last):
            raise StopIteration
        return _row(pieces, self._stage)

    def _next_sequence(self) -> bool:
        used = self._used if self._tokens is None else 0  # a resume continues inside its sequence
        while True:
            state_before = self.source.state_dict()
            try:
                item = next(self.source)
            except StopIteration:
                return False
            try:
                self._tokens = _tokens(item, self._stage)
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
        super().__init__(source, context.skips)
        self._stage = stage
        self._filled: dict[Hashable, int] = {}  # tokens of each open row
        self._num_rows = 0

    def choose_bin(self, item: Any) -> Hashable | None:
        size = len(_tokens(item, self._stage))
        if size == 0:
            return None
        if size > self._stage.length:
            raise SampleError(
                f"a sequence of {size} tokens does not fit a row of {self._stage.length}; cut it in a map, or use packing='concat'",
                shard=item.get("__url__"),
                key=item.get("__key__"),
                field=self._stage.field,
            )
        rows_that_fit = (
            row for row, filled in self._filled.items() if filled + size <= self._stage.length
        )
        row = next(rows_that_fit, None)
        if row is None:
            self._num_rows += 1
            row = self._num_rows
        self._filled[row] = self._filled.get(row, 0) + size
        return row

    def is_full(self, name: Hashable) -> bool:
        return self._filled[name] == self._stage.length

    def find_overflowing_bin(self) -> Hashable | None:
        return (
            max(self._filled, key=self._filled.__getitem__)
            if len(self._filled) > self._stage.open_rows
            else None
        )

    def keeps_incomplete(self) -> bool:
        return True

    def drop_bin(self, name: Hashable) -> None:
        del self._filled[name]

    def clear(self) -> None:
        self._filled.clear()

    def batch(self, items: list[Any]) -> Sample:
        return _row([(_tokens(item, self._stage), 0) for item in items], self._stage)


def _tokens(item: Any, stage: PackSequences) -> np.ndarray[Any, Any]:
    tokens = np.asarray(item[find_field(stage.field, item, "pack_sequences")])
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SampleError(
            f"pack_sequences needs whole numbers of shape (n,), not {tokens.dtype} of shape {tokens.shape}; decode them first",
            shard=item.get("__url__"),
            key=item.get("__key__"),
            field=stage.field,
        )
    return tokens


def _row(pieces: list[tuple[np.ndarray[Any, Any], int]], stage: PackSequences) -> Sample:
    dtype = np.result_type(*(piece for piece, _ in pieces))
    if dtype.kind not in "iu":
        kinds = sorted({str(piece.dtype) for piece, _ in pieces})
        raise SampleError(
            f"sequences of {kinds} have no common integer type; convert them in a map",
            field=stage.field,
        )
    row = np.full(stage.length, stage.pad, dtype=dtype)
    segments, positions = np.zeros(stage.length, np.int32), np.zeros(stage.length, np.int32)
    position = 0
    for number, (piece, start) in enumerate(pieces, start=1):
        end = position + len(piece)
        row[position:end], segments[position:end] = piece, number
        positions[position:end] = np.arange(start, start + len(piece))
        position = end
    return {stage.field: row, "segments": segments, "positions": positions}
