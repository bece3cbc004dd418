"""Format tables for a terminal, and escape control characters."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    r"""Escape control, format and private characters, and lone surrogates.

    >>> printable("a\x1b[31m\n\u202e")
    'a\\x1b[31m\\n\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(text: str, limit: int) -> str:
    """Cut a text to ``limit`` characters, including an ellipsis.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def aligned(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Format rows as columns, two spaces apart.

    Args:
        rows: Rows of equal length.
        right: Numbers of the right-aligned columns.

    >>> aligned([("a", "1"), ("bcd", "10")], right=frozenset({1}))
    ['a     1', 'bcd  10']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
