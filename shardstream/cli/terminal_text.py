"""Format sizes and tables for a terminal, and escape control characters."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


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


def human_bytes(count: int) -> str:
    """Format a number of bytes in decimal units.

    >>> human_bytes(999), human_bytes(256_000_000)
    ('999 B', '256.0 MB')
    """
    value = float(count)
    for unit in _UNITS:
        if value < 999.95 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


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
