"""The command line: ``shardstream pack|reshard|merge|index|verify|ls|cat|view|bench``."""

from shardstream.cli.app import command_tree, main
from shardstream.cli.field_preview import describe
from shardstream.cli.pack import parse_split

__all__ = [
    "command_tree",
    "describe",
    "main",
    "parse_split",
]
