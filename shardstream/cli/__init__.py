"""The command line: ``shardstream pack|reshard|merge|index|verify|ls|cat|view|bench``.

app                    all commands, messages and exit codes
options                arguments that several commands share; the progress bar
pack, pack_progress    ``shardstream pack``
index_verify           ``shardstream index`` and ``shardstream verify``
ls_cat                 ``shardstream ls`` and ``shardstream cat``
reshard_merge          ``shardstream reshard`` and ``shardstream merge``
bench                  ``shardstream bench``
view                   ``shardstream view``
field_preview          short description of a field
terminal_text          sizes and tables as text; escape control characters
"""

from shardstream.cli.app import command_tree, main
from shardstream.cli.field_preview import describe
from shardstream.cli.pack import parse_split

__all__ = [
    "command_tree",
    "describe",
    "main",
    "parse_split",
]
