"""The command line: ``shardstream pack|index|verify|ls|cat|view``.

app                    all commands, messages and exit codes
options                arguments that several commands share; the progress bar
pack, pack_progress    ``shardstream pack``
index_verify           ``shardstream index`` and ``shardstream verify``
ls_cat                 ``shardstream ls`` and ``shardstream cat``
view                   ``shardstream view``
field_preview          short description of a field
terminal_text          sizes and tables as text; escape control characters
"""

from shardstream.cli.app import main
from shardstream.cli.field_preview import describe
from shardstream.cli.pack import parse_split

__all__ = [
    "describe",
    "main",
    "parse_split",
]
